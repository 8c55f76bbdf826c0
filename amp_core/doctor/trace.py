"""Watch every operation of a window, forward and backward, for the first non-finite value.

Module hooks cannot find it: they miss an overflow inside a module, in the functional code of a parent, in the loss or
in the backward pass, and they blame the BatchNorm that turned the convolution's inf into NaN. A dispatch mode sees
each operation below autograd and autocast, with its actual inputs.

Two things are recorded per tensor storage. *Origins*: the findings from which its non-finite elements descend. So a
mask of -inf that a softmax consumed is not blamed, and of several findings the one that reached the loss or a gradient
is. *Marks*: see `findings.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.plain_state import all_tensors
from amp_core.doctor import operations, values
from amp_core.doctor.findings import Collision, Finding, Marks, batch_sizes, collision_of, new_marks
from amp_core.doctor.operations import Call, Input
from amp_core.doctor.places import BEFORE, Location, Places, class_name, current_node
from amp_core.doctor.values import Range, is_finite, storage_key
from amp_core.lowp.masters import weights_by_side
from amp_core.step.observer import Observer
from amp_core.tensors import HALF, is_dtensor, local
from amp_core.torch_private import find, need

logger = logging.getLogger("amp_recipes")

NEEDED = (
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._current_autograd_node",
    "torch._C._autograd._get_sequence_nr",
    "torch.autograd.graph.Node._sequence_nr",
    "torch.ops.aten.add.Tensor._schema",
)
"""Private names of torch that the trace needs."""
DispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode", object)
OUTSIDE, REMOTE, CONSTANT = -1, -2, -3
"""Origins outside the window: before it, another rank, a number. Below: constants of the program."""
_CONSTANTS = {"full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "where", "constant_pad_nd"}
_CONSTANTS |= {"lift_fresh", "index_fill", "add", "sub", "rsub", "mul", "div"}
"""Operations that write a constant inf, such as for an attention mask."""
_TESTS = {"eq", "ne", "isnan", "isinf", "isfinite"}
_TAKES_MASKS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "sub", "rsub"}
"""They return NaN for a row of only infinities: the empty row is the cause, not the mask; `sub` in one by hand."""


class Trace(Observer, DispatchMode):
    """Watches operations inside `with trace:`; syncs with the device at each one.

    Other threads are not seen, since dispatch modes are thread-local; autograd's are, on every device.

    Args:
        tensors: those from before the window, by name: weights, buffers, batches.
        in_steps: watch the steps of optimizers, too.
    """

    supports_higher_order_operators = True

    def __init__(
        self, names: Mapping[nn.Module, str], tensors: Mapping[str, Tensor], *, in_steps: bool = False
    ) -> None:
        need("the doctor", *NEEDED)
        super().__init__()
        self._in_steps = in_steps
        self.findings: list[Finding] = []
        self.constants: list[Finding] = []
        """Constant infinities and NaN of the program, such as those of a mask."""
        self.collisions: list[Collision] = []
        self.reached: dict[int, list[str]] = {}
        """Origins of non-finite results: number of the finding -> names of losses and gradients."""
        self._lost: set[str] = set()
        """Operations that could not be followed: numbers that come from there have no origin."""
        self.num_operations, self.last_backward = 0, 0
        self.has_half = False
        self.generators: dict[torch.Generator, Tensor] = {}
        """Generators that the program draws from, with their states from before."""
        self.is_loss_finite, self.grad_norm, self.largest_gradient = True, 0.0, (0.0, "")
        """The gradient norm in float64, of this rank's shards; that of the largest gradient, and its weight."""
        self.places = Places(names, self._keep_results)
        self._origins = defaultdict[int, frozenset[int]](frozenset)
        self._marks = defaultdict[int, Marks](frozenset)
        self._bad_results: dict[str, Tensor] = {}
        self._results: list[Tensor] = []
        self._numbers: frozenset[int] = frozenset()
        """Origins of non-finite tensors that became Python numbers."""
        self._unwritten: set[int] = set()
        self._shared: set[int] = set()
        self._tensors = {storage_key(tensor): name for name, tensor in tensors.items()}
        self._batch_sizes = batch_sizes(tensors)
        self._bad_batch: dict[str, Tensor] = {}
        """To recognise them where the program copies them unseen, as from arrays."""
        self._pauses, self._is_done = 0, False
        for name, tensor in tensors.items():
            if name.startswith("batch"):
                self._marks[storage_key(tensor)] = frozenset({("input", name)})
            if not is_finite(tensor):
                self._bad_batch |= {name: tensor} if name.startswith("batch") else {}
                self._not_finite_before(name, tensor, storage_key(tensor), BEFORE)

    def __enter__(self) -> Trace:
        self.places.start()
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self.places.stop()

    # --- moments of `Amp` ------------------------------------------------------------------------------------------

    def on_loss(self, loss: Tensor) -> None:
        self._pauses += not self._in_steps
        with self._following("the loss"):
            if not is_finite(loss):
                self.is_loss_finite = False
                self._note(loss, "the loss")
                # Nothing is earlier than the first value, and gradients of a loss that is not finite prove nothing.
                self._is_done |= 0 in self.reached and all(each.op for each in (*self.findings[1:], *self.constants))
        self._pauses -= not self._in_steps

    def on_gradients(self, params: Sequence[Tensor], grads: Sequence[Tensor], scaled: bool) -> None:
        self._pauses += not self._in_steps
        with self._following("the gradients"):
            low, grads = weights_by_side(), local(grads)
            weights = local([low.get(param, param) for param in params])
            names = [self._tensors.get(storage_key(weight), "a weight").removeprefix("weight ") for weight in weights]
            sizes = [torch.linalg.vector_norm(values.comparable(grad), dtype=torch.float64).item() for grad in grads]
            norm = math.hypot(*sizes)
            self.grad_norm = max(self.grad_norm, norm)
            self.largest_gradient = max([self.largest_gradient, *zip(sizes, names, strict=True)])
            for name, grad in zip(names, grads, strict=True):
                if not (math.isfinite(norm) or self._is_done or is_finite(grad)):
                    self._note(grad, f"the gradient of {name}")
        self._pauses -= not self._in_steps

    def on_step_begin(self) -> None:
        self._pauses += not self._in_steps

    def on_step_end(self, taken: Tensor) -> None:
        self._pauses -= not self._in_steps

    # --- results --------------------------------------------------------------------------------------------------

    @property
    def first(self) -> Finding | None:
        """The earliest finding that reached a loss or a gradient; else an infinite constant that did."""
        numbers = sorted((n for n in self.reached if n >= 0 or n < CONSTANT), key=lambda n: (n < 0, abs(n)))
        return next((self.findings[n] if n >= 0 else self.constants[CONSTANT - n - 1] for n in numbers), None)

    def origin_of(self, tensor: Tensor) -> Finding | None:
        """The first operation that made a tensor non-finite; None if none is known."""
        numbers = [n for n in self._origins[storage_key(tensor)] if n >= 0 and self.findings[n].op]
        return self.findings[min(numbers)] if numbers else None

    def conclude(self) -> bool:
        """For a step that ended without `on_loss`: whether a network's output or a number was not finite."""
        bad = [tensor for tensor in self._results if not is_finite(tensor)]
        self._bad_results |= {"the output of the network": bad[-1]} if bad else {}
        for what, tensor in self._bad_results.items():
            self.is_loss_finite = False
            self._note(tensor, what)
        return bool(self._bad_results)

    def _note(self, tensor: Tensor, what: str) -> None:
        key = storage_key(tensor)
        origins = self._origins[key]
        if not any(origin >= 0 or origin < CONSTANT for origin in origins):
            origins = frozenset({REMOTE if key in self._shared or REMOTE in origins else OUTSIDE})
        for origin in origins:
            self.reached.setdefault(origin, []).append(what)

    def _keep_results(self, output: Any) -> None:
        """Keep what a network returns, also within vmap, of which nothing is left afterwards."""
        self._results = [torch.func.debug_unwrap(each, recurse=True) for each in all_tensors(output)]

    # --- operations -----------------------------------------------------------------------------------------------

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
        """Log an error of the trace itself, which must not end the program that it watches."""
        try:
            yield
        except Exception as error:
            if str(func) not in self._lost:
                logger.warning("the doctor cannot follow %s", func, exc_info=error)
            self._lost.add(str(func))

    def _begin(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """Describe an operation before it is computed; None if its result need not be checked."""
        if (generator := kwargs.get("generator")) is not None:
            self.generators.setdefault(generator, generator.get_state())
        if self._pauses or self._is_done:
            return None
        named = operations.named_inputs(func, args, kwargs)
        # DTensor operations happen between passes, or on local tensors that are seen.
        if any(is_dtensor(tensor) for _, tensor in named):
            return None
        if "c10d" in func.namespace or func.overloadpacket.__name__ == "all_gather_copy_in":
            # It may still run when it returns. Data of other ranks is checked where it is used; this rank's is in it.
            keys = {storage_key(tensor) for _, tensor in named}
            origins = frozenset().union(*(self._origins[key] for key in keys))
            self._shared.update(keys)
            self._origins.update(dict.fromkeys(keys, origins))
            return None
        self.num_operations += 1
        name = func.overloadpacket.__name__
        node = current_node()
        self.last_backward = self.last_backward if node is None else self.num_operations
        place = self.places.of(node, name)
        written = list(operations.written_by(func, args, kwargs))
        keys = set(map(storage_key, written))
        inputs = [Input(n, tensor, storage_key(tensor)) for n, tensor in named]
        read = {each.key for each in inputs} - keys
        if read and read <= self._unwritten:  # only a collective can have written it, through its own memory
            self._shared.update(keys)
            return None
        inputs = [each for each in inputs if each.key not in self._unwritten]
        for each in inputs:
            if each.key in keys:  # keep a copy of what is overwritten
                each.tensor = each.tensor.clone()
        return Call(func, name, args, kwargs, place, node is not None, inputs, written, keys)

    def _end(self, call: Call, result: Any) -> None:
        """Check what an operation has computed."""
        if call.name == "_local_scalar_dense" and not (isinstance(result, complex) or math.isfinite(result)):
            self._numbers = self._origins[call.inputs[0].key] if call.inputs else frozenset()
        if call.name in operations.UNWRITTEN:
            for key in map(storage_key, all_tensors(result)):
                self._unwritten.add(key)
                if key not in call.keys:  # new memory, perhaps of a freed tensor
                    self._shared.discard(key)
                    self._origins.pop(key, None)
                    self._marks.pop(key, None)
            return
        tested = [each.tensor for each in call.inputs] if call.name in _TESTS else []
        if bad := [tensor for tensor in tested if not is_finite(tensor)]:
            self._bad_results["a number that the program tests"] = bad[-1]
        # Not all that is written is returned: running statistics, fully_shard's copies into its buffers.
        outputs = {id(tensor): tensor for tensor in (*all_tensors(result), *call.written) if values.has_numbers(tensor)}
        if outputs and not operations.is_view(call.func):  # a view shares the storage of its base, and its records
            self._look(call, [*outputs.values()])

    def _look(self, call: Call, outputs: list[Tensor]) -> None:
        self.has_half |= outputs[0].dtype in HALF
        marks = new_marks(call, outputs, self._marks_of(call.inputs))
        if not call.backward and (found := collision_of(call, outputs[0])):
            self.collisions.append(found)
        losses = outputs[:1] if call.name == "_ctc_loss" else outputs  # its alignments are -inf where none is possible
        bad = [tensor for tensor in losses if not is_finite(tensor)]
        origins = self._origins_of(call, bad, marks) if bad else frozenset()
        for tensor in outputs:
            key = storage_key(tensor)
            self._unwritten.discard(key)
            in_place = key in call.keys
            if not in_place:  # new memory, perhaps of a freed tensor
                self._shared.discard(key)
            self._marks[key] = marks | self._marks[key] if in_place else marks
            is_bad = any(tensor is each for each in bad)
            if is_bad and not tensor.ndim and call.inputs:
                self._bad_results["the loss"] = tensor
            # A write to a part of a storage does not change the rest.
            kept = self._origins[key] if in_place and (is_bad or not values.is_whole(tensor)) else frozenset()
            self._origins[key] = kept | origins if is_bad else kept

    def _marks_of(self, inputs: Sequence[Input]) -> Marks:
        return frozenset().union(*(self._marks[each.key] for each in inputs))

    # --- origins --------------------------------------------------------------------------------------------------

    def _origins_of(self, call: Call, bad: list[Tensor], marks: Marks) -> frozenset[int]:
        """The origins of the non-finite elements of `bad`: those of the inputs, or this operation."""
        # Some collectives (gloo's) end with a copy from their own memory.
        to = storage_key(call.args[0]) if call.name == "copy_" else None
        received = self._origins[to] or {REMOTE} if to in self._shared else None
        unread = operations.unread_by(call, bad)
        read = [each for each in call.inputs if each.key not in unread and values.has_numbers(each.tensor)]
        given = [each for each in read if not is_finite(each.tensor)]
        origins: set[int] = set()
        for each in given:
            origins |= self._origins[each.key] or received or self._unknown(each, call.place)
        scalars = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, float)]
        if not origins and not all(map(math.isfinite, scalars)):
            origins |= {origin for origin in self._numbers if origin >= 0}
        constants = {origin for origin in origins if origin <= CONSTANT}
        if (
            constants == origins
            and torch.Tag.pointwise in call.func.tags
            and values.has_new(bad[0], [each.tensor for each in given])
        ):
            origins = constants = set()
        if origins - constants:
            return frozenset(origins - constants)
        # An operation that is given a NaN has not produced it.
        is_nan = any(map(values.has_nan, bad)) and not any(values.has_nan(each.tensor) for each in given)
        is_mask = not any(values.has_positive_infinity(each.tensor) for each in given)
        is_emptied = is_nan and is_mask and (call.name in _TAKES_MASKS or "attention" in call.name)
        if not is_emptied and constants - {CONSTANT}:
            return frozenset(constants - {CONSTANT})
        beyond = [self.constants[CONSTANT - n - 1] for n in constants if n < CONSTANT]
        beyond = [each for each in beyond if not each.is_constant]
        if is_emptied and beyond:
            first = beyond[0]
            what = f"{first.operator} in {first.output.dtype} at {first.place.source}"
            marks |= {("beyond", what)}
        finding = self._finding(call, bad[0], is_nan, bool(constants), marks)
        # Sums of masks and scores are treated like an infinity that the program writes.
        is_mask = call.base in operations.SUBTRACTS and not (is_nan or values.has_positive_infinity(bad[0]))
        if is_mask and bad[0].dtype in HALF and not call.backward:
            return frozenset({self._add_constant(finding)})
        is_written = call.base in _CONSTANTS and operations.has_infinite_scalar(call.args)
        is_written |= any(map(math.isnan, scalars))
        if is_written or (constants and not is_emptied):  # here, or before the window as a tensor of one number
            finding.is_constant = True
            return frozenset({self._add_constant(finding)})
        self.findings.append(finding)
        return frozenset({finding.number})

    def _add_constant(self, finding: Finding) -> int:
        self.constants.append(finding)
        return CONSTANT - len(self.constants)

    def _unknown(self, found: Input, place: Location) -> set[int]:
        """The origin of non-finite values that no watched operation produced."""
        if found.key in self._shared:
            return {REMOTE}
        if found.key in self._tensors:  # finite before the window, and written by an operation without a schema for it
            return set()
        copied = (name for name, tensor in self._bad_batch.items() if values.same(tensor, found.tensor))
        name = self._own_tensor(found.key) or next(copied, None)
        if name is None and found.tensor.numel() == 1:
            return {CONSTANT}
        return {self._not_finite_before(name or f"argument {found.name}", found.tensor, found.key, place)}

    def _own_tensor(self, key: int) -> str | None:
        """Name of a weight or buffer of the current module, which may be in none of the networks."""
        if not self.places.modules:
            return None
        module = self.places.modules[-1][-1]
        named = [("weight", module.named_parameters(recurse=False)), ("buffer", module.named_buffers(recurse=False))]
        own = (f"{what} {class_name(module)}.{n}" for what, all_ in named for n, t in all_ if storage_key(t) == key)
        return next(own, None)

    def _not_finite_before(self, name: str, tensor: Tensor, key: int, place: Location) -> int:
        seen, has_nan = Range.of(name, tensor), values.has_nan(tensor)
        finding = Finding(len(self.findings), "", place, False, [], seen, has_nan, None, tensor=name)
        has_samples = name.startswith("batch") and values.num_rows(tensor) in self._batch_sizes
        finding.rows = values.bad_rows(tensor) if has_samples else []
        if not (name.startswith("weight") or has_nan or values.has_positive_infinity(tensor)):
            # Only -inf, as in a mask of attention: treated like one that the program writes.
            number = self._add_constant(finding)
        else:
            number = finding.number
            self.findings.append(finding)
        self._origins[key] = frozenset({number})
        return number

    def _finding(self, call: Call, output: Tensor, is_nan: bool, only_masks: bool, marks: Marks) -> Finding:
        floats = [each for each in call.inputs if values.has_numbers(each.tensor)]
        known = [self._tensors.get(each.key, "") for each in floats]
        is_of_weights = bool(known) and all(name.startswith(("weight", "buffer")) for name in known)
        has_samples = not call.backward and not is_of_weights and values.num_rows(output) in self._batch_sizes
        wide = operations.in_float64(call, output)
        at_a_pole = operations.pole(call)
        moved = floats[-1:] if call.name in ("_to_copy", "copy_") else []
        held = [name for each in moved for kind, name in self._marks[each.key] if kind == "input"]
        variances = [(n, each.tensor) for n, each in zip(known, floats, strict=True) if "running_var" in n]
        held += [n for n, tensor in variances if bool((tensor < 0).any())]
        of_the_last = self._marks_of(floats[-1:])  # the divisor
        marks |= self._marks_of(floats)
        shown = call.inputs if at_a_pole else floats
        return Finding(
            number=len(self.findings),
            op=f"{call.func.namespace}.{call.name}",
            place=call.place,
            backward=call.backward,
            inputs=[Range.of(self._tensors.get(each.key, each.name), each.tensor) for each in shown],
            output=Range.of("output", output),
            has_nan=is_nan,
            wide=None if wide is None else values.dense(wide).abs().amax().item(),  # a NaN is no overflow
            at_a_pole=at_a_pole,
            only_masks=only_masks,
            marks=frozenset(mark for mark in marks if mark[0] != "wide underflow" or mark in of_the_last),
            rows=values.bad_rows(output) if has_samples else [],
            operation=self.num_operations,
            follows_backward=self.last_backward > 0 and not (call.backward or torch.is_grad_enabled()),
            tensor=min(held, default=""),
        )
