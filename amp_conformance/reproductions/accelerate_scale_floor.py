"""The loss scale falls towards 0 in silence."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
net = torch.nn.Linear(1, 1, bias=False)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(200):
    accelerator.backward(net(torch.full((1, 1), float("inf"))).mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"loss scale {accelerator.scaler.get_scale()}, expected at least 1, or an error")
