"""Errors that end a run, each with its exit code. Everything else that escapes a run is a failure and exits with 1."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

STATUS = {0: "finished", 2: "refused", 5: "diverged", 75: "preempted", 130: "preempted", 143: "preempted"}
"""How a run with an exit code ended; with any other one it failed."""


class RunError(Exception):
    """A problem of the run that its user can act on: one message, no traceback."""

    exit_code = 1


class BadSample(RunError):
    """A file of a data set that cannot be used. Through torch's workers an error keeps only its class and message."""


class ConfigError(RunError):
    """A bad command line or configuration: sentences, each with the full key, what was found and what was expected."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(RunError):
    """No usable checkpoint: none is sound, or the one that was named does not fit."""

    exit_code = 3


class SaveError(RunError):
    """A checkpoint cannot be written (full disk, read-only folder). Earlier ones are intact."""

    exit_code = 4


class Diverged(RunError):
    """Too many steps had non-finite gradients, or the last evaluation is not finite."""

    exit_code = 5


class Interrupted(RunError):
    """The run stopped early on purpose, after a checkpoint: a signal (130, 143, 75) or the time limit (75)."""

    # The defaults are for pickle, by the launchers of a sweep: it calls with the message and then sets the rest.
    def __init__(self, message: str, exit_code: int = 75, by_signal: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.by_signal = by_signal


SAME = {ours: words.split() for ours, words in {
    "fp16": "16 16-mixed fp16-mixed float16 half true on mixed", "fp32": "32 32-true float32 float full no",
    "bf16": "bf16-mixed bfloat16 bfloat16-mixed bfloat", "bf16_pure": "bf16-true bfloat16-true",
    "fp8": "float8 fp8-mixed e4m3 transformer-engine", "o3": "16-true fp16-true", "bfloat16": "bf16",
    "float16": "fp16 half 16", "float32": "fp32 32", "cuda": "gpu nvidia", "adamw_8bit": "adam8bit",
    "compile": "true inductor torch_compile dynamo", "graph": "cudagraph cudagraphs cuda_graph cuda_graphs",
    "watch": "true on", "norm": "true on grad_norm global_norm l2", "adaptive": "agc", "tensorboard": "tb",
    "ddp": "multi_gpu multi-gpu distributed", "model_parallel": "pipeline pipeline_parallel pp mp",
    "fsdp": "fsdp1 fsdp2 deepspeed zero3", "data_parallel": "dp", "step": "step_lr steplr",
    "warmup_cosine": "cosine_annealing", "last": "latest newest continue true yes on", "never": "false null none",
    "default": "csv json jsonl file", "none": "quiet silent", "train": "fit", "evaluate": "test eval val validate",
    "predict": "inference infer generate", "pt2": "torchscript jit script torch.export torch pt", "peft": "lora",
    "onnx": "tensorrt trt openvino tflite coreml", "hf": "datasets huggingface transformers",
    "imagenet": "imagenet1k imagenet-1k ilsvrc", "synthetic": "random fake dummy", "text": "txt plain_text",
    "mask_folder": "segmentation_folder masks voc pascal_voc", "telephone": "dtmf", "mnist_subset": "mnist",
    "recordings": "ljspeech librispeech wav wavs common_voice audio_folder audiofolder audio",
    "shards": "webdataset wds tar", "image_folder": "imagefolder", "table": "csv tsv tabular dataframe timeseries",
    "classification": "image_classification classifier classify imagenet", "segmentation": "semantic_segmentation unet",
    "gan": "wgan dcgan", "diffusion": "ddpm edm", "contrastive": "clip simclr infonce", "experts": "moe mixture",
    "policy_gradient": "rl ppo grpo reinforce", "speech": "asr ctc", "distillation": "kd", "finetuning": "lora sft",
    "face_recognition": "arcface faces", "language_model": "lm llm gpt",
    "supervised": "regression regressor tabular_regression forecasting",
}.items()}  # fmt: skip
"""Names of options and values, and what other programs call them, in small letters."""


def is_misspelt(word: str, name: str) -> bool:
    """Whether `word` is `name` with typing errors: a letter in four of a part added, left out, changed or swapped.

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
    if len(a) == len(b) <= 3 and sorted(a) != sorted(b):  # tpu is not xpu
        return False
    return len(a) <= 100 and row[-1] <= max(1, min(len(a), len(b)) // 4)


def suggest(word: str, valid: Iterable[str]) -> str:
    """A sentence with the valid choice that was meant, if that is clear; then all of them, or the nearest of many."""
    low, names = str(word).lower(), {name.lower(): name for name in valid}
    short = low.rpartition(".")[2]  # torch.optim.Adam
    meant = [name for name in names if low in (name, *SAME.get(names[name], ()))]
    meant = meant or [name for name in names if name == short or is_misspelt(low, name)]
    meant = difflib.get_close_matches(low, meant, n=1, cutoff=0.0)
    if not meant and len(low) > 2 and low not in ("off", "none"):  # a part of a name
        meant = [name for name in names if low in re.split("[_.]", name) or name.startswith(low)]
    hint = f"Did you mean {' or '.join(names[name] for name in meant)}? " if 0 < len(meant) <= 3 else ""
    if len(names) <= 40:  # more are not read
        return f"{hint}Valid: {', '.join(names.values())}." if names else hint
    nearest = sorted(names[name] for name in difflib.get_close_matches(low, names, n=12, cutoff=0.0))
    return f"{hint}Valid, of {len(names)} in all: {', '.join(nearest)}, ...."
