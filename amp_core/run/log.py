"""The log of a run: metrics.jsonl and train.log always, a progress bar, TensorBoard and wandb if configured.

Nothing here stops or stalls training: a full disk, a missing package, an unreachable server each give one warning.

On the terminal, messages (`info`) go to stdout, because the results of a run are among them; progress and warnings go
to stderr. Rank 0 writes everything; the other ranks only send their warnings to stderr.

"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amp_core.config.schema import LogConfig
from amp_core.run.lines import LineFile, cut_lines, dumps, numbers_of
from amp_core.run.terminal import TICK_SECONDS, Formatter, Progress, TerminalHandler
from amp_core.run.trackers import TensorBoard, Wandb

logger = logging.getLogger("amp_recipes")


class Log:
    """The reports of one run. While it is open, messages of the logger `amp_recipes` go to train.log and the terminal.

    On ranks above 0 only warnings are passed on, and `metrics` and `advance` do nothing. `run_config` and `name` are
    for wandb. Lines of metrics beyond `start_step` are cut; it is 0 for a fresh start.
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
        shows_scale: bool = True,
    ) -> None:
        run_dir = Path(run_dir).absolute()
        self._is_main = rank == 0
        self._is_closed = False
        self._step = start_step
        self._next_tick = 0.0
        self._progress: Progress | None = None
        self._trackers: dict[str, TensorBoard | Wandb] = {}
        self._handlers: list[logging.Handler] = [TerminalHandler(rank)]
        if cfg.quiet:
            self._handlers[0].setLevel(logging.WARNING)
        if self._is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._handlers.append(FileHandler(run_dir / "train.log", logger.warning))
        for handler in logger.handlers[:]:  # of a run that died before it could close
            if isinstance(handler, (TerminalHandler, FileHandler)):
                logger.removeHandler(handler)
        self._before = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)
        if not self._is_main:
            return

        last_line_step = start_step or -1  # a fresh start keeps no line
        self._metrics_file, self._last_steps = _open_lines(run_dir / "metrics.jsonl", last_line_step)
        self._statistics_file, _ = _open_lines(run_dir / "doctor" / "statistics.jsonl", last_line_step)
        if cfg.progress and not cfg.quiet:
            self._progress = Progress(total_steps, shows_scale=shows_scale)
        if cfg.tensorboard:
            self._start(run_dir / "tensorboard", lambda folder: TensorBoard(folder, last_line_step + 1))
        if cfg.wandb:
            self._start(run_dir / "wandb", lambda folder: Wandb(folder, cfg, run_config, name))

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Report the numbers of a step: to metrics.jsonl, the bar and the trackers.

        They have `step`, `split` ("train" or "eval") and numbers, also nested; tensors are read back. The bar shows a
        few of train lines. Steps of a split rise: what is reported again, after a resume or at the end, is left out.
        """
        if not self._is_main or self._is_closed:
            return
        step, split = int(metrics["step"]), str(metrics["split"])
        if step <= self._last_steps.get(split, -1):
            return
        self._last_steps[split] = step
        self._metrics_file.append(dumps(metrics))
        numbers = {key: value for key, value in metrics.items() if key not in ("step", "split")}
        if self._progress is not None and split == "train":
            self._show(self._progress.show, step, metrics)
        flat = dict(numbers_of(split, numbers))
        self._track(lambda tracker: tracker.add(step, flat))

    def statistics(self, line: Mapping[str, Any]) -> None:
        """Report the ranges of the layers in a step: to doctor/statistics.jsonl, the main ones to the trackers.

        A line has `step`, and `layers`: by name and kind of numbers, with `amax` and `underflow` among what is known.
        """
        if not self._is_main or self._is_closed:
            return
        with contextlib.suppress(OSError):  # reported at the first line
            self._statistics_file.path.parent.mkdir(exist_ok=True)
        self._statistics_file.append(dumps(line))
        numbers = {
            f"{kind}_{name}/{layer or 'network'}": float(found[name])
            for layer, kinds in line["layers"].items()
            for kind, found in kinds.items()
            for name in ("amax", "underflow")
            if found[name] is not None
        }
        self._track(lambda tracker: tracker.add(int(line["step"]), numbers))

    def advance(self, step: int) -> None:
        """Move the bar. Call it after every step: it compares the time, and works about ten times a second."""
        self._step = step
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        if self._progress is not None:
            self._show(self._progress.show, step)
        self._track(lambda tracker: tracker.poll())

    def close(self, summary: Mapping[str, Any]) -> None:
        """End the reports; waits at most ten seconds for wandb, which shows the summary. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._progress is not None:
            self._show(self._progress.close, self._step)
        self._track(lambda tracker: tracker.close(summary))
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        level, logger.propagate = self._before
        logger.setLevel(level)
        if self._is_main:
            self._metrics_file.close()
            self._statistics_file.close()

    def _start(self, folder: Path, tracker: Callable[[Path], TensorBoard | Wandb]) -> None:
        try:
            self._trackers[folder.name] = tracker(folder)
        except Exception as error:  # third-party code may raise anything, and training continues
            logger.warning("%s cannot start, the run continues without it: %s", folder.name, error)

    def _track(self, act: Callable[[TensorBoard | Wandb], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # third-party code may raise anything, and training continues
                del self._trackers[name]
                with contextlib.suppress(Exception):
                    tracker.abandon()
                logger.warning("%s is switched off: %s", name, error)

    def _show(self, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:  # stderr was closed, a loss is no number, a variable of tqdm: training continues
            self._progress = None
            logger.warning("progress is switched off: %s", error)


class FileHandler(logging.Handler):
    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._file = LineFile(path, warn)
        self.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(self.format(record))

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_lines(path: Path, last_step: int) -> tuple[LineFile, dict[str, int]]:
    """A file of lines, without those beyond a step, and the last step of each split in it."""
    last_steps: dict[str, int] = {}
    try:
        last_steps = cut_lines(path, last_step)
    except OSError as error:
        logger.warning("%s: lines beyond step %d cannot be cut and are doubled: %s", path.name, last_step, error)
    return LineFile(path, logger.warning), last_steps


def check_log(cfg: LogConfig) -> list[str]:
    """What is missing for the wanted trackers, one sentence each. Imports nothing."""
    wanted = [name for name in ("tensorboard", "wandb") if getattr(cfg, name)]
    # A folder of that name in the working directory (wandb makes one) is found too, as a namespace without origin.
    specs = {name: importlib.util.find_spec(name) for name in wanted}
    return [
        f"log={cfg.name} needs the package {name}: pip install 'amp-recipes[{name}]'"
        for name, spec in specs.items()
        if spec is None or spec.origin is None
    ]
