"""The state of a sweep's jobs: a record of each in the sweep's folder, processes for jobs, the table at the end.

Records lie in `<sweep>/.jobs/<folder of the run>.json`, written when a job ends, by whichever process had it. A file
`stop` beside them says that the sweep was asked to end: no job begins any more, and those that run are passed the
signal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from amp_core.cli.run_folders import CONSTANT, status_of
from amp_core.config.errors import ConfigError
from amp_core.config.files import kind_of, read_json, read_text
from amp_core.run.lines import write_json, write_text
from amp_core.run.terminal import tinted

PARENT = "AMP_RECIPES_PARENT"
"""Environment variable of a job in its own process: the process id of its parent."""
POLL_SECONDS = 0.1


@dataclass
class Record:
    """How a job ended."""

    folder: str
    """Name of the run folder in the sweep's folder."""
    overrides: list[str]
    status: str = "not started"
    """finished, diverged, preempted, failed or refused (a configuration that cannot run); or not started."""
    exit_code: int | None = None
    metric: str | None = None
    """The recipe's best metric."""
    value: float | None = None
    seconds: float | None = None
    """Duration of the run; of a resumed one, since it was resumed."""
    error: str | None = None
    """One line."""
    devices: list[str] = field(default_factory=list)
    """GPUs that it was given."""


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
"""What ends a sweep, and its exit code then."""


def begin(sweep_dir: Path, jobs: Sequence[Sequence[str]]) -> None:
    """Forget the records of an earlier start: run folders tell what is finished. Note what all jobs have in common."""
    for name, expected in ((".jobs", "a folder"), ("optuna.journal", "a file")):
        if (found := kind_of(sweep_dir / name)) not in ("", expected):
            raise ConfigError(
                f"{sweep_dir / name} is {found}, expected {expected}; remove it, or choose another folder"
            )
    shutil.rmtree(sweep_dir / ".jobs", ignore_errors=True)
    if len(jobs) > 1 and (constant := set.intersection(*map(set, jobs))):
        (sweep_dir / CONSTANT).parent.mkdir(parents=True, exist_ok=True)
        write_json(sweep_dir / CONSTANT, {"overrides": sorted(constant)})


def write_record(sweep_dir: Path, record: Record) -> None:
    (sweep_dir / ".jobs").mkdir(parents=True, exist_ok=True)
    write_json(sweep_dir / ".jobs" / f"{record.folder}.json", asdict(record))


def read_record(sweep_dir: Path, folder: str) -> Record | None:
    """The record of a job, or None when it has not ended."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Record(**read_json(sweep_dir / ".jobs" / f"{folder}.json"))
    return None


def records_of(sweep_dir: Path, jobs: Iterable[tuple[str, Sequence[str]]]) -> list[Record]:
    """One record for each (folder, overrides), also for jobs that never began or were killed."""
    found = []
    for folder, overrides in jobs:
        record = read_record(sweep_dir, folder) or Record(folder, list(overrides))
        if record.status == "not started" and status_of(sweep_dir / folder) == "running":
            record.status, record.error = "failed", "killed: it left no result; the same command resumes it"
        found.append(record)
    return found


def first_line(error: str | None) -> str | None:
    """The part of an error for the table: its first line, or the last one of a traceback."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return None
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0].removeprefix("error: ")


# --- the end of a sweep -----------------------------------------------------------------------------------------------


def asked_to_stop(sweep_dir: Path) -> int:
    """130, 143 or 75 when the sweep was asked to end, else 0."""
    with contextlib.suppress(OSError, ValueError):
        return int(read_text(sweep_dir / ".jobs" / "stop"))
    return 0


@contextlib.contextmanager
def stopping(sweep_dir: Path) -> Iterator[None]:
    """Around a sweep: the first signal lets running jobs finish their step and save, and no other begin; one
    more raises KeyboardInterrupt, upon which launchers kill their workers."""

    def on_signal(number: int, frame: object) -> None:
        if asked_to_stop(sweep_dir):
            raise KeyboardInterrupt
        (sweep_dir / ".jobs").mkdir(parents=True, exist_ok=True)
        write_text(sweep_dir / ".jobs" / "stop", str(SIGNALS[signal.Signals(number)]))

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- a job in its own process -----------------------------------------------------------------------------------------


def run_apart(
    command: Sequence[str],
    sweep_dir: Path,
    *,
    environ: Mapping[str, str],
    files: Sequence[int] = (),
    in_worker: bool = False,
    name: str = "",
) -> tuple[int, str | None]:
    """Run a job as a process, which a crash, a kill or a broken GPU ends without touching the sweep.

    What it prints passes through, each line behind `name |` if there is a name. When the sweep is asked to stop, the
    job gets the signal and is waited for: it writes a checkpoint first. It gets `environ` besides the variables of this
    process, and inherits the descriptors `files`. With `in_worker` a launcher started this process: when that one is
    gone, the job gets a signal, too. Who started a sweep, such as a shell, may go before it.

    Returns its exit code (1 when it was killed), and its error in one line.
    """
    parent = os.getppid() if in_worker else None
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **environ, PARENT: str(os.getpid()), "NO_COLOR": "1"},  # what is read here has no colours
        stdout=subprocess.PIPE if name else None,
        stderr=subprocess.PIPE,
        pass_fds=files,
        start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone, which passes it on once
    )
    said: list[bytes] = []
    prefix = f"{name} | " if name else ""
    streams = [(process.stderr, sys.stderr, said), *([(process.stdout, sys.stdout, [])] if name else [])]
    readers = [threading.Thread(target=_pass_on, args=(*stream, prefix), daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    told = False
    try:
        while process.poll() is None:
            code = asked_to_stop(sweep_dir) or (143 if parent not in (None, os.getppid()) else 0)
            if code and not told:
                process.send_signal(next(number for number, ends in SIGNALS.items() if ends == code))
                told = True
            time.sleep(POLL_SECONDS)
    except BaseException:
        process.kill()
        raise
    finally:
        for reader in readers:
            reader.join(timeout=5.0)
    if parent not in (None, os.getppid()):
        os._exit(143)  # no parent is left, and joblib's worker would idle for minutes
    if process.returncode < 0:
        return 1, f"killed by {signal.Signals(-process.returncode).name}"
    if process.returncode == 0:
        return 0, None
    text = b"".join(said).decode(errors="replace")
    start = text.rfind("error: ")
    return process.returncode, first_line(text[start:] if start >= 0 else text.rstrip().rpartition("\n")[2])


def _pass_on(stream: Any, to: TextIO, said: list[bytes], prefix: str) -> None:
    with stream:
        for line in stream:
            said.append(line)
            del said[:-200]
            with contextlib.suppress(OSError, ValueError):  # a closed pipe (`| head`) does not end the job
                # In one piece: other jobs write here, too.
                to.write(prefix + tinted(line.decode(errors="replace"), to))
                to.flush()


def end_with_parent() -> None:
    """In a job's process: SIGTERM to itself when who started it is gone, however that ended. Else nothing."""
    started_by = os.environ.pop(PARENT, None)
    if started_by is None:
        return

    def watch() -> None:
        while os.getppid() == int(started_by):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


# --- the table --------------------------------------------------------------------------------------------------------


def table(records: Sequence[Record], sweep_dir: Path, report: str) -> str:
    """A table of all jobs: what differs between them, how they ended, and the command that makes the report, if any."""
    common = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    metrics = sorted({record.metric for record in records if record.metric})
    rows = [["job", "status", " or ".join(metrics) or "metric", "seconds"]]
    for record in records:
        name = " ".join(text.lstrip("+") for text in record.overrides if text not in common) or record.folder
        status = record.status if record.exit_code in (None, 0) else f"{record.status} ({record.exit_code})"
        value = "" if record.value is None else f"{record.value:.4f}"
        rows.append([name, status, value, "" if record.seconds is None else f"{record.seconds:.1f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for record in records:
        if record.error:
            lines += ["", f"{sweep_dir / record.folder}", f"  {' '.join(record.overrides)}", f"  {record.error}"]
    done = sum(record.status == "finished" for record in records)
    lines += ["", f"{done} of {len(records)} jobs finished" + f"; the report: {report}" * bool(report)]
    if done < len(records) and report:
        lines.append(f"the same command with hydra.sweep.dir={sweep_dir} resumes the others")
    return "\n".join(lines)
