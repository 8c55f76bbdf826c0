"""Networks compiled by torch.compile, part by part, with the eager code as the way out.

    compile_parts(net, Compiler("inductor"))     # after `keep_fp32` and `Amp.prepare`, before `recompute_blocks`

A part becomes one by a change of its class, as an fp32 island does: names, hooks, `isinstance` and copies stay, and no
`_orig_mod` appears in a state dict. Blocks of one kind share their code, so that each kind is compiled once. Only
`forward` is compiled. What surrounds it runs as ever: hooks, the autocast region, the loss scale, the finite check, the
optimizer. So neither a scale nor a rate can become a constant of a graph.

Two graphs are made per kind. With gradients, for the very shapes of training, which never change; without, for any
shapes, since the last batch of an evaluation is a shorter one and generated text grows. Autocast, evaluation mode and
fp32 islands are guarded by torch: nothing compiled under one dtype runs under another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import shutil
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from amp_core.tensors import blocks
from amp_core.torch_private import find, need

logger = logging.getLogger("amp_recipes")

Pass = Callable[..., Any]

NEEDED = ("torch._dynamo", "torch._functorch.config", "torch._inductor.config")
MOST_GRAPHS = 64
"""Of one forward function. torch's 8 are too few: those of a ResNet-50's blocks are 8 in training alone, and beyond the
limit it runs eagerly without saying so loudly."""


class Compiler:
    """Compiles graphs; what it cannot compile runs eagerly, and the reason is said once.

    Args:
        backend: a backend of torch.compile.
        any_shape: graphs of training are for any shapes, too.

    Attributes:
        num_graphs: compiled so far; forward and backward count as one.
        num_failed: graphs that run eagerly.
    """

    def __init__(self, backend: str = "inductor", *, any_shape: bool = False) -> None:
        self.backend, self.any_shape = backend, any_shape
        self.num_graphs = self.num_failed = 0
        need("perf.compile", *NEEDED)
        dynamo = find("torch._dynamo")
        self._compile, self._again = dynamo.lookup_backend(backend), dynamo.exc

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Pass:
        """Called by torch.compile for each graph that it has traced."""
        # Backward passes are compiled now, too, or their failure would come in the middle of one; and outside of
        # autocast, where `Amp.backward` runs them: by default the products of fp32 islands would be 16-bit in them.
        backward = find("torch._functorch.config").patch(
            force_non_lazy_backward_lowering=True, backward_pass_autocast="off"
        )
        # Random numbers as eager code draws them: the doctor replays a window eagerly.
        random = find("torch._inductor.config").patch(fallback_random=True)
        try:
            with backward, random:
                compiled = self._compile(graph, inputs)
        except (self._again.RestartAnalysis, self._again.SkipFrame):
            raise  # torch asks itself to trace once more, or not at all
        except Exception as problem:  # whatever a compiler raises
            if not self.num_failed:
                reason = _sentence(problem)
                logger.warning("perf.backend=%s: cannot compile a part, which runs eagerly: %s", self.backend, reason)
            self.num_failed += 1
            return graph.forward
        self.num_graphs += 1
        return compiled

    def passes(self, function: Pass) -> Pass:
        """`function`, compiled when it is called: with gradients and without are compiled apart."""
        with_grad = torch.compile(function, backend=self, dynamic=None if self.any_shape else False)
        without = torch.compile(function, backend=self, dynamic=True)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _warnings_shown():
                return (with_grad if torch.is_grad_enabled() else without)(*args, **kwargs)

        return run


def _warnings_shown() -> contextlib.AbstractContextManager[Any]:
    """Inside of it warnings that are errors (`python -W error`, pytest) are shown instead.

    torch warns of itself while it traces and compiles. Raised, such a warning would count as a failure to compile, and
    the part would run eagerly.
    """
    filters: list[Any] = list(warnings.filters)
    if all(action != "error" for action, *_ in filters):
        return contextlib.nullcontext()
    region = contextlib.ExitStack()
    region.enter_context(warnings.catch_warnings())
    warnings.filters[:] = [("default" if action == "error" else action, *rest) for action, *rest in filters]  # type: ignore[index]
    return region


def compile_parts(net: nn.Module, compiler: Compiler, *, whole: bool = False) -> int:
    """Let each block of `net` compute compiled code, in place; a network without blocks does as one.

    Blocks are those that layout=fsdp gathers by themselves, see `amp_core.tensors.blocks`. What lies between them stays
    eager. Compiling happens at the first forward pass of each kind.

    Args:
        net: on the device.
        compiler: what compiles.
        whole: the network as one, though it has blocks.

    Returns:
        The number of parts.

    Raises:
        ValueError: the `forward` of one was patched in the instance, which would bypass it.
    """
    parts = [net] if whole else list(blocks(net)) or [net]
    for part in parts:
        if "forward" in vars(part):
            raise ValueError(f"a {type(part).__name__} has a patched forward, by hand or by another tool")
        _to_compiled(part, compiler)
    return len(parts)


class _Brief(logging.Filter):
    """What torch's tracer could not trace, as one sentence instead of pages for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.WARNING or problem is None:
            return True
        if not self._said:
            self._said = True
            logger.warning("torch.compile cannot trace a part, which runs eagerly: %s", _sentence(problem))
        return False


def _sentence(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {next(iter(str(problem).strip().splitlines()), '')}"


@contextlib.contextmanager
def allow_graphs() -> Iterator[None]:
    """As many graphs per function as networks have kinds of blocks. For the whole process, put back afterwards.

    At the end what was compiled is dropped: jobs of a sweep share the functions and would reach any limit.
    """
    limits = find("torch._dynamo").config
    with limits.patch(
        recompile_limit=MOST_GRAPHS,
        accumulated_recompile_limit=max(MOST_GRAPHS, limits.accumulated_recompile_limit),
        suppress_errors=True,  # where tracing itself fails, as where compiling does
    ):
        tracer, brief = logging.getLogger("torch._dynamo.convert_frame"), _Brief()
        tracer.addFilter(brief)
        try:
            yield
        finally:
            tracer.removeFilter(brief)
            torch.compiler.reset()


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Inside of it compiled parts run their eager code, so that hooks and dispatch modes see every operation."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[return-value]


def cache_folder() -> str:
    """Where inductor keeps what it compiled, for this run and others."""
    return find("torch._inductor.runtime.cache_dir_utils.cache_dir", lambda: "torch's own folder")()


def missing_compiler(backend: str, device_type: str) -> str | None:
    """Why inductor cannot compile for a device on this machine, or None. Starts nothing."""
    if backend != "inductor":
        return None
    if device_type == "cuda":
        return None if importlib.util.find_spec("triton") else "inductor needs the package triton for a GPU"
    get_cpp_compiler = find("torch._inductor.cpp_builder.get_cpp_compiler")
    none_found = find("torch._inductor.exc.InvalidCxxCompiler")
    if get_cpp_compiler is None or none_found is None:
        return None
    known = find("torch._inductor.config").cpp.cxx
    candidates = known if isinstance(known, list | tuple) else (known,)
    try:
        found = get_cpp_compiler()
    except none_found:
        found = None
    if found is None or shutil.which(found) is None:
        return f"inductor needs a C++ compiler for a CPU, and there is none of {', '.join(filter(None, candidates))}"
    return None


class _Compiled:
    """Stands before the class of a part in its bases."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Stops here, so that no registry that a model fills from its own `__init_subclass__` sees it."""


@functools.cache
def _class_of(base: Any, compiler: Compiler) -> Any:
    # `islands` looks at `computes` to tell whether a part is one.
    computes = getattr(base, "computes", base.forward)
    body = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "forward": compiler.passes(base.forward),
        "computes": computes,
    }
    if hasattr(base, "__deepcopy__"):  # may build its result from the class by name
        body["__deepcopy__"] = lambda self, memo: _to_compiled(base.__deepcopy__(self, memo), compiler)
    # Under its own name, which is what messages and reports show.
    return types.new_class(base.__name__, (_Compiled, base), exec_body=lambda namespace: namespace.update(body))


def _to_compiled(module: nn.Module, compiler: Compiler) -> nn.Module:
    if not isinstance(module, _Compiled):
        module.__class__ = _class_of(type(module), compiler)
    return module
