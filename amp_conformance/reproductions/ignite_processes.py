"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 ignite_processes.py
"""

import torch
from ignite.engine import create_supervised_trainer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.shared.weight)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):  # amp_mode has autocast for CUDA alone
            return self.shared(x[:, :1]) + self.own(x[:, 1:])


torch.distributed.init_process_group("gloo")
net, rank, scaler = (
    torch.nn.parallel.DistributedDataParallel(Net()),
    torch.distributed.get_rank(),
    torch.amp.GradScaler("cpu"),
)
trainer = create_supervised_trainer(
    net, torch.optim.SGD(net.parameters(), lr=1.0), lambda y, _: y.float().mean(), amp_mode="amp", scaler=scaler
)
x = torch.tensor([[0.25, float("inf") if rank == 0 else 0.25]] * 4)
trainer.run([(x, torch.zeros(4))])
print(f"rank {rank}: shared weight {net.module.shared.weight.item()}, expected the same on both")
