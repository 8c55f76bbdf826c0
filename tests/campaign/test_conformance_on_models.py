"""Networks of timm and transformers through the core, bf16 and fp16, against loops written by hand: needs both packages.

Each takes 20 steps of two micro-batches with AdamW, clipping by norm, an EMA, `amp.guard` and, in fp16, a loss scale
that begins too large; skipped ones come on top. Asked for:

- the textbook loop (autocast, `GradScaler`, `clip_grad_norm_`, an EMA by hand) skips the same steps and ends with the
  same bits in weights and average;
- the cache of weight casts changes no bit;
- a skipped step leaves buffers as they were;
- the loss differs from that in fp32, of the same weights and samples, by at most what rounding explains to first order.
  Every weight, input and result a is rounded twice at most, when it is made and when it is cast, each time by up to
  u |a| + eta, and that moves the loss by dL/da as much. Independent errors of mean zero then add up to more than
  6.6 * sqrt(2 * sum((u |a| + eta)^2 (dL/da)^2)) once in 10^9 times (Hoeffding, with sqrt(2 ln(2 * 10^9)) = 6.6; Higham
  and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019). u = 2^-8 (bf16) or 2^-11 (fp16), eta is
  half the smallest number of the dtype. A bound above the loss itself proves nothing.

Layers that `amp.prepare` refuses because this CPU computes them wrongly become islands, in all of these loops. Four
networks; all sixteen with FOREIGN_MODELS=all.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from foreign_models import NEEDED, TIMM, TRANSFORMERS, VISFORMER, Batch, Foreign, chosen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from amp_core import Amp, Clip, Ema, keep_fp32, windows
from amp_core.config.errors import ConfigError

pytestmark = [*NEEDED, pytest.mark.filterwarnings("ignore")]  # of these packages
MODELS = {model.name: model for model in (*TIMM, *TRANSFORMERS)}
VAGUE = {"efficientnet_b0"}
"""Rounding may move the loss by more than itself."""
STEPS, MOST, ACCUMULATION, SAMPLES, DECAY, MAX_NORM, LEARNING_RATE = 20, 60, 2, 4, 0.9, 1.0, 1e-4
INIT_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**24, 2.0**-24, 4
MODES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOOKED_AT = (0, STEPS // 2, STEPS - 1)
"""Steps before which the loss is compared with that in fp32."""


@dataclass
class Run:
    """What a loop left behind."""

    losses: list[Tensor] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    before: dict[int, nn.Module] = field(default_factory=dict)
    """The network before a window."""
    is_guarded: bool = True


def built(model: Foreign) -> nn.Module:
    """Without dropout, whose random numbers depend on the dtype, and without dropped layers (wav2vec2's `layerdrop`)."""
    torch.manual_seed(0)
    net = model.build()
    for part in (*net.modules(), *(module.config for module in net.modules() if hasattr(module, "config"))):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(part).__name__)):
                setattr(part, name, 0.0)
    return net.train()


def batches(model: Foreign) -> list[Batch]:
    torch.manual_seed(1)
    return [model.batch(SAMPLES) for _ in range(MOST * ACCUMULATION)]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), LEARNING_RATE)


def finished(run: Run, net: nn.Module, average: Any) -> Run:
    run.weights, run.average = ([p.detach().clone() for p in each] for each in (net.parameters(), average))
    return run


def ours(model: Foreign, mode: str, *, cache: bool) -> Run:
    net, run = built(model), Run()
    fields = {"init_scale": INIT_SCALE, "min_scale": MIN_SCALE, "growth_interval": GROWTH_INTERVAL}
    amp = Amp.named(mode, **(fields if mode == "fp16" else {}))
    amp.guard(net)
    optimizer, ema = optimizer_of(net), Ema(net, DECAY, warmup=False)
    for number, window in enumerate(windows(batches(model), ACCUMULATION)):
        if run.taken.count(True) == STEPS:
            break
        if cache and run.taken.count(True) in LOOKED_AT[len(run.before) :]:
            run.before[number] = copy.deepcopy(net)
        buffers = [b.clone() for b in net.buffers()]
        with amp.cache_weight_casts(net) if cache else contextlib.nullcontext():
            for micro in window:
                with amp.autocast():
                    loss = model.loss(net, micro.batch)
                amp.backward(loss, micro.weight)
                run.losses.append(loss.detach().float())
        report = amp.step(optimizer, clip=Clip.norm(MAX_NORM, folded=False))
        ema.update(report)
        amp.update()
        amp.zero_grad(optimizer)
        run.taken.append(bool(report.taken))
        if not run.taken[-1]:
            run.is_guarded &= all(map(torch.equal, buffers, net.buffers()))
    return finished(run, net, ema.model.parameters())


def textbook(model: Foreign, mode: str) -> Run:
    """As the documentation of torch has it."""
    net, run = built(model), Run()
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    optimizer, average = optimizer_of(net), [p.detach().clone() for p in net.parameters()]
    for number, batch in enumerate(batches(model)):
        if run.taken.count(True) == STEPS:
            break
        with torch.autocast("cpu", MODES[mode]):
            loss = model.loss(net, batch)
        scaler.scale(loss / ACCUMULATION).backward()
        run.losses.append(loss.detach().float())
        if number % ACCUMULATION < ACCUMULATION - 1:
            continue
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.taken.append(bool(norm.isfinite()))
        if run.taken[-1]:
            for mean, p in zip(average, net.parameters(), strict=True):
                mean += torch.tensor(1 - DECAY) * (p.detach() - mean)
    return finished(run, net, average)


class Sensitivity(TorchFunctionMode):
    """Sums ((u |a| + eta) dL/da)^2 of every result a, while a loss is computed in fp32 and differentiated."""

    def __init__(self, dtype: torch.dtype, *, loss_in_fp32: bool) -> None:
        super().__init__()
        self.loss_in_fp32 = loss_in_fp32  # then single numbers, which nothing casts, are not rounded
        info = torch.finfo(dtype)
        self.u, self.eta, self.total = info.eps / 2, info.smallest_normal * info.eps / 2, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # wav2vec2 wants it of its input, as we do.
        if func == Tensor.requires_grad.__set__ and args[0].requires_grad:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_rounded = isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_floating_point()
            if is_rounded and not (self.loss_in_fp32 and tensor.ndim == 0):
                error = self.error_of(tensor)
                tensor.register_hook(lambda gradient, error=error: self.add(error, gradient))
        return result

    def error_of(self, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().abs() * self.u + self.eta

    def add(self, error: Tensor, gradient: Tensor) -> None:
        self.total += (error.double() * gradient).square().sum().item()


def in_fp32(model: Foreign, net: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[float, float]:
    """The loss in fp32, and by how much rounding to the dtype may move it."""
    with torch.no_grad(), torch.autocast("cpu", dtype):
        loss_in_fp32 = model.loss(copy.deepcopy(net), batch).dtype is torch.float32
    seen = Sensitivity(dtype, loss_in_fp32=loss_in_fp32)
    batch = {key: each.clone().requires_grad_() if each.is_floating_point() else each for key, each in batch.items()}
    with seen:
        loss = model.loss(net, batch)
    loss.backward()
    for leaf in (*net.parameters(), *batch.values()):
        if leaf.grad is not None:
            seen.add(seen.error_of(leaf), leaf.grad)
    return loss.item(), math.sqrt(2 * math.log(2e9)) * math.sqrt(2 * seen.total)


def refused_layers(model: Foreign, mode: str) -> list[str]:
    """The layers that `amp.prepare` refuses in this mode on this CPU, by the names that it gives."""
    names: list[str] = []
    while True:
        try:
            Amp.named(mode).prepare(keep_fp32(built(model), names))
            return names
        except ConfigError as refused:
            names.append(re.findall(r'wrongly on this CPU.*amp\.keep_fp32=\["(.+)"\]', str(refused))[0])


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def examine(model: Foreign, mode: str) -> dict[str, Any]:
    if islands := refused_layers(model, mode):
        build = model.build
        model = replace(model, build=lambda: keep_fp32(build(), islands))
    cached, plain, theirs = ours(model, mode, cache=True), ours(model, mode, cache=False), textbook(model, mode)
    net, given = built(model), batches(model)
    tied = sum(1 for _ in net.named_parameters(remove_duplicate=False)) > sum(1 for _ in net.parameters())
    bounded, says_much = True, False
    for number, before in cached.before.items():
        loss, bound = in_fp32(model, before, given[number * ACCUMULATION], MODES[mode])
        bounded &= abs(cached.losses[number * ACCUMULATION].item() - loss) <= bound
        says_much |= bound < abs(loss)
    fields = ("losses", "weights", "average")
    return {
        "same skips": cached.taken == plain.taken == theirs.taken,
        "skips in fp16": (False in cached.taken) == (mode == "fp16"),
        "as textbook": all(same(getattr(plain, name), getattr(theirs, name)) for name in fields),
        # Casts of tied weights are shared in another order of sums.
        "cache": tied or (same(cached.losses, plain.losses) and same(cached.weights, plain.weights)),
        "guard": cached.is_guarded and plain.is_guarded,
        "bounded": bounded and says_much != (model.name in VAGUE),
        "refused": islands,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", chosen(MODELS, "vit_tiny_patch16_224", "gpt2", "bert", "wav2vec2"))
def test_a_network_of_others_trains_as_in_the_textbook_loop(model, mode):
    row = examine(model, mode)
    assert all(row[asked] for asked in row if asked != "refused"), row


def test_without_a_guard_a_skipped_step_is_seen(monkeypatch):
    monkeypatch.setattr(Amp, "guard", lambda *_: None)
    run = ours(MODELS["mobilenetv3_small_100"], "fp16", cache=True)
    assert not all(run.taken) and not run.is_guarded


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX units")
def test_a_layer_that_this_cpu_computes_wrongly_is_refused_by_name_and_right_in_fp32(monkeypatch):
    row = examine(VISFORMER, "bf16")
    assert all(row.values()), row
    monkeypatch.setattr("amp_core.lowp.lint.computed_wrongly", lambda *_: "")
    row = examine(VISFORMER, "bf16")
    assert not row["refused"] and not row["bounded"], row
