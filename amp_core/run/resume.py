"""The progress of a run: what is saved besides its parts, and what is compared or restored when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
from amp_core.checkpoints.parts import first_few
from amp_core.config.checks import lacks_data
from amp_core.config.errors import CheckpointError, ConfigError
from amp_core.config.lengths import MOST_STEPS
from amp_core.config.parse import show_value
from amp_core.config.rules import differences
from amp_core.config.schema import SHARDED, Config
from amp_core.lowp.islands import islands_of, keep_fp32, named_modules
from amp_core.run.machine import changed_machine
from amp_core.run.terminal import say

if TYPE_CHECKING:
    from amp_core.run.loop import Loop

_MAKE_PARTS = ("recipe.", "model.", "data.", "optimizer.", "ema.")
"""Settings on which the shapes of parts depend."""


def progress_of(loop: Loop) -> dict[str, Any]:
    """What a checkpoint keeps besides the parts and their counts. Waits for the device. Collective."""
    return {
        "samples": loop.samples,
        "samples_per_step": loop.feed.samples_per_step,
        "planned_samples": loop.planned_samples,
        "skipped_of": {of: int(meter.num_skipped) for of, meter in loop.metrics.meters.items() if of},
        "islands": loop.islands,
        "classes": loop.classes,
        "meters": loop.metrics.states(loop.env.host_group),
        "is_evaluated": loop.evaluation.step == loop.step,
        "excluded": loop.data.excluded,
        "train_samples": len(loop.data.train),
    }


def _check_counts(loop: Loop, loaded: Loaded) -> None:
    """Raises CheckpointError for counts that no run has written, and for missing facts."""
    lacks = {"classes", "meters", "skipped_of", "is_evaluated", "islands", "excluded"} - loaded.progress.keys()
    if lacks:
        raise CheckpointError(
            f"{loaded.path}: its progress lacks {', '.join(sorted(lacks))}, which each run writes; use "
            f"resume=<another checkpoint>, or model.weights={loaded.path} to begin with its network"
        )
    progress = {"averaged": 0, **loaded.progress}  # missing where the run had no average
    counts: dict[str, tuple[Any, int, int]]
    counts = {f"{name}.num_taken": (int(each.num_taken), 0, MOST_STEPS) for name, each in loop.schedules.items()}
    for key in ("step", "skipped", "consecutive_skips", "averaged"):
        counts[f"progress.{key}"] = progress.get(key), 0, MOST_STEPS
    for key, least in {"samples": 0, "samples_per_step": 1, "planned_samples": 1}.items():
        counts[f"progress.{key}"] = progress.get(key), least, 2**53  # lengths are computed in floats
    for key, (value, least, most) in counts.items():
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(
                f"{loaded.path}: {key} is {value!r}, expected a whole number from {least} to {most:,}; use "
                f"resume=<another checkpoint>"
            )


def set_progress(loop: Loop, progress: dict[str, Any]) -> None:
    """Put a run where `progress` says."""
    loop.step, loop.samples = int(progress["step"]), int(progress["samples"])


def open_checkpoint(loop: Loop) -> Checkpoint:
    """The checkpoints of a run, in its folder; all ranks agree on what they load. Collective."""
    env, cfg = loop.env, loop.cfg
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
        **loop.parts,
    )
    checkpoint.explain = lambda config: _settings_of(config, cfg)
    return checkpoint


def _settings_of(old: Mapping[str, Any], cfg: Config) -> str:
    """The settings on which the shapes of parts depend that a checkpoint was made with, where they differ."""
    found = differences(old, cfg.to_dict())
    changed = [each for each in found if each.startswith(_MAKE_PARTS) and ".options: " not in each]  # an empty one
    # What another name decides comes after it.
    changed.sort(key=lambda each: (".name: " not in each, not each.startswith("recipe.")))
    return f" It was made with other settings: {first_few(changed)}" if changed else ""


def named_place(cfg: Config) -> str | None:
    """The run or checkpoint that a task cannot begin without; None: it needs none."""
    reads = cfg.task in ("evaluate", "export") or (cfg.task == "predict" and cfg.model.weights is None)
    return cfg.origin or (cfg.run_dir if reads else None)


def resume(loop: Loop) -> tuple[list[str], list[str]]:
    """Load the checkpoint that a run begins with, if there is one, and set where it stands. Collective.

    Returns notes and warnings for the log. ConfigError: it was made with other settings; CheckpointError: it is not
    usable.
    """
    env, cfg = loop.env, loop.cfg
    notes = list(env.job.notes)
    loop.classes = [] if lacks_data(cfg) else [*loop.data.classes]
    planned = {name: schedule.num_steps for name, schedule in loop.schedules.items()}
    place = named_place(cfg)
    own = env.run_dir is not None and not (cfg.origin and cfg.task == "predict")
    loaded = loop.checkpoint.load() if own else None
    if loaded is None and place is not None:
        loaded = loop.checkpoint.load(place)
    if loaded is None:
        warnings = _spread(loop, notes) + repeats(loop)
        if env.run_dir is not None and (env.run_dir / "metrics.jsonl").exists():
            notes.append("the run folder has no checkpoint yet: starting from step 0")
        return notes, warnings
    notes += loaded.notes
    _check_counts(loop, loaded)
    progress = loaded.progress
    there, changes = list(progress["classes"]), []
    if there and loop.classes != there and not lacks_data(cfg):
        others = sorted({*loop.classes} ^ {*there}) or there
        said = "has other classes, or in another order, than the run was trained with, such as"
        changes = [f"data.path={cfg.data.path}: {said} {', '.join(others[:3])}"]
    if cfg.task == "train":
        now = len(loop.data.train)
        before = progress.get("train_samples", now)
        if before != now and progress["excluded"] == loop.data.excluded:
            changes.append(f"data.path={cfg.data.path}: has {now:,} samples to train on, and had {before:,} before")
        _check_changes(loop, loaded, notes, changes)
        _keep_samples_per_step(loop, loaded, notes)
    else:
        loop.classes = there  # what the network's outputs mean
        notes += [f"warning: {change}" for change in changes]
    warnings = _spread(loop, notes) + repeats(loop)
    set_progress(loop, progress)
    loop.metrics.load_states(progress["meters"], env.rank, progress["skipped_of"])
    loop.owes_evaluation = not progress["is_evaluated"] and loop.step % cfg.eval_every == 0
    _make_islands(loop, list(progress["islands"]), notes)
    old_mode = loaded.config["amp"]["name"]
    if old_mode != cfg.amp.name:
        notes.append(f"the checkpoint was made with amp={old_mode}, resuming with amp={cfg.amp.name}")
    verbs = {"train": "continuing from", "evaluate": "evaluating", "predict": "predicting with", "export": "exporting"}
    notes.append(f"{verbs[cfg.task]} step {loop.step}: {loaded.path}")
    if cfg.task != "train":
        return notes, warnings
    if elsewhere := changed_machine(loaded.path, env.device):
        notes.append(elsewhere)
    beyond = [planned[name] - schedule.num_steps for name, schedule in loop.schedules.items()]
    if max(beyond, default=0) > 0:
        notes.append(f"steps beyond the schedule's {loop.schedule.num_steps} keep its last learning rate")
    elif min(beyond, default=0) < 0:
        notes.append(f"the schedule keeps its {loop.schedule.num_steps} steps: this run ends before it does")
    return notes, warnings


def is_finished(loop: Loop) -> bool:
    """Whether a run with all steps done has its evaluation, too: then nothing is computed."""
    env, before = loop.env, loop.env.folder.before
    is_complete = before.get("status") == "finished" and isinstance(before.get("eval"), dict)
    if env.any_rank(env.is_main and not is_complete):
        return False
    if env.is_main:
        say(f"already finished: {loop.step} steps, {loop.num_steps} were asked for, in {env.run_dir}")
        loop.evaluation.metrics = dict(before["eval"])
        env.summary |= before
    env.folder.begin()
    env.folder.write_summary("finished", 0)
    return True


def _make_islands(loop: Loop, islands: list[str], notes: list[str]) -> None:
    nets = loop.env.nets
    if set(islands) - set(islands_of(nets)) and loop.cfg.layout.name in SHARDED and loop.amp.dtype is not torch.float32:
        raise ConfigError(
            f"layout={loop.cfg.layout.name}: the doctor had put {', '.join(islands)} into fp32, which must "
            f"happen before weights are sharded: add amp.keep_fp32=[{','.join(islands)}]"
        )
    if islands and loop.amp.can_make_islands(nets):
        make_islands(loop, islands)
        notes.append(f"{', '.join(islands)} stay in fp32, as the doctor set them")


def make_islands(loop: Loop, names: list[str]) -> None:
    """Keep modules in fp32 from here on, in the networks and in their average."""
    nets = [loop.env.nets] if loop.ema is None else [loop.env.nets, [("", loop.ema.model)]]
    for module in (module for each in nets for module, name in named_modules(each).items() if name in set(names)):
        keep_fp32(module)
    if loop.graph is not None:
        loop.graph.forget()
    loop.islands += [name for name in names if name not in loop.islands]
    loop.env.summary["islands"] = loop.islands


def _check_changes(loop: Loop, loaded: Loaded, notes: list[str], changes: list[str]) -> None:
    changed = differences(loaded.config, loop.cfg.to_dict()) + changes
    if loaded.progress["excluded"] != loop.data.excluded:
        changed.append(f"data.exclude: another list of samples -> that of {show_value(loop.cfg.data.exclude)}")
    if not changed:
        return
    if loop.cfg.allow_changes:
        notes.append("settings changed since the checkpoint: " + "; ".join(changed))
        return
    raise ConfigError(
        [f"{change} (the checkpoint {loaded.path} was made with the first)" for change in changed]
        + ["allow_changes=false: expected the settings of the checkpoint; allow_changes=true resumes with these"]
    )


def _keep_samples_per_step(loop: Loop, loaded: Loaded, notes: list[str]) -> None:
    """Plan the samples per step of the checkpoint when the number of ranks changed."""
    cfg, progress, old = loop.cfg, loaded.progress, loaded.config
    before, now = int(progress["planned_samples"]), loop.planned_samples
    if before == now:
        return
    per_micro_batch = cfg.batch_size * loop.env.world_size
    same = all(old.get(key) == getattr(cfg, key) for key in ("batch_size", "accumulation"))
    if same and (before % per_micro_batch == 0 or cfg.layout.is_elastic):
        loop.planned_samples = before
        return
    problem = (
        f"batch_size={cfg.batch_size}, accumulation={cfg.accumulation}, {loop.env.world_size} rank(s): "
        f"{now} samples per step, the checkpoint has {before}; choose values whose product is {before}, "
        f"or allow_changes=true"
    )
    if not cfg.allow_changes:
        raise ConfigError(problem)
    notes.append(problem)


def repeats(loop: Loop) -> list[str]:
    """A warning where a step takes more samples than there are."""
    samples, there = loop.feed.samples_per_step, len(loop.data.train)
    if samples <= there:
        return []
    return [
        f"batch_size={loop.cfg.batch_size}: a step takes {samples:,} samples of a data set of {there:,}, so each one "
        f"{samples / there:.3g} times; use a smaller batch_size or accumulation"
    ]


def _spread(loop: Loop, notes: list[str]) -> list[str]:
    """Choose the accumulation with which these ranks make the planned samples per step, or nearly. Returns warnings."""
    cfg, env, wanted = loop.cfg, loop.env, loop.planned_samples
    loop.feed.accumulation = max(1, round(wanted / (cfg.batch_size * env.world_size)))
    found, ranks = loop.feed.samples_per_step, f"{env.world_size} rank(s)"
    change = f"accumulation={loop.feed.accumulation} instead of {cfg.accumulation}"
    if found != wanted:
        return [
            f"{change}: {found} samples per step on {ranks}, not the planned {wanted}, which no accumulation gives "
            f"with batch_size={cfg.batch_size}; the learning rate is unchanged"
        ]
    if loop.feed.accumulation != cfg.accumulation:
        notes.append(f"{change}: keeps {wanted} samples per step on {ranks}")
    return []
