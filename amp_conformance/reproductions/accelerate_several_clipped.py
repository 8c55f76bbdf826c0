"""With two optimizers and clipping, the second is unscaled twice: its step is the loss scale times too small."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
net = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(2))
optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in net]
net, *optimizers = accelerator.prepare(net, *optimizers)
before = net[1].weight.item()
with accelerator.autocast():
    loss = net[0](torch.ones(1, 1)).float().mean() + net[1](torch.ones(1, 1)).float().mean()
accelerator.backward(loss)
accelerator.clip_grad_norm_(net.parameters(), 100.0)
for optimizer in optimizers:
    optimizer.step()
print(f"the second moved by {net[1].weight.item() - before:.6f}, expected -1")
