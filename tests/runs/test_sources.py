"""What a run starts from: a run, a checkpoint or a file; and the folder that it writes to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import SMALL
from test_recipes import run as run_recipe

import train

pytestmark = pytest.mark.usefixtures("own_folder")

RUN = [*SMALL["classification"], "device=cpu", "log.progress=false", "batch_size=4", "doctor=off"]


def images(*folders: str) -> None:
    rng = np.random.default_rng(0)
    for folder in folders:
        Path(folder).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 2, (40, 40), dtype=np.uint8) * 255
            Image.fromarray(pixels).convert("L" if "masks" in folder else "RGB").save(f"{folder}/{number}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train.main([*RUN, "steps=2", f"run_dir={folder}"]) == 0
    return folder


NAMED = {
    "resume={}": 3,
    "task=evaluate run_dir={}": 3,
    "task=evaluate resume={}": 3,
    "task=predict resume={}": 3,
    "recipe=distillation recipe.teacher={}": 3,
    "model.weights={}": 3,
}
PLACES = {"begun": "the run has saved no checkpoint yet", "other": "holds neither a run nor a checkpoint"}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("plan", [[], ["dry_run=true"]], ids=["run", "plan"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("setting", NAMED)
def test_a_place_without_a_checkpoint_says_why_in_the_same_words(setting, place, plan, trained, capsys):
    shutil.copytree(trained, "begun")
    shutil.rmtree("begun/checkpoints")
    Path("other").mkdir()
    command = [*RUN, "steps=1", *setting.format(place).split(), *plan]
    assert train.main(command) == NAMED[setting]
    said = capsys.readouterr().err
    key = setting.split()[-1].removesuffix("={}")
    prefix = f"{key}=" if key in ("recipe.teacher", "model.weights") else ""
    assert said.startswith(f"error: {prefix}{place}: {PLACES[place]}") and said.count("\n") == 1
    assert "damaged" not in said and sorted(path.name for path in Path().iterdir()) == ["begun", "other"]


@pytest.mark.parametrize("setting", NAMED)
def test_a_place_that_does_not_exist_is_a_mistake_of_the_command_line(setting, own_folder, capsys):
    assert train.main([*RUN, "steps=1", *setting.format("nosuch").split()]) == 2
    key = setting.split()[-1].removesuffix("={}")
    assert f"error: {key}=nosuch: there is no such file or folder" in capsys.readouterr().err
    assert not [*Path().iterdir()]


HOLDS = {  # what a folder holds that a run is started in -> what is said of it
    "train/cat/1.png": "holds no run, but train; choose a new folder, such as ",
    "a/1 b/1 c/1 d/1 e.txt": "holds no run, but a, b, c and 1 more; choose a new folder, such as ",
    "metrics.jsonl": "holds no run, but metrics.jsonl; choose a new folder",
    "": None,
    "notes.txt slurm-17.out .git/HEAD": None,
}


@pytest.mark.parametrize("run_dir", [".", "place"])
@pytest.mark.parametrize("names", HOLDS)
def test_a_folder_that_holds_something_else_is_refused_and_stays_as_it_is(names, run_dir, capsys):
    for name in names.split():
        path = Path(run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = sorted(Path().rglob("*"))
    code = train.main([*RUN, "steps=1", f"run_dir={run_dir}"])
    if HOLDS[names] is None:
        assert code == 0 and Path(run_dir, "summary.json").exists()
        return
    assert code == 2 and f"run_dir={run_dir}: {HOLDS[names]}" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


FOLDERS = {
    "classification": ("image_folder", [f"data/{part}/{name}" for part in ("train", "val") for name in ("cat", "dog")]),
    "segmentation": ("mask_folder", [f"data/{part}/{of}" for part in ("train", "val") for of in ("images", "masks")]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", FOLDERS)
def test_files_are_predicted_alike_when_the_training_data_is_gone(recipe, capsys):
    data, folders = FOLDERS[recipe]
    images(*folders, "new")
    Path("left_out.txt").write_text("train/cat/1.png\n" if recipe == "classification" else "train/images/1.png\n")
    command = [f"recipe={recipe}", f"data={data}", "data.path=data", "data.image_size=32", "model.options.width=4"]
    command += ["device=cpu", "log.progress=false", "batch_size=2", "data.exclude=left_out.txt", "data.num_workers=0"]
    assert train.main([*command, "steps=1", "run_dir=a"]) == 0
    found = []
    for _ in range(2):
        assert train.main(["task=predict", "run_dir=a", "predict_on=new"]) == 0, capsys.readouterr().err
        arrays = [{k: v.tobytes() for k, v in np.load(path).items()} for path in sorted(Path("a").rglob("*.npz"))]
        found.append((Path("a/predictions.jsonl").read_text(), arrays))
        shutil.rmtree("data", ignore_errors=True)
        Path("left_out.txt").unlink(missing_ok=True)
    assert found[0] == found[1] and found[0][0].count("\n") == 4
    capsys.readouterr()
    Path("empty").mkdir()
    for task, said in (
        (["task=predict", "predict_on=empty"], "predict_on=empty: has no images"),
        (["task=predict"], "data.path=data: there is no such folder"),
        (["task=evaluate"], "data.path=data: there is no such folder"),
    ):
        assert train.main([*task, "run_dir=a"]) == 2 and said in capsys.readouterr().err


def test_folders_and_masks_that_are_missing_are_named_with_what_is_expected(capsys):
    images("m/train/images", "m/train/masks", "m/val/images", "m/val/masks")
    Path("m/train/masks/0.png").rename("m/train/masks/9.png")
    for data, hint in (
        ("recipe=face_recognition data=identity_folder data.path=x data.eval_path=y", "one folder per identity"),
        ("recipe=segmentation data=mask_folder data.path=m", "expected the same names in images and masks"),
    ):
        assert train.main([*data.split(), "data.image_size=32", "steps=1"]) == 2
        assert hint in capsys.readouterr().err


def test_a_text_that_changed_since_the_checkpoint_is_refused_with_both_counts(capsys):
    Path("t").mkdir()
    Path("t/a.txt").write_text("x = 1\n" * 900)
    settings = ["data=text", "data.path=t", "data.length=16", "data.num_samples=null", "schedule.horizon=2"]
    run_recipe("language_model", "a", *settings, "steps=1")
    Path("t/b.txt").write_text("y = 2\n" * 900)
    capsys.readouterr()
    run_recipe("language_model", "a", *settings, "steps=2", code=2)
    assert " samples to train on, and had " in capsys.readouterr().err
    run_recipe("language_model", "a", *settings, "steps=2", "allow_changes=true")
