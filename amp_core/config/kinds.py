"""What data sets hold, ours and others', and the checks of those in shards. Imports no torch but what others' do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.schema import DataConfig

KINDS = {
    "mnist_subset": "images", "synthetic": "images", "image_folder": "images", "imagenet": "images",
    "cifar10": "images", "torch_sources": "text", "torch_headers": "text", "text": "text", "tokens": "text",
    "chat": "text",
    "brain": "masks", "digit_scenes": "masks", "mask_folder": "masks", "glyphs": "identities",
    "identity_folder": "identities", "records": "identities", "synthetic_identities": "identities", "own": "own",
    "shards": "images", "hf": "images", "parquet": "images", "table": "table", "coco": "masks",
}  # fmt: skip
"""What a data set holds: `images` with a class each, `text` as bytes, `masks` of images, `identities` of images, the
rows of a `table`; `own` is what a recipe brings itself."""
TEXTS = ("text", "tokens", "chat")
"""Those of a user's own text."""

OWN_PARTS = ("KIND", "build")
"""What a user's data set, data/<name>.py, must have; it may have `check(cfg)`, a list of problems."""


def kind_of(name: str) -> str:
    """What a data set holds. ConfigError: it is a user's, and its file defines no data set."""
    if name in KINDS:
        return KINDS[name]
    from amp_core.config.options import load_own  # other runs need none of it

    module = load_own("data", name, OWN_PARTS)
    if module.KIND not in KINDS.values():
        raise ConfigError(
            f"{module.__file__}: KIND={module.KIND}: {suggest(str(module.KIND), sorted({*KINDS.values()}))}"
        )
    return module.KIND


FILES = ("image_folder", "imagenet", "shards", "hf", "parquet")
"""Those whose images are decoded, cropped and resized when they are read."""


def check_augment(cfg: DataConfig) -> Iterator[str]:
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


def check_stored(cfg: DataConfig) -> Iterator[str]:
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


def named_columns(cfg: DataConfig) -> dict[str, str]:
    """`data.columns` of data whose columns have a meaning."""
    return cfg.columns if isinstance(cfg.columns, dict) else {}


def check_coco(cfg: DataConfig) -> Iterator[str]:
    if cfg.path is None:
        yield "data.path=null: expected a json of COCO's instances, such as annotations/instances_train2017.json"
    for key, path in (("path", cfg.path), ("eval_path", cfg.eval_path)):
        if path is not None and not Path(path).expanduser().is_file():
            yield f"data.{key}={path}: there is no such file; expected a json of COCO's instances"


def lacks_text(cfg: DataConfig, task: str, predict_on: str | None) -> bool:
    """Whether an export, or a prediction of prompts, has the tokenizer of its text, not the text."""
    if task != "export" and not (task == "predict" and Path(predict_on or "").is_file()):
        return False
    places = [Path(path).expanduser() for path in (cfg.path, cfg.eval_path) if path is not None]
    there = [place.exists() or any(place.parent.glob(place.name)) for place in places]
    return cfg.tokenizer is not None and not all(there)
