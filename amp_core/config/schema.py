"""The configuration as dataclasses: types and documentation of every key. Values are in conf/."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class AmpConfig:
    """A mode of mixed precision. The scale policy is null in modes without a loss scale."""

    name: str
    """Name of the mode: the chosen option of the group."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Dtype of autocast; float32 disables it."""
    weights: Literal["float32", "bfloat16", "float16"]
    """Dtype of the weights; 16-bit weights compute without autocast."""
    update: Literal["master", "remainder", "stochastic", "nearest"] | None
    """How a step updates 16-bit weights: master weights, bfloat16 weights and the 16 bits that they lack of them,
    stochastic rounding, or rounding to nearest."""
    format: Literal["fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"] | None
    """Number format that linear layers of suitable sizes multiply; null: `dtype`."""
    granularity: Literal["tensor", "row", "row_gw_hp", "block"] | None
    """fp8: what shares a scale: a tensor, a row, a row (weight gradients in bfloat16), or 1 x 128 numbers, of weights
    128 x 128."""
    scale_rule: Literal["floor", "rceil"] | None
    """mxfp: how a block's power of two is chosen. floor: OCP's, which saturates numbers just below the next power."""
    stochastic_gradients: bool
    """Round gradients of linear layers to `format` stochastically."""
    hadamard: bool
    """nvfp4: spread outliers over 16 numbers in the product of the weight gradient."""
    square_weights: bool
    """nvfp4, mxfp: weights share scales in squares (16 x 16, 32 x 32), so that both passes use the same numbers."""
    keep_bf16: list[str] | None
    """Linear layers that stay in bfloat16, as globs of names; null: output layers and routers."""
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
    hysteresis: int | None
    """Overflows, since the scale last grew, before it falls, as in Megatron-LM; 1: it falls at each."""
    consecutive_hysteresis: bool | None
    """A step without overflow resets that count, as in DeepSpeed."""
    skip_above: float | None
    """Skip steps whose loss or gradient norm is above this times its running median (of 64 steps, from the 17th on).
    The loss scale stays. null: off."""
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
    gather_dtype: Literal["bfloat16", "float8_e4m3fn"] | None
    """fsdp, hsdp: how layers of an amp.format gather their weights; null: in fp32, with the bits of ddp."""
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

    @property
    def nodes(self) -> tuple[int, int] | None:
        """(least, most) machines; None where `nnodes` cannot be read."""
        found = [int(part) for part in str(self.nnodes).split(":") if part.isascii() and part.isdigit()]
        is_range = len(found) == 1 + str(self.nnodes).count(":") <= 2 and 1 <= found[0] <= found[-1]
        return (found[0], found[-1]) if is_range else None

    @property
    def is_elastic(self) -> bool:
        """Whether machines may join and leave during the run."""
        return self.nodes is not None and self.nodes[0] < self.nodes[1]


ONE_PROCESS = ("single", "data_parallel")
"""Layouts of one process, whatever the machine has."""
SHARDED = ("fsdp", "hsdp")
"""Layouts in which a rank holds a part of each weight."""


@dataclass(frozen=True)
class ModelConfig:
    name: str
    """One of our own, any classification model of `torchvision.models`, or with model=timm, model=hf one of these."""
    options: dict[str, Any]
    """Keyword arguments of the model's constructor, such as `dropout`."""
    weights: str | None
    """Pretrained weights to start from: a .safetensors or torch file of a state dict, or the folder of a run."""
    fresh: list[str] | None
    """With weights: modules or tensors, by name or glob, that keep their initial values, such as a new head."""
    rename: dict[str, str] | None = None
    """With weights: parts of names in the file, between dots, and what they are called here, one after another."""


@dataclass(frozen=True)
class DataConfig:
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
    augment: bool | Literal["randaugment", "trivialaugment", "colorjitter"]
    """Random augmentation of training images, seeded by (seed, sample index, epoch). true: what suits the data set, of
    image files a random crop and flip; the others, of torchvision, come after these."""
    prepare_on: Literal["loader", "device"]
    """Where training images in memory are augmented and normalised: by the loader on CPU cores, or on the device."""
    num_samples: int | None
    """Number of training samples: of synthetic data, or at most this many of a large data set."""
    num_classes: int | None
    """synthetic: number of classes."""
    length: int | None
    """text: tokens per sample."""
    tokenizer: str | None
    """text: bytes, a folder with tokenizer.json, or such a file."""
    text_field: str | None
    """text: the key of *.jsonl, or the column of *.parquet, that holds the documents."""
    packing: Literal["none", "chunks", "best_fit"] | None
    """text: none: a sample is a part of one document; chunks: documents one after another, cut every data.length
    tokens; best_fit: whole documents where they fit. Packed documents do not attend to each other."""
    mix: dict[str, float] | None
    """text: sources, files or folders below data.path, by their share of the samples; null: all, as they are."""
    train_on: Literal["assistant", "all"] | None
    """chat: the tokens that are targets."""
    exclude: str | None
    """Image files: a list of samples to leave out, a name below `data.path` on each line, as `data.check` writes it. A
    run resumes with the samples that it was begun with."""
    check: bool
    """Instead of a run: read every sample once, by `data.num_workers` processes. Names those that cannot be read and
    writes them to bad_samples.txt for `data.exclude`. Exit codes: 0 all can be read, 2 some cannot."""
    columns: dict[str, str] | list[str] | None = None
    """shards, hf, parquet: which parts or columns hold the `image` and the `label`; null: image and label, in tar files
    any image and cls. table: a list of the columns that are inputs; null: all but the targets."""
    target: str | list[str] | None = None
    """table: the column to predict, or several."""
    leave_out: list[str] | None = None
    """table: columns that are no inputs."""
    categorical: list[str] | None = None
    """table: columns of numbers that are names of categories."""
    window: int | None = None
    """table: rows of a sample of a series, oldest first; null: rows are samples."""
    horizon: int | None = None
    """table: how many rows after a window are predicted."""
    sampler: Literal["balanced"] | None = None
    """balanced: each class is drawn equally often in an epoch; null: each sample once."""
    options: dict[str, Any] | None = None
    """Settings of a data set of your own."""
    mixup: float | None = None
    """Alpha of MixUp of training images: labels are probabilities then. Reads two images for one."""
    cutmix: float | None = None
    """Alpha of CutMix; with `mixup` each image has one of them."""
    erasing: float | None = None
    """Probability that a rectangle of a training image is erased."""
    like: str | None = None
    """Image files: `timm:<name>`: crop, interpolation and statistics of that network of timm; null: torchvision's."""


@dataclass(frozen=True)
class OptimizerConfig:
    name: str
    """Any class of `torch.optim` for dense gradients without a closure, `AdamW8bit` of torchao, or `<module>.<Class>`
    of an installed package, such as `schedulefree.AdamWScheduleFree`."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Not applied to norms and biases."""
    fused: bool | None
    """null: fused if torch supports it; a fused step has no host-device sync."""
    state_dtype: Literal["float32", "bfloat16"]
    """Dtype of Adam's and AdamW's moments between steps; bfloat16, half the memory, is stochastically rounded."""
    options: dict[str, Any]
    """Further keyword arguments of the class, such as `momentum` or `betas`."""
    package: str | None = None
    """A package that `name` may be imported from, besides those known to work."""
    groups: list[dict[str, Any]] | None = None
    """Settings of some weights: `match`, the names of weights or modules (a glob), beside it lr, weight_decay or others
    of the class. The first that matches holds; norms and biases never decay."""
    layer_decay: float | None = None
    """Multiplies the learning rate once per layer, from the last to the first; null: one rate."""


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
    decay: float | None
    """Weight of the old average per taken step; null: off."""
    warmup: bool
    """Start with a smaller decay, (1 + t) / (10 + t) after t taken steps."""


@dataclass(frozen=True)
class EvalConfig:
    samples: int | None
    """Evaluate at most this many samples, evenly spread over the evaluation data; null: all of them."""
    at_start: bool
    """Evaluate before the first step, too: step 0 of metrics.jsonl, and `eval_at_start` of summary.json."""


@dataclass(frozen=True)
class ExportConfig:
    """task=export: the network of a run (its average, if there is one) for other programs, in fp32."""

    to: Literal["onnx", "pt2", "hf", "peft", "safetensors"] | None
    """onnx, pt2: the graph for any batch, compared with the network, with preprocessing and classes as metadata, a file
    of ONNX or of torch.export; hf: a folder for transformers' from_pretrained, with the tokenizer, adapters merged;
    peft: the adapter alone, as peft loads it; safetensors: one file with the names of the network."""
    path: str | None
    """What is written, whole or not at all; null: below export/ of the run folder."""


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
    """Cast weights again in the backward pass instead of saving 16-bit copies: 2 bytes per weight less."""
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
    """watch: report the operation that makes a window non-finite; heal: also fix it with fp32 islands."""
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
    rank: int = 0
    """The rank; `drop` applies to all."""
    value: float = math.inf
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
    eval: EvalConfig
    export: ExportConfig
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
    task: Literal["train", "evaluate", "predict", "export"]
    """predict: write predictions.jsonl into the run folder; export: write `export.path`."""
    predict_on: str | None
    """task=predict: images, recordings or a table as the run's data (which may be gone), or a .jsonl file of
    {"prompt": "..."} a line, which a language model continues by `recipe.sample_tokens` (64) at `recipe.temperature`
    (0: greedy). null: the evaluation data. What cannot be read gets a line with its `error`, and they are counted; the
    exit code is 1 only if none can be read."""
    log: LogConfig
    perf: PerfConfig
    checkpoint: CheckpointConfig
    doctor: DoctorConfig
    debug: DebugConfig
    dry_run: bool
    """Show what would run, and exit."""

    @property
    def origin(self) -> str | None:
        """The run or checkpoint that `resume` names."""
        return None if self.resume in ("auto", "last", "never", None) else self.resume

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
