"""The doctor on a draw of the operators that torch tests, clean and with a planted inf, NaN or huge number.

An operator with a sample of its inputs is a network of one line. Its window is computed without the doctor and under
it: the loss and the gradients are the same bits, weights are left as they were, a diagnosis ends without an exception,
and there is one where the window is not finite and none where it is. What torch itself refuses is counted apart.
In a process of its own: the list of operators changes torch's settings, and torch may end where numbers are not finite.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

ROOT = Path(__file__).resolve().parents[2]
CASES = 200
UNWRITTEN = ("empty", "new_empty", "resize")
"""How the names begin of operators whose results hold no numbers."""
PLANTED = {"clean": None, "inf": math.inf, "NaN": math.nan, "huge": 3e38}
CONDITIONS = ("fp32", "fp16", "vmap", "grad")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_operator_ends_a_diagnosis_or_is_changed_by_it():
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    # Of four planted numbers three are not finite or end so, and torch computes most cases.
    assert counts["tried"] > counts["refused"] and counts["poisoned weight"] and counts["silent"]


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def total(values: Any) -> Tensor:
    """The sum of all numbers with fractions in a result."""
    found = [each for each in tree_flatten(values)[0] if is_number(each)]
    return sum((each.sum().real if each.is_complex() else each.sum()).float() for each in found) + torch.ones(())


class Operator(nn.Module):
    """One line of a network: an operator, whose inputs with fractions are its weights."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self._op = op
        leaves, self._spec = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
        self._rest = [each.detach().clone() if isinstance(each, Tensor) else each for each in leaves]
        self.at = [i for i, each in enumerate(leaves) if is_number(each) and op.supports_autograd]
        self.weights = nn.ParameterList(nn.Parameter(self._rest[i]) for i in self.at)
        self.scale = nn.Parameter(torch.ones(()))

    def line(self, *weights: Tensor) -> Tensor:
        leaves = [each.clone() if isinstance(each, Tensor) else each for each in self._rest]
        for i, weight in zip(self.at, weights, strict=True):
            leaves[i] = weight * 1.0  # not a leaf of autograd: it may be written
        given, args, kwargs = tree_unflatten(leaves, self._spec)
        return total(self._op(given, *args, **kwargs))

    def forward(self, condition: str) -> Tensor:
        weights, line = list(self.weights), self.line
        if condition == "vmap":
            weights = [torch.stack([each, each]) for each in weights]
            return torch.func.vmap(line, randomness="different")(*weights).sum() * self.scale
        if condition == "grad":
            line = torch.func.grad(line, argnums=tuple(range(len(weights))))
        with torch.autocast("cpu", torch.float16, enabled=condition == "fp16"):
            return total(line(*weights)) * self.scale


class Bare(TorchDispatchMode):
    """Sees operations, and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def outcome(op: Any, condition: str, planted: str, lost: list[BaseException], rng: random.Random) -> str:
    """What the doctor says of one window: `silent`, or a cause. `refused`: torch computes no such window."""
    from amp_core import Amp, Doctor
    from amp_core.doctor.values import is_finite, same

    def alike(a: Any, b: Any) -> bool:
        dense = (
            [x.to_dense() if isinstance(x, Tensor) and x.layout is not torch.strided else x for x in each]
            for each in (a, b)
        )
        return all(x is y or (x is not None and y is not None and same(x, y)) for x, y in zip(*dense, strict=True))

    kinds = (torch.float32, torch.complex64, torch.int64, torch.bool)
    torch.manual_seed(0)
    try:
        dtype = next(each for each in kinds if each in op.dtypes)
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 64))
        net = Operator(op, rng.choice(samples))
    except Exception:  # of torch
        return "refused"
    if (value := PLANTED[planted]) is not None:
        places = [each for each in net.weights if each.numel() and each.layout is torch.strided]
        if "grid_sampl" in op.name or not places:  # torch itself ends the process where a place is not finite
            return "refused"
        tensor = rng.choice(places)
        at = tuple(rng.randrange(size) for size in tensor.shape)
        tensor.data[at] = min(value, torch.finfo(tensor.dtype).max) if planted == "huge" else value
    seen, seed = list[Any](), rng.randrange(2**31)

    def step() -> None:
        net.zero_grad()
        loss = net(condition)
        loss.backward()
        grads = (each.grad for each in net.parameters())
        seen.append([loss.detach().clone(), *(each if each is None else each.clone() for each in grads)])

    try:
        for _ in range(2):
            torch.manual_seed(seed)
            step()
    except Exception:
        return "refused"
    alone, is_repeated = seen[0], alike(seen[0], seen[1])
    before = [each.detach().clone() for each in net.parameters()]
    net.zero_grad()
    seen.clear()
    lost.clear()
    torch.manual_seed(seed)
    diagnosis = Doctor(Amp.named("fp16" if condition == "fp16" else "fp32"), net).locate(step)
    if lost:  # what the trace could not follow
        raise lost[0]
    json.dumps(diagnosis.to_dict() if diagnosis else None, default=str), str(diagnosis)
    assert alike(before, [each.detach() for each in net.parameters()]), "weights are not as they were"
    assert seen, "the window did not end under the doctor"
    if not is_repeated:
        return "random"
    if not alike(alone, seen[0]):
        torch.manual_seed(seed)
        with Bare():
            step()
        # torch has another formula, or does not cast, where any mode watches.
        assert alike(seen[0], seen.pop()), f"the window has other numbers under the doctor: {alone} {seen[0]}"[:300]
        return "other numbers under any dispatch mode"
    finite = all(each is None or is_finite(each) for each in alone)
    assert finite == (diagnosis is None) or (diagnosis and diagnosis.cause == "position collision"), diagnosis
    return "silent" if diagnosis is None else diagnosis.cause


def main() -> int:
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    # The package is needed by torch's own tests, not by their list of operators.
    from torch.testing._internal.common_methods_invocations import op_db

    lost = list[BaseException]()
    hears = logging.Handler()
    hears.emit = lambda record: lost.append(record.exc_info[1]) if record.exc_info else None  # type: ignore[method-assign]
    logging.getLogger("amp_recipes").addHandler(hears)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [*itertools.product([op for op in op_db if not op.name.startswith(UNWRITTEN)], CONDITIONS, PLANTED)]
    counts, failures = Counter[str](), 0
    for op, condition, planted in random.Random(0).sample(cases, CASES):
        rng = random.Random(f"0 {op.full_name} {condition} {planted}")
        try:
            counts[outcome(op, condition, planted, lost, rng)] += 1
        except Exception as error:
            failures += 1
            print(f"{op.full_name}, {condition}, {planted}: {type(error).__name__}: {error}", flush=True)
    print(json.dumps({"tried": counts.total() - counts["refused"], "failures": failures, **counts}))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
