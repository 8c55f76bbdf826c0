"""A skipped step leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))

    def training_step(self, x):
        return self.net(x).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))

net = Net()
torch.nn.init.constant_(net.net[0].weight, 4.0)
data = torch.utils.data.DataLoader([torch.tensor([6e4])] * 4, batch_size=4)  # 2.4e5 is inf in fp16
Trainer(
    accelerator="cpu",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(net, data)
print(f"running mean {net.net[1].running_mean.item()}, expected 0.0")
