"""Every private name of torch is in one table, and what uses it works, or is refused, without it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from without_name import without

from amp_core import torch_private
from amp_core.config.errors import ConfigError
from amp_core.torch_private import NAMES, _each, _update_scale_, find, need

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("amp_core", "amp_tools", "recipes", "hydra_plugins")
CODE = [*(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))), ROOT / "train.py"]
TOOLS = [*sorted((ROOT / "scripts").rglob("*.py")), *sorted((ROOT / "tests/support/campaign").rglob("*.py"))]
DOOR = ROOT / "amp_core" / "torch_private.py"

NOT_TORCH = {
    "_exit": "os",
    "_getframe": "sys",
    "_processes": "concurrent.futures",
    "_fields": "named tuples",
    "_make": "named tuples",
    "_attn_implementation": "transformers",
    "_reset_state": "accelerate",
    "_suggest": "optuna",
    "_trial_id": "optuna",
}


TEXT = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*|__dynamo\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def own_names() -> set[str]:
    """What this project itself gives a private name."""
    found: set[str] = set()
    for path in [*CODE, *TOOLS]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Dict):  # the body of a class that is made at run time
                found |= {
                    key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    return {name for name in found if is_private(name)}


@functools.cache
def torchs_names() -> set[str]:
    """Private attributes of the objects of torch that are used most: on these, a name is torch's, though we have it."""
    weight = nn.Parameter(torch.ones(1))
    objects = [nn.Linear(1, 1), weight, weight.exp().grad_fn, torch.optim.SGD([weight])]
    return {name for each in objects for name in dir(each) if is_private(name)}


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each use of something private: `torch._x` in full, `._x` of an object, `"torch._x"` in text."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if id(node) in inner and not is_private(node.attr):
                continue
            root, parts = node, []
            while isinstance(root, ast.Attribute):
                parts.append(root.attr)
                root = root.value
            start = known.get(root.id) if isinstance(root, ast.Name) else None
            if start is not None:
                if any(map(is_private, parts)) and id(node) not in inner:
                    yield node.lineno, ".".join([start, *reversed(parts)])
            elif is_private(node.attr):
                ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "own")
                if node.attr not in own_names() or (node.attr in torchs_names() and not ours):
                    yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in own_names():
                yield node.lineno, f".{name.value}"
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            if is_private(node.left.value) and node.left.value not in own_names() and not node.left.value.endswith("_"):
                yield node.lineno, f".{node.left.value}"
        elif isinstance(node, ast.Constant) and TEXT.fullmatch(str(node.value)):
            yield node.lineno, node.value


def is_named(name: str) -> bool:
    if name.startswith("."):
        return name[1:] in NOT_TORCH or any(each.endswith(name) for each in NAMES)
    return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in NAMES)


def test_every_private_name_of_torch_is_in_the_table() -> None:
    found = [(path, *use) for path in [*CODE, *TOOLS] for use in uses(tree_of(path))]
    assert len(found) > len(NAMES)
    unknown = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, line, name in found if not is_named(name)]
    assert not unknown, f"{unknown}: name them in amp_core/torch_private.py, with the public way"


def test_a_run_looks_them_up_in_one_place() -> None:
    """Elsewhere they are text, handed to `find`, or attributes of objects."""
    for path in CODE:
        for line, name in uses(tree_of(path)):
            if path != DOOR and name.startswith("torch."):
                assert f'"{name}' in path.read_text().splitlines()[line - 1], f"{path.name}:{line}: {name}"


def test_the_table_names_nothing_that_is_not_used() -> None:
    text = "\n".join(path.read_text() for path in [*CODE, *TOOLS] if path != DOOR)
    text += DOOR.read_text().split("_missing: dict")[1]  # without the table itself
    assert not [name for name in NAMES if not re.search(rf"\b{name.rpartition('.')[2]}\b", text)]


@pytest.mark.parametrize("code, name", [
    ("import torch\ntorch._foreach_new_(a)", "torch._foreach_new_"),
    ("import torch.distributed as dist\ndist.distributed_c10d._world.pg", "torch.distributed.distributed_c10d._world.pg"),
    ("from torch._higher_order_ops import scan", "torch._higher_order_ops.scan"),
    ("import torch._export", "torch._export"),
    ("optimizer._cuda_graph_capture_health_check()", "._cuda_graph_capture_health_check"),
    ("getattr(optimizer, '_zero_grad_profile_name')", "._zero_grad_profile_name"),
    ("'torch._export' in sys.modules", "torch._export"),
])  # fmt: skip
def test_the_scanner_sees_a_new_name(code: str, name: str) -> None:
    assert [found for _, found in uses(ast.parse(code))] == [name] and not is_named(name)


STEPS = [name for name in NAMES if name.startswith(("torch._foreach_", "torch._amp_", "torch._fused_", "torch.optim."))]
STEPS += ["torch.autograd.graph._engine_run_backward", "torch.autograd.profiler._is_profiler_enabled"]


@pytest.mark.slow
def test_a_step_without_any_of_them_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """All at once; tests/campaign/test_without_names.py removes each name by itself."""
    together = " ".join(STEPS)
    found = without(together, folder=tmp_path)
    assert found[together]["found"] == found[""]["found"]
    assert sorted(line.split()[4] for line in found[together]["said"]) == sorted(STEPS)
    assert not found[""]["said"]


@pytest.mark.parametrize("growth, backoff", [(2.0, 0.5), (1.7, 0.3)])
def test_the_scale_moves_as_torch_moves_it(growth: float, backoff: float) -> None:
    """In every bit, also where it overflows, underflows, and where `found_inf` is no 0 or 1."""
    for scale in (65536.0, 3e38, 1e-45, 1.1, float("inf")):
        for tracker in (0, 1, 2, 7):
            for found_inf in (0.0, 1.0, 2.0, float("inf")):
                theirs, ours = ((torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)) for _ in range(2))
                torch._amp_update_scale_(*theirs, torch.tensor(found_inf), growth, backoff, 3)
                _update_scale_(*ours, torch.tensor(found_inf), growth, backoff, 3)
                assert all(map(torch.equal, theirs, ours)), (scale, tracker, found_inf)


def test_a_loop_does_what_the_operators_for_lists_do() -> None:
    torch.manual_seed(0)
    left, right = ([torch.randn(3, size) for size in (1, 5)] for _ in range(2))
    for name in (name.rpartition(".")[2] for name in NAMES if name.startswith("torch._foreach_")):
        other: Any = right if name.startswith(("_foreach_copy_", "_foreach_sub")) else torch.tensor(0.3)
        other = 0.1 if "clamp" in name else other
        args = () if name == "_foreach_norm" else (other,)
        method = {"_foreach_norm": torch.linalg.vector_norm, "_foreach_sub": torch.sub}.get(name)
        method = method or getattr(torch.Tensor, name.removeprefix("_foreach_"))
        first, second = ([tensor.clone() for tensor in left] for _ in range(2))
        theirs, ours = getattr(torch, name)(first, *args), _each(method)(second, *args)
        if name.endswith("_"):
            theirs, ours = first, second
        assert all(map(torch.equal, theirs, ours)), name


def test_a_name_that_is_not_in_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_missing", {})
    with pytest.raises(KeyError):
        find("torch._foreach_new_")
    gone = "torch.distributed.fsdp.FSDPState._modules_to_run_forward"  # of a class that this module does not export
    with pytest.raises(ConfigError, match=f"perf.x: torch .* has no {gone}; use another torch"):
        need("perf.x", "torch.Tensor._version", gone)
