"""The configuration as dataclasses: types and documentation of every key. Values are in conf/."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from amp_core.config.errors import ConfigError


@dataclass(frozen=True)
class AmpConfig:
    """A mode of mixed precision. The scale policy is null in modes without a loss scale."""

    name: str
    """Name of the mode: the chosen option of the group."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype of autocast; float32 disables it."""
    weights: Literal["float32", "bfloat16", "float16"]
    """Dtype of the weights; 16-bit weights compute without autocast."""
    update: Literal["master", "stochastic", "kahan", "nearest"] | None
    """How a step updates 16-bit weights: master weights, stochastic rounding, Kahan summation, or rounding to
    nearest."""
    float8: bool
    """Use float8 matmuls in linear layers whose sizes allow it."""
    matmul_precision: Literal["highest", "high"]
    """`high` lets CUDA use TF32 for fp32 matmuls."""
    scaling: bool
    """Scale the loss, so that small gradients do not underflow in fp16."""
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
    """False keeps the scale at `init_scale`; steps that overflow are still skipped."""
    max_consecutive_skips: int
    """Stop with exit code 5 after this many skipped steps in a row."""
    op_policy: Literal["device", "cuda"]
    """`cuda`: CPU autocast uses CUDA's operator lists, to reproduce a GPU's fp16 problems without one."""
    keep_fp32: list[str]
    """Modules that compute in fp32: names (globs) or type names."""


def scale_cap(amp: AmpConfig, batch_size: int | None) -> float:
    """The largest loss scale in force: `max_scale`, and `max_scale_per_sample` times the samples of a micro-batch."""
    caps = [] if amp.max_scale is None else [amp.max_scale]
    if amp.max_scale_per_sample is not None and batch_size is not None:
        caps.append(amp.max_scale_per_sample * batch_size)
    return min(caps, default=float(2**24))


@dataclass(frozen=True)
class ClipConfig:
    """Gradient clipping of unscaled gradients. Keys of the other kinds are null."""

    name: Literal["none", "norm", "value", "adaptive"]
    max_norm: float | None
    """norm: largest global L2 norm."""
    max_value: float | None
    """value: largest absolute value of an element."""
    factor: float | None
    """adaptive: largest ratio of gradient norm to weight norm, per output unit (NFNets use 0.01)."""
    folded: bool | None
    """norm: a fused optimizer applies clipping and loss scale as it reads the gradients: one pass and one rounding
    less. false: gradients are multiplied before the step, as in torch's functions."""


@dataclass(frozen=True)
class LayoutConfig:
    """How model and data are distributed over processes."""

    name: Literal["single", "data_parallel", "ddp", "fsdp", "hsdp", "model_parallel"]
    nproc_per_node: int | None
    """Processes on this machine; null: as many as the GPUs allow, or one on a CPU."""
    num_stages: int | None
    """model_parallel: devices over which each process splits the network: consecutive GPUs, or the CPU for all."""
    shard_size: int | None
    """hsdp: consecutive ranks that shard one replica; a divisor of the number of ranks, such as GPUs per machine."""
    static_graph: bool
    """ddp: promise that each window uses the same weights, equally often; DDP then does not search the graph."""
    bucket_mb: float | None
    """ddp: MiB of gradients per all-reduce."""
    compress: Literal["bf16"] | None
    """ddp: send gradients in 16 bits, half the bytes, and sum them in fp32. null: in fp32."""
    shard_optimizer: bool
    """ddp: shard the optimizer state over ranks; each rank steps its shard (ZeRO stage 1)."""
    nnodes: int | str
    """Machines: a number, or "least:most" for elastic runs."""
    max_restarts: int
    """How often failed workers are restarted from the last checkpoint."""
    rdzv_endpoint: str | None
    """host:port of the rendezvous of several machines; null on one machine."""
    rdzv_id: str | None
    """Id of the job, the same on all machines; required for several."""
    timeout_minutes: float
    """A collective that waits longer than this fails."""


ONE_PROCESS = ("single", "data_parallel")
"""Layouts of one process, whatever the machine has."""
SHARDED = ("fsdp", "hsdp")
"""Layouts in which a rank holds a part of each weight."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str
    """One of our own, or for classification any classification model of `torchvision.models`."""
    options: dict[str, Any]
    """Keyword arguments of the model's constructor, such as `dropout`."""
    weights: str | None
    """Pretrained weights to start from: a .safetensors or torch file of a state dict, or the folder of a run."""
    fresh: list[str] | None
    """With weights: modules or tensors, by name or glob, that keep their initial values, such as a new head."""


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    name: str
    """Name of the data set; `amp_core/config/checks.py` lists the keys that each one takes."""
    path: str | None
    """File or folder of the data, for data sets that do not ship with a package."""
    eval_path: str | None
    """File or folder of evaluation data; null: a held-out part of `path`."""
    num_workers: int
    """Loader processes per rank; 0 loads in the training process."""
    timeout_minutes: float
    """Longest wait for a batch of a loader process; then the run ends with 1 and shows the stack of that process."""
    image_size: int | None
    """Height and width of the images, in pixels; null: the data set's own."""
    augment: bool
    """Random augmentation of training images, seeded by (seed, sample index, epoch)."""
    prepare_on: Literal["loader", "device"]
    """Where training images are decoded, augmented and normalised: by the loader on CPU cores, or on the device, where
    JPEG decoding syncs once per batch."""
    num_samples: int | None
    """Number of training samples: of synthetic data, or at most this many of a large data set."""
    num_classes: int | None
    """synthetic: number of classes."""
    length: int | None
    """text: tokens per sample."""
    exclude: str | None
    """Image files: a list of samples to leave out, a name below `data.path` on each line, as `data.check` writes it. A
    run resumes with the samples that it was begun with."""
    check: bool
    """Instead of a run: read every sample once, by `data.num_workers` processes. Names those that cannot be read and
    writes them to bad_samples.txt for `data.exclude`. Exit codes: 0 all can be read, 2 some cannot."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: str
    """Any class of `torch.optim` for dense gradients without a closure, or `AdamW8bit` of torchao."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Not applied to norms and biases."""
    fused: bool | None
    """null: fused if torch supports it; a fused step has no host-device sync."""
    state_dtype: Literal["float32", "bfloat16"]
    """Dtype of Adam's and AdamW's moments between steps; bfloat16 is stochastically rounded, and halves their
    memory."""
    options: dict[str, Any]
    """Further keyword arguments of the class, such as `momentum` or `betas`."""


WHOLE_MATRICES = {"Adafactor": "factors the moments of whole matrices", "Muon": "orthogonalises whole matrices"}
WHOLE_MATRICES |= {"MuonAdamW": WHOLE_MATRICES["Muon"], "AdamW8bit": "quantises blocks of whole weights"}
"""Optimizers that do not compute element by element."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of taken steps."""

    name: str
    """constant, warmup_cosine, warmup_linear, or any class of `torch.optim.lr_scheduler` that needs no metric."""
    horizon: int | None
    """Length in steps; null: the length of the run at its start, kept on resume."""
    options: dict[str, Any]
    """Keyword arguments, such as `warmup` (a fraction of the horizon) or `gamma`."""


@dataclass(frozen=True)
class EmaConfig:
    """EMA of the weights."""

    decay: float | None
    """Weight of the old average per taken step; null: off."""
    warmup: bool
    """Start with a smaller decay, (1 + t) / (10 + t) after t taken steps."""


@dataclass(frozen=True)
class LogConfig:
    """Trackers besides metrics.jsonl."""

    name: str
    progress: bool
    """A progress bar on a terminal, plain lines in a file."""
    tensorboard: bool
    wandb: bool
    wandb_project: str
    wandb_mode: Literal["auto", "online", "offline"]
    """auto: online when an account is configured, else offline."""
    wandb_entity: str | None
    """Team or user that the run belongs to; null: wandb's default."""
    wandb_group: str | None
    """Group of the run, such as a sweep."""
    wandb_tags: list[str]
    """Tags of the run."""
    wandb_name: str | None
    """Name of the run; null: the recipe and its folder."""
    quiet: bool
    """Only warnings and errors on the terminal; train.log has everything."""


@dataclass(frozen=True)
class PerfConfig:
    """Options for speed and memory."""

    name: str
    channels_last: bool
    """Keep images and convolutions in NHWC memory order."""
    prefetch: bool
    """Copy the next window to the device during this one."""
    cudnn_benchmark: bool
    """On a GPU: cuDNN times its algorithms for each shape and uses the fastest; off with deterministic=true."""
    checkpoint_activations: bool
    """Activation checkpointing: save only the inputs of blocks, and recompute each block in the backward pass."""
    recast_weights: bool
    """Weight-cast recompute: cast weights again in the backward pass instead of saving 16-bit copies, 2 bytes per
    weight."""
    compile: Literal["blocks", "network"] | None
    """torch.compile each kind of block (the whole network if it has none), or the network as one."""
    backend: str
    """Backend of torch.compile: inductor; aot_eager and eager only trace, for debugging."""
    dynamic: bool
    """With compile: compile training for any shape; false: once per shape."""
    graph: bool
    """Capture a whole step as one CUDA graph and replay it, if nothing in it depends on the host."""
    profile: int
    """Steps that rank 0 records after its first five: torch.profiler's trace and table, in <run>/profile/; 0: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are stored."""

    name: Literal["single", "sharded"]
    """single: one state.pt; sharded: each rank writes its shards, for models that do not fit one host."""
    keep: int
    """How many of the newest checkpoints to keep, besides the best one."""
    background: bool
    """Training continues while a checkpoint is written; needs host memory for a copy of the state."""


@dataclass(frozen=True)
class DoctorConfig:
    """What to do about steps that should not be skipped."""

    name: Literal["off", "watch", "heal"]
    """watch: find the operation that makes the window non-finite, and report it; heal: also fix it with fp32
    islands."""
    after_skips: int
    """Skipped steps in a row before the doctor acts, in modes with a loss scale; without one it acts at the first."""
    max_reports: int
    """Reports per run at most: each one takes the time of some steps."""
    statistics_every: int | None
    """Steps between samples of the value ranges of all layers, in doctor/statistics.jsonl; null: none."""


@dataclass(frozen=True)
class InjectConfig:
    """A fault injected into one step, for rehearsals and tests."""

    where: Literal["batch", "activation", "gradient", "drop"]
    """The input, the first layer's output, a gradient; `drop` discards the window."""
    step: int
    """The step, counted from 1 as in metrics.jsonl."""
    rank: int
    """The rank; `drop` applies to all."""
    value: float
    """The injected value: inf, -inf, nan or a number."""


@dataclass(frozen=True)
class DebugConfig:
    inject: InjectConfig | None


@dataclass(frozen=True)
class RecipeConfig:
    """The keys that every recipe has; a recipe's own `Knobs` add to them."""

    name: str
    length: str
    """Default length of a run: a number and steps, epochs or samples."""
    best: str
    """The metric that selects the best checkpoint."""
    best_is: str
    """max or min."""


def expected(knobs: RecipeConfig, **rules: tuple[bool, str]) -> list[str]:
    """A message for each setting that breaks its rule, `key=(whether it holds, what is expected)`."""
    values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in vars(knobs).items()}
    return [f"recipe.{key}={values[key]}: expected {what}" for key, (holds, what) in rules.items() if not holds]


@dataclass(frozen=True)
class Config:
    """A whole run."""

    recipe: dict[str, Any]
    """The recipe's name and its own settings; each recipe documents and checks its own."""
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
    """Length of the run in epochs."""
    samples: int | None
    """Length of the run in training samples."""
    max_minutes: float | None
    """Time limit: the run writes a checkpoint and ends with exit code 75."""
    batch_size: int
    """Samples per micro-batch and rank."""
    device: Literal["auto", "cuda", "cpu", "mps", "xpu"]
    seed: int
    deterministic: bool
    """Use only deterministic algorithms; slower on a GPU."""
    save_every: int
    """Steps between checkpoints; the last step always writes one."""
    eval_every: int
    """Steps between evaluations; the run always ends with one."""
    log_every: int
    """Steps between lines of metrics."""
    run_dir: str | None
    """Folder of the run; null: outputs/<recipe>/<date_time>. A folder that holds a run is resumed."""
    resume: str
    """auto, last, never, or the folder or checkpoint of another run to start from."""
    allow_changes: bool
    """Allow a resume with settings that differ from the checkpoint's."""
    task: Literal["train", "evaluate", "predict"]
    """predict: write predictions.jsonl into the run folder."""
    predict_on: str | None
    """task=predict: a folder of images; null: the evaluation data. An image that cannot be read gets a line with its
    `error`, and they are counted; the exit code is 1 only if none can be read."""
    log: LogConfig
    perf: PerfConfig
    checkpoint: CheckpointConfig
    doctor: DoctorConfig
    debug: DebugConfig
    dry_run: bool
    """Show what would run, and exit."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return dataclasses.asdict(self)


def conf_dir() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml was found neither in {package.parent} nor in {package}; reinstall")


CONFIG_DIR = "AMP_RECIPES_CONFIG_DIR"
"""Environment variable that hands `--config-dir` on to the processes of a run."""


def config_dirs() -> list[Path]:
    """The folders of YAML files: ours, those of installed packages, that of --config-dir."""
    own = os.environ.get(CONFIG_DIR)
    return [conf_dir(), *_installed_dirs(), *([Path(own)] if own else [])]


@functools.cache
def _installed_dirs() -> list[Path]:
    """The packages of YAML files and recipes that others have installed: entry points of the group `amp_recipes`."""
    specs = [find_spec(entry.value) for entry in entry_points(group="amp_recipes")]
    return [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]


def option_file(group: str, option: str) -> Path:
    """The YAML file of one option of a group; its folder is the user's where ours has none."""
    files = [folder / group / f"{option}.yaml" for folder in config_dirs()]
    return next((file for file in files if file.is_file()), files[0])


def choices(group: str) -> list[str]:
    """The options of a config group, sorted."""
    return sorted(path.stem for folder in config_dirs() for path in (folder / group).glob("*.yaml"))


def read_option(group: str, option: str) -> dict[str, Any]:
    """The values of an option of a group as plain data, without Hydra. ConfigError: there is no such option."""
    if option not in choices(group):
        raise ConfigError(f"{group}={option}: there is no such option. {suggest(option, choices(group))}")
    return parse_yaml(option_file(group, option).read_text())


def parse_yaml(text: str) -> Any:
    """Plain data of YAML text; nothing is resolved, nothing executed. A damaged text raises the parser's own kinds."""
    return _loader()(text).get_single_data()


def node_of_yaml(text: str) -> Any:
    """The tree of YAML text, in which an alias is the node that it stands for; None for an empty text."""
    return _loader()(text).get_single_node()


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader, which reads numbers as OmegaConf does, such as 1e-3, and leaves dates as text."""
    from yaml import SafeLoader

    class Loader(SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if len(set(keys)) < len(keys):
                twice = Counter(keys).most_common(1)[0][0]
                raise ValueError(f"found duplicate key {twice}, line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, expression) for tag, expression in resolvers if not tag.endswith("timestamp")]
        for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


SAME = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"), **dict.fromkeys(("test", "eval", "val", "validate"), "evaluate"),
    **dict.fromkeys(("inference", "infer", "generate"), "predict"), "fit": "train", "tb": "tensorboard",
    **dict.fromkeys(("latest", "newest", "continue", "true", "yes", "on"), "last"), "dp": "data_parallel",
    **dict.fromkeys(("fp16", "half", "16"), "float16"), "bf16": "bfloat16", **dict.fromkeys(("fp32", "32"), "float32"),
    **dict.fromkeys(("lm", "llm", "gpt"), "language_model"), **dict.fromkeys(("lora", "sft"), "finetuning"),
    **dict.fromkeys(("classifier", "classify", "imagenet"), "classification"), "adam8bit": "adamw_8bit",
    **dict.fromkeys(("step_lr", "steplr"), "step"), "cosine_annealing": "warmup_cosine",
    **dict.fromkeys(("fsdp2", "deepspeed", "zero3"), "fsdp"), "mnist": "mnist_subset",
}  # fmt: skip
"""Names of other programs for what is called otherwise here."""


def is_misspelt(word: str, name: str) -> bool:
    """Whether `word` is `name` with a slip of the hand: a letter in four of a part added, left out, changed or swapped.

    Numbers have to have the same digits, and each word by itself: resnet34 is not resnet18, max_scale is not min_scale.
    """
    a, b = (re.split("[-_.]", text.lower()) for text in (word, name))
    digits_a, digits_b = (sorted(re.sub(r"\D", "", "".join(parts))) for parts in (a, b))
    if digits_a != digits_b:
        return False
    if len(a) != len(b):  # a sign was left out
        return _is_near("".join(a), "".join(b))
    return all(x == y or (x and len(a) > 1 and y.startswith(x)) or _is_near(x, y) for x, y in zip(a, b, strict=True))


def _is_near(a: str, b: str) -> bool:
    """Whether the optimal string alignment of two words has at most an edit for every four letters."""
    last, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a[:100], 1):
        before, last, row = last, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
    return len(a) <= 100 and row[-1] <= max(1, min(len(a), len(b)) // 4)


def suggest(word: str, valid: Iterable[str]) -> str:
    """A sentence with the valid choice that was meant, if that is clear; then all of them, or the nearest of many."""
    low, names = str(word).lower(), {name.lower(): name for name in valid}
    same = low if low in names else SAME.get(low)
    meant = [same] if same in names else [name for name in names if is_misspelt(low, name)]
    meant = difflib.get_close_matches(low, meant, n=1, cutoff=0.0)
    if not meant and len(low) > 2:  # a part of a name
        meant = [name for name in names if low in re.split("[_.]", name) or name.startswith(low)]
    hint = f"Did you mean {' or '.join(names[name] for name in meant)}? " if 0 < len(meant) <= 3 else ""
    if len(names) <= MOST_NAMES:
        return f"{hint}Valid: {', '.join(names.values())}." if names else hint
    nearest = sorted(names[name] for name in difflib.get_close_matches(low, names, n=12, cutoff=0.0))
    return f"{hint}Valid, of {len(names)} in all: {', '.join(nearest)}, ...."


MOST_NAMES = 40
"""Names that a message lists."""


def describe(kind: Any) -> str:
    """A type as text for the user."""
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


def group_of(hint: Any) -> Any:
    """The dataclass of a group of keys, also of one that may be null; None for the type of a value."""
    return next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def keys_of(kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(full key, type, class that has it) of all keys of a group, and of those in them."""
    for name, hint in _hints(kind).items():
        yield f"{prefix}{name}", hint, kind.__name__
        if (inner := group_of(hint)) is not None:
            yield from keys_of(inner, f"{prefix}{name}.")


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


_hints = functools.cache(get_type_hints)


def parse(kind: Any, values: Any, key: str, problems: list[str]) -> Any:
    """Convert `values` to the dataclass `kind`; invalid values are added to `problems` and left out."""
    if not isinstance(values, Mapping):
        names = " or ".join(f"{key}.{name}=..." for name in list(get_type_hints(kind))[:3])
        how = f"choose an option with {key}=<option>" if choices(key) else f"set {names}"
        problems.append(f"{key}={show_value(values)}: expected a group of keys; {how}")
        return None
    fields = _hints(kind)
    dot = f"{key}." if key else ""
    for name in values:
        if name not in fields:
            problems.append(f"{dot}{name}: there is no such key. {suggest(dot + name, [dot + f for f in fields])}")
    taken = {}
    for name, expected in fields.items():
        if name not in values:
            problems.append(f"{dot}{name}: the key is missing; expected {describe(expected)}")
            taken[name] = None
            continue
        value = values[name]
        group = group_of(expected)
        if group is not None and not (value is None and type(None) in get_args(expected)):
            taken[name] = parse(group, value, f"{dot}{name}", problems)
        elif _is_int(value) and expected in (str, str | None):
            taken[name] = str(value)  # YAML reads run_dir=7 or rdzv_id=42 as numbers; text is meant
        elif _fits(value, expected):
            wants_float = expected is float or (float in get_args(expected) and int not in get_args(expected))
            taken[name] = float(value) if wants_float and value is not None else value
        else:
            literal = [a for k in (expected, *get_args(expected)) if get_origin(k) is Literal for a in get_args(k)]
            hint = " " + suggest(show_value(value), literal) if literal else ""
            if _fits(meant := _plain(value), expected):
                hint = f" Write {dot}{name}={show_value(meant)}{', without quotes' * isinstance(value, str)}."
            if name == "device" and (number := re.fullmatch(r"(?:(?:cuda|gpu):)?(\d+)", str(value))):
                hint = f" Choose the GPU with CUDA_VISIBLE_DEVICES={number[1]}."
            if dot + name == "perf.compile":
                hint += " Use perf=compile."
            problems.append(f"{dot}{name}={show_value(value)}: expected {describe(expected)}.{hint}")
            taken[name] = None
    return kind(**taken)


def _plain(value: Any) -> Any:  # what 1000.0, '5', None and 'yes' were meant for
    if isinstance(value, str) and (number := re.fullmatch(r"(\d{1,9})(k|m|\*\*)(\d{1,2})?", value.lower())):
        base, unit, power = number.groups()
        if bool(power) == (unit == "**"):
            return int(base) ** int(power) if power else int(base) * {"k": 1000, "m": 1_000_000}[unit]
    if isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value):
        return None if value.lower() == "none" else parse_yaml(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def show_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
