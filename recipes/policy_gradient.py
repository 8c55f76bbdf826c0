"""A policy gradient: the network that samples and the network that learns compute different probabilities.

The lesson: answers come from an inference engine, whose weights and activations are 16-bit; gradients come from
training under autocast, with fp32 weights. The same weights then give different log-probabilities, and what is called
on-policy is not. Rounding is the only cause, so fp16 (10 mantissa bits) is 8 times nearer than bf16 (7); in training it
needs its loss scale. An engine in fp32 helps little, since training rounds too. What also helps: log-softmax in fp32,
and weighting each symbol by its ratio of probabilities, truncated (`recipe.importance_cap=2`).

`mismatch` is the mean distance of the two log-probabilities of a sampled symbol, `ratio_error` the mean distance from 1
of the ratio of the two probabilities of an answer. The task needs no data: sort six symbols. The reward is 1 for each
right place; its baseline is the mean over the eight answers to a prompt.

    python train.py recipe=policy_gradient                                    bf16
    python train.py recipe=policy_gradient amp=fp16 recipe.importance_cap=2
    python train.py recipe=policy_gradient recipe.rollout_dtype=float32       an engine in fp32

Expected, after 300 steps with seeds 1 to 3: accuracy 0.979, 0.953, 0.916 in bf16; 0.963, 0.900, 0.992 in fp16; 0.986,
0.920, 0.916 in fp32. Mean mismatch in training: 0.0018 to 0.0021 in bf16, 0.0002 to 0.0003 in fp16, 0 in fp32 (CPU).

Sources: Qi et al., "Defeating the Training-Inference Mismatch via FP16" (arXiv:2510.26788); the mean of a group as
baseline: Shao et al., "DeepSeekMath" (arXiv:2402.03300).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.data import Data, Key
from amp_core.data.base import evenly_spread, uniforms, unpack
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.run.recipe import Environment, Loop, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import unwrap
from amp_core.torch_private import foreach_copy_

DATA = "own"
MODELS = LANGUAGE_MODELS
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("single", "data_parallel", "ddp")  # the engine copies whole weights
NUM_TRAIN, NUM_EVAL = 4096, 512  # prompts per epoch, which differ from epoch to epoch, and those of the evaluation


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    num_symbols: int
    """Different symbols, at least 2."""
    num_places: int
    """Symbols to sort."""
    group: int
    """Answers to each prompt; the baseline is their mean reward."""
    rollout_dtype: str | None
    """Of the engine: float32, bfloat16, float16; null: that of the mode."""
    importance_cap: float | None
    """Largest weight of a token; null: every token has the weight 1."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    cap = knobs.importance_cap
    return expected(
        knobs,
        num_symbols=(knobs.num_symbols >= 2, "at least 2"),
        num_places=(knobs.num_places >= 1, "at least 1"),
        group=(knobs.group >= 2, "at least 2"),
        rollout_dtype=(knobs.rollout_dtype in (None, *DTYPES), f"null, {', '.join(DTYPES)}"),
        importance_cap=(cap is None or cap >= 1, "at least 1, or null"),
    )


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: accuracy (of whole answers), reward, mismatch and ratio_error."""
    knobs = Knobs(**cfg.recipe)
    num_symbols, num = knobs.num_symbols, knobs.num_places
    facts = {"vocab_size": num_symbols + 1, "length": 2 * num}
    data = Data(Prompts(knobs, NUM_TRAIN, cfg.seed), Prompts(knobs, NUM_EVAL, cfg.seed + 1), facts)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    engine = build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts)
    engine.to(env.device, getattr(torch, knobs.rollout_dtype or cfg.amp.dtype)).requires_grad_(False).eval()
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, dict[str, Tensor]]:
        totals = {key: torch.zeros((), device=env.device) for key in ("loss", "reward", "mismatch", "ratio_error")}
        # Once per step: the answers are of the very weights that learn from them, but for rounding.
        take_weights(engine, model)
        for micro, uniform in zip(window, loop.draw(torch.rand, knobs.group, num, num_symbols), strict=True):
            prompts = micro.batch.repeat_interleave(knobs.group, 0)
            # Noise by seed and step: accumulation and ranks change no answer.
            answers, sampled = rollout(engine, prompts, gumbel(uniform.flatten(0, 1)))
            rewards = (answers == prompts[:, :-1].sort(1).values).float()
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    # In fp32: bf16 numbers between 4 and 8 are 1/32 apart.
                    learned = log_probabilities(model(inputs_of(prompts, answers))[:, num:].float(), answers)
                    loss = policy_loss(learned, sampled, advantages(rewards, knobs.group), knobs.importance_cap)
                amp.backward(loss, micro.weight)
            found = {"loss": loss, "reward": rewards.mean()} | distances(learned, sampled)
            for key, value in found.items():
                totals[key] += value.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, totals

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # Every rank computes all of it, as it is small.
        prompts = evenly_spread(env.eval_part(data.eval), NUM_EVAL).to(env.device)
        noise = torch.rand(len(prompts), num, num_symbols, generator=torch.Generator().manual_seed(0)).to(env.device)
        take_weights(engine, net)
        answers, sampled = rollout(engine, prompts, gumbel(noise))
        with amp.autocast():
            learned = log_probabilities(net(inputs_of(prompts, answers))[:, num:].float(), answers)
        # Without noise the argmax is the most probable symbol.
        best, _ = rollout(engine, prompts, torch.zeros_like(noise))
        right = best == prompts[:, :-1].sort(1).values
        found = {"accuracy": right.all(1).float().mean(), "reward": right.float().mean()} | distances(learned, sampled)
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    loop = Loop(env, data, amp=amp, model=model, optimizer=optimizer, schedule=schedule, ema=ema, evaluate=evaluate)
    for window in loop.windows():
        report, totals = loop.run(train_step, window)
        loop.log(report, **totals)
    return loop.eval


class Prompts:
    """Symbols to sort, then the sign for an answer: int64 [B, num_places + 1]. Other ones in every epoch."""

    def __init__(self, knobs: Knobs, num: int, seed: int) -> None:
        self.knobs, self.num, self.seed = knobs, num, seed

    def __len__(self) -> int:
        return self.num

    def __getitems__(self, keys: Sequence[Key]) -> Tensor:
        symbols = uniforms(self.seed, *unpack(keys), self.knobs.num_places) * self.knobs.num_symbols
        return nn.functional.pad(torch.from_numpy(symbols).long(), (0, 1), value=self.knobs.num_symbols)


@torch.no_grad()
def take_weights(engine: nn.Module, net: nn.Module) -> None:
    """Round the weights of `net` into those of the engine."""
    foreach_copy_(list(engine.parameters()), list(unwrap(net).parameters()))


def inputs_of(prompts: Tensor, answers: Tensor) -> Tensor:
    """What a network reads to predict each symbol of the answers."""
    return torch.cat([prompts, answers[:, :-1]], dim=1)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise: the argmax of logits plus this noise is a sample of their softmax."""
    # A uniform number of 0 gives minus infinity: that symbol is not chosen.
    return -(-uniform.log()).log()


@torch.no_grad()
def rollout(engine: nn.Module, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Answers [B, N] sampled symbol by symbol, and their log-probabilities in fp32, [B, N]. No host-device sync.

    Args:
        engine: tokens [B, L] to logits of the next, in its own dtype.
        prompts: int64 [B, N + 1].
        noise: Gumbel noise [B, N, num_symbols]; 0 for the most probable symbols.
    """
    tokens, found = prompts, []
    for place in range(noise.shape[1]):
        logits = engine(tokens)[:, -1:].float()
        # The last logit is of the sign for an answer, which is none.
        symbol = (logits[:, 0, :-1] + noise[:, place]).argmax(1, keepdim=True)
        found.append(log_probabilities(logits, symbol))
        tokens = torch.cat([tokens, symbol], dim=1)
    return tokens[:, prompts.shape[1] :], torch.cat(found, dim=1)


def log_probabilities(logits: Tensor, symbols: Tensor) -> Tensor:
    """Log-probabilities [B, N] of symbols [B, N], in the dtype of the logits [B, N, num_symbols + 1]: to be fp32."""
    return logits[..., :-1].log_softmax(-1).gather(-1, symbols[..., None])[..., 0]


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Rewards [B * group, N] minus the mean of their group.

    Not divided by their standard deviation: that would make one right answer among wrong ones count most.
    """
    rewards = rewards.unflatten(0, (-1, group))
    return (rewards - rewards.mean(1, keepdim=True)).flatten(0, 1)


def policy_loss(learned: Tensor, sampled: Tensor, advantage: Tensor, cap: float | None) -> Tensor:
    """Minus the mean of advantage times log-probability, weighted by ratios of probabilities if `cap` is given.

    Args:
        learned: log-probabilities of the network that learns, fp32 [B, N].
        sampled: those of the network that sampled.
        advantage: of each symbol, [B, N].
        cap: largest ratio; larger ones are truncated. None: all weights are 1.
    """
    # Truncated importance sampling, by constants: the cap bounds the variance at the price of a bias.
    weight = 1.0 if cap is None else (learned.detach() - sampled).exp().clamp(max=cap)
    # REINFORCE: the gradient of E[reward] is E[advantage * grad log p], and `learned` alone has a graph.
    return -(weight * advantage * learned).mean()


def distances(learned: Tensor, sampled: Tensor) -> dict[str, Tensor]:
    """How far off-policy the sampled symbols and answers are."""
    difference = learned.detach() - sampled
    # The probability of an answer is the product of those of its symbols, so logarithms add up.
    return {"mismatch": difference.abs().mean(), "ratio_error": (difference.sum(1).exp() - 1).abs().mean()}
