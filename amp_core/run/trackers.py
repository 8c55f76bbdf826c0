"""TensorBoard and wandb: imported late, on rank 0; their failures never stop a run.

wandb runs in its own process (this file, started as a script), which follows a file that training appends to. In the
training process it would patch `sys.exit`, hook the interpreter's exit and start threads that forked data loaders
inherit, and a call that hangs could only be abandoned. A process can be killed, and wandb's service ends with it.
If training is killed, the process finishes the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from amp_core.config.files import read_text
from amp_core.config.redact import netrc_logins, wandb_settings
from amp_core.config.schema import LogConfig
from amp_core.run.lines import to_plain, write_text

INIT_SECONDS = 15
"""How long wandb may try to reach its server."""
CLOSE_SECONDS = 10.0
"""How long `Log.close` waits for wandb."""
_LOOK_SECONDS = 0.2
"""How often the process of wandb looks for messages."""
_MOST_BYTES = 1 << 26
"""Of messages that are received at once."""

logger = logging.getLogger("amp_recipes")


class TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its imports
            from torch.utils.tensorboard import SummaryWriter
        # The viewer hides the events of an earlier run in this folder from purge_step on.
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def poll(self) -> None:
        """A no-op: its writer has its own thread."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()

    def abandon(self) -> None:
        """Close without a summary after a failure. Does not wait."""
        self._writer.close()


class _Messages:
    """Messages from one process to another, through a file without a name: neither waits for the other."""

    def __init__(self, file: FileIO | None = None) -> None:
        self.file, self._end = file or tempfile.TemporaryFile(buffering=0), 0  # noqa: SIM115 - closed by its owner

    def send(self, message: Any) -> None:
        self.file.write(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Any]:
        """Those that came since the last call."""
        whole, newline, _ = os.pread(self.file.fileno(), _MOST_BYTES, self._end).rpartition(b"\n")
        self._end += len(whole + newline)
        return [json.loads(line) for line in whole.splitlines()]

    def follow(self, sender: int) -> Iterator[Any]:
        """All of them, until the process that sends them is gone."""
        is_last = False
        while not is_last:
            is_last = os.getppid() != sender
            yield from self.receive()
            time.sleep(_LOOK_SECONDS)


class Wandb:
    """The training side of wandb. Only `close` may wait."""

    def __init__(self, folder: Path, cfg: LogConfig, run_config: dict[str, Any], name: str) -> None:
        self._folder = folder
        self._messages, self._answers = _Messages(), _Messages()
        init = {
            "project": cfg.wandb_project,
            "entity": cfg.wandb_entity,
            "group": cfg.wandb_group,
            "tags": cfg.wandb_tags,
            "name": cfg.wandb_name or name,
            # An agent of a sweep gives one.
            "id": os.environ.get("WANDB_RUN_ID") or _wandb_id(folder.with_name("wandb_id")),
            "resume": "allow",
            "dir": str(folder.parent),
            "mode": _wandb_mode(cfg),
            "config": to_plain(run_config),
        }
        self._messages.send({"init": init, "argv": sys.argv})
        # In its own session: Ctrl-C reaches only the training, which closes the run in order.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", os.path.abspath(__file__), str(os.getpid())],
            stdin=self._messages.file,
            stdout=self._answers.file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._process is not None:
            self._messages.send({"step": step, **numbers})

    def poll(self, *, is_killed: bool = False) -> None:
        """Log what the process answers, and once if it died."""
        if self._process is None:
            return
        code = self._process.poll()  # before the last answers are read
        for level, text in self._answers.receive():
            logger.log(level, "%s", text)
        if code is not None:
            self._process = None
            self._messages.file.close()
            self._answers.file.close()
        if code and not is_killed:
            logger.warning("wandb's process died (exit code %d), the run continues without it", code)

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._messages.send({"summary": to_plain(summary)})
        is_killed = False
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            is_killed = True
            self._process.kill()
            self._process.wait()
            logger.warning(
                "wandb did not finish within %.0f s and was stopped; metrics.jsonl is complete, and what wandb has is"
                " in %s (send it with: wandb sync)",
                CLOSE_SECONDS,
                self._folder,
            )
        self.poll(is_killed=is_killed)

    def abandon(self) -> None:
        """End its process after a failure, such as a full disk. Does not wait."""
        if self._process is not None:
            self._process.kill()


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


def _wandb_main(training: int) -> None:
    """The process that talks to wandb: follows the messages on stdin to their end, answers [level, text] on stdout."""
    # wandb and its service must not write between the answers, nor inherit the files.
    messages, answers = _Messages(FileIO(os.dup(0))), _Messages(FileIO(os.dup(1), "w"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # batch systems send them to all; training then closes this process
        signal.signal(number, signal.SIG_IGN)

    def answer(level: int, text: str) -> None:
        answers.send([level, " ".join(text.split())])

    received = messages.follow(training)
    start = next(received)
    sys.argv = start["argv"]
    try:
        import wandb

        settings = wandb.Settings(
            init_timeout=INIT_SECONDS, console="off", silent=True, save_code=False, disable_code=True, disable_git=True
        )
        if hasattr(settings, "x_stats_pid"):  # whose processor time and memory it plots
            settings.x_stats_pid = training
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

    summary: dict[str, Any] = {"exit_code": 1}  # stays if training is killed: then its messages just end
    try:
        for message in received:
            if "summary" in message:
                summary = message["summary"]
                break
            run.log(message)
        signal.alarm(int(CLOSE_SECONDS))  # ends this process
        run.summary.update(summary)
        run.finish(exit_code=int(summary.get("exit_code") or 0))
        wandb.teardown()
    except (Exception, SystemExit) as error:  # third-party code may raise anything, and training continues
        answer(logging.WARNING, f"wandb is switched off: {error}")
    os._exit(0)


if __name__ == "__main__":
    _wandb_main(int(sys.argv[1]))
