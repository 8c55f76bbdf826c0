"""Where a run reports: metrics.jsonl and train.log always, a progress bar, TensorBoard and wandb when asked.

Nothing here stops or stalls training: a full disk, a missing package, an unreachable server each give one warning.

On the terminal, messages (`info`) go to stdout, because the results of a run are among them; progress and warnings go
to stderr. Rank 0 writes everything; the other ranks only send their warnings to stderr.

wandb runs in a process of its own (this file, started as a script), fed through a pipe that never blocks. In the
training process it would patch `sys.exit`, hook the interpreter's exit and start threads that forked data loaders
inherit, and a call that hangs could only be abandoned. A process is simply ended, and wandb's service ends with it.
Should training be killed, the process sees the end of its input and finishes the run.

This module does not import torch (`torch.utils.tensorboard` is, when asked for).
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import importlib.util
import io
import json
import logging
import math
import netrc
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tqdm import tqdm

if TYPE_CHECKING:
    from amp_core.config import LogConfig

TICK_SECONDS = 0.1
"""How often `Log.advance` does more than compare the time."""
LINE_SECONDS = 5.0
"""Least time between progress lines when stderr is not a terminal."""
LARGE_WAIT = 0.1
"""A share of the time spent waiting for data that the progress line mentions."""
MAX_FAILURES = 3
"""A tracker that failed so often is switched off."""
INIT_SECONDS = 15
"""How long wandb may try to reach its server."""
CLOSE_SECONDS = 10.0
"""How long `Log.close` waits for wandb."""
MAX_PENDING_BYTES = 1 << 20
"""What waits for a wandb that does not read; more is dropped."""


class Log:
    """The reports of one run.

    Args:
        run_dir: folder of the run.
        cfg: what is wanted besides metrics.jsonl and train.log.
        rank: of this process. Above 0 only warnings are passed on and `metrics` and `advance` do nothing.
        run_config: the plain dictionary of the whole configuration; wandb stores it.
        name: name of the run in wandb.
        start_step: the step after which this run goes on; 0 for a fresh start.
        total_steps: the step at which the run ends.
        last_line_step: lines of metrics up to this step are kept, those beyond it are cut. None: `start_step` on a
            resume; a fresh start keeps none.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        cfg: LogConfig,
        *,
        rank: int,
        run_config: dict[str, Any],
        name: str,
        start_step: int,
        total_steps: int,
        last_line_step: int | None = None,
    ) -> None:
        run_dir = Path(run_dir).absolute()
        self._is_main = rank == 0
        self._is_closed = False
        self._step = start_step
        self._next_tick = 0.0
        self._progress: _Progress | None = None
        self._tensorboard: _TensorBoard | None = None
        self._wandb: _Wandb | None = None
        self._tensorboard_failures = 0
        self._last_steps: dict[str, int] = {}
        if self._is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
        self._open_text(run_dir, rank)
        if not self._is_main:
            return

        if last_line_step is None:
            last_line_step = start_step if start_step > 0 else -1
        self._metrics_file = _LineFile(run_dir / "metrics.jsonl", self.warning)
        try:
            self._last_steps = _cut(run_dir / "metrics.jsonl", last_line_step)
        except OSError as error:
            self.warning(f"metrics.jsonl: lines beyond step {last_line_step} cannot be cut and stand twice: {error}")
        self._statistics_file: _LineFile | None = None
        self._statistics_path = run_dir / "doctor" / "statistics.jsonl"
        try:
            _cut(self._statistics_path, last_line_step)
        except OSError as error:
            self.warning(f"{self._statistics_path}: lines beyond step {last_line_step} cannot be cut: {error}")
        if cfg.progress:
            self._progress = _Progress(total_steps)
        if cfg.tensorboard:
            try:
                self._tensorboard = _TensorBoard(run_dir / "tensorboard", last_line_step + 1)
            except Exception as error:  # a third party's: whatever it is, training goes on without it
                self.warning(f"tensorboard cannot start, the run goes on without it: {error}")
        if cfg.wandb:
            try:
                self._wandb = _Wandb(run_dir, cfg, run_config, name, self._logger)
            except OSError as error:
                self.warning(f"wandb cannot start, the run goes on without it: {error}")

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Report the numbers of a step: to metrics.jsonl, the bar and the trackers.

        Steps of a split rise: what is reported again, after a resume or at the end, is left out.

        Args:
            metrics: `step`, `split` ("train" or "eval") and numbers, also nested; the bar shows `loss`, `lr`,
                `loss_scale`, `skipped`, `samples_per_second` and a large `data_wait` of train lines. Tensors are read
                back.
        """
        if not self._is_main or self._is_closed:
            return
        step, split = int(metrics["step"]), str(metrics["split"])
        if step <= self._last_steps.get(split, -1):
            return
        self._last_steps[split] = step
        self._metrics_file.append(_dumps(metrics))
        numbers = dict(_numbers(split, {key: value for key, value in metrics.items() if key not in ("step", "split")}))
        if self._progress is not None and split == "train":
            self._show(self._progress.show, step, metrics)
        self._track(step, numbers)

    def statistics(self, line: Mapping[str, Any]) -> None:
        """Report the ranges of the layers in a step: to doctor/statistics.jsonl, the main ones to the trackers.

        Args:
            line: `step`, and `layers`: by name and kind of numbers, with `amax` and `underflow` among what is known.
        """
        if not self._is_main or self._is_closed:
            return
        if self._statistics_file is None:
            with contextlib.suppress(OSError):  # said at the first line
                self._statistics_path.parent.mkdir(exist_ok=True)
            self._statistics_file = _LineFile(self._statistics_path, self.warning)
        self._statistics_file.append(_dumps(line))
        numbers = {
            f"{kind}_{name}/{layer or 'network'}": float(found[name])
            for layer, kinds in line["layers"].items()
            for kind, found in kinds.items()
            for name in ("amax", "underflow")
            if found[name] is not None
        }
        self._track(int(line["step"]), numbers)

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            try:
                self._tensorboard.add(step, numbers)
            except Exception as error:  # a third party's: whatever it is, training goes on
                self._tensorboard_failures += 1
                if self._tensorboard_failures == MAX_FAILURES:
                    self._tensorboard = None
                    self.warning(f"tensorboard is switched off after {MAX_FAILURES} failures: {error}")
        if self._wandb is not None:
            self._wandb.add(step, numbers)

    def advance(self, step: int) -> None:
        """Move the bar. Call it after every step: it compares the time, and works about ten times a second."""
        self._step = step
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        if self._progress is not None:
            self._show(self._progress.advance, step)
        if self._wandb is not None:
            self._wandb.poll()

    def info(self, message: str) -> None:
        """A message to train.log and stdout (rank 0)."""
        self._logger.info("%s", message)

    def warning(self, message: str) -> None:
        """A warning to train.log (rank 0) and stderr."""
        self._logger.warning("%s", message)

    def close(self, summary: Mapping[str, Any]) -> None:
        """End the reports; waits at most ten seconds for wandb. A second call does nothing.

        Args:
            summary: what summary.json holds; wandb shows it, and takes `exit_code` from it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._progress is not None:
            self._show(self._progress.close, self._step)
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except Exception as error:  # a third party's: whatever it is, the run ends well
                self.warning(f"tensorboard: the last events are not written: {error}")
        if self._wandb is not None:
            self._wandb.close(summary)
        self._close_text()

    def _show(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except (OSError, ValueError, TypeError) as error:  # stderr was closed, or a loss is no number
            self._progress = None
            self.warning(f"progress is switched off: {error}")

    def _open_text(self, run_dir: Path, rank: int) -> None:
        self._logger = logging.getLogger("amp_recipes")
        for handler in self._logger.handlers[:]:  # of a run that died before it could close
            if isinstance(handler, (_TerminalHandler, _FileHandler)):
                self._logger.removeHandler(handler)
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._handlers: list[logging.Handler] = [_TerminalHandler(rank)]
        if self._is_main:
            self._handlers.append(_FileHandler(run_dir / "train.log", self.warning))
        for handler in self._handlers:
            self._logger.addHandler(handler)

    def _close_text(self) -> None:
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
        if self._is_main:
            self._metrics_file.close()
            if self._statistics_file is not None:
                self._statistics_file.close()


def say(message: str) -> None:
    """Print to stdout; a closed pipe (`| head`) or a full disk does not end a run."""
    try:
        print(_redact(message), flush=True)
    except OSError:
        # What is still buffered would raise again at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def check_log(cfg: LogConfig) -> list[str]:
    """What is missing for the wanted trackers, one sentence each. Imports nothing."""
    wanted = {"tensorboard": cfg.tensorboard, "wandb": cfg.wandb}
    return [
        f"log={cfg.name} needs the package {package}: pip install 'amp-recipes[{package}]'"
        for package, is_wanted in wanted.items()
        if is_wanted and not _is_installed(package)
    ]


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write a JSON file whole or not at all. Numbers that are not finite become null.

    Raises:
        OSError: it cannot be written; what stood there before is intact.
    """
    _replace(Path(path), (_dumps(content, indent=2) + "\n").encode())


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: it cannot be written; what stood there before is intact.
    """
    _replace(Path(path), text.encode())


def _is_installed(package: str) -> bool:
    # A folder of that name in the working directory (wandb makes one) is found too, as a namespace without origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _dumps(content: Any, indent: int | None = None) -> str:
    return _redact(json.dumps(_plain(content), indent=indent, allow_nan=False))


def _redact(text: str) -> str:
    from amp_core.redact import redact  # not to be found by this file as a script, which does not need it

    return redact(text)


def _plain(value: Any) -> Any:
    """What JSON can hold: null for numbers that are not finite, text for what it does not know."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and the numbers and arrays of numpy
        return _plain(value.tolist())
    return str(value)


def _numbers(prefix: str, value: Any) -> list[tuple[str, float]]:
    """The numbers in a nested dictionary, under names such as train/loss."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _numbers(f"{prefix}/{key}", item)]
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [(prefix, value)] if isinstance(value, (int, float)) else []


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _cut(path: Path, last_step: int) -> dict[str, int]:
    """Keep the whole lines up to `last_step`, each (split, step) once; the last step of each split is returned."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    kept: dict[tuple[str, int], bytes] = {}
    for line in content.split(b"\n"):
        try:
            entry = json.loads(line)
            key = str(entry.get("split", "")), int(entry["step"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # half-written, or no line of ours
            continue
        if key[1] <= last_step:
            kept[key] = line
    whole = b"".join(line + b"\n" for line in kept.values())
    if whole != content:
        _replace(path, whole)
    return dict(sorted(kept))


class _LineFile:
    """Appends whole lines, each with one write; the first failure is said, and later lines are tried again."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file: io.FileIO | None = None
        self._has_failed = False

    def append(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            if self._file is None:
                self._file = io.FileIO(self._path, "ab")
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(data) != len(data):
                self._file.truncate(end)  # or the next line would continue this half
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"{self._path} cannot be written, lines will be missing: {error}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _redact(super().format(record))


class _FileHandler(logging.Handler):
    """train.log."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._file = _LineFile(path, warn)
        self.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(self.format(record))

    def close(self) -> None:
        self._file.close()
        super().close()


class _TerminalHandler(logging.Handler):
    """Messages to stdout, warnings to stderr, above the bar."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._prefix = f"[rank {rank}] " if rank > 0 else ""
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        stream = sys.stderr if is_warning else sys.stdout
        level = f"{record.levelname.lower()}: " if is_warning else ""
        try:
            _Bar.write(f"{self._prefix}{level}{self.format(record)}", file=stream)
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a closed pipe (`| head`); train.log has the message
            pass


class _Bar(tqdm):
    monitor_interval = 0  # its watching thread would be there when data loaders fork


_Bar.set_lock(threading.RLock())  # tqdm's own is made for several processes, and starts one on macOS


class _Progress:
    """A bar on a terminal, plain lines in a file."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: _Bar | None = None
        self._start: tuple[float, int] | None = None
        self._last_line = -math.inf
        self._waiting: str | None = None

    def advance(self, step: int) -> None:
        self._begin(step)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._begin(step)
        if self._bar is not None:
            facts = " ".join(_facts(metrics)).replace(" samples/s", "/s")  # fits 80 columns
            self._bar.set_description_str(facts, refresh=False)
            self._bar.n = step
            self._bar.refresh()
        elif not self._is_terminal:
            left = self._seconds_left(step)
            facts = [f"step {step}/{self._total}", *_facts(metrics)]
            self._waiting = "  ".join(facts + ([f"{tqdm.format_interval(left)} left"] if left is not None else []))
            if step >= self._total or time.monotonic() - self._last_line >= LINE_SECONDS:
                self._print()

    def close(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.close()
        self._print()

    def _begin(self, step: int) -> None:
        # The clock starts with the first finished step: what came before (set-up, compilation) does not recur.
        if self._start is None:
            self._start = time.monotonic(), step
            if self._is_terminal:
                self._bar = _Bar(
                    total=self._total,
                    initial=step,
                    file=sys.stderr,
                    dynamic_ncols=True,
                    mininterval=0,
                    miniters=1,
                    bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining} left {desc}",
                )

    def _seconds_left(self, step: int) -> float | None:
        if self._start is None or step <= self._start[1]:
            return None
        return (time.monotonic() - self._start[0]) / (step - self._start[1]) * max(self._total - step, 0)

    def _print(self) -> None:
        if self._waiting is not None:
            print(self._waiting, file=sys.stderr, flush=True)
            self._last_line = time.monotonic()
            self._waiting = None


def _facts(metrics: Mapping[str, Any]) -> list[str]:
    """Such as "loss 0.4312", for those that are there."""
    formats = {
        "loss": "loss {:.4g}",
        "lr": "lr {:.1e}",
        "loss_scale": "scale {:.10g}",
        "skipped": "skipped {:.0f}",
        "samples_per_second": "{:.0f} samples/s",
    }
    facts = [text.format(float(metrics[key])) for key, text in formats.items() if metrics.get(key) is not None]
    if (waited := metrics.get("data_wait") or 0.0) >= LARGE_WAIT:
        facts.append(f"{100 * waited:.0f} % waiting for data")
    return facts


class _TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it imports is not ours to mend
            from torch.utils.tensorboard import SummaryWriter
        # Events from purge_step on, of an earlier run in this folder, are hidden by the viewer.
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=30)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """The training side of wandb: never waits, but for `close`."""

    def __init__(
        self, run_dir: Path, cfg: LogConfig, run_config: dict[str, Any], name: str, logger: logging.Logger
    ) -> None:
        self._folder = run_dir / "wandb"
        self._logger = logger
        self._heard = b""
        self._has_warned = False
        self._has_dropped = False
        self._pending = bytearray()
        start = {
            "init": {
                "project": cfg.wandb_project,
                "name": name,
                "id": _wandb_id(run_dir / "wandb_id"),
                "resume": "allow",
                "dir": str(run_dir),
                "mode": _wandb_mode(cfg),
                "config": _plain(run_config),
            },
            "argv": sys.argv,
            "pid": os.getpid(),
        }
        # A session of its own: Ctrl-C reaches only the training, which closes the run in order.
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
                self._logger.warning("wandb does not keep up: lines are dropped there, metrics.jsonl has them all")
        else:
            self._send({"log": {"step": step, **numbers}})
        self.poll()

    def poll(self) -> None:
        """Send what waits and pass on what was said."""
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
        self._send({"summary": _plain(summary)})
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._process is not None and time.monotonic() < deadline:
            self.poll()
            if self._process is not None:
                select.select([self._out], [self._in] if self._pending else [], [], 0.2)
        if self._process is not None:
            self._has_warned = True
            self._logger.warning(
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
                self._logger.log(level, "%s", text)
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
            self._logger.warning("wandb's process died (exit code %d), the run goes on without it", code)


def _wandb_id(path: Path) -> str:
    """The run's id in wandb, made once, so that a resumed run continues there."""
    try:
        known = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    if re.fullmatch(r"[\w-]{1,64}", known):
        return known
    new = secrets.token_hex(5)
    _replace(path, f"{new}\n".encode())
    return new


def _wandb_mode(cfg: LogConfig) -> str:
    """WANDB_MODE wins over the configuration; `auto` is online when an account is configured."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if cfg.wandb_mode != "auto":
        return cfg.wandb_mode
    return "online" if _has_wandb_account() else "offline"


def _has_wandb_account() -> bool:
    """Looks where wandb looks: the environment, its settings file, netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = configparser.ConfigParser(interpolation=None)
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        settings.read(folder / "settings")
    if settings.get("default", "api_key", fallback=""):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in (Path(candidate).expanduser() for candidate in candidates):
        try:
            login = netrc.netrc(path).authenticators(urlsplit(url).netloc)
        except (OSError, netrc.NetrcParseError):
            continue
        if login is not None and login[2]:
            return True
    return False


def _wandb_main() -> None:
    """The process that talks to wandb: reads messages from stdin until their end, answers [level, text] on stdout."""
    # wandb and its service must not write between the answers, nor inherit the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # batch systems send them to all; training then closes this process
        signal.signal(number, signal.SIG_IGN)

    def answer(level: int, text: str) -> None:
        with contextlib.suppress(OSError):  # training was killed: nobody listens, the run is finished all the same
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
    except (Exception, SystemExit) as error:  # a third party's: whatever it is, training goes on
        answer(logging.WARNING, f"wandb cannot start, the run goes on without it: {error}")
        os._exit(0)  # its exit hooks wait for a service that may never answer
    if run.disabled:
        answer(logging.INFO, "wandb is disabled by WANDB_MODE")
    elif run.offline:
        answer(logging.INFO, f"wandb: offline run {run.id}, send it with: wandb sync {run.settings.sync_dir}")
    else:
        answer(logging.INFO, f"wandb: {run.url}")

    failures = 0
    summary: dict[str, Any] = {"exit_code": 1}  # holds if training is killed: its messages just end
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
        except Exception as error:  # a third party's: whatever it is, training goes on
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
    except (Exception, SystemExit) as error:  # a third party's: whatever it is, the run ends well
        answer(logging.WARNING, f"wandb could not finish the run: {error}")
    os._exit(0)


if __name__ == "__main__":
    _wandb_main()
