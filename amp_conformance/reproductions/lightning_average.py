"""EMAWeightAveraging moves in steps that were skipped."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, x):
        return self.net(x).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


averages, ema = [], EMAWeightAveraging(decay=0.5)
look = LambdaCallback(on_train_batch_end=lambda *_: averages.append(ema._average_model.module.net.weight.item()))
precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))
data = torch.utils.data.DataLoader([torch.tensor([x]) for x in (1.0, 1.0, float("inf"))])
Trainer(accelerator="cpu", max_epochs=1, plugins=[precision], callbacks=[ema, look], logger=False).fit(Net(), data)
print(f"average {averages[1]}, after a skipped step {averages[2]}, expected no change")
