"""A skipped step leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))])
net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
torch.nn.init.constant_(net[0].weight, 4.0)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
fabric.backward(net(torch.full((4, 1), 6e4)).mean())  # 2.4e5 is inf in fp16
optimizer.step()
print(f"running mean {net.module[1].running_mean.item()}, expected 0.0")
