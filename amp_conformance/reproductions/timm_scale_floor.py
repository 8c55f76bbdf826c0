"""The loss scale falls to 0 in silence."""

import torch
from timm.utils import NativeScaler

net = torch.nn.Linear(1, 1, bias=False)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), NativeScaler(device="cpu")
for _ in range(200):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.full((1, 1), float("inf"))).float().mean()
    scaler(loss, optimizer, parameters=net.parameters())
    optimizer.zero_grad()
print(f"loss scale {scaler.state_dict()['scale']}, expected at least 1, or an error")
