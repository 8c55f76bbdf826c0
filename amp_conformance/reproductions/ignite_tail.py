"""The last, shorter window of an epoch is dropped: the next epoch begins with zero_grad."""

import torch
from ignite.engine import create_supervised_trainer

net = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(net.weight)
trainer = create_supervised_trainer(
    net, torch.optim.SGD(net.parameters(), lr=1.0), lambda y, _: y.mean(), gradient_accumulation_steps=4
)
trainer.run([(torch.tensor([[float(x)]]), torch.zeros(1)) for x in (1, 2, 3, 4, 5, 6)])
print(f"weight {net.weight.item()}, expected {-(1 + 2 + 3 + 4) / 4 - (5 + 6) / 2}")
