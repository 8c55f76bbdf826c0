"""Each optimizer updates the loss scale: after an overflow in one, the next is unscaled by another scale."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
a, b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in (a, b)]
a, b, *optimizers = accelerator.prepare(a, b, *optimizers)
before = b.weight.item()
accelerator.backward(a(torch.tensor([[float("inf")]])).mean() + b(torch.ones(1, 1)).mean())
for optimizer in optimizers:
    optimizer.step()
    optimizer.zero_grad()
print(f"b moved by {b.weight.item() - before:.4f}, expected -1")
accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for optimizer in optimizers:
    optimizer.scaler = scaler
accelerator.backward(a(torch.ones(1, 1)).mean() + b(torch.ones(1, 1)).mean())
for optimizer in optimizers:
    optimizer.step()
print(f"after 1 clean step of growth_interval=2 the loss scale is {scaler.get_scale()}, expected 1024.0")
