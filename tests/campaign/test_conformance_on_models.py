"""Networks of timm and transformers through the core, bf16 and fp16, against loops written by hand: needs both packages.

Each takes 20 steps of two micro-batches with AdamW, clipping by norm, an EMA, `amp.guard` and, in fp16, a loss scale
that begins too large; skipped ones come on top. Asked for:

- the textbook loop (autocast, `GradScaler`, `clip_grad_norm_`, an EMA by hand) skips the same steps and ends with the
  same bits in weights and average;
- the cache of weight casts changes no bit;
- a skipped step leaves buffers as they were.

Layers that `amp.prepare` refuses because this CPU computes them wrongly become islands, in all of these loops.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from foreign_models import MODELS, NEEDED, Batch, Foreign
from torch import Tensor, nn

from amp_core import Amp, Ema, keep_fp32, windows
from amp_core.config.errors import ConfigError

pytestmark = [*NEEDED, pytest.mark.filterwarnings("ignore")]  # of these packages
STEPS, MOST, ACCUMULATION, SAMPLES, DECAY, MAX_NORM, LEARNING_RATE = 20, 60, 2, 4, 0.9, 1.0, 1e-4
INIT_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**24, 2.0**-24, 4
MODES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """What a loop left behind."""

    losses: list[Tensor] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
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


def begun(model: Foreign) -> tuple[nn.Module, torch.optim.Optimizer, list[Batch]]:
    net = built(model)
    torch.manual_seed(1)
    batches = [model.batch(SAMPLES) for _ in range(MOST * ACCUMULATION)]
    return net, torch.optim.AdamW(net.parameters(), LEARNING_RATE), batches


def finished(run: Run, net: nn.Module, average: Any) -> Run:
    run.weights, run.average = ([p.detach().clone() for p in each] for each in (net.parameters(), average))
    return run


def ours(model: Foreign, mode: str, *, cache: bool) -> Run:
    (net, optimizer, batches), run = begun(model), Run()
    fields = {"init_scale": INIT_SCALE, "min_scale": MIN_SCALE, "growth_interval": GROWTH_INTERVAL}
    amp = Amp.named(mode, **(fields if mode == "fp16" else {}))
    amp.guard(net)
    ema = Ema(net, DECAY, warmup=False)
    for window in windows(batches, ACCUMULATION):
        if run.taken.count(True) == STEPS:
            break
        buffers = [b.clone() for b in net.buffers()]
        with amp.cache_weight_casts(net) if cache else contextlib.nullcontext():
            for micro in window:
                with amp.autocast():
                    loss = model.loss(net, micro.batch)
                amp.backward(loss, micro.weight)
                run.losses.append(loss.detach().float())
        report = amp.step(optimizer, clip=lambda params, _: nn.utils.clip_grad_norm_(params, MAX_NORM))
        ema.update(report)
        amp.update()
        amp.zero_grad(optimizer)
        run.taken.append(bool(report.taken))
        if not run.taken[-1]:
            run.is_guarded &= all(map(torch.equal, buffers, net.buffers()))
    return finished(run, net, ema.model.parameters())


def textbook(model: Foreign, mode: str) -> Run:
    """As the documentation of torch has it."""
    (net, optimizer, batches), run = begun(model), Run()
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    average = [p.detach().clone() for p in net.parameters()]
    for number, batch in enumerate(batches):
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
    net = built(model)
    tied = sum(1 for _ in net.named_parameters(remove_duplicate=False)) > sum(1 for _ in net.parameters())
    fields = ("losses", "weights", "average")
    return {
        "same skips": cached.taken == plain.taken == theirs.taken,
        "skips in fp16": (False in cached.taken) == (mode == "fp16"),
        "as textbook": all(same(getattr(plain, name), getattr(theirs, name)) for name in fields),
        # Casts of tied weights are shared in another order of sums.
        "cache": tied or (same(cached.losses, plain.losses) and same(cached.weights, plain.weights)),
        "guard": cached.is_guarded and plain.is_guarded,
        "refused": islands,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "gpt2", "bert", "wav2vec2"])
def test_a_network_of_others_trains_as_in_the_textbook_loop(name, mode):
    row = examine(MODELS[name], mode)
    assert all(row[asked] for asked in row if asked != "refused"), row


def test_without_a_guard_a_skipped_step_is_seen(monkeypatch):
    monkeypatch.setattr(Amp, "guard", lambda *_: None)
    run = ours(MODELS["mobilenetv3_small_100"], "fp16", cache=True)
    assert not all(run.taken) and not run.is_guarded


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX units")
def test_a_layer_that_this_cpu_computes_wrongly_is_refused_by_name_and_right_in_fp32():
    row = examine(MODELS["visformer_tiny"], "bf16")
    assert all(row.values()), row
