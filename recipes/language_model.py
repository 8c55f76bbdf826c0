"""A language model on bytes: losses weighted by tokens, and positions that collide in 16 bits.

The lesson, in two parts. Samples differ in their number of valid tokens, so a mean of means is not the mean: each
micro-batch is weighted by its share of the window's valid tokens over all ranks, and one without any has loss 0, not
NaN. Position ids belong in fp32: bfloat16 counts to 256 and float16 to 2048, then neighbours share an id. Samples of
256 tokens never show it. `recipe.eval_offset` evaluates the same text as if it stood further down a long one: RoPE and
ALiBi depend only on distances, so a loss that differs from the one at offset 0 is a rounding error.

With a vocabulary of tens of thousands the logits dominate memory: `recipe.loss_chunk=512` holds those of 512 tokens at
a time (`amp_core/heads/losses.py`). For the 256 bytes here they are 5 % of the memory, and chunks cost time.

    python train.py recipe=language_model recipe.eval_offset=4096                        torch's own sources, bf16
    python train.py recipe=language_model recipe.eval_offset=4096 model.options.positions_dtype=bf16
    python train.py recipe=language_model data=text data.path=book.txt model.options.width=384 model.options.depth=6

Expected, on a CPU with bf16 units: 2.20 nats (3.17 bits) per byte of another library's sources (seeds 0 to 2: 2.17 to
2.22) after 85 s of one core. The same at 4096 with fp32 positions; with the same weights (seed 0) 2.17 becomes 2.71
with fp16 positions, 3.18 with bf16. Smaller, with data.length=128 and model.options of width=64 depth=2 heads=1, 300
steps (seeds 1 to 3): 2.5693 in fp32, 2.5696 in bf16, 2.5693 in fp16, which is slow on a CPU without fp16 units.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); Su et al., "RoFormer"
(arXiv:2104.09864); Press et al., "Train Short, Test Long" (arXiv:2108.12409).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.data.packing import Batch
from amp_core.data.text import bits_per_byte, num_bytes, num_valid, outputs_of, perplexities, token_loss
from amp_core.data.tokenizers import Tokenizer
from amp_core.heads.losses import give_loss
from amp_core.models.gpt import LANGUAGE_MODELS, position_ids
from amp_core.models.packed import check_packing
from amp_core.run.generate import generate
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.run.samples import write_sample
from amp_core.tensors import unwrap, widest

DATA = "text"
MODELS = LANGUAGE_MODELS


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    eval_offset: int | None
    """Evaluate again with the first token at this position, as `loss_at_<offset>`; null: do not."""
    loss_chunk: int | None
    """Tokens whose logits are materialised at a time; null: all, which is faster with a small vocabulary."""
    sample_tokens: int
    """Tokens to sample at the end, into samples/ of the run folder; 0: none."""
    prompt: str
    """The prompt of the sampled text."""
    temperature: float
    """Sampling temperature: lower is safer, 0 takes the most likely token."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss in nats and perplexity per token, bits_per_byte."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    is_loaded = cfg.model.weights is not None
    model = build_model(cfg.model.name, MODELS, options=cfg.model.options, is_loaded=is_loaded, **data.facts)
    if cfg.data.packing not in (None, "none"):
        check_packing(model, cfg.model.name)
    if knobs.loss_chunk is not None:
        give_loss(model.head, knobs.loss_chunk)  # type: ignore[arg-type]
    model = env.wrap(model, amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)
    env.job.notes += shared_positions(unwrap(model), length=data.facts["length"], offset=knobs.eval_offset or 0)

    def loss_of(net: nn.Module, batch: Batch, offset: int = 0) -> Tensor:
        if knobs.loss_chunk is not None:
            return outputs_of(net, batch, offset=offset, targets=batch[1])
        return token_loss(outputs_of(net, batch, offset=offset), batch[1])

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    # Of a micro-batch without a valid token the loss is 0, not 0 / 0.
                    loss = loss_of(model, micro.batch) / num_valid(micro.batch).clamp(min=1)
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        offsets = [0, knobs.eval_offset] if knobs.eval_offset else [0]
        # Loss per offset, tokens, bytes: summed on the device, read back once.
        totals = torch.zeros(len(offsets) + 2, dtype=widest(env.device), device=env.device)
        for batch in env.eval_batches(data.eval, 32):
            with amp.autocast():
                # The same text at other positions: with exact ids the losses are equal up to rounding.
                losses = [loss_of(net, batch, offset=offset) for offset in offsets]
            totals += torch.stack([*losses, num_valid(batch), num_bytes(data, batch[1])])
        *sums, num_tokens, size = env.sum_over_ranks(totals).tolist()
        loss, *further = [total / num_tokens for total in sums]
        perplexity = math.inf if loss > 700 else math.exp(loss)  # beyond it Python raises
        metrics = {"loss": loss, **bits_per_byte(sums[0], size), "perplexity": perplexity}
        return metrics | {f"loss_at_{offset}": value for offset, value in zip(offsets[1:], further, strict=True)}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=perplexities, **parts)
    # A micro-batch weighs as much as it has valid tokens, so the loss is their mean over the whole window.
    for window in loop.windows(count=num_valid):
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    if cfg.task == "train" and env.run_dir is not None and knobs.sample_tokens and data.tokenizer is not None:
        text = sample(unwrap(model), amp, knobs, data.tokenizer, length=data.facts["length"], seed=cfg.seed)
        write_sample(env, f"step_{loop.step:08d}.txt", text.encode())
    return loop.eval


def sample(net: nn.Module, amp: Amp, knobs: Knobs, tokenizer: Tokenizer, *, length: int, seed: int) -> str:
    """The prompt and at most `knobs.sample_tokens` more, each given at most `length` before it."""
    prompts, temperature = tokenizer.encode([knobs.prompt]), knobs.temperature
    sizes = {"num_tokens": knobs.sample_tokens, "length": length}
    new = generate(net, amp, prompts, temperature=temperature, seed=seed, eos=tokenizer.eos, **sizes)
    return tokenizer.decode(prompts[0] + new[0])


def num_shared_ids(length: int, *, offset: int = 0, dtype: torch.dtype) -> int:
    """How many positions have the id of an earlier one: none of the first 257 in bfloat16, of 2049 in float16."""
    # p significant bits hold every integer to 2^p: 8 in bfloat16, 11 in float16, 24 in float32.
    return length - position_ids(length, offset=offset, dtype=dtype).unique().numel()


def shared_positions(net: nn.Module, *, length: int, offset: int) -> list[str]:
    """A message for the log if positions collide in the dtype of the ids."""
    dtype = getattr(net, "ids_dtype", torch.float32)
    num_shared = num_shared_ids(length, offset=offset, dtype=dtype)
    if num_shared == 0:
        return []
    return [
        f"positions in {dtype}: of the {length} from {offset} on {num_shared} have the id of another one before them; "
        f"use model.options.positions_dtype=fp32"
    ]


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        eval_offset=(knobs.eval_offset is None or knobs.eval_offset >= 1, "a position above 0, or null"),
        loss_chunk=(knobs.loss_chunk is None or knobs.loss_chunk >= 1, "a number of tokens above 0, or null"),
        sample_tokens=(knobs.sample_tokens >= 0, "at least 0"),
        temperature=(0 <= knobs.temperature < math.inf, "a finite number, at least 0"),
    )
    if knobs.eval_offset is not None and cfg.model.options.get("positions") == "learned":
        problems.append(
            f"recipe.eval_offset={knobs.eval_offset}: a learned table ends with data.length; "
            f"use model.options.positions=rope or alibi"
        )
    if knobs.eval_offset is not None and cfg.model.name != "gpt":
        problems.append(f"recipe.eval_offset={knobs.eval_offset}: needs model=gpt, not {cfg.model.name}; leave it out")
    if not knobs.prompt:
        problems.append("recipe.prompt='': expected at least one character")
    return problems
