"""A NaN in fp32 is stepped on: every weight is NaN from then on, and nothing is said."""

import torch
from ignite.engine import create_supervised_trainer

net = torch.nn.Linear(1, 1, bias=False)
trainer = create_supervised_trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda y, _: y.mean())
trainer.run([(torch.tensor([[x]]), torch.zeros(1)) for x in (1.0, float("nan"), 1.0)])
print(f"weight {net.weight.item()}, expected a finite one")
