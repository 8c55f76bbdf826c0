"""Shards of 16-bit weights (FSDP2): held and gathered in 16 bits, read and stepped in fp32.

    net = wrap_fsdp(net, mesh, torch.bfloat16, update="stochastic")    # weights are shards that read as fp32
    amp.weights.append(ShardedLowWeights(net, "stochastic"))           # amp.step steps their fp32 values, and rounds

`fsdp.shard_for` does both.

Each rank updates its rows exactly as one process would update all of them (`lowp/weights.py`). Noise is a function of
the step and the place in the whole weight: steps have the same bits on any number of ranks, and no two share noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_core.lowp.formats import E4M3
from amp_core.lowp.rounding import noise_16bit, round_stochastically
from amp_core.lowp.weights import LowPrecisionWeights, Update, join, low_weights, part
from amp_core.tensors import from_local, is_dtensor, is_sharded, local, slice_of
from amp_core.torch_private import find, need

_subclass: Any = find("torch.Tensor._make_wrapper_subclass")
_VIEWS = {"detach", "alias", "view", "slice", "split", "as_strided", "_unsafe_view"}


class LowShard(Tensor):
    """An fp32 tensor that is stored in 16 bits: operators read its fp32 value, and what they write is rounded.

    FSDP2 gathers `low` (`fsdp_pre_all_gather`). Within a step it is the fp32 tensor in `high`.
    """

    low: Tensor
    rest: Tensor | None  # what `low` lacks, of its size (remainder)
    high: list[Tensor]  # what is stepped; empty between steps. A list, since the aliases that a DTensor makes share it

    @staticmethod
    def __new__(cls, low: Tensor, rest: Tensor | None = None, high: list[Tensor] | None = None) -> LowShard:
        like = {"strides": low.stride(), "storage_offset": low.storage_offset(), "device": low.device}
        self = _subclass(cls, low.shape, dtype=torch.float32, **like)
        self.low, self.rest, self.high = low, rest, [] if high is None else high
        return self

    @classmethod
    def of(cls, value: Tensor, dtype: torch.dtype, update: Update) -> LowShard:
        """An fp32 tensor as `update` stores it."""
        rest = torch.zeros_like(value, dtype=torch.int16) if update == "remainder" else None
        return cls(part(value, dtype, rest), rest)

    def value(self) -> Tensor:
        """In fp32; the tensor that is stepped, if it is."""
        return self.high[0] if self.high else join(self.low, self.rest)

    def store(self, value: Tensor) -> None:
        """Round and keep `value`."""
        self.low.copy_(part(value, self.low.dtype, self.rest))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first, kwargs = func._schema.name.rpartition("::")[2], args[0], kwargs or {}
        # Views, and the zeros into which FSDP2 pads a shard, stay shards: else it would keep their fp32 values.
        is_view = name in _VIEWS
        makes_shard = name == "new_zeros" and kwargs.get("dtype") in (None, torch.float32)
        if isinstance(first, LowShard) and not first.high and (is_view or makes_shard):
            kwargs.pop("dtype", None)
            return first._of_both(lambda stored: func(stored, *args[1:], **kwargs), is_view)
        # Any other operator computes with fp32 values; what it wrote in place is rounded and stored.
        found: list[tuple[LowShard, Tensor]] = []
        result = func(*_plain(args, found), **_plain(kwargs, found))
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments):
            for shard, value in found:
                # Rounding is idempotent: what was only read does not change.
                if not shard.high:
                    shard.store(value)
                result = shard if result is value else result  # an operator in place returns its argument
        return result

    def _of_both(self, view: Any, is_view: bool) -> Any:
        """`view` of the weight and of its rest."""
        # Aliases of the whole shard share `high`: FSDP2 and the DTensor hold one each.
        low, rest = view(self.low), None if self.rest is None else view(self.rest)
        if isinstance(low, Tensor):
            return type(self)(low, rest, self.high if is_view and low.shape == self.low.shape else None)
        return [type(self)(*both) for both in zip(low, rest or [None] * len(low), strict=True)]

    def fsdp_pre_all_gather(self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        """What this rank sends: its rows, padded with zeros to those of the first rank, since all send as many."""
        return (_padded(self.low, size, mesh),), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        """The weight in 16 bits, in the memory where it was gathered."""
        return None if out is not None else (gathered[0], ())


class Float8Shard(LowShard):
    """A shard that is fp32 (`low`), and is gathered in E4M3 by the scale of the whole weight: a byte a number, not 4.

    The codes are those that `amp=fp8` would make of the whole weight. The layer quantises the gathered weight again, by
    a scale that may differ in the last digit, by 2^-23 of it.
    """

    def fsdp_pre_all_gather(self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        """What this rank sends. Collective: the largest number of all ranks."""
        peak = torch.linalg.vector_norm(self.low, torch.inf) if self.low.numel() else self.low.new_zeros(())
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = peak.clamp(min=1e-30) / E4M3.largest  # as in `quantise`
        values = (self.low / scale).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
        return (_padded(values.view(torch.uint8), size, mesh),), scale

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        """The weight in fp32, in memory of its own."""
        whole = gathered[0].view(torch.float8_e4m3fn).float() * metadata
        return (whole, (whole,)) if out is None else out.data.copy_(whole[: len(out)])


def _padded(rows: Tensor, size: torch.Size, mesh: Any) -> Tensor:
    missing = -(-size[0] // mesh.size()) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *size[1:])]) if missing else rows


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


def hold_low(net: nn.Module, dtype: torch.dtype, update: Update, device: str) -> None:
    """Replace the weights of an unsharded network that the mode holds in 16 bits, before it is sharded on `device`."""
    need(f"amp.update={update} with sharded weights", "torch.Tensor._make_wrapper_subclass")
    values = {p: LowShard.of(p.detach().to(device), dtype, update) for p in low_weights(net)}
    _replace(net, {p: nn.Parameter(value, p.requires_grad) for p, value in values.items()})


def send_float8(layers: Iterable[nn.Module], device: str) -> None:
    """Make linear layers gather their weights in E4M3, before they are sharded on `device`."""
    need("layout.gather_dtype=float8_e4m3fn", "torch.Tensor._make_wrapper_subclass")
    for layer in layers:
        weight: Any = layer.weight
        _replace(layer, {weight: nn.Parameter(Float8Shard(weight.detach().to(device)), weight.requires_grad)})


def _replace(net: nn.Module, lows: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in net.modules():
        held = {name: p for name, p in module.named_parameters(recurse=False, remove_duplicate=False) if p in lows}
        for name, p in held.items():
            setattr(module, name, lows[p])
        if held:
            module.register_state_dict_post_hook(_save_fp32)


def _save_fp32(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        if prefix + name in state and (shard := shard_of(p)) is not None:
            state[prefix + name] = from_local(shard.value(), p) if is_dtensor(p) else shard.value()


def shard_of(param: Any) -> LowShard | None:
    """What this rank holds of a weight in 16 bits; None: it is held in another way."""
    (mine,) = local([param])
    return mine if isinstance(mine, LowShard) else None


class ShardedLowWeights(LowPrecisionWeights):
    """The sharded 16-bit weights of a network, for `amp.step`."""

    def __init__(self, net: nn.Module, update: Update) -> None:
        """`net`: as `wrap_fsdp(..., update=update)` returned it."""
        assert is_sharded(net)
        self.update = update
        self._mine = {p for p in net.parameters() if shard_of(p) is not None}
        self._stepping: dict[Tensor, Any] = {}
        self.num_taken = torch.zeros((), dtype=torch.int64, device=next(net.parameters()).device)

    def reduce_(self, params: Iterable[Tensor]) -> None:
        """Nothing to do: FSDP2 has summed gradients over ranks."""

    @torch.no_grad()
    def begin_step(self, params: Iterable[Tensor]) -> None:
        """Give the shards of `params` their fp32 values, before anything reads or steps them."""
        for p in self._mine.intersection(params):
            shard: Any = shard_of(p)
            shard.high.append(shard.value())  # an fp32 tensor from now on
            self._stepping[p] = shard

    @torch.no_grad()
    def end_step(self, params: Iterable[Tensor], taken: Tensor) -> None:
        """Round and store what the step wrote. A skipped step leaves every bit unchanged. No host-device sync."""
        # Noise as in `lowp/weights.py`, which draws it once for all weights of a step, one after the other: `offset` is
        # where this weight begins there, and its shard lies within.
        offset = 0
        mine = [p for p in params if p in self._mine]
        for p in mine:
            shard = self._stepping.pop(p)
            value = shard.value()
            if self.update == "stochastic":
                noise = noise_16bit(value.numel(), self.num_taken, offset + slice_of(p).start * math.prod(p.shape[1:]))
                value = round_stochastically(value, noise.to(value.device))
            shard.high.clear()
            shard.store(value)
            offset += p.numel()
        if mine:
            self.num_taken += taken
