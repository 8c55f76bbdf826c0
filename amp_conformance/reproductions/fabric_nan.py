"""Fabric steps on a NaN in bf16 (and in fp32) that is not clipped: every weight is NaN, and nothing is said."""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
net = torch.nn.Linear(1, 1, bias=False)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for x in (1.0, float("nan"), 1.0):
    fabric.backward(net(torch.tensor([[x]])).mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"weight {net.module.weight.item()}, expected a finite one")
