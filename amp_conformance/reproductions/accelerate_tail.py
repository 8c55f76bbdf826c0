"""Accelerate divides the last, shorter window of an epoch by the full number of micro-batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader

accelerator = Accelerator(
    cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(4, sync_with_dataloader=True)
)
net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(net.weight)
loader = DataLoader([torch.tensor([float(x)]) for x in (1, 2, 3, 4, 5, 6)], batch_size=1)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), loader)
for x in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(x).mean())
        optimizer.step()
        optimizer.zero_grad()
print(f"weight {net.weight.item()}, expected {-(1 + 2 + 3 + 4) / 4 - (5 + 6) / 2}")
