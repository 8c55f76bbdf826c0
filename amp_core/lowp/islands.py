"""Islands: modules that compute in fp32 while autocast runs the rest in 16 bits.

    keep_fp32(model, ["decoder.head", "*.norm*", nn.BatchNorm2d, "LayerNorm"])     # by name, by class, by class name
    keep_fp32(model.head)                                                          # one module

    @keep_fp32                                                                     # a function, or an nn.Module class
    def total_variation(image): ...

Choose the module that produces the first non-finite value: an island around a BatchNorm does not fix the convolution
before it.

A module becomes an island by changing its class to a generated subclass whose `forward` disables autocast and casts
its inputs. The widely copied patch, `module.forward = MethodType(partial(wrapper, module.forward), ..)`, holds a
reference to one module: a deep copy, such as an EMA, computes with the weights of the original.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import fnmatch
import functools
import inspect
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_core.tensors import HALF, unwrap

Target = TypeVar("Target")
Pattern = str | type[nn.Module]
P = ParamSpec("P")
R = TypeVar("R")

_DEVICE_TYPES = ("cpu", (torch.accelerator.current_accelerator() or torch.device("cuda")).type)
"""Where autocast may be on: the CPU, and the accelerator that this build of torch is for."""
_BEFORE_2_12 = torch.__version__ < "2.12"


def keep_fp32(target: Target, patterns: Pattern | Iterable[Pattern] = "") -> Target:
    """Make `target`, or the modules in it that match `patterns`, compute in fp32 under autocast.

    Inside an island autocast is off on every device, and float16 and bfloat16 tensors among the arguments arrive as
    fp32, also in tuples, lists, dicts, named tuples and dataclasses, which arrive as copies. Outputs are fp32; autocast
    casts them again for 16-bit operations. Only `forward` is covered, not the hooks of the module. Gradients are
    computed in fp32 if `backward()` is called outside autocast, as it should be.

    The module keeps its weights, hooks, state_dict keys and `isinstance`; copies, pickles and EMAs are islands with
    their own weights. Idempotent. Call it after what replaces modules (such as `SyncBatchNorm.convert_sync_batchnorm`)
    and before `torch.compile` and DDP. A file written by `torch.save(module)` needs this package to load; a state_dict
    does not. Source: https://docs.pytorch.org/docs/stable/amp.html (autocast-disabled subregions).

    Args:
        target: a module or an `nn.Module` class, changed in place (a subclass with its own `forward` is not an island),
            or a function, whose fp32 form is returned.
        patterns: which modules: globs of names as in `named_modules()`, where `*` also matches dots; `nn.Module`
            classes; class names. Classes include subclasses. The default "" is the module itself, [] is none.

    Raises:
        ValueError: a pattern matches nothing, or only what is never called (`ModuleList`, the inside of
            `nn.MultiheadAttention`); a module's weights are 16-bit; its `forward` is patched or compiled. Nothing has
            been changed then. Also raised in the forward pass if weights have become 16-bit since.
        TypeError: the target or a pattern has another type.
    """
    if isinstance(target, nn.Module):
        named = [patterns] if isinstance(patterns, str | type) else list(patterns)
        # A compiled model has other names; both are meant.
        named = [name.replace("_orig_mod.", "") if isinstance(name, str) else name for name in named]
        for module in _choose(unwrap(target), named):
            _to_island(module)
        _forget_compiled(methods_changed=False)
        return target
    if patterns != "":
        raise TypeError(f"patterns choose modules of a module, and {target!r} is not one")
    if isinstance(target, type) and issubclass(target, nn.Module) and target.forward is not nn.Module.forward:
        if not _is_island(target):
            target.forward = _in_fp32(target.forward)
            _forget_compiled(methods_changed=True)
        return cast(Target, target)
    if isinstance(target, type) or not callable(target):
        raise TypeError(f"keep_fp32 takes a module, a function or a module class with a forward; not {target!r}")
    return cast(Target, target if _is_wrapper(target) else _in_fp32(target))


def island_names(model: nn.Module) -> list[str]:
    """The names of the modules in `model` that are islands, as in `named_modules()`; "" is the model itself."""
    return [name for name, module in model.named_modules() if _is_island(type(module))]


def named_modules(nets: Iterable[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """All modules of networks, each with what stands before its names, and their names: the first of several."""
    names: dict[nn.Module, str] = {}
    for prefix, net in nets:
        for name, module in unwrap(net).named_modules():
            names.setdefault(module, ".".join(filter(None, [prefix, name])))
    return names


def islands_of(nets: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The names of the islands in networks, as in `named_modules`."""
    return [name for module, name in named_modules(nets).items() if _is_island(type(module))]


@contextlib.contextmanager
def as_islands(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Make modules islands inside the context. Yields those that became islands."""
    before: dict[nn.Module, type[nn.Module]] = {}
    try:
        for module in modules:
            if _has_forward(module) and not _is_island(type(module)):
                _require_plain_forward("", module)
                before[module] = type(module)
                _to_island(module)
        _forget_compiled(methods_changed=False)
        yield list(before)
    finally:
        for module, cls in before.items():
            module.__class__ = cls
        _forget_compiled(methods_changed=False)


def carry_autocast(fn: Callable[P, R]) -> Callable[P, R]:
    """Capture the current autocast state, so that `fn` runs under it in any thread.

    Autocast is thread-local: a new thread starts with autocast off and with the default dtypes.

        with torch.autocast("cuda", dtype=torch.float16):
            future = pool.submit(carry_autocast(model), images)

    Carries for CPU and CUDA whether autocast is on and its dtype, and whether it caches weights; not the grad mode,
    which is thread-local too. Threads that share weights must use the same dtype or disable the cache: torch has one
    cache of cast weights for all threads and dtypes. TypeError: `fn` is a generator or coroutine function: its body
    runs after the call, outside the region.
    """
    _refuse_deferred(fn)
    states = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICE_TYPES]
    cached = torch.is_autocast_cache_enabled()

    @functools.wraps(fn)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        # New regions per call: they hold the state to restore, which differs between threads.
        host, device = (torch.autocast(d, dtype, enabled, cache_enabled=cached) for d, dtype, enabled in states)
        with host, device:
            return fn(*args, **kwargs)

    return carried


# --- the fp32 region --------------------------------------------------------------------------------------------------

_wrappers: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""What `_in_fp32` returned. An attribute of the function would be copied by `functools.wraps`."""


def _in_fp32(fn: Any) -> Any:
    _refuse_deferred(fn)

    @functools.wraps(fn)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        known: dict[Tensor, Tensor] = {}

        def as_fp32(tensor: Tensor) -> Tensor:
            if tensor not in known:  # one tensor in several places stays one: attention checks `query is key`
                known[tensor] = tensor.float()
            return known[tensor]

        try:
            with _autocast_off(_DEVICE_TYPES[0]), _autocast_off(_DEVICE_TYPES[1]):
                return fn(*changed(args, _is_16bit, as_fp32), **changed(kwargs, _is_16bit, as_fp32))
        except RuntimeError as error:
            # FSDP and a later `.half()` make weights 16-bit; torch's error names neither module nor cause.
            if args and isinstance(args[0], nn.Module):
                _require_fp32_weights("", args[0], error)
            raise

    _wrappers.add(in_fp32)
    return in_fp32


def _is_wrapper(fn: Any) -> bool:
    return isinstance(fn, types.FunctionType) and fn in _wrappers


def _refuse_deferred(fn: Any) -> None:
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} is a generator or coroutine function: its body runs after the call, "
            "outside of the region. Move what needs the region into a plain function"
        )


def _autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _parts(value: Any) -> Iterable[Any]:
    """The contents of a container, nothing for everything else."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def _is_16bit(tensor: Tensor) -> bool:
    return tensor.dtype in HALF


def _holds(value: Any, wants: Callable[[Tensor], bool]) -> bool:
    return wants(value) if isinstance(value, Tensor) else any(_holds(part, wants) for part in _parts(value))


def changed(value: Any, wants: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to the tensors that it `wants`, in containers too; itself if there are none."""
    if not _holds(value, wants):
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        # Item by item: torch.compile cannot trace copying a plain dict, and not every dict class has `update`.
        fresh = {} if type(value) is dict else copy.copy(value)
        for key, part in value.items():
            fresh[key] = changed(part, wants, change)
        return fresh
    if isinstance(value, tuple | list):
        parts = [changed(part, wants, change) for part in value]
        # `_make` skips `__new__`, which takes other arguments in PackedSequence.
        return getattr(type(value), "_make", type(value))(parts)
    # By hand: torch.compile cannot trace copying a class with __slots__.
    fresh = object.__new__(type(value))
    for name in dict.fromkeys([*getattr(value, "__dict__", ()), *(field.name for field in dataclasses.fields(value))]):
        if hasattr(value, name):
            object.__setattr__(fresh, name, changed(getattr(value, name), wants, change))  # also if frozen
    return fresh


# --- a module as an island --------------------------------------------------------------------------------------------


class Generated:
    """Mixin of generated subclasses of a module's class, first in their bases."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Stop here, so that a model's own `__init_subclass__` registry does not see them."""


def subclass(base: Any, mixin: type, name: str, become: Callable[[nn.Module], nn.Module], **body: Any) -> Any:
    """A subclass, told by `mixin` and with `body`, to which `become` changes instances of the module class `base`."""
    # Unlike a wrapper it leaves names, hooks, `isinstance` and copies as they are.
    body |= {"__module__": base.__module__, "__doc__": base.__doc__}
    if hasattr(base, "__deepcopy__"):  # may build its result from the class by name
        body["__deepcopy__"] = lambda self, memo: become(base.__deepcopy__(self, memo))
    return types.new_class(name, (mixin, base), exec_body=lambda namespace: namespace.update(body))


class _Island(Generated):
    _of: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        cls = type(self)
        if "_of" not in cls.__dict__ or isinstance(reduced, str):
            return reduced  # a subclass of an island's class, such as FSDP's
        # Pickle can import the original class, not the island's.
        make, args, *state = reduced
        make, *args = (cls._of if part is cls else part for part in (make, *args))
        return _rebuild, (make, tuple(args)), *state


@functools.cache
def _island_class(base: Any) -> Any:
    """The subclass of the module class `base` that computes in fp32."""
    body = {"_of": base, "forward": _in_fp32(base.forward)}
    if getattr(base, "cls_to_become", None) is not None:  # a lazy module changes its class at its first forward
        body["cls_to_become"] = _island_class(base.cls_to_become)
    return subclass(base, _Island, f"Fp32{base.__name__}", _to_island, **body)


def _is_island(cls: type[nn.Module]) -> bool:
    # The forward of a recomputed block has another name, see recompute.py.
    return _is_wrapper(cls.forward) or _is_wrapper(getattr(cls, "computes", None))


def _to_island(module: nn.Module) -> nn.Module:
    cls: Any = type(module)
    if _is_island(cls):
        return module
    if parametrize.is_parametrized(module):
        # torch takes the properties from the outermost class again, and returns to its base: the island lies below.
        bases = _island_class(cls.__bases__[0]), *cls.__bases__[1:]
        module.__class__ = type(cls)(cls.__name__, bases, dict(vars(cls)))
    else:
        module.__class__ = _island_class(cls)
    return module


def _forget_compiled(*, methods_changed: bool) -> None:
    """Drop compiled code that torch's guards would not invalidate, and that would still run in 16 bits."""
    # No version of torch guards the methods of a class, and 2.11 not the class of a module.
    if (methods_changed or _BEFORE_2_12) and "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with a GPU it imports inductor, which warns
            torch.compiler.reset()


def _rebuild(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Named in pickles of islands: keep its name, place and arguments."""
    return _to_island(make(*args))


# --- which modules ----------------------------------------------------------------------------------------------------


def _choose(model: nn.Module, patterns: list[Pattern]) -> list[nn.Module]:
    """The modules to turn into islands; raises before anything is changed."""
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, nn.Module] = {}
    problems = []
    for pattern in patterns:
        found = {name: module for name, module in modules.items() if _matches(pattern, name, module)}
        called = {name: module for name, module in found.items() if _has_forward(module)}
        if not found:
            problems.append(_no_match(pattern, modules))
        elif not called:
            name, module = next(iter(found.items()))
            members = f"{name}.*" if name else "*"
            problems.append(f"{_label(name, module)} is never called, only its members are; name those: '{members}'")
        chosen |= called
    if problems:
        raise ValueError("\n".join(problems))
    inert = set()  # chosen with the module around them, which is an island
    for name, module in chosen.items():
        # The names of the modules around it, inner ones first.
        above = ["", *itertools.accumulate(name.split(".")[:-1], "{}.{}".format)][::-1] if name else []
        attention = next((a for a in above if isinstance(modules[a], nn.MultiheadAttention)), None)
        if attention is not None:
            if not any(a in chosen or _is_island(type(modules[a])) for a in above):
                raise ValueError(
                    f"{_label(name, module)} lies inside nn.MultiheadAttention, which uses the weights of its parts "
                    f"and never calls them, so an island there has no effect; name the attention module, "
                    f"{_label(attention, modules[attention])}, too or instead"
                )
            inert.add(name)
        elif not _is_island(type(module)):
            _require_plain_forward(name, module)
            _require_fp32_weights(name, module)
    return [module for name, module in chosen.items() if name not in inert]


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern) or any(c.__name__ == pattern for c in type(module).__mro__)
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        return isinstance(module, pattern)
    raise TypeError(
        f"a pattern is a module name, a glob, a class name or an nn.Module class; not {pattern!r}. "
        "For one module: keep_fp32(module)"
    )


def _no_match(pattern: Pattern, modules: dict[str, nn.Module]) -> str:
    word = pattern if isinstance(pattern, str) else pattern.__name__
    kinds = {type(module).__name__ for module in modules.values()}
    names = {name for name in modules if name} if isinstance(pattern, str) else set()
    near = difflib.get_close_matches(word, sorted(names | kinds), n=5, cutoff=0.0)
    return f"'{word}' matches no module, neither by name nor by class; the nearest are {', '.join(near)}"


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _label(name: str, module: nn.Module) -> str:
    return f"'{name}' ({type(module).__name__})" if name else type(module).__name__


def _require_plain_forward(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise ValueError(f"{_label(name, module)} is traced code; make its parts islands before they are traced")
    if "forward" in vars(module):
        raise ValueError(
            f"{_label(name, module)} has a forward of its own in the instance, patched by hand or by a tool such as "
            "torch.compile, which would bypass the island. Call keep_fp32 first, or delete the patch"
        )


def _require_fp32_weights(name: str, module: nn.Module, cause: Exception | None = None) -> None:
    for parameter in module.parameters():
        if parameter.dtype in HALF:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"the weights of {_label(name, module)} are {dtype}; an fp32 island needs fp32 weights. Keep the model "
                "in fp32: autocast makes the 16-bit copies by itself"
            ) from cause
