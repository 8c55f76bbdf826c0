"""Accelerate steps on a NaN in bf16 (and in fp32): every weight is NaN from then on, and nothing is said."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
net = torch.nn.Linear(1, 1, bias=False)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for x in (1.0, float("nan"), 1.0):
    accelerator.backward(net(torch.tensor([[x]])).mean())
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"weight {net.weight.item()}, expected a finite one")
