"""Places the networks of a run: devices, islands, compiled and recomputed parts, the layout over processes."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_core.config.errors import ConfigError
from amp_core.config.schema import SHARDED
from amp_core.lowp.islands import keep_fp32
from amp_core.lowp.through_fp32 import note
from amp_core.step.amp import Amp

if TYPE_CHECKING:
    from amp_core.run.environment import Environment

logger = logging.getLogger("amp_recipes")


class Placement:
    """Places the networks of a process as the configuration says."""

    def __init__(self, process: Environment) -> None:
        self._process, self._cfg = process, process.cfg
        self._shards = process.world_size > 1 and process.cfg.layout.name in SHARDED
        self._mesh: Any = None

    @property
    def devices(self) -> list[torch.device]:
        """All devices of this process, its first one first. On a CPU the stages of model_parallel share it."""
        device, first = self._process.device, self._process.device.index or 0
        stages = range(first, first + (self._cfg.layout.num_stages or 1))
        if device.type == "cuda" and self._cfg.layout.name == "data_parallel":
            stages = range(torch.cuda.device_count())
        return [torch.device("cuda", index) if device.type == "cuda" else device for index in stages]

    def wrap(self, net: nn.Module, amp: Amp, notes: list[str]) -> list[tuple[str, nn.Module]]:
        """Put a network on its device, with its fp32 islands, its statistics guarded, in the layout. Adds to the notes.

        Networks in an `nn.ModuleDict` are wrapped one by one, in place. In layout model_parallel parts stay on the
        devices where they are. Returns the wrapped networks, each with its name in the dictionary, or "".
        """
        cfg = self._cfg
        # Sharding moves it block by block: the whole may not fit the device.
        if cfg.layout.name != "model_parallel" and not self._shards:
            net = net.to(self._process.device)
        if cfg.perf.channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if all(param.ndim != 4 for param in net.parameters()):
                logger.warning("perf.channels_last=true has no effect: %s has no 2-d convolutions", type(net).__name__)
        if cfg.amp.keep_fp32:
            try:
                keep_fp32(net, cfg.amp.keep_fp32)
            except ValueError as problem:
                raise ConfigError(f"amp.keep_fp32={cfg.amp.keep_fp32}: {problem}") from problem
        if not isinstance(net, nn.ModuleDict):
            return [("", self._wrap(net, amp, notes))]
        for name, part in net.items():
            net[name] = self._wrap(part, amp, notes)
        return list(net.items())

    def _wrap(self, net: nn.Module, amp: Amp, notes: list[str]) -> nn.Module:
        # In this order: 16-bit weights before the layout reads dtypes, compiled and recomputed parts before a wrapper
        # hides them, and the guard on the outermost module, the one that is called.
        amp.prepare(net, gathers=self._shards)
        if (said := note(net)) and said not in notes:
            notes.append(said)
        if self._cfg.perf.compile is not None:
            notes.append(self._compile(net))
        if self._cfg.perf.checkpoint_activations:
            self._recompute(net)
        if self._process.world_size > 1 or self._cfg.layout.name == "data_parallel":
            net = self._lay_out(net, amp)
        amp.guard(net)
        return net

    def _lay_out(self, net: nn.Module, amp: Amp) -> nn.Module:
        from amp_core.layouts.ddp import wrap_data_parallel, wrap_ddp
        from amp_core.layouts.fsdp import build_mesh, shard_for
        from amp_core.layouts.zero import share_state

        layout, device, world_size = self._cfg.layout, self._process.device, self._process.world_size
        if layout.name == "data_parallel":
            return wrap_data_parallel(net, self.devices)
        if self._shards:
            self._mesh = self._mesh or build_mesh(device, world_size, layout.shard_size)
            net = shard_for(amp, net, self._mesh, layout.gather_dtype and getattr(torch, layout.gather_dtype))
        elif not amp.weights:  # 16-bit gradients are summed in fp32, by amp.step
            # The order of two addends does not matter; on a GPU only deterministic=true makes steps repeatable.
            exact = world_size > 2 and (device.type == "cpu" or self._cfg.deterministic)
            options: dict[str, Any] = {"static_graph": layout.static_graph, "bucket_mb": layout.bucket_mb}
            where = None if layout.name == "model_parallel" else device
            net = wrap_ddp(net, where, exact=exact, compress=layout.compress is not None, **options)
        if layout.shard_optimizer:
            share_state(net)
        return net

    @functools.cached_property
    def compiler(self) -> Any:
        """The compiler of perf.compile, made at its first use."""
        from amp_core.memory.compiled import Compiler

        return Compiler(self._cfg.perf.backend, any_shape=self._cfg.perf.dynamic)

    def _compile(self, net: nn.Module) -> str:
        from amp_core.memory.compiled import compile_parts

        num_parts = compile_parts(net, self.compiler, whole=self._cfg.perf.compile == "network")
        return f"{num_parts} part(s) of {type(net).__name__} are compiled by {self._cfg.perf.backend}"

    def _recompute(self, net: nn.Module) -> None:
        from amp_core.memory.recompute import recompute_blocks

        try:
            num_blocks = recompute_blocks(net)
        except ValueError as problem:
            raise ConfigError(f"perf.checkpoint_activations=true: {problem}") from problem
        logger.info("%d blocks are computed once more in the backward pass", num_blocks)
