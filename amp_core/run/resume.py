"""Where a run stands: what is saved of it besides its parts, and what is compared when it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from amp_core.checkpoints.checkpoint import Checkpoint, Loaded
from amp_core.config.errors import CheckpointError, ConfigError
from amp_core.config.rules import SHARDED, differences, is_elastic
from amp_core.lowp.islands import island_names
from amp_core.run.islands import can_make_islands, make_islands
from amp_core.run.machine import moved
from amp_core.tensors import unwrap

if TYPE_CHECKING:
    from amp_core.run.loop import Loop


def progress_of(loop: Loop) -> dict[str, Any]:
    """What a checkpoint keeps besides the parts. Waits for the device."""
    return {
        "samples": loop.samples,
        "samples_per_step": loop.feed.samples_per_step,
        "planned_samples": loop.planned_samples,
        "skipped": int(loop.amp.num_skipped),
        "consecutive_skips": int(loop.amp.num_consecutive_skips),
        "skipped_of": {of: int(meter.num_skipped) for of, meter in loop.metrics.meters.items() if of},
        "averaged": int(loop.ema.num_taken) if loop.ema else 0,
        "rounded": [int(weights.num_taken) for weights in loop.amp.weights],
        "islands": loop.islands,
    }


def set_progress(loop: Loop, progress: dict[str, Any]) -> None:
    """Put what `progress_of` gave back."""
    loop.step, loop.samples = int(progress["step"]), int(progress["samples"])
    loop.amp.num_skipped.fill_(int(progress["skipped"]))
    loop.amp.num_consecutive_skips.fill_(int(progress["consecutive_skips"]))
    if loop.ema is not None:
        loop.ema.num_taken.fill_(int(progress["averaged"]))
    for weights, num_taken in zip(loop.amp.weights, progress.get("rounded", []), strict=False):
        weights.num_taken.fill_(int(num_taken))


def open_checkpoint(loop: Loop) -> Checkpoint:
    """The checkpoints of a run, in its folder. Collective."""
    env, cfg = loop.env, loop.cfg
    own = None if env.run_dir is None else env.run_dir / "checkpoints"
    in_shards = cfg.checkpoint.name == "sharded"
    return Checkpoint(
        own or "checkpoints",
        keep=cfg.checkpoint.keep,
        writer=own is not None and env.is_main,
        format=cfg.checkpoint.name,
        background=cfg.checkpoint.background,
        # What a thread sends must not come between what training sends.
        group=env.new_host_group() if in_shards and cfg.checkpoint.background else env.host_group,
        guard=env.check_folder,
        **loop.parts,
    )


def resume(loop: Loop) -> tuple[Loaded | None, list[str], list[str]]:
    """Load the checkpoint that a run begins with, if there is one, and set where it stands. Collective.

    Returns:
        What was loaded; notes and warnings for the log.

    Raises:
        ConfigError: the checkpoint was made with other settings.
        CheckpointError: no usable checkpoint, or different ones on different ranks.
    """
    env, cfg = loop.env, loop.cfg
    notes = list(env.job.notes)
    warnings = _spread(loop, notes)
    planned = {name: schedule.num_steps for name, schedule in loop.schedules.items()}
    loaded = loop.checkpoint.load() if env.run_dir is not None else None
    if loaded is None and cfg.resume not in ("auto", "last", "never"):
        loaded = loop.checkpoint.load(cfg.resume)
    elif loaded is None and cfg.task == "evaluate":
        loaded = loop.checkpoint.load(cfg.run_dir)
    _agree_on(loop, loaded)
    if loaded is None:
        if env.run_dir is not None and (env.run_dir / "metrics.jsonl").exists():
            notes.append("the run folder holds no checkpoint yet: beginning from the start")
        return None, notes, warnings
    notes += loaded.notes
    if cfg.task == "train":
        _check_changes(loop, loaded, notes)
        warnings = _keep_samples_per_step(loop, loaded, notes, warnings)
    set_progress(loop, loaded.progress)
    progress = loaded.progress
    loop.metrics.load_states(progress.get("meters", []), env.rank, progress.get("skipped_of", {}))
    loop.owes_evaluation = not progress.get("is_evaluated", True) and loop.step % cfg.eval_every == 0
    _make_islands(loop, list(loaded.progress.get("islands", [])), notes)
    old_mode = loaded.config.get("amp", {}).get("name")
    if old_mode != cfg.amp.name:
        notes.append(f"the checkpoint was made with amp={old_mode}, going on with amp={cfg.amp.name}")
    verb = "continuing from" if cfg.task == "train" else "evaluating"
    notes.append(f"{verb} step {loop.step}: {loaded.path}")
    if cfg.task == "train" and (elsewhere := moved(loaded.path, env.device)):
        notes.append(elsewhere)
    if cfg.task == "train" and any(s.num_steps < planned[name] for name, s in loop.schedules.items()):
        notes.append(f"steps beyond the schedule's {loop.schedule.num_steps} keep its last learning rate")
    return loaded, notes, warnings


def _make_islands(loop: Loop, islands: list[str], notes: list[str]) -> None:
    """The islands that the doctor had made."""
    nets = loop.env.nets
    there = {".".join(filter(None, [prefix, name])) for prefix, net in nets for name in island_names(unwrap(net))}
    if set(islands) - there and loop.cfg.layout.name in SHARDED and loop.amp.dtype is not torch.float32:
        raise ConfigError(
            f"layout={loop.cfg.layout.name}: the doctor had put {', '.join(islands)} into fp32, which has to come "
            f"before weights are sharded: add amp.keep_fp32=[{','.join(islands)}]"
        )
    if islands and can_make_islands(loop.amp, nets):
        make_islands(loop, islands)
        notes.append(f"the doctor had put {', '.join(islands)} into fp32: so it stays")


def _agree_on(loop: Loop, loaded: Loaded | None) -> None:
    if loop.env.world_size == 1:
        return
    found: list[Any] = [None] * loop.env.world_size
    mine = None if loaded is None else (loaded.step, loaded.digest)
    dist.all_gather_object(found, mine, group=loop.env.host_group)
    if any(other != found[0] for other in found):
        raise CheckpointError(f"the ranks loaded different checkpoints: {found}; do all see the same run folder?")


def _check_changes(loop: Loop, loaded: Loaded, notes: list[str]) -> None:
    changed = differences(loaded.config, loop.cfg.to_dict())
    if not changed:
        return
    if loop.cfg.allow_changes:
        notes.append("settings changed since the checkpoint: " + "; ".join(changed))
        return
    raise ConfigError(
        [f"{change} (the checkpoint {loaded.path} was made with the first)" for change in changed]
        + ["allow_changes=false: expected the settings of the checkpoint; allow_changes=true goes on with these"]
    )


def _keep_samples_per_step(loop: Loop, loaded: Loaded, notes: list[str], warnings: list[str]) -> list[str]:
    """Hold the samples per step when the number of ranks changed, by another accumulation. Returns warnings."""
    cfg, progress, old = loop.cfg, loaded.progress, loaded.config
    before, now = int(progress.get("planned_samples", progress["samples_per_step"])), loop.planned_samples
    if before == now:
        return warnings
    per_micro_batch = cfg.batch_size * loop.env.world_size
    same = all(old.get(key) == getattr(cfg, key) for key in ("batch_size", "accumulation"))
    if same and (before % per_micro_batch == 0 or is_elastic(cfg)):
        loop.planned_samples = before
        return _spread(loop, notes)
    problem = (
        f"batch_size={cfg.batch_size}, accumulation={cfg.accumulation}, {loop.env.world_size} rank(s): "
        f"{now} samples per step, the checkpoint has {before}; choose values whose product is {before}, "
        f"or allow_changes=true"
    )
    if not cfg.allow_changes:
        raise ConfigError(problem)
    notes.append(problem)
    return warnings


def _spread(loop: Loop, notes: list[str]) -> list[str]:
    """Choose the accumulation with which these ranks make the planned samples per step, or nearly. Returns warnings."""
    cfg, env, wanted = loop.cfg, loop.env, loop.planned_samples
    loop.feed.accumulation = max(1, round(wanted / (cfg.batch_size * env.world_size)))
    found, ranks = loop.feed.samples_per_step, f"{env.world_size} rank(s)"
    change = f"accumulation={loop.feed.accumulation} instead of {cfg.accumulation}"
    if found != wanted:
        return [
            f"{change}: {found} samples per step on {ranks}, not the {wanted} of the plan, which no accumulation "
            f"gives with batch_size={cfg.batch_size}; the learning rate stays as it is"
        ]
    if loop.feed.accumulation != cfg.accumulation:
        notes.append(f"{change}: keeps {wanted} samples per step on {ranks}")
    return []
