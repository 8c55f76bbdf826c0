"""A checkpoint that was saved in fp32 cannot be loaded in fp16."""

import tempfile

import torch
from accelerate import Accelerator


def prepared(mode):
    accelerator = Accelerator(cpu=True)
    if mode == "fp16":
        accelerator.scaler = torch.amp.GradScaler("cpu")  # on a CPU as on a GPU
    net = torch.nn.Linear(1, 1)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return accelerator


with tempfile.TemporaryDirectory() as folder:
    prepared("fp32").save_state(folder)
    prepared("fp16").load_state(folder)  # FileNotFoundError: scaler.pt; expected a fresh loss scale
