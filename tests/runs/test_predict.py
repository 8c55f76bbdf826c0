"""task=predict: what it writes is what evaluation measured, and it changes nothing else in a run folder."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from running import checkpoints, refused_before_the_start, summary
from small import SMALL
from test_recipes import arguments, run
from tiers import rows

import train
from amp_core.config.options import CONFIG_DIR, conf_dir
from amp_core.config.rules import build
from amp_core.data import build_data
from amp_core.data.masks import VOID

pytestmark = pytest.mark.usefixtures("own_folder")

TRAINED = ["steps=2", "run_dir=a"]
PREDICTS = ["classification", "contrastive", "custom_function", "distillation", "face_recognition", "finetuning"]
PREDICTS += ["language_model", "model_parallel", "segmentation"]


def predictions(folder: str | Path = "a"):
    return [json.loads(line) for line in Path(folder, "predictions.jsonl").read_text().splitlines()]


def contents(folder="a"):
    """What a run had written, without what predicting adds."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file() and "predictions" not in str(path))
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files if path.name != ".lock"}


def held_out(folder="a"):
    """The evaluation samples of a run, as one batch."""
    saved = torch.load(checkpoints(folder)[-1] / "state.pt", weights_only=True)
    cfg = build(saved["config"])
    data = build_data(cfg.data, seed=cfg.seed).eval
    return data.__getitems__([(index, 0) for index in range(len(data))])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("recipe", PREDICTS)
def test_every_sample_is_predicted_twice_alike_and_the_run_stays_as_it_is(recipe):
    run(recipe, "a", "steps=2", "amp=bf16")
    before, found = contents(), []
    for _ in range(2):
        assert train.main(["task=predict", "run_dir=a", "device=cpu"]) == 0
        arrays = {path: dict(np.load(path)) for path in sorted(Path("a").glob("predictions/*.npz"))}
        found.append((predictions(), {path: {k: v.tobytes() for k, v in a.items()} for path, a in arrays.items()}))
    assert found[0] == found[1] and contents() == before
    lines, arrays = found[0]
    assert [line["index"] for line in lines] == list(range(len(lines))) and len(lines) > 1
    assert len(arrays) == len([line for line in lines if "file" in line])
    for line in lines:
        assert all(isinstance(v, (int, float)) for k, v in line.items() if k != "file" and not k.startswith("top_"))
        if "class" in line:
            assert (line["class"], line["probability"]) == (line["top_classes"][0], line["top_probabilities"][0])
            assert line["top_probabilities"] == sorted(line["top_probabilities"], reverse=True)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_classes_are_those_that_evaluation_counted(mode):
    run("classification", "a", "steps=8", f"amp={mode}")
    run("classification", "a", "task=predict", f"amp={mode}")
    _, labels = held_out()
    right = [line["class"] == label for line, label in zip(predictions(), labels.tolist(), strict=True)]
    assert sum(right) / len(right) == summary("a")["eval"]["accuracy"]
    assert sum(right) > 0 and all(0.25 <= line["probability"] <= 1 for line in predictions())  # of four classes


def test_masks_are_those_that_evaluation_compared():
    run("segmentation", "a", "steps=8", "amp=fp32")
    run("segmentation", "a", "task=predict", "amp=fp32")
    _, masks = held_out()
    found = torch.from_numpy(np.stack([np.load(Path("a", line["file"]))["masks"] for line in predictions()]))
    both, either = ((found & (masks == 1)) & (masks != VOID), (found | (masks == 1)) & (masks != VOID))
    iou = both.sum((0, 2, 3)) / either.sum((0, 2, 3)).double()
    assert math.isclose(iou.mean(), summary("a")["eval"]["iou"], rel_tol=1e-12) and found.any()


def test_perplexities_per_text_join_to_that_of_evaluation():
    run("language_model", "a", "steps=2", "amp=fp32")
    run("language_model", "a", "task=predict", "amp=fp32")
    _, targets = held_out()
    losses = torch.tensor([math.log(line["perplexity"]) for line in predictions()], dtype=torch.float64)
    counts = (targets >= 0).sum(1)
    # Each loss is a mean of fp32 numbers of fewer than 2^8 tokens: 2^8 roundings of 2^-24 at most.
    assert math.isclose((losses * counts).sum() / counts.sum(), summary("a")["eval"]["loss"], rel_tol=2**-16)


def test_a_folder_of_images_gives_what_the_same_images_give_as_evaluation_data():
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(6):
            path = Path("images", part, f"class{number % 2}", f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    data = ["data=image_folder", "data.path=images", "data.image_size=32", "model.options.width=8", "device=cpu"]
    data += ["batch_size=4", "log.progress=false"]
    assert train.main([*data, *TRAINED]) == 0
    for task in (["run_dir=a"], ["resume=a", "run_dir=b", "predict_on=images/val"]):
        assert train.main([*data, "task=predict", *task]) == 0
    assert predictions("a") == predictions("b")
    assert [line["path"] for line in predictions("b")] == sorted(map(str, Path("images/val").rglob("*.png")))
    Path("empty").mkdir()
    assert train.main([*data, "task=predict", "resume=a", "run_dir=c", "predict_on=empty"]) == 2
    assert not Path("c").exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", ["classification", "segmentation"])
def test_an_image_that_cannot_be_read_gets_a_line_with_its_error_and_the_others_are_predicted(recipe, capsys):
    """Cut off, a whole batch of them, no image, and files that make Pillow's readers raise what is no OSError."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks") if recipe == "segmentation" else ("a", "b"):
        for path in [Path("data", part, name, f"{number}.png") for part in ("train", "val") for number in range(3)]:
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels if name != "masks" else (pixels[..., 0] > 99).astype(np.uint8)).save(path)
    group = "image_folder" if recipe == "classification" else "mask_folder"
    data = [f"recipe={recipe}", f"data={group}", "data.path=data", "data.image_size=32", "model.options.width=8"]
    data += ["device=cpu", "batch_size=2", "log.progress=false"]
    assert train.main([*data, *TRAINED]) == 0
    whole = sorted(Path("data/val").rglob("*.png"))[0].read_bytes()
    Path("new").mkdir()
    for number in range(70):
        damaged = number < 34 or number == 50
        Path(f"new/{number:02d}.png").write_bytes(whole[: len(whole) // 2] if damaged else whole)
    Path("new/99.png").write_text("hello")
    for number, (image, kind) in enumerate([("RGB", "AVIF"), ("LAB", "TIFF"), ("F", "TIFF")], 96):
        Image.new(image, (64, 64)).save(file := io.BytesIO(), kind)
        content = file.getvalue()  # AVIF's header is sound, and its pixels are gone
        Path(f"new/{number}.png").write_bytes(content[:-20] if kind == "AVIF" else content)
    sorted(Path("data/val").rglob("*.png"))[0].write_bytes(b"damaged since")  # it is not needed
    capsys.readouterr()
    assert train.main([*data, "task=predict", "resume=a", "run_dir=b", "predict_on=new"]) == 0
    assert "39 of 74 images cannot be read: their lines in" in capsys.readouterr().out
    lines = predictions("b")
    assert [line["path"] for line in lines] == sorted(map(str, Path("new").iterdir()))
    assert [line["index"] for line in lines if "error" in line] == [*range(34), 50, 70, 71, 72, 73]
    assert all(line["path"] in line["error"] and len(line) == 3 for line in lines if "error" in line)
    others = [{key: value for key, value in line.items() if key not in ("index", "path", "file")} for line in lines]
    assert all(other == others[34] for other in others[34:] if "error" not in other)
    for path in Path("new").iterdir():
        path.write_bytes(b"")
    assert train.main([*data, "task=predict", "resume=a", "run_dir=c", "predict_on=new"]) == 1
    assert "74 of 74 images cannot be read" in capsys.readouterr().err and len(predictions("c")) == 74


def test_without_a_folder_it_makes_one_that_says_how_it_was_made():
    run("classification", "a", "steps=2")
    assert train.main(arguments("classification", "task=predict", "resume=a")) == 0
    (folder,) = Path("outputs/classification").iterdir()
    assert predictions(folder) and summary(folder)["status"] == "finished"
    assert "resume: a" in (folder / ".hydra/config.yaml").read_text()


def test_predictions_that_overflow_end_with_5_and_leave_the_summary_of_the_run():
    """Logits of a million are finite in fp32, and infinite in fp16: their softmax is NaN."""
    run("classification", "first", "steps=1", "amp=fp32")
    state = torch.load(checkpoints("first")[-1] / "state.pt", weights_only=True)["model"]
    last = max((name for name in state if name.endswith("weight")), key=lambda name: int(name.split(".")[0]))
    state[last] *= 1e7
    torch.save(state, "large.pt")
    run("classification", "a", "steps=1", "amp=fp32", "model.weights=large.pt", "optimizer.lr=1e-9")
    before = contents()
    run("classification", "a", "task=predict", "amp=fp16", code=5)
    assert contents() == before and summary("a")["status"] == "finished"
    assert None in {line["probability"] for line in predictions()}
    run("classification", "a", "task=predict", "amp=bf16")
    assert None not in {line["probability"] for line in predictions()}


OWN = """
from recipes.classification import DATA, MODELS, Knobs, run  # noqa: F401
"""
PLACES = {
    "image_folder": ("train/{}/{}.png", "val/{}/{}.png"),
    "text": ("{}{}.txt",),
    "identity_folder": ("{}/{}.png",),
}
PLACES["mask_folder"] = tuple(
    f"{part}/{kind}/{{}}{{}}.png" for part in ("train", "val") for kind in ("images", "masks")
)
CLASSES = ["cat", "dog", "eel", "fox", "gnu", "hen"]
RUNS = {
    "classification": ["data=image_folder", "model.options.dropout=0.0", "ema.decay=0.5", "data.num_workers=1"],
    "mine": ["data=image_folder", "recipe.label_smoothing=0.3", "model=mlp", "model.options.width=16", "amp=fp16"],
    "distillation": ["data=image_folder", "recipe.teacher_options.width=8", "recipe.teacher_steps=1", "epochs=0.2"],
    "language_model": ["data=text", "data.length=16", "model=gpt_tiny", "model.options.depth=1", "schedule=constant"],
    "segmentation": ["data=mask_folder", "model.options.width=4", "model.options.depth=2", "amp=fp16_capped"],
    "finetuning": ["data=text", "data.length=16", "recipe.base_steps=1", "recipe.rank=2", "model.options.depth=1"],
    "face_recognition": ["data=identity_folder", "recipe.embedding=16", "clip=norm", "accumulation=2"],
}
"""Runs of data that they name by a relative path, and of settings that are no defaults."""


def make_data(folder, kind):
    rng = np.random.default_rng(0)
    for place in PLACES[kind]:
        for number in range(36):
            path = Path(folder, place.format(CLASSES[number % 6], number))
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "text":
                path.write_bytes(rng.integers(97, 123, 200, dtype=np.uint8).tobytes())
            else:
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels if "masks" not in place else (pixels[..., 0] > 99).astype(np.uint8)).save(path)


@pytest.fixture
def runs_of(own_folder, monkeypatch):
    """`runs_of(recipe)` trains in a folder `home`, moves the run to `away/it`, and goes there. The flags it needs."""

    def train_and_move(recipe):
        settings = RUNS[recipe]
        kind = settings[0].partition("=")[2]
        make_data("home/data", kind)
        flags = [f"--config-dir={own_folder / 'home' / 'conf'}"] if recipe == "mine" else []
        if flags:
            Path("home/conf/recipe").mkdir(parents=True)
            Path("home/conf/recipe/mine.py").write_text(OWN)
            text = (conf_dir() / "recipe" / "classification.yaml").read_text()
            Path("home/conf/recipe/mine.yaml").write_text(text.replace("name: classification", "name: mine"))
        monkeypatch.chdir(own_folder / "home")
        small = ["device=cpu", "log.progress=false", "batch_size=4", "data.path=data", f"run_dir={Path('runs', 'x')}"]
        small += ["data.image_size=32"] * (kind != "text") + ["steps=2"] * ("epochs" not in settings[-1])
        assert train.main([*flags, f"recipe={recipe}", *settings, *small]) == 0
        Path(own_folder, "away").mkdir()
        Path("runs/x").rename(own_folder / "away" / "it")
        monkeypatch.chdir(own_folder / "away")
        return flags

    return train_and_move


@pytest.mark.parametrize("recipe", rows(RUNS, "mine"))
def test_a_run_that_was_moved_is_evaluated_and_predicts_from_another_folder_by_its_own_settings(
    recipe, runs_of, capsys
):
    flags = runs_of(recipe)
    before = contents("it")
    capsys.readouterr()
    for task in ("evaluate", "predict"):
        assert train.main([*flags, f"task={task}", "run_dir=it", "device=cpu"]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "settings: those of" in said and "but data.path: data -> " in said and "amp" not in said.splitlines()[0]
        if task == "evaluate":
            result = {name: f"{value:.4f}" for name, value in summary("it")["eval"].items()}
            assert all(f"{name} {value}" in said for name, value in result.items()), (said, result)
    assert contents("it") == before
    if "ema.decay=0.5" in RUNS[recipe]:
        assert "predictions of the average" in said
    if "data=image_folder" in RUNS[recipe]:
        assert [line["name"] for line in predictions("it")] == [CLASSES[line["class"]] for line in predictions("it")]
        assert all(len(line["top_names"]) == 5 and line["top_names"][0] == line["name"] for line in predictions("it"))


def test_what_is_typed_takes_the_place_of_the_setting_of_a_run_and_is_said(runs_of, capsys):
    runs_of("classification")
    before = contents("it")
    make_data("other", "image_folder")
    Path("other/train/gnu").rename("other/train/yak")
    Path("other/val/gnu").rename("other/val/yak")
    capsys.readouterr()
    assert train.main(["task=evaluate", "resume=it/checkpoints/step_00000002", "amp=fp32", "data.path=other"]) == 0
    said = capsys.readouterr().out
    assert "amp.name: bf16 -> fp32; data.path: data -> other" in said and "other classes" in said and "yak" in said
    assert (
        train.main(["task=predict", "resume=it", "run_dir=new", "predict_on=other/val/yak", "data=image_folder"]) == 0
    )
    assert {name for line in predictions("new") for name in line["top_names"]} <= set(CLASSES)
    assert build(yaml.safe_load(Path("new/.hydra/config.yaml").read_text())).data.image_size == 32
    assert contents("it") == before
    assert train.main(["task=evaluate", "run_dir=it", "model.options.width=8"]) == 3
    assert capsys.readouterr().err.endswith("It was made with other settings: model.options.width: null -> 8\n")


@pytest.mark.slow
def test_training_is_not_resumed_where_classes_have_moved(capsys):
    """A renamed folder gives others their numbers: the outputs of the network would get other meanings."""
    make_data("pets", "image_folder")
    command = ["data=image_folder", "data.path=pets", "data.image_size=32", "model=mlp", "device=cpu", "batch_size=4"]
    assert train.main([*command, "steps=1", "run_dir=it"]) == 0
    for part in ("train", "val"):
        Path("pets", part, "gnu").rename(Path("pets", part, "zebra"))
    capsys.readouterr()
    assert train.main([*command, "steps=2", "run_dir=it"]) == 2
    assert "data.path=pets: has other classes" in capsys.readouterr().err
    assert train.main(["task=evaluate", "run_dir=it"]) == 0
    assert re.search(r"warning: data.path=\S+: has other classes", "".join(capsys.readouterr()))
    assert train.main([*command, "steps=2", "run_dir=it", "allow_changes=true"]) == 0


@pytest.mark.slow
def test_a_job_of_a_sweep_is_evaluated_by_the_name_of_its_folder(capsys):
    small = [each for each in arguments("classification", "steps=1") if "run_dir" not in each]
    assert train.main(["-m", *small, "hydra.sweep.dir=s", "amp=fp32,fp16", "seed=1,2"]) == 0
    folders = sorted(path for path in Path("s").iterdir() if path.is_dir() and path.name != ".jobs")
    assert len(folders) == 4
    for folder in folders[::3]:
        assert "," in folder.name
        assert train.main(["task=evaluate", f"run_dir={folder}"]) == 0, capsys.readouterr().err
    assert train.main(["-m", "task=evaluate", f"resume='{folders[0]}'", "seed=1,2"]) == 0


def test_a_run_whose_recipe_is_not_known_names_the_folder_of_it(runs_of, capsys, monkeypatch):
    (flag,) = runs_of("mine")
    monkeypatch.setenv(CONFIG_DIR, "")
    capsys.readouterr()
    assert train.main(["task=evaluate", "run_dir=it"]) == 2
    assert f"recipe=mine, which is not known here; add --config-dir {flag.partition('=')[2]}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_its_settings_names_the_command_that_resumes_it(runs_of, capsys, monkeypatch):
    runs_of("classification")
    capsys.readouterr()
    assert train.main(["run_dir=it"]) == 2
    said = capsys.readouterr().err
    assert "data.image_size: 32 -> null" in said and "or resume with those: cd " in said
    command = shlex.split(said.partition("resume with those: ")[2])
    monkeypatch.chdir(command[1])
    typed = [each for each in command[command.index("train.py") + 1 :] if each != "steps=2"]
    assert train.main([*typed, "steps=3"]) == 0 and summary(command[-1].partition("=")[2])["step"] == 3


COUNTS = [f"progress.{key}" for key in ("step", "samples", "samples_per_step", "planned_samples")]
WRONG = [(key, value) for key in COUNTS for value in (-5, math.nan, math.inf, 2**62, 2**200, 1.5, "1", None, True, [1])]
WRONG += [
    (f"{part}", value)
    for part in ("schedule.num_taken", "progress.skipped", "progress.averaged")
    for value in (2**62, -1)
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("key, value", WRONG, ids=str)
def test_counts_that_no_run_has_written_are_refused(key, value, trained, capsys):
    state = torch.load(trained, weights_only=True)
    part, name = key.split(".")
    state[part][name] = value
    torch.save(state, "changed.pt")
    for task in ("train", "evaluate"):
        arguments_ = [each for each in arguments("classification", f"task={task}") if "run_dir" not in each]
        assert train.main([*arguments_, "resume=changed.pt", "run_dir=b", "steps=3"]) == 3
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"changed.pt: {key} is {value!r}, expected a whole number" in said
    assert not Path("b").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The file of a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    run("classification", folder / "a", "steps=2")
    return checkpoints(folder / "a")[-1] / "state.pt"


@pytest.mark.slow
def test_two_ranks_write_the_file_of_one():
    run("segmentation", "a", "steps=2", "amp=fp32")
    for folder, layout in (("b", []), ("c", ["layout=ddp", "layout.nproc_per_node=2"])):
        run("segmentation", folder, "resume=a", "task=predict", "amp=fp32", *layout)
    assert predictions("b") == predictions("c")
    masks = [[np.load(Path(folder, line["file"]))["masks"] for line in predictions("b")] for folder in "bc"]
    assert np.array_equal(*masks)


@pytest.mark.parametrize(
    "settings, key",
    [
        (["task=predict"], "task=predict: needs weights"),
        (["task=predict", "resume=never"], "task=predict: needs a checkpoint"),
        (["predict_on=."], "predict_on=."),
        (["task=predict", "run_dir=x", "predict_on=nowhere"], "predict_on=nowhere"),
    ],
)
def test_what_cannot_be_predicted_is_refused_before_the_start(settings, key, capsys):
    refused_before_the_start([*SMALL["classification"], *settings], key, capsys)


def test_a_recipe_that_predicts_nothing_is_named(capsys):
    run("gan", "a", "steps=1")
    before = contents()
    run("gan", "a", "task=predict", code=2)
    assert "recipe=gan does not say what it predicts" in capsys.readouterr().err and contents() == before


@pytest.mark.parametrize("task", ["evaluate", "predict", "train"])
def test_a_run_of_other_settings_is_refused_with_those_to_type_and_nothing_is_created(task, capsys):
    small = arguments("classification", "model.options.width=16", "steps=2", "run_dir=a")
    assert train.main(small) == 0
    before, typed = contents(), [each for each in small if each.split("=")[0] not in ("model.options.width", "run_dir")]
    capsys.readouterr()
    again = [*typed, f"task={task}", "resume=a", "steps=3", "run_dir=runs/of/b"]
    assert train.main([*again, "model.options.width=8"]) == 3
    message = capsys.readouterr().err
    assert "is of another model" in message and "made with other settings: model.options.width: 16 -> 8\n" in message
    assert [path.name for path in Path().iterdir()] == ["a"] and contents() == before
    assert train.main([*again, "model.options.width=16"]) == 0


def test_a_run_of_another_recipe_is_refused_by_its_name(capsys):
    run("classification", "a", "steps=1")
    run("segmentation", "b", "resume=a", "task=evaluate", code=3)
    assert "made with other settings: recipe.name: classification -> segmentation, " in capsys.readouterr().err
