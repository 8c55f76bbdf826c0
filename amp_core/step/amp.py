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
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.config.schema import AmpConfig
from amp_core.step import settings
from amp_core.step.buffers import BufferGuard
from amp_core.step.clip import Clip
from amp_core.step.fused import take_step
from amp_core.step.gradients import as_scalar, at_least_fp32, run_backward, with_grads, zero_or_nan
from amp_core.step.observer import Observer, show_gradients
from amp_core.step.report import Rehearsal, StepReport
from amp_core.step.scaler import LossScale, policy_of
from amp_core.step.state import OptimizerState, WindowState
from amp_core.step.steppable import require_fits_mode, require_own_weights, require_steppable
from amp_core.tensors import HALF, has_16bit, is_sharded, several_ranks
from amp_core.torch_private import log_missing

if TYPE_CHECKING:
    from amp_core.lowp.weights import LowPrecisionWeights
    from amp_core.step.skips import Outliers

logger = logging.getLogger("amp_recipes")
_groups_of = attrgetter("param_groups")


class Amp:
    """A mode of mixed precision: what to cast, how to scale, when to skip.

    Every method works in every mode; in fp32 and bf16 the loss scale is 1.

    A step is skipped if the global norm of the gradients in float32 is not finite, so gradients beyond 1e19 count as an
    overflow too, or if a loss of its window is not (`where` and `detach` let finite gradients come from it), which
    leaves the scale alone. All ranks skip alike, also when their gradients differ (sharded heads). A window without
    gradients takes no step and does not move the scale; one whose gradients were set to None is forgotten.

    Args:
        config: the mode and its loss-scale policy, for example from `Amp.named`.
        device: where the model lives. Set for the whole process until `Amp.restore_process()`: TF32 on CUDA; on a CPU
            `config.op_policy=cuda`, and fp32 sums in fp16 convolutions (in products too, if it has no fp16 units).
        samples: samples of a micro-batch; needed by a policy with `max_scale_per_sample`.

    ConfigError: the policy needs `samples`, or the device is not there.
    """

    sets_process: ClassVar = True  # False within another trainer: none of what `device` sets
    num_calls: ClassVar = 0  # of `step` in this process: by it a layout knows that a window has ended

    def __init__(self, config: AmpConfig, device: str | torch.device = "cpu", *, samples: int | None = None) -> None:
        log_missing()
        self.config = config
        self.device = torch.device(device)
        settings.require_device(self.device)
        self.dtype = getattr(torch, config.dtype)
        self._casts = self.dtype is not torch.float32
        self._low = self.dtype if config.update is None else getattr(torch, config.weights)
        self.scaler = LossScale(policy_of(config, samples), self.device)
        settings.set_for(config, self.device, self._low, self.sets_process)
        self._checked: set[frozenset[tuple[Any, int]]] = set()  # optimizers of a window, and how many groups they have
        self._guards: list[BufferGuard] = []
        self.weights: list[LowPrecisionWeights] = []  # of networks with 16-bit weights, in the order of `prepare`
        self._window = WindowState()
        self._probes: list[weakref.ref[Tensor]] = []  # a weight that got a gradient in each optimizer's first step
        self._sharing = 0
        self._has_said = False
        self._rehearsal: Rehearsal | None = None
        self.outliers: Outliers | None = None
        if config.skip_above is not None:
            from amp_core.step.skips import Outliers  # other modes need none of it

            self.outliers = Outliers(config.skip_above, self.device)
        self.observers: list[Observer] = []  # told of each loss, gradient and step
        self._zero = self.scaler.numbers[0.0]
        self._skips = torch.zeros(2, dtype=torch.float32, device=self.device)
        self.num_skipped, self.num_consecutive_skips = self._skips.unbind()
        """Windows with a skipped step, in total and since the last window without one: 0-d float32, exact to 2^24."""

    @classmethod
    def named(cls, mode: str, device: str | torch.device = "cpu", *, samples: int | None = None, **fields: Any) -> Amp:
        """A mode of `conf/amp`, with some fields replaced. ConfigError: no such mode or field, or a contradiction."""
        from amp_core.config.rules import amp_config  # runs of train.py come with a configuration

        return cls(amp_config(mode, **fields), device, samples=samples)

    restore_process = staticmethod(settings.restore)
    """Undo what all `Amp` objects have set for the whole process; see `device`. Later ones set it again."""

    # --- forward and backward ---------------------------------------------------------------------------------------

    def autocast(self, *, cache: bool = True) -> contextlib.AbstractContextManager[Any]:
        """The context for forward pass and loss, in training and evaluation; not for the backward pass.

        One region per forward: cached 16-bit copies of weights go stale when these change. `cache=False`: for several
        threads at a time, since the first region that ends empties the cache of all.
        """
        # A copy made without a graph would be served to a later pass that needs gradients.
        cache = cache and (self._sharing == 0 or torch.is_grad_enabled())
        if self._casts:
            return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=cache)
        return self._autocast_off() if torch.is_autocast_enabled(self.device.type) else contextlib.nullcontext()

    @contextlib.contextmanager
    def cache_weight_casts(self, *nets: nn.Module) -> Iterator[None]:
        """Around the micro-batches of a window: cast each weight once per window, not once per micro-batch.

        Gradients are those without it, bit for bit; those of weights that are also used in fp32, as an embedding that
        is tied to the last layer, are summed in another order, in fp32. Only `step` may change weights inside. Does
        nothing if one of `nets`, which run inside, is sharded: its weights are gathered only briefly.
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
        """Backward pass of the scaled loss, with autocast off. `retain_graph`, `inputs`: as in `autograd.backward`.

        Args:
            loss: a scalar of any floating dtype; or any tensor, with a gradient of its shape. ValueError: neither.
            gradient: the weight of the loss, such as `micro.weight`; or the gradient of a loss computed elsewhere with
                respect to the tensor `loss`. It is scaled. RuntimeError: it reaches gradients that `unscale_` divided.
        """
        window = self._window
        window.is_open = True  # its gradients carry the present scale, which must stay until `update`
        unscaled = window.unscaled_gradients() if window.states else []
        if not isinstance(gradient, Tensor) or gradient.ndim == 0:
            loss = as_scalar(loss) if loss.ndim else loss
            # In fp16 a loss of 1 times a scale of 65536 is already infinite. In float64 a weight of 1/3 needs float64.
            is_double = loss.dtype is torch.float64
            loss = loss if is_double else loss.float()
            self.note_loss(loss)
            # Weight and scale are the initial gradient, so they add no operator to the graph. A new tensor each time,
            # since gradients may be views of it; without a policy the scale is 1.
            weight = gradient if is_double or isinstance(gradient, Tensor) else self.scaler.numbers[gradient]
            gradient = self.scaler.scale * weight if isinstance(weight, Tensor) else self.scaler.scale.double() * weight
        elif self.scaler.policy is not None:
            gradient = self.scaler.scale * gradient
        initial = gradient if gradient.dtype is loss.dtype and gradient.device == loss.device else gradient.to(loss)
        for observer in self.observers:
            observer.on_backward(initial)
        run = self._autocast_off()(run_backward) if torch.is_autocast_enabled(self.device.type) else run_backward
        run(loss, initial, retain_graph, inputs)
        if unscaled:
            window.require_unchanged(unscaled)

    def note_loss(self, loss: Tensor) -> None:
        """Take note of a loss of the window, 0-d, as `backward` does: `step` skips if it is not finite."""
        window = self._window
        for observer in self.observers:
            observer.on_loss(loss)
        is_plain = loss.dtype is torch.float32 and type(loss) is Tensor and loss.device == self._zero.device
        # Losses of other dtypes count as 0 or NaN: a finite float64 loss may be infinite in fp32.
        added = loss.data if is_plain else zero_or_nan(loss.data, self._zero)  # not its graph
        before, window.is_stepping = None if window.is_stepping else window.loss, False
        for probe in self._probes if before is not None else ():
            if (weight := probe()) is not None and weight.grad is not None:
                break
        else:  # the gradients of this window were cleared: its batch was dropped
            before = None if self._probes else before
        window.loss = added if before is None else before + added

    def grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool = True, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """`torch.autograd.grad` through the loss scale: unscaled, differentiable gradients for penalties.

        `outputs` are real, of any shape, and are summed. TypeError: complex. Returns one gradient per input, in float32
        or complex64, or wider where the input is. They may overflow in fp16 when the scale is large; the total loss is
        then not finite, the step is skipped and the scale falls.
        """
        if outputs.is_complex():
            raise TypeError(f"amp.grad: outputs are {outputs.dtype}; expected real numbers, such as outputs.abs()")
        with self._autocast_off():
            scaled = at_least_fp32(outputs).sum()
            scaled = scaled * self.scaler.scale if self.scaler.policy else scaled
            grads = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **kwargs)
            return tuple(g if g is None else at_least_fp32(g) * self.scaler.inverse for g in grads)

    def _autocast_off(self) -> torch.autocast:
        # A backward pass inside autocast would run the matmuls of fp32 islands in 16 bits.
        return torch.autocast(self.device.type, enabled=False)

    # --- networks -----------------------------------------------------------------------------------------------------

    def prepare(self, net: nn.Module, *, gathers: bool = False) -> None:
        """Make layers of low formats or 16-bit weights where the mode has them; log what is unsafe, or slow.

        Call it on the device, after `keep_fp32` and before `guard`, optimizers (over `master_params(net)`) and EMA.
        `step` reduces gradients of 16-bit weights over ranks: do not wrap in DistributedDataParallel. ConfigError: the
        step would unscale gradients of 16-bit weights, or this CPU computes a layer wrongly. `gathers`: weights will be
        sharded and gathered in 16 bits, by `layouts.fsdp.shard_for`.
        """
        from amp_core.lowp.prepare import prepare  # most loops need none of it

        weights = prepare(net, self.config, self._low, on_gpu=self.device.type == "cuda", gathers=gathers)
        if weights is not None:
            self.weights.append(weights)

    # --- step ---------------------------------------------------------------------------------------------------------

    @property
    def is_guarding(self) -> bool:
        """Whether buffers of a network are restored after a skipped step."""
        return bool(self._guards)

    def guard(self, net: nn.Module) -> BufferGuard:
        """Restore the buffers of `net` (running statistics) after a skipped step.

        They follow the step of the optimizer that owns weights of `net`; in a window without one, all its steps. `net`
        is the outermost module that is called in training, wrapped or not.
        """
        guard = BufferGuard(net)
        self._guards += [guard] if guard.has_buffers else []
        return guard

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of one optimizer in place, to read or change them between backward and step.

        `step` does this by itself, and checks again what is written afterwards. A gradient that is not finite here
        makes `update` lower the loss scale, also without a step, as in `torch.amp.GradScaler`. Raises as `step` does.
        """
        self._state_of(optimizer).unscale()

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        clip: Clip | Callable[..., None] | None = None,
        *,
        unscaled: Collection[torch.optim.Optimizer] = (),
        sharded: Collection[torch.optim.Optimizer] = (),
        unclipped: Collection[torch.optim.Optimizer] = (),
    ) -> StepReport:
        """Unscale, check, clip, and step if gradients and losses are finite. One host-device sync if not fused, else 0.

        Args:
            optimizer: any without a closure; not fused, if gradients are sparse. Several in a list step together or not
                at all, each clipped by its own norm; stepped in separate calls, each skips by its gradients alone.
            clip: a `Clip`, or any function of (parameters, unscaled gradients) that changes the gradients in place.
            unscaled: optimizers whose gradients do not come from `backward`; their weights may be 16-bit.
            sharded: optimizers whose gradients are this rank's shard; they are clipped by the global norm.
            unclipped: optimizers to which `clip` does not apply, such as that of a head.

        RuntimeError, ValueError: a second step before `update`; no optimizer, one twice, or a weight of several.
        TypeError: 16-bit weights under a loss scale, sparse gradients and a fused step, or a step with a closure.
        """
        several = not isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, Iterable)
        optimizers: list[torch.optim.Optimizer] = list(optimizer) if several else [optimizer]  # type: ignore[list-item]
        if not optimizers or len(optimizers) > len(set(optimizers)):
            raise ValueError(f"amp.step: got {len(optimizers)} optimizers, expected at least one, none of them twice")
        with torch.set_grad_enabled(False):  # once, and not `no_grad`: each such region takes as long as an operator
            window, rehearsal, agree, outlier = self._window, self._rehearsal, several_ranks(), None
            skips = rehearsal is not None and not rehearsal.steps
            states = [self._state_of(each) for each in optimizers]
            if self.observers:
                show_gradients(self.observers, states, unscaled)
            found, on_device, has_grads = [], not skips, False
            for state in states:
                each, own = state.optimizer, None if state.optimizer in unclipped else clip
                found.append(state.examine(own, scaled=each not in unscaled, joined=agree and each in sharded))
                on_device, has_grads = on_device and state.on_device, has_grads or bool(state.grads)
            overflow = skipped = functools.reduce(torch.maximum, found)
            if window.loss is not None:
                skipped = torch.addcmul(overflow, window.loss, self._zero).ne_(self._zero)  # inf times 0 is NaN
            window.is_stepping, Amp.num_calls = True, Amp.num_calls + 1  # losses behind this are of another phase
            norm = states[0].norm if len(states) == 1 else torch.stack([state.norm for state in states]).norm()
            if agree or rehearsal is not None or self.outliers is not None:
                overflow, skipped, outlier = self._agree(overflow, skipped, norm, optimizers)
            taken = torch.eq(skipped, self._zero) if has_grads else torch.zeros_like(skipped, dtype=torch.bool)
            torch.clear_autocast_cache()  # an enclosing region would serve copies of the weights before this step
            on_host = None if on_device else not skips and has_grads and self._decide(states, taken)
            for state in states:
                state.stepped = True
                if state.grads and not skips:
                    if state.on_device:
                        take_step(state, taken, skipped, several_ranks=agree)
                    else:
                        state.step_on_host(on_host)
                for weights in self.weights if state.grads else ():
                    weights.end_step(state.params, taken)
                for guard in self._guards:
                    guard.settle(taken, after=state)
            if has_grads or agree:
                window.outcomes += [(overflow, skipped)]
            for observer in self.observers:
                observer.on_step_end(taken)
            return StepReport(taken, norm, on_host, rehearsal is not None, overflow, outlier)

    def update(self) -> None:
        """End the window: update the loss scale once, however many optimizers stepped. No host-device sync."""
        window = self._window
        if not window.states:
            raise RuntimeError("amp.update() without amp.step(optimizer) before it; step every optimizer, then update")
        outcome = window.outcome(self._zero)
        self._window = WindowState()
        # Networks that ran without a step of their own in this window, such as a generator in its critic's.
        for guard in self._guards:
            guard.settle(None if outcome is None else outcome[1] == 0)
            guard.was_called = False
        if outcome is not None and self._rehearsal is None:
            overflow, skipped = outcome
            self.scaler.update(overflow)
            # Both counts are views of `_skips`. In a window without a skip the second is multiplied by 0.
            self._skips.add_(skipped)
            self.num_consecutive_skips.mul_(skipped)

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
        self._window = WindowState()
        for guard in self._guards:
            guard.settle(None)

    @contextlib.contextmanager
    def rehearse(self, *, steps: bool = False) -> Iterator[Rehearsal]:
        """Run a window as a rehearsal: every step is skipped, and neither the scale nor the counters move.

        For inspection. Guarded running statistics, EMA and schedules do not move either. `steps`: take the steps, in a
        trial after which the caller puts everything back.
        """
        assert self._rehearsal is None
        self._rehearsal = Rehearsal(steps=steps)
        self.observers.insert(0, self._rehearsal)
        try:
            yield self._rehearsal
        finally:
            self.observers.remove(self._rehearsal)
            self._rehearsal = None
            self._window = WindowState()  # one that was not ended

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
        in_16bit = self.weights or self.config.format or has_16bit(nets)
        return self.dtype in HALF and not in_16bit

    def state_dict(self) -> dict[str, Any]:
        """The loss scale in the layout of `torch.amp.GradScaler`; {} in modes without one. Waits for the device."""
        if any(state.stepped for state in self._window.states.values()):
            raise RuntimeError("amp.state_dict() between amp.step and amp.update; save after the update")
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the loss scale of a checkpoint made in any mode. The policy stays the configured one."""
        if self._window.is_open and self.scaler.policy is not None:
            raise RuntimeError(
                "amp.load_state_dict in the middle of a window: its gradients carry the present scale; load before "
                "amp.backward or after amp.update"
            )
        self.scaler.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with a new window. It guards copies of the networks; 16-bit weights refuse to be copied."""
        window = {"_window": WindowState(), "_checked": set(), "_probes": [], "observers": []}
        window |= {"_sharing": 0, "_rehearsal": None}
        return vars(self) | window

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.num_skipped, self.num_consecutive_skips = self._skips.unbind()
        settings.set_for(self.config, self.device, self._low, self.sets_process)

    def counters(self) -> dict[str, Any]:
        """What a resumed run needs besides `state_dict`; `Checkpoint` saves it. Waits for the device."""
        return {
            "skipped": int(self.num_skipped),
            "consecutive_skips": int(self.num_consecutive_skips),
            "rounded": [int(weights.num_taken) for weights in self.weights],
            **({} if self.outliers is None else {"usual": self.outliers.state()}),
            **({"kept_scale": self.scaler.kept} if self.scaler.kept else {}),
        }

    def load_counters(self, progress: Mapping[str, Any]) -> None:
        """Restore what `counters` returned. A count that is missing is 0."""
        self.num_skipped.fill_(int(progress.get("skipped", 0)))
        self.num_consecutive_skips.fill_(int(progress.get("consecutive_skips", 0)))
        for weights, num_taken in zip(self.weights, chain(progress.get("rounded", []), repeat(0)), strict=False):
            weights.num_taken.fill_(int(num_taken))
        if self.outliers is not None:
            self.outliers.load(progress.get("usual", []))
        if kept := progress.get("kept_scale"):
            if self.scaler.policy is not None:
                logger.info("the loss scale continues as it was before the modes without one")
            self.scaler.load_state_dict(kept)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _agree(
        self, overflow: Tensor, skipped: Tensor, norm: Tensor, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What all ranks, `amp.skip_above` and a rehearsal make of a step: overflow, skipped, outlier."""
        rehearsal, outlier = self._rehearsal, None
        sizes = [] if self.outliers is None else self.outliers.sizes(self._window.loss, norm)
        if several_ranks():  # in one reduction, before any weight moves: replicas that decide differently drift apart
            both = torch.stack((overflow, skipped, *sizes))
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            overflow, skipped, *sizes = both.unbind()
        if self.outliers is not None:
            outlier = self.outliers.judge(optimizers[0], sizes, record=rehearsal is None)
            skipped = torch.maximum(skipped, outlier)
        return overflow, skipped if rehearsal is None else rehearsal.examine(optimizers, skipped), outlier

    def _decide(self, states: Sequence[OptimizerState], taken: Tensor) -> bool:
        """Read whether optimizers that cannot skip on the device step. Waits for it, which the log says once."""
        if not self._has_said:
            self._has_said = True
            name = next(type(state.optimizer).__name__ for state in states if not state.on_device)
            logger.info("%s is not fused: each step waits for the device once, to know whether to skip", name)
        return bool(taken)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        states = self._window.states
        if optimizer not in states:
            # Checked once for each set: to compare all weights in every step takes longer than a small step.
            members = (*states, optimizer)
            among = frozenset(zip(map(weakref.ref, members), map(len, map(_groups_of, members)), strict=True))
            if among not in self._checked:
                self._require_usable(optimizer)
                self._checked.add(among)
            states[optimizer] = OptimizerState(optimizer, self.scaler, self.weights)
        return states[optimizer]

    def _require_usable(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that cannot step in this mode, or beside the others of the window."""
        require_steppable(optimizer)
        require_fits_mode(optimizer, self.config, has_weights=bool(self.weights))
        require_own_weights(optimizer, self._window.states)
        self._probes += map(weakref.ref, with_grads(optimizer)[0][-1:])
