"""Where a run stands: what is saved of it besides its parts, and what is compared or made again when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
from amp_core.config.errors import ConfigError
from amp_core.config.rules import SHARDED, differences, is_elastic
from amp_core.config.schema import Config
from amp_core.lowp.islands import islands_of, keep_fp32, named_modules
from amp_core.run.environment import CapturedStep, Environment
from amp_core.run.evaluation import Evaluation
from amp_core.run.feed import Feed
from amp_core.run.meters import Metrics
from amp_core.step.amp import Amp
from amp_core.step.ema import Ema
from amp_core.step.schedule import Schedule
from amp_core.tensors import gathers_16bit

_MAKE_PARTS = ("recipe.", "model.", "data.", "optimizer.", "ema.")
"""Settings on which the shapes of parts depend."""


class Run(Protocol):
    """Parts, settings and position of a run; a `Loop` is one."""

    env: Environment
    cfg: Config
    amp: Amp
    parts: dict[str, Any]
    schedules: dict[str, Schedule]
    schedule: Schedule
    ema: Ema | None
    feed: Feed
    evaluation: Evaluation
    metrics: Metrics
    checkpoint: Checkpoint
    graph: CapturedStep | None
    islands: list[str]
    planned_samples: int
    owes_evaluation: bool
    step: int
    samples: int


def progress_of(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps besides the parts and their counts. Waits for the device. Collective."""
    return {
        "samples": run.samples,
        "samples_per_step": run.feed.samples_per_step,
        "planned_samples": run.planned_samples,
        "skipped_of": {of: int(meter.num_skipped) for of, meter in run.metrics.meters.items() if of},
        "averaged": 0,  # version 0.1 expects it, also where there is no average that counts
        "islands": run.islands,
        "meters": run.metrics.states(run.env.host_group),
        "is_evaluated": run.evaluation.step == run.step,
    }


def set_progress(run: Run, progress: dict[str, Any]) -> None:
    """Put a run where `progress` says."""
    run.step, run.samples = int(progress["step"]), int(progress["samples"])


def open_checkpoint(run: Run) -> Checkpoint:
    """The checkpoints of a run, in its folder; all ranks agree on what they load. Collective."""
    env, cfg = run.env, run.cfg
    own = None if env.run_dir is None else env.run_dir / "checkpoints"
    in_shards = cfg.checkpoint.name == "sharded"
    checkpoint = Checkpoint(
        own or "checkpoints",
        keep=cfg.checkpoint.keep,
        writer=own is not None and env.is_main,
        format=cfg.checkpoint.name,
        background=cfg.checkpoint.background,
        # What a thread sends must not come between what training sends.
        group=env.new_host_group() if in_shards and cfg.checkpoint.background else env.host_group,
        guard=env.folder.check,
        **run.parts,
    )
    checkpoint.explain = lambda config: _settings_of(config, cfg)
    return checkpoint


def _settings_of(old: Mapping[str, Any], cfg: Config) -> str:
    """The settings that the parts of a checkpoint were made with, to type where they differ."""
    changes = (change.partition(" -> ")[0].partition(": ") for change in differences(old, cfg.to_dict()))
    typed = [f"{key}={was}" for key, _, was in changes if key.startswith(_MAKE_PARTS) and was not in ("null", "{}")]
    typed = [each.replace("data.name=", "data=") for each in typed]
    if any(each.startswith("recipe.name=") for each in typed):
        typed = [f"recipe={old['recipe']['name']}"]
    return f" It was made with other settings; use {' '.join(typed)}" if typed else ""


def resume(run: Run) -> tuple[Loaded | None, list[str], list[str]]:
    """Load the checkpoint that a run begins with, if there is one, and set where it stands. Collective.

    Returns what was loaded; notes and warnings for the log. ConfigError: it was made with other settings;
    CheckpointError: it is not usable.
    """
    env, cfg = run.env, run.cfg
    notes = list(env.job.notes)
    planned = {name: schedule.num_steps for name, schedule in run.schedules.items()}
    is_named = cfg.resume not in ("auto", "last", "never")
    own = env.run_dir is not None and not (is_named and cfg.task == "predict")
    loaded = run.checkpoint.load() if own else None
    if loaded is None and is_named:
        loaded = run.checkpoint.load(cfg.resume)
    elif (
        loaded is None
        and cfg.run_dir is not None
        and (cfg.task == "evaluate" or (cfg.task == "predict" and cfg.model.weights is None))
    ):
        loaded = run.checkpoint.load(cfg.run_dir)
    if loaded is None:
        warnings = _spread(run, notes)
        if env.run_dir is not None and (env.run_dir / "metrics.jsonl").exists():
            notes.append("the run folder has no checkpoint yet: starting from step 0")
        return None, notes, warnings
    notes += loaded.notes
    if cfg.task == "train":
        _check_changes(run, loaded, notes)
        _keep_samples_per_step(run, loaded, notes)
    warnings = _spread(run, notes)
    set_progress(run, loaded.progress)
    progress = loaded.progress
    run.metrics.load_states(progress.get("meters", []), env.rank, progress.get("skipped_of", {}))
    run.owes_evaluation = not progress.get("is_evaluated", True) and run.step % cfg.eval_every == 0
    _make_islands(run, list(loaded.progress.get("islands", [])), notes)
    old_mode = loaded.config.get("amp", {}).get("name")
    if old_mode != cfg.amp.name:
        notes.append(f"the checkpoint was made with amp={old_mode}, resuming with amp={cfg.amp.name}")
    verb = {"train": "continuing from", "evaluate": "evaluating", "predict": "predicting with"}[cfg.task]
    notes.append(f"{verb} step {run.step}: {loaded.path}")
    if cfg.task == "train":
        from amp_core.run.machine import moved  # a reader of a recipe needs none of it

        if elsewhere := moved(loaded.path, env.device):
            notes.append(elsewhere)
    beyond = [planned[name] - schedule.num_steps for name, schedule in run.schedules.items()]
    if cfg.task == "train" and max(beyond, default=0) > 0:
        notes.append(f"steps beyond the schedule's {run.schedule.num_steps} keep its last learning rate")
    elif cfg.task == "train" and min(beyond, default=0) < 0:
        notes.append(f"the schedule keeps its {run.schedule.num_steps} steps: this run ends before it does")
    return loaded, notes, warnings


def _make_islands(run: Run, islands: list[str], notes: list[str]) -> None:
    """The islands that the doctor had made."""
    nets = run.env.nets
    if set(islands) - set(islands_of(nets)) and run.cfg.layout.name in SHARDED and run.amp.dtype is not torch.float32:
        raise ConfigError(
            f"layout={run.cfg.layout.name}: the doctor had put {', '.join(islands)} into fp32, which must "
            f"happen before weights are sharded: add amp.keep_fp32=[{','.join(islands)}]"
        )
    if islands and can_make_islands(run.amp, nets):
        make_islands(run, islands)
        notes.append(f"{', '.join(islands)} stay in fp32, as the doctor set them")


def make_islands(run: Run, names: list[str]) -> None:
    """Keep modules in fp32 from here on, in the networks and in their average."""
    nets = [run.env.nets] if run.ema is None else [run.env.nets, [("", run.ema.model)]]
    for module in (module for each in nets for module, name in named_modules(each).items() if name in set(names)):
        keep_fp32(module)
    if run.graph is not None:
        run.graph.forget()
    run.islands += [name for name in names if name not in run.islands]
    run.env.summary["islands"] = run.islands


def has_16bit(nets: list[tuple[str, nn.Module]]) -> bool:
    """Whether weights are stored or gathered in 16 bits, as of a frozen base: these networks need autocast."""
    low = (torch.float16, torch.bfloat16)
    return any(gathers_16bit(net) or any(p.dtype in low for p in net.parameters()) for _, net in nets)


def can_make_islands(amp: Amp, nets: list[tuple[str, nn.Module]]) -> bool:
    """Whether modules can become islands now: it takes autocast, and weights in fp32, also where they are gathered."""
    autocasts = amp.dtype in (torch.float16, torch.bfloat16)
    in_16bit = amp.weights or amp.config.float8 or has_16bit(nets)
    return autocasts and not in_16bit


def _check_changes(run: Run, loaded: Loaded, notes: list[str]) -> None:
    changed = differences(loaded.config, run.cfg.to_dict())
    if not changed:
        return
    if run.cfg.allow_changes:
        notes.append("settings changed since the checkpoint: " + "; ".join(changed))
        return
    raise ConfigError(
        [f"{change} (the checkpoint {loaded.path} was made with the first)" for change in changed]
        + ["allow_changes=false: expected the settings of the checkpoint; allow_changes=true resumes with these"]
    )


def _keep_samples_per_step(run: Run, loaded: Loaded, notes: list[str]) -> None:
    """Plan the samples per step of the checkpoint when the number of ranks changed."""
    cfg, progress, old = run.cfg, loaded.progress, loaded.config
    before, now = int(progress.get("planned_samples", progress["samples_per_step"])), run.planned_samples
    if before == now:
        return
    per_micro_batch = cfg.batch_size * run.env.world_size
    same = all(old.get(key) == getattr(cfg, key) for key in ("batch_size", "accumulation"))
    if same and (before % per_micro_batch == 0 or is_elastic(cfg)):
        run.planned_samples = before
        return
    problem = (
        f"batch_size={cfg.batch_size}, accumulation={cfg.accumulation}, {run.env.world_size} rank(s): "
        f"{now} samples per step, the checkpoint has {before}; choose values whose product is {before}, "
        f"or allow_changes=true"
    )
    if not cfg.allow_changes:
        raise ConfigError(problem)
    notes.append(problem)


def _spread(run: Run, notes: list[str]) -> list[str]:
    """Choose the accumulation with which these ranks make the planned samples per step, or nearly. Returns warnings."""
    cfg, env, wanted = run.cfg, run.env, run.planned_samples
    run.feed.accumulation = max(1, round(wanted / (cfg.batch_size * env.world_size)))
    found, ranks = run.feed.samples_per_step, f"{env.world_size} rank(s)"
    change = f"accumulation={run.feed.accumulation} instead of {cfg.accumulation}"
    if found != wanted:
        return [
            f"{change}: {found} samples per step on {ranks}, not the planned {wanted}, which no accumulation gives "
            f"with batch_size={cfg.batch_size}; the learning rate is unchanged"
        ]
    if run.feed.accumulation != cfg.accumulation:
        notes.append(f"{change}: keeps {wanted} samples per step on {ranks}")
    return []
