"""The loss scale falls to 0 in silence."""

import torch
from ignite.engine import create_supervised_trainer


def forward(model, x):
    with torch.autocast("cpu", dtype=torch.float16):  # amp_mode has autocast for CUDA alone
        return model(x)


net = torch.nn.Linear(1, 1, bias=False)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
trainer = create_supervised_trainer(
    net, optimizer, lambda y, _: y.float().mean(), amp_mode="amp", scaler=scaler, model_fn=forward
)
trainer.run([(torch.full((1, 1), float("inf")), torch.zeros(1))] * 200)
print(f"loss scale {scaler.get_scale()}, expected at least 1, or an error")
