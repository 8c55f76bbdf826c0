"""The checks: what a trainer must do, and what it means for a user if it does not.

Most networks are a weight times small integers, with power-of-two batch sizes and scales: right answers are exact in
fp16, bf16 and fp32 on any processor, and are computed in float64 beside the trainer.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_conformance.networks import (
    Bag,
    Line,
    Normed,
    Recorder,
    WithIsland,
    apart,
    filled,
    fused,
    halving,
    mean,
    mean_loss,
    numbers,
    penalty,
    sgd,
    with_constant,
    with_momentum,
)
from amp_conformance.task import Batch, NotOffered, Task, Trainer, View

SCALE = 1024.0
"""The first loss scale: 7 times 1024 fits into fp16."""


class Failed(Exception):
    """A trainer did it wrong. The message has the number seen and the right one."""


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: for the table and the command line.
        group: "windows", "skipped steps", "loss scale", "checkpoints" or "processes".
        wrong: what goes wrong for a user of a trainer that fails.
        trap: its heading in docs/BEHAVIOURS.md.
        bound: how near the right answer is asked for, and why.
        ranks: processes.
        run: raises `Failed`, or `NotOffered`.
    """

    name: str
    group: str
    wrong: str
    trap: str
    bound: str
    ranks: int
    run: Callable[[Trainer, random.Random], None]


CHECKS: dict[str, Check] = {}
EXACT = "exact: small integers, powers of two"


def check(
    group: str, wrong: str, trap: str, bound: str = EXACT, ranks: int = 1, *, also_fused: bool = False
) -> Callable[..., None]:
    """Register a function as a check; underscores in its name become spaces.

    `also_fused`: once more with fused optimizers, which decide on the device whether to step: a trainer that looks for
    the call of `step` takes a skipped one for a taken one.
    """

    def register(function: Callable[[Trainer, random.Random], None]) -> None:
        name = function.__name__.replace("_", " ")
        CHECKS[name] = Check(name, group, wrong, trap, bound, ranks, function)
        if also_fused:
            run = functools.partial(_with_fused, function)
            CHECKS[f"{name}, fused"] = Check(f"{name}, fused", group, wrong, trap, bound, ranks, run)

    return register


def with_fused(trainer: Trainer) -> Trainer:
    """The trainer, with fused optimizers in every task."""
    twin = copy.copy(trainer)
    twin.run = lambda task, after: trainer.run(task.but(optimizers=fused(task.optimizers)), after)  # type: ignore[method-assign]
    return twin


def _with_fused(function: Callable[[Trainer, random.Random], None], trainer: Trainer, draw: random.Random) -> None:
    function(with_fused(trainer), draw)


@dataclass
class Seen:
    """What is kept of a `View`."""

    state: dict[str, Tensor]
    momentum: list[Tensor]
    rates: list[float]
    scale: float | None
    ema: dict[str, Tensor] | None

    @property
    def weight(self) -> float:
        """The first number of the first weight."""
        return float(next(iter(self.state.values())).flatten()[0])


def see(view: View) -> Seen:
    """Copies of what a check compares."""
    found = [state.get("momentum_buffer") for optimizer in view.optimizers for state in optimizer.state.values()]
    momentum = [tensor.detach().clone() for tensor in found if isinstance(tensor, Tensor)]
    ema = None if view.ema is None else {key: value.clone() for key, value in view.ema.state_dict().items()}
    return Seen(view.state(), momentum, view.rates, view.scale, ema)


def follow(trainer: Trainer, task: Task) -> list[Seen]:
    """Run a task; what is seen after each epoch."""
    seen: list[Seen] = []
    trainer.run(task, lambda view: seen.append(see(view)))
    expected = len(task.epochs) - task.done
    if not task.every and len(seen) != expected:
        raise Failed(f"{len(seen)} epochs were made, expected {expected}")
    return seen


def line(*epochs: Sequence[Batch], **settings: object) -> Task:
    """A task of one weight, SGD with lr=1 and a loss scale of 1024."""
    return Task(Line, mean_loss, sgd, epochs, init_scale=SCALE).but(**settings)


def expect(what: str, seen: float, right: float, bound: float = 0.0) -> None:
    """Raise `Failed` unless a number is right."""
    if not abs(seen - right) <= bound:  # also for NaN
        raise Failed(f"{what} is {seen:.10g}, expected {right:.10g}")


def scale_of(seen: Seen) -> float:
    """The loss scale."""
    if seen.scale is None:
        raise NotOffered("does not tell its loss scale")
    return seen.scale


BAD = math.inf
"""An input that makes gradients infinite or NaN in every mode."""

# --- windows ----------------------------------------------------------------------------------------------------------


@check("windows", "Accumulation changes the gradient by a factor: another learning rate.", "accumulation")
def accumulation_equals_a_larger_batch(trainer: Trainer, draw: random.Random) -> None:
    epoch = [numbers(draw) for _ in range(4)]
    (seen,) = follow(trainer, line(epoch, accumulation=4))
    expect("the weight", seen.weight, -mean(*epoch))


@check("windows", "The last window of an epoch counts too little, or leaks into the next epoch.", "accumulation")
def the_last_window_of_an_epoch_is_shorter(trainer: Trainer, draw: random.Random) -> None:
    epochs = [[numbers(draw) for _ in range(6)] for _ in range(2)]
    seen = follow(trainer, line(*epochs, accumulation=4))
    right = 0.0
    for number, (epoch, each) in enumerate(zip(epochs, seen, strict=True), 1):
        right -= mean(*epoch[:4]) + mean(*epoch[4:])
        expect(f"the weight after epoch {number}", each.weight, right)


@check("windows", "Short texts or small batches count as much as long ones: a mean of means.", "accumulation")
def micro_batches_of_unequal_size(trainer: Trainer, draw: random.Random) -> None:
    epoch = apart(draw, 1, 3)
    (seen,) = follow(trainer, line(epoch, accumulation=2, weighted=True))
    expect("the weight", seen.weight, -mean(*epoch), bound=7 * 4 * 2.0**-24)


@check("windows", "The learning rate decays as many times too fast as there are micro-batches.", "step")
def the_schedule_counts_windows(trainer: Trainer, draw: random.Random) -> None:
    epoch = [numbers(draw) for _ in range(4)]
    (seen,) = follow(trainer, line(epoch, accumulation=2, schedule=halving))
    expect("the learning rate after 2 windows", seen.rates[0], 0.25)


@check("windows", "The average forgets as many times too fast as there are micro-batches.", "step")
def the_average_counts_windows(trainer: Trainer, draw: random.Random) -> None:
    epoch = [numbers(draw) for _ in range(4)]
    (seen,) = follow(trainer, line(epoch, accumulation=2, ema=0.5))
    assert seen.ema is not None
    first = -mean(*epoch[:2])
    second = first - mean(*epoch[2:])
    average = 0.5 * (0.5 * 0.0 + 0.5 * first) + 0.5 * second
    # torch's AveragedModel copies the weights at its first update.
    others = [0.5 * first + 0.5 * second]
    got = float(next(iter(seen.ema.values())).flatten()[0])
    if got not in others:
        expect("the average after 2 windows", got, average)


def _clip(trainer: Trainer, draw: random.Random, mode: str) -> None:
    batch = numbers(draw, size=4)
    norm, largest = mean(batch), 0.5
    (seen,) = follow(trainer, line([batch], mode=mode, clip=largest))
    # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; three roundings in fp32.
    expect("the clipped update", -seen.weight, largest, bound=largest * (1e-6 / norm + 4 * 2.0**-24))


CLIPPED = "relative 1e-6 / norm (what torch adds to the norm) and 4 roundings of fp32"


@check("windows", "Scaled gradients are clipped: every update is far too small.", "clipping", CLIPPED, also_fused=True)
def gradients_are_unscaled_before_they_are_clipped(trainer: Trainer, draw: random.Random) -> None:
    _clip(trainer, draw, "fp16")


@check("windows", "Modes are not comparable: one clips, another does not.", "clipping", CLIPPED)
def fp32_is_clipped_as_well(trainer: Trainer, draw: random.Random) -> None:
    _clip(trainer, draw, "fp32")


@check("windows", "Parts of a window are clipped: another direction.", "clipping", also_fused=True)
def a_whole_window_is_clipped(trainer: Trainer, draw: random.Random) -> None:
    large, largest = float(draw.randint(4, 7)), 2.0
    epoch = [filled(large), filled(2.0 - large)]
    (seen,) = follow(trainer, line(epoch, accumulation=2, clip=largest, mode="fp16"))
    expect("the update, whose norm is below the largest", -seen.weight, 1.0)


@check("windows", "A window of zero gradients turns the weights into NaN when it is clipped.", "step")
def zero_gradients(trainer: Trainer, draw: random.Random) -> None:
    good = numbers(draw)
    seen = follow(trainer, line([filled(0.0)], [good], mode="fp16", clip=1e6))
    expect("the weight after zero gradients", seen[0].weight, 0.0)
    expect("the weight after the next window", seen[1].weight, -mean(good))


@check("windows", "Embeddings with sparse gradients cannot be trained in fp16.", "loss-scale")
def sparse_gradients(trainer: Trainer, draw: random.Random) -> None:
    batch = filled(float(draw.randint(0, 7)), size=4)
    task = Task(Bag, mean_loss, sgd, [[batch]], mode="fp16", init_scale=SCALE)
    (seen,) = follow(trainer, task)
    right = torch.zeros(8, 1)
    right[int(batch[0][0, 0])] = -1.0
    if not torch.equal(seen.state["table.weight"], right):
        raise Failed(f"the table moved by {seen.state['table.weight'].flatten().tolist()}, expected -1 in one row")


@check("windows", "The backward pass casts on its own: gradients of another function.", "autocast")
def autocast_is_off_in_the_backward_pass(trainer: Trainer, draw: random.Random) -> None:
    nets: list[Recorder] = []

    def net() -> Recorder:
        nets.append(Recorder())
        return nets[-1]

    follow(trainer, Task(net, mean_loss, sgd, [[numbers(draw)]], mode="bf16"))
    looks = [look for each in nets for look in each.in_backward]
    if not looks or any(looks):
        raise Failed(f"autocast was on in {sum(looks)} of {len(looks)} backward passes, expected none")


@check("windows", "Evaluation takes the memory and the time of fp32, and measures another network.", "measuring")
def evaluation_runs_under_the_same_autocast(trainer: Trainer, draw: random.Random) -> None:
    nets: list[Recorder] = []

    def net() -> Recorder:
        nets.append(Recorder())
        return nets[-1]

    def after(view: View) -> None:
        if view.evaluate is None:
            raise NotOffered("does not evaluate")
        view.evaluate(numbers(draw)[0])

    trainer.run(Task(net, mean_loss, sgd, [[numbers(draw)]], mode="bf16"), after)
    training, evaluation = (set().union(*(each.dtypes[is_training] for each in nets)) for is_training in (True, False))
    if training != {torch.bfloat16} or evaluation != training:
        raise Failed(f"training computes in {training or 'nothing'}, evaluation in {evaluation or 'nothing'}")


@check("windows", "The device waits for the host in every micro-batch.", "debugging")
def at_most_one_wait_per_window(trainer: Trainer, draw: random.Random) -> None:
    def waits(num_windows: int) -> int:
        epoch = [numbers(draw) for _ in range(4 * num_windows)]
        with _Reads() as reads:
            trainer.run(line(epoch, mode="fp16", accumulation=4, clip=100.0), lambda view: None)
        return reads.count

    per_window = (waits(6) - waits(2)) / 4
    if per_window > 1:
        raise Failed(f"{per_window:g} numbers are read back per window of 4 micro-batches, expected at most 1")


class _Reads(TorchDispatchMode):
    """Counts numbers that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[override, type-arg]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@check("windows", "An average, or any copy of the network, computes with the original's weights.", "islands")
def a_copy_of_the_network_uses_its_own_weights(trainer: Trainer, draw: random.Random) -> None:
    outputs: list[float] = []

    def after(view: View) -> None:
        twin = copy.deepcopy(view.net).eval()
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
            outputs.append(float(twin(filled(1.0)[0]).float().sum()))

    trainer.run(line([numbers(draw)], mode="bf16"), after)
    expect("the output of a copy whose weights are 0", outputs[0], 0.0)


@check("windows", "A module that needs fp32 computes in 16 bits, in the network or a copy.", "islands")
def an_island_in_fp32_stays_one_also_in_a_copy(trainer: Trainer, draw: random.Random) -> None:
    task = Task(WithIsland, mean_loss, sgd, [[numbers(draw)]], mode="bf16")
    seen: list[dict[bool, set[torch.dtype]]] = []

    def after(view: View) -> None:
        twin = copy.deepcopy(view.net).eval()
        with torch.no_grad(), task.autocast():
            twin(numbers(draw)[0])
        seen.extend(part.dtypes for part in (view.net.first, view.net.island, twin.first, twin.island))  # type: ignore[union-attr, misc]

    trainer.run(task, after)
    for what, dtypes, kind in zip(("network", "copy"), (seen[:2], seen[2:]), (True, False), strict=True):
        if [each[kind] for each in dtypes] != [{torch.bfloat16}, {torch.float32}]:
            raise Failed(
                f"the {what} computes in {dtypes[0][kind] or 'nothing'}, its island in {dtypes[1][kind] or 'nothing'}"
            )


@check("windows", "Gradients within the loss vanish in fp16, or are too large by the loss scale.", "several-losses")
def penalties_see_unscaled_gradients(trainer: Trainer, draw: random.Random) -> None:
    # All numbers of fp16 are normal: processors differ in the others. The loss is (2^-7 w)^2, its gradient 2^-13 w.
    task = Task(lambda: Line(start=2.0), penalty, sgd, [[numbers(draw)]], mode="fp16", init_scale=2.0**14, penalty=True)
    (seen,) = follow(trainer, task)
    expect("the update by the penalty", 2.0 - seen.weight, 2.0**-12)


# --- skipped steps ----------------------------------------------------------------------------------------------------


@check("skipped steps", "One overflow spoils weights or momentum.", "step", also_fused=True)
def a_skipped_step_leaves_weights_and_momentum(trainer: Trainer, draw: random.Random) -> None:
    first, last = numbers(draw), numbers(draw)
    task = line([first], [filled(BAD)], [last], mode="fp16").but(optimizers=with_momentum)
    seen = follow(trainer, task)
    right = follow(trainer, task.but(epochs=[[first], [last]]))
    expect("the weight after a skipped step", seen[1].weight, seen[0].weight)
    for before, after in zip(seen[0].momentum, seen[1].momentum, strict=True):
        expect("the momentum after a skipped step", float(after.flatten()[0]), float(before.flatten()[0]))
    expect("the weight after the next step", seen[2].weight, right[1].weight)


@check("skipped steps", "Half of a bad window is trained on, or leaks into the next.", "accumulation")
def a_bad_micro_batch_skips_its_whole_window(trainer: Trainer, draw: random.Random) -> None:
    good = [numbers(draw) for _ in range(2)]
    for bad in ([filled(BAD), numbers(draw)], [numbers(draw), filled(BAD)]):
        seen = follow(trainer, line(bad, good, mode="fp16", accumulation=2))
        expect("the weight after a window with one bad micro-batch", seen[0].weight, 0.0)
        expect("the weight after the next window", seen[1].weight, -mean(*good))


@check("skipped steps", "The learning rate decays without steps; warm-ups end too early.", "step", also_fused=True)
def the_schedule_ignores_skipped_steps(trainer: Trainer, draw: random.Random) -> None:
    bad = set(draw.sample(range(5), 2))
    epoch = [filled(BAD) if i in bad else numbers(draw) for i in range(5)]
    (seen,) = follow(trainer, line(epoch, mode="fp16", schedule=halving))
    expect("the learning rate after 5 windows, 2 of them skipped", seen.rates[0], 0.5**3)


@check("skipped steps", "The average moves although the weights did not.", "step", also_fused=True)
def the_average_ignores_skipped_steps(trainer: Trainer, draw: random.Random) -> None:
    seen = follow(trainer, line([numbers(draw)], [numbers(draw)], [filled(BAD)], mode="fp16", ema=0.5))
    assert seen[1].ema is not None and seen[2].ema is not None
    before, after = (float(next(iter(each.values())).flatten()[0]) for each in (seen[1].ema, seen[2].ema))
    expect("the average after a skipped step", after, before)


@check("skipped steps", "One overflow leaves inf in running statistics: evaluation is NaN.", "step", also_fused=True)
def running_statistics_survive_a_skipped_step(trainer: Trainer, draw: random.Random) -> None:
    task = Task(Normed, mean_loss, sgd, [[numbers(draw, size=4)], [filled(6e4, size=4)]], mode="fp16", init_scale=SCALE)
    seen = follow(trainer, task)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        expect(f"{name} after an overflow", float(seen[1].state[name]), float(seen[0].state[name]))


@check("skipped steps", "Statistics go back to those of an older window, or stay those of a skipped one.", "step")
def running_statistics_survive_between_windows_that_nobody_looks_at(trainer: Trainer, draw: random.Random) -> None:
    good = [numbers(draw, size=4) for _ in range(4)]
    bad = [numbers(draw, size=4), filled(6e4, size=4)]
    draw.shuffle(bad)
    names = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    task = Task(Normed, mean_loss, sgd, [[*good[:2], *bad, *good[2:]]], mode="fp16", init_scale=SCALE, accumulation=2)
    (seen,), (right,) = follow(trainer, task), follow(trainer, task.but(epochs=[good]))
    for name in names:  # those of the run that never saw the bad window
        expect(
            f"{name} after windows of which the second was skipped", float(seen.state[name]), float(right.state[name])
        )


def _stays_finite(
    trainer: Trainer, draw: random.Random, mode: str, clip: float | None, bad: Batch | None = None, **changes: object
) -> None:
    first, last = numbers(draw), numbers(draw)
    nets: list[nn.Module] = []
    seen: list[Seen] = []
    bad = filled(math.nan) if bad is None else bad
    task = line([first], [bad], [last], mode=mode, clip=clip).but(**changes)
    make = task.net

    def net() -> nn.Module:
        nets.append(make())
        return nets[-1]

    task = task.but(net=net)
    try:
        trainer.run(task, lambda view: seen.append(see(view)))
    except Exception:
        if len(seen) == 1 and float(nets[-1].weight) == seen[0].weight == -mean(first):  # type: ignore[arg-type]
            return  # reported before the step
        raise
    expect("the weight after a NaN", seen[1].weight, seen[0].weight)
    expect("the weight after the next window", seen[2].weight, -mean(first) - mean(last))


NAN = "exact; an error before the step passes, too"


@check("skipped steps", "One bad sample in fp32 makes every weight NaN.", "step", NAN, also_fused=True)
def a_nan_in_fp32_reaches_no_weight(trainer: Trainer, draw: random.Random) -> None:
    _stays_finite(trainer, draw, "fp32", None)


@check(
    "skipped steps",
    "One bad sample in bf16, without a loss scaler, makes every weight NaN.",
    "ranges",
    NAN,
    also_fused=True,
)
def a_nan_in_bf16_reaches_no_weight(trainer: Trainer, draw: random.Random) -> None:
    _stays_finite(trainer, draw, "bf16", None)


@check("skipped steps", "Clipping divides by a norm that is NaN: so is every weight.", "step", NAN, also_fused=True)
def a_nan_that_is_clipped_reaches_no_weight(trainer: Trainer, draw: random.Random) -> None:
    _stays_finite(trainer, draw, "bf16", 100.0)


@check("skipped steps", "Weights of 16 bits, which no loss scaler takes, become NaN.", "ranges", NAN)
def a_nan_reaches_no_weight_of_16_bits(trainer: Trainer, draw: random.Random) -> None:
    _stays_finite(trainer, draw, "bf16", None, net=lambda: Line().bfloat16())


@check("skipped steps", "A loss that is NaN, but not its gradients, is trained on.", "step", NAN)
def a_loss_that_is_not_finite_skips_its_window(trainer: Trainer, draw: random.Random) -> None:
    x, y = numbers(draw)
    for mode in ("fp16", "bf16"):  # such as behind detach() or where(): the gradients are those of the other terms
        _stays_finite(trainer, draw, mode, None, bad=(x, torch.full_like(y, math.nan)), loss=with_constant)
