"""Learning rates as a table on the device, indexed by the number of taken steps.

A scheduler stepped by the loop counts windows; after three overflows it is three steps ahead of the weights. Here any
`torch.optim.lr_scheduler` that needs no metric is run once, ahead of time, on a stand-in optimizer. A step then copies
one entry of the table into the optimizer's groups and advances the index by `report.taken`, all on the device.
"""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from amp_core.config.errors import suggest
from amp_core.config.schema import ScheduleConfig
from amp_core.step.report import StepReport
from amp_core.step.steppable import arguments_without_default, can_skip_on_device, require_optimizer
from amp_core.tensors import owner_of_groups

Table = list[list[float]]
"""The rate of each step, for each group."""
Make = Callable[[torch.optim.Optimizer, int], LRScheduler | Table]


class Schedule:
    """Sets the learning rate of every group of `optimizer` by its number of taken steps.

    Construct it right after the optimizer: it reads the groups' learning rates as the peaks, and replaces them by 0-d
    device tensors (shared by groups of equal rates) where the optimizer is fused. A group that is added later gets its
    rate at the present position, with its own `lr` as the peak.

    Args:
        make: builds a `torch.optim.lr_scheduler` from (optimizer, number of steps).
        num_steps: length of the table; later steps keep its last entry.
        fixed: a loaded state does not replace `num_steps`.

    Raises:
        TypeError: no optimizer; or `make` makes no scheduler, or one that needs a metric.
        ValueError: the scheduler also moves the momentum, or a group has no learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, make: Make, num_steps: int, *, fixed: bool = False) -> None:
        require_optimizer(optimizer)
        self.optimizer = optimizer
        self._holder = owner_of_groups(optimizer)
        self._make = make
        self._fixed = fixed
        self._peaks = [_peak(group) for group in self._holder.param_groups]
        self._on_device = can_skip_on_device(optimizer)
        device = self._holder.param_groups[0]["params"][0].device if self._on_device else torch.device("cpu")
        self.num_taken = torch.zeros(1, dtype=torch.int64, device=device)
        """Taken steps, an int64 tensor of shape [1]."""
        self._rates: dict[int, Tensor] = {}
        self._set_table(rate_table(make, self._peaks, num_steps))
        # load_state_dict of an optimizer replaces the tensors that hold its rates.
        self._holder.register_load_state_dict_post_hook(lambda _: self._link())
        self._add_group = self._holder.add_param_group
        self._holder.add_param_group = self._add_param_group  # type: ignore[method-assign]
        _scheduled.add(self._holder)

    def _add_param_group(self, group: dict[str, Any]) -> None:
        self._add_group(group)
        self._take_in_groups()

    def _take_in_groups(self) -> None:
        """Schedule groups that were added. ValueError: the scheduler does not take as many; they are removed again."""
        num = len(self._peaks)
        peaks = [*self._peaks, *map(_peak, self._holder.param_groups[num:])]
        try:
            columns = rate_table(self._make, peaks, self.num_steps)
        except ValueError as problem:
            del self._holder.param_groups[num:]
            raise ValueError(
                f"the schedule was made for {num} groups, and another was added to the optimizer: {problem}; build the "
                f"Schedule when all groups are there"
            ) from problem
        self._peaks = peaks
        self._set_table(columns)

    def _set_table(self, columns: Table) -> None:
        self.num_steps = num_steps = len(columns[0])
        self._columns = columns
        device = self.num_taken.device
        # Groups with equal columns share one tensor: one copy per step instead of one per group.
        self._owner = [columns.index(column) for column in columns]
        self._tables = {i: torch.tensor(columns[i], dtype=torch.float32, device=device) for i in set(self._owner)}
        # A constant rate needs no copy in any step.
        self._moving = [i for i in self._tables if len(set(columns[i])) > 1]
        self._last = torch.full_like(self.num_taken, num_steps - 1)
        for i in self._tables:
            self._rates.setdefault(i, torch.zeros(1, device=device))
        self.last_taken: Tensor | None = None
        """`taken` of the last step, 0-d; for `last_rate`."""
        self._link()

    def _link(self) -> None:
        """Give the groups their rates at the present position: on the device this schedule's tensors."""
        num_taken = self.num_taken.item() if self._on_device else self.num_taken.numpy()[0]  # of the host: no sync
        index = min(int(num_taken), self.num_steps - 1)
        for group, i in zip(self._holder.param_groups, self._owner, strict=True):
            rate = self._columns[i][index]
            group["lr"] = self._rates[i].fill_(rate)[0] if self._on_device else rate

    def advance(self, report: StepReport) -> None:
        """Advance if the step was taken. No host-device sync, unless the report is that of another optimizer."""
        self.last_taken = self.last_taken if report.is_rehearsal else report.taken
        if len(self._holder.param_groups) != len(self._owner):  # one that `add_param_group` did not add
            self._take_in_groups()
        if not self._on_device:
            self._advance_on_host(report)
            return
        self.num_taken += report.taken
        for i in self._moving:
            # Into the very tensor that the groups hold, where fused kernels and captured graphs read it.
            torch.index_select(self._tables[i], 0, torch.minimum(self.num_taken, self._last), out=self._rates[i])

    def _advance_on_host(self, report: StepReport) -> None:
        if report.taken if report.taken_on_host is None else report.taken_on_host:
            self.num_taken += 1
            self._link()

    @property
    def rate(self) -> Tensor | float:
        """The first group's learning rate: a 0-d device tensor, or a float if the host decides about steps."""
        return self._holder.param_groups[0]["lr"]

    def last_rate(self) -> Tensor:
        """The first group's learning rate in the last step, taken or skipped: 0-d. No host-device sync."""
        moved = 0 if self.last_taken is None else self.last_taken.to(self.num_taken)
        index = (self.num_taken - moved).clamp(min=0, max=self.num_steps - 1)
        return self._tables[self._owner[0]].index_select(0, index)[0]

    def state_dict(self) -> dict[str, Any]:
        """{"num_taken", "num_steps"}. Waits for the device."""
        return {"num_taken": int(self.num_taken.item()), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, with its length unless a length was fixed."""
        self.num_taken.fill_(int(state["num_taken"]))
        if not self._fixed and int(state["num_steps"]) != self.num_steps:
            self._set_table(rate_table(self._make, self._peaks, int(state["num_steps"])))
        self._link()

    def counters(self) -> dict[str, int]:
        """Whether the last step changed the rate: a log line may come before the next step. Waits for the device."""
        return {"moved": 0 if self.last_taken is None else int(self.last_taken.item())}

    def load_counters(self, progress: Mapping[str, Any]) -> None:
        """Restores what `counters` returned."""
        self.last_taken = torch.full((), int(progress.get("moved", 0)), device=self.num_taken.device)


_scheduled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `Schedule` sets the learning rates of an optimizer."""
    return owner_of_groups(optimizer) in _scheduled


def _peak(group: dict[str, Any]) -> float:
    rate = group.get("lr")
    if rate is None:
        raise ValueError("a group of the optimizer has no learning rate (lr) that a schedule could move; use none")
    return float(rate)


class _StandIn(torch.optim.SGD):
    """The optimizer that schedulers step. Its own steps do nothing; torch warns if they are missing."""

    def step(self, closure: Any = None) -> None:
        pass


def _require_no_metric(kind: Any) -> None:
    """Raises TypeError for a class whose steps take more than their number, or that has none."""
    if isinstance(kind, type) and not hasattr(kind, "step"):
        raise TypeError(f"Schedule: make returns a {kind.__name__}, expected a torch.optim.lr_scheduler.LRScheduler")
    if isinstance(kind, type) and (needs := arguments_without_default(kind.step)):
        raise TypeError(
            f"Schedule: {kind.__name__}.step() needs {needs[0]}, which a table made ahead of time cannot have; use a "
            f"scheduler that needs none, or leave out Schedule and call {kind.__name__}.step({needs[0]}) yourself"
        )


def rate_table(make: Make, peaks: list[float], num_steps: int) -> Table:
    """The learning rate of every step: one list of `num_steps` floats per group. Raises as `Schedule` does."""
    # Only schedulers that move the momentum, too, change it from 0.5.
    stand_in = _StandIn([{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0], momentum=0.5)
    if not callable(make):
        raise TypeError(
            f"Schedule: make is a {type(make).__name__}, expected a function of (optimizer, number of steps) that "
            f"returns one: lambda o, n: {type(make).__name__}(o, ...)"
        )
    _require_no_metric(make)
    scheduler = make(stand_in, num_steps)
    if isinstance(scheduler, list):
        return scheduler
    _require_no_metric(type(scheduler))
    if type(scheduler) is LambdaLR:
        # Closed form of its steps: a million of them take half a minute.
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return [[float(base * factor(step)) for step in range(num_steps)] for base, factor in pairs]
    columns: Table = [[] for _ in peaks]
    for step in range(num_steps):
        for column, group in zip(columns, stand_in.param_groups, strict=True):
            column.append(float(group["lr"]))
            if group["momentum"] != 0.5:
                raise ValueError(
                    f"{type(scheduler).__name__} also moves the momentum, which a schedule here does not; "
                    f"use schedule.options.cycle_momentum=false"
                )
        if step < num_steps - 1:  # one beyond the end is an error of OneCycleLR
            stand_in.step()
            scheduler.step()
    return columns


# --- by name ----------------------------------------------------------------------------------------------------------


def _after_warmup(curve: Callable[[float, float], float]) -> Callable[..., LRScheduler]:
    """A linear warmup, then `curve` of the progress and the final factor."""

    def make(optimizer: torch.optim.Optimizer, num_steps: int, warmup: float = 0.0, final: float = 0.0) -> LRScheduler:
        _check_shares(final, warmup=warmup)
        num_warmup = round(warmup * num_steps)

        def factor(step: int) -> float:
            if step < num_warmup:
                # From 1 / (n + 1), since a step at a rate of 0 would do nothing; the peak is the first step behind the
                # warmup.
                return (step + 1) / (num_warmup + 1)
            return curve((step - num_warmup) / max(num_steps - num_warmup, 1), final)

        return LambdaLR(optimizer, factor)

    return make


def _check_shares(final: float, **shares: float) -> None:
    """ValueError: phases are no shares of the length, which a table of few steps may not show."""
    if not (min(shares.values()) >= 0 and sum(shares.values()) <= 1):
        raise ValueError(f"{' and '.join(shares)} are shares of the length, from 0 to 1 together")
    if not 0 <= final < math.inf:
        raise ValueError("final is a share of the peak, at least 0")


def _wsd(
    optimizer: torch.optim.Optimizer, num_steps: int, warmup: float = 0.0, decay: float = 0.2, final: float = 0.0
) -> LRScheduler:
    """Warmup, stable, decay by 1 - sqrt (Hägele et al., arXiv:2405.18392): a longer run continues from its middle."""
    _check_shares(final, warmup=warmup, decay=decay)
    num_warmup, num_decay = round(warmup * num_steps), round(decay * num_steps)

    def factor(step: int) -> float:
        progress = max(step - num_steps + num_decay, 0) / max(num_decay, 1)
        # At progress p of the decay 1 - (1 - final) sqrt(p): steep at first.
        return min((step + 1) / (num_warmup + 1), 1.0) * (1.0 + (final - 1.0) * math.sqrt(progress))

    return LambdaLR(optimizer, factor)


def _sequential(optimizer: torch.optim.Optimizer, num_steps: int, parts: list[dict[str, Any]]) -> Table:
    """Schedules one after another, each as if it were alone over its share of the horizon; the last has the rest."""
    if any("options" in part for part in parts):
        raise ValueError("write what is in options beside the name of the part")
    shares = [part.get("share", 0.0) for part in parts[:-1]]
    values = ({k: v for k, v in part.items() if k not in ("name", "share")} for part in parts)
    configs = [ScheduleConfig(str(part["name"]), None, own) for part, own in zip(parts, values, strict=True)]
    if problems := [problem for config in configs for problem in check_schedule(config)]:
        raise ValueError(problems[0])
    if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
        raise ValueError("expected in each part but the last a share of the horizon, below 1 in all")
    lengths = [round(share * num_steps) for share in shares]
    peaks = list(map(_peak, optimizer.param_groups))
    columns: Table = [[] for _ in peaks]
    for config, length in zip(configs, [*lengths, num_steps - sum(lengths)], strict=True):
        for column, part in zip(columns, rate_table(_maker(config), peaks, length) if length > 0 else (), strict=False):
            column += part
    return columns


OWN: dict[str, Callable[..., LRScheduler | Table]] = {
    "constant": lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1.0),
    "warmup_cosine": _after_warmup(lambda p, final: final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * p))),
    "warmup_linear": _after_warmup(lambda p, final: 1.0 + (final - 1.0) * p),
    "wsd": _wsd,
    "sequential": _sequential,
}
REFUSED = {
    "ReduceLROnPlateau": "needs a metric",
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "needs a function, which a config cannot hold"),
    "SequentialLR": "is schedule=sequential here",
    "ChainedScheduler": "needs other schedulers, which a config cannot hold",
    "SWALR": "belongs to SWA; averaged weights are ema.decay here",
    "LRScheduler": "is abstract",
}


def available() -> dict[str, Any]:
    found = {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(cls) and issubclass(cls, LRScheduler) and not name.startswith("_")
    }
    return {name: cls for name, cls in found.items() if name not in REFUSED} | OWN


def _maker(cfg: ScheduleConfig) -> Make:
    target = available()[cfg.name]
    if cfg.name in OWN:
        return lambda optimizer, num_steps: target(optimizer, num_steps, **cfg.options)
    parameters = inspect.signature(target).parameters

    def make(optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        # Values that follow from the run need not be given.
        peaks = [float(group["lr"]) for group in optimizer.param_groups]
        known = {"T_max": num_steps, "total_steps": num_steps, "max_lr": peaks}
        return target(optimizer, **{k: v for k, v in known.items() if k in parameters} | cfg.options)

    return make


def check_schedule(cfg: ScheduleConfig) -> list[str]:
    """Problems of the `schedule` group, found by building a short table."""
    if cfg.name in REFUSED:
        return [f"schedule.name={cfg.name}: {REFUSED[cfg.name]}. {suggest('', sorted(available()))}"]
    if cfg.name not in available():
        return [f"schedule.name={cfg.name}: there is no such schedule. {suggest(cfg.name, sorted(available()))}"]
    parameters = inspect.signature(available()[cfg.name]).parameters
    valid = [p for p in parameters if p not in ("optimizer", "num_steps", "last_epoch")]
    if unknown := [key for key in cfg.options if key not in valid]:
        return [f"schedule.options.{key}: {cfg.name} has no such option. {suggest(key, valid)}" for key in unknown]
    try:
        table = rate_table(_maker(cfg), [0.1], 8)
    except Exception as problem:  # report to the user whatever a scheduler's constructor raises
        if "required positional argument" in str(problem):
            missing = [f"schedule.options.{key}" for key in re.findall(r"'(\w+)'", str(problem))]
            return [f"schedule.name={cfg.name}: needs {' and '.join(missing)}"]
        return [f"schedule.options={cfg.options}: {cfg.name} refuses them: {problem}"]
    if any(not math.isfinite(rate) or rate < 0 for rate in table[0]):
        return [f"schedule.options={cfg.options}: {cfg.name} gives rates that are negative or not finite"]
    return []


def build_schedule(cfg: ScheduleConfig, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
    """The schedule of the `schedule` group, over `schedule.horizon` or else `num_steps` steps."""
    return Schedule(optimizer, _maker(cfg), cfg.horizon or num_steps, fixed=cfg.horizon is not None)
