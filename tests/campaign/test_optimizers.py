"""Optimizers of torch and of other packages, plain and in wrappers, in every mode, against the same loop by hand.

A good, a bad and a good step; a checkpoint; a fresh network, optimizer and `Amp`, which load it; two good steps. Weights,
state and losses have to be, bit for bit, those of plain PyTorch with `if finite: optimizer.step()`, or the optimizer is
refused before a weight changes. A package that is not installed is skipped.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim import Optimizer

from amp_core import Amp, Checkpoint
from amp_core.lowp.masters import master_params
from amp_core.lowp.rounding import noise_16bit, round_stochastically
from amp_core.tensors import inner_optimizers
from amp_core.vision import import_torchvision

PACKAGES = "torch.optim schedulefree prodigyopt timm.optim torch_optimizer pytorch_optimizer bitsandbytes.optim torchao.optim muon".split()  # noqa: SIM905
MODES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "o2": torch.float16, "bf16_pure": torch.bfloat16}
LOW = ("o2", "bf16_pure")
WRAPPERS = ("plain", "fused", "Lookahead", "PostLocalSGD", "compiled", "subclass", "hook")
GOOD = (True, False, True, True, True)
SAVED = 3  # steps before the checkpoint
SCALE = 1024.0
CHOICES: tuple[dict[str, Any], ...] = (
    {"lr": 0.01},
    {},
    {"lr": 0.01, "num_iterations": 10},
    {"lr": 0.01, "momentum": 0.9},
)
Make = Callable[[list[nn.Parameter]], Optimizer]


pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


class Refused(Exception):
    """By an error that names the optimizer."""


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int) -> Tensor:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
    return x if GOOD[step] else x / 0


def classes(package: str) -> dict[str, type[Optimizer]]:
    """The optimizers of a package by name. Skips the test where it is not installed."""
    if package == "timm.optim":
        import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    found = {name: cls for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, Optimizer)}
    return {name: found[name] for name in sorted(found) if found[name] is not Optimizer and not name.startswith("_")}


def maker(cls: type[Optimizer], wrapper: str) -> Make:
    """Builds the optimizer in a wrapper. What it cannot be built of or with raises what the last attempt did."""

    def plain(params: list[nn.Parameter]) -> Optimizer:
        problem: Exception = RuntimeError()
        kind = type(cls.__name__, (cls,), {"step": lambda self: cls.step(self)}) if wrapper == "subclass" else cls
        fused = {"fused": True} if wrapper not in ("plain", "compiled") and has_fused(cls) else {}
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim < 2]
        split = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        for options, which in itertools.product(CHOICES, (params, matrices, split, None)):
            try:
                given: Any = which or torch.optim.SGD(params, lr=0.01, momentum=0.9)  # of a wrapper
                return kind(given, **options, **fused)  # type: ignore[call-arg]
            except Exception as error:
                problem = error if which else problem
        raise problem

    def make(params: list[nn.Parameter]) -> Optimizer:
        wrappers = importlib.import_module("torch.distributed.optim")  # warns, of torch.jit
        optimizer = plain(params)
        if wrapper == "Lookahead":
            import_torchvision()
            optimizer = importlib.import_module("timm.optim").Lookahead(optimizer, k=2)
        elif wrapper == "PostLocalSGD":
            optimizer = wrappers.PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(2, warmup_steps=0))
        elif wrapper == "compiled":
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        elif wrapper == "hook":  # decoupled weight decay by hand
            optimizer.register_step_post_hook(lambda *_: [p.data.mul_(0.9) for p in weights_in(optimizer)])
        for each in (optimizer, *inner_optimizers(optimizer)):
            getattr(each, "train", lambda: None)()  # schedulefree
        return optimizer

    return make


def has_fused(cls: type[Optimizer]) -> bool:
    return "fused" in inspect.signature(cls).parameters


def weights_in(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_hand(mode: str, make: Make, *, reloads: bool) -> list[Any]:
    """Plain PyTorch. `reloads`: with a fresh optimizer by `load_state_dict` where ours loads a checkpoint."""
    net, low = net_of(), MODES[mode] if mode in LOW else None
    sides = [nn.Parameter(p.detach().clone()) if low else p for p in net.parameters()]
    if low:
        net.to(low)
    optimizer, scale, num_taken, losses = make(sides), SCALE if mode in ("fp16", "o2") else 1.0, 0, []
    low_of = {id(side): p for side, p in zip(sides, net.parameters(), strict=True)}
    pairs = [(side, low_of[id(side)]) for side in weights_in(optimizer)]  # in the order of the noise
    for step, _ in enumerate(GOOD):
        if step == SAVED and reloads:
            state, optimizer = optimizer.state_dict(), make(sides)
            optimizer.load_state_dict(state)
        with torch.autocast("cpu", dtype=MODES[mode] or torch.bfloat16, enabled=mode in ("bf16", "fp16")):
            loss = net(batch(step).to(low or torch.float32)).float().square().mean()
        (loss * scale).backward()
        for side, p in pairs:
            grad = p.grad.float() / scale  # type: ignore[union-attr]
            p.grad, side.grad = None, grad
            side.data = p.detach().float() if mode == "bf16_pure" else side.data
        taken = all(bool(side.grad.isfinite().all()) for side, _ in pairs)  # type: ignore[union-attr]
        if taken:
            torch.manual_seed(step)
            optimizer.step()
            noise = iter(
                noise_16bit(sum(s.numel() for s, _ in pairs), torch.tensor(num_taken)).split(
                    [s.numel() for s, _ in pairs]
                )
            )
            for side, p in pairs if low else ():
                p.data.copy_(round_stochastically(side.detach(), next(noise)) if mode == "bf16_pure" else side.detach())
            num_taken += 1
        else:
            scale /= 2
        optimizer.zero_grad()
        net.zero_grad()
        losses += [loss.detach(), taken]
    return [losses, list(map(torch.Tensor.detach, net.parameters())), facts(optimizer)]


def by_amp(mode: str, make: Make, folder: Path, **options: Any) -> list[Any]:
    """The same with `Amp` and `Checkpoint`. Refused: an error that names the optimizer, and no weight has changed."""

    def build() -> tuple[nn.Module, Amp, Optimizer, Checkpoint]:
        net, amp = net_of(), Amp.named(mode, **({"init_scale": SCALE} if mode in ("fp16", "o2") else {}))  # type: ignore[arg-type]
        amp.prepare(net)
        optimizer = make(master_params(net))
        return net, amp, optimizer, Checkpoint(folder, **options, model=net, optimizer=optimizer, scaler=amp)

    net, amp, optimizer, checkpoint = build()
    losses = []
    for step, good in enumerate(GOOD):
        before = [p.detach().clone() for p in net.parameters()]
        try:
            if step == SAVED:
                checkpoint.save(step)
                net, amp, optimizer, checkpoint = build()
                checkpoint.load()
            with amp.autocast():
                loss = net(batch(step)).float().square().mean()
            amp.backward(loss)
            torch.manual_seed(step)
            taken = bool(amp.step(optimizer).taken)
        except Exception as problem:
            if step != SAVED and not all(map(torch.equal, before, net.parameters())):
                raise
            raise Refused(f"{type(problem).__name__}: {problem}") from problem
        assert good or not taken
        amp.update()
        optimizer.zero_grad()
        losses += [loss.detach(), taken]
    return [losses, list(map(torch.Tensor.detach, net.parameters())), facts(optimizer)]


def facts(optimizer: Optimizer) -> list[Any]:
    """The state of an optimizer and of those inside it, and what else is in their groups."""
    found: list[Any] = []
    for each in inner_optimizers(optimizer) or [optimizer]:
        found += [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
        found += [each.state.get(p, {}) for p in weights_in(each)]
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        kinds = (a.shape, a.dtype) == (b.shape, b.dtype)
        return kinds and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return same(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, float | Tensor) else a == b


def verdict(cls: type[Optimizer], wrapper: str, mode: str, folder: Path) -> tuple[str, str]:
    """("right", "refused", "not tried" or "wrong", the sentence)."""
    make = maker(cls, wrapper)
    try:
        expected = by_hand(mode, make, reloads=False)
    except Exception as problem:
        return "not tried", f"by hand {type(problem).__name__}: {problem}"
    try:
        found = by_amp(mode, make, folder)
    except Refused as sentence:
        try:
            by_hand(mode, make, reloads=True)
        except Exception as problem:
            return "not tried", f"its own state dict raises {type(problem).__name__}: {problem}"
        return "refused", str(sentence)
    if same(found, expected):
        return "right", ""
    if not same(expected, by_hand(mode, make, reloads=False)):
        return "not tried", "two runs by hand differ"
    try:
        if same(found, by_hand(mode, make, reloads=True)):
            return "right", "as after its own load_state_dict, which loses some of its state"
    except Exception as problem:
        return "wrong", f"its own load_state_dict raises {type(problem).__name__}: {problem}"
    parts = [name for name, a, b in zip(("losses", "weights", "state"), found, expected, strict=True) if not same(a, b)]
    return "wrong", f"{' and '.join(parts)} differ"


def wrappers_of(package: str) -> Sequence[str]:
    """A wrapper is the same around any optimizer, so most are put around torch's alone."""
    return WRAPPERS if package == "torch.optim" else ("plain", "Lookahead")


def verdicts(package: str, wrapper: str, folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """(name, mode, verdict, sentence) of each optimizer. Wrappers of others: in fp16."""
    if wrapper == "Lookahead":
        classes("timm.optim")
    modes = ["fp32", "fp16"] if wrapper == "compiled" else MODES
    modes = modes if package == "torch.optim" or wrapper == "plain" else ["fp16"]
    for (name, cls), mode in itertools.product(classes(package).items(), modes):
        if wrapper == "plain" or wrapper not in ("fused", "subclass", "hook") or has_fused(cls):
            with torch.compiler.set_stance("force_eager") if "torchao" in package else nullcontext():  # it compiles
                yield name, mode, *verdict(cls, wrapper, mode, folder / f"{name}_{mode}")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Of one rank, for the wrappers of torch.distributed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ROWS = [(package, wrapper) for package in PACKAGES for wrapper in wrappers_of(package)]


@pytest.mark.slow
@pytest.mark.parametrize("package, wrapper", ROWS)
def test_it_is_the_same_loop_by_hand_or_refused_by_name(package: str, wrapper: str, tmp_path: Path) -> None:
    found = list(verdicts(package, wrapper, tmp_path))
    assert [row for row in found if row[2] == "wrong"] == []
    assert any(row[2] in ("right", "refused") for row in found)  # torchao's states are no plain tensors
    for name, _, kind, sentence in found:
        assert kind != "refused" or name in sentence or "optimizer" in sentence, sentence
        if package == "torch.optim" and not (name == "Adadelta" and wrapper == "compiled"):
            assert kind == ("not tried" if name in ("LBFGS", "SparseAdam") else "right"), (name, sentence)
