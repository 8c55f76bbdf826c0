"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 lightning_processes.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.shared, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        torch.nn.init.zeros_(self.shared.weight)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def training_step(self, x):
        return (self.shared(x) + self.own(x * float("inf") if self.global_rank == 0 else x)).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_end(self):
        print(f"rank {self.global_rank}: shared weight {self.shared.weight.item()}, expected the same on both")


precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0))
data = torch.utils.data.DataLoader([torch.ones(1)] * 2)
Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    plugins=[precision],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
).fit(Net(), data)
