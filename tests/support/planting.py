"""How a fault is planted into a recipe, in place of its network, data, a function or a loss, and what is to be found."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core.data.loading import Sampler

INF, NAN = float("inf"), float("nan")
Patch = Callable[[Any, str, Any], None]
Plant = Callable[[Any, Patch, bool], None]
"""(module of the recipe, setattr that is undone after the test, mended)"""


@dataclass(frozen=True)
class Fault:
    """A fault, and what is to be found."""

    name: str
    recipe: str
    plant: Plant
    cause: str
    op: str = ""
    module: str | None = None
    code: str = ""
    """The line that is to be named, as it stands in its file; when empty, that of the function that was planted."""
    phase: str = "forward"
    settings: tuple[str, ...] = ("amp=fp16",)
    mended: tuple[str, ...] = ()
    """What mends it, where a setting plants it."""
    step: int = 1
    fix: str = "override"
    """Kind of the first fix."""
    islands: tuple[str, ...] | None = None
    """Exactly these, if not None."""
    override: str = ""
    """The first fix is exactly this one, if not empty."""
    tensor: str = ""
    """What was not finite from the start."""
    samples: tuple[int, ...] | None = None
    """Indices in the data set; not asked for when None."""


def in_net(change: Callable[[Any, bool], Any], *, number: int = 0) -> Plant:
    """`change(net, mended)` after the network was built; it may return another one.

    Args:
        number: of the networks that the recipe builds.
    """

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        build, built = recipe.build_model, []

        def build_faulty(*args: Any, **kwargs: Any) -> nn.Module:
            net = build(*args, **kwargs)
            built.append(net)
            with torch.no_grad():
                made = change(net, mended) if len(built) == number + 1 else None
            return made if isinstance(made, nn.Module) else net

        patch(recipe, "build_model", build_faulty)

    return plant


def in_function(name: str, faulty: Any, mended: Any = None) -> Plant:
    """In place of a function, or a table of functions, of the recipe's module."""

    def plant(recipe: Any, patch: Patch, is_mended: bool) -> None:
        if not is_mended:
            patch(recipe, name, faulty)
        elif mended is not None:
            patch(recipe, name, mended)

    return of(plant, faulty["logits"] if isinstance(faulty, dict) else faulty)


def of(plant: Plant, function: Any) -> Plant:
    """The plant of a function, whose line is to be named."""
    plant.function = function  # type: ignore[attr-defined]
    return plant


def in_functional(**functions: Callable[..., Any]) -> Plant:
    """In place of functions of `torch.nn.functional`, as this recipe sees it."""

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        if not mended:
            patch(recipe, "F", types.SimpleNamespace(**(vars(F) | functions)))

    return of(plant, next(iter(functions.values())))


def in_samples(bad: dict[int, float]) -> Plant:
    """One number in each of these samples of the data set, by index."""

    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        build = recipe.build_data

        def build_faulty(*args: Any, **kwargs: Any) -> Any:
            data = build(*args, **kwargs)
            return replace(data, train=Spoilt(data.train, {} if mended else bad))

        patch(recipe, "build_data", build_faulty)

    return plant


class Spoilt:
    """A data set, some of whose samples hold a bad number."""

    def __init__(self, dataset: Any, bad: dict[int, float]) -> None:
        self.dataset, self.bad = dataset, bad

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Any) -> Any:
        batch = self.dataset.__getitems__(keys)
        for row, (index, _) in enumerate(keys):
            if index in self.bad:
                batch[0][row, 0, 1, 1] = self.bad[index]
        return batch


def both(*plants: Plant) -> Plant:
    def plant(recipe: Any, patch: Patch, mended: bool) -> None:
        for each in plants:
            each(recipe, patch, mended)

    return of(plant, next((each.function for each in plants if hasattr(each, "function")), None))  # type: ignore[attr-defined]


def drawn(row, *, step=1, micro=0, accumulation=1, num_samples=96, rank=0, num_ranks=1) -> int:
    """Index of a sample that is drawn with batches of 4."""
    split = {"batch_size": 4, "accumulation": accumulation, "rank": rank, "world_size": num_ranks}
    batches = iter(Sampler(num_samples, seed=0, start_sample=(step - 1) * accumulation * 4 * num_ranks, **split))
    return [next(batches) for _ in range(accumulation)][micro][row][0]


class Slot(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def in_slot(name: str, faulty: Callable[[Tensor], Tensor], mended: Callable[[Tensor], Tensor] | None = None) -> Plant:
    """In place of a module of this name."""

    def change(net: nn.Module, is_mended: bool) -> None:
        net.set_submodule(name, Slot((mended or nn.Identity()) if is_mended else faulty))

    return of(in_net(change), faulty)


def grown(*names: str, largest: float = 3e4, number: int = 0) -> Plant:
    """Layers whose weights are so large that their products overflow fp16, but not the weights."""

    def change(net: nn.Module, mended: bool) -> None:
        for name in () if mended else names:
            weight = net.get_parameter(f"{name}.weight")
            weight.mul_(largest / weight.abs().max())

    return in_net(change, number=number)
