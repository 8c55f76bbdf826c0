"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 timm_processes.py
"""

import torch
from timm.utils import NativeScaler


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.shared.weight)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def forward(self, x, y):
        return self.shared(x) + self.own(y)


torch.distributed.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(Net())
optimizer, scaler, rank = torch.optim.SGD(net.parameters(), lr=1.0), NativeScaler("cpu"), torch.distributed.get_rank()
y = torch.full((4, 1), float("inf") if rank == 0 else 0.25)
with torch.autocast("cpu", dtype=torch.float16):
    loss = net(torch.full((4, 1), 0.25), y).float().mean()
scaler(loss, optimizer, parameters=net.parameters())
print(f"rank {rank}: shared weight {net.module.shared.weight.item()}, expected the same on both")
