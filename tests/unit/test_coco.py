"""data=coco: the masks of pycocotools, one per category, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import train
from amp_core.config.errors import ConfigError
from amp_core.config.options import read_option
from amp_core.config.schema import DataConfig
from amp_core.data import build_data
from amp_core.data.masks import VOID

pytest.importorskip("pycocotools", reason="needs the extra coco")
SIDE = 32
SQUARE = [4.0, 4.0, 20.0, 4.0, 20.0, 24.0, 4.0, 24.0]
TRIANGLE = [10.5, 2.0, 30.0, 28.5, 1.0, 28.0]
RUNS = {"size": [SIDE, SIDE], "counts": [100, 50, 300, 200, SIDE * SIDE - 650]}


def annotations() -> dict[str, Any]:
    return {
        "images": [{"id": 7 * n, "file_name": f"{n}.png", "height": SIDE, "width": SIDE} for n in range(10)],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}],
        "annotations": [
            {"id": 3 * n + part, "image_id": 7 * n, "category_id": category, "iscrowd": crowd, "segmentation": of}
            for n in range(10)
            for part, (category, crowd, of) in enumerate([(3, 0, [SQUARE]), (3, 1, RUNS), (90, 0, [TRIANGLE, SQUARE])])
        ],
    }


def write(contents: dict[str, Any]) -> DataConfig:
    Path("annotations").mkdir(exist_ok=True)
    Path("train").mkdir(exist_ok=True)
    for number in range(10):
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(f"train/{number}.png")
    Path("annotations/instances_train.json").write_text(json.dumps(contents))
    given = {"path": "annotations/instances_train.json", "image_size": SIDE}
    return DataConfig(**read_option("data", "coco") | given)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools with numpy 2
@pytest.mark.usefixtures("own_folder")
def test_masks_are_those_of_pycocotools_and_crowds_are_void_where_no_object_is() -> None:
    from pycocotools.coco import COCO  # type: ignore[import-not-found]

    data = build_data(write(annotations()), seed=0)
    assert len(data.train), len(data.eval) == (8, 2)
    assert list(data.classes) == ["car", "toothbrush"] and data.facts["num_masks"] == 2
    _, masks = data.eval.__getitems__([(0, 0)])  # image 4
    theirs = COCO("annotations/instances_train.json")
    square, crowd, others = (torch.from_numpy(theirs.annToMask(theirs.anns[3 * 4 + part])) for part in range(3))
    expected = torch.where(square > 0, 1, torch.where(crowd > 0, VOID, 0)).to(torch.uint8)
    assert torch.equal(masks[0, 0], expected) and torch.equal(masks[0, 1], others)
    assert 0 < others.sum() < SIDE * SIDE and (masks[0, 0] == VOID).any()


def changed(**values: Any) -> dict[str, Any]:
    found = annotations()
    found["annotations"][4] |= values
    return found


BAD = {
    "another image": (changed(image_id=5), "annotation 4 (id 4): KeyError: 5"),
    "another category": (changed(category_id=1), "annotation 4 (id 4): KeyError: 1"),
    "two points": (changed(segmentation=[[1, 2, 3, 4]]), "a polygon without three points"),
    "nothing": (changed(segmentation=[]), "has no polygon"),
    "runs too long": (changed(segmentation=RUNS | {"counts": [10**9]}), "its runs have 1000000000 pixels, its image 1024"),
    "of another size": (changed(segmentation=RUNS | {"size": [9, 9]}), "its size is [9, 9]"),
    "damaged runs": (changed(segmentation={"size": [SIDE, SIDE], "counts": "~~~~~~~~"}), "its runs have 238 pixels, its image 1024"),
    "cut off": (changed(segmentation={"size": [SIDE, SIDE], "counts": "4d"}), "annotation 4 (id 4): IndexError"),
    "no list": ({"images": []}, "is no json of COCO's instances: KeyError: 'annotations'"),
    "no images": (annotations() | {"images": []}, "0 images and 2 categories"),
    "huge": (annotations() | {"images": [{"id": 0, "file_name": "a", "height": 10**6, "width": 10**6}]}, "no sane size"),
    "upwards": (annotations() | {"images": [{"id": 0, "file_name": "../a", "height": 1, "width": 1}], "annotations": []}, "names the image ../a"),
}  # fmt: skip


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_in_the_file_is_one_sentence(name: str) -> None:
    contents, said = BAD[name]
    with pytest.raises(ConfigError) as error:
        build_data(write(contents), seed=0)
    assert "instances_train.json" in str(error.value) and said in str(error.value), error.value


@pytest.mark.usefixtures("own_folder")
def test_a_run_segments_the_categories_and_their_metrics_are_finite(capsys: Any) -> None:
    write(annotations())
    small = ["recipe=segmentation", "data=coco", "data.path=annotations/instances_train.json", "data.image_size=32"]
    small += ["data.num_workers=1", "steps=2", "batch_size=2", "model.options.width=4", "run_dir=a", "device=cpu"]
    assert train.main(small) == 0, capsys.readouterr().err
