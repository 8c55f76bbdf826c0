"""A step that Accelerate skips leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
torch.nn.init.constant_(net[0].weight, 4.0)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
accelerator.backward(net(torch.full((4, 1), 6e4)).mean())  # 2.4e5 is inf in fp16
optimizer.step()
print(f"skipped: {optimizer.step_was_skipped}, running mean {net[1].running_mean.item()}, expected 0.0")
