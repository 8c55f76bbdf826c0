"""One code path for every mode of mixed precision: autocast, backward, step, update.

    amp = Amp.named("fp16", device="cuda")
    for window in windows(loader, accumulation=4):
        for micro in window:
            with amp.autocast():
                loss = loss_fn(model(micro.batch[0]), micro.batch[1])
            amp.backward(loss, micro.weight)
        report = amp.step(optimizer, clip=Clip.norm(1.0))
        amp.update()
        amp.zero_grad(optimizer)

`step` unscales, checks, clips and steps, in that order, in fp32 and bf16 too: a non-finite gradient never reaches a
weight. With a fused optimizer all of it happens on the device; the host reads nothing back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import AmpConfig
from amp_core.lowp.weights import LowPrecisionWeights, is_low
from amp_core.step import settings
from amp_core.step.buffers import BufferGuard
from amp_core.step.clip import Clip
from amp_core.step.fused import bare_step, take_step
from amp_core.step.gradients import (
    check_gradients,
    grad_versions,
    lay_out_gradients,
    norm_of,
    norm_over_ranks,
    not_finite,
    run_backward,
    weights_of,
    with_grads,
)
from amp_core.step.observer import Observer
from amp_core.step.report import (
    OptimizerState,
    Rehearsal,
    StepReport,
    can_skip_on_device,
    require_no_copies,
    require_steppable,
)
from amp_core.step.scaler import LossScale, Numbers, policy_of
from amp_core.tensors import (
    UNTESTED_DEVICES,
    has_16bit,
    is_sharded,
    is_state_sharded,
    is_there,
    local,
    multiply_,
    several_ranks,
    step_on_local_shards,
)
from amp_core.torch_private import log_missing

logger = logging.getLogger("amp_recipes")
_USABLE = "_amp_core_usable"  # where an optimizer keeps which `Amp` has checked it, with how many groups


def _at_least_fp32(tensor: Tensor) -> Tensor:
    """In float32 or complex64, unless it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _zero_or_nan(loss: Tensor, like: Tensor) -> Tensor:
    """0 of a finite loss, else NaN, with the dtype and device of `like`."""
    mine = local([loss])[0]
    return (mine - mine).to(like, non_blocking=True)


class Amp:
    """A mode of mixed precision: what to cast, how to scale, when to skip.

    Every method works in every mode; in fp32 and bf16 the loss scale is 1. In a process group all ranks skip the same
    steps, also when their gradients differ (sharded heads): `step` reduces one number over the ranks.

    Args:
        config: the mode and its loss-scale policy, for example from `Amp.named`.
        device: where the model lives. Set for the whole process until `Amp.restore_process()`: TF32 on CUDA, as
            `config.matmul_precision` says; on a CPU `config.op_policy=cuda`, and fp32 sums in fp16 convolutions (in
            products too, if it has no fp16 units).
        samples: samples of a micro-batch; needed by a policy with `max_scale_per_sample`.

    Raises:
        ConfigError: the policy needs `samples`, or the device is not there.
    """

    num_calls: ClassVar = 0  # of `step` in this process: by it a layout knows that a window has ended

    def __init__(self, config: AmpConfig, device: str | torch.device = "cpu", *, samples: int | None = None) -> None:
        log_missing()
        self.config = config
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda", *UNTESTED_DEVICES):
            raise ConfigError(f"device={self.device}: expected cpu, cuda, {' or '.join(UNTESTED_DEVICES)}")
        if self.device.type in UNTESTED_DEVICES and not is_there(self.device.type):
            raise ConfigError(f"device={self.device}: torch finds no such accelerator on this machine")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={self.device}: this machine has no CUDA GPU, or torch was built without CUDA")
        self.dtype = getattr(torch, config.dtype)
        self._casts = self.dtype is not torch.float32
        self._low = self.dtype if config.update is None else getattr(torch, config.weights)
        self.scaler = LossScale(policy_of(config, samples), self.device)
        settings.set_for(config, self.device, self._low)
        self._states: dict[torch.optim.Optimizer, OptimizerState] = {}
        self._checked: set[frozenset[tuple[int, int]]] = set()
        self._guards: list[BufferGuard] = []
        self.weights: list[LowPrecisionWeights] = []
        """The weights of networks with 16-bit weights, in the order of `prepare`."""
        self._in_window = False
        self._loss: Tensor | None = None
        """The sum of the losses of the window, 0-d: not finite if one of them is not."""
        self._num_stepped = 0
        self._outcomes: list[tuple[Tensor, Tensor]] = []
        self._probes: list[weakref.ref[Tensor]] = []
        """A weight that got a gradient in the first step, of each optimizer."""
        self._is_stepping = False
        self._sharing = 0
        self._said_waits = False
        self._rehearsal: Rehearsal | None = None
        self.observers: list[Observer] = []
        """Told of each loss, gradient and step."""
        self._numbers = Numbers(self.device)
        self._zero = self._numbers[0.0]
        self._skips = torch.zeros(2, dtype=torch.float32, device=self.device)
        self.num_skipped, self.num_consecutive_skips = self._skips.unbind()
        """Windows with a skipped step, in total and since the last window without one: 0-d float32, exact to 2^24."""

    @classmethod
    def named(cls, mode: str, device: str | torch.device = "cpu", *, samples: int | None = None, **fields: Any) -> Amp:
        """A mode of `conf/amp`, with some fields replaced.

        Raises:
            ConfigError: no such mode or field, or values that contradict each other.
        """
        from amp_core.config.rules import amp_config  # runs of train.py come with a configuration

        return cls(amp_config(mode, **fields), device, samples=samples)

    @staticmethod
    def restore_process() -> None:
        """Undo what all `Amp` objects have set for the whole process; see `device`. Later ones set it again."""
        settings.restore()

    # --- forward and backward ---------------------------------------------------------------------------------------

    def autocast(self, *, cache: bool = True) -> contextlib.AbstractContextManager[Any]:
        """The context for forward pass and loss, in training and evaluation. Not for the backward pass.

        Use one region per forward: a region caches 16-bit copies of the weights, which go stale when the weights
        change. `cache_weight_casts` keeps them for all micro-batches of a window.

        Args:
            cache: False casts weights at each use, for regions of several threads at a time: these share one
                cache, which the first of them to end empties.
        """
        kind = self.device.type
        if not self._casts:
            return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
        # A copy made without a graph would be served to a later pass that needs gradients.
        cache = cache and (self._sharing == 0 or torch.is_grad_enabled())
        return torch.autocast(kind, dtype=self.dtype, cache_enabled=cache)

    @contextlib.contextmanager
    def cache_weight_casts(self, *nets: nn.Module) -> Iterator[None]:
        """Around the micro-batches of a window: cast each weight once per window, not once per micro-batch.

        Gradients are those without it, bit for bit, but for weights that are also used in fp32, as an embedding that
        is tied to the last layer: there the same numbers are summed in another order, in fp32. Weights may be changed
        inside by nothing but `step`. The copies stay in memory until the window ends.

        Args:
            nets: the networks that run inside. Does nothing if one of them is sharded: its weights are gathered only
                briefly.
        """
        if not self._casts or any(is_sharded(net) for net in nets):
            yield
            return
        torch.autocast_increment_nesting()  # the cache is emptied at the end of the outermost region
        self._sharing += 1
        try:
            yield
        finally:
            self._sharing -= 1
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | float = 1.0,
        *,
        retain_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Backward pass of the scaled loss, with autocast off.

        Args:
            loss: a scalar of any floating dtype; or any tensor, with a gradient of its shape.
            gradient: the weight of the loss, a number or a 0-d tensor, such as `micro.weight`; or the gradient of a
                loss computed elsewhere with respect to the tensor `loss`. It is scaled.
            retain_graph: keep the graph for another backward pass.
            inputs: the weights that get gradients; None: all in the graph.

        Raises:
            RuntimeError: it reaches weights whose gradients were already unscaled in this window.
            ValueError: the loss is no scalar, and no gradient of its shape was given.
        """
        self._in_window = True
        unscaled = self._unscaled_gradients() if self._states else []
        # The initial gradient: weight and scale add no operator to the graph. Of scalars it is a new tensor each time,
        # since gradients may be views of it; without a policy the scale is 1.
        if not isinstance(gradient, Tensor) or gradient.ndim == 0:
            if loss.ndim and loss.numel() != 1:
                raise ValueError(
                    f"amp.backward: the loss has the shape {list(loss.shape)}, expected a scalar; reduce it, as by "
                    f"loss.mean(), or pass a gradient of its shape"
                )
            loss = loss.reshape(()) if loss.ndim else loss
            # In fp16 a loss of 1 times a scale of 65536 is already infinite. In float64 a weight of 1/3 needs float64.
            is_double = loss.dtype is torch.float64
            loss = loss if is_double else loss.float()
            for observer in self.observers:
                observer.on_loss(loss)
            is_plain = not is_double and type(loss) is Tensor and loss.device == self._zero.device
            added = loss.data if is_plain else _zero_or_nan(loss.data, self._zero)  # not its graph
            before, self._is_stepping = None if self._is_stepping else self._loss, False
            if before is not None and self._probes:
                for probe in self._probes:
                    if (weight := probe()) is not None and weight.grad is not None:
                        break
                else:
                    before = None  # the gradients of this window were cleared: its batch was dropped
            self._loss = added if before is None else before + added
            weight = gradient if isinstance(gradient, Tensor) else None if is_double else self._numbers[gradient]
            gradient = self.scaler.scale.double() * gradient if weight is None else self.scaler.scale * weight
        elif self.scaler.policy is not None:
            gradient = self.scaler.scale * gradient
        seed = gradient if gradient.dtype is loss.dtype and gradient.device == loss.device else gradient.to(loss)
        for observer in self.observers:
            observer.on_backward(seed)
        run = self._autocast_off()(run_backward) if torch.is_autocast_enabled(self.device.type) else run_backward
        run(loss, seed, retain_graph, inputs)
        if unscaled and unscaled != self._unscaled_gradients():
            raise RuntimeError(
                "amp.backward added scaled gradients to gradients that amp.unscale_ had unscaled; call unscale_ once, "
                "after the last backward of the window"
            )

    def grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool = True, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """`torch.autograd.grad` through the loss scale: unscaled, differentiable gradients for penalties.

        Args:
            outputs: real, of any shape; it is summed.
            inputs: a tensor or several, real or complex.
            create_graph: keep the result differentiable.
            **kwargs: passed on.

        Returns:
            One gradient per input, in float32 or complex64, or wider where the input is. They may overflow in fp16
            when the scale is large; the total loss is then not finite, the step is skipped and the scale falls.

        Raises:
            TypeError: complex outputs.
        """
        if outputs.is_complex():
            raise TypeError(f"amp.grad: outputs are {outputs.dtype}; expected real numbers, such as outputs.abs()")
        with self._autocast_off():
            scaled = _at_least_fp32(outputs).sum()
            scaled = scaled * self.scaler.scale if self.scaler.policy else scaled
            grads = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **kwargs)
            return tuple(g if g is None else _at_least_fp32(g) * self.scaler.inverse for g in grads)

    def _autocast_off(self) -> torch.autocast:
        # A backward pass inside autocast would run the matmuls of fp32 islands in 16 bits.
        return torch.autocast(self.device.type, enabled=False)

    # --- networks -----------------------------------------------------------------------------------------------------

    def prepare(self, net: nn.Module) -> None:
        """Prepare a network for modes beyond autocast, in place: float8 layers, 16-bit weights.

        Call it on the device, after `keep_fp32` and before `guard`, optimizers (over `master_params(net)`) and EMA.
        `step` reduces gradients of 16-bit weights over ranks: do not wrap in DistributedDataParallel. Logs what is
        unsafe in 16 bits, and on a GPU what is slow.

        Raises:
            ConfigError: the step would unscale gradients of 16-bit weights, or this CPU computes a layer wrongly.
        """
        from amp_core.lowp import lint

        if self.config.update is None and (problem := lint.trained_in_16_bits(net)):
            if self.scaler.policy is not None:
                raise ConfigError(f"amp={self.config.name}: {problem}")
            logger.warning("amp=%s: %s", self.config.name, problem)
        if problem := lint.computed_wrongly(net, self._low) or (self.config.update and lint.needs_fp32_weights(net)):
            raise ConfigError(f"amp={self.config.name}: {problem}")
        for name, reason in lint.find_unsafe(net, self._low):
            logger.warning("amp=%s: %s: %s", self.config.name, name or "the network", reason)
        for name, reason in lint.find_slow(net, self._low) if self.device.type == "cuda" else ():
            logger.info("amp=%s: %s: %s", self.config.name, name or "the network", reason)
        if self.config.float8:
            from amp_core.lowp.float8 import use_float8

            try:
                left_alone = use_float8(net)
            except ValueError as nothing:
                logger.warning("amp=%s: %s; without one it is autocast to bfloat16", self.config.name, nothing)
            else:
                for name, reason in left_alone:
                    logger.info("%s stays in %s: %s", name or "the network", self.config.dtype, reason)
        if self.config.update is not None:
            self.weights.append(LowPrecisionWeights(net, self._low, self.config.update))

    # --- step ---------------------------------------------------------------------------------------------------------

    @property
    def is_guarding(self) -> bool:
        """Whether buffers of a network are restored after a skipped step."""
        return bool(self._guards)

    def guard(self, net: nn.Module) -> None:
        """Restore the buffers of `net` (running statistics) after a skipped step.

        They follow the step of the optimizer that owns weights of `net`; in a window without one, all steps of the
        window.

        Args:
            net: the outermost module that is called in training, wrapped or not.
        """
        guard = BufferGuard(net)
        if guard.has_buffers:
            self._guards.append(guard)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of one optimizer in place, to read or change them between backward and step.

        `step` does this by itself. What is written afterwards is checked again by `step`.

        A gradient that was found not to be finite here makes `update` lower the loss scale, also when this optimizer is
        not stepped afterwards, as `torch.amp.GradScaler` does.

        Raises:
            RuntimeError: called twice in a window, or after the step.
            TypeError, ValueError: as in `step`.
        """
        state = self._state_of(optimizer)
        if state.unscaled or state.stepped:
            raise RuntimeError(
                "amp.unscale_ was already called for this optimizer in this window, or it was already stepped; call it "
                "once, after the last backward and before amp.step"
            )
        self._reduce(state)
        params, grads = with_grads(optimizer)
        in_parts = check_gradients(grads, scaled=self.scaler.policy is not None, optimizer=optimizer)
        if not in_parts and not self.weights:  # which show what they are in a step alone
            lay_out_gradients(params, grads)
        if grads:
            inverse = self.scaler.inverse
            state.found_inf = not_finite(norm_of(grads, self._zero, sharded=in_parts) * inverse, self._zero)
            multiply_(grads, inverse)
        state.unscaled = True

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        clip: Clip | Callable[..., None] | None = None,
        *,
        unscaled: Collection[torch.optim.Optimizer] = (),
        sharded: Collection[torch.optim.Optimizer] = (),
        unclipped: Collection[torch.optim.Optimizer] = (),
    ) -> StepReport:
        """Unscale, check, clip, and step if the gradients of all ranks are finite. Once per window and optimizer.

        The check uses their global norm in float32, so gradients beyond 1e19 also count as an overflow. A loss that is
        not finite skips all steps that follow its window's backward passes, up to the next backward pass, also where
        gradients are finite, as behind `where` or `detach`. That leaves the loss scale alone, on which such a loss does
        not depend. A window whose gradients were set to None without a step is forgotten.

        No host-device sync if the optimizer is fused; otherwise one. A window without any gradient takes no step and
        does not move the scale.

        Args:
            optimizer: any without a closure; not fused, if gradients are sparse. Several in a list step together or not
                at all, each clipped by its own norm; stepped in separate calls, each skips by its gradients alone.
            clip: a `Clip`, or any function of (parameters, unscaled gradients) that changes the gradients in place.
            unscaled: the optimizers whose gradients are not scaled, because they do not come from `backward`; their
                weights may be 16-bit.
            sharded: the optimizers whose gradients are this rank's shard; they are clipped by the global norm.
            unclipped: the optimizers to which `clip` does not apply, such as that of a head.

        Raises:
            RuntimeError: a second step before `update`.
            TypeError: 16-bit weights under a loss scale, sparse gradients and a fused step, or a step with a closure.
            ValueError: no optimizer, one twice, or a weight that several optimizers of the window own.
        """
        several = not isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, Iterable)
        optimizers: list[torch.optim.Optimizer] = list(optimizer) if several else [optimizer]  # type: ignore[list-item]
        if not optimizers or len(optimizers) > len(set(optimizers)):
            raise ValueError(f"amp.step: got {len(optimizers)} optimizers, expected at least one, none of them twice")
        with torch.set_grad_enabled(False):  # once, and not `no_grad`: each such region takes as long as an operator
            rehearsal, agree = self._rehearsal, several_ranks()
            skips = rehearsal is not None and not rehearsal.steps
            states = [self._state_of(each) for each in optimizers]
            if self.observers:
                self._show_gradients(states, unscaled)
            found, on_device, has_grads = [], not skips, False
            for state in states:
                each, own = state.optimizer, None if state.optimizer in unclipped else clip
                found.append(self._examine(state, own, each not in unscaled, agree and each in sharded))
                on_device, has_grads = on_device and state.on_device, has_grads or bool(state.grads)
            overflow = skipped = functools.reduce(torch.maximum, found)
            if self._loss is not None:
                skipped = torch.addcmul(overflow, self._loss, self._zero).ne_(self._zero)  # inf times 0 is NaN
            self._is_stepping, Amp.num_calls = True, Amp.num_calls + 1
            self._num_stepped += len(states)
            if agree:
                both = torch.stack((overflow, skipped))
                dist.all_reduce(both, op=dist.ReduceOp.MAX)
                overflow, skipped = both.unbind()
            if rehearsal is not None:
                rehearsal.add(skipped)
                rehearsal.optimizers.update(optimizers)
            skipped = torch.ones_like(skipped) if skips else skipped
            taken = torch.eq(skipped, self._zero)
            taken = taken if has_grads else torch.zeros_like(taken)
            torch.clear_autocast_cache()
            on_host = None if on_device else not skips and self._decide_on_host(states, taken)
            for state in states:
                state.stepped = True
                if state.grads and not skips:
                    if state.on_device:
                        on_shards = state.in_parts or (agree and is_state_sharded(state.optimizer))
                        take_step(state, taken, skipped, on_shards=on_shards)
                    else:
                        self._step_on_host(state, on_host)
                for weights in self.weights if state.grads else ():
                    weights.end_step(state.params, taken)
                for guard in self._guards:
                    if not guard.parameters.isdisjoint(weights_of(state.optimizer)):
                        guard.settle(taken)
                        if not guard.was_called and state.grads:
                            guard.note_bypass()
            if has_grads or agree:
                self._outcomes += [(overflow, skipped)]
            norms = [state.norm for state in states]
            norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
            for observer in self.observers:
                observer.on_step_end(taken)
            return StepReport(taken, norm, on_host, rehearsal is not None)

    def _examine(
        self, state: OptimizerState, clip: Clip | Callable[..., None] | None, scaled: bool, joined: bool
    ) -> Tensor:
        """Measure and clip the gradients of one optimizer; return 1 if one of them is not finite, else 0 (0-d float32).

        `scaled`: they are, unless they were unscaled before. `joined`: use the global norm over all ranks.
        """
        if state.stepped:
            raise RuntimeError("amp.step was called twice for one optimizer; call amp.update() once per window")
        if self.weights:
            self._reduce(state)
        params, grads = state.params, state.grads = with_grads(state.optimizer)
        scaled = scaled and self.scaler.policy is not None
        state.in_parts = check_gradients(grads, scaled=scaled, optimizer=state.optimizer)
        for weights in self.weights:
            weights.begin_step(params)
        if not state.in_parts:
            lay_out_gradients(params, grads)
        scale = self.scaler.scale if scaled and not state.unscaled else None
        norm = norm_of(grads, self._zero, sharded=state.in_parts)
        if joined:
            norm = norm_over_ranks(norm)
        state.norm = norm if scale is None else norm / scale
        found_inf = not_finite(state.norm, self._zero)
        if state.found_inf is not None:
            found_inf = torch.maximum(found_inf, state.found_inf)
        state.divisor = scale
        if isinstance(clip, Clip) and clip.kind == "norm" and clip.folded:
            state.divisor = clip.divisor(state.norm, self._numbers)
            if scale is not None:
                state.divisor.mul_(scale)
        elif clip is not None and grads:
            found_inf = self._clip_in_place(state, clip, found_inf)
        return found_inf

    def _clip_in_place(self, state: OptimizerState, clip: Clip | Callable[..., None], found_inf: Tensor) -> Tensor:
        """Clip where a divisor cannot; returns `found_inf`, also of what clipping wrote."""
        if state.divisor is not None:
            multiply_(state.grads, state.divisor.reciprocal())
            state.divisor = None
        if isinstance(clip, Clip):
            clip(state.params, state.grads, state.norm)
            if clip.kind != "adaptive":  # clamping and a factor keep finite values finite; a quotient may not
                return found_inf
        else:
            clip(state.params, state.grads)
        clipped = not_finite(norm_of(state.grads, self._zero, sharded=state.in_parts), self._zero)
        return torch.maximum(found_inf, clipped)

    def _show_gradients(self, states: Sequence[OptimizerState], unscaled: Collection[torch.optim.Optimizer]) -> None:
        """Show gradients as they are before `step` to `observers`."""
        shown = [(state, *with_grads(state.optimizer)) for state in states]
        for observer in self.observers:
            observer.on_step_begin()
        for observer in self.observers:
            for state, params, grads in shown:
                observer.on_gradients(params, grads, state.optimizer not in unscaled and not state.unscaled)

    def _decide_on_host(self, states: Sequence[OptimizerState], taken: Tensor) -> bool:
        """Whether to step optimizers that cannot skip on the device. Waits for it."""
        if not any(state.grads for state in states):
            return False
        if not self._said_waits:
            self._said_waits = True
            name = next(type(state.optimizer).__name__ for state in states if not state.on_device)
            logger.info("%s is not fused: each step waits for the device once, to know whether to skip", name)
        return bool(taken)

    def _step_on_host(self, state: OptimizerState, taken: bool | None) -> None:
        if state.divisor is not None:
            multiply_(state.grads, state.divisor.reciprocal())
        if taken:
            with step_on_local_shards(state.optimizer):
                bare_step(state.optimizer)

    def update(self) -> None:
        """End the window: update the loss scale once, however many optimizers stepped. No host-device sync.

        Raises:
            RuntimeError: no optimizer was stepped since the last update.
        """
        if not self._num_stepped:
            raise RuntimeError("amp.update() without amp.step(optimizer) before it; step every optimizer, then update")
        outcomes = self._outcomes
        if len(self._states) > self._num_stepped:
            outcomes.append(self._outcome_of_unstepped())
        if len(outcomes) > 1:
            overflow, skipped = (functools.reduce(torch.maximum, column) for column in zip(*outcomes, strict=True))
            outcomes = [(overflow, skipped)]
        self._end_window()
        # Networks that ran without a step of their own in this window, such as a generator in its critic's.
        for guard in self._guards:
            guard.settle(outcomes[0][1] == 0 if outcomes else None)
            guard.was_called = False
        if outcomes and self._rehearsal is None:
            overflow, skipped = outcomes[0]
            self.scaler.update(overflow)
            self._skips.add_(skipped)
            self.num_consecutive_skips.mul_(skipped)

    def _outcome_of_unstepped(self) -> tuple[Tensor, Tensor]:
        """Of optimizers that were unscaled, perhaps found infinite and therefore not stepped, over all ranks."""
        found = [state.found_inf for state in self._states.values() if not state.stepped]
        bad = functools.reduce(torch.maximum, [each for each in found if each is not None], self._zero.clone())
        if several_ranks():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad, bad

    def _end_window(self) -> None:
        self._states.clear()
        self._loss, self._outcomes, self._num_stepped = None, [], 0
        self._in_window = self._is_stepping = False

    def zero_grad(self, *optimizers: torch.optim.Optimizer) -> None:
        """`optimizer.zero_grad(set_to_none=True)`, without its profiler scope, which takes longer than the rest."""
        for optimizer in optimizers:
            if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
                optimizer.zero_grad(set_to_none=True)
                continue
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None

    def forget_window(self) -> None:
        """Forget the current window after a failed capture, which computed nothing."""
        self._end_window()
        for guard in self._guards:
            guard.settle(None)

    @contextlib.contextmanager
    def rehearse(self, *, steps: bool = False) -> Iterator[Rehearsal]:
        """Run a window as a rehearsal: every step is skipped, and neither the scale nor the counters move.

        Used to rerun a window for inspection. Guarded running statistics, EMA and schedules do not move, as after any
        skipped step.

        Args:
            steps: take the steps, in a trial after which the caller puts everything back.
        """
        assert self._rehearsal is None
        self._rehearsal = Rehearsal(steps=steps)
        self.observers.insert(0, self._rehearsal)
        try:
            yield self._rehearsal
        finally:
            self.observers.remove(self._rehearsal)
            self._rehearsal = None
            self._end_window()  # one that was not ended

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """The loss scale; 1.0 in modes without one. Waits for the device."""
        return self.scaler.scale.item()

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest positive, subnormal, and the largest finite value of activations and their gradients."""
        info = torch.finfo(self._low)
        return info.smallest_normal * info.eps, info.max

    def can_make_islands(self, nets: Sequence[tuple[str, nn.Module]]) -> bool:
        """Whether modules can become islands now: it takes autocast, and weights in fp32, also where gathered."""
        in_16bit = self.weights or self.config.float8 or has_16bit(nets)
        return self.dtype in (torch.float16, torch.bfloat16) and not in_16bit

    def state_dict(self) -> dict[str, Any]:
        """The loss scale in the layout of `torch.amp.GradScaler`; {} in modes without one. Waits for the device.

        Raises:
            RuntimeError: called between a step and its update, when the scale is stale.
        """
        if any(state.stepped for state in self._states.values()):
            raise RuntimeError("amp.state_dict() between amp.step and amp.update; save after the update")
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the loss scale of a checkpoint made in any mode. The policy stays the configured one.

        Raises:
            RuntimeError: called within a window, whose gradients have another scale.
        """
        if self._in_window and self.scaler.policy is not None:
            raise RuntimeError(
                "amp.load_state_dict in the middle of a window: its gradients carry the present scale; load before "
                "amp.backward or after amp.update"
            )
        self.scaler.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with a new window. It guards copies of the networks; 16-bit weights refuse to be copied."""
        window = {"_states": {}, "_checked": set(), "_in_window": False, "_loss": None, "_outcomes": [], "_probes": []}
        window |= {"_num_stepped": 0, "_is_stepping": False, "_sharing": 0, "_rehearsal": None, "observers": []}
        return vars(self) | window

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.num_skipped, self.num_consecutive_skips = self._skips.unbind()
        settings.set_for(self.config, self.device, self._low)

    def counters(self) -> dict[str, Any]:
        """What a resumed run needs besides `state_dict`; `Checkpoint` saves it. Waits for the device."""
        return {
            "skipped": int(self.num_skipped),
            "consecutive_skips": int(self.num_consecutive_skips),
            "rounded": [int(weights.num_taken) for weights in self.weights],
        }

    def load_counters(self, progress: Mapping[str, Any]) -> None:
        """Restore what `counters` returned. A count that is missing is 0."""
        self.num_skipped.fill_(int(progress.get("skipped", 0)))
        self.num_consecutive_skips.fill_(int(progress.get("consecutive_skips", 0)))
        rounded = [*progress.get("rounded", []), *[0] * len(self.weights)]
        for weights, num_taken in zip(self.weights, rounded, strict=False):
            weights.num_taken.fill_(int(num_taken))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        state = self._states.get(optimizer)
        if state is None:
            if self._states or optimizer.__dict__.get(_USABLE) != (self, len(optimizer.param_groups)):
                self._require_usable(optimizer)
            state = self._states[optimizer] = OptimizerState(optimizer, can_skip_on_device(optimizer))
        return state

    def _require_usable(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that cannot step in this mode, or beside the others of the window."""
        require_steppable(optimizer)
        if self.config.update is not None and not self.weights:
            raise RuntimeError(
                f"amp={self.config.name}: no network has {self.config.weights} weights, so this would train in fp32; "
                f"call amp.prepare(net) before the optimizer is built"
            )
        if self.weights and any(map(is_low, weights_of(optimizer))):
            raise TypeError(
                "the optimizer holds 16-bit weights, which get no gradients; build it on master_params(net)"
            )
        if self.weights and self.config.update != "master":
            require_no_copies(optimizer, self.config.name)
        if self._states:
            self._require_own_weights(optimizer)
        if optimizer.__dict__.get(_USABLE, (None,))[0] is not self:
            self._probes += map(weakref.ref, with_grads(optimizer)[0][-1:])
        optimizer.__dict__[_USABLE] = self, len(optimizer.param_groups)

    def _require_own_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a weight of several optimizers, whose gradient would be unscaled twice. Looked at once for each."""
        among = frozenset((id(o), len(o.param_groups)) for o in (*self._states, optimizer))
        if among in self._checked:
            return
        owned = {p for other in self._states for p in weights_of(other)}
        shared = [p for p in weights_of(optimizer) if p in owned]
        if shared:
            raise ValueError(
                f"{len(shared)} weight(s), the first of shape {list(shared[0].shape)}, are owned by two optimizers of "
                f"one window, so that their gradients would be unscaled twice; give each weight to one optimizer, or "
                f"end the window (amp.update) between their steps"
            )
        self._checked.add(among)

    def _unscaled_gradients(self) -> list[list[tuple[int, int]]]:
        """The versions of the gradients that `unscale_` divided in this window and that no step has used yet."""
        pending = [o for o, state in self._states.items() if state.unscaled and not state.stepped]
        for optimizer in pending:
            if not with_grads(optimizer)[1]:
                del self._states[optimizer]  # its gradients are gone: that window was given up
        return [grad_versions(optimizer) for optimizer in pending if optimizer in self._states]

    def _reduce(self, state: OptimizerState) -> None:
        for weights in self.weights if not state.reduced else ():
            weights.reduce_(with_grads(state.optimizer)[0])
        state.reduced = True
