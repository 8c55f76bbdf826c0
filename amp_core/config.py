"""The configuration: types, documentation and every rule that can be checked before a device is touched.

Values stand in `conf/*.yaml` and nowhere else; the dataclasses here give each key its type and its meaning. `build`
turns the plain dictionary that Hydra composed into a `Config`, or raises one `ConfigError` that lists every problem.

This module imports neither torch nor hydra, so that `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from amp_core.errors import ConfigError


@dataclass(frozen=True)
class AmpConfig:
    """A mode of mixed precision. The scale policy is null in modes that do not scale the loss."""

    name: str
    """Name of the mode: the option of the group that was chosen."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """What autocast casts to; float32 switches autocast off."""
    weights: Literal["float32", "bfloat16", "float16"]
    """What the network holds its weights in; 16 bits compute without autocast."""
    update: Literal["master", "stochastic", "kahan", "nearest"] | None
    """How a step changes 16-bit weights: fp32 copies, stochastic rounding, a compensation, or plain rounding."""
    float8: bool
    """Multiply in float8 in the linear layers whose sizes allow it."""
    matmul_precision: Literal["highest", "high"]
    """`high` lets CUDA use TF32 units for what stays in fp32."""
    scaling: bool
    """Scale the loss, so that small gradients survive in fp16."""
    init_scale: float | None
    """Loss scale of the first step."""
    growth_factor: float | None
    """Multiplies the scale after `growth_interval` steps without overflow."""
    backoff_factor: float | None
    """Multiplies the scale after an overflow."""
    growth_interval: int | None
    """Steps without overflow before the scale grows."""
    max_scale: float | None
    """The scale never exceeds this."""
    max_scale_per_sample: float | None
    """A second cap: this times the samples of a micro-batch (insightface uses 128)."""
    min_scale: float | None
    """The scale never falls below this."""
    dynamic: bool | None
    """False keeps the scale at `init_scale`; steps that overflow are skipped all the same."""
    max_consecutive_skips: int
    """Stop with exit code 5 after so many skipped steps in a row."""
    op_policy: Literal["device", "cuda"]
    """`cuda`: CPU autocast decides about each operator as it does on CUDA, to meet a GPU's fp16 trouble without one."""
    keep_fp32: list[str]
    """Parts of the model that compute in fp32: module names (globs) or type names."""


@dataclass(frozen=True)
class ClipConfig:
    """Gradient clipping, on unscaled gradients. Keys of the other kinds are null."""

    name: Literal["none", "norm", "value", "adaptive"]
    max_norm: float | None
    """norm: the largest L2 norm over all parameters."""
    max_value: float | None
    """value: the largest absolute value of an element."""
    factor: float | None
    """adaptive: largest ratio of gradient norm to weight norm, per output unit (NFNets use 0.01)."""
    folded: bool | None
    """norm: a fused optimizer divides by norm and loss scale as it reads the gradients: a pass over them less, and one
    rounding. false: gradients are multiplied one by one before the step, as torch's functions do."""


@dataclass(frozen=True)
class LayoutConfig:
    """How the model and the data lie over processes."""

    name: Literal["single", "data_parallel", "ddp", "fsdp", "hsdp", "model_parallel"]
    nproc_per_node: int | None
    """Processes on this machine; null: as many as there are GPUs for, or one on a CPU."""
    num_stages: int | None
    """model_parallel: devices that each process splits the network over, as many consecutive GPUs or all the CPU."""
    shard_size: int | None
    """hsdp: neighbouring ranks that share one copy of the weights; a divisor of all ranks, such as GPUs per machine."""
    static_graph: bool
    """ddp: promise that each window uses the same weights, equally often: DDP then does not search its graph."""
    bucket_mb: float | None
    """ddp: MiB of gradients that are summed over ranks at a time."""
    compress: Literal["bf16"] | None
    """ddp: send gradients in 16 bits, which halves the bytes; they are still added in fp32. null: in fp32."""
    shard_optimizer: bool
    """ddp: each rank holds the optimizer's state of a part of the weights, and steps that part (ZeRO, stage 1)."""
    nnodes: int | str
    """Machines: a number, or "least:most" for elastic runs."""
    max_restarts: int
    """How often dead workers are brought back from the last checkpoint."""
    rdzv_endpoint: str | None
    """host:port at which several machines meet; null on one machine."""
    rdzv_id: str | None
    """Name of the job, the same on all machines; needed on more than one."""
    timeout_minutes: float
    """A collective that waits longer than this fails."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str
    """One of our own, or for classification any such model of `torchvision.models`."""
    options: dict[str, Any]
    """Keyword arguments of the model's constructor, such as `dropout`."""


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    name: str
    """The data set; which of the keys below it takes stands in `amp_core/checks.py`."""
    path: str | None
    """File or folder of the data, for data sets that are not shipped with a package."""
    eval_path: str | None
    """File or folder of other data to evaluate on; null: a part of `path` that is not trained on."""
    num_workers: int
    """Loader processes per rank; 0 loads in the training process."""
    image_size: int | None
    """Height and width of the images, in pixels; null: the data set's own."""
    augment: bool
    """Random augmentation of training images, keyed on (seed, sample index, pass)."""
    prepare_on: Literal["loader", "device"]
    """Where training images are decoded, augmented and normalised: by the loader on CPU cores, or on the device. There
    decoding JPEG waits once per batch."""
    num_samples: int | None
    """Number of training samples: of synthetic data, or at most so many of a large data set."""
    num_classes: int | None
    """synthetic: number of classes."""
    length: int | None
    """text: tokens per sample."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: str
    """Any class of `torch.optim` that takes dense gradients and no closure."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Not applied to norms and biases."""
    fused: bool | None
    """null: fused where torch has it; a step then never waits for the device."""
    state_dtype: Literal["float32", "bfloat16"]
    """What Adam and AdamW hold their moments in between steps; bfloat16 is rounded by chance, and halves them."""
    options: dict[str, Any]
    """Further keyword arguments of the class, such as `momentum` or `betas`."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate, as a function of the number of taken steps."""

    name: str
    """constant, warmup_cosine, warmup_linear, or any class of `torch.optim.lr_scheduler` that needs no metric."""
    horizon: int | None
    """Length in steps; null: the length of the run at its start, kept on resume."""
    options: dict[str, Any]
    """Keyword arguments, such as `warmup` (a fraction of the horizon) or `gamma`."""


@dataclass(frozen=True)
class EmaConfig:
    """Averaged weights."""

    decay: float | None
    """Weight of the old average per taken step; null: off."""
    warmup: bool
    """Begin with a smaller decay, (1 + t) / (10 + t) after t taken steps."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str
    progress: bool
    """A progress bar on a terminal, plain lines in a file."""
    tensorboard: bool
    wandb: bool
    wandb_project: str
    wandb_mode: Literal["auto", "online", "offline"]
    """auto: online when an account is configured, else offline."""


@dataclass(frozen=True)
class PerfConfig:
    """What changes speed or memory and nothing else."""

    name: str
    channels_last: bool
    """Keep images and convolutions in NHWC memory order."""
    prefetch: bool
    """Copy the next window to the device while this one is computed."""
    cudnn_benchmark: bool
    """On a GPU: cuDNN times its algorithms for each shape and uses the fastest; off with deterministic=true."""
    checkpoint_activations: bool
    """Keep the inputs of blocks alone for the backward pass, and compute each block once more there: less memory."""
    recast_weights: bool
    """Cast weights once more in the backward pass instead of keeping 16-bit copies: 2 bytes per weight less memory."""
    compile: Literal["blocks", "network"] | None
    """torch.compile for each kind of block (the whole network if it has none), or for the network as one."""
    backend: str
    """Of torch.compile: inductor; aot_eager and eager only trace, for looking into what goes wrong."""
    dynamic: bool
    """With compile: training for any shapes; false compiles for each shape that occurs."""
    graph: bool
    """Record a whole step as one CUDA graph and play it again, where nothing in it depends on the host."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are stored."""

    name: Literal["single", "sharded"]
    """single: one state.pt; sharded: each rank writes what it has, for models that do not fit one host."""
    keep: int
    """How many of the newest are kept, besides the best one."""
    background: bool
    """Training goes on while a checkpoint is written; needs host memory for a copy of the state."""


@dataclass(frozen=True)
class DoctorConfig:
    """What happens when steps are skipped that should not be."""

    name: Literal["off", "watch", "heal"]
    """watch: find the operation that breaks the window and report it; heal: mend it with fp32 islands, too."""
    after_skips: int
    """So many skipped steps in a row call the doctor in modes that scale the loss; without scaling one is enough."""
    max_reports: int
    """The doctor is called so many times in a run at most: each time costs some steps of time."""
    statistics_every: int | None
    """Steps between samples of the ranges of all layers, in doctor/statistics.jsonl; null: none."""


@dataclass(frozen=True)
class InjectConfig:
    """A fault put into one step on purpose, for rehearsals and tests."""

    where: Literal["batch", "activation", "gradient", "drop"]
    """The input, the first layer's output, a gradient; `drop` takes the window and does nothing with it."""
    step: int
    """The step, counted from 1 as in metrics.jsonl."""
    rank: int
    """The rank on which it happens; `drop` happens on all."""
    value: float
    """What is put there: inf, -inf, nan or a number."""


@dataclass(frozen=True)
class DebugConfig:
    inject: InjectConfig | None


@dataclass(frozen=True)
class Config:
    """A whole run."""

    recipe: dict[str, Any]
    """The recipe's name and its own knobs; each recipe documents and checks its own."""
    amp: AmpConfig
    accumulation: int
    """Micro-batches per optimizer step, per rank."""
    clip: ClipConfig
    layout: LayoutConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    steps: int | None
    """Length of the run in steps (windows, taken or skipped)."""
    epochs: float | None
    """Length of the run in passes over the training data."""
    samples: int | None
    """Length of the run in training samples."""
    max_minutes: float | None
    """Time limit: a checkpoint is written and the run ends with exit code 75."""
    batch_size: int
    """Samples per micro-batch and rank."""
    device: Literal["auto", "cuda", "cpu"]
    seed: int
    deterministic: bool
    """Only algorithms that give the same bits each time; slower on a GPU."""
    save_every: int
    """Steps between checkpoints; one is always written at the end."""
    eval_every: int
    """Steps between evaluations; one is always made at the end."""
    log_every: int
    """Steps between lines of metrics."""
    run_dir: str | None
    """Folder of the run; null: outputs/<recipe>/<date_time>. A folder that holds a run is continued."""
    resume: str
    """auto, last, never, or the folder or checkpoint of another run to start from."""
    allow_changes: bool
    """Permit a resume with settings that differ from those of the checkpoint."""
    task: Literal["train", "evaluate"]
    log: LogConfig
    perf: PerfConfig
    checkpoint: CheckpointConfig
    doctor: DoctorConfig
    debug: DebugConfig
    dry_run: bool
    """Say what would run, and stop."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return dataclasses.asdict(self)


# --- finding the values -----------------------------------------------------------------------------------------------


def conf_dir() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml was found neither in {package.parent} nor in {package}; reinstall")


def choices(group: str) -> list[str]:
    """The options of a config group, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def read_option(group: str, option: str) -> dict[str, Any]:
    """The values of one option of a group, as plain data, without Hydra.

    Raises:
        ConfigError: there is no such option.
    """
    from omegaconf import OmegaConf

    if option not in choices(group):
        raise ConfigError(f"{group}={option}: there is no such option. {nearest(option, choices(group))}")
    return OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{option}.yaml"))  # type: ignore[return-value]


def parse_yaml(text: str) -> Any:
    """Plain data of YAML text; nothing is resolved, nothing executed. A damaged text raises the parser's own kinds."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


def nearest(word: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid choice first, then all of them (the first 12)."""
    valid = list(valid)
    word = {"gpu": "cuda", "on": "", "true": "", "yes": ""}.get(str(word).lower(), word)  # the nearest would be far off
    close = difflib.get_close_matches(str(word).lower(), [v.lower() for v in valid], n=1, cutoff=0.4)
    hint = f"Did you mean {next(v for v in valid if v.lower() == close[0])}? " if close else ""
    shown = ", ".join(valid[:12]) + (", ..." if len(valid) > 12 else "")
    return f"{hint}Valid: {shown}." if valid else hint


# --- types ------------------------------------------------------------------------------------------------------------


def describe(kind: Any) -> str:
    """What a type means to somebody who types a value."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(k) for k in get_args(kind))
    if origin is list:
        return 'a list of text, in quotes: \'key=["a","b"]\''
    if origin is dict or kind is dict or dataclasses.is_dataclass(kind):
        return "a group of keys"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, str(kind))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return type(value) is str and value in get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) for k in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return _is_int(value)
    return isinstance(value, kind)


def structure(kind: Any, values: Any, key: str, problems: list[str]) -> Any:
    """`values` as the dataclass `kind`; what does not fit is added to `problems` and left out."""
    if not isinstance(values, Mapping):
        names = " or ".join(f"{key}.{name}=..." for name in list(get_type_hints(kind))[:3])
        how = f"choose an option with {key}=<option>" if choices(key) else f"set {names}"
        problems.append(f"{key}={_shown(values)}: expected a group of keys; {how}")
        return None
    fields = get_type_hints(kind)
    dot = f"{key}." if key else ""
    for name in values:
        if name not in fields:
            problems.append(f"{dot}{name}: there is no such key. {nearest(name, [dot + f for f in fields])}")
    taken = {}
    for name, expected in fields.items():
        if name not in values:
            problems.append(f"{dot}{name}: the key is missing; expected {describe(expected)}")
            taken[name] = None
            continue
        value = values[name]
        options = [k for k in (expected, *get_args(expected)) if dataclasses.is_dataclass(k)]
        if options and not (value is None and type(None) in get_args(expected)):
            taken[name] = structure(options[0], value, f"{dot}{name}", problems)
        elif _is_int(value) and expected in (str, str | None):
            taken[name] = str(value)  # YAML reads run_dir=7 or rdzv_id=42 as numbers; text is meant
        elif _fits(value, expected):
            wants_float = expected is float or (float in get_args(expected) and int not in get_args(expected))
            taken[name] = float(value) if wants_float and value is not None else value
        else:
            literal = [a for k in (expected, *get_args(expected)) if get_origin(k) is Literal for a in get_args(k)]
            hint = " " + nearest(_shown(value), literal) if literal else ""
            if isinstance(value, float) and value.is_integer() and _fits(int(value), expected):
                hint = f" Write {dot}{name}={int(value)}."
            if name == "device" and str(value).startswith("cuda:"):
                hint = f" Which GPU says the environment: CUDA_VISIBLE_DEVICES={str(value)[5:]}."
            problems.append(f"{dot}{name}={_shown(value)}: expected {describe(expected)}.{hint}")
            taken[name] = None
    return kind(**taken)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- rules ------------------------------------------------------------------------------------------------------------

SCALE_KEYS = (
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "max_scale",
    "max_scale_per_sample",
    "min_scale",
    "dynamic",
)


def _positive(problems: list[str], values: Mapping[str, Any], *, least: float | None = None) -> None:
    """Each value is finite and above zero, or at least `least`."""
    for key, value in values.items():
        if value is None:
            continue
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            expected = "a finite number above 0" if least is None else f"at least {least:g}"
            problems.append(f"{key}={value:g}: expected {expected}")


def _check_amp(amp: AmpConfig, problems: list[str]) -> None:
    policy = {f"amp.{key}": getattr(amp, key) for key in SCALE_KEYS}
    if not amp.scaling:
        for key, value in policy.items():
            if value is not None:
                problems.append(
                    f"{key}={_shown(value)}: has no effect in amp={amp.name}, which does not scale the loss; "
                    f"use amp=fp16 or leave it out"
                )
        if amp.dtype == "float16":
            problems.append("amp.scaling=false: float16 gradients underflow without a loss scale; use amp=fp16")
        elif amp.weights == "float16" and amp.update == "master":
            problems.append("amp.scaling=false: float16 gradients underflow without a loss scale; use amp=o2")
    else:
        for key in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "dynamic"):
            if getattr(amp, key) is None:
                problems.append(f"amp.{key}=null: a mode that scales the loss needs a value; leave it out")
        if amp.max_scale is None and amp.max_scale_per_sample is None:
            problems.append("amp.max_scale=null: without a cap the scale grows to 2^127; expected a number")
        if "float16" not in (amp.dtype, amp.weights):
            problems.append(
                f"amp.scaling=true: {amp.dtype} has the range of fp32 and needs no loss scale; use amp=fp16"
            )
        _positive(problems, {k: v for k, v in policy.items() if k not in ("amp.dynamic", "amp.growth_interval")})
        _positive(problems, {"amp.growth_interval": amp.growth_interval}, least=1)
        if amp.growth_factor is not None and 0 < amp.growth_factor <= 1:
            problems.append(
                f"amp.growth_factor={amp.growth_factor:g}: expected more than 1; a fixed scale is dynamic=false"
            )
        if amp.backoff_factor is not None and amp.backoff_factor >= 1:
            problems.append(f"amp.backoff_factor={amp.backoff_factor:g}: expected between 0 and 1")
        if amp.min_scale is not None and amp.max_scale is not None and amp.min_scale > amp.max_scale:
            problems.append(f"amp.min_scale={amp.min_scale:g}: expected at most amp.max_scale={amp.max_scale:g}")
        if amp.min_scale is not None and amp.init_scale is not None and 0 < amp.init_scale < amp.min_scale:
            problems.append(f"amp.init_scale={amp.init_scale:g}: expected at least amp.min_scale={amp.min_scale:g}")
    _positive(problems, {"amp.max_consecutive_skips": amp.max_consecutive_skips}, least=1)
    if amp.weights == "float32":
        if amp.update is not None:
            problems.append(f"amp.update={amp.update}: has no effect on fp32 weights; use amp=bf16_pure or amp=o2")
    else:
        if amp.dtype != "float32":
            problems.append(f"amp.dtype={amp.dtype}: amp.weights={amp.weights} compute without autocast; leave it out")
        if amp.update is None:
            problems.append(f"amp.update=null: amp.weights={amp.weights} need master, nearest, kahan or stochastic")
        if amp.update in ("stochastic", "kahan") and amp.weights != "bfloat16":
            problems.append(f"amp.update={amp.update}: is for bfloat16 weights; use amp=bf16_pure")
    if amp.float8 and amp.dtype != "bfloat16":
        problems.append(f"amp.float8=true: stands beside autocast to bfloat16; use amp=fp8 instead of amp={amp.name}")


def _check_clip(clip: ClipConfig, problems: list[str]) -> None:
    threshold = {"none": None, "norm": "max_norm", "value": "max_value", "adaptive": "factor"}[clip.name]
    for key in ("max_norm", "max_value", "factor"):
        value = getattr(clip, key)
        if key == threshold:
            if value is None:
                problems.append(
                    f"clip.{key}=null: clip={clip.name} needs a number; use clip=none to switch clipping off"
                )
            _positive(problems, {f"clip.{key}": value})
        elif value is not None:
            owner = {"max_norm": "norm", "max_value": "value", "factor": "adaptive"}[key]
            problems.append(f"clip.{key}={value:g}: has no effect with clip={clip.name}; use clip={owner}")
    if clip.name == "norm" and clip.folded is None:
        problems.append("clip.folded=null: clip=norm needs true or false")
    elif clip.name != "norm" and clip.folded is not None:
        problems.append(f"clip.folded={str(clip.folded).lower()}: has no effect with clip={clip.name}; use clip=norm")


ONE_PROCESS = ("single", "data_parallel")
"""Layouts of one process, whatever the machine has."""
SHARDED = ("fsdp", "hsdp")
"""Layouts in which a rank holds a part of each weight."""
WHOLE_MATRICES = {"Adafactor": "factors the moments of whole matrices", "Muon": "orthogonalises whole matrices"}
"""Optimizers that do not compute element by element."""


def node_range(nnodes: int | str) -> tuple[int, int] | None:
    """(least, most) machines of `layout.nnodes`, or None when it cannot be read."""
    parts = str(nnodes).split(":")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() for p in parts):
        return None
    low, high = int(parts[0]), int(parts[-1])
    return (low, high) if 1 <= low <= high else None


def is_elastic(cfg: Config) -> bool:
    """Whether machines may come and go while it runs."""
    nodes = node_range(cfg.layout.nnodes)
    return nodes is not None and nodes[0] < nodes[1]


def _check_layout(cfg: Config, problems: list[str]) -> None:
    layout = cfg.layout
    if layout.name in ("model_parallel", "data_parallel") and cfg.amp is not None and cfg.amp.update is not None:
        problems.append(f"layout={layout.name}: 16-bit weights (amp={cfg.amp.name}) lie on one device per process")
    nodes = node_range(layout.nnodes)
    _positive(problems, {"layout.nproc_per_node": layout.nproc_per_node}, least=1)
    _positive(problems, {"layout.max_restarts": layout.max_restarts}, least=0)
    _positive(problems, {"layout.timeout_minutes": layout.timeout_minutes})
    if nodes is None:
        problems.append(f'layout.nnodes={layout.nnodes}: expected a number such as 2, or "1:2" for between 1 and 2')
    _positive(problems, {"layout.num_stages": layout.num_stages}, least=2)
    if layout.name == "model_parallel" and layout.num_stages is None:
        problems.append("layout.num_stages=null: layout=model_parallel needs a number of devices, such as 2")
    elif layout.name != "model_parallel" and layout.num_stages is not None:
        problems.append(
            f"layout.num_stages={layout.num_stages}: has no effect with layout={layout.name}; use layout=model_parallel"
        )
    _positive(problems, {"layout.shard_size": layout.shard_size}, least=2)
    if layout.name == "hsdp" and layout.shard_size is None:
        problems.append("layout.shard_size=null: layout=hsdp needs the ranks of a copy, such as 8; or use layout=fsdp")
    elif layout.name != "hsdp" and layout.shard_size is not None:
        problems.append(
            f"layout.shard_size={layout.shard_size}: has no effect with layout={layout.name}; use layout=hsdp"
        )
    if cfg.perf is not None and cfg.perf.compile is not None and layout.name in ("model_parallel", "data_parallel"):
        problems.append(
            f"perf.compile={cfg.perf.compile}: layout={layout.name} computes in threads, which share what was compiled "
            f"for one of them; use null, or layout=ddp"
        )
    _check_ddp(cfg, problems)
    if layout.name in SHARDED:
        _check_sharded(cfg, problems)
    if layout.name in ONE_PROCESS:
        for key, default in (("nproc_per_node", None), ("nnodes", 1), ("rdzv_endpoint", None), ("rdzv_id", None)):
            value = getattr(layout, key)
            if value != default and not (key == "nproc_per_node" and value == 1):
                problems.append(
                    f"layout.{key}={value}: layout={layout.name} is one process on one machine; use layout=ddp"
                )
        if (layout.max_restarts or 0) > 0:
            problems.append(
                f"layout.max_restarts={layout.max_restarts}: has no effect with layout={layout.name}; use layout=ddp"
            )
    elif nodes is not None and nodes[1] > 1:
        for key in ("rdzv_endpoint", "rdzv_id"):
            if getattr(layout, key) is None:
                problems.append(
                    f"layout.{key}=null: layout.nnodes={layout.nnodes} needs it, the same on all machines, "
                    f"for instance layout.{key}={'host:29500' if key == 'rdzv_endpoint' else 'my-job'}"
                )
        starts_again = is_elastic(cfg) or (layout.max_restarts or 0) > 0
        if starts_again and cfg.run_dir is None and cfg.task == "train" and not cfg.dry_run:
            problems.append(
                f"run_dir=null: layout.nnodes={layout.nnodes} with layout.max_restarts={layout.max_restarts} may go on "
                f"from another machine; expected a folder that all machines see, for instance run_dir=/shared/my-job"
            )


def _check_ddp(cfg: Config, problems: list[str]) -> None:
    layout = cfg.layout
    _positive(problems, {"layout.bucket_mb": layout.bucket_mb})
    given = {
        "static_graph=true": layout.static_graph,
        f"bucket_mb={_shown(layout.bucket_mb)}": layout.bucket_mb is not None,
        f"compress={_shown(layout.compress)}": layout.compress is not None,
        "shard_optimizer=true": layout.shard_optimizer,
    }
    if layout.name != "ddp":
        for key in (key for key, is_given in given.items() if is_given):
            problems.append(f"layout.{key}: has no effect with layout={layout.name}; use layout=ddp")
        return
    if layout.bucket_mb is None:
        problems.append("layout.bucket_mb=null: layout=ddp needs a size in MiB, such as 25")
    if cfg.amp is not None and cfg.amp.update is not None:
        for key in (key for key, is_given in given.items() if is_given and key.startswith(("static", "compress"))):
            problems.append(
                f"layout.{key}: has no effect with amp={cfg.amp.name}, whose step sums the gradients of 16-bit "
                f"weights itself, without DistributedDataParallel; leave it out"
            )


def _check_sharded(cfg: Config, problems: list[str]) -> None:
    """What needs whole weights on each rank."""
    layout = f"layout={cfg.layout.name}"
    if cfg.amp is not None and (cfg.amp.update is not None or cfg.amp.float8):
        kind = "float8 layers" if cfg.amp.float8 else "16-bit weights"
        problems.append(f"amp={cfg.amp.name}: {kind} are not sharded; use layout=ddp, or amp=bf16 with {layout}")
    if cfg.perf is not None and cfg.perf.channels_last:
        problems.append(f"perf.channels_last=true: {layout} cuts weights along their first dimension only as they are")
    if cfg.doctor is not None and cfg.doctor.statistics_every is not None:
        problems.append(
            f"doctor.statistics_every={cfg.doctor.statistics_every}: measures whole weights; use null with {layout}"
        )
    if cfg.optimizer is not None and cfg.optimizer.name in WHOLE_MATRICES:
        problems.append(f"optimizer.name={cfg.optimizer.name}: {WHOLE_MATRICES[cfg.optimizer.name]}; use layout=ddp")


def _check_run(cfg: Config, problems: list[str]) -> None:
    given = [f"{key}={getattr(cfg, key):g}" for key in ("steps", "epochs", "samples") if getattr(cfg, key) is not None]
    if len(given) > 1:
        problems.append(f"{' and '.join(given)}: expected at most one of steps, epochs, samples; leave one")
    cadences = ("accumulation", "batch_size", "steps", "samples", "save_every", "eval_every", "log_every")
    _positive(problems, {key: getattr(cfg, key) for key in cadences}, least=1)
    _positive(problems, {"epochs": cfg.epochs, "max_minutes": cfg.max_minutes})
    _positive(problems, {"data.num_workers": cfg.data.num_workers, "seed": cfg.seed}, least=0)
    _positive(problems, {"checkpoint.keep": cfg.checkpoint.keep, "data.image_size": cfg.data.image_size}, least=1)
    _positive(problems, {"data.num_samples": cfg.data.num_samples, "data.length": cfg.data.length}, least=1)
    _positive(problems, {"data.num_classes": cfg.data.num_classes}, least=2)
    doctor = cfg.doctor
    _positive(problems, {"doctor.after_skips": doctor.after_skips}, least=1)
    _positive(problems, {"doctor.max_reports": doctor.max_reports}, least=0)
    _positive(problems, {"doctor.statistics_every": doctor.statistics_every}, least=1)
    if cfg.seed is not None and cfg.seed >= 2**63:
        problems.append(f"seed={cfg.seed}: expected less than 2^63")
    if cfg.perf is not None and cfg.perf.recast_weights and (cfg.perf.compile is not None or cfg.perf.graph):
        other = "graph=true" if cfg.perf.graph else f"compile={cfg.perf.compile}"
        problems.append(f"perf.recast_weights=true: looks at what eager code saves, and does not go with perf.{other}")
    if cfg.perf is not None and cfg.perf.compile is None and (cfg.perf.dynamic or cfg.perf.backend != "inductor"):
        key = "dynamic=true" if cfg.perf.dynamic else f"backend={cfg.perf.backend}"
        problems.append(f"perf.{key}: has no effect with perf.compile=null; use perf=compile")
    _positive(problems, {"optimizer.lr": cfg.optimizer.lr})
    _positive(problems, {"optimizer.weight_decay": cfg.optimizer.weight_decay}, least=0)
    _positive(problems, {"schedule.horizon": cfg.schedule.horizon}, least=1)
    for key in ("lr", "params", "weight_decay", "fused", "foreach"):
        if key in (cfg.optimizer.options or ()):
            where = f"use optimizer.{key}" if key in ("lr", "weight_decay", "fused") else "leave it out"
            problems.append(f"optimizer.options.{key}: is set by this project; {where}")
    if cfg.ema.decay is not None and not 0 <= cfg.ema.decay < 1:
        problems.append(f"ema.decay={cfg.ema.decay:g}: expected at least 0 and below 1, or null to switch it off")
    if cfg.optimizer.state_dtype == "bfloat16" and cfg.layout.shard_optimizer:
        problems.append(
            "optimizer.state_dtype=bfloat16: layout.shard_optimizer=true keeps every bit of a whole step, and what is "
            "rounded by chance is so by its place in memory; use one of them"
        )
    if cfg.perf is not None and cfg.amp is not None and cfg.perf.recast_weights:
        problems += _without_copies(cfg)
    inject = cfg.debug.inject
    if inject is not None:
        _positive(problems, {"debug.inject.step": inject.step}, least=1)
        _positive(problems, {"debug.inject.rank": inject.rank}, least=0)
        if cfg.layout.name in ONE_PROCESS and inject.rank > 0:
            problems.append(f"debug.inject.rank={inject.rank}: layout={cfg.layout.name} has only rank 0")
    if cfg.resume not in ("auto", "last", "never", None) and not Path(cfg.resume).exists():
        problems.append(
            f"resume={cfg.resume}: there is no such file or folder; expected auto, last, never, "
            f"or the folder of a run or of a checkpoint"
        )
    if cfg.resume == "last" and cfg.run_dir is not None:
        problems.append(
            f"resume=last: finds the run folder itself; leave out run_dir={cfg.run_dir}, or use resume=auto"
        )
    if cfg.task == "evaluate" and cfg.resume == "never":
        problems.append("task=evaluate: needs a checkpoint, but resume=never; use resume=<run folder> or run_dir=")
    if cfg.task == "evaluate" and cfg.run_dir is None and cfg.resume in ("auto", "last"):
        problems.append("task=evaluate: needs a checkpoint; use run_dir=<run folder> or resume=<checkpoint>")
    if cfg.run_dir is not None and not cfg.run_dir.strip():
        problems.append("run_dir='': expected a folder")


def _without_copies(cfg: Config) -> list[str]:
    """Why there are no 16-bit copies of weights that could be made once more."""
    if cfg.amp.dtype == "float32":
        reason = f"amp={cfg.amp.name} makes no 16-bit copies of weights; use amp=bf16, or leave it out"
    elif cfg.layout.name in SHARDED:
        reason = f"layout={cfg.layout.name} gathers weights in 16 bits and keeps no copies; leave it out"
    elif cfg.layout.name in ("model_parallel", "data_parallel"):
        reason = f"layout={cfg.layout.name} computes in threads of its own; use layout=single or ddp"
    elif cfg.perf.name != "default":
        reason = f"perf={cfg.perf.name} decides itself what the backward pass keeps; use perf=default"
    else:
        return []
    return [f"perf.recast_weights=true: {reason}"]


def _check_inject_value(values: Any) -> Any:
    """`value: inf` in YAML is text; the float is meant."""
    inject = values.get("debug", {}).get("inject") if isinstance(values.get("debug"), Mapping) else None
    if isinstance(inject, dict):
        inject.setdefault("rank", 0)
        inject.setdefault("value", "inf")
        if isinstance(inject["value"], str) and inject["value"].lower() in ("inf", "-inf", "nan", "+inf"):
            inject["value"] = float(inject["value"])
    return values


def _is_length(value: object) -> bool:
    parts = str(value).split()
    if len(parts) != 2 or parts[1] not in ("step", "steps", "epoch", "epochs", "sample", "samples"):
        return False
    whole = parts[1].startswith("step")
    is_number = re.fullmatch(r"[0-9]+" if whole else r"[0-9]+(\.[0-9]*)?(e[0-9]+)?", parts[0]) is not None
    return is_number and 0 < float(parts[0]) < math.inf


def _key(problem: str) -> str:
    return re.split(r"[=:]", problem, maxsplit=1)[0]


def examine(values: Mapping[str, Any]) -> tuple[Config, list[str], set[str]]:
    """The typed configuration, every problem with it, and the top-level keys that do not have their type.

    Where a value does not fit its type the configuration holds null.
    """
    problems: list[str] = []
    cfg = structure(Config, _check_inject_value(dict(values)), "", problems)
    if not isinstance(cfg.recipe, dict) or not isinstance(cfg.recipe.get("name"), str):
        problems.append(f"recipe={_shown(cfg.recipe)}: {nearest(str(cfg.recipe), choices('recipe'))}")
    elif "length" in cfg.recipe and not _is_length(cfg.recipe["length"]):
        problems.append(
            f"recipe.length={_shown(cfg.recipe['length'])}: expected a number above 0 and steps, epochs or samples, "
            f"such as '12 epochs'; use steps=, epochs= or samples= for one run"
        )
    # A value of the wrong type is null by now: it was reported, and a rule must not report it again.
    reported = {_key(problem) for problem in problems}
    broken = {key.split(".")[0] for key in reported}
    found: list[str] = []
    if cfg.amp is not None:
        _check_amp(cfg.amp, found)
    if cfg.clip is not None and cfg.clip.name is not None:
        _check_clip(cfg.clip, found)
    if None not in (cfg.layout, cfg.data, cfg.optimizer, cfg.schedule, cfg.ema, cfg.checkpoint, cfg.debug):
        _check_layout(cfg, found)
        _check_run(cfg, found)
    return cfg, problems + [problem for problem in found if _key(problem) not in reported], broken


def build(values: Mapping[str, Any]) -> Config:
    """The typed configuration.

    Args:
        values: the composed configuration as plain dictionaries.

    Raises:
        ConfigError: with every problem that was found: unknown and missing keys, wrong types, values out of range,
            pairs that contradict each other.
    """
    cfg, problems, _ = examine(values)
    if problems:
        raise ConfigError(problems)
    return cfg


def amp_config(mode: str, **fields: Any) -> AmpConfig:
    """A mode of `conf/amp` with some of its fields replaced, without Hydra.

    Raises:
        ConfigError: with every problem that was found.
    """
    problems: list[str] = []
    amp = structure(AmpConfig, read_option("amp", mode) | fields, "amp", problems)
    if not problems:
        _check_amp(amp, problems)
    if problems:
        raise ConfigError(problems)
    return amp


def warnings_of(cfg: Config, given: Iterable[str] = ()) -> list[str]:
    """Settings that are legal and probably not what was meant.

    Args:
        cfg: a sound configuration.
        given: the keys that the user set on the command line.
    """
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
    if cfg.doctor.name == "heal" and (cfg.amp.dtype == "float32" or cfg.amp.update is not None or cfg.amp.float8):
        notes.append(f"doctor=heal only reports in amp={cfg.amp.name}: islands need autocast and fp32 weights")
    elif cfg.doctor.name == "heal" and cfg.layout.name in SHARDED:
        notes.append(f"doctor=heal only reports in layout={cfg.layout.name}: weights are gathered in {cfg.amp.dtype}")
    cap = scale_cap(cfg.amp, cfg.batch_size)
    above = cfg.amp.init_scale is not None and cfg.amp.init_scale > cap
    # The capped mode begins at its cap by design; only a value that somebody typed deserves a word.
    if cfg.amp.scaling and above and (cfg.amp.max_scale_per_sample is None or "amp.init_scale" in given):
        notes.append(f"amp.init_scale={cfg.amp.init_scale:g} is above the cap {cap:g} and begins there")
    if cfg.amp.update == "nearest":
        lost = {"float16": "1/4096", "bfloat16": "1/512"}[cfg.amp.weights]
        cure = "amp=o2" if cfg.amp.weights == "float16" else "amp.update=stochastic or kahan"
        notes.append(
            f"amp={cfg.amp.name}: {cfg.amp.weights} weights without fp32 copies; a step that changes a weight by less "
            f"than {lost} of it changes nothing, and training stalls. For comparison only; use {cure}"
        )
    if cfg.ema.decay is None and "ema.warmup" in given:
        notes.append("ema.warmup has no effect while ema.decay is null")
    if not cfg.log.wandb and given & {"log.wandb_mode", "log.wandb_project"}:
        notes.append("log.wandb_* has no effect without log=wandb")
    return notes


def scale_cap(amp: AmpConfig, batch_size: int | None) -> float:
    """The largest loss scale in force: `max_scale`, and `max_scale_per_sample` times the samples of a micro-batch."""
    caps = [] if amp.max_scale is None else [amp.max_scale]
    if amp.max_scale_per_sample is not None and batch_size is not None:
        caps.append(amp.max_scale_per_sample * batch_size)
    return min(caps, default=float(2**24))


# --- how long ---------------------------------------------------------------------------------------------------------


def num_steps(
    cfg: Config, *, num_samples: int, samples_per_step: int, steps_done: int = 0, samples_done: int = 0
) -> int:
    """The step at which the run ends, from steps, epochs, samples or the recipe's own length.

    Args:
        num_samples: samples in the training set.
        samples_per_step: over all micro-batches and ranks.
        steps_done: where the run stands; earlier steps may have had another number of samples.
        samples_done: samples of these steps.
    """
    number, unit = str(cfg.recipe["length"]).split()
    for key in ("steps", "epochs", "samples"):
        if getattr(cfg, key) is not None:
            number, unit = getattr(cfg, key), key
    if unit.startswith("step"):
        return int(number)
    samples = float(number) if unit.startswith("sample") else float(number) * num_samples
    return steps_done + math.ceil((samples - samples_done) / samples_per_step)


# --- may a run go on with other settings? -----------------------------------------------------------------------------

MAY_CHANGE = {
    "log",
    "layout",
    "device",
    "amp",
    "save_every",
    "eval_every",
    "log_every",
    "doctor",
    "perf",
    "checkpoint",
    "steps",
    "epochs",
    "samples",
    "max_minutes",
    "run_dir",
    "resume",
    "allow_changes",
    "task",
    "dry_run",
    "debug",
    "data.num_workers",
    "data.path",
    "accumulation",
    "batch_size",
    "optimizer.fused",
    "recipe.length",
    "recipe.eval_offset",
    "recipe.loss_chunk",
    "recipe.sample_bytes",
    "recipe.prompt",
}
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
        f"{key}: {_shown(a.get(key))} -> {_shown(b.get(key))}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not any(key == k or key.startswith(f"{k}.") for k in but)
    ]
