"""Plans and runs a sweep: checks its jobs, starts processes for them, records how they end, prints a table.

Records lie in `<sweep>/.jobs/<folder of the run>.json`, written when a job ends by the process that called `run_job`.
A file `stop` beside them says that the sweep was asked to end: no new job begins, and running ones get the signal.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper

from amp_core.cli import compose
from amp_core.cli.command import TRAIN, program, say_error, tool
from amp_core.cli.job import FindRecipe, check, sound_form
from amp_core.cli.lease import gpus_of, lease, lease_folder, num_cores, visible_devices
from amp_core.cli.overrides import quoted
from amp_core.cli.run_folders import (
    CONSTANT,
    check_place,
    check_run_dir,
    content_of,
    status_of,
    sweep_subdir,
    varied,
)
from amp_core.config.errors import STATUS, ConfigError, RunError
from amp_core.config.files import kind_of, read_json, read_text
from amp_core.config.job import Job
from amp_core.config.processes import launched
from amp_core.config.rules import build
from amp_core.run import locks
from amp_core.run.lines import write_json, write_text
from amp_core.run.terminal import complain, say

PARENT = "AMP_RECIPES_PARENT"
"""Environment variable of a job in its own process: the process id of its parent."""
POLL_SECONDS = 0.1


@dataclass
class Record:
    folder: str
    """Name of the run folder in the sweep's folder."""
    overrides: list[str]
    status: str = "not started"
    """finished, diverged, preempted, failed or refused (a configuration that cannot run); or not started."""
    exit_code: int | None = None
    metric: str | None = None
    """Name of the metric that selects the best checkpoint (`recipe.best`)."""
    value: float | None = None
    """Of the last evaluation, which need not be the best one."""
    seconds: float | None = None
    """Duration of the run; of a resumed one, since it was resumed."""
    error: str | None = None
    """One line."""
    devices: list[str] = field(default_factory=list)
    """GPUs that it was given."""


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}
"""What ends a sweep, and its exit code then."""


# --- plan and run -----------------------------------------------------------------------------------------------------


def plan(overrides: Sequence[str], find: FindRecipe) -> tuple[compose.Sweep, Job]:
    """A sweep, every job of which is checked, and its first job. ConfigError: what is wrong with any of them."""
    sound, problems = sound_form(overrides, find, multirun=True)
    for text in sound:
        if text.startswith(("run_dir=", "resume=last")):
            problems.append(f"{text}: each job of a sweep has a folder of its own; use hydra.sweep.dir=multirun/mine")
        elif text.startswith("data.check=true"):
            problems.append("data.check=true: checks one data set; leave out -m")
    if problems:
        raise ConfigError(problems)
    planned = compose.sweep_of(sound)
    if problem := check_place("hydra.sweep.dir", planned.dir):
        raise ConfigError(problem)
    first, is_dry = None, True
    for job_overrides in planned.jobs:
        try:
            job = check(job_overrides, find)
            first, is_dry = first or job, is_dry and job.cfg.dry_run
        except ConfigError as refused:
            problems += [problem for problem in refused.problems if problem not in problems]
    if problems or first is None:
        raise ConfigError(problems or f"{' '.join(overrides)}: there is nothing to run")
    return replace(planned, is_dry=is_dry), first


def sweep(overrides: Sequence[str], find: FindRecipe, task: Callable[[Any], Any]) -> int:
    """Plan a sweep and run its jobs; each is a call of `task`, by Hydra. Returns the exit code."""
    from amp_core.run.process import num_processes

    if launched():
        problem = f"-m under torchrun would run the sweep once per rank; use {program()} -m layout=ddp ..."
        raise ConfigError(problem if os.environ["RANK"] == "0" else [])  # no problems: the other ranks print nothing
    planned, first = plan(overrides, find)
    if planned.sweeper == "basic" and len(planned.jobs) == 1:
        say("-m: one job, since no setting has several values; write them as seed=1,2,3")
    if planned.num_parallel and planned.num_parallel > 1:
        threads = num_cores() // (planned.num_parallel * num_processes(first.cfg))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))  # or every job would use all cores
    sweep_dir = Path(planned.dir)
    if any((sweep_dir / mark).exists() for mark in ("checkpoints", "summary.json")):
        raise ConfigError(f"hydra.sweep.dir={sweep_dir}: holds a run; choose another folder")
    if planned.is_dry and planned.num_parallel is not None:  # nothing is written, and no records are kept
        with tempfile.TemporaryDirectory(prefix="dry-run-") as place:
            return _run(replace(planned, dir=place), task)
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        lock = locks.lock_folder(sweep_dir)
    except (ConfigError, OSError) as problem:
        message = str(problem).removeprefix(f"run_dir={sweep_dir}: ").replace("another run_dir", "another folder")
        raise ConfigError(f"hydra.sweep.dir={sweep_dir}: {message}") from problem
    with lock:  # for as long as it is open
        return _run(planned, task)


def _run(planned: compose.Sweep, task: Callable[[Any], Any]) -> int:
    sweep_dir, code, failed = Path(planned.dir), 0, False
    begin(sweep_dir, planned.jobs)
    # Hydra would compose each job again, a minute for 400 of them; `plan` has checked them all.
    Sweeper.validate_batch_is_legal = lambda self, batch: None
    try:
        with stopping(sweep_dir, jobs_are_local=planned.num_parallel is not None):
            compose.hand_over(["--multirun", *planned.overrides, quoted("hydra.sweep.dir", planned.dir)], task)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except ConfigError:
        raise
    except Exception as problem:  # of a launcher or a sweeper: the table of its jobs is printed all the same
        early = f"the sweep ended early: {type(problem).__name__}: {compose.one_line(problem)}"
        complain(str(problem) if isinstance(problem, RunError) else early)
        failed = True
    code = asked_to_stop(sweep_dir) or code
    records = [record_of(sweep_dir, job) for job in (planned.jobs if planned.sweeper == "basic" else ())]
    if records:
        say(table(records, sweep_dir, "" if planned.is_dry else f"{tool('report')} {shlex.quote(str(sweep_dir))}"))
    if code in SIGNALS.values():
        say(f"interrupted; the same command with hydra.sweep.dir={sweep_dir} resumes it")
        return code
    return int(bool(code) or failed or any(record.status != "finished" for record in records))


def run_job(find: FindRecipe, start: Callable[[Job], Any]) -> float | None:
    """Run the job that Hydra composed, and write its record; neither if the sweep was asked to stop.

    Returns the last evaluation of the metric `recipe.best`, or None. A failure is recorded, not raised. SystemExit: a
    signal ended the job, or the sweep before it.
    """
    hydra_config = HydraConfig.get()
    overrides = [str(text) for text in hydra_config.overrides.task]
    sweep_dir = Path(hydra_config.sweep.dir)
    launcher = hydra_config.runtime.choices["hydra/launcher"]
    if code := asked_to_stop(sweep_dir):
        if launcher == "basic":
            raise SystemExit(code)
        return None
    record, started = Record(sweep_subdir(sweep_dir, overrides), overrides), time.monotonic()
    signalled = _run_job(record, sweep_dir, launcher in ("joblib", "submitit_local"), find, start)
    record.status = STATUS.get(record.exit_code or 0, "failed")
    record.error = None if record.status == "preempted" else record.error  # a preempted job resumes
    summary = content_of(sweep_dir / record.folder, "summary.json")
    record.seconds = summary.get("seconds") or round(time.monotonic() - started, 1)
    if record.exit_code == 0 and record.value is None and isinstance(results := summary.get("eval"), dict):
        record.value = results.get(str(record.metric))
    (sweep_dir / ".jobs").mkdir(parents=True, exist_ok=True)
    write_json(sweep_dir / ".jobs" / f"{record.folder}.json", asdict(record))
    if signalled:
        raise SystemExit(signalled)  # a signal ends the sweep; anything else only this job
    return record.value


def _run_job(record: Record, sweep_dir: Path, apart: bool, find: FindRecipe, start: Callable[[Job], Any]) -> int:
    """Run a job and note in its record how it ended. Returns the exit code that a signal asked for, or 0.

    A job gets a process and GPUs of its own if it runs `apart`, beside others on this machine. Any job on a GPU gets
    them, too, since an error there can leave the GPU unusable for the rest of the process.
    """
    run_dir = str(sweep_dir / record.folder)
    try:
        cfg = build(compose.compose(record.overrides))  # without torch, which a job apart imports itself
        record.metric = cfg.recipe["best"]
        if check_run_dir(run_dir, cfg, in_sweep=True):
            say(f"already finished: {run_dir}")
            record.exit_code = 0
            return 0
        writes = not cfg.dry_run and cfg.task in ("train", "predict")
        num_gpus = 0
        if cfg.device != "cpu":
            import torch

            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if apart or num_gpus:
            devices = visible_devices(num_gpus)
            command = [sys.executable, str(TRAIN), *record.overrides]
            command += [quoted("run_dir", run_dir)] if writes else []
            with lease(
                gpus_of(cfg, num_gpus),
                devices,
                lease_folder(),
                waiting=lambda: say(f"{' '.join(record.overrides)}: waits for a free GPU of {', '.join(devices)}"),
                given_up=lambda: bool(asked_to_stop(sweep_dir)),
            ) as taken:
                record.devices = list(taken)
                environ = {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
                name = " ".join(varied(sweep_dir, record.overrides)) if apart else ""
                record.exit_code, record.error = run_apart(
                    command,
                    sweep_dir,
                    environ=environ,
                    lock_descriptors=list(taken.values()),
                    in_worker=apart,
                    name=name,
                )
            return 0
        job = check(record.overrides, find)
        job.run_dir = run_dir if writes else None
    except ConfigError as refused:
        say_error(refused)
        record.exit_code, record.error = refused.exit_code, refused.problems[0]
        return 0
    except InterruptedError:
        record.exit_code = asked_to_stop(sweep_dir)
        return 0
    outcome = start(job)
    record.exit_code, record.error = outcome.exit_code, first_line(outcome.error)
    record.value = outcome.eval.get(str(record.metric))
    if outcome.error:
        complain(f"{' '.join(record.overrides)}: {outcome.error}")
    return outcome.signalled


# --- records ----------------------------------------------------------------------------------------------------------


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


def read_record(sweep_dir: Path, folder: str) -> Record | None:
    """The record of a job, or None when it has not ended."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Record(**read_json(sweep_dir / ".jobs" / f"{folder}.json"))
    return None


def record_of(sweep_dir: Path, overrides: list[str]) -> Record:
    """The record of a job, also of one that never began or was killed."""
    folder = sweep_subdir(sweep_dir, overrides)
    record = read_record(sweep_dir, folder) or Record(folder, overrides)
    if record.status == "not started" and status_of(sweep_dir / folder) == "running":
        record.status, record.error = "failed", "killed: it left no result; the same command resumes it"
    return record


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
def stopping(sweep_dir: Path, *, jobs_are_local: bool) -> Iterator[None]:
    """Around a sweep: what a signal does.

    With local jobs the first one asks the sweep to stop: no new job begins, and running ones finish their step and
    save. The second raises KeyboardInterrupt, upon which launchers kill their workers. Jobs of a scheduler do not need
    this process: the first Ctrl-C raises KeyboardInterrupt, and other signals act as usual.
    """

    def on_signal(number: int, frame: object) -> None:
        if asked_to_stop(sweep_dir):
            raise KeyboardInterrupt
        (sweep_dir / ".jobs").mkdir(parents=True, exist_ok=True)
        write_text(sweep_dir / ".jobs" / "stop", str(SIGNALS[signal.Signals(number)]))

    handlers = dict.fromkeys(SIGNALS, on_signal) if jobs_are_local else {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
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
    lock_descriptors: Sequence[int] = (),
    in_worker: bool = False,
    name: str = "",
) -> tuple[int, str | None]:
    """Run a job in a subprocess, so that a crash, a kill or a broken GPU does not end the sweep.

    What it prints is passed on, each line after `name | ` if there is a name. When the sweep is asked to stop, the job
    gets the signal, writes a checkpoint, and is waited for.

    Args:
        environ: variables besides those of this process.
        lock_descriptors: of the locks on its GPUs, which it inherits.
        in_worker: this process is a launcher's worker: when the launcher is gone, the job gets SIGTERM, and once it
            has ended, so does this process.

    Returns:
        Its exit code, 1 if it was killed, and its error in one line.
    """
    parent = os.getppid() if in_worker else None
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **environ, PARENT: str(os.getpid()), "NO_COLOR": "1"},  # what is read here has no colours
        stdout=subprocess.PIPE if name else None,
        stderr=subprocess.PIPE,
        pass_fds=lock_descriptors,
        start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone, which passes it on once
    )
    last_lines: list[bytes] = []
    prefix = f"{name} | " if name else ""
    streams = [(process.stderr, sys.stderr, last_lines), *([(process.stdout, sys.stdout, [])] if name else [])]
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
    text = b"".join(last_lines).decode(errors="replace")
    start = text.rfind("error: ")
    return process.returncode, first_line(text[start:] if start >= 0 else text.rstrip().rpartition("\n")[2])


def _pass_on(stream: Any, to: TextIO, last_lines: list[bytes], prefix: str) -> None:
    with stream:
        for line in stream:
            last_lines.append(line)
            del last_lines[:-200]
            with contextlib.suppress(OSError, ValueError):  # a closed pipe (`| head`) does not end the job
                # In one piece: other jobs write here, too.
                to.write(prefix + line.decode(errors="replace"))
                to.flush()


def end_with_parent() -> None:
    """In a job's process: send it SIGTERM when its parent has ended. Does nothing if no sweep started it."""
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
