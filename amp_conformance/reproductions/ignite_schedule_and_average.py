"""Handlers of the learning rate and EMAHandler move in steps that the GradScaler skips: no event tells of them."""

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import EMAHandler


def forward(model, x):
    with torch.autocast("cpu", dtype=torch.float16):  # amp_mode has autocast for CUDA alone
        return model(x)


def told():
    lr, average = optimizer.param_groups[0]["lr"], ema.ema_model.weight.item()
    print(f"iteration {trainer.state.iteration}: lr {lr}, average {average:.4f}")


net = torch.nn.Linear(1, 1, bias=False)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
trainer = create_supervised_trainer(
    net, optimizer, lambda y, _: y.float().mean(), amp_mode="amp", scaler=scaler, model_fn=forward
)
schedule, ema = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), EMAHandler(net, momentum=0.5)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
ema.attach(trainer)
trainer.add_event_handler(Events.ITERATION_COMPLETED, told)
trainer.run([(torch.full((2, 1), x), torch.zeros(2)) for x in (0.25, float("inf"), float("inf"))])
print("expected: lr and average of iteration 1 after all three")
