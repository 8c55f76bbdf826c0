"""Where an operation is: its module and line; in the backward pass those of the differentiated operation."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from amp_core.memory.recompute import recomputed
from amp_core.torch_private import find

current_node, _sequence_number = find("torch._C._current_autograd_node"), find("torch._C._autograd._get_sequence_nr")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = (torch.autograd.__file__, torch.autograd.graph.__file__)
_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_AROUND = ("doctor/", "lowp/", "step/amp.py", "step/state.py", "memory/recompute.py")
_AROUND += ("step/gradients.py", "layouts/fsdp.py", "layouts/stages.py", "tensors.py", "../amp_tools/")
_NOT_SHOWN = tuple(os.path.normpath(_CORE + name) + ("" if name.endswith("py") else os.sep) for name in _AROUND)
"""Frames that do not locate an operation in a network."""
_ROOTS = (os.path.dirname(_CORE.rstrip(os.sep)) + os.sep, os.getcwd() + os.sep)


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
        return f"{called(self.module)}{'' if self.module is None else f' ({self.kind})'}, {self.source}"

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a `Diagnosis`."""
        return {"module": self.module, "module_class": self.kind, "source": self.source, "code": self.code}


def called(module: str | None) -> str:
    return "outside of the networks" if module is None else module or "the network itself"


BEFORE = Location(None, "", "before the window", "")


class Places:
    """Follows which module runs, and which operation made a node of autograd.

    `on_output` gets what an outermost module returns.
    """

    def __init__(self, names: Mapping[nn.Module, str], on_output: Callable[[Any], Any]) -> None:
        self._names, self._on_output = names, on_output
        self.modules: list[tuple[str | None, str, Any, nn.Module]] = []
        """Name, class, the node of autograd that entered it (None: the program did), the module."""
        self._of_nodes: dict[int, Location] = {}
        self._last: dict[int, int] = {}
        """Number of the last node that has a place, by thread."""
        self._handles: dict[nn.Module | None, Any] = {}

    def start(self) -> None:
        self._handles[None] = register_module_forward_pre_hook(self._enter)

    def stop(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        name, kind = self._names.get(module), class_name(module)
        outer, its_kind = self.modules[-1][:2] if self.modules else (None, "")
        # Nodes of Python functions, such as a checkpoint around this module.
        self._number(Location(outer, its_kind, *_source(), ""))
        if name is None and outer is not None:  # a wrapper, or part of a library's module
            name, kind = outer, its_kind
        self.modules.append((name, kind, current_node(), module))
        if module not in self._handles:  # a global hook would be called before the module's own ones
            self._handles[module] = module.register_forward_hook(self._leave, always_call=True)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.modules and self.modules[-1][-1] is module:  # replicas share their hooks
            self.modules.pop()
            if not self.modules:
                self._on_output(output)

    def of(self, node: Any, name: str) -> Location:
        """The place of an operation that begins now; `node`: of autograd, which computes it in the backward pass."""
        again = recomputed()
        module, kind, entered_by = self.modules[-1][:3] if self.modules else (None, "", None)
        if node is not None and again is None:
            place = self._of_nodes.get(node._sequence_nr()) or Location(None, "", *_source(), node.name())
            source, code = _source(by_autograd=True)
            if source:  # a hook, or a backward written in Python
                place = replace(place, source=source, code=code, forward="")
            if entered_by is node:  # which computes modules again, itself
                place = replace(place, module=module, kind=kind, forward=name)
        else:
            if again is not None and not self.modules:
                module, kind = self._names.get(again), class_name(again)
            place = Location(module, kind, *_source(), name)
        self._number(place)
        return place

    def _number(self, place: Location) -> None:
        """Assign a place to the nodes that are new in this thread.

        Autograd creates an operation's node just before the operation is dispatched, one per level of torch.func. One
        without a node reads the number of its predecessor, which already has a place.
        """
        last, thread = last_node(), threading.get_ident()
        for number in range(self._last.get(thread, last - 1) + 1, last + 1):
            self._of_nodes.setdefault(number, place)
        self._last[thread] = last


def last_node() -> int:
    return _sequence_number() - 1


def _source(*, by_autograd: bool = False) -> tuple[str, str]:
    """file:line of the innermost frame to show, and the line; `by_autograd`: empty if autograd's engine called none."""
    frame: Any = sys._getframe(1)
    while frame is not None and not (by_autograd and frame.f_code.co_filename in _ENGINE):
        path, line = frame.f_code.co_filename, frame.f_lineno
        is_mode = frame.f_code.co_name == "__torch_dispatch__"  # also one of a subclass, in another file
        if not is_mode and not path.startswith((_TORCH, *_NOT_SHOWN, "<")):
            shown = next((path.removeprefix(root) for root in _ROOTS if path.startswith(root)), path)
            return f"{shown}:{line}", linecache.getline(path, line).strip()
        frame = frame.f_back
    return "" if by_autograd else "unknown", ""


def class_name(module: nn.Module) -> str:
    cls, *bases = type(module).__mro__
    if bases[0].__name__ == "FSDPModule":  # the class that fully_shard made
        cls = bases[1]
    return getattr(cls, "_of", cls).__name__  # the original class of an fp32 island
