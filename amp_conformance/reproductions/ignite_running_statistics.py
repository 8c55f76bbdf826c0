"""A skipped step leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
from ignite.engine import create_supervised_trainer


def forward(model, x):
    with torch.autocast("cpu", dtype=torch.float16):  # amp_mode has autocast for CUDA alone
        return model(x)


net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
torch.nn.init.constant_(net[0].weight, 4.0)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
trainer = create_supervised_trainer(
    net, optimizer, lambda y, _: y.float().mean(), amp_mode="amp", scaler=scaler, model_fn=forward
)
trainer.run([(torch.full((4, 1), 6e4), torch.zeros(4))])  # 2.4e5 is inf in fp16
print(f"running mean {net[1].running_mean.item()}, expected 0.0")
