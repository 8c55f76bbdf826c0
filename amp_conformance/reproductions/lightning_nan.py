"""Lightning steps on a NaN in bf16 (and in fp32): every weight is NaN from then on, and nothing is said."""

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
data = torch.utils.data.DataLoader([torch.tensor([x]) for x in (1.0, float("nan"), 1.0)])
options = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
Trainer(
    accelerator="cpu", max_epochs=1, **options, logger=False, enable_checkpointing=False, enable_progress_bar=False
).fit(net, data)
print(f"weight {net.net.weight.item()}, expected a finite one")
