"""Samples of generative networks: files in samples/ of the run folder."""

from __future__ import annotations

import io

from torch import Tensor

from amp_core.checkpoints.folders import saving
from amp_core.config.files import write_whole
from amp_core.run.environment import Environment
from amp_core.vision import import_torchvision


def write_sample(env: Environment, name: str, data: bytes) -> None:
    """Write a file into samples/ of the run folder, on rank 0, whole or not at all (SaveError)."""
    if env.is_main and env.run_dir is not None:
        env.folder.check()
        file = env.run_dir / "samples" / name
        with saving(file):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, data)


def write_images(env: Environment, step: int, images: Tensor, like: Tensor) -> None:
    """Write images [B, C, H, W] as a PNG, eight in a row; black and white are the extremes of the pixels of `like`."""
    if env.is_main and env.run_dir is not None:
        png, (low, high) = io.BytesIO(), like.aminmax()
        ends = low.item(), high.item()
        import_torchvision().utils.save_image(images, png, "png", nrow=8, normalize=True, value_range=ends)
        write_sample(env, f"step_{step:08}.png", png.getvalue())
