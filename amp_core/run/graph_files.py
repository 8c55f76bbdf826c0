"""export.to=onnx and pt2: the graph of a network in fp32, compared with the network before it is published.

The network is built again from its options, with plain fp32 weights: without what a mode or a layout has changed in it.
Its inputs are those that the recipe's own evaluation calls it with. The first dimension of each is dynamic.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core import __version__
from amp_core.checkpoints.plain_state import all_tensors
from amp_core.config.errors import ConfigError, SaveError
from amp_core.config.files import write_file
from amp_core.models.family import built_again
from amp_core.tensors import unwrap

_MOST_SAMPLES = 8
_MOST_BYTES = 2**31
"""An ONNX file with its weights is one protobuf, which ends here."""
_OTHER = "use export.to=safetensors"
METADATA = "metadata.json"
"""What `torch.export.load(file, extra_files={METADATA: ""})` fills in."""
Weights = dict[str, Tensor]
Run = Callable[[dict[str, Tensor]], list[Tensor]]
"""The outputs of a network or a file for its inputs by name."""


def write(loop: Any, net: nn.Module, weights: Weights, target: Path) -> list[str]:
    """Write what `torch.export.load` reads, with `METADATA` in it, or an ONNX file, with each entry of it as JSON.

    Raises:
        ConfigError: the network cannot be traced.
        SaveError: what was written computes something else.
    """
    to, (twin, inputs, num) = loop.cfg.export.to, _plain(loop, net, weights)
    if to == "onnx" and (size := sum(each.nbytes for each in twin.state_dict().values())) >= _MOST_BYTES:
        raise ConfigError(f"export.to=onnx: {size / 2**30:.1f} GiB of weights, a file has 2 GiB at most; use pt2")
    args, kwargs = tuple(inputs.values())[:num], {name: inputs[name] for name in [*inputs][num:]}
    about, content, batch = metadata(loop, inputs), io.BytesIO(), torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in inputs}
    with _quiet():
        try:
            program = torch.export.export(twin, args, kwargs, dynamic_shapes=shapes)
            if to == "pt2":
                torch.export.save(program, content, extra_files={METADATA: json.dumps(about, ensure_ascii=False)})
            else:
                names_of = {"input_names": [*inputs], "dynamic_shapes": shapes}
                made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names_of)
                made.model.metadata_props.update(
                    {key: json.dumps(value, ensure_ascii=False) for key, value in about.items()}
                )
                made.model.producer_name, made.model.producer_version = "amp-recipes", __version__
                made.save(content, external_data=False)
        except Exception as error:  # tracers raise any type, with many lines
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(
                f"export.to={to}: model.name={loop.cfg.model.name} cannot be traced: {reason}; {_OTHER}"
            ) from error
        write_file(target, content.getbuffer())
        if to == "pt2":
            module = torch.export.load(io.BytesIO(target.read_bytes())).module()
            return [compare(loop, twin, inputs, num, lambda given: _outputs(module, given, num))]
        runtime = importlib.import_module("onnxruntime")
        session = runtime.InferenceSession(str(target), providers=["CPUExecutionProvider"])

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        found = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        return [torch.from_numpy(each) for each in found]

    return [compare(loop, twin, inputs, num, run)]


def metadata(loop: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """What a program needs to use the network: inputs, what was done to make them, classes, and where it is from."""
    shapes = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": ["batch", *tensor.shape[1:]]}
        for name, tensor in inputs.items()
    }
    return {
        "inputs": shapes,
        "preprocessing": getattr(loop.data.eval, "preprocessing", None),
        "classes": loop.classes,
        "recipe": loop.cfg.recipe["name"],
        "model": loop.cfg.model.name,
        "step": loop.step,
        "averaged": loop.ema is not None,
        "trained_in": loop.cfg.amp.name,
        "version": f"amp-recipes {__version__}",
    }


def _plain(loop: Any, net: nn.Module, weights: Weights) -> tuple[nn.Module, dict[str, Tensor], int]:
    """(the network built again, its inputs by name, how many of them are given by position)."""
    args, kwargs = _call_of(loop, net)
    if (twin := built_again(unwrap(loop.model))) is None:
        raise ConfigError(f"export.to={loop.cfg.export.to}: the recipe makes its network without build_model; {_OTHER}")
    own = dict(twin.named_parameters(remove_duplicate=False)) | dict(twin.named_buffers(remove_duplicate=False))
    missing, unknown = twin.load_state_dict(weights, strict=False)
    there = {id(own[name]) for name in weights.keys() & own.keys()}  # tied weights may have one name
    if unknown or any(id(own[name]) not in there for name in missing):
        raise ConfigError(
            f"export.to={loop.cfg.export.to}: the recipe trains another network than model.name={loop.cfg.model.name} "
            f"({', '.join([*missing, *unknown][:2])}); {_OTHER}"
        )
    bound = inspect.signature(twin.forward).bind(*args, **kwargs).arguments
    tensors = {name: value.cpu() for name, value in bound.items() if isinstance(value, Tensor) and name != "targets"}
    num = min(_MOST_SAMPLES, *map(len, tensors.values()))
    inputs = {name: tensor[:num] if num > 1 else torch.cat([tensor] * 2) for name, tensor in tensors.items()}
    return twin.eval().requires_grad_(False), inputs, len(args)


class _Called(Exception):
    pass


def _call_of(loop: Any, net: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first call of the network in the recipe's evaluation."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    hook = net.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with loop.env.eagerly(), torch.no_grad():
            loop.evaluation.evaluate(net.eval())
    except _Called as call:
        return call.args
    finally:
        hook.remove()
    raise ConfigError(f"export.to={loop.cfg.export.to}: the evaluation of the recipe does not call its network")


def _outputs(net: Callable[..., Any], given: dict[str, Tensor], num: int) -> list[Tensor]:
    args = [*given.values()][:num]
    return [*all_tensors(net(*args, **{name: given[name] for name in [*given][num:]}))]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters warn about their own insides."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


@torch.no_grad()
def compare(loop: Any, twin: nn.Module, inputs: dict[str, Tensor], num: int, run: Run) -> str:
    """Compare a file with the network, for one sample and for several, and say how far apart they are.

    Both sum in fp32, each in its own order. How far an order of sums is from the exact result is measured in float64,
    for the network: E, at least eps of the largest output. Another order is as far away, within a small factor.

    Raises:
        SaveError: they are further apart.
    """
    known = _outputs(twin, inputs, num)
    wide = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    exact = _outputs(copy.deepcopy(twin).double(), wide, num)
    apart, bound, largest = 0.0, 0.0, 0.0
    for given in (inputs, {name: tensor[:1] for name, tensor in inputs.items()}):
        for found, expected, reference in zip(run(given), known, exact, strict=True):
            expected = expected[: len(found)].double()
            size = expected.abs().max().item()
            error = (expected - reference[: len(found)].double()).abs().max().item()
            largest_here = 8 * (error + torch.finfo(torch.float32).eps * size)
            difference = (found.double() - expected).abs().max().item()
            if not difference <= largest_here:
                raise SaveError(
                    f"export.to={loop.cfg.export.to}: the file computes something else: {difference:.3g} from the "
                    f"network, outputs up to {size:.3g}, expected at most {largest_here:.3g}; {_OTHER}"
                )
            apart, bound, largest = max(apart, difference), max(bound, largest_here), max(largest, size)
    return f"compared: at most {apart:.2g} from the network in fp32 (bound {bound:.2g}), outputs up to {largest:.3g}"
