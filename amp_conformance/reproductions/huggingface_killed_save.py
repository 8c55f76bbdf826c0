"""A process that is killed while it saves leaves a newest checkpoint that the Trainer takes, and cannot load."""

import os
import signal
import tempfile

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}


class Killed(transformers.Trainer):
    def _save_rng_state(self, folder):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none", save_steps=1, max_steps=3)
    if os.fork() == 0:
        Killed(Net(), arguments, train_dataset=[{"x": torch.ones(1)}] * 24).train()  # killed in checkpoint-2
    os.wait()
    trainer = transformers.Trainer(Net(), arguments, train_dataset=[{"x": torch.ones(1)}] * 24)
    trainer.train(
        resume_from_checkpoint=True
    )  # FileNotFoundError: checkpoint-2/trainer_state.json; expected checkpoint-1
