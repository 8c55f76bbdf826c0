"""A skipped step leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
from timm.utils import NativeScaler

net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
torch.nn.init.constant_(net[0].weight, 4.0)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), NativeScaler(device="cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = net(torch.full((4, 1), 6e4)).float().mean()  # 2.4e5 is inf in fp16
scaler(loss, optimizer, parameters=net.parameters())
print(f"running mean {net[1].running_mean.item()}, expected 0.0")
