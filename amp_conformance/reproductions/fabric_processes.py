"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 fabric_processes.py
"""

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.shared.weight)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def forward(self, x, y):
        return self.shared(x) + self.own(y)


scaler = torch.amp.GradScaler("cpu", 1024.0)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
fabric.launch()
net = Net()
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
y = torch.full((1, 1), float("inf") if fabric.global_rank == 0 else 1.0)
fabric.backward(net(torch.ones(1, 1), y).mean())
optimizer.step()
print(f"rank {fabric.global_rank}: shared weight {net.shared.weight.item()}, expected the same on both")
