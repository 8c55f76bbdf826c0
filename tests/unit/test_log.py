"""What a run reports, and that no report can stop or stall it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import random
import re
import select
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import rows
from tqdm import std

from amp_core.config.schema import LogConfig
from amp_core.run import lines, terminal
from amp_core.run.lines import write_json
from amp_core.run.log import Log, check_log

logger = logging.getLogger("amp_recipes")
ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"

PREAMBLE = f"""
import importlib.util, json, os, resource, signal, subprocess, sys, time, types
spec = importlib.util.spec_from_file_location("amp_log", {str(ROOT / "amp_core" / "run" / "log.py")!r})
amp_log = importlib.util.module_from_spec(spec)
spec.loader.exec_module(amp_log)
logger = amp_log.logger
def make(run_dir, **changes):
    cfg = dict(name="test", progress=False, tensorboard=False, wandb=False, wandb_project="p", wandb_mode="auto",
               wandb_entity=None, wandb_group=None, wandb_tags=[], wandb_name=None, quiet=False)
    return amp_log.Log(run_dir, types.SimpleNamespace(**cfg | changes), rank=0, run_config={{"seed": 1}}, name="n",
                       start_step=0, total_steps=100)
"""


def make_log(run_dir: Path, rank: int = 0, start_step: int = 0, shows_scale: bool = True, **changes: Any) -> Log:
    values = {"name": "test", "progress": False, "tensorboard": False, "wandb": False, "wandb_project": "p"}
    more = {"wandb_entity": None, "wandb_group": None, "wandb_tags": [], "wandb_name": None, "quiet": False}
    cfg = LogConfig(**{**values, **more, "wandb_mode": "offline", **changes})
    run = {"run_config": {"seed": 1, "amp": {"init_scale": 65536.0}}, "name": "n", "total_steps": 100}
    return Log(run_dir, cfg, rank=rank, start_step=start_step, shows_scale=shows_scale, **run)


@contextlib.contextmanager
def logging_to(run_dir: Path, **options: Any) -> Iterator[Log]:
    log = make_log(run_dir, **options)
    try:
        yield log
    finally:
        log.close({})


def logged(run_dir: Path, *metrics: dict[str, Any], **options: Any) -> None:
    """A run that reports these metrics."""
    with logging_to(run_dir, **options) as log:
        for each in metrics:
            log.metrics(each)


def train_line(step: int, **more: Any) -> dict[str, Any]:
    numbers = {"loss": 0.5, "lr": 1e-3, "loss_scale": 65536.0, "skipped": 0, "grad_norm": 1.2}
    return {"step": step, "split": "train", **numbers, "samples_per_second": 900.0, **more}


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment(home: Path, **more: str) -> dict[str, str]:
    """No account of the machine's user, no setting of the caller."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") and key != "NETRC"}
    return {**kept, "HOME": str(home), **more}


def script(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


# --- metrics.jsonl


def test_metrics_are_one_object_a_line_and_not_finite_is_null(tmp_path):
    logged(
        tmp_path,
        train_line(10, loss=float("nan"), nested={"a": [float("inf"), 1.0]}, norm=torch.tensor(2.5)),
        {"step": 10, "split": "eval", "loss": torch.tensor(float("nan")), "accuracy": 0.5},
    )
    first, second = lines_of(tmp_path)
    assert first == {**train_line(10), "loss": None, "nested": {"a": [None, 1.0]}, "norm": 2.5}
    assert second == {"step": 10, "split": "eval", "loss": None, "accuracy": 0.5}


def test_a_killed_run_has_all_its_lines(tmp_path):
    code = """
        log = make(sys.argv[1])
        log.metrics({"step": 1, "split": "train", "loss": 1.0})
        logger.info("hello")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert script(code, tmp_path).communicate(timeout=30)[1] == ""
    assert len(lines_of(tmp_path)) == 1 and "hello" in (tmp_path / "train.log").read_text()


def test_a_resume_cuts_what_lies_beyond_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 10,  "split": "train", "loss": 1.0}\n{"step": 20, "split": "eval", "loss": 1.0}\n'
    path.write_bytes(kept.encode() + b'{"step": 30, "split": "train", "loss": 1.0}\n{"step": 40, "split": "tr\xff')
    with logging_to(tmp_path, start_step=20) as log:
        assert path.read_text() == kept
        for step in (20, 30):
            log.metrics({"step": step, "split": "train", "loss": 2.0})
    expected = [(10, "train", 1.0), (20, "eval", 1.0), (20, "train", 2.0), (30, "train", 2.0)]
    assert [(line["step"], line["split"], line["loss"]) for line in lines_of(tmp_path)] == expected
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")] == []


def test_every_step_of_a_split_stands_once_and_a_fresh_start_cuts_all(tmp_path):
    every = [{"step": step, "split": split} for step in (10, 20, 20, 30) for split in ("train", "eval")]
    for start_step in (0, 20):
        logged(tmp_path, *every, start_step=start_step)
    assert [line["step"] for line in lines_of(tmp_path)] == [10, 10, 20, 20, 30, 30]
    logged(tmp_path)
    assert lines_of(tmp_path) == []


def test_whole_lines_up_to_the_step_are_left_whatever_the_end(tmp_path):
    path, draw = tmp_path / "metrics.jsonl", random.Random(0)
    damages = ["", '{"step": 9, "spl', "null\n[1]\n", '{"step": 1e400}\n', "x" * 5000, "\0" * 300, "\n\n"]
    for case in range(60):
        rows = [{"step": step, "split": "train", "loss": draw.random()} for step in range(0, 400, 2)]
        rows += [{"step": step, "split": "eval", "loss": 0.5} for step in range(0, 400, 10)]
        whole = [json.dumps(row) for row in sorted(rows, key=lambda row: row["step"])]
        last_step = draw.choice([-1, 0, 7, 200, 391, 398, 1000])
        kept = [line for line in whole if json.loads(line)["step"] <= last_step]
        twice = whole[-draw.randint(1, 5) :] if draw.random() < 0.5 else []
        there = [*whole, *twice]
        there.insert(draw.randrange(len(there)), damages[case % 7].rstrip("\n"))
        path.write_text("".join(f"{line}\n" for line in there) + damages[case % 7])
        last = lines.cut_lines(path, last_step)
        assert path.read_text().splitlines() == kept
        assert not kept or last[json.loads(kept[-1])["split"]] == json.loads(kept[-1])["step"]


def test_a_full_disk_warns_once_and_leaves_whole_lines(tmp_path):
    code = """
        log = make(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for step in range(1, 101):
            log.metrics({"step": step, "split": "train", "loss": 0.5})
            logger.info("a message of some length")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.metrics({"step": 101, "split": "train", "loss": 0.5})
        log.close({})
    """
    out, err = finish(script(code, tmp_path))
    assert out.count("a message") == 100
    assert err.count("metrics.jsonl cannot be written") == err.count("train.log cannot be written") == 1
    assert err.count("\n") == 2
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps == [*range(1, len(steps)), 101] and len(steps) > 10


def test_ranks_above_zero_write_nothing(tmp_path):
    with logging_to(tmp_path / "run", rank=1, progress=True, tensorboard=True, wandb=True) as log:
        log.metrics(train_line(1))
        log.advance(1)
    assert list(tmp_path.iterdir()) == []


# --- messages


def test_messages_go_to_stdout_warnings_to_stderr_and_both_to_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with logging_to(tmp_path):
        logger.info("100% done")
        logger.warning(f"server says: {KEY} is wrong")
        logging.getLogger("amp_recipes.part").warning("of a part")
    assert capsys.readouterr() == ("100% done\n", "warning: server says: *** is wrong\nwarning: of a part\n")
    written = (tmp_path / "train.log").read_text().splitlines()
    written = [re.sub(r"^[\d-]+ [\d:,]+ ", "", line) for line in written]
    assert written == ["INFO 100% done", "WARNING server says: *** is wrong", "WARNING of a part"]
    with logging_to(tmp_path, rank=3):
        logger.info("silent")
        logger.warning("beware")
    assert capsys.readouterr() == ("", "[rank 3] warning: beware\n")


def test_runs_after_one_another_do_not_repeat_lines(tmp_path, capsys):
    before = logger.handlers[:], logger.level, logger.propagate
    broken = make_log(tmp_path / "never closed")
    for name in ("a", "b"):
        with logging_to(tmp_path / name) as log:
            logger.info(f"run {name}")
            if name == "b":
                log.close({})
    assert capsys.readouterr().out == "run a\nrun b\n"
    assert (tmp_path / "a" / "train.log").read_text().count("run") == 1
    broken.close({})
    assert (logger.handlers, logger.level, logger.propagate) == before


def test_a_closed_pipe_does_not_stop_the_run(tmp_path):
    code = """
        log = make(sys.argv[1], progress=True)
        for step in range(1, 101):
            logger.info("to nobody")
            logger.warning("to nobody")
            log.metrics({"step": step, "split": "train", "loss": 0.5})
            log.advance(step)
        log.close({})
        os._exit(7)  # Python's own flush of the closed stdout is not what is tested
    """
    process = script(code, tmp_path)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    assert process.wait(30) == 7 and len(lines_of(tmp_path)) == 100


# --- progress


FACTS = "loss 0.5  skipped 0  900 samples/s  scale 65536  lr 1.0e-03"
PROGRESS = {  # options, reported lines, what stderr shows of them
    "a few plain lines in a file": (
        {},
        [train_line(s, loss=0.43121, lr=9.8e-4, samples_per_second=912.3) for s in range(10, 101, 10)],
        [f"step {s}/100  loss 0.4312  skipped 0  912 samples/s  scale 65536  lr 9.8e-04" for s in (10, 100)],
    ),
    "no loss scale in a mode without": (
        {"shows_scale": False},
        [train_line(100, loss_scale=1.0)],
        ["step 100/100  loss 0.5  skipped 0  900 samples/s  lr 1.0e-03"],
    ),
    "much waiting": ({}, [train_line(100, data_wait=0.42)], [f"step 100/100  {FACTS}  42% waiting for data"]),
    "little waiting": ({}, [train_line(100, data_wait=0.04)], [f"step 100/100  {FACTS}"]),
    "a loss that is no number": (
        {},
        [train_line(step, loss=float("nan")) for step in (10, 20, 30)],
        [f"step {step}/100  {FACTS.replace('0.5', 'nan')}" for step in (10, 30)],  # the last one when the log ends
    ),
    "nothing when quiet": ({"quiet": True}, [train_line(100)], []),
}


@pytest.mark.parametrize("case", PROGRESS)
def test_progress_in_a_file(case, tmp_path, capsys):
    options, reported, expected = PROGRESS[case]
    with logging_to(tmp_path, progress=True, **options) as log:
        log.advance(1)
        logger.info("a message")
        for metrics in reported:
            log.metrics(metrics)
    out, err = capsys.readouterr()
    assert out == ("" if "quiet" in case else "a message\n")
    assert [re.sub("  (00:00|[?]) left$", "", line) for line in err.splitlines()] == expected
    assert lines_of(tmp_path)[-1]["loss_scale"] == reported[-1]["loss_scale"]


def test_the_time_left_is_that_of_the_steps_so_far_for_those_to_come(capsys, monkeypatch):
    """Step 1 ends at 7 s and starts the clock, 10 steps take 50 s, and 89 are left."""
    now = 7.0
    monkeypatch.setattr(std, "time", lambda: now)
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    progress = terminal.Progress(100, shows_scale=True)
    for step, now in ((1, 7.0), (11, 57.0), (51, 337.0)):  # noqa: B007
        progress.show(step, train_line(step))
    left = [line.partition("lr 1.0e-03")[2] for line in capsys.readouterr().err.splitlines()]
    assert left == ["  ? left", "  07:25 left", "  05:23 left"]  # 89 * 5 s, 49 * 6.6 s


def on_terminal(code: str, run_dir: Path, columns: int, **environ: str) -> str:
    """The output of a script on a terminal of so many columns."""
    main, sub = pty.openpty()
    termios.tcsetwinsize(sub, (24, columns))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(run_dir)],
        stdout=sub,
        stderr=sub,
        env=inherited | {"TERM": "xterm"} | environ,
    )
    os.close(sub)
    output = b""
    while select.select([main], [], [], 30)[0]:
        try:
            output += os.read(main, 65536)
        except OSError:  # Linux' way to say that the other end is closed
            break
        if process.poll() is not None and not select.select([main], [], [], 0)[0]:
            break
    os.close(main)
    assert process.wait(30) == 0, output.decode()
    return output.decode()


def screen(output: str) -> list[str]:
    """What a person sees: a carriage return goes back, later characters overwrite."""
    found = []
    for line in output.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        found.append("".join(cells).rstrip())
    return found


TERMINAL_RUN = """
    log = make(sys.argv[1], progress=True)
    logger.info("before the bar")
    for step in range(1, 101):
        time.sleep(0.01)
        log.advance(step)
        if step % 10 == 0:
            log.metrics({"step": step, "split": "train", "loss": 0.43121, "lr": 9.8e-4, "loss_scale": 65536.0,
                         "skipped": 2, "samples_per_second": 912.3})
        if step == 50:
            logger.info("half way")
            logger.warning("beware")
    log.close({})
    print("after")
"""


BARS = {
    0: "loss 0.4312  skipped 2",  # as terminals without a size say
    200: "loss 0.4312  skipped 2  912 samples/s  scale 65536  lr 9.8e-04",
    90: "loss 0.4312  skipped 2  912 samples/s",
    60: "loss 0.4312",
}
"""What a terminal of so many columns shows at the end, behind the bar: whole facts."""


@pytest.mark.parametrize("columns", rows(list(BARS), 90))
def test_a_bar_on_a_terminal_is_whole_and_messages_do_not_tear_it(tmp_path, columns):
    output = on_terminal(TERMINAL_RUN, tmp_path, columns, TQDM_DISABLE="1")  # which is for other bars
    before, half, beware, bar, after, *_ = screen(output)
    assert (before, half, beware, after) == ("before the bar", "half way", "warning: beware", "after")
    head = r"100%\|█{6,}\| 100/100 00:00 left "
    assert re.fullmatch(head + re.escape(BARS[columns]), bar) and len(bar) <= (columns or 80)


# --- the rest


def test_missing_packages_are_named_with_the_remedy(tmp_path, monkeypatch):
    cfg = LogConfig("all", True, True, True, "p", "auto", None, None, [], None, False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # as a run leaves it in the working directory
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert check_log(cfg) == [
        "log=all needs the package tensorboard: pip install 'amp-recipes[tensorboard]'",
        "log=all needs the package wandb: pip install 'amp-recipes[wandb]'",
    ]
    assert check_log(LogConfig("default", True, False, False, "p", "auto", None, None, [], None, False)) == []


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": float("nan"), "dir": tmp_path, "list": (1, float("-inf"))})
    assert json.loads(path.read_text()) == {"loss": None, "dir": str(tmp_path), "list": [1, None]}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_json(tmp_path / "folder", {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "summary.json"]
