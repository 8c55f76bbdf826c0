"""The course of a run around its steps: data, resume, cadences, metrics, checkpoints, stopping.

A recipe writes

    for window in loop.windows():
        loop.log(*train_step(window))

and this module does what must happen between two steps, each thing at its time and on all ranks alike. Between two log
lines the host reads nothing back from the device.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
from amp_core.config.errors import CheckpointError, ConfigError, Diverged, Interrupted, SaveError
from amp_core.config.lengths import num_steps
from amp_core.config.rules import SHARDED, differences, is_elastic, scale_cap
from amp_core.data import Data
from amp_core.data.loading import Sampler, interruptible, to_device, train_loader
from amp_core.doctor.locate import Doctor
from amp_core.doctor.statistics import Statistics
from amp_core.doctor.trace import NEEDED
from amp_core.doctor.watch import Symptoms, Watch
from amp_core.layouts.memory_model import Memory, memory_of, saved_for_backward, traffic, weights_of
from amp_core.lowp.islands import island_names, keep_fp32
from amp_core.memory.graph import CudaGraphStep, Step, why_not_capturable
from amp_core.memory.recast import Recast
from amp_core.run.environment import Environment, exit_code_of, outcome_of, peak_memory
from amp_core.run.log import Log, say
from amp_core.run.machine import moved
from amp_core.run.meters import Clock, Meter, Reading
from amp_core.run.stop import TIME_LIMIT
from amp_core.step.amp import Amp
from amp_core.step.ema import Ema
from amp_core.step.report import Rehearsal, StepReport
from amp_core.step.schedule import Schedule
from amp_core.step.window import MicroBatch, microbatch_weights
from amp_core.tensors import is_dtensor, is_sharded, local, unwrap
from amp_core.torch_private import is_missing

logger = logging.getLogger("amp_recipes")

Evaluate = Callable[[nn.Module], dict[str, float]]


class Loop:
    """One run of a recipe.

    Args:
        env: where it runs.
        data: training data; evaluation is the recipe's own.
        amp: the mode.
        evaluate: metrics of a network (the first one, then its average) on the evaluation data; on every rank.
        **parts: what is saved, by name: networks (wrapped or not), optimizers, schedules, averages, and anything else
            with `state_dict` and `load_state_dict`. None is left out. At least one network, optimizer and schedule.
    """

    def __init__(
        self,
        env: Environment,
        data: Data,
        *,
        amp: Amp,
        evaluate: Evaluate,
        **parts: Any,
    ) -> None:
        self.env, self.cfg, self.data = env, env.cfg, data
        self.amp, self.evaluate = amp, evaluate
        self.parts = parts | {"scaler": amp}
        self.nets = [part for part in parts.values() if isinstance(part, nn.Module)]
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.schedules = {name: part for name, part in parts.items() if isinstance(part, Schedule)}
        self.model, self.schedule = self.nets[0], next(iter(self.schedules.values()))
        self.ema = next((part for part in parts.values() if isinstance(part, Ema)), None)
        if any(map(is_sharded, self.nets)) and len(data.eval) < env.world_size:
            raise ConfigError(
                f"layout={self.cfg.layout.name}: {len(data.eval)} evaluation samples for {env.world_size} ranks, which "
                f"gather weights together; expected at least one each: use fewer ranks, or layout=ddp"
            )
        self.accumulation = self.cfg.accumulation
        self._warnings: list[str] = []
        self.planned_samples = self.cfg.batch_size * self.cfg.accumulation * env.planned_ranks
        """Samples per step that the run was begun with; an elastic one comes as near to it as its ranks allow."""
        self.step = 0
        """Windows done, taken or skipped."""
        self.samples = 0
        """Samples drawn so far, over all ranks."""
        self.eval: dict[str, float] = {}
        """Results of the last evaluation."""
        self._eval_step = self._log_step = -1
        self._asked = 0
        self._log: Log | None = None
        self.meters: dict[str, Meter] = {}
        self._reading: Reading | None = None
        self._is_replay = False
        self._symptoms: Symptoms | None = None
        self._count: Callable[[Any], Tensor] | None = None
        self.islands: list[str] = []
        """What the doctor keeps in fp32, besides what amp.keep_fp32 names."""
        self.watch = None if self.cfg.doctor.name == "off" or is_missing(*NEEDED) else Watch(self)
        sampled = self.cfg.doctor.statistics_every is not None and env.is_main
        self.statistics = Statistics(self) if sampled else None
        self._graph = self._whole_step()
        self._is_looked_into = False
        self._floor_said = self._skip_said = False
        self._clock = Clock()
        recasts = self.cfg.perf.recast_weights
        self._recast = Recast(p for net in self.nets for p in net.parameters()) if recasts else None
        self._memory: dict[str, int | None] | None = None
        """Bytes per rank, from the first window on."""

    @property
    def samples_per_step(self) -> int:
        """Over all micro-batches and ranks."""
        return self.cfg.batch_size * self.accumulation * self.env.world_size

    @property
    def num_steps(self) -> int:
        """The step at which the run ends."""
        return num_steps(
            self.cfg,
            num_samples=len(self.data.train),
            samples_per_step=self.samples_per_step,
            steps_done=self.step,
            samples_done=self.samples,
        )

    # --- the course -------------------------------------------------------------------------------------------------

    def windows(self, count: Callable[[Any], Tensor] | None = None) -> Iterator[list[MicroBatch]]:
        """The windows from where the run stands to its end. Between them: log, evaluate, save, stop.

        Args:
            count: what a batch weighs, a 0-d tensor on its device, such as its valid tokens. Default: its samples.

        Yields:
            `accumulation` micro-batches on the device; weights sum to 1 over all ranks.

        Raises:
            ConfigError: the checkpoint was made with other settings.
            CheckpointError, SaveError: no usable checkpoint, or it cannot be written.
            Diverged: too many skipped steps in a row.
            Interrupted: a signal or the time limit, after a checkpoint.
        """
        self._count = count
        if self.env.course is not None:
            self._resume()
            with self.env.eagerly():
                yield from self.env.course(self, count)
            return
        if self.cfg.dry_run:
            if self.env.is_main:
                say(f"{self.plan()}\n{self.plan_in_detail()}")
            return
        loaded = self._resume()
        if self.cfg.task == "evaluate":
            self._evaluate_only(loaded)
            return
        if loaded is not None and self.step >= self.num_steps and self._is_finished():
            return
        self.env.begin()
        self._open_log(loaded)
        ending: dict[str, Any] = {"status": "finished", "exit_code": 0}
        if self.watch is not None:
            self.watch.start()
        try:
            steps = self._steps()
            # A recipe that fails in a replay leaves it open; nothing else may be watched by its trace.
            self.env.closing.callback(steps.close)
            yield from steps
        except BaseException as problem:  # trackers are told how it ended, and it goes on its way
            code, status = (1, "failed") if isinstance(problem, GeneratorExit) else outcome_of(problem)
            ending = {"status": status, "exit_code": code}
            raise
        finally:
            if self._log is not None:
                self._log.close(self.env.summary | ending)

    def _sampler(self, start: int, rank: int | None = None) -> Sampler:
        env, cfg = self.env, self.cfg
        return Sampler(
            len(self.data.train),
            seed=cfg.seed,
            batch_size=cfg.batch_size,
            accumulation=self.accumulation,
            rank=env.rank if rank is None else rank,
            world_size=env.world_size,
            start_sample=start,
        )

    def _window(self, batches: list[Any]) -> list[MicroBatch]:
        weights: list[float | Tensor] = [self.cfg.batch_size / self.samples_per_step] * len(batches)
        if self._count is not None:
            weights = microbatch_weights([self._count(batch) for batch in batches])
        return [
            MicroBatch(batch, share, is_last=i == self.accumulation)
            for i, (batch, share) in enumerate(zip(batches, weights, strict=True), 1)
        ]

    @contextlib.contextmanager
    def loading(self, *, num_workers: int | None = None) -> Iterator[Iterator[list[MicroBatch]]]:
        """The windows from the next step on, without end, as training loads them: by workers, and copied ahead.

        Args:
            num_workers: other than `data.num_workers`.
        """
        env, cfg = self.env, self.cfg
        num_workers = cfg.data.num_workers if num_workers is None else num_workers
        sampler = self._sampler(self.samples)
        on_cuda = env.device.type == "cuda"
        with contextlib.closing(
            train_loader(self.data.train, sampler, num_workers=num_workers, pin_memory=on_cuda)
        ) as loader:
            batches = to_device(
                self._clock.waiting(loader),
                env.device,
                ahead=self.accumulation if cfg.perf.prefetch and on_cuda else 0,  # the next window
                finish=self.data.finish,
                channels_last=cfg.perf.channels_last,
            )
            yield (self._window(list(itertools.islice(batches, self.accumulation))) for _ in itertools.count())

    def _steps(self) -> Generator[list[MicroBatch], None, None]:
        begin, end = self.step, self.num_steps
        with self.loading() as windows:
            self._clock.start(self.samples)
            if self.step >= end:  # stopped between its last step and its result
                yield from self._after_step(end)
            while self.step < end:
                window = next(windows)
                with self.step_of(window) as dropped, self.sampling(), self._measuring():
                    if not dropped:
                        yield window
                if self.step == begin + 1:
                    self.checkpoint.prepare()
                if self._graph is not None and not self._graph.is_used and not (dropped or self._is_looked_into):
                    self._graph = None
                    name = self.cfg.recipe["name"]
                    logger.info("perf.graph=true: recipe=%s computes its steps without Loop.run: as ever", name)
                yield from self._after_step(end)

    def run(self, step: Step, window: list[MicroBatch]) -> Any:
        """`step(window)`; with perf.graph played from a CUDA graph, where it can be.

        Args:
            step: the computation of a whole step, the same function each time. What it returns, tensors and reports in
                any nesting, may be overwritten by the next call.
            window: what `windows` gave.
        """
        if self._graph is None or self._is_replay or self._is_looked_into:
            return step(window)
        return self._graph(step, window)

    def _whole_step(self) -> CudaGraphStep | None:
        if not self.cfg.perf.graph:
            return None
        problem = why_not_capturable(self)
        if problem is not None:
            self.env.job.notes.append(f"perf.graph=true: the steps are computed as ever: {problem}")
            return None
        whole = CudaGraphStep(self)
        self.env.closing.callback(whole.forget)  # NCCL waits at its end for graphs that use its communicator
        return whole

    @contextlib.contextmanager
    def step_of(self, window: list[MicroBatch]) -> Iterator[bool]:
        """Around the computation of the next step's window. Gives true when it is to be dropped."""
        self.env.seed_step(self.step + 1)
        for net in self.nets:
            net.train()
        self._is_looked_into = self._looks_into(self.step + 1)
        eagerly = self.env.eagerly() if self._is_looked_into else contextlib.nullcontext()
        with self._fault(window) as dropped, self._sharing_casts(), eagerly:
            yield dropped
        self.step += 1
        self.samples += self.samples_per_step

    def _looks_into(self, step: int) -> bool:
        """Whether hooks are put into a step, which neither a compiled part nor a recorded step would call."""
        inject, statistics = self.cfg.debug.inject, self.statistics
        return (inject is not None and inject.step == step) or (statistics is not None and step % statistics.every == 0)

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """Around the first window: counts what its backward passes need, where one thread computes it as written."""
        if self._memory is not None:
            with contextlib.nullcontext() if self._recast is None else self._recast.hooks():
                yield
            return
        self._memory = vars(self._memory_of_run()) | {"activations": None}
        if self.cfg.perf.name != "default" or self.cfg.layout.name not in ("single", "ddp"):
            yield
            return
        tensors = (t for net in self.nets for t in (*net.parameters(), *net.buffers()))
        with saved_for_backward(tensors, self._recast) as saved:
            yield
        self._memory["activations"] = saved.activations

    def _sharing_casts(self) -> contextlib.AbstractContextManager[None]:
        # Shared copies would be kept in any case.
        reuse = self.accumulation > 1 and self._recast is None
        return self.amp.cache_weight_casts(*self.nets) if reuse else contextlib.nullcontext()

    def _memory_of_run(self) -> Memory:
        memory = memory_of(self.nets, self.optimizers, self.ema, self.cfg.amp, accumulation=self.accumulation)
        return memory if self._recast is None else replace(memory, copies=0)

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Around the computation of the next step's window, inside of `step_of`: statistics, if it is their turn."""
        return contextlib.nullcontext() if self.statistics is None else self.statistics.sampling(self.step + 1)

    def _after_step(self, end: int) -> Iterator[list[MicroBatch]]:
        cfg, at_end = self.cfg, self.step >= end
        stop = self.env.stop.poll()
        assert self._log is not None
        self._log.advance(self.step)
        if at_end or stop or self.step % cfg.log_every == 0:
            self._read_metrics()
        yield from self._consult(in_a_hurry=bool(stop))
        whole = True
        if at_end or (not stop and self.step % cfg.eval_every == 0):
            whole = self._evaluate()
            stop = stop if whole else self._asked
        if at_end or stop or self.step % cfg.save_every == 0:
            self._finish_reading()
            yield from self._consult(in_a_hurry=bool(stop))
            self._save(is_last=at_end or bool(stop))
        if at_end and whole:
            self._end()
        elif stop:
            reason = "the time limit was reached" if stop == TIME_LIMIT else signal.Signals(stop - 128).name
            self._summarise()
            message = (
                f"stopped at step {self.step} of {end}{' in its evaluation' if at_end else ''}: {reason}; a checkpoint "
                f"was written; go on with run_dir={self.env.run_dir}"
            )
            if self.env.is_main:
                self._log.warning(message)
            raise Interrupted(message, exit_code_of(stop), by_signal=stop != TIME_LIMIT)

    def log(self, report: StepReport, *, of: str = "", **values: Tensor) -> None:
        """Record a step. Does not wait for the device.

        Args:
            report: of the step.
            of: whose step it was, in a recipe that steps several optimizers one by one. Its gradient norm and skipped
                steps are logged as `grad_norm_<of>` and `skipped_<of>`.
            **values: 0-d tensors, this rank's shares of means over the window. The metrics hold their means over the
                taken steps since the last line.
        """
        if self._is_replay:
            return
        if of not in self.meters:
            self.meters[of] = Meter(self.env.device)
        self.meters[of].add(report, values)
        if self.watch is not None:
            self.watch.note(of, report, next(iter(values.values()), None))

    def draw(self, random: Callable[..., Tensor], *shape: int, stream: int = 0) -> list[Tensor]:
        """Random numbers of the present window: for each micro-batch a tensor [B, *shape] on the device.

        A function of (seed, step, stream): drawn for the whole step and cut as its samples are, so that accumulation
        and ranks do not change what a sample gets.

        Args:
            random: torch.randn or torch.rand.
            *shape: of one sample.
            stream: another number gives other numbers in the same step.
        """
        if self._graph is not None and self._graph.is_recording:
            raise RuntimeError("it draws numbers by the step's number, which a recording would repeat (Loop.draw)")
        entropy = np.random.SeedSequence([self.cfg.seed, self.step, stream]).generate_state(1, np.uint64)
        generator = torch.Generator(self.env.device).manual_seed(int(entropy[0]))
        split = (self.accumulation, self.env.world_size, self.cfg.batch_size)
        drawn = random(*split, *shape, generator=generator, device=self.env.device)
        return list(drawn[:, self.env.rank])

    # --- windows once more --------------------------------------------------------------------------------------------

    def _start_of(self, step: int) -> int:
        """The first sample of a step of this run."""
        return self.samples - (self.step - step + 1) * self.samples_per_step

    def indices_of(self, step: int, rank: int) -> list[list[int]]:
        """The data set's indices of the samples of a step, by micro-batch."""
        keys = itertools.islice(self._sampler(self._start_of(step), rank), self.accumulation)
        return [[index for index, _ in batch] for batch in keys]

    def window_of(self, step: int) -> list[MicroBatch]:
        """The window of a step, loaded anew. On every rank."""
        sampler = self._sampler(self._start_of(step))
        with contextlib.closing(train_loader(self.data.train, sampler, num_workers=0, pin_memory=False)) as loader:
            channels_last = self.cfg.perf.channels_last
            batches = to_device(loader, self.env.device, finish=self.data.finish, channels_last=channels_last)
            return self._window(list(itertools.islice(batches, self.accumulation)))

    @contextlib.contextmanager
    def replay(self, step: int) -> Iterator[tuple[Rehearsal, list[MicroBatch]]]:
        """Around a computation of the window of `step` that leaves no trace: no step, no metrics. On every rank.

        To be used by what yields the window to the recipe.
        """
        window = self.window_of(step)
        here = self.step, self.samples
        self.samples = self._start_of(step)
        self.step = step - 1
        self._is_replay = True
        try:
            with self.amp.rehearse() as rehearsal, self.env.eagerly(), self.step_of(window):
                yield rehearsal, window
        finally:
            self.step, self.samples = here
            self._is_replay = False

    @contextlib.contextmanager
    def rerun_step(self, window: list[MicroBatch] | None = None) -> Iterator[list[MicroBatch]]:
        """Around a computation of the next step's window that takes the step, without metrics.

        Args:
            window: of `loading`; None: it is loaded anew.
        """
        window = window or self.window_of(self.step + 1)
        self._is_replay = True
        try:
            with self.step_of(window):
                yield window
        finally:
            self._is_replay = False

    def snapshot(self) -> dict[str, Any]:
        """All that makes up where the run stands, copied to host memory, for `restore`. Waits for the device."""
        return {"parts": self.checkpoint.snapshot(), "progress": self._progress() | {"step": self.step}}

    def restore(self, snapshot: dict[str, Any] | Path) -> None:
        """Put everything back to a snapshot, or to a checkpoint of this run."""
        if isinstance(snapshot, dict):
            self.checkpoint.restore(snapshot["parts"])
            progress = snapshot["progress"]
        else:
            loaded = self.checkpoint.load(snapshot)
            assert loaded is not None
            progress = loaded.progress
        self._set_progress(progress)
        if self._graph is not None:
            self._graph.forget()

    def make_islands(self, names: list[str]) -> None:
        """Keep modules in fp32 from here on, in the networks and in their average."""
        doctor = Doctor(self.amp, self.env.nets)
        modules = doctor.modules(names)
        if self.ema is not None:
            modules += Doctor(self.amp, self.ema.model).modules(names)
        for module in modules:
            keep_fp32(module)
        if self._graph is not None:
            self._graph.forget()
        self.islands += [name for name in names if name not in self.islands]
        self.env.summary["islands"] = self.islands

    # --- where the run stands -----------------------------------------------------------------------------------------

    def _resume(self) -> Loaded | None:
        env, cfg = self.env, self.cfg
        own = None if env.run_dir is None else env.run_dir / "checkpoints"
        in_shards = cfg.checkpoint.name == "sharded"
        self.checkpoint = Checkpoint(
            own or "checkpoints",
            keep=cfg.checkpoint.keep,
            writer=own is not None and env.is_main,
            format=cfg.checkpoint.name,
            background=cfg.checkpoint.background,
            # What a thread sends must not come between what training sends.
            group=env.new_host_group() if in_shards and cfg.checkpoint.background else env.host_group,
            guard=env.check_folder,
            **self.parts,
        )
        env.closing.callback(self._let_finish)
        self._notes: list[str] = list(env.job.notes)
        self._spread()
        planned = {name: schedule.num_steps for name, schedule in self.schedules.items()}
        loaded = None
        if own is not None:
            loaded = self.checkpoint.load()
        if loaded is None and cfg.resume not in ("auto", "last", "never"):
            loaded = self.checkpoint.load(cfg.resume)
        elif loaded is None and cfg.task == "evaluate":
            loaded = self.checkpoint.load(cfg.run_dir)
        self._agree_on(loaded)
        if loaded is None:
            if env.run_dir is not None and (env.run_dir / "metrics.jsonl").exists():
                self._notes.append("the run folder holds no checkpoint yet: beginning from the start")
            return None
        self._notes += loaded.notes
        progress = loaded.progress
        if cfg.task == "train":
            self._check_changes(loaded)
            self._keep_samples_per_step(progress, loaded.config)
        self._set_progress(progress)
        for of, skipped in progress.get("skipped_of", {}).items():
            self.meters[of] = Meter(env.device, int(skipped))
        islands = list(progress.get("islands", []))
        doctor = Doctor(self.amp, self.env.nets)
        missing = [name for name in islands if name not in doctor.island_names()]
        if missing and self.cfg.layout.name in SHARDED and self.amp.dtype is not torch.float32:
            raise ConfigError(
                f"layout={self.cfg.layout.name}: the doctor had put {', '.join(islands)} into fp32, which has to come "
                f"before weights are sharded: add amp.keep_fp32=[{','.join(islands)}]"
            )
        if islands and doctor.can_make_islands:
            self.make_islands(islands)
            self._notes.append(f"the doctor had put {', '.join(islands)} into fp32: so it stays")
        old_mode = loaded.config.get("amp", {}).get("name")
        if old_mode != cfg.amp.name:
            self._notes.append(f"the checkpoint was made with amp={old_mode}, going on with amp={cfg.amp.name}")
        verb = "continuing from" if cfg.task == "train" else "evaluating"
        self._notes.append(f"{verb} step {self.step}: {loaded.path}")
        if cfg.task == "train" and (elsewhere := moved(loaded.path, env.device)):
            self._notes.append(elsewhere)
        if cfg.task == "train" and any(s.num_steps < planned[name] for name, s in self.schedules.items()):
            self._notes.append(f"steps beyond the schedule's {self.schedule.num_steps} keep its last learning rate")
        return loaded

    def _progress(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "samples_per_step": self.samples_per_step,
            "planned_samples": self.planned_samples,
            "skipped": int(self.amp.num_skipped),
            "consecutive_skips": int(self.amp.num_consecutive_skips),
            "skipped_of": {of: int(meter.num_skipped) for of, meter in self.meters.items() if of},
            "averaged": int(self.ema.num_taken) if self.ema else 0,
            "rounded": [int(weights.num_taken) for weights in self.amp.weights],
            "islands": self.islands,
        }

    def _set_progress(self, progress: dict[str, Any]) -> None:
        self.step, self.samples = int(progress["step"]), int(progress["samples"])
        self.amp.num_skipped.fill_(int(progress["skipped"]))
        self.amp.num_consecutive_skips.fill_(int(progress["consecutive_skips"]))
        if self.ema is not None:
            self.ema.num_taken.fill_(int(progress["averaged"]))
        for weights, num_taken in zip(self.amp.weights, progress.get("rounded", []), strict=False):
            weights.num_taken.fill_(int(num_taken))

    def _agree_on(self, loaded: Loaded | None) -> None:
        if self.env.world_size == 1:
            return
        found: list[Any] = [None] * self.env.world_size
        mine = None if loaded is None else (loaded.step, loaded.digest)
        dist.all_gather_object(found, mine, group=self.env.host_group)
        if any(other != found[0] for other in found):
            raise CheckpointError(f"the ranks loaded different checkpoints: {found}; do all see the same run folder?")

    def _check_changes(self, loaded: Loaded) -> None:
        changed = differences(loaded.config, self.cfg.to_dict())
        if not changed:
            return
        if self.cfg.allow_changes:
            self._notes.append("settings changed since the checkpoint: " + "; ".join(changed))
            return
        raise ConfigError(
            [f"{change} (the checkpoint {loaded.path} was made with the first)" for change in changed]
            + ["allow_changes=false: expected the settings of the checkpoint; allow_changes=true goes on with these"]
        )

    def _keep_samples_per_step(self, progress: dict[str, Any], old: dict[str, Any]) -> None:
        """Hold the samples per step when the number of ranks changed, by another accumulation."""
        before, now = int(progress.get("planned_samples", progress["samples_per_step"])), self.planned_samples
        if before == now:
            return
        per_pass = self.cfg.batch_size * self.env.world_size
        same = all(old.get(key) == getattr(self.cfg, key) for key in ("batch_size", "accumulation"))
        if same and (before % per_pass == 0 or is_elastic(self.cfg)):
            self.planned_samples = before
            self._spread()
            return
        problem = (
            f"batch_size={self.cfg.batch_size}, accumulation={self.cfg.accumulation}, {self.env.world_size} rank(s): "
            f"{now} samples per step, the checkpoint has {before}; choose values whose product is {before}, "
            f"or allow_changes=true"
        )
        if not self.cfg.allow_changes:
            raise ConfigError(problem)
        self._notes.append(problem)

    def _spread(self) -> None:
        """Choose the accumulation with which these ranks make the planned samples per step, or nearly."""
        per_pass = self.cfg.batch_size * self.env.world_size
        self.accumulation = max(1, round(self.planned_samples / per_pass))
        found, wanted, ranks = self.samples_per_step, self.planned_samples, f"{self.env.world_size} rank(s)"
        change = f"accumulation={self.accumulation} instead of {self.cfg.accumulation}"
        self._warnings = []
        if found != wanted:
            self._warnings.append(
                f"{change}: {found} samples per step on {ranks}, not the {wanted} of the plan, which no accumulation "
                f"gives with batch_size={self.cfg.batch_size}; the learning rate stays as it is"
            )
        elif self.accumulation != self.cfg.accumulation:
            self._notes.append(f"{change}: keeps {wanted} samples per step on {ranks}")

    def _open_log(self, loaded: Loaded | None) -> None:
        env, cfg = self.env, self.cfg
        assert env.run_dir is not None
        self._log = Log(
            env.run_dir,
            cfg.log,
            rank=env.rank,
            run_config=cfg.to_dict(),
            name=env.run_dir.name,
            start_step=self.step,
            total_steps=self.num_steps,
            last_line_step=None if loaded is None else self.step,
        )
        for note in self._notes if env.is_main else []:
            self._log.info(note)
        for warning in self._warnings if env.is_main else []:
            self._log.warning(warning)
        if env.is_main:
            self._log.info(self.plan())
            self._log.info(f"run folder: {env.run_dir}")

    def plan(self) -> str:
        """What runs, in a few lines."""
        cfg, env = self.cfg, self.env
        params = [p for net in self.nets for p in unwrap(net).parameters()]
        memory = self._memory_of_run()
        more = memory.most - memory.total
        within = f", up to {more / 2**20:.1f} MiB more within a step" if more else ""
        optimizer = self.optimizers[0]
        smallest, largest = self.amp.limits
        amp = f"amp={cfg.amp.name} (numbers from {smallest:.1e} to {largest:.1e}"
        amp += f", scale at most {scale_cap(cfg.amp, cfg.batch_size):g})" if cfg.amp.scaling else ")"
        passes = self.num_steps * self.samples_per_step / len(self.data.train)
        return "\n".join(
            [
                f"{cfg.recipe['name']}: {cfg.model.name} ({sum(p.numel() for p in params):,} parameters) on "
                f"{cfg.data.name} ({len(self.data.train):,} training samples)",
                f"  {amp} on {env.world_size} x {env.device.type}, "
                f"{type(optimizer).__name__}{' fused' if _is_fused(optimizer) else ''}, "
                f"schedule {cfg.schedule.name} over {self.schedule.num_steps} steps",
                f"  {self.num_steps} steps of {self.samples_per_step} samples ({cfg.batch_size} x accumulation "
                f"{self.accumulation} x {env.world_size} rank(s)), {passes:.3g} passes over the data",
                f"  {memory.total / 2**20:.1f} MiB per rank for weights, gradients, moments"
                f"{' and averages' if self.ema else ''}{within}; activations come on top",
            ]
        )

    def plan_in_detail(self) -> str:
        """What a dry run tells besides: where memory goes, what is sent, when it evaluates and saves."""
        cfg, env, mib = self.cfg, self.env, 2**20
        memory = memory_of(self.nets, self.optimizers, self.ema, cfg.amp, accumulation=self.accumulation)
        parts = {name: size for name, size in vars(memory).items() if size}
        said = ", ".join(f"{name} {size / mib:.1f}" for name, size in parts.items())
        lines = [f"  MiB per rank: {said}; with the activations of {cfg.batch_size} samples on top"]
        if env.world_size > 1:
            layout = cfg.layout
            each = [weight for net in self.nets for weight in weights_of(net, cfg.amp)]
            sent = traffic(
                each,
                cfg.amp,
                env.world_size,
                accumulation=self.accumulation,
                compress=layout.compress is not None,
                bucket_mb=layout.bucket_mb or 25.0,
            )
            lines.append(f"  each rank sends {sum(one.sent for one in sent) / mib:.1f} MiB per step")
        steps = self.num_steps
        lines += [
            f"  evaluates {len(self.data.eval):,} samples {_times(cfg.eval_every, steps)}, and counts by "
            f"{cfg.recipe['best']} ({cfg.recipe['best_is']})",
            f"  saves about {(memory.weights + memory.moments + memory.averages) / mib:.1f} MiB a rank "
            f"{_times(cfg.save_every, steps)}, keeps {cfg.checkpoint.keep} and the best; "
            f"metrics {_times(cfg.log_every, steps)}",
        ]
        inside = [name or "the whole network" for net in self.nets for name in island_names(unwrap(net))]
        if inside:
            lines.append(f"  fp32 islands: {', '.join(inside[:8])}{', ...' if len(inside) > 8 else ''}")
        return "\n".join([*lines, "checked: settings, names, data, device, network, optimizer; nothing was written"])

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _read_metrics(self) -> None:
        """Begin to read the numbers of a log line; on a GPU they are written when the next line is begun."""
        self._finish_reading()
        rate, waited = self._clock.lap(self.samples)
        meters = {of: meter for of, meter in self.meters.items() if meter.report is not None}
        # Without those of a phase that is over, unless nothing at all was logged since the last line.
        meters = {of: meter for of, meter in meters.items() if meter.is_fresh} or meters
        if not meters:
            return
        # Sums, and the steps they are over, which all ranks have counted.
        sums = {
            (of, name): value
            for of, meter in meters.items()
            for name, value in (meter.sums | {"": meter.num_taken / self.env.world_size}).items()
        }
        summed = torch.stack(list(sums.values()))
        if self.env.world_size > 1:
            dist.all_reduce(summed)
        facts: dict[tuple[str, str], Tensor] = {
            ("", "loss_scale"): self.amp.scaler.scale,
            ("", "skipped"): self.amp.num_skipped,
            ("", "streak"): self.amp.num_consecutive_skips,
        }
        for of, meter in meters.items():
            assert meter.report is not None
            facts |= {(of, "grad_norm"): meter.report.grad_norm, (of, "skips"): meter.num_skipped}
            meter.clear()
        if self.watch is not None:
            facts |= {("", name): value for name, value in self.watch.facts().items()}
        for name, schedule in self.schedules.items():
            facts["", _rate_key(name)] = schedule.last_rate().to(self.env.device)
        # float64 holds counts and scales exactly.
        numbers = torch.cat([summed.double(), torch.stack([f.detach().double() for f in facts.values()])])
        self._reading = Reading(numbers, [*sums, *facts], self.step, rate, waited)
        if self.env.device.type == "cpu":
            self._finish_reading()

    def _finish_reading(self) -> None:
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        found = dict(zip(reading.names, reading.values(), strict=True))
        scale, skipped, streak = (found.pop(("", name)) for name in ("loss_scale", "skipped", "streak"))
        firsts = {name: found.pop(("", name)) for name in ("first_skip", "first_bad_loss") if ("", name) in found}
        line: dict[str, Any] = {"step": reading.step, "split": "train"}
        norms: dict[str, Any] = {}
        for (of, name), value in found.items():
            if name == "grad_norm":
                # The first one stands under the plain name, too.
                norm = value if math.isfinite(value) else None
                norms |= ({f"grad_norm_{of}": norm} if of else {}) | {"grad_norm": norms.get("grad_norm", norm)}
            elif name == "skips":
                norms |= {f"skipped_{of}": int(value)} if of else {}
            elif name.startswith("lr"):
                norms |= {name: value, "lr": norms.get("lr", value)}
            elif name:
                num_taken = found[of, ""]
                line[name] = value / num_taken if num_taken else None
        line |= {
            "lr": norms.pop("lr"),
            "loss_scale": scale,
            "skipped": int(skipped),
            "grad_norm": norms.pop("grad_norm"),
            "samples_per_second": round(reading.rate, 3),
            "data_wait": round(reading.waited, 4),
        }
        line |= norms
        assert self._log is not None
        self._log.metrics(line)
        if self.statistics is not None:
            self.statistics.write(self._log, upto=reading.step)
        self.env.summary |= {"step": reading.step, "skipped": int(skipped), "samples_per_second": reading.rate}
        policy = self.amp.scaler.policy
        if skipped and not self._skip_said:
            self._skip_said = True
            why = "usual while the loss scale settles" if policy else "not usual without a loss scale: look at the data"
            self._log.info(f"step {reading.step}: first skipped step, its gradients were not finite ({why})")
        if policy and policy.dynamic and scale <= policy.min_scale and streak and not self._floor_said:
            self._floor_said = True
            self._log.warning(
                f"the loss scale is at its floor {scale:g} and steps are still skipped (step {reading.step}): "
                f"the overflow is in the forward pass or in the data, not in the scale"
            )
        if self.watch is not None:
            self._symptoms = self.watch.symptoms(reading.step, firsts, int(skipped), int(streak), scale)
        else:
            self._symptoms = Symptoms(reading.step, 0, int(streak), scale, None, None)

    def _consult(self, *, in_a_hurry: bool) -> Iterator[list[MicroBatch]]:
        """Ask the doctor about the last log line, unless the run is to stop; end a run that has diverged."""
        symptoms, self._symptoms = self._symptoms, None
        if symptoms is None:
            return
        diagnosis = None
        diverged = symptoms.streak >= self.cfg.amp.max_consecutive_skips
        if (
            self.watch is not None
            and not in_a_hurry
            and (self.watch.is_called(symptoms) or (diverged and self.watch.last is None))
        ):
            began = time.monotonic()
            diagnosis = yield from self.watch.examine(symptoms)
            self._clock.pause(time.monotonic() - began)
        if diverged and not (diagnosis is not None and diagnosis.healed):
            diagnosis = diagnosis or (self.watch.last if self.watch is not None else None)
            message = (
                f"{symptoms.streak} steps in a row up to step {symptoms.step} had gradients that are not finite "
                f"(amp.max_consecutive_skips={self.cfg.amp.max_consecutive_skips}), loss scale {symptoms.scale:g}. The "
                f"weights are those of the last good step."
            )
            if diagnosis is None:
                message += (
                    " Look for an overflow in the forward pass: keep its module in fp32 (amp.keep_fp32), lower "
                    "optimizer.lr, or use amp=bf16; doctor=watch looks for it"
                )
            raise Diverged(message if diagnosis is None else f"{message} The doctor found: {diagnosis.headline}")

    # --- evaluation, checkpoints, the end -----------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Whether it came to its end: a signal and the time limit stop it between two batches, on all ranks alike."""
        if self._eval_step == self.step:
            return True
        began = time.monotonic()
        try:
            with interruptible(self._check_stop):
                self.eval = self._metrics_of_nets()
        except _EvaluationStopped:
            return False
        self._eval_step = self.step
        self._clock.pause(time.monotonic() - began)
        if self._log is not None:
            self._log.metrics({"step": self.step, "split": "eval", **self.eval})
            self._log.info(f"step {self.step}: {_spell(self.eval)}")
        return True

    def _check_stop(self) -> None:
        self._asked = self.env.stop.poll()
        if self._asked:
            raise _EvaluationStopped

    def _metrics_of_nets(self) -> dict[str, float]:
        net = unwrap(self.model)
        nets = [net] if self.ema is None else [net, self.ema.model]
        if self.env.world_size > 1:
            # Running statistics differ between ranks; rank 0's are saved, so rank 0's are evaluated.
            for buffer in (buffer for each in nets for buffer in each.buffers()):
                dist.broadcast(buffer, 0)
        metrics = self.evaluate(net.eval())
        net.train()
        if self.ema is not None:
            metrics |= {f"ema_{name}": value for name, value in self.evaluate(self.ema.model).items()}
        return metrics

    def _save(self, *, is_last: bool) -> None:
        began = time.monotonic()
        problem = None
        if self.statistics is not None and self._log is not None:
            self.statistics.write(self._log)  # a run that goes on from here does not sample these steps again
        try:
            self.checkpoint.save(
                self.step,
                progress=self._progress(),
                config=self.cfg.to_dict(),
                metrics=self.eval if self._eval_step == self.step else None,
                best=(self.cfg.recipe["best"], self.cfg.recipe["best_is"]),
            )
            if is_last:
                self.checkpoint.wait()
        except (CheckpointError, SaveError) as error:
            problem = error
        # Where only rank 0 writes, the others must not wait in a collective for one that gave up.
        if self.env.any_rank(problem is not None):
            raise problem or SaveError("rank 0 cannot save, see its message")
        self._summarise()
        self.env.write_summary("running", 0)
        self._clock.pause(time.monotonic() - began)

    def _let_finish(self) -> None:
        """Let what is saved in the background come to its end, however the run ends; but not when asked twice."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return
        try:
            self.checkpoint.wait()
        except Exception as problem:  # the run ends already, with a problem of its own
            logger.warning("%s", problem)

    def _summarise(self) -> None:
        self.env.summary |= {
            "step": self.step,
            "eval": self.eval,
            "skipped": int(self.amp.num_skipped),
            "samples_per_second": self._clock.overall(self.samples),
            "data_wait": round(self._clock.overall_wait(), 4),
            "peak_memory_bytes": peak_memory(self.env.device),
            "memory": self._memory,
        }

    def _end(self) -> None:
        self._summarise()
        self.env.write_summary("finished", 0)
        if self._log is not None and self.env.is_main:
            self._log.info(f"finished {self.step} steps: {_spell(self.eval)}")
            if self._memory is not None:
                self._log.info(f"memory per rank: {_spell_memory(self._memory)}")
            self._log.info(f"run folder: {self.env.run_dir}")

    def _is_finished(self) -> bool:
        """Whether a run that made all its steps has its result, too: then nothing is computed, and it stands."""
        env = self.env
        before = env.summary_before
        if before.get("status") != "finished" or not isinstance(before.get("eval"), dict):
            before = None
        if env.any_rank(env.is_main and before is None):
            return False
        if env.is_main:
            say(f"already finished: {self.step} of {self.num_steps} steps in {env.run_dir}")
        self.eval = dict(before["eval"]) if before else {}
        env.summary |= before or {}
        env.begin()
        env.write_summary("finished", 0)
        return True

    def _evaluate_only(self, loaded: Loaded | None) -> None:
        assert loaded is not None  # Checkpoint.load raises when a path was named and holds none
        self.eval = self._metrics_of_nets()
        if self.env.is_main:
            for note in self._notes:
                say(note)
            say(f"step {loaded.step}: {_spell(self.eval)}")

    # --- faults on purpose --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _fault(self, window: list[MicroBatch]) -> Iterator[bool]:
        """Put the fault of `debug.inject` into this window. Gives true when the window is to be dropped."""
        inject = self.cfg.debug.inject
        if inject is None or inject.step != self.step + 1:
            yield False
            return
        if inject.where == "drop":
            yield True
            return
        if inject.rank != self.env.rank:
            yield False
            return
        net, handle = unwrap(self.model), None
        if inject.where == "batch":
            _first_float(window[0].batch).fill_(inject.value)
        elif inject.where == "gradient":
            weight = next(p for p in net.parameters() if p.requires_grad)
            if is_dtensor(weight):
                with self._fault_in_parts(set(net.parameters()), inject.value):
                    yield False
                return
            handle = weight.register_hook(lambda grad: torch.full_like(grad, inject.value))
        else:
            layer = next(m for m in net.modules() if any(True for _ in m.parameters(recurse=False)))
            handle = layer.register_forward_hook(lambda m, inputs, output: torch.as_tensor(output) + inject.value)
        try:
            yield False
        finally:
            if handle is not None:
                handle.remove()

    @contextlib.contextmanager
    def _fault_in_parts(self, weights: set[Tensor], value: float) -> Iterator[None]:
        """A bad gradient on this rank alone. Sharded gradients pass no hook of autograd on their way to the weights."""

        def spoil(params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
            parts = local(grad for param, grad in zip(params, grads, strict=True) if param in weights)
            for part in [part for part in parts if part.numel()][:1]:  # a rank holds nothing of a small one
                part.fill_(value)

        self.amp.observers.append(spoil)
        try:
            yield
        finally:
            self.amp.observers.remove(spoil)


class _EvaluationStopped(Exception):
    """The ranks agreed to stop in the middle of an evaluation."""


def _spell(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _spell_memory(memory: dict[str, int | None]) -> str:
    return ", ".join(f"{what} {num_bytes / 2**20:.1f} MiB" for what, num_bytes in memory.items() if num_bytes)


def _first_float(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    for item in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(item, Tensor) and item.is_floating_point():
            return item
    raise ConfigError("debug.inject.where=batch: the batch holds no floating-point tensor; use where=gradient")


def _times(every: int, steps: int) -> str:
    """When a cadence comes, in words: it always comes at the end."""
    return f"every {every} steps and at the end" if every < steps else "at the end"


def _rate_key(schedule: str) -> str:
    """`schedule` -> lr, `generator_schedule` -> lr_generator."""
    return f"lr_{schedule.removesuffix('schedule').strip('_')}".strip("_")


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)
