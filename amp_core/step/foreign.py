"""Optimizers of installed packages, by `optimizer.name=<module.Class>`.

A configuration may come from anywhere, and importing a package runs its code: so it has to be a known one, or that of
`optimizer.package`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from amp_core.config.errors import suggest
from amp_core.step.gradients import weights_of
from amp_core.step.steppable import arguments_without_default
from amp_core.vision import import_torchvision

KNOWN = "bitsandbytes", "muon", "prodigyopt", "pytorch_optimizer", "schedulefree", "timm", "torch_optimizer", "torchao"
"""The packages of docs/OPTIMIZERS.md."""


def find_optimizer(name: str, package: str | None) -> type[Optimizer]:
    """The class of `optimizer.name`. ValueError: there is none, or it may not be imported."""
    top, module, kind = name.partition(".")[0], *name.rpartition(".")[::2]
    if top not in (*KNOWN, package):
        raise ValueError(f"imports the package {top} only if asked: add optimizer.package={top}")
    if not _is_installed(top):
        raise ValueError(f"needs the package {top}, which is not installed: pip install {top}")
    if top == "torchao":
        if kind != "AdamW8bit":
            raise ValueError("has tensors of its own as state, which checkpoints do not take; use optimizer=adamw_8bit")
        from amp_core.lowp.adam8 import AdamW8bit  # saves plain tensors

        return AdamW8bit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, about itself
        if top == "timm":
            import_torchvision()
        try:
            found = importlib.import_module(module)
        except Exception as problem:  # foreign code may raise anything
            raise ValueError(f"{module} cannot be imported: {type(problem).__name__}: {problem}") from problem
    classes = {key: cls for key, cls in vars(found).items() if inspect.isclass(cls) and issubclass(cls, Optimizer)}
    classes.pop("Optimizer", None)
    if kind not in classes:
        raise ValueError(f"{module} has no such optimizer. {suggest(kind, classes)}")
    if needs := arguments_without_default(classes[kind].step):
        raise ValueError(f"its step needs {', '.join(needs)}, which no loss scale and no skipped step fit")
    return classes[kind]


def _is_installed(package: str) -> bool:
    """Whether it is a distribution's: not torch's neighbour in the standard library, nor a file in this folder."""
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        return False
    places = (sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    return any(Path(spec.origin).is_relative_to(place) for place in places) or package in packages_distributions()


@contextlib.contextmanager
def averaged(optimizers: Iterable[Any]) -> Iterator[None]:
    """Within: the weights are the average at which a schedule-free optimizer is evaluated (arXiv:2405.15682)."""
    # Its `eval` and `train` are inverse up to rounding alone, so the weights of training are copied and put back.
    kept = [(each, [p.detach().clone() for p in weights_of(each)]) for each in optimizers if hasattr(each, "eval")]
    try:
        for each, _ in kept:
            each.eval()
        yield
    finally:
        for each, values in kept:
            each.train()
            for param, value in zip(weights_of(each), values, strict=True):
                param.data.copy_(value)
