"""Rules for settings: ranges, contradictions, warnings, what a resume may change."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from amp_core.config.errors import ConfigError, suggest
from amp_core.config.lengths import MOST_STEPS, is_length
from amp_core.config.options import choices, read_option
from amp_core.config.parse import group_of, hints_of, parse, show_value
from amp_core.config.schema import ONE_PROCESS, SHARDED, WHOLE_MATRICES, AmpConfig, Config, scale_cap

SCALE_KEYS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "max_scale", "max_scale_per_sample")
SCALE_KEYS += ("min_scale", "dynamic", "hysteresis", "consecutive_hysteresis")
LEAST: dict[int | None, str] = {
    None: "epochs max_minutes data.timeout_minutes layout.timeout_minutes layout.bucket_mb optimizer.lr clip.max_norm "
    "clip.max_value clip.factor amp.init_scale amp.growth_factor amp.backoff_factor amp.max_scale amp.min_scale "
    "amp.max_scale_per_sample optimizer.layer_decay data.mixup data.cutmix data.erasing",
    0: "data.num_workers seed doctor.max_reports optimizer.weight_decay layout.max_restarts debug.inject.rank "
    "perf.profile",
    1: "accumulation batch_size steps samples save_every eval_every log_every eval.samples checkpoint.keep "
    "data.image_size data.num_samples data.length doctor.after_skips doctor.statistics_every schedule.horizon "
    "layout.nproc_per_node debug.inject.step amp.growth_interval amp.max_consecutive_skips "
    "amp.hysteresis data.window data.horizon",
    2: "data.num_classes layout.num_stages layout.shard_size",
}
"""The least value of numbers; None: above 0. All are finite."""
MOST: dict[float, str] = {
    1: "optimizer.layer_decay data.erasing",
    3.4e38: "amp.skip_above optimizer.lr "
    "optimizer.weight_decay amp.init_scale amp.growth_factor amp.max_scale amp.min_scale "
    "amp.max_scale_per_sample clip.max_norm clip.max_value clip.factor",  # fp32 has no more
    MOST_STEPS: "steps schedule.horizon debug.inject.step data.num_classes",
    2**24: "batch_size accumulation data.length data.window data.horizon",
    2**15: "data.image_size",  # one of 3 channels in fp32 has 12 GiB
    2**10: "data.mixup data.cutmix data.num_workers layout.num_stages",
    10**6: "amp.hysteresis max_minutes data.timeout_minutes layout.timeout_minutes layout.bucket_mb layout.shard_size",
}
"""The largest value of numbers: more is a typing error, and would take endless memory or time."""


def _check_ranges(values: Mapping[str, Any]) -> Iterator[str]:
    """Whether numbers, under their full keys, are in their range; null is left to other rules."""
    for least, keys in LEAST.items():
        for key in keys.split():
            value = values.get(key)
            if value is not None and not ((value > 0 if least is None else value >= least) and math.isfinite(value)):
                expected = "a finite number above 0" if least is None else f"at least {least:g}"
                yield f"{key}={value:g}: expected {expected}"
    most_of = {key: most for most, keys in MOST.items() for key in keys.split()}
    for key, value in values.items():
        most = most_of.get(key, 2**63 - 1 if isinstance(value, int) else math.inf)
        if isinstance(value, int | float) and value > most and not math.isinf(value):
            yield f"{key}={value:.4g}: expected at most {'2^63 - 1' if most == 2**63 - 1 else f'{most:,.10g}'}"


def _check_amp(amp: AmpConfig) -> Iterator[str]:
    if not amp.scaling and ("float16" in (amp.dtype, amp.weights)) and amp.update != "nearest":
        yield "amp.scaling=false: float16 gradients underflow without a loss scale; leave it out"
    elif not amp.scaling:
        for key in SCALE_KEYS:
            if (value := getattr(amp, key)) is not None:
                yield (
                    f"amp.{key}={show_value(value)}: has no effect in amp={amp.name}, which does not scale the loss; "
                    f"use amp=fp16 or leave it out"
                )
    else:
        for key in sorted({*SCALE_KEYS} - {"max_scale", "max_scale_per_sample"}):
            if getattr(amp, key) is None:
                yield f"amp.{key}=null: a mode that scales the loss needs a value; leave it out"
        if amp.max_scale is None and amp.max_scale_per_sample is None:
            yield "amp.max_scale=null: without a cap the scale grows to 2^127; expected a number"
        if "float16" not in (amp.dtype, amp.weights):
            yield f"amp.scaling=true: {amp.dtype} has the range of fp32 and needs no loss scale; use amp=fp16"
        if amp.growth_factor is not None and 0 < amp.growth_factor <= 1:
            yield f"amp.growth_factor={amp.growth_factor:g}: expected more than 1; a fixed scale is amp.dynamic=false"
        if amp.backoff_factor is not None and amp.backoff_factor >= 1:
            yield f"amp.backoff_factor={amp.backoff_factor:g}: expected between 0 and 1"
        if amp.min_scale is not None and amp.max_scale is not None and amp.min_scale > amp.max_scale:
            yield f"amp.min_scale={amp.min_scale:g}: expected at most amp.max_scale={amp.max_scale:g}"
        if amp.min_scale is not None and amp.init_scale is not None and 0 < amp.init_scale < amp.min_scale:
            yield f"amp.init_scale={amp.init_scale:g}: expected at least amp.min_scale={amp.min_scale:g}"
        if amp.consecutive_hysteresis and amp.hysteresis == 1:
            yield "amp.consecutive_hysteresis=true: has no effect with amp.hysteresis=1; use amp.hysteresis=2"
        if amp.dynamic is False and amp.hysteresis not in (1, None):
            yield f"amp.hysteresis={amp.hysteresis}: has no effect with amp.dynamic=false, which keeps the scale"
    if amp.skip_above is not None and amp.skip_above <= 1:
        yield f"amp.skip_above={amp.skip_above:g}: expected a factor above 1, such as 10"
    if amp.weights == "float32":
        if amp.update is not None:
            yield f"amp.update={amp.update}: has no effect on fp32 weights; use amp=bf16_pure or amp=o2"
    else:
        if amp.dtype != "float32":
            yield f"amp.dtype={amp.dtype}: amp.weights={amp.weights} compute without autocast; leave it out"
        if amp.update is None:
            yield f"amp.update=null: amp.weights={amp.weights} need master, remainder, stochastic or nearest"
        if amp.update in ("stochastic", "remainder") and amp.weights != "bfloat16":
            yield f"amp.update={amp.update}: is for bfloat16 weights; use amp=bf16_pure"
    if amp.format is not None and amp.dtype != "bfloat16":
        yield f"amp.format={amp.format}: needs autocast to bfloat16; use amp=fp8 instead of amp={amp.name}"
    for key, (is_set, formats) in _OF_FORMATS.items() if amp.format in (None, *_FORMATS) else ():
        value = getattr(amp, key)
        if value not in (None, False) and amp.format not in formats:
            has = f"with amp.format={amp.format}" if amp.format else f"in amp={amp.name}"
            yield f"amp.{key}={show_value(value)}: has no effect {has}; it is for {', '.join(formats)}"
        elif value is None and is_set and amp.format in formats:
            yield f"amp.{key}=null: amp.format={amp.format} needs a value; leave it out"


_FORMATS = ("fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
_OF_FORMATS = {
    "granularity": (True, ("fp8",)),
    "scale_rule": (True, ("mxfp8", "mxfp6", "mxfp4")),
    "stochastic_gradients": (False, _FORMATS),
    "hadamard": (False, ("nvfp4",)),
    "square_weights": (False, ("mxfp8", "mxfp6", "mxfp4", "nvfp4")),
    "keep_bf16": (False, _FORMATS),
}
"""Keys of formats below 16 bits: whether they need a value, and the formats in which they have an effect."""


_OWNERS = {
    "clip.max_norm": ("norm", "a number; use clip=none to switch clipping off"),
    "clip.max_value": ("value", "a number; use clip=none to switch clipping off"),
    "clip.factor": ("adaptive", "a number; use clip=none to switch clipping off"),
    "layout.num_stages": ("model_parallel", "a number of devices, such as 2"),
    "layout.shard_size": ("hsdp", "ranks per replica, such as 8; or use layout=fsdp"),
    "layout.bucket_mb": ("ddp", "a size in MiB, such as 25"),
    **dict.fromkeys(("layout.static_graph", "layout.compress", "layout.shard_optimizer"), ("ddp", None)),
}
"""Keys of a group, the option in which they have an effect, and what they need to be there; None: nothing."""


_THREADS = ("model_parallel", "data_parallel")
"""Layouts that compute in threads of one process."""


def _check_owners(cfg: Config) -> Iterator[str]:
    for path, (owner, needed) in _OWNERS.items():
        group, _, key = path.partition(".")
        value, option = getattr(getattr(cfg, group), key), getattr(cfg, group).name
        is_off = value is None or (value is False and needed is None)
        if value is None and needed and option == owner:
            yield f"{path}=null: {group}={owner} needs {needed}"
        elif not is_off and option not in (owner, None):
            shown = f"{value:g}" if isinstance(value, float) else show_value(value)
            yield f"{path}={shown}: has no effect with {group}={option}; use {group}={owner}"


def _check_layout(cfg: Config) -> Iterator[str]:
    layout = cfg.layout
    if layout.name in _THREADS and cfg.amp.update is not None:
        yield f"layout={layout.name}: 16-bit weights (amp={cfg.amp.name}) need one device per process"
    nodes = layout.nodes
    if nodes is None:
        yield f'layout.nnodes={layout.nnodes}: expected a number such as 2, or "1:2" for between 1 and 2'
    if cfg.perf.compile is not None and layout.name in _THREADS:
        yield (
            f"perf.compile={cfg.perf.compile}: layout={layout.name} computes in threads, which would share compiled "
            f"code; use null, or layout=ddp"
        )
    for key in ("static_graph", "compress") if layout.name == "ddp" and cfg.amp.update is not None else ():
        if value := getattr(layout, key):
            yield (
                f"layout.{key}={show_value(value)}: has no effect with amp={cfg.amp.name}, whose step sums the "
                f"gradients of 16-bit weights itself, without DistributedDataParallel; leave it out"
            )
    if layout.name in SHARDED:
        yield from _check_sharded(cfg)
    elif layout.gather_dtype is not None:
        yield f"layout.gather_dtype={layout.gather_dtype}: has no effect with layout={layout.name}; use layout=fsdp"
    if layout.name in ONE_PROCESS:
        alone = {"nproc_per_node": None, "nnodes": 1, "rdzv_endpoint": None, "rdzv_id": None, "max_restarts": 0}
        for key, default in alone.items():
            value = getattr(layout, key)
            if value != default and not (key == "nproc_per_node" and value == 1):
                yield f"layout.{key}={value}: layout={layout.name} is one process on one machine; use layout=ddp"
    elif nodes is not None and nodes[1] > 1:
        for key in ("rdzv_endpoint", "rdzv_id"):
            if getattr(layout, key) is None:
                yield (
                    f"layout.{key}=null: layout.nnodes={layout.nnodes} needs it, the same on all machines, "
                    f"for instance layout.{key}={'host:29500' if key == 'rdzv_endpoint' else 'my-job'}"
                )
        starts_again = cfg.layout.is_elastic or (layout.max_restarts or 0) > 0
        if starts_again and cfg.run_dir is None and cfg.task == "train" and not cfg.dry_run:
            yield (
                f"run_dir=null: layout.nnodes={layout.nnodes} with layout.max_restarts={layout.max_restarts} may "
                f"resume on another machine; expected a folder that all machines see, such as run_dir=/shared/my-job"
            )


def _check_sharded(cfg: Config) -> Iterator[str]:
    """What needs whole weights on each rank."""
    layout = f"layout={cfg.layout.name}"
    key, amp = f"layout.gather_dtype={cfg.layout.gather_dtype}", cfg.amp
    if cfg.layout.gather_dtype is not None and amp.format is None:
        yield f"{key}: has no effect in amp={amp.name}, which gathers what it computes in; it is for fp8, mxfp8, nvfp4"
    elif cfg.layout.gather_dtype == "float8_e4m3fn" and (amp.format, amp.granularity) != ("fp8", "tensor"):
        yield f"{key}: has one scale per tensor; use amp=fp8 amp.granularity=tensor, or layout.gather_dtype=bfloat16"
    if cfg.perf.channels_last:
        yield f"perf.channels_last=true: {layout} shards weights in their default memory format only"
    if cfg.doctor.statistics_every is not None:
        yield (
            f"doctor.statistics_every={cfg.doctor.statistics_every}: measures unsharded weights; use null with {layout}"
        )
    if "." in cfg.optimizer.name or cfg.optimizer.name in WHOLE_MATRICES:
        why = WHOLE_MATRICES.get(cfg.optimizer.name, "of another package may need whole weights")
        yield f"optimizer.name={cfg.optimizer.name}: {why}; use layout=ddp"


def _check_run(cfg: Config) -> Iterator[str]:
    given = [f"{key}={getattr(cfg, key):g}" for key in ("steps", "epochs", "samples") if getattr(cfg, key) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)}: expected at most one of steps, epochs, samples; leave one"
    if cfg.perf.recast_weights:
        amp, layout, eager = cfg.amp, cfg.layout.name, "needs eager code and cannot be combined with perf"
        why_not = {
            f"{eager}.graph=true": cfg.perf.graph,
            f"{eager}.compile={cfg.perf.compile}": cfg.perf.compile is not None,
            f"amp={amp.name} makes no 16-bit copies of weights; use amp=bf16, or leave it out": amp.dtype == "float32",
            f"layout={layout} gathers weights in 16 bits and keeps no copies; leave it out": layout in SHARDED,
            f"layout={layout} computes in several threads; use layout=single or ddp": layout in _THREADS,
            f"perf={cfg.perf.name} controls what the backward pass keeps; use perf=default": cfg.perf.name != "default",
        }
        yield from [f"perf.recast_weights=true: {reason}" for reason, holds in why_not.items() if holds][:1]
    if cfg.perf.compile is None and (cfg.perf.dynamic or cfg.perf.backend != "inductor"):
        key = "dynamic=true" if cfg.perf.dynamic else f"backend={cfg.perf.backend}"
        yield f"perf.{key}: has no effect with perf.compile=null; use perf=compile"
    for key in ("lr", "params", "weight_decay", "fused", "foreach"):
        if key in (cfg.optimizer.options or ()):
            where = f"use optimizer.{key}" if key in ("lr", "weight_decay", "fused") else "leave it out"
            yield f"optimizer.options.{key}: is set by this project; {where}"
    if cfg.ema.decay is not None and not 0 <= cfg.ema.decay < 1:
        yield f"ema.decay={cfg.ema.decay:g}: expected at least 0 and below 1, or null to switch it off"
    if (cfg.optimizer.name == "AdamW8bit" or "." in (cfg.optimizer.name or "")) and cfg.layout.shard_optimizer:
        yield f"optimizer.name={cfg.optimizer.name}: has no slices for layout.shard_optimizer=true; use one of them"
    if (cfg.optimizer.name or "").startswith("schedulefree.") and cfg.amp.update is not None:
        yield (
            f"optimizer.name={cfg.optimizer.name}: evaluates at an average that 16-bit weights do not follow; use "
            f"amp=bf16 instead of amp={cfg.amp.name}"
        )
    if cfg.optimizer.state_dtype == "bfloat16" and cfg.layout.shard_optimizer:
        yield (
            "optimizer.state_dtype=bfloat16: layout.shard_optimizer=true promises bit-identical steps, "
            "and stochastic rounding depends on a weight's position in memory; use one of them"
        )
    if (inject := cfg.debug.inject) is not None and cfg.layout.name in ONE_PROCESS and (inject.rank or 0) > 0:
        yield f"debug.inject.rank={inject.rank}: layout={cfg.layout.name} has only rank 0"
    if cfg.origin is not None and not Path(cfg.origin).exists():
        yield (
            f"resume={cfg.resume}: there is no such file or folder. {suggest(cfg.resume, ('auto', 'last', 'never'))} "
            f"Or the folder of a run or of a checkpoint"
        )
    if cfg.resume == "last" and cfg.run_dir is not None:
        yield f"resume=last: finds the run folder itself; leave out run_dir={cfg.run_dir}, or use resume=auto"
    has_weights = cfg.model.weights is not None
    reads = cfg.task in ("evaluate", "predict", "export") and not has_weights
    if reads and cfg.resume == "never":
        yield f"task={cfg.task}: needs a checkpoint, but resume=never; use resume=<run folder> or run_dir="
    if reads and not (cfg.run_dir or "").strip() and cfg.resume in ("auto", "last"):
        yield f"task={cfg.task}: needs weights; use run_dir=<run folder>, resume=<checkpoint> or model.weights=<file>"
    elif reads and cfg.run_dir and cfg.resume == "auto" and not Path(cfg.run_dir).exists():
        yield f"run_dir={cfg.run_dir}: there is no such file or folder; expected the folder of a run"
    on, is_table = Path(cfg.predict_on or ""), cfg.data.name == "table"
    if cfg.predict_on is not None and cfg.task != "predict":
        yield f"predict_on={cfg.predict_on}: has no effect with task={cfg.task}; use task=predict"
    elif cfg.predict_on is not None and not (on.is_dir() or (on.is_file() and (is_table or on.suffix == ".jsonl"))):
        what = "table" if is_table else "folder; expected one with images, or prompts.jsonl"
        yield f"predict_on={cfg.predict_on}: there is no such {what}"
    if not reads or cfg.run_dir is None or Path(cfg.run_dir).exists():  # otherwise the settings are not the run's
        yield from _check_export(cfg)


_FILES = ("onnx", "pt2", "safetensors")
"""Formats of one file, which ends so."""


def _check_export(cfg: Config) -> Iterator[str]:
    to, name = cfg.export.to, cfg.model.name
    if cfg.task != "export":
        for key, value in vars(cfg.export).items():
            if value is not None:
                yield f"export.{key}={value}: has no effect with task={cfg.task}; use task=export"
        return
    if to is None:
        yield "export.to=null: task=export needs a format: onnx, pt2, safetensors, hf or peft"
    elif to == "peft" and (cfg.recipe.get("adapter", "none") == "none" or not name.startswith("hf:")):
        yield "export.to=peft: needs adapters (recipe=finetuning) of a network of transformers (model=hf); use hf"
    elif to == "hf" and name != "gpt" and not name.startswith("hf:"):
        yield f"export.to=hf: model.name={name} is no network of transformers; use export.to=safetensors"
    elif to in _FILES and cfg.export.path is not None and not cfg.export.path.endswith(f".{to}"):
        yield f"export.path={cfg.export.path}: expected a name that ends in .{to}"
    elif cfg.export.path is None and cfg.run_dir is None:
        yield "export.path=null: without run_dir= there is no folder to write into; expected a new file or folder"
    elif os.path.lexists(place := place_of(cfg)):
        yield f"export.path={place}: is there already; choose another name"


def place_of(cfg: Config) -> str:
    """What task=export writes."""
    name = f"model.{cfg.export.to}" if cfg.export.to in _FILES else str(cfg.export.to)
    return cfg.export.path or os.path.join(cfg.run_dir or "", "export", name)


def key_of(problem: str) -> str:
    return re.split(r"[=:]", problem, maxsplit=1)[0]


def validate(values: Mapping[str, Any]) -> tuple[Config, list[str], set[str]]:
    """The typed configuration, null where a type does not fit; all problems; top-level keys whose type is wrong."""
    problems: list[str] = []
    cfg = parse(Config, values, "", problems)
    if not isinstance(cfg.recipe, dict) or not isinstance(cfg.recipe.get("name"), str):
        problems.append(f"recipe={show_value(cfg.recipe)}: {suggest(str(cfg.recipe), choices('recipe'))}")
    elif "length" in cfg.recipe and not is_length(cfg.recipe["length"]):
        problems.append(
            f"recipe.length={show_value(cfg.recipe['length'])}: expected a number above 0 and steps, epochs or "
            f"samples, such as '12 epochs'; use steps=, epochs= or samples= for one run"
        )
    # A value of the wrong type is null by now: it was reported, and a rule must not report it again.
    reported = {key_of(problem) for problem in problems}
    broken = {key.split(".")[0] for key in reported}
    found: list[str] = []
    if None not in [getattr(cfg, key) for key, hint in hints_of(Config).items() if group_of(hint)]:
        found += [*_check_amp(cfg.amp), *_check_owners(cfg), *_check_layout(cfg), *_check_run(cfg)]
    told = {key_of(problem) for problem in found}
    found += [problem for problem in _check_ranges(flatten(cfg.to_dict())) if key_of(problem) not in told]
    return cfg, problems + [problem for problem in found if key_of(problem) not in reported], broken


def build(values: Mapping[str, Any]) -> Config:
    """The typed configuration of composed values. Raises ConfigError with every problem that was found."""
    cfg, problems, _ = validate(values)
    if problems:
        raise ConfigError(problems)
    return cfg


def amp_config(mode: str, **fields: Any) -> AmpConfig:
    """A mode of `conf/amp` with some fields replaced, without Hydra. Raises ConfigError with every problem."""
    problems: list[str] = []
    amp = parse(AmpConfig, read_option("amp", mode) | fields, "amp", problems)
    if problems := problems or [*_check_ranges(flatten({"amp": vars(amp)})), *_check_amp(amp)]:
        raise ConfigError(problems)
    return amp


def warnings_of(cfg: Config, given: Iterable[str] = ()) -> list[str]:
    """Settings that are legal and probably not what was meant; `given` are the keys on the command line."""
    given = set(given)
    notes = []
    if cfg.amp.scaling and not cfg.amp.dynamic:
        for key in ("growth_factor", "backoff_factor", "growth_interval"):
            if f"amp.{key}" in given:
                notes.append(f"amp.{key} has no effect with amp.dynamic=false: the scale stays at amp.init_scale")
    if cfg.amp.op_policy == "cuda" and cfg.amp.dtype == "float32":
        notes.append(f"amp.op_policy=cuda has no effect in amp={cfg.amp.name}, which does not autocast")
    if cfg.amp.update is not None and "layout.bucket_mb" in given:
        notes.append(f"layout.bucket_mb has no effect in amp={cfg.amp.name}: the step sums gradients, 32 MiB at a time")
    if cfg.doctor.name == "heal" and (cfg.amp.dtype == "float32" or cfg.amp.update is not None or cfg.amp.format):
        notes.append(f"doctor=heal only reports in amp={cfg.amp.name}: islands need autocast and fp32 weights")
    elif cfg.doctor.name == "heal" and cfg.layout.name in SHARDED:
        notes.append(f"doctor=heal only reports in layout={cfg.layout.name}: weights are gathered in {cfg.amp.dtype}")
    cap = scale_cap(cfg.amp, cfg.batch_size)
    above = cfg.amp.init_scale is not None and cfg.amp.init_scale > cap
    # The capped mode begins at its cap by design; warn only about a value that was typed.
    if cfg.amp.scaling and above and (cfg.amp.max_scale_per_sample is None or "amp.init_scale" in given):
        notes.append(f"amp.init_scale={cfg.amp.init_scale:g} is above the cap; the scale starts at {cap:g}")
    if cfg.amp.update == "nearest":
        lost = {"float16": "1/4096", "bfloat16": "1/512"}[cfg.amp.weights]
        fix = "amp=o2" if cfg.amp.weights == "float16" else "amp.update=stochastic or remainder"
        notes.append(
            f"amp={cfg.amp.name}: {cfg.amp.weights} weights without fp32 copies lose updates below {lost} of a "
            f"weight, and training stalls. For comparison only; use {fix}"
        )
    if cfg.ema.decay is None and "ema.warmup" in given:
        notes.append("ema.warmup has no effect while ema.decay is null")
    if not cfg.log.wandb and given & {"log.wandb_mode", "log.wandb_project"}:
        notes.append("log.wandb_* has no effect without log=wandb")
    return notes


# --- may a run resume with other settings? ----------------------------------------------------------------------------

HERE = {
    "task", "predict_on", "export", "run_dir", "resume", "allow_changes", "dry_run", "device", "layout", "log", "perf",
    "checkpoint", "doctor", "debug", "save_every", "eval_every", "log_every", "max_minutes", "eval.at_start",
    "data.num_workers", "data.timeout_minutes", "data.prepare_on", "data.check",
}  # fmt: skip
"""Settings that belong to a command and its machine. An evaluation or a prediction takes all others from its run."""
MAY_CHANGE = HERE - {"data.prepare_on", "data.check"} | {
    "amp", "eval", "steps", "epochs", "samples", "accumulation", "batch_size", "data.path", "optimizer.fused",
    "model.weights", "model.fresh", "model.rename", "recipe.length", "recipe.eval_offset", "recipe.loss_chunk",
    "recipe.sample_bytes", "recipe.prompt", "recipe.sample_tokens", "recipe.temperature",
}  # fmt: skip
"""Settings that a resumed run may change freely. `accumulation` and `batch_size` are held together by the samples per
step, which the resume checks by itself; `fused` and `loss_chunk` change rounding only."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their full keys, such as `optimizer.lr`."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, but: Iterable[str] = MAY_CHANGE) -> list[str]:
    """`key: old -> new` for every setting that differs, except `but` and what lies below."""
    but = set(but)
    a, b = flatten(old), flatten(new)
    return [
        f"{key}: {show_value(x)} -> {show_value(y)}"
        for key in sorted(a.keys() | b.keys())
        if (x := a.get(key)) != (y := b.get(key))
        and (x == x or y == y)  # a NaN is the same setting as a NaN
        and not any(key == k or key.startswith(f"{k}.") for k in but)
    ]
