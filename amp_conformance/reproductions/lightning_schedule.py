"""The learning rate decays in steps that were skipped."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, x):
        return self.net(x).float().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))

net = Net()
data = torch.utils.data.DataLoader([torch.tensor([x]) for x in (1.0, float("inf"), 1.0, float("inf"), 1.0)])
trainer = Trainer(
    accelerator="cpu",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(net, data)
print(f"lr {trainer.optimizers[0].param_groups[0]['lr']} after 3 steps taken and 2 skipped, expected {0.5**3}")
