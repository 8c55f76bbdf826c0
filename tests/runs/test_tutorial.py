"""docs/YOUR_OWN_MODEL.md and docs/I_WANT_TO.md, followed to the letter: files and edits in a copy, and all commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chats import write_tokenizer
from PIL import Image
from running import lines
from test_recipes import run
from test_speech import record

from amp_core.run.loop import Loop

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "YOUR_OWN_MODEL.md"
NOT_RUN = ["make setup", "source .venv/bin/activate", "cp docs/terrain.py recipes/"]  # what the tests stand on
OF_LIBRARIES = re.compile(r"timm|=hf")
"""Commands that need timm or transformers: tests/unit/test_timm_and_hf.py."""
OF_WHEEL = re.compile(r"layout=ddp|launcher=joblib")
"""Commands that start processes: tests/runs/test_installed.py."""
SHORTER = {
    "-k terrain": "-k 'terrain and resume and fp16' -W 'ignore:Module already imported'",
    "amp=fp32,bf16,fp16 seed=1,2,3": "amp=bf16,fp16 seed=1,2 steps=3",
    "recipe=terrain": "recipe=terrain log.progress=false",
}
"""The page's commands are for people, who have minutes. Runs that do not say how long take three steps."""

# All in one process: importing torch for each of them would be most of the time.
DRIVER = """
import json, runpy, shlex, sys
sys.path[0] = "."
for command in json.loads(sys.argv[1]):
    words = shlex.split(command)[1:]
    print("$", command, flush=True)
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    sys.argv = words[words[0] == "-m":]
    try:
        run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if (end.code or 0) != (5 if "run_dir=runs/lost" in words else 0):  # the one that diverges, as the page says
            raise
"""


def parts(page: str) -> tuple[list[tuple[str, str | None, str]], list[str], list[str]]:
    """(file, line to insert below or None, content) of each block that makes or edits a file; commands; outputs."""
    edits, commands, outputs = [], [], []
    *texts, last = re.findall(r"(.*?)^```(\w*)\n(.*?)^```\n|(.+)", page, re.MULTILINE | re.DOTALL)
    for text, language, content, _ in texts:
        commands += re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        before = text.rstrip().split("\n\n")[-1]
        new = re.search(r"[Tt]his(?: one)? is `(\S+)`", before)
        edited = re.search(r"\bIn `(\S+)`, below `([^`]+)`", before)
        if new or edited:
            edits.append((new[1], None, content) if new else (edited[1], edited[2], content))
        else:
            assert not language, f"a block that nothing tests, after: {before}"
            outputs.append(content)
    return edits, commands + re.findall(r"^    (\S.*)$", last[3], re.MULTILINE), outputs


def copy_to(place: Path) -> None:
    for folder in ("amp_core", "amp_tools", "conf", "recipes", "scripts", "tests"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / file, place)


def typed(commands: list[str], place: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What commands print that are typed in a folder, altogether and each to stdout; all of them succeed."""
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", DRIVER, json.dumps(commands)]
    done = subprocess.run(argv, cwd=place, env=environment, text=True, capture_output=True, timeout=280)
    said = re.split(r"^\$ .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert done.returncode == 0 and len(said) == len(commands), f"{done.stdout}\n{done.stderr}"
    return done, said


@pytest.mark.slow
def test_whoever_follows_the_page_has_a_recipe_that_keeps_all_promises(tmp_path):
    edits, commands, (report,) = parts(PAGE.read_text())
    commands = [command for command in commands if not OF_LIBRARIES.search(command)]
    assert len(edits) == 6 and commands[:3] == NOT_RUN and len(commands) == 14
    copy_to(tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "my_loop.py", tmp_path / "docs")
    shutil.copy(ROOT / "docs" / "terrain.py", tmp_path / "recipes")
    for name, anchor, content in edits:
        file = tmp_path / name
        if anchor is None:
            assert not file.exists(), f"{name} is there already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        else:
            text = file.read_text()
            assert text.count(f"{anchor}\n") == 1
            file.write_text(text.replace(f"{anchor}\n", f"{anchor}\n{content}"))
    short = []
    for command in commands[3:]:
        for long, shorter in SHORTER.items():
            command = command.replace(long, shorter)
        short.append(command + " steps=3" * (command.startswith("python train.py") and "steps=" not in command))
    done, said = typed(short, tmp_path)
    first, fp16, own, contract, _, tuned, lost, forecast, _, table, loop = said
    assert "initial: 5.bias, 5.weight" in tuned and "finished 20 steps" in own
    assert "amp=bf16" in first and "amp=fp16" in fp16 and all("finished 3 steps" in text for text in (first, fp16))
    assert "1 passed" in contract and re.search(r"-> amp=fp16 .*amp.init_scale=", forecast)
    # The page shows what the doctor says: the same operation at the same line of the recipe.
    title, _, operation, _, source, *_ = report.splitlines()
    for line in (title.split(": ")[1], operation, source):
        assert line in lost + done.stderr, f"{line}\n{lost}\n{done.stderr}"
    assert all(f"| `{mode}` |" in table for mode in ("bf16", "fp16")) and "rmse_metres" in table
    assert "held out" in loop and list(tmp_path.glob("runs/mine/step_*/state.pt"))


WISHES = ROOT / "docs" / "I_WANT_TO.md"


@pytest.mark.slow
def test_every_command_of_the_page_of_wishes_runs(tmp_path):
    copy_to(tmp_path)
    shutil.copytree(ROOT / "hydra_plugins", tmp_path / "hydra_plugins")
    noise = np.random.default_rng(0)
    for name in (*(f"pets/{part}/{kind}" for part in ("train", "val") for kind in ("cat", "dog")), "photos"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(noise.integers(0, 255, (28, 28), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    for part in ("cracks/train", "cracks/val"):
        for kind in ("images", "masks"):
            shutil.copytree(tmp_path / "photos", tmp_path / part / kind)
        for mask in (tmp_path / part / "masks").iterdir():
            Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(mask)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    rows = (f"{x},{x % 7},{2 * x}\n" for x in range(80))
    (tmp_path / "x.csv").write_text("a,b,y\n" + "".join(rows))
    write_tokenizer(tmp_path / "smollm2")
    chat = [{"role": "user", "content": "return"}, {"role": "assistant", "content": "def f(x): return x"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    record(tmp_path / "LJSpeech-1.1", 32, "ljspeech")
    commands = re.findall(r"^\| [^|]* \| `(python [^`]*)`", WISHES.read_text(), re.MULTILINE)
    commands = [command for command in commands if not OF_WHEEL.search(command)]
    assert len(commands) > 30 and commands[0] == "python train.py run_dir=runs/first"
    short = []
    for command in commands:
        if " -m " in command or re.search(r"run_dir=\S+$", command):
            command += " steps=3"
        elif "train.py" in command and not re.search(r"--help|task=|dry_run", command):
            command += " dry_run=true"
        short.append(command.replace("amp=fp32,bf16,fp16 seed=1,2,3", "amp=bf16,fp16"))
    typed(short, tmp_path)
    assert len((tmp_path / "runs/pets/predictions.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "report.html").exists() and (tmp_path / "runs/first/export/model.safetensors").exists()


@pytest.mark.usefixtures("own_folder")
def test_code_of_your_own_runs_when_it_is_due_and_not_in_a_replay(monkeypatch):
    """20 samples in steps of 8: epochs end within steps 3, 5, 8 and 10. Step 4 is not finite, and is looked into."""
    seen, log = [], Loop.log

    def spy(loop, *args, **kwargs):
        seen.append((loop.step + 1, loop.is_replay, loop.due(steps=4), loop.due(epochs=1), loop.due(epochs=2)))
        return log(loop, *args, **kwargs)

    monkeypatch.setattr(Loop, "log", spy)
    faulty = ["amp=bf16", "debug.inject={where:activation,step:4,rank:0,value:inf}", "log_every=1"]
    settings = ["data.num_samples=20", "batch_size=4", "accumulation=2", *faulty, "schedule.horizon=10"]
    run("classification", "whole", *settings, "steps=10")
    computed = [row[0] for row in seen if not row[1]]
    assert computed == list(range(1, 11)) and any(step == 4 for step, is_replay, *_ in seen if is_replay)
    assert [step for step, _, due, _, _ in seen if due] == [4, 8]
    assert [step for step, _, _, due, _ in seen if due] == [3, 5, 8, 10]
    assert [step for step, *_, due in seen if due] == [5, 10]
    whole, seen[:] = list(seen), []
    run("classification", "parts", *settings, "steps=6")
    run("classification", "parts", *settings, "steps=10")
    assert [row for row in seen if not row[1]] == [row for row in whole if not row[1]]


@pytest.mark.usefixtures("own_folder")
def test_a_schedule_per_epoch_changes_the_rate_at_epochs_alone():
    """20 samples in steps of 4: five steps are an epoch, also where the third was skipped and does not count."""
    per_epoch = ["schedule=step", "schedule.options.step_size=5", "schedule.options.gamma=0.5", "optimizer.lr=0.5"]
    small = ["data.num_samples=20", "batch_size=4", "accumulation=1", "log_every=1", "steps=12", "amp=fp32"]
    run("classification", "a", *small, *per_epoch)
    assert [line["lr"] for line in lines("a") if line["split"] == "train"] == [0.5] * 5 + [0.25] * 5 + [0.125] * 2
    run("classification", "b", *small, *per_epoch, "debug.inject={where:gradient,step:3,rank:0,value:inf}")
    assert [line["lr"] for line in lines("b") if line["split"] == "train"] == [0.5] * 6 + [0.25] * 5 + [0.125]
