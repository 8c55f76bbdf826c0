"""What a run reports, and that no report can stop or stall it."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import wait_until
from tiers import rows

from amp_core.config.schema import LogConfig
from amp_core.run import lines, terminal, trackers
from amp_core.run.lines import write_json
from amp_core.run.log import Log, check_log
from amp_core.run.terminal import TerminalHandler, complain

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


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    """What is left is what reading all of it leaves, wherever blocks begin and however the end is damaged."""
    path, draw = tmp_path / "metrics.jsonl", random.Random(0)
    for case in range(200):
        rows = [{"step": step, "split": "train", "loss": draw.random()} for step in range(0, 400, 2)]
        rows += [{"step": step, "split": "eval", "loss": 0.5} for step in range(0, 400, 10)]
        whole = [json.dumps(row) for row in sorted(rows, key=lambda row: row["step"])]
        last_step = draw.choice([-1, 0, 7, 200, 391, 398, 1000])
        kept = [line for line in whole if json.loads(line)["step"] <= last_step]
        damage = ["", '{"step": 9, "spl', "null\n[1]\n", '{"step": 1e400}\n', "x" * 5000, "\0" * 300, "\n\n"][case % 7]
        twice = whole[-draw.randint(1, 5) :] if draw.random() < 0.5 else []
        path.write_text("".join(f"{line}\n" for line in [*whole, *twice]) + damage)
        monkeypatch.setattr(lines, "_BLOCK", draw.choice([4096, 1 << 20] if twice else [100, 257, 4096]))
        last = lines.cut_lines(path, last_step)
        assert path.read_text().splitlines() == kept
        assert not kept or last[json.loads(kept[-1])["split"]] == json.loads(kept[-1])["step"]


def test_a_resume_reads_little_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = '{"step": %d, "split": "train", "loss": 1.0, "lr": 0.001, "samples_per_second": 1000.0}\n'
    path.write_text("".join(line % step for step in range(500_000)))  # 40 MB
    tracemalloc.start()
    assert lines.cut_lines(path, 499_000) == {"train": 499_000}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size == sum(len(line % step) for step in range(499_001))
    assert peak < path.stat().st_size / 4  # reading all of it takes more than its size


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


FACTS = "loss 0.5  lr 1.0e-03  scale 65536  skipped 0  900 samples/s"
PROGRESS = {  # options, reported lines, what stderr shows of them
    "a few plain lines in a file": (
        {},
        [train_line(s, loss=0.43121, lr=9.8e-4, samples_per_second=912.3) for s in range(10, 101, 10)],
        [
            f"step {s}/100  loss 0.4312  lr 9.8e-04  scale 65536  skipped 0  912 samples/s  00:00 left"
            for s in (10, 100)
        ],
    ),
    "no loss scale in a mode without": (
        {"shows_scale": False},
        [train_line(100, loss_scale=1.0)],
        ["step 100/100  loss 0.5  lr 1.0e-03  skipped 0  900 samples/s"],
    ),
    "much waiting": (
        {},
        [train_line(100, data_wait=0.42)],
        [f"step 100/100  {FACTS}  42 % waiting for data"],
    ),
    "little waiting": ({}, [train_line(100, data_wait=0.04)], [f"step 100/100  {FACTS}"]),
    "the last line of a run that stops early": (
        {},
        [train_line(step, loss=float("nan")) for step in (10, 20, 30)],
        [f"step {step}/100  {FACTS.replace('0.5', 'nan')}" for step in (10, 30)],
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
    assert [line.removesuffix("  00:00 left") for line in err.splitlines()] == [
        line.removesuffix("  00:00 left") for line in expected
    ]
    assert lines_of(tmp_path)[-1]["loss_scale"] == reported[-1]["loss_scale"]


def test_the_time_left_is_that_of_the_steps_so_far_for_those_to_come(tmp_path, capsys, monkeypatch):
    """Step 1 ends at 7 s and starts the clock, 10 steps take 50 s, and 89 are left."""
    progress = terminal.Progress(100, shows_scale=True)
    for step, now in ((1, 7.0), (11, 57.0), (51, 337.0)):
        monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda now=now: now))
        progress.show(step, train_line(step))
        progress.close(step)
    left = [line.partition("samples/s")[2] for line in capsys.readouterr().err.splitlines()]
    assert left == ["", "  07:25 left", "  05:23 left"]  # 89 * 5 s, 49 * 6.6 s


def test_plain_lines_come_every_few_seconds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.2)
    began = time.monotonic()
    with logging_to(tmp_path, progress=True) as log:
        for step in range(1, 51):
            log.metrics(train_line(step))
            time.sleep(0.01)
    most = (time.monotonic() - began) / 0.2 + 2  # the first and the last one are not counted by the clock
    assert 3 <= len(capsys.readouterr().err.splitlines()) <= min(most, 50)


def test_advance_costs_next_to_nothing(tmp_path):
    with logging_to(tmp_path, progress=True) as log:
        start = time.process_time()
        for step in range(100_000):
            log.advance(step)
        assert time.process_time() - start < 1.0


def on_terminal(code: str, run_dir: Path, columns: int, **environ: str) -> str:
    """The output of a script on a terminal of so many columns."""
    main, sub = pty.openpty()
    termios.tcsetwinsize(sub, (24, columns))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(run_dir)],
        stdout=sub,
        stderr=sub,
        env=inherited | {"TERM": "xterm", "NO_COLOR": "1"} | environ,
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
    0: "00:00 left loss 0.4312 scale 65536 skipped 2 912/s",  # as terminals without a size say
    200: "00:00 left loss 0.4312 lr 9.8e-04 scale 65536 skipped 2 912/s",
    80: "00:00 left loss 0.4312 scale 65536 skipped 2 912/s",
    60: "00:00 left loss 0.4312 skipped 2 912/s",
    50: "00:00 left loss 0.4312",
    30: "100/100 00:00 left",
    12: "100/100",
    5: "100%",
}
"""What a terminal of so many columns shows at the end, behind the bar: whole facts."""


@pytest.mark.parametrize("columns", rows(list(BARS), 80))
def test_a_bar_on_a_terminal_is_whole_and_messages_do_not_tear_it(tmp_path, columns):
    output = on_terminal(TERMINAL_RUN, tmp_path, columns)
    before, half, beware, bar, after, *_ = screen(output)
    assert (before, half, beware, after) == ("before the bar", "half way", "warning: beware", "after")
    head = r"100%\|█{6,}\| 100/100 " if columns == 0 or columns > 40 else ""
    assert re.fullmatch(head + re.escape(BARS[columns]), bar) and len(bar) <= (columns or 80)


def test_a_dumb_terminal_gets_lines_and_no_codes(tmp_path):
    output = on_terminal(TERMINAL_RUN, tmp_path, 80, TERM="dumb", NO_COLOR="")
    assert "\r" not in output.replace("\r\n", "") and "\x1b" not in output and "step 100/100  loss 0.4312" in output


COLOURS = [  # environment, on a terminal, in colour
    ({}, True, True),
    ({}, False, False),
    ({"NO_COLOR": "1"}, True, False),
    ({"NO_COLOR": ""}, True, True),
    ({"TERM": "dumb"}, True, False),
    ({"FORCE_COLOR": "1"}, False, True),
    ({"FORCE_COLOR": "0"}, False, False),
    ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
]


@pytest.mark.parametrize("environ, is_terminal, in_colour", COLOURS)
def test_errors_and_warnings_are_in_colour_where_colours_show(environ, is_terminal, in_colour, monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    complain("steps=x: expected a number\n       error: of a line below")
    for rank in (0, 3):
        TerminalHandler(rank).emit(logging.LogRecord("", logging.WARNING, "", 0, "the error: stays", None, None))
    red, yellow, end = ("\x1b[1;31m", "\x1b[1;33m", "\x1b[0m") if in_colour else ("", "", "")
    assert capsys.readouterr().err.splitlines() == [
        f"{red}error:{end} steps=x: expected a number",
        "       error: of a line below",
        f"{yellow}warning:{end} the error: stays",
        f"[rank 3] {yellow}warning:{end} the error: stays",
    ]


PLAN = "classification: cnn on mnist_subset\n  amp=bf16 on 1 x cpu, AdamW fused, schedule warmup_cosine over 750 steps"


@pytest.mark.parametrize("columns, extra, expected", [
    (50, {"is_plan": True}, ["classification: cnn on mnist_subset", "  amp=bf16 on 1 x cpu, AdamW fused, schedule",
                             "      warmup_cosine over 750 steps"]),
    (200, {"is_plan": True}, PLAN.split("\n")),
    (50, {}, PLAN.split("\n")),  # what is to be copied, such as a command, stays in a piece
])  # fmt: skip
def test_a_plan_ends_its_lines_between_words(columns, extra, expected, tmp_path):
    code = f"log = make(sys.argv[1])\nlogger.info({PLAN!r}, extra={extra!r})\nlog.close({{}})"
    assert [line for line in screen(on_terminal(code, tmp_path, columns)) if line] == expected
    assert PLAN.split("\n")[1] in (tmp_path / "train.log").read_text()


CLOCK_RUN = """
    log = make(sys.argv[1], progress=True)
    logger.info("before")
    with log.clock("compiling", time.monotonic() - 61):
        time.sleep(1.5)
        logger.info("within")
        time.sleep(1)
    log.close({})
    print("after")
"""


def test_a_clock_ticks_on_a_terminal_and_leaves_nothing_behind(tmp_path, capsys):
    output = on_terminal(CLOCK_RUN, tmp_path, 80)
    assert all(f"compiling: 01:0{second}" in output for second in (1, 2, 3))
    assert [line for line in screen(output) if line] == ["before", "within", "after"]
    before = threading.enumerate()
    with logging_to(tmp_path, progress=True) as log, log.clock("compiling", 0.0):  # in a file
        threads = threading.enumerate()
    assert capsys.readouterr() == ("", "") and not set(threads) - set(before)


# --- tensorboard


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulator_module.EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def test_tensorboard_events_are_readable_and_a_resume_hides_what_was_cut(tmp_path):
    pytest.importorskip("tensorboard")
    both = {"split": "train", "loss": 0.5, "parts": {"a": 1}, "note": "text", "none": None}
    last = {"step": 30, "split": "eval", "accuracy": 0.25}
    logged(tmp_path, *({"step": step, **both} for step in (10, 20, 30)), last, tensorboard=True)
    assert events(tmp_path / "tensorboard") == {
        "train/loss": [(10, 0.5), (20, 0.5), (30, 0.5)],
        "train/parts/a": [(10, 1.0), (20, 1.0), (30, 1.0)],
        "eval/accuracy": [(30, 0.25)],
    }
    logged(tmp_path, {"step": 30, "split": "train", "loss": 0.75}, tensorboard=True, start_step=20)
    assert events(tmp_path / "tensorboard")["train/loss"] == [(10, 0.5), (20, 0.5), (30, 0.75)]


def test_a_tensorboard_that_cannot_start_is_one_warning(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    logged(tmp_path, train_line(1), tensorboard=True)
    assert capsys.readouterr().err.count("tensorboard cannot start, the run continues without it") == 1
    assert len(lines_of(tmp_path)) == 1


@pytest.mark.slow
def test_a_tensorboard_that_fails_is_switched_off_with_one_warning(tmp_path):
    pytest.importorskip("tensorboard")
    code = """
        log = make(sys.argv[1], tensorboard=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for step in range(1, 200):
            log.metrics({"step": step, "split": "train", **{f"number_{i}": 0.5 for i in range(50)}})
        log.close({})
    """
    _, err = finish(script(code, tmp_path))
    assert err.count("tensorboard is switched off after 3 failures") == 1, err


# --- wandb


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def tracker_of(log: Log) -> trackers.Wandb:
    (tracker,) = log._trackers
    assert isinstance(tracker, trackers.Wandb)
    return tracker


def wandb_process(log: Log) -> subprocess.Popen[bytes]:
    process = tracker_of(log)._process
    assert process is not None
    return process


def offline_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_an_offline_run_is_continued_under_its_id(tmp_path, offline, capsys):
    for start_step in (0, 20):
        log = make_log(tmp_path, wandb=True, start_step=start_step)
        for step in (start_step + 10, start_step + 20):
            log.metrics(train_line(step, loss=step + 0.125))
        log.close({"status": "finished", "exit_code": 0, "eval": {"accuracy": float("nan")}})
        time.sleep(max(0.0, 1.1 - time.time() % 1))  # wandb names folders by the second
    known = (tmp_path / "wandb_id").read_text().strip()
    first, second = offline_files(tmp_path)
    assert first.name == second.name == f"run-{known}.wandb"
    for file, step in ((first, 20), (second, 40)):
        content = file.read_bytes()
        assert b"train/loss" in content and f"{step}.125".encode() in content
        assert b"finished" in content and b"init_scale" in content
    out, err = capsys.readouterr()
    assert err == "" and out.count("wandb: offline run") == 2


@contextlib.contextmanager
def server_of(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wandb server that answers 501, or one that lets connect and is silent."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        for name, value in {"MODE": "online", "API_KEY": KEY, "BASE_URL": url}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        if what == "failing server":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        if what == "failing server":
            server.shutdown()


DEAD = {
    "service": "wandb is switched off after 3 failures",
    "process": "wandb's process died (exit code -9), the run continues without it",
    "failing server": "wandb cannot start, the run continues without it",
    "silent server": "wandb did not finish within 1 s and was stopped",
}


@pytest.mark.parametrize("what", DEAD)
def test_a_dead_wandb_is_one_warning_and_training_goes_on(what, tmp_path, offline, capsys, monkeypatch):
    if what == "silent server":
        monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
    server = server_of(what, monkeypatch) if "server" in what else contextlib.nullcontext()
    with server, logging_to(tmp_path, wandb=True) as log:
        dead = wandb_process(log).pid
        if what == "service":
            wait_until(lambda: log.advance(1) or "offline run" in capsys.readouterr().out)
            children = subprocess.run(["pgrep", "-P", str(dead)], capture_output=True, text=True, check=True).stdout
            dead = int(children)
        if what in ("service", "process"):
            os.kill(dead, signal.SIGKILL)
        if what == "failing server":
            wait_until(lambda: log.advance(1) or tracker_of(log)._process is None)
        for step in range(1, 50):
            log.metrics(train_line(step))
            log.advance(step)
            time.sleep(0.02)
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert capsys.readouterr().err.count("warning: ") == 1 and len(lines_of(tmp_path)) == 49
    assert DEAD[what] in (tmp_path / "train.log").read_text()


def test_a_process_that_hangs_costs_lines_there_and_a_bounded_wait_at_the_end(tmp_path, offline, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_PENDING_BYTES", 20_000)
    usual = trackers.CLOSE_SECONDS
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    log = make_log(tmp_path, wandb=True)
    child = wandb_process(log)
    os.kill(child.pid, signal.SIGSTOP)
    for step in range(1, 2001):  # it reads nothing any more: whoever waited for it would wait for ever
        log.metrics(train_line(step))
    assert len(tracker_of(log)._pending) < 25_000
    start = time.monotonic()
    log.close({})
    assert time.monotonic() - start < usual and child.returncode is not None
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "wandb does not keep up" in err[0]
    assert "did not finish within" in err[1] and len(lines_of(tmp_path)) == 2000


def test_a_killed_training_leaves_a_finished_run_and_no_process(tmp_path):
    pytest.importorskip("wandb")
    code = """
        log = make(sys.argv[1], wandb=True)
        log.metrics({"step": 1, "split": "train", "loss": 5.125})
        print(log._trackers[0]._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = script(code, tmp_path, env=environment(tmp_path, WANDB_MODE="offline"))
    child = int(process.communicate(timeout=30)[0])
    wait_until(lambda: not is_running(child))
    (file,) = offline_files(tmp_path)
    assert b"5.125" in file.read_bytes()


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


NETRC = "machine {} login user password secret\n"
ACCOUNTS = [  # wandb_mode, netrc, settings file, environment, the mode
    ("auto", "", "", {}, "offline"),
    ("online", "", "", {}, "online"),
    ("offline", NETRC.format("api.wandb.ai"), "", {}, "offline"),
    ("auto", NETRC.format("elsewhere"), "", {}, "offline"),
    ("auto", NETRC.format("api.wandb.ai"), "", {}, "online"),
    ("auto", NETRC.format("api.wandb.ai"), "", {"WANDB_BASE_URL": "http://own.server:8080"}, "offline"),
    ("auto", "", "[default]\napi_key = secret\n", {"WANDB_BASE_URL": "http://own.server:8080"}, "online"),
    ("auto", "nonsense", "nonsense", {}, "offline"),
    ("auto", "nonsense", "nonsense", {"WANDB_API_KEY": KEY}, "online"),
    ("online", "", "", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
]


@pytest.mark.parametrize("wandb_mode, netrc, settings, environ, expected", ACCOUNTS)
def test_the_mode_is_online_only_with_an_account(tmp_path, monkeypatch, wandb_mode, netrc, settings, environ, expected):
    for key in [key for key in os.environ if key.startswith("WANDB_") or key == "NETRC"]:
        monkeypatch.delenv(key)
    for key, value in ({"HOME": str(tmp_path)} | environ).items():
        monkeypatch.setenv(key, value)
    (tmp_path / ".config" / "wandb").mkdir(parents=True)
    for file, text in ((".netrc", netrc), (".config/wandb/settings", settings)):
        if text:
            (tmp_path / file).write_text(text)
    assert trackers._wandb_mode(SimpleNamespace(wandb_mode=wandb_mode)) == expected


def test_the_id_is_made_once(tmp_path):
    first = trackers._wandb_id(tmp_path / "wandb_id")
    assert trackers._wandb_id(tmp_path / "wandb_id") == first
    (tmp_path / "wandb_id").write_text("../../etc")
    assert re.fullmatch(r"\w+", trackers._wandb_id(tmp_path / "wandb_id"))


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


def test_checking_imports_nothing(tmp_path):
    code = """
        cfg = types.SimpleNamespace(name="all", tensorboard=True, wandb=True)
        amp_log.check_log(cfg)
        make(sys.argv[1], progress=True).close({})
        print(sorted(name for name in sys.modules if name in ("wandb", "torch", "tensorboard", "hydra", "omegaconf")))
    """
    assert finish(script(code, tmp_path))[0] == "[]\n"


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": float("nan"), "dir": tmp_path, "list": (1, float("-inf"))})
    assert json.loads(path.read_text()) == {"loss": None, "dir": str(tmp_path), "list": [1, None]}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_json(tmp_path / "folder", {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "summary.json"]


def test_the_options_hold_every_key_of_the_config():
    yaml = pytest.importorskip("yaml")
    for name in ("default", "none", "tensorboard", "wandb", "all"):
        text = (ROOT / "conf" / "log" / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        cfg = LogConfig(**yaml.safe_load(text))
        trackers = [name in (tracker, "all") for tracker in ("tensorboard", "wandb")]
        assert [cfg.name, cfg.tensorboard, cfg.wandb, cfg.wandb_mode] == [name, *trackers, "auto"]
