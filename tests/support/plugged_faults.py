"""Faults in one sample, in the networks of other trainers: `python plugged_faults.py TRAINER FAULT...` prints what the
doctor of `amp_plugins` has found, a line of JSON for each. Ranks as torchrun sets them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from amp_core.vision import import_torchvision

NUM_SAMPLES, BATCH, ACCUMULATION, BAD, FLAG = 32, 4, 2, 21, 100.0
FAULTS = {
    "healthy": None,
    "data": "bad input",
    "log": "division or logarithm of zero",
    "root": "division or logarithm of zero",
    "mask": "nothing left by a mask",
    "product": "overflow in a product",
}
"""Fault -> cause. `product` is in fp16, all others in bf16."""
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.fc = fault, nn.Linear(4, 8)
        with torch.no_grad():
            self.fc.weight[0, 0] = 8.0

    def forward(self, x: Tensor) -> Tensor:
        is_bad = x[:, :1] == FLAG
        h = self.fc(x)
        if self.fault == "product":
            h = self.fc(x.where(~is_bad, 3e4)) / 1e4
        if self.fault == "log":
            h = h + torch.log(1.0 - is_bad.float())
        if self.fault == "root":  # whose gradient is infinite at 0
            h = h + (h * ~is_bad).square().sum(1, keepdim=True).sqrt()
        if self.fault == "mask":
            scores = (h @ h.T).masked_fill(is_bad, -torch.inf)
            h = h + scores.softmax(-1) @ h
        return h


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Block(fault), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.head(self.block(x)).float()[:, 0] - labels).square().mean()}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if index == BAD and self.fault != "healthy":
            x[0] = torch.nan if self.fault == "data" else FLAG
        return {"x": x, "labels": torch.tensor(1.0)}


def accelerates(fault: str, folder: str) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATION)
    scaler = _scaler(accelerator, fault, doctor=True)
    net, loader = Net(fault), DataLoader(Samples(fault), BATCH)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True), loader)

    def compute_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return net(**batch)["loss"]

    if fault in ("data", "root"):  # the others are of networks that return a loss
        compute_loss = scaler.doctor.watch(compute_loss)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(compute_loss(net, batch))
                optimizer.step()
                optimizer.zero_grad()
    return scaler.doctor, net


def _scaler(accelerator: Any, fault: str, **settings: Any) -> Any:
    from amp_plugins import GradScaler
    from amp_plugins.accelerate import protect

    if fault != "product":
        return protect(accelerator, **settings)
    accelerator.state._mixed_precision = "fp16"  # which Accelerate does not offer on a CPU
    return protect(accelerator, GradScaler("cpu"), **settings)


def huggingfaces(fault: str, folder: str) -> Any:
    import transformers

    from amp_plugins.huggingface import HfDoctor

    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        bf16=True,
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        label_names=["labels"],
        ddp_backend="gloo" if NUM_RANKS > 1 else None,
    )
    trainer = transformers.Trainer(Net(fault), arguments, train_dataset=Samples(fault))
    _scaler(trainer.accelerator, fault)
    watching = HfDoctor(trainer)
    trainer.add_callback(watching)
    trainer.train()
    return watching.doctor, trainer.model


def lightnings(fault: str, folder: str) -> Any:
    from lightning.pytorch import LightningModule, Trainer

    from amp_plugins.lightning import AmpPrecision, LightningDoctor

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(fault)

        def train_dataloader(self) -> Any:
            samples = Samples(fault)
            ranked = DistributedSampler(samples, NUM_RANKS, trainer.global_rank, shuffle=False)
            return DataLoader(samples, BATCH, sampler=ranked)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=True)

    watching, module = LightningDoctor(), Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp" if NUM_RANKS > 1 else "auto",
        plugins=[AmpPrecision("16-mixed" if fault == "product" else "bf16-mixed", "cpu")],
        callbacks=[watching],
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATION,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return watching.doctor, module


def main(trainer: str, faults: list[str]) -> None:
    import_torchvision()
    from amp_plugins.doctor import agree

    run = {"accelerate": accelerates, "transformers": huggingfaces, "lightning": lightnings}[trainer]
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            doctor, net = run(fault, folder)
        reports = [each.to_dict() | {"text": str(each)} for each in doctor.reports]
        is_finite = all(agree(all(bool(p.isfinite().all()) for p in net.parameters())))
        row = {"fault": fault, "reports": reports, "finite": is_finite, "skipped": doctor.scaler.skipped}
        if os.environ.get("RANK", "0") == "0":
            print("\n" + json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
