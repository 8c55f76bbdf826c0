"""Tensorboard and wandb: what they get, and that none of them can stop or stall a run."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import wait_until
from test_log import KEY, environment, lines_of, logged, logging_to, make_log, script, train_line

from amp_core.run import trackers
from amp_core.run.log import Log

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


# --- wandb


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def tracker_of(log: Log) -> trackers.Wandb:
    tracker = log._trackers["wandb"]
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
    "service": "wandb is switched off: ",
    "process": "wandb's process died (exit code -9), the run continues without it",
    "failing server": "wandb cannot start, the run continues without it",
    "silent server": "wandb did not finish within 1 s and was stopped",
}


@pytest.mark.one_in(2)
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


def test_a_process_that_hangs_costs_a_bounded_wait_at_the_end(tmp_path, offline, capsys, monkeypatch):
    usual = trackers.CLOSE_SECONDS
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.5)
    log = make_log(tmp_path, wandb=True)
    child = wandb_process(log)
    os.kill(child.pid, signal.SIGSTOP)
    for step in range(1, 2001):  # it reads nothing any more: whoever waited for it would wait for ever
        log.metrics(train_line(step))
    start = time.monotonic()
    log.close({})
    assert time.monotonic() - start < usual and child.returncode is not None
    (err,) = capsys.readouterr().err.splitlines()
    assert "did not finish within" in err and len(lines_of(tmp_path)) == 2000


def test_a_killed_training_leaves_a_finished_run_and_no_process(tmp_path):
    pytest.importorskip("wandb")
    code = """
        log = make(sys.argv[1], wandb=True)
        log.metrics({"step": 1, "split": "train", "loss": 5.125})
        print(log._trackers['wandb']._process.pid, flush=True)
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
