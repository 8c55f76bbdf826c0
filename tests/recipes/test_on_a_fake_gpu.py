"""The training step of each recipe without a GPU: it never waits for one, and no tensor of the CPU gets into it.

On a fake GPU: forward passes under autocast, loss, step, schedule, average. torch's fake tensors on a GPU need a build with
CUDA for convolutions and whatever takes gradients, though no GPU; their backward pass needs one, and is replaced by
gradients without numbers. On the meta device: the same with the backward passes, in every build, but without autocast.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu, meta_device
from test_recipes import WINDOW, arguments
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from amp_core import Amp, MicroBatch
from amp_core.cli import compose
from amp_core.cli.overrides import check_overrides
from amp_core.config.job import Job
from amp_core.config.rules import build
from amp_core.run.loop import Loop
from amp_core.run.process import environment
from amp_core.step.scaler import LossScale
from recipes import RECIPES, find

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a build of torch with CUDA, and no GPU: a CPU build cannot compute with fake tensors of a GPU",
)


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _to(net: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`net.to` of fake weights: torch's own swaps their memory, which fails for those that somebody else holds."""
    twins: dict[nn.Parameter, nn.Parameter] = {}
    for module in net.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in twins:
                twins[param] = nn.Parameter(param.detach().to(*args, **kwargs), param.requires_grad)
            module._parameters[name] = None if param is None else twins[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(*args, **kwargs)
    return net


def _leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
    todo, seen = [output.grad_fn for output in outputs], set()
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def _backward(outputs: Any, *_: Any, **__: Any) -> None:
    for leaf in _leaves([outputs] if isinstance(outputs, Tensor) else outputs):
        leaf.grad = torch.empty_like(leaf)


def _grad(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, [inputs] if isinstance(inputs, Tensor) else inputs))


def _drawn(loop: Loop, random: Callable[..., Tensor], *shape: int, stream: int = 0) -> list[Tensor]:
    return [random(loop.cfg.batch_size, *shape, device=loop.env.device) for _ in range(loop.feed.accumulation)]


_init = Amp.__init__


def _amp_on_meta(amp: Amp, config: Any, device: torch.device, **options: Any) -> None:
    """It knows the CPU and GPUs. The mode's scale, without its autocast."""
    _init(amp, replace(config, dtype="float32"), "cpu", **options)
    amp.device = device
    amp.scaler = LossScale(amp.scaler.policy, device)
    amp._zero, amp._skips = amp._zero.to(device), amp._skips.to(device)
    amp.num_skipped, amp.num_consecutive_skips = amp._skips.unbind()


def steps(recipe: str, mode: str, device: torch.device, num: int = 3) -> int:
    """Operators that so many steps took, all looked at."""
    on_fake_gpu = device.type == "cuda"
    overrides = [*WINDOW, f"amp={mode}", "schedule=warmup_cosine", "steps=3", "doctor=off", "data.num_workers=0"]
    sound, problems = check_overrides(arguments(recipe, *overrides), multirun=False)
    assert not problems
    job = Job(build(compose.compose(sound)), run_dir=None)
    module = importlib.import_module(f"recipes.{recipe}")
    build_data = getattr(module, "build_data", None)

    def real_data(*args: Any, **kwargs: Any) -> Any:
        assert build_data is not None
        with _disable_current_modes():
            return build_data(*args, **kwargs)

    done = []
    with environment(job) as env, (fake_gpu if on_fake_gpu else meta_device)() as gpu, contextlib.ExitStack() as stubs:

        def windows(loop: Loop, count: Any = None) -> Iterator[list[MicroBatch]]:
            loop._count = count
            with _disable_current_modes():
                env.device = torch.device("cpu")
                with loop.feed.loading(loop.samples) as loaded:
                    real = [next(loaded) for _ in range(num)]
            env.device = device
            for window in real:
                fake = [
                    replace(micro, batch=_moved(micro.batch, device), weight=_moved(micro.weight, device))
                    for micro in window
                ]
                with loop.step_of(fake), gpu.step():
                    yield fake
                done.append(fake)
            raise StopAsyncIteration  # what comes after training

        env.device = device
        stub: Any
        replaced = [(nn.Module, "to", _to), (Loop, "windows", windows)]
        replaced += [(module, "build_data", real_data)] if build_data else []  # some recipes bring their own
        replaced += [(Loop, "log", mock.Mock()), (Loop, "draw", _drawn), (type(env), "seed_step", mock.Mock())]
        replaced += [(torch.random, "fork_rng", contextlib.nullcontext)]
        if on_fake_gpu:
            replaced += [(torch.autograd, "backward", _backward), (torch.autograd, "grad", _grad)]
            replaced += [(importlib.import_module("amp_core.step.amp"), "run_backward", _backward)]
        else:
            replaced += [(Amp, "__init__", _amp_on_meta)]
        for where, name, stub in replaced:
            stubs.enter_context(mock.patch.object(where, name, stub))
        if hasattr(module, "shared_positions"):  # counts numbers, before training
            stubs.enter_context(mock.patch.object(module, "shared_positions", return_value=[]))
        with pytest.raises(StopAsyncIteration):
            find(recipe).run(env.cfg, env)
    assert len(done) == num
    return sum(gpu.num.values())


CUDA, META = torch.device("cuda", 0), torch.device("meta")
WAITS = {"speech"}
"""torch's CTC loss reads the lengths on the host, and has no form without numbers."""


@needs_cuda_build
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - WAITS))
def test_a_training_step_stays_on_a_fake_gpu(recipe: str, mode: str) -> None:
    assert steps(recipe, mode, CUDA) > 100


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - WAITS - {"custom_function"}))  # that one: CPU and CUDA only
def test_a_training_step_with_its_backward_passes_stays_on_meta(recipe: str, mode: str) -> None:
    assert steps(recipe, mode, META) > 100


@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda loss: loss * loss.item(), "the host waits for the device"),
        (lambda loss: loss * torch.ones(()), r"\['cpu', '(cuda|meta)'\] meet in aten.mul"),
    ],
    ids=["a number is read", "a tensor of the CPU"],
)
@pytest.mark.parametrize("device", [pytest.param(CUDA, marks=needs_cuda_build), META], ids=["fake GPU", "meta"])
def test_a_fault_in_a_loss_is_found(fault: Callable[[Tensor], Tensor], message: str, device: torch.device) -> None:
    import recipes.classification as module

    loss = module.F.cross_entropy
    with mock.patch.object(module.F, "cross_entropy", lambda *args, **kwargs: fault(loss(*args, **kwargs))):
        with pytest.raises(AssertionError, match=message):
            steps("classification", "fp16", device)
