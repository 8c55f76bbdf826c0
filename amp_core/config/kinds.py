"""What data sets hold, ours and others'. Imports no torch but what others' do."""

from __future__ import annotations

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.schema import DataConfig

KINDS = {
    "mnist_subset": "images", "synthetic": "images", "image_folder": "images", "imagenet": "images",
    "cifar10": "images", "torch_sources": "text", "torch_headers": "text", "text": "text", "tokens": "text",
    "chat": "text",
    "digit_scenes": "masks", "mask_folder": "masks", "glyphs": "identities",
    "identity_folder": "identities", "records": "identities", "synthetic_identities": "identities", "own": "own",
    "shards": "images", "hf": "images", "parquet": "images", "table": "table", "coco": "masks",
    "telephone": "speech", "recordings": "speech",
}  # fmt: skip
"""What a data set holds: `images` with a class each, `text` as bytes, `masks` of images, `identities` of images, the
rows of a `table`, `speech` with what was said; `own` is what a recipe brings itself."""
DECODED = ("image_folder", "imagenet")
"""Those of image files in a folder per class."""
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


def named_columns(cfg: DataConfig) -> dict[str, str]:
    """`data.columns` of data whose columns have a meaning."""
    return cfg.columns if isinstance(cfg.columns, dict) else {}
