"""Lightning divides the last, shorter window of an epoch by the full number of micro-batches."""

import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, x):
        return self.net(x).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


net = Net()
torch.nn.init.zeros_(net.net.weight)
data = torch.utils.data.DataLoader([torch.tensor([float(x)]) for x in (1, 2, 3, 4, 5, 6)])
Trainer(
    accelerator="cpu",
    max_epochs=1,
    accumulate_grad_batches=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(net, data)
print(f"weight {net.net.weight.item()}, expected {-(1 + 2 + 3 + 4) / 4 - (5 + 6) / 2}")
