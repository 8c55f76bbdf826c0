"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 accelerate_processes.py
"""

import torch
from accelerate import Accelerator


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.shared.weight)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def forward(self, x, y):
        return self.shared(x) + self.own(y)


accelerator = Accelerator(cpu=True, mixed_precision="bf16")
accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
net = Net()
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
y = torch.full((1, 1), float("inf") if accelerator.process_index == 0 else 1.0)
accelerator.backward(net(torch.ones(1, 1), y).mean())
optimizer.step()
print(f"rank {accelerator.process_index}: shared weight {net.module.shared.weight.item()}, expected the same on both")
