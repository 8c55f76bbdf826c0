"""The doctor on networks of timm and transformers, each healthy and with three faults: needs both packages.

The loop is torch's own: autocast to fp16, `GradScaler`. A fault counts only if the loop is not finite. Each is located at
its module and line, or its weight; its cause is named; each change that is printed as tried lets the
loop take its step; and without the fault, or with what the report asks for, the doctor is silent. Four networks;
all sixteen with FOREIGN_MODELS=all.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import NEEDED, TIMM, TRANSFORMERS, Batch, Foreign, chosen
from torch import Tensor, nn

from amp_core import Amp, Diagnosis, Doctor, keep_fp32

pytestmark = NEEDED
INF, NAN = float("inf"), float("nan")
SAMPLES = 4
ROOT = Path(__file__).resolve().parents[2]
TORCH = str(Path(torch.__file__).parent)


# --- faults in the code: what a module does with its result -----------------------------------------------------------


def eps_lost(y: Tensor) -> Tensor:
    y = y * (torch.arange(len(y)) > 0).to(y.dtype).view(-1, *[1] * (y.ndim - 1))  # a sample that was dropped
    return y / (y.square().mean(-1, keepdim=True).sqrt().detach() + 1e-8)


def eps_kept(y: Tensor) -> Tensor:
    y = y * (torch.arange(len(y)) > 0).to(y.dtype).view(-1, *[1] * (y.ndim - 1))
    return y / (y.square().mean(-1, keepdim=True).sqrt().detach() + 1e-3)


def empty_row(y: Tensor) -> Tensor:
    mask = torch.zeros_like(y)
    mask[0] = -INF
    return y * torch.softmax(y + mask, -1)


def kept_row(y: Tensor) -> Tensor:
    mask = torch.zeros_like(y)
    mask[0, ..., 1:] = -INF
    return y * torch.softmax(y + mask, -1)


def large_exp(y: Tensor) -> Tensor:
    return torch.exp(12 * y.abs() / y.abs().max().detach())


def exp_in_fp32(y: Tensor) -> Tensor:
    return torch.exp(12 * y.float().abs() / y.abs().max().detach()).log1p()


IN_CODE: dict[Callable[[Tensor], Tensor], tuple[Callable[[Tensor], Tensor], str]] = {
    eps_lost: (eps_kept, "eps lost in 16 bits"),
    empty_row: (kept_row, "nothing left by a mask"),
    large_exp: (exp_in_fp32, "overflow in a function"),
}
"""The fault: the same with what the doctor asks for, and the cause."""


def patch(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    cls = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return function(cls.forward(self, *args, **kwargs))

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward})


# --- a loop, and what is true of it -----------------------------------------------------------------------------------


@dataclass
class Case:
    """A network with a fault, and what is to be said of it."""

    model: Foreign
    fault: str
    net: nn.Module
    batch: Batch
    cause: str = ""
    module: str | None = None
    lines: set[str] = field(default_factory=set)
    """file:line of the operation at fault."""
    tensor: str = ""
    scale: float = 0.0
    """0: the largest up to 1024 at which the network without the fault is finite."""
    mended: nn.Module | None = None

    def __post_init__(self) -> None:
        self.scale = self.scale or fitting(self.model)

    def step(
        self,
        net: nn.Module | None = None,
        scale: float | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> Any:
        """The loop that a user has; whether its last step was taken."""
        net = self.net if net is None else net
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        scaler, taken = torch.amp.GradScaler("cpu", init_scale=scale or self.scale), []

        def step() -> bool:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = self.model.loss(net, self.batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            taken.append(all(bool(each.isfinite().all()) for each in (loss, *grads)))
            scaler.step(optimizer)
            scaler.update()
            return taken[-1]

        return step

    def is_finite(self, *args: Any, **kwargs: Any) -> bool:
        torch.manual_seed(1)
        return self.step(*args, **kwargs)()


@functools.cache
def fitting(model: Foreign) -> float:
    return fit(Case(model, "", *seeded(model), scale=1024.0))


def fit(case: Case) -> float:
    """The largest scale up to 1024 at which the loop is finite; 0: there is none."""
    scales = (2.0**exponent for exponent in range(10, -1, -1))
    return next((scale for scale in scales if case.is_finite(copy.deepcopy(case.net), scale)), 0.0)


def seeded(model: Foreign) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return model.build(), model.batch(SAMPLES)


@dataclass
class Called:
    """A module without children in the forward pass."""

    name: str
    kind: str
    largest: float
    lines: set[str]
    """Where torch's module is called, or that of a library computes."""


def called(model: Foreign, net: nn.Module, batch: Batch) -> list[Called]:
    """What is called once, in order."""
    found: list[Called] = []
    names = {module: name for name, module in net.named_modules()}

    def seen(module: nn.Module, inputs: Any, output: Any) -> None:
        lines = lines_of(type(module).forward)
        if any(line.startswith(TORCH) for line in lines):
            stack = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith((TORCH, "<"))]
            lines = {f"{stack[-1].filename}:{stack[-1].lineno}"}
        largest = output.detach().abs().max().item() if isinstance(output, Tensor) else 0.0
        found.append(Called(names[module], type(module).__name__, largest, lines))

    hooks = [m.register_forward_hook(seen) for m in names if [*m.parameters(recurse=False)]]
    torch.manual_seed(1)
    with torch.no_grad():
        model.loss(net, batch)
    for hook in hooks:
        hook.remove()
    return [each for each in found if sum(each.name == other.name for other in found) == 1]


def products(model: Foreign, net: nn.Module, batch: Batch, at: float = 0.5) -> list[Called]:
    """Modules that multiply by a matrix, those near this share of the pass first."""
    kinds = ("Linear", "Conv2d", "Conv1d", "Conv1D")
    found = [each for each in called(model, net, batch) if each.kind in kinds]
    return sorted(found, key=lambda each: abs(found.index(each) - len(found) * at))


def lines_of(function: Callable[..., Any]) -> set[str]:
    code = function.__code__
    return {f"{code.co_filename}:{line}" for *_, line in code.co_lines() if line and line > code.co_firstlineno}


def without_fault(case: Case) -> Case:
    """With scale 0 where the loop is not finite at any."""
    net, batch = seeded(case.model) if case.mended is None else (case.mended, case.batch)
    twin = Case(case.model, "", net, batch)
    twin.scale = fit(twin)  # what mends the forward pass may have steep gradients, as an eps of 1e-6 has
    return twin


def first_broken(cases: Iterator[Case]) -> Case:
    """The first that is a fault: many an infinity is swallowed by a sigmoid or a ReLU6 behind it.

    And whose loop is finite without it, which depends on the kernels of this CPU.
    """
    return next(case for case in cases if not case.is_finite() and without_fault(case).scale)


def large_weight(model: Foreign) -> Iterator[Case]:
    net, batch = seeded(model)
    for each in products(model, net, batch):
        faulty = copy.deepcopy(net)
        with torch.no_grad():
            weight = faulty.get_submodule(each.name).weight.mul_(4 * 65504 / each.largest)  # type: ignore[operator]
        cause = "overflow in a cast" if weight.abs().max() > 65504 else "overflow in a product"
        yield Case(model, "large weight", faulty, batch, cause, each.name, each.lines, mended=net)


def poisoned_weight(model: Foreign) -> Iterator[Case]:
    net, batch = seeded(model)
    for each in products(model, net, batch, 0.25):
        faulty = copy.deepcopy(net)
        with torch.no_grad():
            faulty.get_submodule(each.name).weight.view(-1)[0] = NAN  # type: ignore[operator]
        tensor = f"weight {each.name}.weight"
        yield Case(
            model, "poisoned weight", faulty, batch, "poisoned weight", each.name, each.lines, tensor, mended=net
        )


def in_code(function: Callable[[Tensor], Tensor]) -> Callable[[Foreign], Iterator[Case]]:
    def cases(model: Foreign) -> Iterator[Case]:
        net, batch = seeded(model)
        mended, cause = IN_CODE[function]
        for each in products(model, net, batch, 0.75):
            faulty, right = copy.deepcopy(net), copy.deepcopy(net)
            patch(faulty.get_submodule(each.name), function)
            patch(right.get_submodule(each.name), mended)
            name = function.__name__.replace("_", " ")
            yield Case(model, name, faulty, batch, cause, each.name, lines_of(function), mended=right)

    return cases


# --- what is asked of the doctor --------------------------------------------------------------------------------------


IN_TURN = {
    model.name: function for model, function in zip((*TIMM, *TRANSFORMERS), itertools.cycle(IN_CODE), strict=False)
}


def diagnose(case: Case) -> Diagnosis | None:
    torch.manual_seed(1)
    return Doctor(Amp.named("fp16"), case.net).locate(case.step(), case.batch)


def is_located(case: Case, diagnosis: Diagnosis) -> bool:
    if case.tensor:
        return diagnosis.tensor == case.tensor
    path, _, line = diagnosis.source.rpartition(":")
    return diagnosis.module == case.module and f"{(ROOT / path).resolve() if path else ''}:{line}" in case.lines


def cured(case: Case, python: str) -> bool:
    """Whether the loop takes its step with a change that was printed as tried."""
    model, scale = copy.deepcopy(case.net), re.search(r"init_scale=([^,)]+)", python)
    for line in python.split("; "):
        if line.startswith("keep_fp32"):
            exec(line, {"keep_fp32": keep_fp32, "model": model})
    dtype = torch.bfloat16 if "dtype=torch.bfloat16" in python else torch.float16
    return case.is_finite(model, scale=float(scale[1]) if scale else None, dtype=dtype)


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize("model", chosen(IN_TURN, "vit_tiny_patch16_224", "mobilenetv3_small_100", "llama", "t5"))
def test_faults_in_networks_of_others_are_found_and_cured(model: Foreign) -> None:
    assert diagnose(Case(model, "", *seeded(model))) is None
    for make in (large_weight, poisoned_weight, in_code(IN_TURN[model.name])):
        case = first_broken(make(model))
        before = copy.deepcopy(case.net.state_dict())
        diagnosis = diagnose(case)
        after = case.net.state_dict()
        assert all(torch.equal(after[k].nan_to_num(), before[k].nan_to_num()) for k in before), "the state has changed"
        assert diagnosis is not None and is_located(case, diagnosis), (case.fault, str(diagnosis))
        assert diagnosis.cause == case.cause, (case.fault, str(diagnosis))
        assert all(cured(case, fix.python) for fix in diagnosis.fixes if fix.verified), (case.fault, str(diagnosis))
        assert diagnose(without_fault(case)) is None, case.fault
