"""The training loop around a recipe's steps: data, resume, cadences, metrics, checkpoints, stopping.

A recipe writes

    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)

and this module does what is due between two steps, on all ranks alike. Between two log lines the host reads nothing
back from the device.

A window may be yielded twice: to examine a step, the doctor lets the recipe's `for` compute it again, within
`amp.rehearse()`, so that nothing changes and nothing is logged. Whatever a recipe does with a window must therefore
happen inside its step.

What surrounds the steps (resuming, the log, the plan, a dry run) is imported where it is used, so that a reader of a
recipe's steps can skip it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from amp_core.config.errors import CheckpointError, ConfigError, Diverged, Interrupted, SaveError
from amp_core.config.lengths import num_steps
from amp_core.config.schema import InjectConfig
from amp_core.data import Data
from amp_core.data.loading import GaveUp
from amp_core.run.environment import Environment, outcome_of, peak_memory
from amp_core.run.evaluation import Evaluate, Evaluation, Predict, check_metrics, check_result, spell, why_diverged
from amp_core.run.feed import Feed
from amp_core.run.meters import Clock, Metrics, Symptoms
from amp_core.step.amp import Amp
from amp_core.step.ema import Ema
from amp_core.step.observer import Observer, around_window
from amp_core.step.report import StepReport
from amp_core.step.schedule import Schedule
from amp_core.step.window import MicroBatch
from amp_core.tensors import is_sharded

if TYPE_CHECKING:
    from amp_core.run.log import Log

Step = Callable[[list[MicroBatch]], Any]
"""The computation of a whole step from its window."""

logger = logging.getLogger("amp_recipes")


class Loop:
    """One run of a recipe.

    Args:
        env: the run's configuration, device, ranks and folder.
        data: `data.train` is loaded here; `evaluate` loads its own batches.
        amp: the mode; saved as `scaler`.
        evaluate: returns metrics of a network on the evaluation data. Called on every rank, for the first network and
            then for its average.
        predict: what a network predicts for a batch; None: task=predict is refused.
        **parts: what is saved, by name: networks (wrapped or not), optimizers, schedules, averages, and anything else
            with `state_dict` and `load_state_dict`; None is left out. At least one network, optimizer, schedule.
    """

    def __init__(
        self, env: Environment, data: Data, *, amp: Amp, evaluate: Evaluate, predict: Predict = None, **parts: Any
    ) -> None:
        self.env, self.cfg, self.data, self.amp, self.predict = env, env.cfg, data, amp, predict
        self.parts = parts | {"scaler": amp}
        self.nets = [part for part in parts.values() if isinstance(part, nn.Module)]
        self.optimizers = [part for part in parts.values() if isinstance(part, torch.optim.Optimizer)]
        self.schedules = {name: part for name, part in parts.items() if isinstance(part, Schedule)}
        self.model, self.schedule = self.nets[0], next(iter(self.schedules.values()))
        self.ema = next((part for part in parts.values() if isinstance(part, Ema)), None)
        _require_samples(self)
        env.job.notes += data.notes
        self.clock = Clock()
        self.feed = Feed(env, data, self.clock.timed)
        self.metrics = Metrics(amp, self.schedules, env.world_size)
        self.planned_samples = self.cfg.batch_size * self.cfg.accumulation * env.planned_ranks
        """Samples per step at the start of the run; an elastic run stays as near to it as its ranks allow."""
        self.step = 0
        """Windows done, whether their steps were taken or skipped."""
        self.samples = 0
        """Samples drawn so far, over all ranks."""
        self.evaluation = Evaluation(env, evaluate, self.model, self.ema, self.clock, self.optimizers)
        self.classes: list[str] = []
        """Names of the classes, by number, from the start of the run; empty where data has none."""
        self.islands: list[str] = []
        """Modules that the doctor keeps in fp32, besides those of amp.keep_fp32."""
        self.owes_evaluation = False
        """The run was stopped after the step of its checkpoint, before the evaluation due at that step."""
        self.memory: dict[str, int | None] | None = None
        """Bytes per rank, by kind; None before the first window."""
        self.is_replay = False
        """Whether the current window is computed again, for the doctor or a tool."""
        from amp_core.run import perf
        from amp_core.run.throughput import throughput

        self.throughput = throughput(self)
        self.graph = perf.captured_step(self)
        self.watch, self.statistics = env.doctor(self)
        self.observers: list[Observer] = [each for each in (self.statistics, self.watch) if each is not None]
        """Their contexts are entered in this order: the last one is innermost."""
        self.observers += perf.observers(self)
        self._log: Log
        """Open during training; missing before."""
        self._symptoms: Symptoms | None = None
        self._is_eager_step = False

    @property
    def eval(self) -> dict[str, float]:
        """Results of the last evaluation."""
        return self.evaluation.metrics

    @property
    def num_steps(self) -> int:
        """The step at which the run ends."""
        total, done = len(self.data.train), {"steps_done": self.step, "samples_done": self.samples}
        return num_steps(self.cfg, num_samples=total, samples_per_step=self.feed.samples_per_step, **done)

    # --- the training loop --------------------------------------------------------------------------------------------

    def windows(self, count: Callable[[Any], Tensor] | None = None) -> Iterator[list[MicroBatch]]:
        """Resume, then yield the remaining windows. Between two of them: log, evaluate, save, stop.

        Args:
            count: the size of a batch, as a 0-d tensor on its device, such as its valid tokens. Default: its samples.

        Yields:
            `accumulation` micro-batches on the device; their weights sum to 1 over all ranks.

        Raises:
            ConfigError: the checkpoint was made with other settings.
            CheckpointError, SaveError: no usable checkpoint, or it cannot be written.
            Diverged: too many skipped steps in a row.
            Interrupted: a signal or the time limit, after a checkpoint.
        """
        from amp_core.run.plan import dry_run, open_log
        from amp_core.run.resume import is_finished, open_checkpoint, resume

        self.feed.count = count
        if self.cfg.dry_run and self.env.driver is None:
            yield from dry_run(self, count)
            return
        self.checkpoint = open_checkpoint(self)
        self.env.closing.callback(self._finish_saving)
        notes, warnings = resume(self)
        if self.env.driver is not None:
            with self.env.eagerly():
                yield from self.env.driver(self, count)
            return
        if self.cfg.task != "train":
            _without_training(self, notes)
            return
        if self.step >= self.num_steps and is_finished(self):
            return
        if self.step > self.num_steps:
            notes.append(f"nothing to train: {self.step} steps are done, {self.num_steps} were asked for")
        self.env.folder.begin()
        self._log = open_log(self, notes, warnings)
        ending: dict[str, Any] = {"status": "finished", "exit_code": 0}
        try:
            steps = self._steps()
            # If a recipe fails in a replay, the generator is still inside it: closed, it no longer traces what follows.
            self.env.closing.callback(steps.close)
            yield from steps
        except BaseException as problem:  # trackers get the exit code; it is raised again
            code, status = (1, "failed") if isinstance(problem, GeneratorExit) else outcome_of(problem)
            ending = {"status": status, "exit_code": code}
            raise
        finally:
            self._log.close(self.env.summary | ending)

    def _steps(self) -> Generator[list[MicroBatch], None, None]:
        begin, end = self.step, self.num_steps
        with contextlib.ExitStack() as observed:
            for observer in self.observers:
                observed.enter_context(observer.around_run())
            windows = observed.enter_context(self.feed.loading(self.samples))
            self.clock.start(self.samples)
            try:
                yield from self._windows_of(windows, end)
            except GaveUp as wait:
                _stop_waiting(self, begin, end, wait)

    def _windows_of(self, windows: Iterator[list[MicroBatch]], end: int) -> Iterator[list[MicroBatch]]:
        if self.step == 0 and self.cfg.eval.at_start:
            _evaluate_at_start(self)
        if self.step >= end or self.owes_evaluation:  # stopped between a step and its evaluation
            yield from self._after_step(end)
        while self.step < end:
            window = next(windows)
            with self.step_of(window) as dropped, around_window(self.observers, self.step + 1):
                if not dropped:
                    yield window
            if self.graph is not None and not self.graph.is_used and not (dropped or self._is_eager_step):
                self.graph = None
                name = self.cfg.recipe["name"]
                logger.info("perf.graph=true: recipe=%s does not use Loop.run: running eagerly instead", name)
            self.env.report_compiling()
            yield from self._after_step(end)

    def run(self, step: Step, window: list[MicroBatch]) -> Any:
        """`step(window)`; with perf.graph replayed from a CUDA graph where possible.

        `step` computes the whole step of a window from `windows`, and must be the same function each time. What it
        returns, tensors and reports in any nesting, may be overwritten by the next call.
        """
        if self.graph is None or self.is_replay or self._is_eager_step:
            return step(window)
        return self.graph(step, window)

    @contextlib.contextmanager
    def step_of(self, window: list[MicroBatch]) -> Iterator[bool]:
        """The context in which the next step is computed. Yields True if debug.inject drops its window."""
        self.env.seed_step(self.step + 1)
        for net in self.nets:
            net.train()
        # Injection and statistics need hooks, which neither compiled blocks nor captured steps call: run eagerly.
        step, statistics = self.step + 1, self.statistics
        inject = self.cfg.debug.inject if self.cfg.debug.inject and self.cfg.debug.inject.step == step else None
        self._is_eager_step = inject is not None or (statistics is not None and step % statistics.every == 0)
        # Casts shared by micro-batches stay in memory, which is what perf.recast_weights avoids.
        reuse = self.feed.accumulation > 1 and not self.cfg.perf.recast_weights
        with (
            _fault(self, inject, window) if inject is not None else contextlib.nullcontext(False) as dropped,
            self.amp.cache_weight_casts(*self.nets) if reuse else contextlib.nullcontext(),
            self.env.eagerly() if self._is_eager_step else contextlib.nullcontext(),
        ):
            yield dropped
        self.step += 1
        self.samples += self.feed.samples_per_step

    def _after_step(self, end: int) -> Iterator[list[MicroBatch]]:
        cfg, at_end = self.cfg, self.step >= end
        stop = self.env.stop.poll()
        self._log.advance(self.step)
        # A stop alone is no reason for a line: the resumed run writes the next one, over the same steps as without it.
        if at_end or self.step % cfg.log_every == 0:
            self._begin_line()
        yield from self._consult(is_stopping=bool(stop))
        evaluated = True
        if at_end or (not stop and self.step % cfg.eval_every == 0):
            evaluated = self._evaluate()
            stop = stop if evaluated else self.evaluation.asked
        if at_end or stop or self.step % cfg.save_every == 0:
            self._finish_line()
            yield from self._consult(is_stopping=bool(stop))
            self._save(is_last=at_end or bool(stop))
        if at_end and evaluated:
            _end(self)
        elif stop:
            where = f"{self.step} of {end}{' in its evaluation' if at_end else ''}"
            _interrupt(self, stop, where, "a checkpoint was written")

    def log(self, report: StepReport, *, of: str = "", **values: Tensor) -> None:
        """Record a step. Does not wait for the device.

        Args:
            report: what `Amp.step` returned.
            of: whose step it was, in a recipe that steps several optimizers one by one. Its gradient norm and skipped
                steps are logged as `grad_norm_<of>` and `skipped_<of>`.
            **values: 0-d tensors, this rank's share of a mean over the window. Logged are their means over the steps
                taken since the last line.
        """
        if self.is_replay:
            return
        self.metrics.add(of, report, values)
        if self.watch is not None:
            self.watch.note(report, next(iter(values.values()), None))

    def due(self, *, steps: int = 0, epochs: int = 0) -> bool:
        """Whether what is done every `steps` or `epochs` is due after this window, on all ranks; not in replays."""
        return not self.is_replay and self.feed.ends(self.step, self.samples, steps, epochs)

    def draw(self, random: Callable[..., Tensor], *shape: int, stream: int = 0) -> list[Tensor]:
        """Random numbers for the current window: a tensor [B, *shape] on the device for each micro-batch.

        A function of (seed, step, stream): drawn for the whole step and divided like its samples, so that accumulation
        and number of ranks do not change what a sample gets.

        Args:
            random: torch.randn or torch.rand.
            *shape: of one sample.
            stream: a number for each independent draw within a step.

        RuntimeError: a CUDA graph is being captured.
        """
        if self.graph is not None and self.graph.is_capturing:
            raise RuntimeError("it draws numbers by the step's number, which a replay would repeat (Loop.draw)")
        return self.feed.draw(random, *shape, step=self.step, stream=stream)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _begin_line(self) -> None:
        """Start to copy the numbers of a log line to the host; on a GPU it is written with the next line or save."""
        self._finish_line()
        lap = self.clock.lap(self.samples)
        facts = self.watch.facts() if self.watch is not None else {}
        # After a line at the end that log_every does not ask for, a run that is extended logs the next one as if it
        # had not ended here.
        self.metrics.begin_line(self.step, lap, facts, keep_sums=self.step % self.cfg.log_every != 0)
        if self.env.device.type == "cpu":
            self._finish_line()

    def _finish_line(self) -> None:
        line = self.metrics.finish_line()
        if line is None:
            return
        speed = self.throughput(line.samples_per_second)
        self._log.metrics(line.numbers | speed)
        if self.statistics is not None:
            self.statistics.write(self._log, upto=line.symptoms.step)
        self.env.summary |= {key: line.numbers[key] for key in ("step", "skipped")} | speed
        self.env.summary["samples_per_second"] = line.samples_per_second
        symptoms, watch = line.symptoms, self.watch
        self._symptoms = symptoms if watch is None else watch.completed(symptoms, line.facts)

    def _consult(self, *, is_stopping: bool) -> Iterator[list[MicroBatch]]:
        """Let the doctor examine the last log line, unless the run is stopping; end a run that has diverged."""
        symptoms, self._symptoms = self._symptoms, None
        if symptoms is None:
            return
        found, watch = None, self.watch
        diverged = symptoms.streak >= self.cfg.amp.max_consecutive_skips
        asked = watch is not None and (watch.is_called(symptoms) or (diverged and watch.last is None))
        if watch is not None and asked and not is_stopping:
            began = time.monotonic()
            found = yield from watch.examine(symptoms)
            self.clock.exclude(time.monotonic() - began)
        if diverged and not (found is not None and found.healed):
            found = found or (watch.last if watch is not None else None)
            raise Diverged(why_diverged(symptoms, self.cfg.amp.max_consecutive_skips, found and found.headline))

    # --- evaluation, checkpoints, the end -----------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate, unless done at this step. False: interrupted before it was complete."""
        if self.evaluation.step == self.step:
            return True
        if not self.evaluation.run(self.step):
            return False
        self._log.metrics({"step": self.step, "split": "eval", **self.eval})
        logger.info("step %d: %s", self.step, spell(self.eval))
        _look_at_evaluation(self)
        return True

    def _save(self, *, is_last: bool) -> None:
        from amp_core.run.resume import progress_of

        began = time.monotonic()
        problem = None
        if self.statistics is not None:
            self.statistics.write(self._log)  # a run that resumes here does not sample these steps again
        try:
            self.checkpoint.save(
                self.step,
                progress=progress_of(self),
                config=self.cfg.to_dict(),
                metrics=self.eval if self.evaluation.step == self.step else None,
                best=(self.cfg.recipe["best"], self.cfg.recipe["best_is"]),
            )
            if is_last:
                self.checkpoint.wait()
        except (CheckpointError, SaveError) as error:
            problem = error
        # If only rank 0 writes and fails, the other ranks must not wait for it in their next collective.
        if self.env.any_rank(problem is not None):
            raise problem or SaveError("rank 0 cannot save, see its message")
        self.summarise()
        self.env.folder.write_summary("running", 0)
        self.clock.exclude(time.monotonic() - began)

    def _finish_saving(self) -> None:
        """Wait for background saves, however the run ends, except after a second Ctrl-C."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return
        try:
            self.checkpoint.wait()
        except Exception as problem:  # not raised: the run is ending, perhaps with another error
            logger.warning("%s", problem)

    def summarise(self) -> None:
        rate, waited = self.clock.overall(self.samples)
        self.env.summary |= {
            "step": self.step,
            "eval": self.eval,
            "skipped": int(self.amp.num_skipped),
            "samples_per_second": rate,
            **self.throughput(rate),
            "data_wait": round(waited, 4),
            "peak_memory_bytes": peak_memory(self.env.device),
            "memory": self.memory,
        }


def _evaluate_at_start(loop: Loop) -> None:
    if not loop._evaluate():
        where = f"0 of {loop.num_steps} in its evaluation"
        _interrupt(loop, loop.evaluation.asked, where, "nothing was saved")
    loop.env.summary["eval_at_start"] = loop.eval


def _stop_waiting(loop: Loop, begin: int, end: int, wait: GaveUp) -> NoReturn:
    """Stop while waiting for data, with a checkpoint of the last step if that needs no other rank."""
    saves = loop.env.world_size == 1 and loop.step > begin
    if saves:
        loop._finish_line()
        loop._save(is_last=True)
    saved = "a checkpoint was written" if saves else "nothing was saved since the last checkpoint"
    _interrupt(loop, loop.env.stop.code, f"{loop.step} of {end}, waiting for data", saved, wait)


def _fault(loop: Loop, inject: InjectConfig, window: list[MicroBatch]) -> contextlib.AbstractContextManager[bool]:
    from amp_core.run.inject import fault

    return fault(inject, loop.model, loop.amp, window, rank=loop.env.rank)


def _require_samples(loop: Loop) -> None:
    env, num_samples = loop.env, len(loop.env.eval_part(loop.data.eval))
    if any(map(is_sharded, loop.nets)) and num_samples < env.world_size:
        raise ConfigError(
            f"layout={loop.cfg.layout.name}: {num_samples} evaluation samples for {env.world_size} ranks, which "
            f"gather weights together; expected at least one each: use fewer ranks, or layout=ddp"
        )


def _without_training(loop: Loop, notes: list[str]) -> None:
    from amp_core.run.predict import predict
    from amp_core.run.terminal import say

    for note in notes if loop.env.is_main else ():
        say(note)
    if loop.cfg.task == "predict":
        predict(loop)
        return
    if loop.cfg.task == "export":
        from amp_core.run.export import export

        export(loop)
        return
    loop.evaluation.metrics = loop.evaluation.metrics_of_nets()
    if loop.env.is_main:
        say(f"step {loop.step}: {spell(loop.eval)}")
    _look_at_evaluation(loop)
    check_metrics(loop.eval, where=loop.evaluation.where)


def _look_at_evaluation(loop: Loop) -> None:
    if loop.watch is not None and loop.watch.last is None:
        loop.evaluation.where = loop.watch.silent.evaluated(loop.step, loop.eval)


def _end(loop: Loop) -> None:
    loop.summarise()
    skipped = loop.env.summary["skipped"]
    streak, scale = int(loop.amp.num_consecutive_skips), loop.amp.scale
    where = "" if streak else loop.evaluation.where
    check_result(loop.eval, step=loop.step, skipped=skipped, amp=loop.cfg.amp, scale=scale, streak=streak, where=where)
    loop.env.folder.write_summary("finished", 0)
    if loop.env.is_main:
        before = loop.env.summary.get("eval_at_start")
        began = f"; before the first: {spell(before)}" if before else ""
        logger.info("finished %d steps: %s%s", loop.step, spell(loop.eval), began)
        if tokens := loop.env.summary.get("tokens_per_second"):
            mfu = loop.env.summary["mfu"]
            logger.info("%.0f tokens/s%s", tokens, "" if mfu is None else f", MFU {100 * mfu:.1f} %")
        if loop.memory is not None:
            sizes = (f"{what} {size / 2**20:.1f} MiB" for what, size in loop.memory.items() if size)
            logger.info("memory per rank: %s", ", ".join(sizes))
        logger.info("run folder: %s", loop.env.run_dir)


def _interrupt(loop: Loop, stop: int, where: str, saved: str, cause: BaseException | None = None) -> NoReturn:
    from amp_core.run.stop import TIME_LIMIT, exit_code_of

    reason = "the time limit was reached" if stop == TIME_LIMIT else signal.Signals(stop - 128).name
    loop.summarise()
    message = f"stopped at step {where}: {reason}; {saved}; resume with run_dir={loop.env.run_dir}"
    if loop.env.is_main:
        logger.warning("%s", message)
    raise Interrupted(message, exit_code_of(stop), by_signal=stop != TIME_LIMIT) from cause
