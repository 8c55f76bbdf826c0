"""The configuration as dataclasses: types and documentation of every key; values stand in conf/."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from amp_core.config.errors import ConfigError


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
    """The data set; which of the keys below it takes stands in `amp_core/config/checks.py`."""
    path: str | None
    """File or folder of the data, for data sets that are not shipped with a package."""
    eval_path: str | None
    """File or folder of other data to evaluate on; null: a part of `path` that is not trained on."""
    num_workers: int
    """Loader processes per rank; 0 loads in the training process."""
    timeout_minutes: float
    """How long a batch of a loader process is waited for; then the run ends with 1 and says where that process is."""
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
    package = Path(__file__).resolve().parents[1]
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
        raise ConfigError(f"{group}={option}: there is no such option. {suggest(option, choices(group))}")
    return OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{option}.yaml"))  # type: ignore[return-value]


def parse_yaml(text: str) -> Any:
    """Plain data of YAML text; nothing is resolved, nothing executed. A damaged text raises the parser's own kinds."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


def suggest(word: str, valid: Iterable[str]) -> str:
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


def parse(kind: Any, values: Any, key: str, problems: list[str]) -> Any:
    """`values` as the dataclass `kind`; what does not fit is added to `problems` and left out."""
    if not isinstance(values, Mapping):
        names = " or ".join(f"{key}.{name}=..." for name in list(get_type_hints(kind))[:3])
        how = f"choose an option with {key}=<option>" if choices(key) else f"set {names}"
        problems.append(f"{key}={show_value(values)}: expected a group of keys; {how}")
        return None
    fields = get_type_hints(kind)
    dot = f"{key}." if key else ""
    for name in values:
        if name not in fields:
            problems.append(f"{dot}{name}: there is no such key. {suggest(name, [dot + f for f in fields])}")
    taken = {}
    for name, expected in fields.items():
        if name not in values:
            problems.append(f"{dot}{name}: the key is missing; expected {describe(expected)}")
            taken[name] = None
            continue
        value = values[name]
        options = [k for k in (expected, *get_args(expected)) if dataclasses.is_dataclass(k)]
        if options and not (value is None and type(None) in get_args(expected)):
            taken[name] = parse(options[0], value, f"{dot}{name}", problems)
        elif _is_int(value) and expected in (str, str | None):
            taken[name] = str(value)  # YAML reads run_dir=7 or rdzv_id=42 as numbers; text is meant
        elif _fits(value, expected):
            wants_float = expected is float or (float in get_args(expected) and int not in get_args(expected))
            taken[name] = float(value) if wants_float and value is not None else value
        else:
            literal = [a for k in (expected, *get_args(expected)) if get_origin(k) is Literal for a in get_args(k)]
            hint = " " + suggest(show_value(value), literal) if literal else ""
            if isinstance(value, float) and value.is_integer() and _fits(int(value), expected):
                hint = f" Write {dot}{name}={int(value)}."
            if name == "device" and str(value).startswith("cuda:"):
                hint = f" Which GPU says the environment: CUDA_VISIBLE_DEVICES={str(value)[5:]}."
            problems.append(f"{dot}{name}={show_value(value)}: expected {describe(expected)}.{hint}")
            taken[name] = None
    return kind(**taken)


def show_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
