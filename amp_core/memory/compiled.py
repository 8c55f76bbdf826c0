"""Networks compiled by torch.compile block by block, falling back to eager code.

    compile_parts(net, Compiler("inductor"))     # after `keep_fp32` and `Amp.prepare`, before `recompute_blocks`

A block is compiled by changing its class, like an fp32 island: names, hooks, `isinstance` and copies stay, and state
dicts have no `_orig_mod`. Blocks of one kind share code, so each kind is compiled once. Only `forward` is compiled;
hooks, autocast, loss scale, finite check and optimizer run eagerly. So neither a scale nor a learning rate becomes a
constant of a graph.

There are two graphs per kind: with gradients for the fixed shapes of training, without gradients for any shape, since
the last batch of an evaluation is shorter and generated text grows. torch guards autocast, evaluation mode and fp32
islands: code compiled under one dtype does not run under another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from amp_core.lowp.islands import Generated, subclass
from amp_core.tensors import blocks
from amp_core.torch_private import find, need

logger = logging.getLogger("amp_recipes")

Pass = Callable[..., Any]

NEEDED = ("torch._dynamo", "torch._functorch.config", "torch._inductor.config")
MOST_GRAPHS = 64
"""Graphs per forward function. torch's default of 8 is too low: a ResNet-50's blocks need 8 in training alone, and
beyond the limit it silently falls back to eager."""


class Compiler:
    """Compiles graphs; falls back to eager if it cannot, and logs the reason once."""

    def __init__(self, backend: str = "inductor", *, any_shape: bool = False) -> None:
        self.backend, self.any_shape = backend, any_shape
        self.num_graphs = self.num_failed = 0  # compiled, forward and backward as one; run eagerly
        self._began: float | None = None
        self._reported = 0
        need("perf.compile", *NEEDED)
        dynamo = find("torch._dynamo")
        self._compile, self._again = dynamo.lookup_backend(backend), dynamo.exc

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Pass:
        """Called by torch.compile for each graph that it has traced."""
        # Compile backward passes now too, or a failure would come in the middle of one; and outside autocast, where
        # `Amp.backward` runs them: by default the matmuls of fp32 islands would be 16-bit.
        backward = find("torch._functorch.config").patch(
            force_non_lazy_backward_lowering=True, backward_pass_autocast="off"
        )
        # Use eager random numbers: the doctor reruns a window eagerly.
        random = find("torch._inductor.config").patch(fallback_random=True)
        if self._began is None:
            self._began = time.monotonic()
            logger.info(
                "compiling by %s: usually 30 to 150 s on a CPU, less with code that an earlier run left", self.backend
            )
        try:
            with backward, random:
                compiled = self._compile(graph, inputs)
        except (self._again.RestartAnalysis, self._again.SkipFrame):
            raise  # torch's request to trace again, or not at all
        except Exception as problem:  # whatever a compiler raises
            if not self.num_failed:
                reason = _sentence(problem)
                logger.warning("perf.backend=%s: cannot compile a block, running it eagerly: %s", self.backend, reason)
            self.num_failed += 1
            return graph.forward
        self.num_graphs += 1
        return compiled

    def report(self) -> None:
        """Log what was compiled since the last call, if anything."""
        if self._began is not None:
            count, self._reported = self.num_graphs - self._reported, self.num_graphs
            logger.info("compiled %d graphs in %.0f s", count, time.monotonic() - self._began)
            self._began = None

    def passes(self, function: Pass) -> Pass:
        """`function`, compiled at its first call, separately with and without gradients."""
        with_grad = torch.compile(function, backend=self, dynamic=None if self.any_shape else False)
        without = torch.compile(function, backend=self, dynamic=True)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _warnings_shown():
                return (with_grad if torch.is_grad_enabled() else without)(*args, **kwargs)

        return run


def _warnings_shown() -> contextlib.AbstractContextManager[Any]:
    """Show warnings of torch's compiler instead of raising them: raised, one would count as a failed compilation."""
    filters: list[Any] = list(warnings.filters)
    if all(action != "error" for action, *_ in filters):
        return contextlib.nullcontext()
    region = contextlib.ExitStack()
    region.enter_context(warnings.catch_warnings())
    warnings.filters[:] = [("default" if action == "error" else action, *rest) for action, *rest in filters]  # type: ignore[index]
    return region


def compile_parts(net: nn.Module, compiler: Compiler, *, whole: bool = False) -> int:
    """Compile each block of `net`, in place, or as one with `whole` or without blocks. Returns the number of modules.

    Blocks are those that layout=fsdp gathers one at a time, see `amp_core.tensors.blocks`. Code between them stays
    eager. Compilation happens at the first forward pass of each kind. ValueError: a patched `forward` would bypass it.
    """
    parts = [net] if whole else list(blocks(net)) or [net]
    for part in parts:
        if "forward" in vars(part):
            raise ValueError(f"a {type(part).__name__} has a patched forward, by hand or by another tool")
        _to_compiled(part, compiler)
    return len(parts)


def _brief() -> Callable[[logging.LogRecord], bool]:
    """A filter that shortens the tracer's messages, pages per frame, to one sentence."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.WARNING or problem is None:
            return True
        if not said:
            said.append(_sentence(problem))
            logger.warning("torch.compile cannot trace a block, running it eagerly: %s", *said)
        return False

    return keep


def _sentence(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {next(iter(str(problem).strip().splitlines()), '')}"


@contextlib.contextmanager
def allow_graphs() -> Iterator[None]:
    """Raise the limit of graphs per function, for the whole process; restored afterwards."""
    limits = find("torch._dynamo").config
    with limits.patch(
        recompile_limit=MOST_GRAPHS,
        accumulated_recompile_limit=max(MOST_GRAPHS, limits.accumulated_recompile_limit),
        suppress_errors=True,  # fall back where tracing fails, as where compiling does
    ):
        tracer, brief = logging.getLogger("torch._dynamo.convert_frame"), _brief()
        tracer.addFilter(brief)
        try:
            yield
        finally:
            tracer.removeFilter(brief)
            torch.compiler.reset()  # jobs of a sweep share functions, and would reach any limit


def may_compile() -> bool:
    """Whether something in this process may be compiled. Imports nothing."""
    return "torch._dynamo" in sys.modules


BACKWARD = 'torch._functorch.config.backward_pass_autocast = "off"'
"""The line of a program with which torch.compile computes backward passes outside autocast."""


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Run the eager code of compiled modules, so that hooks and dispatch modes see every operation."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[return-value]


def missing_compiler(backend: str, device_type: str) -> str | None:
    """Why inductor cannot compile for a device on this machine, or None. Starts no process."""
    if backend != "inductor":
        return None
    if device_type == "cuda":
        return None if importlib.util.find_spec("triton") else "inductor needs the package triton for a GPU"
    # What inductor looks for.
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"inductor needs a C++ compiler for a CPU; found no {compiler}"


class _Compiled(Generated):
    """Tells the class of a compiled module."""


@functools.cache
def _class_of(base: Any, compiler: Compiler) -> Any:
    # `islands` uses `computes` to detect islands. Messages and reports show the original name.
    body = {"forward": compiler.passes(base.forward), "computes": getattr(base, "computes", base.forward)}
    return subclass(base, _Compiled, base.__name__, lambda module: _to_compiled(module, compiler), **body)


def _to_compiled(module: nn.Module, compiler: Compiler) -> nn.Module:
    if not isinstance(module, _Compiled):
        module.__class__ = _class_of(type(module), compiler)
    return module
