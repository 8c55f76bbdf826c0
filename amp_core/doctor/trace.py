"""Watch every operation of a window, forward and backward, for the first non-finite value.

Module hooks cannot find it: they miss an overflow inside a module, in the functional code of a parent, in the loss or
in the backward pass, and they blame the BatchNorm that turned the convolution's inf into NaN. A dispatch mode sees
each operation below autograd and autocast, with its actual inputs.

Two things are recorded per tensor storage. *Origins*: the first non-finite values from which its non-finite elements
descend. So a mask of -inf that a softmax consumed is no culprit, and of several candidates the one that reached the
loss or a gradient is. *Marks*: an eps was rounded to 0 on the way, it is a probability of a 16-bit sigmoid, or it came
from the data set and was only moved since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from amp_core.lowp.weights import weights_by_side
from amp_core.memory.recompute import recomputed
from amp_core.step.observer import Observer
from amp_core.tensors import is_dtensor, local
from amp_core.torch_private import find, need, storage_of

logger = logging.getLogger("amp_recipes")

HALF = (torch.float16, torch.bfloat16)
NEEDED = (
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._current_autograd_node",
    "torch._C._autograd._get_sequence_nr",
    "torch.autograd.graph.Node._sequence_nr",
    "torch.ops.aten.add.Tensor._schema",
)
"""Private names of torch that the trace needs."""
current_node, _sequence_number = find("torch._C._current_autograd_node"), find("torch._C._autograd._get_sequence_nr")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = (torch.autograd.__file__, torch.autograd.graph.__file__)
_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WATCHING = ("doctor/", "lowp/", "step/amp.py", "memory/recompute.py")
_WATCHING += ("step/gradients.py", "layouts/fsdp.py", "layouts/stages.py", "tensors.py", "../amp_tools/")
_NOT_SHOWN = tuple(os.path.normpath(_CORE + name) + ("" if name.endswith("py") else os.sep) for name in _WATCHING)
"""Frames that do not locate an operation in a network."""
_ROOTS = (os.path.dirname(_CORE.rstrip(os.sep)) + os.sep, os.getcwd() + os.sep)

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
UNWRITTEN |= {"empty_permuted", "_efficientzerotensor"}
"""Their results hold no numbers yet; the last one, of forward-mode differentiation, has no memory to look at."""
_CONSTANTS = {"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where"}
_CONSTANTS |= {"constant_pad_nd", "lift_fresh", "index_fill", "index_fill_"}
_CONSTANTS |= {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"}
"""Operations that write a constant inf, such as for an attention mask."""
_FORMAT = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "out"}
_SPREADS_INPUT = {"_to_copy", "clone", "cat", "stack", "index", "index_select", "copy_"}
_TESTS = {"eq", "ne", "isnan", "isinf", "isfinite"}
_DEEPEST = 8
_TAKES_MASKS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "sub", "rsub"}
"""They return NaN for a row of only infinities: the empty row is the cause, not the mask; `sub` in a handwritten
one."""
_SPREADS_SIGMOID = {"_to_copy", "rsub", "sub", "add", "neg", "clamp", "clamp_min", "clamp_max", "index", "where", "mul"}
_SPREADS_BCE = {"_to_copy", "mul", "clone", "sum", "expand", "div", "sigmoid_backward"}
_UNDERFLOWS = {"_to_copy", "_softmax", "exp", "exp2", "sigmoid", "mul", "div", "square", "pow", "prod", "reciprocal"}
_UNDERFLOWS |= {"cumprod", "softplus", "silu", "gelu", "mish", "erfc", "_linalg_det"}
_UPDATES_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They write to their fourth and fifth argument, and their schemas do not say so."""
_SUBTRACTS = {"sub", "add", "rsub"}
_FADING = ("eps", "underflow", "wide underflow", "cancellation")
"""Marks of numbers that are 0 because of their dtype: they end where no zero is left."""
_ADDS_EPS = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_", "maximum", "sub", "rsub"}
_POSITIONAL = {"mul", "add", "sub", "div", "pow", "rsub"}

DispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", object)
OUTSIDE, REMOTE, CONSTANT = -1, -2, -3
"""Origins outside the window: before it, another rank, a number. Below: constants of the program."""


@dataclass(frozen=True)
class Location:
    """Where an operation is in the program."""

    module: str | None
    """Name as in `named_modules()`; None outside the networks."""
    kind: str
    """Class of the module."""
    source: str
    """file:line of the innermost frame outside torch and this project's core."""
    code: str
    """That line."""
    forward: str = ""
    """In the backward pass: the differentiated operation, to which module and source belong."""

    def __str__(self) -> str:
        inside = f"{self.module or 'the network itself'} ({self.kind})"
        return f"{'outside of the networks' if self.module is None else inside}, {self.source}"

    @property
    def phrase(self) -> str:
        """Where, to be read after an operation."""
        return f"{'' if self.module is None else 'in '}{self}"


@dataclass(frozen=True)
class Range:
    """The range of absolute values of a tensor's finite elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """Smallest value that is not 0."""
    largest: float
    zeros: float
    """Share of zeros."""
    not_finite: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Range:
        values = dense(tensor).flatten()
        values = values.abs() if values.is_complex() else values.double().abs()
        finite = values[values.isfinite()]
        positive = finite[finite > 0]
        return cls(
            name,
            dtype_name(tensor.dtype),
            tuple(values.shape if tensor.is_nested else tensor.shape),
            positive.min().item() if len(positive) else 0.0,
            positive.max().item() if len(positive) else 0.0,
            int((finite == 0).sum()) / len(values) if len(values) else 0.0,
            len(values) - len(finite),
        )

    def __str__(self) -> str:
        text = f"{self.name} {self.dtype}{list(self.shape)}: "
        if self.not_finite and self.not_finite == math.prod(self.shape):
            return f"{text}none of {self.not_finite:,} is finite"
        if not math.prod(self.shape):
            return f"{text}empty"
        zero = "0" if self.not_finite else "all 0"
        text += f"|x| from {self.smallest:.3g} to {self.largest:.3g}" if self.largest else zero
        share = f"{self.zeros:.1%}" if self.zeros >= 0.0005 else "under 0.1%"
        text += f", {share} zeros" if self.zeros and self.largest else ""
        return text + (f", {self.not_finite:,} not finite" if self.not_finite else "")


@dataclass
class FirstNonFinite:
    """An operation with finite inputs and a non-finite output; or a tensor that was non-finite from the start."""

    number: int
    op: str
    """torch's name: `aten.convolution`. Empty for a tensor that was non-finite from the start."""
    place: Location
    backward: bool
    inputs: list[Range]
    output: Range
    has_nan: bool
    wide: float | None
    """Largest absolute value of the same operation in float64; inf or NaN if it is non-finite there too."""
    at_a_pole: str = ""
    """Which argument has no finite result, such as a zero of a logarithm; empty if none is known to have none."""
    only_masks: bool = False
    """The inputs held constant infinities, as in a mask."""
    marks: frozenset[tuple[str, str]] = frozenset()
    is_constant: bool = False
    """A constant of the program."""
    rows: list[int] = field(default_factory=list)
    """Indices along the first dimension with non-finite elements."""
    operation: int = 0
    """How many operations came before."""
    follows_backward: bool = False
    """It came after the last backward pass of the window, or between two of them and is differentiated by none."""
    tensor: str = ""
    """Name of what was non-finite from the start, or that overflows 16 bits; of a running variance below 0."""


@dataclass(frozen=True)
class Collision:
    """Integers, such as positions, that collide in 16 bits."""

    place: Location
    op: str
    dtype: str
    distinct: int
    kept: int
    largest: float


@dataclass
class _Input:
    name: str
    tensor: Tensor
    key: int


@dataclass(frozen=True)
class _Call:
    func: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    place: Location
    backward: bool
    inputs: list[_Input]
    written: set[int]
    statistics: list[Tensor]


class Trace(DispatchMode, Observer):
    """Watches operations inside `with trace:`; syncs with the device at each one.

    Other threads are not seen, since dispatch modes are thread-local; autograd's are, on every device.

    Args:
        names: names of modules, for locations.
        tensors: tensors from before the window, by name: weights, buffers, batches.
        in_steps: watch the steps of optimizers, too.
    """

    supports_higher_order_operators = True

    def __init__(
        self, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor], *, in_steps: bool = False
    ) -> None:
        need("the doctor", *NEEDED)
        super().__init__()
        self._in_steps = in_steps
        self.births: list[FirstNonFinite] = []
        self.constants: list[FirstNonFinite] = []
        """Constant infinities and NaN of the program, such as those of a mask."""
        self.collisions: list[Collision] = []
        self.reached: dict[int, list[str]] = {}
        """Origins of non-finite results: number of the first non-finite value -> names of losses and gradients."""
        self.lost: dict[str, str] = {}
        """Operations that could not be followed, and why."""
        self.num_operations, self.last_backward = 0, 0
        self.has_half = False
        self.generators: dict[torch.Generator, Tensor] = {}
        """Generators that the program draws from, with their states from before."""
        self.is_loss_finite, self.grad_norm, self.largest_gradient = True, 0.0, (0.0, "")
        """The gradient norm in float64, of this rank's shards; that of the largest gradient, and its weight."""
        self._names = names
        self._modules: list[tuple[str | None, str, Any, nn.Module]] = []
        """Name, class, the node of autograd that entered it (None: the program did), the module."""
        self._places: dict[int, Location] = {}
        self._last: dict[int, int] = {}
        """Number of the last node that has a place, by thread."""
        self._origins: dict[int, frozenset[int]] = {}
        self._marks: dict[int, frozenset[tuple[str, str]]] = {}
        self._bad_results: dict[str, Tensor] = {}
        self._results: list[Tensor] = []
        self._numbers: frozenset[int] = frozenset()
        """Origins of non-finite tensors that became Python numbers."""
        self._unwritten: set[int] = set()
        self._shared: set[int] = set()
        self._tensors = {storage_key(tensor): name for name, tensor in tensors.items()}
        arrays = {name: t for name, t in tensors.items() if is_plain(t)}
        sizes = Counter(t.shape[0] for name, t in arrays.items() if name.startswith("batch") and t.ndim)
        most = {size for size, count in sizes.items() if count == max(sizes.values())}
        labels = {t.shape[0] for name, t in arrays.items() if name.startswith("batch") and t.ndim == 1}
        self._batch_sizes = (len(most) > 1 and most & labels) or most
        """Of most tensors of the batch, or of its labels: weights of classes, and frames, have no sample per row."""
        self._bad_batch: dict[str, Tensor] = {}
        """To be known again where the program copies them unseen, as from arrays."""
        self._pauses, self._is_done = 0, False
        self._handles: dict[nn.Module | None, Any] = {}
        for name, tensor in tensors.items():
            if name.startswith("batch"):
                self._marks[storage_key(tensor)] = frozenset({("input", name)})
            if not is_finite(tensor):
                self._bad_batch |= {name: tensor} if name.startswith("batch") else {}
                self._not_finite_before(name, tensor, storage_key(tensor), Location(None, "", "before the window", ""))

    def __enter__(self) -> Trace:
        self._handles[None] = register_module_forward_pre_hook(self._enter_module)
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        for handle in self._handles.values():
            handle.remove()

    # --- moments of `Amp` ------------------------------------------------------------------------------------------

    def on_loss(self, loss: Tensor) -> None:
        self._pauses += not self._in_steps
        with self._following("the loss"):
            if not is_finite(loss):
                self.is_loss_finite = False
                self._note(loss, "the loss")
                # No culprit is earlier than the first value, and gradients of a loss that is not finite prove nothing.
                self._is_done |= 0 in self.reached and all(birth.op for birth in (*self.births[1:], *self.constants))
        self._pauses -= not self._in_steps

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        self._pauses += not self._in_steps
        with self._following("the gradients"):
            self._look_at_gradients(params, local(grads))
        self._pauses -= not self._in_steps

    def _look_at_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        low = weights_by_side()
        weights = local([low.get(param, param) for param in params])
        names = [self._tensors.get(storage_key(weight), "a weight").removeprefix("weight ") for weight in weights]
        every = [(name, _comparable(grad)) for name, grad in zip(names, grads, strict=True)]
        norms = [(torch.linalg.vector_norm(grad, dtype=torch.float64).item(), name) for name, grad in every]
        norm = math.hypot(*(each for each, _ in norms))
        self.grad_norm = max(self.grad_norm, norm)
        self.largest_gradient = max([self.largest_gradient, *norms])
        for name, grad in zip(names, grads, strict=True):
            if not (math.isfinite(norm) or self._is_done or is_finite(grad)):
                self._note(grad, f"the gradient of {name}")

    def on_step_begin(self) -> None:
        self._pauses += not self._in_steps

    def on_step_end(self, taken: Tensor) -> None:
        self._pauses -= not self._in_steps

    @property
    def culprit(self) -> FirstNonFinite | None:
        """The earliest non-finite value that reached a loss or a gradient; else an infinite constant that did."""
        return next(iter(self._origins_of_results()), None)

    @property
    def suspects(self) -> list[str]:
        """Names of tensors from before the window whose non-finite values reached a loss or a gradient."""
        found = self._origins_of_results()
        return [birth.tensor for birth in found if birth.tensor in self._tensors.values() and not birth.op]

    def origin_of(self, tensor: Tensor) -> FirstNonFinite | None:
        """The first operation that made a tensor non-finite; None if none is known."""
        numbers = [n for n in self._origins.get(storage_key(tensor), ()) if n >= 0 and self.births[n].op]
        return self.births[min(numbers)] if numbers else None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _origins_of_results(self) -> list[FirstNonFinite]:
        """What reached a loss or a gradient: non-finite values in their order, then constants in theirs."""
        numbers = sorted((n for n in self.reached if n >= 0 or n < CONSTANT), key=lambda n: (n < 0, abs(n)))
        return [self.births[n] if n >= 0 else self.constants[CONSTANT - n - 1] for n in numbers]

    def _note(self, tensor: Tensor, what: str) -> None:
        key = storage_key(tensor)
        origins = self._origins.get(key, frozenset())
        if not any(origin >= 0 or origin < CONSTANT for origin in origins):
            origins = frozenset({REMOTE if key in self._shared or REMOTE in origins else OUTSIDE})
        for origin in origins:
            self.reached.setdefault(origin, []).append(what)

    def conclude(self) -> bool:
        """For a step that ended without telling of a loss: whether a network's output or a number was not finite."""
        bad = [tensor for tensor in self._results if not is_finite(tensor)]
        self._bad_results |= {"the output of the network": bad[-1]} if bad else {}
        for what, tensor in self._bad_results.items():
            self.is_loss_finite = False
            self._note(tensor, what)
        return bool(self._bad_results)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        name, kind = self._names.get(module), _class_name(module)
        outer, its_kind = self._modules[-1][:2] if self._modules else (None, "")
        # Nodes of Python functions, such as a checkpoint around this module.
        self._number(Location(outer, its_kind, *_source(), ""))
        if name is None and outer is not None:  # a wrapper, or part of a library's module
            name, kind = outer, its_kind
        self._modules.append((name, kind, current_node(), module))
        if module not in self._handles:  # a global hook would be called before the module's own ones
            self._handles[module] = module.register_forward_hook(self._leave_module, always_call=True)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._modules and self._modules[-1][-1] is module:  # replicas share their hooks
            self._modules.pop()
            if not self._modules:  # also within vmap, of which nothing is left afterwards
                self._results = [torch.func.debug_unwrap(each, recurse=True) for each in tensors_in(output)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # torch.cond and others that are given functions: these are watched
            return func(*(self._watched(each) for each in args), **kwargs)
        call = None
        with self._following(func):
            call = self._begin(func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            with self._following(func):
                self._end(call, result)
        return result

    def _watched(self, given: Any) -> Any:
        if isinstance(given, Tensor) or not callable(given) or hasattr(given, "_schema"):
            return given

        def computed(*args: Any) -> Any:
            with contextlib.ExitStack() as left:
                left.push(super(Trace, self).__exit__)
                super(Trace, self).__enter__()
                return given(*args)

        return computed

    @contextlib.contextmanager
    def _following(self, func: Any) -> Iterator[None]:
        """The last resort: what is wrong with the trace is no error of the program that it watches."""
        try:
            yield
        except Exception as error:
            if str(func) not in self.lost:
                self.lost[str(func)] = f"{type(error).__name__}: {error}"
                logger.warning("the doctor cannot follow %s", func, exc_info=error)

    def _begin(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call | None:
        """An operation that is about to be computed; None if its result needs no look."""
        if (generator := kwargs.get("generator")) is not None:
            self.generators.setdefault(generator, generator.get_state())
        named = [] if self._pauses or self._is_done else _named(func, args, kwargs)
        # DTensor operations happen between passes, or on local tensors that are seen.
        if self._pauses or self._is_done or any(is_dtensor(tensor) for _, tensor in named):
            return None
        if "c10d" in func.namespace or func.overloadpacket.__name__ == "all_gather_copy_in":
            # It may still run when it returns. Data of other ranks is checked where it is used; this rank's is in it.
            keys = {storage_key(tensor) for _, tensor in named}
            origins = frozenset().union(*(self._origins.get(key, frozenset()) for key in keys))
            self._shared.update(keys)
            self._origins.update(dict.fromkeys(keys if origins else (), origins))
            return None
        self.num_operations += 1
        name = func.overloadpacket.__name__
        node = current_node()
        self.last_backward = self.last_backward if node is None else self.num_operations
        place = self._place_of(node, name)
        statistics = [t for t in args[3:5] if isinstance(t, Tensor)] if name in _UPDATES_STATISTICS else []
        written = {storage_key(tensor) for tensor in (*_written(func, args, kwargs), *statistics)}
        inputs = [_Input(n, tensor, storage_key(tensor)) for n, tensor in named]
        read = {each.key for each in inputs} - written
        if read and read <= self._unwritten:  # only a collective can have written it, through its own memory
            self._shared.update(written)
            return None
        inputs = [each for each in inputs if each.key not in self._unwritten]
        for each in inputs:
            if each.key in written:  # keep a copy of what is overwritten
                each.tensor = each.tensor.clone()
        return _Call(func, name, args, kwargs, place, node is not None, inputs, written, statistics)

    def _end(self, call: _Call, result: Any) -> None:
        """What an operation has computed."""
        if call.name == "_local_scalar_dense" and not (isinstance(result, complex) or math.isfinite(result)):
            self._numbers = self._origins.get(call.inputs[0].key, frozenset()) if call.inputs else frozenset()
        if call.name in UNWRITTEN:
            for key in map(storage_key, tensors_in(result)):
                self._unwritten.add(key)
                if key not in call.written:  # new memory, perhaps of a freed tensor
                    self._shared.discard(key)
                    self._origins.pop(key, None)
                    self._marks.pop(key, None)
            return
        tested = [each.tensor for each in call.inputs] if call.name in _TESTS else []
        if bad := [tensor for tensor in tested if not is_finite(tensor)]:
            self._bad_results["a number that the program tests"] = bad[-1]
        outputs = [tensor for tensor in (*tensors_in(result), *call.statistics) if _has_numbers(tensor)]
        if result is None:  # fully_shard's copies into its buffers
            outputs = [tensor for tensor in _written(call.func, call.args, call.kwargs) if _has_numbers(tensor)]
        if outputs and not is_view(call.func):  # a view shares the storage of its base, and its records
            self._look(call, outputs, call.written)

    def _look(self, call: _Call, outputs: list[Tensor], written: set[int]) -> None:
        marks = self._new_marks(call, outputs)
        if not call.backward:
            self._find_collisions(call, outputs[0])
        losses = outputs[:1] if call.name == "_ctc_loss" else outputs  # its alignments are -inf where none is possible
        bad = [tensor for tensor in losses if not is_finite(tensor)]
        origins = self._origins_of(call, bad, marks) if bad else frozenset()
        for tensor in outputs:
            key = storage_key(tensor)
            self._unwritten.discard(key)
            in_place = key in written
            if not in_place:  # new memory, perhaps of a freed tensor
                self._shared.discard(key)
            self._update(self._marks, key, marks, keep=in_place)
            is_bad = any(tensor is each for each in bad)
            if is_bad and not tensor.ndim and call.inputs:
                self._bad_results["the loss"] = tensor
            # A write to a part of a storage does not change the rest.
            keep = in_place and (is_bad or not _is_whole(tensor))
            self._update(self._origins, key, origins if is_bad else frozenset(), keep=keep)

    def _origins_of(self, call: _Call, bad: list[Tensor], marks: frozenset[tuple[str, str]]) -> frozenset[int]:
        """The origins of the non-finite elements of `bad`: those of the inputs, or this operation."""
        # Some collectives (gloo's) end with a copy from their own memory.
        to = storage_key(call.args[0]) if call.name == "copy_" else None
        received = self._origins.get(to) or {REMOTE} if to in self._shared else None
        unread = _unread(call, bad)
        read = [each for each in call.inputs if each.key not in unread and _has_numbers(each.tensor)]
        given = [each for each in read if not is_finite(each.tensor)]
        origins: set[int] = set()
        for each in given:
            origins |= self._origins.get(each.key) or received or self._unknown(each, call.place)
        scalars = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, float)]
        if not origins and not all(map(math.isfinite, scalars)):
            origins |= {origin for origin in self._numbers if origin >= 0}
        constants = {origin for origin in origins if origin <= CONSTANT}
        if constants == origins and torch.Tag.pointwise in call.func.tags and _has_new(bad[0], given):
            origins = constants = set()
        if origins - constants:
            return frozenset(origins - constants)
        # An operation that is given a NaN has not produced it.
        has_nan = any(map(_has_nan, bad)) and not any(_has_nan(each.tensor) for each in given)
        is_mask = not any(bool((_comparable(each.tensor) == math.inf).any()) for each in given)
        is_emptied = has_nan and is_mask and (call.name in _TAKES_MASKS or "attention" in call.name)
        if not is_emptied and constants - {CONSTANT}:
            return frozenset(constants - {CONSTANT})
        beyond = [self.constants[CONSTANT - n - 1] for n in constants if n < CONSTANT]
        beyond = [each for each in beyond if not each.is_constant]
        if is_emptied and beyond:
            first = beyond[0]
            what = f"{first.op.split('.')[-1].strip('_')} in {first.output.dtype} at {first.place.source}"
            marks |= {("beyond", what)}
        birth = self._birth(call, bad[0], has_nan, bool(constants), marks)
        # Sums of masks and scores: no more suspicious than an infinity that the program writes.
        is_mask = call.name.rstrip("_") in _SUBTRACTS and not (has_nan or bool((_comparable(bad[0]) == math.inf).any()))
        if is_mask and bad[0].dtype in HALF and not call.backward:
            self.constants.append(birth)
            return frozenset({CONSTANT - len(self.constants)})
        is_written = call.name in _CONSTANTS and _has_infinite_scalar(call.args)
        is_written |= any(map(math.isnan, scalars))
        if is_written or (constants and not is_emptied):  # here, or before the window as a tensor of one number
            birth.is_constant = True
            self.constants.append(birth)
            return frozenset({CONSTANT - len(self.constants)})
        self.births.append(birth)
        return frozenset({birth.number})

    @staticmethod
    def _update(table: dict[int, frozenset[Any]], key: int, value: frozenset[Any], *, keep: bool) -> None:
        value = value | table.get(key, frozenset()) if keep else value
        if value:
            table[key] = value
        else:
            table.pop(key, None)

    def _unknown(self, found: _Input, place: Location) -> set[int]:
        """The origin of non-finite values that no watched operation produced."""
        if found.key in self._shared:
            return {REMOTE}
        if found.key in self._tensors:  # finite before the window, and written by something that does not say so
            return set()
        copied = (name for name, tensor in self._bad_batch.items() if same(tensor, found.tensor))
        name = self._own_tensor(found.key) or next(copied, None)
        if name is not None or found.tensor.numel() > 1:
            unseen = f"unseen {found.name}", found.tensor
            name, tensor = (name, found.tensor) if name else self._held(found.key) or unseen
            return {self._not_finite_before(name, tensor, found.key, place)}
        return {CONSTANT}

    def _own_tensor(self, key: int) -> str | None:
        """Name of a weight or buffer of the current module, which may be in none of the networks."""
        if not self._modules:
            return None
        module = self._modules[-1][-1]
        kind = _class_name(module)
        named = [("weight", module.named_parameters(recurse=False)), ("buffer", module.named_buffers(recurse=False))]
        return next(
            (f"{what} {kind}.{name}" for what, all_ in named for name, t in all_ if storage_key(t) == key), None
        )

    def _held(self, key: int) -> tuple[str, Tensor] | None:
        """Name and value of an attribute of a module or `self`, or of a variable: enclosing, global or local."""
        modules = [(name, module) for name, _, _, module in reversed(self._modules)]
        modules += [(name, module) for module, name in self._names.items()]
        places = [(f"attribute {name}." if name else "attribute ", _attributes(module)) for name, module in modules]
        frame, own = sys._getframe(1), list[tuple[str, dict[str, Any]]]()
        while frame is not None:
            if _is_shown(frame):
                own.append(("local ", frame.f_locals))
                enclosing = {name: frame.f_locals.get(name) for name in frame.f_code.co_freevars}
                places.append(("attribute ", _attributes(frame.f_locals.get("self"))))
                places.append(("variable ", frame.f_globals | enclosing))
            frame = frame.f_back
        for what, names in [*places, *own]:
            for name, value in names.items():
                within = [*value.values()] if isinstance(value, dict) else value
                within = within if isinstance(within, list | tuple) else [value]
                for each in within:
                    if isinstance(each, Tensor) and storage_key(each) == key:
                        return what + name, each
        return None

    def _not_finite_before(self, name: str, tensor: Tensor, key: int, place: Location) -> int:
        number = len(self.births)
        seen = Range.of(name.removeprefix("unseen "), tensor)
        birth = FirstNonFinite(number, "", place, False, [], seen, _has_nan(tensor), None)
        has_samples = name.startswith(("batch", "unseen", "variable")) and _num_rows(tensor) in self._batch_sizes
        birth.tensor, birth.rows = name, bad_rows(tensor) if has_samples else []
        values = _comparable(tensor)
        if not name.startswith(("weight", "unseen")) and not bool((values.isnan() | values.isposinf()).any()):
            # Only -inf, as in a mask of attention: no more suspicious than one that the program writes.
            self.constants.append(birth)
            number = CONSTANT - len(self.constants)
        else:
            self.births.append(birth)
        self._origins[key] = frozenset({number})
        return number

    def _birth(
        self, call: _Call, output: Tensor, has_nan: bool, only_masks: bool, marks: frozenset[tuple[str, str]]
    ) -> FirstNonFinite:
        floats = [each for each in call.inputs if _has_numbers(each.tensor)]
        known = [self._tensors.get(each.key, "") for each in floats]
        is_of_weights = bool(known) and all(name.startswith(("weight", "buffer")) for name in known)
        has_samples = not call.backward and not is_of_weights and _num_rows(output) in self._batch_sizes
        wide = _in_float64(call, output)
        pole = _pole(call.name, call.args, [each.tensor for each in call.inputs])
        moved = floats[-1:] if call.name in ("_to_copy", "copy_") else []
        held = [name for each in moved for kind, name in self._marks.get(each.key, ()) if kind == "input"]
        variances = [(n, each.tensor) for n, each in zip(known, floats, strict=True) if "running_var" in n]
        held += [n for n, tensor in variances if bool((tensor < 0).any())]
        marks = marks.union(*(self._marks.get(each.key, frozenset()) for each in floats))
        of_the_last = self._marks.get(floats[-1].key, frozenset()) if floats else frozenset()  # the divisor
        marks = frozenset(mark for mark in marks if mark[0] != "wide underflow" or mark in of_the_last)
        return FirstNonFinite(
            number=len(self.births),
            op=f"{call.func.namespace}.{call.name}",
            place=call.place,
            backward=call.backward,
            inputs=[
                Range.of(self._tensors.get(each.key, each.name), each.tensor)
                for each in (call.inputs if pole else floats)
            ],
            output=Range.of("output", output),
            has_nan=has_nan,
            wide=None if wide is None else dense(wide).abs().amax().item(),  # a NaN if there is one: it is no overflow
            at_a_pole=pole,
            only_masks=only_masks,
            marks=marks,
            rows=bad_rows(output) if has_samples else [],
            operation=self.num_operations,
            follows_backward=self.last_backward > 0 and not (call.backward or torch.is_grad_enabled()),
            tensor=min(held, default=""),
        )

    # --- marks and positions --------------------------------------------------------------------------------------

    def _new_marks(self, call: _Call, outputs: list[Tensor]) -> frozenset[tuple[str, str]]:
        name, place = call.name, call.place
        inherited = {mark for each in call.inputs for mark in self._marks.get(each.key, ())}
        marks: set[tuple[str, str]] = set()
        plain = [_compared(each) for each in outputs if is_plain(each) and not each.is_complex()]
        if name.rstrip("_") in _SPREADS_SIGMOID:
            marks |= {mark for mark in inherited if mark[0] in ("sigmoid", "wide sigmoid")}
        if name in _SPREADS_INPUT:
            marks |= {mark for mark in inherited if mark[0] == "input"}
        if name in _SPREADS_BCE:
            marks |= {mark for mark in inherited if mark[0] in ("bce", "wide bce")}
        is_cast = name == "_to_copy" and any(kind == "probability" for kind, _ in inherited)
        if (name in ("sigmoid", "sigmoid_") or is_cast) and plain:
            kind = "sigmoid" if outputs[0].dtype in HALF else "wide sigmoid"
            kind = kind if bool(((outputs[0] == 0) | (outputs[0] == 1)).any()) else "probability"
            marks.add((kind, f"sigmoid in {dtype_name(outputs[0].dtype)} at {place.source}"))
            marks |= {mark for mark in inherited if mark[0] == "probability"}
        if name == "binary_cross_entropy_backward":
            probabilities = [each.tensor for each in call.inputs if each.name == "self"]
            if any(bool(((each == 0) | (each == 1)).any()) for each in probabilities):
                kind = "bce" if any(kind == "sigmoid" for kind, _ in inherited) else "wide bce"
                marks.add((kind, f"binary_cross_entropy at {place.source}"))
        self.has_half |= outputs[0].dtype in HALF
        is_low = outputs[0].dtype in HALF
        if (is_low or outputs[0].dtype is torch.float32) and plain and not call.backward:
            what = f"{name.strip('_')} in {dtype_name(outputs[0].dtype)} at {place.source}"
            if name.rstrip("_") in _UNDERFLOWS and _underflows(call, outputs[0]):
                marks.add(("underflow" if is_low else "wide underflow", what))
            if is_low and name.rstrip("_") in _SUBTRACTS and _cancels(call, outputs[0]):
                marks.add(("cancellation", what))
        if name in _ADDS_EPS:
            eps = _small_number(call.args)
            if eps is not None and any(t.dtype in HALF and not torch.tensor(eps).to(t.dtype) for t in outputs):
                marks.add(("eps", f"{eps:g} in {dtype_name(outputs[0].dtype)} at {place.source}"))
        fresh = {kind for kind, _ in marks}  # a zero of this operation hides those before it
        fading = {mark for mark in inherited if mark[0] in _FADING and mark[0] not in fresh}
        if fading and any(bool((tensor <= 0).any()) for tensor in plain):
            marks |= fading
        return frozenset(marks)

    def _find_collisions(self, call: _Call, output: Tensor) -> None:
        dtype = output.dtype
        if dtype not in HALF:
            return
        if call.name == "arange":
            self._compare(call, output, dtype, output.numel())
            return
        for each in call.inputs:
            source = each.tensor.detach()
            is_cast = call.name == "_to_copy" or (call.name in _POSITIONAL and not source.is_floating_point())
            is_cast = is_cast and is_plain(source) and not source.is_complex()
            if not is_cast or source.dtype in (*HALF, torch.bool) or not 2 < source.numel() <= 2**22:
                continue
            values = source.flatten().double()
            if not all(bool((part == part.round()).all()) for part in (values[:64], values)):
                continue
            # Integers with gaps are a table of something; positions have none.
            distinct = values.unique()
            if len(distinct) > 2 and bool((distinct.diff() == 1).all()):
                self._compare(call, distinct, dtype, len(distinct))

    def _compare(self, call: _Call, numbers: Tensor, dtype: torch.dtype, distinct: int) -> None:
        if (kept := len(numbers.to(dtype).unique())) < distinct:
            name, largest = dtype_name(dtype), numbers.abs().max().item()
            self.collisions.append(Collision(call.place, f"aten.{call.name}", name, distinct, kept, largest))

    # --- places ---------------------------------------------------------------------------------------------------

    def _place_of(self, node: Any, name: str) -> Location:
        again = recomputed()
        module, kind, entered_by = self._modules[-1][:3] if self._modules else (None, "", None)
        if node is not None and again is None:
            place = self._places.get(node._sequence_nr()) or Location(None, "", *_source(), node.name())
            source, code = _source(by_autograd=True)
            if source:  # a hook, or a backward written in Python
                place = replace(place, source=source, code=code, forward="")
            if entered_by is node:  # which computes modules again, itself
                place = replace(place, module=module, kind=kind, forward=name)
        else:
            if again is not None and not self._modules:
                module, kind = self._names.get(again), _class_name(again)
            place = Location(module, kind, *_source(), name)
        self._number(place)
        return place

    def _number(self, place: Location) -> None:
        """Give a place to the nodes that are new in this thread.

        Autograd creates an operation's node just before the operation gets here, one per level of torch.func. One
        without a node finds the number of its predecessor, which is already used.
        """
        last, thread = last_node(), threading.get_ident()
        for number in range(self._last.get(thread, last - 1) + 1, last + 1):
            self._places.setdefault(number, place)
        self._last[thread] = last


def last_node() -> int:
    return _sequence_number() - 1


def _attributes(owner: Any) -> dict[str, Any]:
    return {**vars(type(owner)), **getattr(owner, "__dict__", {})}


def _is_shown(frame: Any) -> bool:
    is_mode = frame.f_code.co_name == "__torch_dispatch__"  # also one of a subclass, in another file
    return not is_mode and not frame.f_code.co_filename.startswith((_TORCH, *_NOT_SHOWN, "<"))


def _source(*, by_autograd: bool = False) -> tuple[str, str]:
    """file:line of the innermost frame to show, and the line; `by_autograd`: empty if autograd's engine called none."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if by_autograd and path in _ENGINE:
            break
        if _is_shown(frame):
            shown = next((path.removeprefix(root) for root in _ROOTS if path.startswith(root)), path)
            return f"{shown}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()
        frame = frame.f_back
    return "" if by_autograd else "unknown", ""


def _class_name(module: nn.Module) -> str:
    cls, *bases = type(module).__mro__
    if bases[0].__name__ == "FSDPModule":  # the class that fully_shard made
        cls = bases[1]
    return getattr(cls, "_of", cls).__name__  # the original class of an fp32 island


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_key(tensor: Tensor) -> int:
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # no storage: sparse, or a wrapper
        return id(tensor)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether it holds numbers with fractions to look at: none on the meta device, and no packed ones."""
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    return has_fractions and not tensor.is_meta and tensor.dtype is not _PACKED


def is_plain(tensor: Tensor) -> bool:
    """Whether it is one strided array, not sparse and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The arrays that hold the numbers of a tensor of any layout; in its memory, if it has no duplicates to add."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    return [(tensor.coalesce() if tensor.is_sparse else tensor).values()]


def dense(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in one array."""
    parts = [part.resolve_conj() for part in parts_of(tensor)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten() for part in parts] or [torch.empty(0, dtype=tensor.dtype, device=tensor.device)])


def _comparable(tensor: Tensor) -> Tensor:
    """All numbers of a tensor: real, in a dtype that can be compared."""
    return _real(_compared(dense(tensor)))


def _compared(tensor: Tensor) -> Tensor:
    """In a dtype that can be compared: float8 cannot."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_finite(tensor: Tensor) -> bool:
    if not _has_numbers(tensor) or not tensor.numel():
        return True
    values = _comparable(tensor)
    if math.isfinite(values.sum().item()):  # else a sum of finite numbers overflowed, or one is not finite
        return True
    # Far faster than a test of each number; a NaN is both the smallest and the largest.
    in_memory = sorted(range(values.ndim), key=values.stride, reverse=True)  # ten times faster than across it
    ends = values.permute(in_memory).aminmax()
    if values.is_cpu:  # where reading costs less than one more operation
        return all(math.isfinite(end.item()) for end in ends)
    return bool(torch.stack(ends).isfinite().all())


def _has_new(result: Tensor, given: Sequence[_Input]) -> bool:
    """Whether numbers of a pointwise result are not finite where those that it was given are."""
    if not all(is_plain(each) and each.ndim <= result.ndim for each in (result, *(each.tensor for each in given))):
        return False
    is_new = ~_compared(result).isfinite()
    for each in given:
        is_new = is_new & _compared(each.tensor).isfinite()
    return bool(is_new.any())


def _has_nan(tensor: Tensor) -> bool:
    return bool(_comparable(tensor).isnan().any())


def _is_whole(tensor: Tensor) -> bool:
    return not is_plain(tensor) or tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


@functools.cache  # torch makes a schema anew each time
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of an operation's arguments, and whether it writes to them."""
    return [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in func._schema.arguments]


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The input tensors, by their names in the operation's schema."""
    found = []
    for name, value in [*zip((name for name, _ in _arguments(func)), args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple | list):
            tensors = list(tensors_in(value))
            found += [(name if len(tensors) == 1 else f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors)]
    return found


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, (name, writes) in enumerate(_arguments(func)):
        if writes:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(name))


def _unread(call: _Call, bad: list[Tensor]) -> set[int]:
    """What has no part in a bad result: a table of a CTC loss, which holds -inf where no alignment is possible.

    Running statistics of a BatchNorm in training, if more than they is bad: it normalises by the batch alone.
    """
    if call.name == "_ctc_loss_backward":
        return {storage_key(call.args[6])}
    trains = 7 if call.name == "native_batch_norm_backward" else 5
    if "batch_norm" not in call.name or len(call.args) <= trains or call.args[trains] is False:
        return set()
    found = {storage_key(tensor) for tensor in call.args[3:5] if isinstance(tensor, Tensor)}
    return found if any(storage_key(tensor) not in found for tensor in bad) else set()


@functools.cache
def is_view(func: Any) -> bool:
    returns = func._schema.returns
    if func.overloadpacket.__name__.startswith("unsafe_split"):  # of a GRU; its schema does not say so
        return True
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    if (a.dtype, a.device, a.layout, a.is_meta) != (b.dtype, b.device, b.layout, False):
        return False
    a, b = _comparable(a), _comparable(b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[:1].numel() if is_plain(tensor) else 0


def bad_rows(tensor: Tensor) -> list[int]:
    """Indices along the first dimension with non-finite elements; none if all have them."""
    if not is_plain(tensor) or not tensor.ndim or tensor.shape[0] < 2:
        return []
    rows = (~torch.isfinite(_compared(tensor.detach()))).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    return rows if len(rows) < tensor.shape[0] else []


def _has_infinite_scalar(args: Sequence[Any]) -> bool:
    return any(
        not abs(a) < float("inf")
        if isinstance(a, int | float)
        else isinstance(a, Tensor) and a.numel() == 1 and not is_finite(a)
        for a in args
    )


def _small_number(args: Sequence[Any]) -> float | None:
    for a in args[1:]:
        value = a.item() if isinstance(a, Tensor) and a.numel() == 1 and a.is_floating_point() else a
        if isinstance(value, float) and 0 < value < 1e-3:
            return value
    return None


def _pole(name: str, args: Sequence[Any], tensors: list[Tensor]) -> str:
    """Which argument has no finite result, if one of `args`, whose tensors are given, is known to have none."""
    name = name.rstrip("_")
    of = [dense(torch.as_tensor(each)) for each in args[:2] if isinstance(each, Tensor | int | float | complex)]
    of = [_compared(each) for each in of] or [torch.ones(())]
    is_below = [not each.is_complex() and bool((each < 0).any()) for each in of]
    has_zero = [bool((each == 0).any()) for each in of]
    if any(not each.numel() for each in tensors):
        return "no elements"
    if name in ("div", "true_divide", "fmod", "remainder") and has_zero[-1]:
        return "a zero"
    if name in ("log", "log2", "log10", "xlogy", "rsqrt", "sqrt") and is_below[-1]:
        return "a negative number"
    if name in ("log", "log2", "log10", "xlogy", "rsqrt", "reciprocal") and has_zero[-1]:
        return "a zero"
    if name in ("lgamma", "digamma") and (has_zero[0] or is_below[0]):
        return "a zero or a negative number"
    if name in ("addcdiv", "_weight_norm_interface") and bool((tensors[-1] == 0).any()):
        return "a zero"
    if name == "log1p" and not of[0].is_complex() and bool((of[0] <= -1).any()):
        return "-1 or a number below it"
    if name == "pow" and has_zero[0] and is_below[1]:
        return "a zero"
    if name == "pow" and is_below[0] and not of[1].is_complex() and bool((of[1] != of[1].round()).any()):
        return "a negative number"
    if name in ("logdet", "_linalg_slogdet", "linalg_slogdet"):
        return "a singular matrix"
    if name in ("linalg_solve_ex", "_linalg_solve_ex") and bool(torch.linalg.lu_factor_ex(of[0]).info.any()):
        return "a singular matrix"
    if name == "linalg_solve_triangular" and bool((of[0].diagonal(0, -2, -1) == 0).any()):
        return "a singular matrix"
    is_bounded = name in ("acos", "asin", "acosh", "atanh", "logit", "erfinv")
    return "a number at the edge of its domain or beyond" if is_bounded else ""


def _underflows(call: _Call, output: Tensor) -> bool:
    """Whether a result is 0 that is another number in float64, on the same inputs."""
    zero = output == 0
    if not bool(zero.any()):
        return False
    if call.name == "_to_copy":
        given = _copied(call)
        return is_plain(given) and bool((zero & (given.detach() != 0)).any())
    wide = _in_float64(call, output)
    return wide is not None and wide.shape == zero.shape and bool((wide[zero] != 0).any())


def _copied(call: _Call) -> Tensor:
    """What a copy was given; torch.func copies numbers, too."""
    return call.inputs[-1].tensor if call.inputs else torch.as_tensor(call.args[call.name == "copy_"])


def _cancels(call: _Call, output: Tensor) -> bool:
    """Whether a sum of two 16-bit tensors is no more than their own rounding errors."""
    tensors = [each.tensor for each in call.inputs if each.tensor.dtype in HALF]
    if len(tensors) != 2 or not all(map(is_plain, tensors)):
        return False
    largest = torch.maximum(*(tensor.detach().abs().float() for tensor in tensors))
    lost = output.detach().abs().float() <= torch.finfo(output.dtype).eps * largest
    return bool((lost & (largest > 0)).any())


def _widest(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _in_float64(call: _Call, output: Tensor) -> Tensor | None:
    """The result of the operation in float64 on the same inputs; None if it cannot be computed."""
    if call.name in ("_to_copy", "copy_"):
        return _widest(_copied(call))
    func = _functional(call.func) if call.func._schema.is_mutable else call.func
    before = iter(call.inputs)

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _widest(next(before).tensor)
        if isinstance(value, tuple | list):
            return type(value)(widen(item) for item in value)
        return value

    try:
        assert func is not None
        args = [widen(each) for each in call.args]
        kwargs = {name: widen(each) for name, each in call.kwargs.items() if name not in _FORMAT}
        results = [t for t in tensors_in(func(*args, **kwargs)) if t.shape == output.shape]
        return min(results, key=is_finite)  # of several with this shape the one that is not finite
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, StopIteration, TypeError):
        return None  # no float64 kernel


def _functional(func: Any) -> Callable[..., Any] | None:
    """The out-of-place variant of an in-place operation."""
    name = func.overloadpacket.__name__.rstrip("_")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, func._schema.overload_name or "default", None) if packet is not None else None


def named_tensors(nets: Iterable[tuple[str, nn.Module]], batch: Any) -> dict[str, Tensor]:
    """Weights and buffers by name, and the tensors of a batch as `batch[0]`, `batch[1]`, ..."""
    found: dict[str, Tensor] = {}
    for number, (prefix, net) in enumerate(nets, 1):
        dot = f"{prefix}." if prefix else ""
        own = {f"weight {dot}{name}": tensor for name, tensor in net.named_parameters()}
        own |= {f"buffer {dot}{name}": tensor for name, tensor in net.named_buffers()}
        # Two networks without a prefix may have the same names.
        own = dict(zip(own, local(own.values()), strict=True))
        found |= {f"{name} of network {number}" if name in found else name: tensor for name, tensor in own.items()}
    for name, tensor in _walk(batch, "batch"):
        found[name] = tensor
    return found


def own_names(nets: Iterable[tuple[str, nn.Module]]) -> dict[Tensor, str]:
    """The names of weights and buffers."""
    return {tensor: name.partition(" ")[2] for name, tensor in named_tensors(nets, ()).items()}


def _walk(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value).__name__ == "ndarray" and value.dtype.kind == "f" and value.flags.writeable:
        yield name, torch.from_numpy(value)
    elif depth > _DEEPEST:  # objects may refer to each other
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{name}[{key}]", depth + 1)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _walk(item, f"{name}[{i}]", depth + 1)
    elif not callable(value):
        fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
        for key in dict.fromkeys([*fields, *getattr(value, "__dict__", ())]):
            yield from _walk(getattr(value, key, None), f"{name}.{key}", depth + 1)
