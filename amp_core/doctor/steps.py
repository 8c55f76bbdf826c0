"""Whether the step of a finite window makes weights non-finite, and why: the optimizer, or what follows the window."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_core.doctor.diagnosis import ADVICE, BF16, BY_HAND, Diagnosis, Fix, advice_for, cause_of
from amp_core.doctor.findings import Finding, Search
from amp_core.doctor.fixes import STEPS, FixSearch
from amp_core.doctor.values import dtype_name, is_finite, own_names
from amp_core.lowp.masters import weights_by_side
from amp_core.step.gradients import weights_of
from amp_core.tensors import local

_LARGER_EPS = (1e-8, 1e-7, 1e-4)
"""torch's own for fp32, and what float16 holds: one that is no longer 0, and one that is not subnormal."""
Bad = tuple[str, Fix | None]
"""What a step makes non-finite and why, and what to change if that is known."""


def after_the_step(fixes: FixSearch) -> Search[Diagnosis | None]:
    """Whether the step of a finite window makes weights non-finite, why, and an eps that ends it."""
    bad, optimizers, is_by_torch = yield from _weights_after(fixes, 1)
    if not bad:
        return None
    if not is_by_torch and (origin := (yield from _origin_after(fixes))) is not None:
        name, finding = origin
        found = fixes.doctor.describe(finding, cause_of(finding))
        advice = advice_for(found.cause, finding)
        advice = BY_HAND if advice is BF16 else advice  # autocast has no part in a step
        found.fixes = [] if advice is None else [advice]
        found.phase = "step"
        found.why = f"The window is finite, and its step makes {name} not finite. {found.why}"
        return found
    why, advice = bad[0]
    found = Diagnosis("poisoned by the optimizer", f"The window is finite, and the step of {why}.", phase="before")
    found.amp, found.loss_scale = fixes.amp.config.name, fixes.amp.scale
    found.fixes = [advice or ADVICE[found.cause]]
    for eps in _LARGER_EPS if "because eps=" in why else ():
        if not (yield from _weights_after(fixes, STEPS, optimizers, eps))[0]:
            text = f"a larger eps of the optimizer: {eps:g}"
            found.fixes = [Fix("override", text, f"optimizer.options.eps={eps:g}", f"eps={eps:g}", True, STEPS)]
            break
    return found


def _weights_after(
    fixes: FixSearch, steps: int, optimizers: Iterable[torch.optim.Optimizer] = (), eps: float = 0.0
) -> Search[tuple[list[Bad], set[torch.optim.Optimizer], bool]]:
    """What steps make non-finite, the optimizers, and whether one of torch's own did it."""
    names = own_names(fixes.doctor.nets)
    bad, used, by_torch, losses = list[Bad](), set[torch.optim.Optimizer](), set[Tensor](), list[float]()

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if type(optimizer).__module__.startswith("torch."):
            by_torch.update(p for p in weights_of(optimizer) if not is_finite(local([p])[0]))

    with fixes.trying() as most:
        is_sound = all(fixes.agree(all(map(is_finite, names))))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["eps"] = eps
        for step in range(min(steps, most) if most > 1 and is_sound else 0):
            again = fixes.replay(ahead=step, as_trained=True, steps=True)
            with again as (rehearsal, window), register_optimizer_step_post_hook(note):
                yield window
            used |= rehearsal.optimizers
            losses.append(fixes.loss_of(rehearsal))
            bad += [] if all(fixes.agree(rehearsal.is_finite)) else [("the gradients", None)]
        bad += [("the loss", None)] if losses and max(losses) - losses[0] > abs(losses[0]) else []
        low = weights_by_side()
        for optimizer in used:
            for group in optimizer.param_groups:
                params: list[Tensor] = group["params"]
                for p in params:  # an fp32 side may have no memory between steps
                    if not is_finite(weight := local([low.get(p, p)])[0]):
                        name, kind = names.get(weight, "a weight"), type(optimizer).__name__
                        why, advice = _reason(weight, p.dtype, group, optimizer.state[p])
                        bad.append((f"{kind} makes {name} not finite: {why}", advice))
    return [each for found in fixes.agree(bad) for each in found], used, any(fixes.agree(bool(by_torch)))


def _origin_after(fixes: FixSearch) -> Search[tuple[str, Finding] | None]:
    """A weight, and the operation of an optimizer, or of the program after its step, that makes it non-finite."""
    with fixes.trying():
        again = functools.partial(fixes.replay, steps=True)
        trace, _ = yield from fixes.doctor.trace(again, in_steps=True)
        spoilt = [(name, weight) for weight, name in own_names(fixes.doctor.nets).items() if not is_finite(weight)]
        found = [(name, finding) for name, weight in spoilt if (finding := trace.origin_of(weight)) is not None]
    return next((each for on_rank in fixes.agree(found[:1]) for each in on_rank), None)


def _reason(weight: Tensor, dtype: torch.dtype, group: dict[str, Any], state: dict[str, Any]) -> Bad:
    """Why a step, computed in `dtype`, left numbers of a weight that are not finite, and what to change if known."""
    rate, at, eps = float(group["lr"]), ~weight.isfinite(), group.get("eps")
    moments = {key: local([each])[0] for key, each in state.items() if isinstance(each, Tensor) and each.ndim}
    moments = {key: each[at] for key, each in moments.items() if each.shape == weight.shape}
    if not math.isfinite(rate):
        return f"the learning rate is {rate:g}", Fix("code", "give the optimizer a finite learning rate (optimizer.lr)")
    zeros = [key for key, each in moments.items() if not each.any()]
    if zeros and eps is not None and not torch.tensor(eps).to(dtype):
        rounded = f" is 0 in {dtype_name(dtype)}" if eps else ""
        return f"it divides by 0 where {zeros[-1]} is 0, because eps={eps:g}{rounded}", None
    for key, each in moments.items():
        if each.isnan().any():
            return f"{key} is NaN", ADVICE["poisoned moment"]
        if not is_finite(each):
            smaller = "make the gradients smaller (a mean, not a sum), or keep the moments in fp32"
            return f"{key} exceeds {dtype_name(each.dtype)}", Fix("code", smaller)
    how = "is NaN" if weight.isnan().any() else f"exceeds {dtype_name(weight.dtype)}"
    return f"it {how} with a learning rate of {rate:g}", None
