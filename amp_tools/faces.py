"""The protocol of insightface's verification.py: lfw.bin, cfp_fp.bin, agedb_30.bin, flip test, accuracy and TAR@FAR.

A .bin file is a pickle of (image files, whether the two images of each pair show one person). A pickle can run code;
here it can make lists, tuples, bytes and bools only, also as numpy's.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from amp_core.checkpoints.reading import read
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.rules import build
from amp_core.data.images import ImageFiles
from amp_core.data.prepare import ALIGNED
from amp_core.models import build_model
from amp_core.run.pretrained import load_pretrained
from amp_core.step.amp import Amp
from recipes.face_recognition import MODELS

_FOLDS = 10


def _dtype(name: str, *_: Any) -> np.dtype[Any]:
    if name not in ("u1", "b1"):
        raise pickle.UnpicklingError(f"an array of {name}")
    return np.dtype(name)


# What numpy's own pickles call; its module has another name in numpy 1 and 2.
_ADMITTED = {"ndarray": np.ndarray, "dtype": _dtype, "_reconstruct": np.empty(0).__reduce__()[0]}
_ADMITTED |= {"scalar": np.bool_(True).__reduce__()[0], "encode": lambda text, _: text.encode("latin1")}


class _Pairs(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name.partition(".")[0] in ("numpy", "_codecs") and global_name in _ADMITTED:
            return _ADMITTED[global_name]
        raise pickle.UnpicklingError(f"{module_name}.{global_name}, which could run code")


def read_bin(path: Path) -> tuple[list[bytes], NDArray[np.bool_]]:
    """(2 N image files, of which 2 i and 2 i + 1 are pair i; bool [N]: one person or two).

    ConfigError: the file holds something else.
    """
    try:
        with path.open("rb") as file:
            images, same = _Pairs(file, encoding="bytes").load()
        images = [image if isinstance(image, bytes) else image.astype(np.uint8).tobytes() for image in images]
        kinds = {type(value) for value in same}
        if not kinds <= {bool, np.bool_} or len(images) != 2 * len(same) or len(same) < _FOLDS:
            raise ValueError(f"{len(images)} images for {len(same)} pairs of {[kind.__name__ for kind in kinds]}")
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    except Exception as problem:  # an unpickler raises any kind
        what = "expected (list of image files, list of bool), two images per pair, and ten pairs at least"
        raise ConfigError(f"{path}: holds {problem}; {what}") from problem
    return images, np.array(same, dtype=bool)


class _Images:
    """The image files of a .bin file, as `ImageFiles` takes them."""

    def __init__(self, name: str, images: list[bytes]) -> None:
        self._name, self._images = name, images

    def opened(self, index: int) -> tuple[Any, str]:
        return io.BytesIO(self._images[index]), f"{self._name}, image {index}"


@torch.no_grad()
def embed(net: nn.Module, amp: Amp, faces: Any, batch_size: int = 64) -> NDArray[np.float64]:
    """Unit vectors [N, D]: the sum of the features of each image and of its mirror image, normalised."""
    parts = []
    for first in range(0, len(faces), batch_size):
        images = faces.__getitems__([(i, 0) for i in range(first, min(first + batch_size, len(faces)))])[0]
        images = images.to(amp.device)
        with amp.autocast():
            parts.append(net(images).float() + net(images.flip(3)).float())
    return F.normalize(torch.cat(parts).double()).cpu().numpy()


def verify_pairs(vectors: NDArray[np.float64], same: NDArray[np.bool_], far: float = 1e-3) -> dict[str, float]:
    """Metrics of unit vectors [2 N, D], in ten folds of consecutive pairs. A pair is accepted below a squared distance.

    accuracy: at the threshold, of 0 to 4 in steps of 0.01, that is best on the other folds. tar: share of same pairs
    that are accepted at the threshold where `far` of the different pairs of the other folds are, interpolated between
    steps of 0.001; 0 where no step accepts that many. far_found: the share that is accepted there.
    """
    distances = ((vectors[::2] - vectors[1::2]) ** 2).sum(1)
    coarse, fine = np.arange(0, 4, 0.01), np.arange(0, 4, 0.001)
    right = (distances[:, None] < coarse) == same[:, None]
    rows: list[tuple[float, float, float]] = []
    for held_out in np.array_split(np.arange(len(same)), _FOLDS):
        rest = np.ones(len(same), dtype=bool)
        rest[held_out] = False
        accuracy = right[held_out, right[rest].mean(0).argmax()].mean()
        refused = np.sort(distances[rest & ~same])
        rates = np.searchsorted(refused, fine, side="left") / max(len(refused), 1)
        threshold = np.interp(far, rates, fine) if rates[-1] >= far else 0.0
        accepted, is_same = distances[held_out] < threshold, same[held_out]
        tar, found = (accepted[kind].mean() if kind.any() else 0.0 for kind in (is_same, ~is_same))
        rows.append((accuracy, tar, found))
    means, spread = np.mean(rows, axis=0), np.std(rows, axis=0)
    return {"accuracy": means[0], "std": spread[0], "tar": means[1], "tar_std": spread[1], "far_found": means[2]}


def verify_run(run: Path, bins: list[Path], device: str = "cpu") -> dict[str, dict[str, float]]:
    """The metrics of a run of recipe=face_recognition, of its average if it has one, on each file."""
    # Before the network: a damaged file is found first.
    sets = {str(path.with_suffix("")): read_bin(path) for path in bins}
    cfg = build(read(run)["config"])
    if cfg.recipe["name"] != "face_recognition":
        raise ConfigError(f"{run}: is a run of recipe={cfg.recipe['name']}; expected face_recognition")
    size, amp = cfg.data.image_size or 112, Amp(cfg.amp, device, samples=cfg.batch_size)
    facts = {"image_shape": (3, size, size), "embedding": cfg.recipe["embedding"]}
    net = build_model(cfg.model.name, MODELS, options=cfg.model.options, **facts)
    load_pretrained(net, str(run))
    net = net.to(amp.device).eval()
    results = {}
    for name, (images, same) in sets.items():
        faces = ImageFiles(_Images(name, images), np.arange(len(images)), 0, size, False, 0, prepared=ALIGNED)
        try:
            results[name] = verify_pairs(embed(net, amp, faces), same)
        except RunError as problem:  # an image that is damaged
            raise ConfigError(f"{problem} in the .bin file") from problem
    return results
