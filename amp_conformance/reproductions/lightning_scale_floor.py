"""The loss scale falls to 0 in silence."""

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
        return torch.optim.SGD(self.parameters(), lr=1.0)


precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))

data = torch.utils.data.DataLoader([torch.tensor([float("inf")])] * 200)
Trainer(
    accelerator="cpu",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Net(), data)
print(f"loss scale {precision.scaler.get_scale()}, expected at least 1, or an error")
