"""clip_gradients in manual optimization sees gradients times the loss scale."""

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
            self.clip_gradients(optimizer, gradient_clip_val=10.0, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=1.0) for net in (self.a, self.b)]


net, precision = Net(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))
before = net.b.weight.item()
data = torch.utils.data.DataLoader([torch.ones(2)])
Trainer(
    accelerator="cpu",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(net, data)
print(f"b moved by {net.b.weight.item() - before:.4f}, expected -1: the norm, 1, is below 10")
