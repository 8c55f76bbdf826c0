"""Start the workers of a checked configuration: in this process, or N of them through torch's elastic agent.

Workers are started as commands, not as functions, so that a run, a sweep and a joblib sweep start them the same way.
A worker that ends on purpose (time limit, divergence, a signal) reports its exit code through a file and exits with 0:
the agent restarts whatever exits with anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from amp_core.config import processes
from amp_core.config.errors import STATUS, ConfigError
from amp_core.config.files import read_json
from amp_core.config.job import Job
from amp_core.config.processes import LAUNCHER, launched
from amp_core.config.redact import redact
from amp_core.run.lines import write_json
from amp_core.run.locks import lock_folder
from amp_core.run.process import TWICE, Outcome, Run, in_process, workers_here
from amp_core.run.rendezvous import others_start_again, worker_stores
from amp_core.run.stop import SIGNALS, exit_code_of
from amp_core.run.terminal import complain

SHUTDOWN_SECONDS = 600
"""How long workers may take to finish their step and write a checkpoint after a signal."""

STANDSTILL_SECONDS = 10
"""How long ranks of a run that was asked to end may run beside one that is stopped by SIGSTOP or has ended early; gloo
notices the latter immediately or not at all."""

CUT_OFF_SECONDS, LOOK_SECONDS = 20.0, 5.0
"""How long the rendezvous endpoint may be silent when no worker is left on this machine, and how often it is probed."""


def launch(job: Job, run: Run, worker: list[str]) -> Outcome:
    """Run a job to its end. Never raises for a failing run.

    `worker` is the command of a worker, to which the path of the job's file is appended.
    """
    num_workers = workers_here(job.cfg)
    if launched() or not num_workers:
        outcome = in_process(job, run)
        if launched():
            _end_rank(outcome)
        return outcome
    return _with_agent(job, worker, num_workers)


def _end_rank(outcome: Outcome) -> NoReturn:
    """End this process of torchrun, which shows the first failing rank's traceback; rank 0 says anything else."""
    if outcome.exit_code == 1:
        report_failure(outcome.error or "")
    elif outcome.error and os.environ["RANK"] == "0":
        complain(outcome.error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.exit_code)  # the process group's threads sometimes abort at exit; all is done and written


def _with_agent(job: Job, worker: list[str], nproc: int) -> Outcome:
    # Imported here: it takes a second, which a single process does not need.
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent's log of each worker's exit would bury the one message that matters.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    layout = job.cfg.layout
    nodes = layout.nodes
    assert nodes is not None
    several = nodes[1] > 1
    with tempfile.TemporaryDirectory(prefix="amp_recipes_") as folder, _worker_environ(nproc, several):
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(job.dumps())
        # An older torch waits 30 seconds.
        patience: Any = {"shutdown_timeout": SHUTDOWN_SECONDS} if hasattr(LaunchConfig, "shutdown_timeout") else {}
        config = LaunchConfig(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            nproc_per_node=nproc,
            run_id=layout.rdzv_id or uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint=layout.rdzv_endpoint or "127.0.0.1:0",
            local_addr=None if several else "127.0.0.1",
            max_restarts=layout.max_restarts,
            monitor_interval=0.1,
            **patience,
            signals_to_handle="SIGHUP,SIGQUIT",  # those that end a run are handled here
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        signals = _Signals(job_file, nproc, Path(job.run_dir or folder, "checkpoints"), SignalException)
        try:
            with signals, _lifeline(layout.rdzv_endpoint if several else None, job_file):
                elastic_launch(config, worker[0])(*worker[1:], str(job_file))
        except SignalException as stopped:
            outcome = _read_result(result_file)
            code = 130 if signals.killed == TWICE else exit_code_of(128 + int(stopped.sigval))
            if outcome is None:
                said = signals.killed or f"stopped by {signal.Signals(stopped.sigval).name}"
                outcome = _failed(job, code, said)
            return dataclasses.replace(outcome, signalled=code)
        except ChildFailedError as failed:
            outcome = _read_result(result_file)
            if outcome is not None and outcome.exit_code:  # a rank ended on purpose, and the others missed it
                return outcome
            return _failed(job, 1, _first_failure(failed))
        except (RendezvousError, DistError) as lost:
            text = " ".join(str(lost).split()) or type(lost).__name__
            return _failed(job, 1, f"the machines do not reach each other at {config.rdzv_endpoint}: {text}")
        outcome = _read_result(result_file)
        return outcome or _failed(job, 1, "the workers ended without a result")


@contextlib.contextmanager
def _lifeline(endpoint: str | None, job_file: Path) -> Iterator[None]:
    """Around the agent of one of several machines: closes its connections to a rendezvous store that is gone.

    torch's rendezvous waits for the store for as long as the kernel retransmits (Linux: a quarter of an hour) and holds
    its lock meanwhile, whatever its own timeouts are. So when no worker is left on this machine and nothing answers at
    `endpoint`, the sockets are shut down. While there are workers, the timeouts of their collectives decide.
    """
    is_over = threading.Event()
    host, _, port = (endpoint or "").rpartition(":")

    def watch() -> None:
        silent = 0.0
        while not is_over.wait(LOOK_SECONDS):
            began = time.monotonic()
            try:
                if not processes.with_argument(job_file):
                    socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_SECONDS).close()
                silent = 0.0
            except OSError:
                silent += LOOK_SECONDS + time.monotonic() - began
            for descriptor in map(int, os.listdir("/dev/fd") if silent > CUT_OFF_SECONDS else ()):
                with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as one:
                    if one.getpeername()[1:2] == (int(port),):
                        one.shutdown(socket.SHUT_RDWR)

    if endpoint is not None:
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _Signals:
    """Around the agent: the first signal makes it stop its workers, which finish their step and save; it waits for
    them. A Ctrl-C after that kills them at once. So does a rank that is stopped or gone, for which the others would
    wait, unless one writes a checkpoint.

    `job_file` is in the command line of each of the `nproc` workers; `stop` is torch's exception with which the agent
    stops them.
    """

    def __init__(
        self, job_file: Path, nproc: int, checkpoints: Path, stop: Callable[[str, signal.Signals], Exception]
    ) -> None:
        self.killed: str | None = None
        """Why the workers were killed."""
        self._job_file, self._nproc, self._checkpoints, self._stop = job_file, nproc, checkpoints, stop
        self._handlers: dict[int, Any] = {}
        self._is_over = threading.Event()
        self._watch: threading.Thread | None = None

    def __enter__(self) -> None:
        for number in SIGNALS:
            with contextlib.suppress(ValueError):  # only the main thread may set handlers
                self._handlers[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._watch is None:
            self._watch = threading.Thread(target=self._kill_who_would_wait, daemon=True)
            self._watch.start()
            raise self._stop(f"got {signal.Signals(number).name}", signal.Signals(number))
        if number == signal.SIGINT:
            self._kill(TWICE)

    def _kill_who_would_wait(self) -> None:
        seconds = 0
        while not self._is_over.wait(1.0):
            # Ranks alone: each watches what it forked.
            ranks = [pid for pid in processes.with_argument(self._job_file) if processes.parent_of(pid) == os.getpid()]
            able = [pid for pid in ranks if not processes.is_stopped(pid)]
            is_complete = len(able) + len(glob.glob("ended.*", root_dir=self._job_file.parent)) >= self._nproc
            is_saving = any(glob.glob(f".tmp-*-{pid}", root_dir=self._checkpoints) for pid in able)
            seconds = seconds + 1 if ranks and not (is_complete or is_saving) else 0
            if seconds >= STANDSTILL_SECONDS:
                why = "a rank is stopped, or ended before the others, which did not notice"
                self._kill(f"{why}: all were killed; the steps since the last checkpoint are lost")
                return

    def _kill(self, why: str) -> None:
        self.killed = why
        for pid in processes.with_argument(self._job_file):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _failed(job: Job, code: int, message: str) -> Outcome:
    """The workers are dead: writes the end of the run into its summary for them."""
    summary = Path(job.run_dir or "", "summary.json")
    if job.run_dir and summary.is_file():
        # Not while other machines continue the run: they hold the lock.
        with contextlib.suppress(OSError, ValueError, ConfigError), lock_folder(summary.parent):
            content = read_json(summary)
            if content.get("status") == "running":
                write_json(
                    summary, content | {"status": STATUS.get(code, "failed"), "exit_code": code, "error": message}
                )
    return Outcome(code, {}, redact(message))


def _first_failure(failed: Any) -> str:
    """The first rank to fail and why; the others fail because it is gone."""

    def order(item: tuple[int, Any]) -> tuple[bool, float]:
        failure = item[1]
        killed = failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, signal.SIGINT)
        return not killed, _extra(failure).get("precise_timestamp", float(failure.timestamp))

    rank, failure = min(failed.failures.items(), key=order)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} was killed by {name}; the same command resumes from the last checkpoint"
    return f"rank {rank} failed:\n{_extra(failure).get('py_callstack', failure.message)}"


def _extra(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _read_result(path: Path) -> Outcome | None:
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


@contextlib.contextmanager
def _worker_environ(nproc: int, several: bool) -> Iterator[None]:
    """Environment variables for the agent and its workers, unless the user set them."""
    wanted = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc))}  # share the cores
    if several:
        # A new store for each attempt. With the agents' store a returning machine would wait for the address of
        # a store that the others published only at their first attempt.
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    added = {name: value for name, value in wanted.items() if name not in os.environ} | {LAUNCHER: str(os.getpid())}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def work(job_file: Path, run: Run) -> int:
    """The main function of a worker of the agent: runs a file's job. Returns its code."""
    result, ended = job_file.with_name("result.json"), job_file.with_name(f"ended.{os.environ['LOCAL_RANK']}")
    ended.unlink(missing_ok=True)
    if int(os.environ["LOCAL_RANK"]) == 0:
        result.unlink(missing_ok=True)  # of workers that were stopped because a machine came or went
    job = Job.loads(job_file.read_text())
    try:
        worker_stores(job.cfg.layout.timeout_minutes)
        job = share(job)
    except RuntimeError as lost:  # also a timeout of torch's
        report_failure(f"the ranks did not meet: {lost}")
        return 1
    assert job is not None
    outcome = in_process(job, run)
    if outcome.exit_code == 1:
        report_failure(outcome.error or "")
        return 1
    if int(os.environ["LOCAL_RANK"]) == 0:
        write_json(result, vars(outcome))
    if not outcome.is_alone:
        ended.touch()  # all ranks end, and none waits for this one
    if outcome.signalled and others_start_again():
        # An agent stops its workers when a machine comes back, and all ranks agree to stop. The workers of the other
        # agents must still be alive when these see that machine, or they would take the run for finished.
        time.sleep(1.0)
    return 0


def report_failure(text: str) -> None:
    """Hand this rank's traceback to the agent (ours or torchrun's), which shows that of the first rank to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(text, file=sys.stderr)
        return
    now = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now)), "precise_timestamp": now}
    Path(path).write_text(json.dumps({"message": {"message": text.strip(), "extraInfo": extra}}))


def share(job: Job | None, *, refused: bool = False) -> Job | None:
    """Rank 0's job on every rank: composed once, one run folder for all, the same after a restart. None: nothing to do.

    Where rank 0 `refused` the configuration every rank raises a ConfigError without a message: rank 0 says why.
    """
    attempt, everything = worker_stores()
    if os.environ["RANK"] == "0":
        if job is not None:  # in the folder of the first attempt
            job.run_dir = everything.compare_set("amp_recipes/run_dir", "", job.run_dir or "").decode() or None
        attempt.set("job", "refused" if refused else job.dumps() if job else "nothing")
    text = attempt.get("job").decode()
    if text == "refused":
        raise ConfigError([])
    return None if text == "nothing" else Job.loads(text)
