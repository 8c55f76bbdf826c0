"""A picture of each augmentation: docs/pictures/augmentations.png, of the photographs of scikit-learn.

    python scripts/augmentations.py [docs/pictures/augmentations.png]

A row for each setting of `data.augment`, `data.erasing`, `data.mixup` and `data.cutmix`; six samples of the seed 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.config.sources import photographs
from amp_core.data.augment import Erased, Mixed
from amp_core.data.images import ImageFiles
from amp_core.data.prepare import IMAGENET

SIDE, SAMPLES, NAMES = 72, 6, 150
ROWS = {
    "augment=false": (False, {}),
    "augment=true": (True, {}),
    "augment=colorjitter": ("colorjitter", {}),
    "augment=randaugment": ("randaugment", {}),
    "augment=trivialaugment": ("trivialaugment", {}),
    "erasing=1": (True, {"erasing": 1.0}),
    "mixup=0.8": (True, {"mixup": 0.8}),
    "cutmix=1.0": (True, {"cutmix": 1.0}),
}


def main(arguments: list[str]) -> int:
    from PIL import Image, ImageDraw

    files = [str(path) for path in photographs()]
    page = Image.new("RGB", (NAMES + SAMPLES * SIDE, len(ROWS) * SIDE), "white")
    mean, std = (np.array(values)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))
    for row, (name, (augment, more)) in enumerate(ROWS.items()):
        data = ImageFiles(files, np.arange(len(files)), len(files), SIDE, augment, seed=0)
        dataset = Erased(data, more["erasing"], 0) if "erasing" in more else data
        if "mixup" in more or "cutmix" in more:
            dataset = Mixed(data, len(files), more.get("mixup"), more.get("cutmix"), 0)
        images, _ = dataset.__getitems__([(index % len(files), index // len(files)) for index in range(SAMPLES)])
        ImageDraw.Draw(page).text((4, row * SIDE + SIDE // 2 - 6), f"data.{name}", fill="black")
        for column, image in enumerate(images.numpy() * std + mean):
            pixels = np.rint(255 * image.clip(0, 1)).astype(np.uint8).transpose(1, 2, 0)
            page.paste(Image.fromarray(pixels), (NAMES + column * SIDE, row * SIDE))
    target = Path(arguments[0] if arguments else "docs/pictures/augmentations.png")
    page.quantize(128).save(target, optimize=True)
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
