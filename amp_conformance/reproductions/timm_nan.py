"""The loop of timm's train.py in bf16 (and in fp32) steps on a NaN: every weight is NaN from then on."""

import torch
from timm.utils import dispatch_clip_grad

net = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in (1.0, float("nan"), 1.0):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.tensor([[x]])).float().mean()
    loss.backward()  # train.py: no loss scaler in bfloat16
    dispatch_clip_grad(net.parameters(), value=1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"weight {net.weight.item()}, expected a finite one")
