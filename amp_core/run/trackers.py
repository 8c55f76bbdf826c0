"""TensorBoard and wandb: imported late, on rank 0; their failures never stop a run.

wandb runs in its own process (this file, started as a script), fed through a pipe that never blocks. In the
training process it would patch `sys.exit`, hook the interpreter's exit and start threads that forked data loaders
inherit, and a call that hangs could only be abandoned. A process can be killed, and wandb's service ends with it.
If training is killed, the process sees the end of its input and finishes the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from amp_core.config.files import read_text
from amp_core.config.redact import netrc_logins, wandb_settings
from amp_core.config.schema import LogConfig
from amp_core.run.lines import to_plain, write_text

MAX_FAILURES = 3
"""A tracker is switched off after this many failures."""
INIT_SECONDS = 15
"""How long wandb may try to reach its server."""
CLOSE_SECONDS = 10.0
"""How long `Log.close` waits for wandb."""
MAX_PENDING_BYTES = 1 << 20
"""Limit of what is kept for a wandb process that does not read; the rest is dropped."""

logger = logging.getLogger("amp_recipes")


class TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its imports
            from torch.utils.tensorboard import SummaryWriter
        if folder.is_symlink():
            raise OSError(f"{folder} is a link; remove it")
        # The viewer hides the events of an earlier run in this folder from purge_step on.
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)
        self._num_failures = 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._num_failures == MAX_FAILURES:
            return
        try:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        except Exception as error:  # third-party code may raise anything, and training continues
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                logger.warning("tensorboard is switched off after %d failures: %s", MAX_FAILURES, error)

    def poll(self) -> None:
        """A no-op: its writer has its own thread."""

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._num_failures < MAX_FAILURES:
            try:
                self._writer.close()
            except Exception as error:  # third-party code may raise anything, and the run ends well
                logger.warning("tensorboard: the last events are not written: %s", error)


class Wandb:
    """The training side of wandb. Only `close` may wait."""

    def __init__(self, run_dir: Path, cfg: LogConfig, run_config: dict[str, Any], name: str) -> None:
        self._folder = run_dir / "wandb"
        if self._folder.is_symlink():
            raise OSError(f"{self._folder} is a link; remove it")
        self._heard = b""
        self._has_warned = False
        self._has_dropped = False
        self._pending = bytearray()
        start = {
            "init": {
                "project": cfg.wandb_project,
                "entity": cfg.wandb_entity,
                "group": cfg.wandb_group,
                "tags": cfg.wandb_tags,
                "name": cfg.wandb_name or name,
                "id": os.environ.get("WANDB_RUN_ID")
                or _wandb_id(run_dir / "wandb_id"),  # an agent of a sweep gives one
                "resume": "allow",
                "dir": str(run_dir),
                "mode": _wandb_mode(cfg),
                "config": to_plain(run_config),
            },
            "argv": sys.argv,
            "pid": os.getpid(),
        }
        # In its own session: Ctrl-C reaches only the training, which closes the run in order.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._send(start)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._process is None:
            return
        if len(self._pending) > MAX_PENDING_BYTES:
            if not self._has_dropped:
                self._has_dropped = True
                logger.warning("wandb does not keep up: lines are dropped there, metrics.jsonl has them all")
        else:
            self._send({"log": {"step": step, **numbers}})
        self.poll()

    def poll(self) -> None:
        """Send pending lines and log the answers."""
        if self._process is None:
            return
        try:
            while self._pending:
                del self._pending[: os.write(self._in, self._pending[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, or is about to
            self._pending.clear()
        self._listen()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._send({"summary": to_plain(summary)})
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._process is not None and time.monotonic() < deadline:
            self.poll()
            if self._process is not None:
                select.select([self._out], [self._in] if self._pending else [], [], 0.2)
        if self._process is not None:
            self._has_warned = True
            logger.warning(
                "wandb did not finish within %.0f s and was stopped; metrics.jsonl is complete, and what wandb has is"
                " in %s (send it with: wandb sync)",
                CLOSE_SECONDS,
                self._folder,
            )
            self._end()

    def _send(self, message: dict[str, Any]) -> None:
        self._pending += json.dumps(message).encode() + b"\n"

    def _listen(self) -> None:
        while self._process is not None:
            try:
                data = os.read(self._out, 65536)
            except BlockingIOError:
                return
            *lines, self._heard = (self._heard + data).split(b"\n")
            for line in lines:
                level, text = json.loads(line)
                self._has_warned |= level > logging.INFO
                logger.log(level, "%s", text)
            if not data:
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._pending.clear()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 0
        if code != 0 and not self._has_warned:
            logger.warning("wandb's process died (exit code %d), the run continues without it", code)


def _wandb_id(path: Path) -> str:
    """The run's id in wandb, made once: a resumed run continues under it."""
    try:
        known = read_text(path).strip()
    except (FileNotFoundError, ValueError):
        known = ""
    if re.fullmatch(r"[\w-]{1,64}", known):
        return known
    new = secrets.token_hex(5)
    write_text(path, f"{new}\n")
    return new


def _wandb_mode(cfg: LogConfig) -> str:
    """WANDB_MODE wins over the configuration; `auto` is online when an account is configured, where wandb looks."""
    if (mode := os.environ.get("WANDB_MODE") or cfg.wandb_mode) != "auto":
        return mode
    settings = wandb_settings()
    url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url", "https://api.wandb.ai")
    has_key = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.get("api_key")
    hosts = {host for host, _ in netrc_logins()}
    return "online" if has_key or hosts & {urlsplit(url).netloc, "default"} else "offline"


def _wandb_main() -> None:
    """The process that talks to wandb: reads messages from stdin until their end, answers [level, text] on stdout."""
    # wandb and its service must not write between the answers, nor inherit the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # batch systems send them to all; training then closes this process
        signal.signal(number, signal.SIG_IGN)

    def answer(level: int, text: str) -> None:
        with contextlib.suppress(OSError):  # training was killed; the wandb run is finished nevertheless
            answers.write(json.dumps([level, " ".join(text.split())]) + "\n")

    start = json.loads(sys.stdin.buffer.readline())
    sys.argv = start["argv"]
    try:
        import wandb

        settings = wandb.Settings(
            init_timeout=INIT_SECONDS, console="off", silent=True, save_code=False, disable_code=True, disable_git=True
        )
        if hasattr(settings, "x_stats_pid"):  # whose processor time and memory it plots
            settings.x_stats_pid = start["pid"]
        run = wandb.init(**start["init"], settings=settings)
        run.define_metric("*", step_metric="step")
    except (Exception, SystemExit) as error:  # third-party code may raise anything, and training continues
        answer(logging.WARNING, f"wandb cannot start, the run continues without it: {error}")
        os._exit(0)  # its exit hooks wait for a service that may never answer
    if run.disabled:
        answer(logging.INFO, "wandb is disabled by WANDB_MODE")
    elif run.offline:
        answer(logging.INFO, f"wandb: offline run {run.id}, send it with: wandb sync {run.settings.sync_dir}")
    else:
        answer(logging.INFO, f"wandb: {run.url}")

    failures = 0
    summary: dict[str, Any] = {"exit_code": 1}  # stays if training is killed: then its messages just end
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError:
            break
        if "summary" in message:
            summary = message["summary"]
            break
        try:
            run.log(message["log"])
        except Exception as error:  # third-party code may raise anything, and training continues
            failures += 1
            if failures == MAX_FAILURES:
                answer(logging.WARNING, f"wandb is switched off after {MAX_FAILURES} failures: {error}")
                os._exit(0)

    limit = threading.Timer(CLOSE_SECONDS, os._exit, [1])
    limit.daemon = True
    limit.start()
    try:
        run.summary.update(summary)
        run.finish(exit_code=int(summary.get("exit_code") or 0))
        wandb.teardown()
    except (Exception, SystemExit) as error:  # third-party code may raise anything, and the run ends well
        answer(logging.WARNING, f"wandb could not finish the run: {error}")
    os._exit(0)


if __name__ == "__main__":
    _wandb_main()
