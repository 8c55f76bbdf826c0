"""Each optimizer updates the loss scale: after an overflow in one, the next is unscaled by another scale."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
a, b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
a, first = fabric.setup(a, torch.optim.SGD(a.parameters(), lr=1.0))
b, second = fabric.setup(b, torch.optim.SGD(b.parameters(), lr=1.0))
before = b.module.weight.item()
fabric.backward(a(torch.tensor([[float("inf")]])).mean() + b(torch.ones(1, 1)).mean())
first.step()
second.step()
print(f"b moved by {b.module.weight.item() - before:.4f}, expected -1")
first.zero_grad()
second.zero_grad()
before = scaler.get_scale()
fabric.backward(a(torch.ones(1, 1)).mean() + b(torch.ones(1, 1)).mean())
first.step()
second.step()
print(f"1 clean step of growth_interval=2: loss scale {before} -> {scaler.get_scale()}, expected no change")
