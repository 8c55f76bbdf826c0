"""The loss scale falls to 0 in silence."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

scaler = torch.amp.GradScaler("cpu", 1024.0)
fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
net = torch.nn.Linear(1, 1, bias=False)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(200):
    fabric.backward(net(torch.full((1, 1), float("inf"))).mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"loss scale {scaler.get_scale()}, expected at least 1, or an error")
