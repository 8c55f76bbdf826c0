"""Each optimizer updates the loss scale: after an overflow in one, the next is unscaled by another scale."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision


class Net(LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))

    def training_step(self, x):
        self.manual_backward((self.a(x[:, :1]) + self.b(x[:, 1:])).float().mean())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=1.0) for net in (self.a, self.b)]


net, precision = Net(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0, growth_interval=2))
before = net.b.weight.item()
data = torch.utils.data.DataLoader([torch.tensor([float("inf"), 1.0])])
Trainer(
    accelerator="cpu",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(net, data)
print(f"b moved by {net.b.weight.item() - before:.4f}, expected -1")
