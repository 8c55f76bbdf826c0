"""The floors of the core: how long each is, who imports from below, and what one reads to follow one step.

    python scripts/floors.py                                     # the tables

A floor imports only from those above it; models, data and heads only from config, tensors and lowp; doctor and cli not
from each other; nothing in amp_core imports amp_tools or amp_plugins. No two modules import each other.
`tests/unit/test_floors.py` holds this and the limits below.
"""

from __future__ import annotations

import argparse
import ast
import functools
import graphlib
import inspect
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

BUDGETS = {
    "library": (10_755, "base lowp step memory layouts checkpoints heads"),
    "doctor": (3_612, "doctor"),
    "program": (16_007, "config run cli data models train.py"),
    "amp_tools": (4_453, "amp_tools"),
    "scripts": (5_778, "scripts"),
    "amp_plugins": (1_126, "amp_plugins"),
    "amp_conformance": (2_864, "amp_conformance"),
}
"""Lines at most, of floors (in `ABOUT`) and of what lies beside the core. The library half is what a loop without this
program imports, the program half what a run of train.py needs besides."""

TESTS_TO_CODE = 0.850
"""Lines of tests to those of all other Python, at most."""

MOST_MODULES, MOST_LINES, MOST_LINES_OF_STEP = 38, 6_814, 2_546
"""What `recipes/classification.py` and `amp_core/step/amp.py` import, at most."""

MOST_LINES_OF_PATH = 500
"""Lines of the functions that one fp16 step goes through, at most."""

ABOUT = {
    "config": "the configuration: types, rules; no torch",
    "base": "tensors, private names of torch, torchvision",
    "lowp": "16-bit and 8-bit storage and arithmetic",
    "step": "what an optimizer step is",
    "memory": "the same bits in less memory or time",
    "layouts": "a model over processes",
    "checkpoints": "named parts: atomic, verified, rotated",
    "models": "networks",
    "data": "data sets",
    "heads": "losses, heads",
    "run": "a run: environment, log, loop, resume",
    "doctor": "finds where a NaN comes from",
    "cli": "the command line, sweeps",
    "amp_tools": "programs about runs: reports, forecasts, profiles",
}
SIDE_ROOMS = {"models", "data", "heads"}


def modules() -> dict[str, Path]:
    """All modules of the core and of the tools, by dotted name."""
    paths = [*sorted(ROOT.glob("amp_core/**/*.py")), *sorted(ROOT.glob("amp_tools/**/*.py"))]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def floor_of(module: str) -> str | None:
    """The floor of a module; None for the package itself."""
    top, *rest = module.split(".")
    if top == "amp_tools":
        return top
    if not rest or rest[0] == "__init__":
        return None
    return rest[0] if rest[0] in ABOUT else "base"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and modules of the project that a file imports, anywhere in it; not for type checkers alone."""
    return _imports(_that_runs(ast.parse(path.read_text())))


def _that_runs(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`: a name in annotations alone ties no module to another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _that_runs(child)


def at_import(path: Path) -> Iterator[str]:
    """Modules that are imported as soon as this one is; not inside of functions."""
    return (module for _, module in _imports(_outside_of_functions(ast.parse(path.read_text()).body)))


def _outside_of_functions(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _outside_of_functions([*node.body, *getattr(node, "orelse", [])])


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    known = modules()
    lazy = _lazy(known["amp_core"])
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "amp_core":  # which imports them when they are used
            found = (lazy.get(alias.name, alias.name) for alias in node.names)
            yield from ((node.lineno, f"amp_core.{name}") for name in found)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("amp_core", "amp_tools"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in known else node.module or ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("amp_core", "amp_tools"):
                    yield node.lineno, alias.name


@functools.cache
def _lazy(path: Path) -> dict[str, str]:
    """Where the names of the package `amp_core` stand, as its table says."""
    assigned = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "_HOME")


def may_import(floor: str, other: str) -> bool:
    """Whether a module of one floor may import one of another."""
    if floor == other or floor == "amp_tools":
        return True
    if floor in SIDE_ROOMS:
        return other in ("config", "base", "lowp")
    if {floor, other} == {"doctor", "cli"}:
        return False
    order = list(ABOUT)
    return order.index(other) < order.index(floor)


def upward() -> list[str]:
    """The imports that are against the rule."""
    found = []
    for module, path in modules().items():
        floor = floor_of(module)
        for line, other in imports(path) if floor is not None else ():
            above = floor_of(other)
            if above is not None and floor is not None and not may_import(floor, above):
                found.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    return found


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def sizes() -> dict[str, int]:
    """Lines of each floor."""
    found = dict.fromkeys(ABOUT, 0)
    for module, path in modules().items():
        floor = floor_of(module)
        if floor is not None:
            found[floor] += lines_of(path)
    return found


def spent() -> dict[str, int]:
    """Lines of each budget."""
    found = sizes()
    return {
        name: sum(found[part] if part in found else lines_below(part) for part in parts.split())
        for name, (_, parts) in BUDGETS.items()
    }


def lines_below(name: str) -> int:
    """Lines of a Python file, or of all in a folder."""
    path = ROOT / name
    return sum(map(lines_of, path.rglob("*.py") if path.is_dir() else [path]))


def tests_to_code() -> float:
    others = (
        "amp_core",
        "amp_plugins",
        "amp_tools",
        "amp_conformance",
        "recipes",
        "scripts",
        "hydra_plugins",
        "docs",
        "train.py",
    )
    return lines_below("tests") / sum(map(lines_below, others))


def circle() -> list[str]:
    """Modules that import each other, anywhere in them, the first of which is also the last; [] if none do."""
    known = modules()
    graph = {
        name: {other for _, other in imports(path) if other in known and other != name} for name, path in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as found:
        return found.args[1]
    return []


def closure(name: str) -> set[Path]:
    """The files of the project that are imported with this one, itself left out, and packages' empty files."""
    known = modules()
    found: set[str] = set()
    todo = list(at_import(ROOT / name))
    while todo:
        module = todo.pop()
        if module in found or module not in known or module == "amp_core":
            continue
        found.add(module)
        todo += at_import(known[module])
    return {known[module] for module in found}


def path_of_a_step() -> dict[str, list[tuple[str, int]]]:
    """The functions of the project that one fp16 step of the classification recipe goes through, and their lines.

    The third window of a run, from the moment when it is handed to the recipe until it is asked for the next one: the
    first two make what later ones use again. Docstrings and comments count: one reads them.
    """
    sys.path.insert(0, str(ROOT))
    import train
    from amp_core.run.loop import Loop

    codes: dict[Any, None] = {}
    original, seen = Loop.run, []

    def run(self: Any, step: Any, window: Any) -> Any:
        seen.append(self.step)
        if len(seen) != 3:
            return original(self, step, window)
        sys.setprofile(lambda frame, event, _: codes.setdefault(frame.f_code) if event == "call" else None)
        try:
            return original(self, step, window)
        finally:
            sys.setprofile(None)

    Loop.run = run  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        settings = "device=cpu amp=fp16 steps=4 accumulation=2 clip=norm ema.decay=0.9 log.progress=false"
        try:
            code = train.main([*settings.split(), f"run_dir={folder}/run", "data.num_workers=0"])
        finally:
            Loop.run = original  # type: ignore[method-assign]
    assert code == 0, code
    found: dict[str, dict[str, int]] = {}
    for code in codes:
        path = code.co_filename.removeprefix(f"{ROOT}/")
        if path.startswith(("amp_core/", "recipes/")) and "<" not in code.co_name:
            found.setdefault(path, {})[code.co_qualname] = len(inspect.getsourcelines(code)[0])
    return {path: list(functions.items()) for path, functions in found.items()}


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = sizes()
    for name, lines in spent().items():
        limit, parts = BUDGETS[name]
        each = " ".join(f"{part} {found[part]}" for part in parts.split() if part in found)
        print(f"{name:16} {lines:6} of {limit:6}  {each}")
    print(f"tests to code: {tests_to_code():.3f} of {TESTS_TO_CODE}")
    print(*[f"against the rule: {text}" for text in upward()], sep="\n")
    for name in ("recipes/classification.py", "amp_core/step/amp.py"):
        files = closure(name)
        print(f"{name} imports {len(files)} modules, {sum(map(lines_of, files)):,} lines")
    path = path_of_a_step()
    total = sum(length for functions in path.values() for _, length in functions)
    print(f"one fp16 step: {total} lines of {sum(map(len, path.values()))} functions in {len(path)} files")
    for name, functions in path.items():
        print(f"  {name}: " + ", ".join(f"{function} {length}" for function, length in functions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
