"""The learning rate and ModelEmaV3 move in steps that NativeScaler skips: train.py cannot know of them."""

import torch
from timm.scheduler import StepLRScheduler
from timm.utils import ModelEmaV3, NativeScaler

net = torch.nn.Linear(1, 1, bias=False)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1.0), NativeScaler(device="cpu")
ema = ModelEmaV3(net, decay=0.5)
schedule = StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5, t_in_epochs=False)
for update, x in enumerate((0.25, float("inf"), float("inf")), 1):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.full((2, 1), x)).float().mean()
    scaler(loss, optimizer, parameters=net.parameters())  # its GradScaler skips the second and the third
    optimizer.zero_grad()
    ema.update(net)
    schedule.step_update(update)
    print(f"update {update}: lr {optimizer.param_groups[0]['lr']}, average {ema.module.weight.item():.4f}")
print("expected: lr and average of update 1 after all three")
