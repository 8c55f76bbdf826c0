"""Shards of 16-bit weights (FSDP2): held and gathered in 16 bits, read and stepped in fp32.

    net = wrap_fsdp(net, mesh, torch.bfloat16, update="stochastic")    # weights are shards that read as fp32
    amp.weights.append(LowShards(net, "stochastic"))                   # what amp.step gives their values and takes them

Each rank updates its rows as one process updates all of them, `lowp/weights.py` says how. Noise is a function of the
step and the place in the whole weight: steps have the same bits on any number of ranks, and no two ranks share noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.lowp.rounding import noise_16bit, round_stochastically
from amp_core.lowp.weights import LowPrecisionWeights, Update, join, low_weights, part
from amp_core.tensors import is_dtensor, is_sharded, local, split_dimension
from amp_core.torch_private import find, need

_subclass: Any = find("torch.Tensor._make_wrapper_subclass")
_VIEWS = {"detach", "alias", "view", "slice", "split", "as_strided", "_unsafe_view"}


class LowShard(Tensor):
    """An fp32 tensor that is stored in 16 bits: operators read its fp32 value, and what they write is rounded.

    FSDP2 gathers `low` (`fsdp_pre_all_gather`). Between `begin` and `end` it is the fp32 tensor in `high`.
    """

    low: Tensor
    rest: Tensor | None
    high: list[Tensor]
    """Of this shard and its aliases, which a DTensor makes: the tensor that is stepped; empty between steps."""

    @staticmethod
    def __new__(cls, low: Tensor, rest: Tensor | None = None, high: list[Tensor] | None = None) -> LowShard:
        like = {"strides": low.stride(), "storage_offset": low.storage_offset(), "device": low.device}
        self = _subclass(cls, low.shape, dtype=torch.float32, **like)
        self.low, self.rest, self.high = low, rest, [] if high is None else high
        return self

    def __init__(self, low: Tensor, rest: Tensor | None = None, high: list[Tensor] | None = None) -> None:
        """`low`: in 16 bits; `rest`: of its size, what it lacks (kahan, remainder)."""

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, update: Update) -> LowShard:
        """An fp32 tensor as `update` stores it."""
        kinds = {"kahan": dtype, "remainder": torch.int16}
        rest = torch.zeros_like(value, dtype=kinds[update]) if update in kinds else None
        return cls(part(value, dtype, rest), rest)

    def value(self) -> Tensor:
        """In fp32; the tensor that is stepped, if it is."""
        return self.high[0] if self.high else join(self.low, self.rest)

    def store(self, value: Tensor) -> None:
        """Round and keep `value`."""
        self.low.copy_(part(value, self.low.dtype, self.rest))

    def begin(self) -> None:
        """Be an fp32 tensor from now on."""
        self.high.append(self.value())

    def end(self, value: Tensor) -> None:
        """Be stored in 16 bits again, as `value`."""
        self.high.clear()
        self.store(value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first, kwargs = func._schema.name.rpartition("::")[2], args[0], kwargs or {}
        is_view, makes_shard = name in _VIEWS, name == "new_zeros" and kwargs.get("dtype") in (None, torch.float32)
        if isinstance(first, LowShard) and not first.high and (is_view or makes_shard):
            kwargs.pop("dtype", None)
            return first._of_both(lambda stored: func(stored, *args[1:], **kwargs), is_view)
        found: list[tuple[LowShard, Tensor]] = []
        result = func(*_plain(args, found), **_plain(kwargs, found))
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
            for shard, value in found:
                # Rounding is idempotent: what was only read does not change.
                if not shard.high:
                    shard.store(value)
                result = shard if result is value else result
        return result

    def _of_both(self, view: Any, is_view: bool) -> Any:
        """The same part of the weight and of its rest."""
        low, rest = view(self.low), None if self.rest is None else view(self.rest)
        if isinstance(low, Tensor):
            return LowShard(low, rest, self.high if is_view and low.shape == self.low.shape else None)
        return [LowShard(*both) for both in zip(low, rest or [None] * len(low), strict=True)]

    def fsdp_pre_all_gather(self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        """What this rank sends: its rows, and rows of zeros where others have one more."""
        rows = -(-size[0] // mesh.size())
        missing = rows - len(self.low)
        padded = torch.cat([self.low, self.low.new_zeros(missing, *size[1:])]) if missing else self.low
        return (padded,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        """The weight in 16 bits, in the memory where it was gathered."""
        return None if out is not None else (gathered[0], ())


def _plain(value: Any, found: list[tuple[LowShard, Tensor]]) -> Any:
    """The arguments of an operator with fp32 tensors in place of shards, which are added to `found`."""
    if isinstance(value, LowShard):
        plain = next((plain for shard, plain in found if shard is value), None)
        if plain is None:
            found.append((value, plain := value.value()))
        return plain
    if isinstance(value, list | tuple):
        return type(value)(_plain(each, found) for each in value)
    return {key: _plain(each, found) for key, each in value.items()} if isinstance(value, dict) else value


def hold_low(net: nn.Module, dtype: torch.dtype, update: Update) -> None:
    """Replace the weights of an unsharded network that the mode holds in 16 bits, in place, before it is sharded."""
    need(f"amp.update={update} with sharded weights", "torch.Tensor._make_wrapper_subclass")
    lows = {p: nn.Parameter(LowShard.of(p.detach(), dtype, update), p.requires_grad) for p in low_weights(net)}
    for module in net.modules():
        held = {name: p for name, p in module.named_parameters(recurse=False, remove_duplicate=False) if p in lows}
        for name, p in held.items():
            setattr(module, name, lows[p])
        if held:
            module.register_state_dict_post_hook(_save_fp32)


def _save_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        if prefix + name in state and (shard := shard_of(p)) is not None:
            state[prefix + name] = _like(p, shard.value()) if is_dtensor(p) else shard.value()


def shard_of(param: Any) -> LowShard | None:
    """What this rank holds of a weight in 16 bits; None: it is held in another way."""
    (mine,) = local([param])
    return mine if isinstance(mine, LowShard) else None


class LowShards(LowPrecisionWeights):
    """The sharded 16-bit weights of a network, for `amp.step`."""

    def __init__(self, net: nn.Module, update: Update) -> None:
        """`net`: as `wrap_fsdp(..., update=update)` returned it."""
        assert is_sharded(net)
        self.update = update
        self._mine = {p for p in net.parameters() if shard_of(p) is not None}
        self._stepping: dict[Tensor, Any] = {}
        device = next(net.parameters()).device
        self.num_taken = torch.zeros((), dtype=torch.int64, device=device)

    def reduce_(self, params: Iterable[Tensor]) -> None:
        """Gradients of shards are sums over ranks already."""

    @torch.no_grad()
    def begin_step(self, params: Iterable[Tensor]) -> None:
        """Give the shards of `params` their fp32 values, before anything reads or steps them."""
        for p in self._mine.intersection(params):
            shard: Any = shard_of(p)  # a plain tensor from now on
            shard.begin()
            self._stepping[p] = shard

    @torch.no_grad()
    def end_step(self, params: Iterable[Tensor], taken: Tensor) -> None:
        """Round and store what the step wrote. A skipped step leaves every bit unchanged. No host-device sync."""
        place = 0
        mine = [p for p in params if p in self._mine]
        for p in mine:
            shard = self._stepping.pop(p)
            value = shard.value()
            if self.update == "stochastic":
                noise = noise_16bit(value.numel(), self.num_taken, place + first_of(p))
                value = round_stochastically(value, noise.to(value.device))
            shard.end(value)
            place += p.numel()
        if mine:
            self.num_taken += taken


def first_of(param: Any) -> int:
    """The place of a shard's first element in the whole weight. Ranks have as many rows each, but for the last ones."""
    split = split_dimension(param)
    if split is None:
        return 0
    mesh = param.device_mesh
    rows = -(-param.shape[0] // mesh.size(split)) * mesh.get_local_rank(split)
    return min(rows, param.shape[0]) * math.prod(param.shape[1:])


def _like(param: Any, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, **layout)
