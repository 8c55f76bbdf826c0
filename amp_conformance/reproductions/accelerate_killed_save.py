"""A process that is killed while it saves leaves a newest checkpoint that load_state() takes, and cannot load."""

import os
import signal
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def prepared(folder):
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    net = torch.nn.Linear(1, 1)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return accelerator


with tempfile.TemporaryDirectory() as folder:
    if os.fork() == 0:
        accelerator = prepared(folder)
        accelerator.save_state()  # checkpoint_0, whole
        accelerator.register_save_state_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        accelerator.save_state()  # checkpoint_1: killed
    os.wait()
    prepared(folder).load_state()  # FileNotFoundError in checkpoint_1; expected checkpoint_0
