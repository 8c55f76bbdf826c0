"""The doctor on every operator that torch tests: forward and backward, clean and with a planted inf, NaN or huge number.

    OMP_NUM_THREADS=1 python tests/campaign/doctor_on_operators.py 400 0       # so many cases, drawn
    OMP_NUM_THREADS=1 python tests/campaign/doctor_on_operators.py 0 3         # every eighth operator, from the third on

An operator with a sample of its inputs is a network of one line. Its window is computed without the doctor and under
it: the loss and the gradients are the same bits, weights are left as they were, a diagnosis ends without an exception,
and there is one where the window is not finite and none where it is. What torch itself refuses is counted apart.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
# The package is needed by torch's own tests, not by their list of operators.

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

from amp_core import Amp, Doctor  # noqa: E402
from amp_core.doctor.values import is_finite, same  # noqa: E402

UNWRITTEN = ("empty", "new_empty", "resize")
"""How the names begin of operators whose results hold no numbers."""
PLANTED = {"clean": None, "inf": math.inf, "NaN": math.nan, "huge": 3e38}
OTHERS = {"complex": torch.complex64, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
"""Conditions that are a dtype of the inputs."""


def is_number(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def total(values: Any) -> Tensor:
    """The sum of all numbers with fractions in a result."""
    found = [each for each in tree_flatten(values)[0] if is_number(each)]
    return sum((each.sum().real if each.is_complex() else each.sum()).float() for each in found) + torch.ones(())


class Operator(nn.Module):
    """One line of a network: an operator, whose inputs with fractions are its weights."""

    def __init__(self, op: Any, sample: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._op = op
        leaves, self._spec = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
        self._rest = [each.detach().clone() if isinstance(each, Tensor) else each for each in leaves]
        self.at = [i for i, each in enumerate(leaves) if is_number(each) and op.supports_autograd]
        self.weights = nn.ParameterList(nn.Parameter(self._rest[i]) for i in self.at)
        self.scale = nn.Parameter(torch.ones(()))

    def apply(self, *weights: Tensor) -> Any:  # type: ignore[override]
        leaves = [each.clone() if isinstance(each, Tensor) else each for each in self._rest]
        for i, weight in zip(self.at, weights, strict=True):
            leaves[i] = weight * 1.0  # not a leaf of autograd: it may be written
        given, args, kwargs = tree_unflatten(leaves, self._spec)
        return self._op(given, *args, **kwargs)

    def forward(self, how: Callable[..., Tensor]) -> Tensor:
        return how(self, list(self.weights)) * self.scale


def autocast(dtype: torch.dtype) -> Callable[..., Tensor]:
    def how(net: Operator, weights: Sequence[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype):
            return total(net.apply(*weights))

    return how


def vmapped(net: Operator, weights: Sequence[Tensor]) -> Tensor:
    stacked = [torch.stack([each, each]) for each in weights]
    return total(torch.func.vmap(lambda *each: net.apply(*each), randomness="different")(*stacked))


def differentiated(net: Operator, weights: Sequence[Tensor]) -> Tensor:
    every = tuple(range(len(weights)))
    return total(torch.func.grad(lambda *each: total(net.apply(*each)), argnums=every)(*weights))


def plain(net: Operator, weights: Sequence[Tensor]) -> Tensor:
    return total(net.apply(*weights))


CONDITIONS: dict[str, Callable[..., Tensor]] = {
    "fp32": plain,
    "fp16 autocast": autocast(torch.float16),
    "vmap": vmapped,
    "grad": differentiated,
    **dict.fromkeys(OTHERS, plain),
}


class Wrong(AssertionError):
    pass


class Bare(TorchDispatchMode):
    """Sees operations, and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def outcome(op: Any, sample: Any, condition: str, planted: str, rng: random.Random) -> str:
    """What the doctor says of one window: `silent`, or a cause. `refused`: torch computes no such window.

    Raises:
        Wrong: the doctor changed the window, or left something behind, or said what it must not.
    """
    net = Operator(op, sample, torch.float32)
    value, how = PLANTED[planted], CONDITIONS[condition]
    if value is not None:
        if "grid_sampl" in op.name:  # torch itself ends the process where a place is not finite
            return "refused"
        places = [each for each in net.weights if each.numel() and each.layout is torch.strided]
        if not places:
            return "refused"
        tensor = rng.choice(places)
        place, at = tensor.data, tuple(rng.randrange(size) for size in tensor.shape)
        place[at] = min(value, torch.finfo(tensor.dtype).max) if planted == "huge" else value
    seen = list[Any]()

    def step() -> None:
        for each in net.parameters():
            each.grad = None
        loss = net(how)
        loss.backward()
        seen.append(
            [
                loss.detach().clone(),
                *(each.grad if each.grad is None else each.grad.clone() for each in net.parameters()),
            ]
        )

    seed = rng.randrange(2**31)
    try:
        for _ in range(2):
            torch.manual_seed(seed)
            step()
    except Exception:  # of torch
        return "refused"
    alone = seen[0]
    is_repeated = alike(seen[0], seen[1])
    before = [each.detach().clone() for each in net.parameters()]
    for each in net.parameters():
        each.grad = None
    seen.clear()
    torch.manual_seed(seed)
    lost.clear()
    diagnosis = Doctor(Amp.named("fp16" if condition.startswith("fp16") else "fp32"), net).locate(step)
    if lost:
        raise lost[0]
    if diagnosis is not None:
        json.dumps(diagnosis.to_dict(), default=str), str(diagnosis)
    if not alike(before, [each.detach() for each in net.parameters()]):
        raise Wrong("weights are not as they were")
    if not seen:
        raise Wrong("the window did not end under the doctor")
    if is_repeated and not alike(alone, seen[0]):
        torch.manual_seed(seed)
        with Bare():
            step()
        if alike(seen[0], seen.pop()):  # torch has another formula, or does not cast, where any mode watches
            return "other numbers under any dispatch mode"
        raise Wrong(f"the window has other numbers under the doctor: {alone} {seen[0]}"[:300])
    finite = all(each is None or is_finite(each) for each in (alone if is_repeated else seen[0]))
    if is_repeated and finite and diagnosis is not None and diagnosis.cause != "position collision":
        raise Wrong(f"a finite window is convicted:\n{diagnosis}")
    if is_repeated and not finite and diagnosis is None:
        raise Wrong("a window that is not finite goes without a word")
    return "silent" if diagnosis is None else diagnosis.cause


def alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    dense = [
        [each.to_dense() if isinstance(each, Tensor) and each.layout is not torch.strided else each for each in x]
        for x in (a, b)
    ]
    return all(x is y or (x is not None and y is not None and same(x, y)) for x, y in zip(*dense, strict=True))


def samples_of(op: Any, condition: str) -> list[Any]:
    dtype = OTHERS.get(condition, torch.float32)
    if dtype not in op.dtypes:
        if condition in OTHERS:
            return []
        dtype = next((each for each in (torch.complex64, torch.int64, torch.bool) if each in op.dtypes), dtype)
    torch.manual_seed(0)
    try:
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 64))
    except Exception:
        return []


lost = list[BaseException]()
"""What the trace could not follow."""


class Hears(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            lost.append(record.exc_info[1])


def main(num_cases: int, part: int) -> None:
    """So many cases that are drawn, or, of 0, all of every eighth operator."""
    logging.getLogger("amp_recipes").addHandler(Hears())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ops = [op for op in op_db if not op.name.startswith(UNWRITTEN)]
    cases = [*itertools.product(ops if num_cases else ops[part::8], CONDITIONS, PLANTED)]
    counts, failures = Counter[str](), 0
    for op, condition, planted in random.Random(0).sample(cases, num_cases) if num_cases else cases:
        rng = random.Random(f"0 {op.full_name} {condition} {planted}")
        for sample in rng.sample(found := samples_of(op, condition), min(1, len(found))):
            try:
                said = outcome(op, sample, condition, planted, rng)
            except Exception as error:
                said, failures = "wrong", failures + 1
                print(f"{op.full_name}, {condition}, {planted}: {type(error).__name__}: {error}", flush=True)
            counts[said] += 1
    print(json.dumps({"tried": sum(counts.values()) - counts["refused"], "failures": failures, **counts}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
