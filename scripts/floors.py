"""The floors of the core: how long each is, who imports from below, and what one reads to follow one step.

    python scripts/floors.py                                     # the tables
    python scripts/floors.py --write                             # list and picture of docs/ARCHITECTURE.md

A floor imports only from those above it; models, data and heads only from config, tensors and lowp; doctor and cli not
from each other; nothing in amp_core imports amp_tools. No two modules import each other, by whatever way.
`tests/unit/test_floors.py` holds this and the limits below.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import inspect
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"

LIMITS = {
    "config": 1755,
    "base": 697,
    "lowp": 1675,
    "step": 2292,
    "memory": 795,
    "layouts": 1285,
    "checkpoints": 2064,
    "models": 651,
    "data": 1966,
    "heads": 669,
    "run": 4726,
    "doctor": 3811,
    "cli": 1335,
    "amp_tools": 4938,
}
"""Lines of each floor at most, in their order. `base` are the modules that lie beside the folders."""

MOST_MODULES, MOST_LINES, MOST_LINES_OF_STEP = 38, 7885, 2481
"""What `recipes/classification.py` and `amp_core/step/amp.py` import, at most."""

MOST_LINES_OF_PATH = 490
"""Lines of the functions that one fp16 step goes through, at most."""

ABOUT = {
    "config": "the configuration: types, rules; no torch",
    "base": "tensors, private names of torch",
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
    return rest[0] if rest[0] in LIMITS else "base"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and modules of the project that a file imports, anywhere in it, also for type checkers alone."""
    return _imports(ast.walk(ast.parse(path.read_text())))


def at_import(path: Path) -> Iterator[str]:
    """Modules that are imported as soon as this one is, or for type checkers; not inside of functions."""
    return (module for _, module in _imports(_outside_of_functions(ast.parse(path.read_text()).body)))


def _outside_of_functions(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _outside_of_functions([*node.body, *getattr(node, "orelse", [])])


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    known = modules()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("amp_core", "amp_tools"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in known else node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("amp_core", "amp_tools"):
                    yield node.lineno, alias.name


def may_import(floor: str, other: str) -> bool:
    """Whether a module of one floor may import one of another."""
    if floor == other or floor == "amp_tools":
        return True
    if floor in SIDE_ROOMS:
        return other in ("config", "base", "lowp")
    if {floor, other} == {"doctor", "cli"}:
        return False
    order = list(LIMITS)
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
    found = dict.fromkeys(LIMITS, 0)
    for module, path in modules().items():
        floor = floor_of(module)
        if floor is not None:
            found[floor] += lines_of(path)
    return found


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
        settings = [
            "device=cpu",
            "amp=fp16",
            "steps=4",
            "accumulation=2",
            "clip=norm",
            "ema.decay=0.9",
            "log.progress=false",
        ]
        try:
            code = train.main([*settings, f"run_dir={folder}/run", "data.num_workers=0"])
        finally:
            Loop.run = original  # type: ignore[method-assign]
    assert code == 0, code
    found: dict[str, dict[str, int]] = {}
    for code in codes:
        path = Path(code.co_filename)
        if (
            path.is_relative_to(ROOT)
            and path.parts[len(ROOT.parts)] in ("amp_core", "recipes")
            and "<" not in code.co_name
        ):
            found.setdefault(str(path.relative_to(ROOT)), {})[code.co_qualname] = len(inspect.getsourcelines(code)[0])
    return {path: list(functions.items()) for path, functions in found.items()}


def listing() -> str:
    """Every module with what its docstring begins with, by floor."""
    text = []
    for floor in LIMITS:
        text += [f"### {floor if floor != 'base' else 'beside the floors'}: {ABOUT[floor]}", ""]
        for module, path in modules().items():
            if floor_of(module) == floor and path.name != "__init__.py":
                name = module.split(".", 1)[1].removeprefix(f"{floor}.")
                about = beginning(ast.get_docstring(ast.parse(path.read_text())) or "")
                text.append(f"- [{name}](../{path.relative_to(ROOT)}): {about}")
        text.append("")
    return "\n".join(text)


def beginning(text: str) -> str:
    """The first words of a docstring, up to a punctuation mark; of "Islands: modules in fp32" both parts."""
    sentence = re.split(r"\.(?= [A-Z`]|$)", " ".join(text.split("\n\n")[0].split()))[0]
    first, colon, rest = re.split(r"[;,] | \((?=[A-Z])", sentence)[0].partition(": ")
    return first if " " in first else first + colon + rest


def written(page: str) -> str:
    """The page with the present list between its marks."""
    begin, end = "<!-- begin of the modules -->\n", "<!-- end of the modules -->"
    return page[: page.index(begin) + len(begin)] + listing() + page[page.index(end) :]


def draw(target: Path) -> None:
    """The floors as boxes whose width is their length, with an arrow for each floor that another imports from."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "floors"
    from matplotlib import pyplot as plt

    found = sizes()
    rows = [["config"], ["base"], ["lowp"], ["step"], ["memory"], ["layouts"], ["checkpoints"]]
    rows += [["models", "data", "heads"], ["run"], ["doctor", "cli"], ["amp_tools"]]
    figure, axes = plt.subplots(figsize=(9, 6.6))
    scale, largest = 1 / max(found.values()), max(found.values())
    for y, row in enumerate(rows):
        x = 0.0
        for name in row:
            width = found[name] * scale
            color = "#eef3fb" if name != "amp_tools" else "#f5f0e6"
            axes.add_patch(plt.Rectangle((x, -y), width, 0.78, facecolor=color, edgecolor="#33507a", linewidth=0.9))
            label = name if name != "base" else "beside"
            axes.text(x + 0.008, -y + 0.39, label, va="center", fontsize=9, weight="bold", clip_on=False)
            x += width + 0.012
        text = "; ".join(f"{ABOUT[name]} ({found[name]:,})" for name in row)
        axes.text(max(x, 0.19) + 0.005, -y + 0.39, text, va="center", fontsize=8, color="#444")
    axes.annotate(
        "",
        xy=(-0.03, 0.8),
        xytext=(-0.03, -len(rows) + 1),
        arrowprops={"arrowstyle": "->", "color": "#33507a", "lw": 1.4},
    )
    axes.text(-0.065, -len(rows) / 2 + 1, "imports go upward", rotation=90, va="center", fontsize=9, color="#33507a")
    axes.set_xlim(-0.09, 1.75)
    axes.set_ylim(-len(rows) + 0.8, 1)
    axes.set_axis_off()
    axes.set_title(f"The floors; widths are lines of code, {largest:,} the widest", fontsize=10, loc="left")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None} if target.suffix == ".svg" else None, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the list and the picture of docs/ARCHITECTURE.md")
    flags = parser.parse_args()
    if flags.write:
        PAGE.write_text(written(PAGE.read_text()))
        draw(ROOT / "docs" / "pictures" / "floors.png")
        return 0
    found = sizes()
    print(f"{'floor':12} {'lines':>6} {'limit':>6}")
    for floor, limit in LIMITS.items():
        print(f"{floor:12} {found[floor]:6} {limit:6}")
    core = sum(found.values()) - found["amp_tools"]
    print(f"{'amp_core':12} {core:6}")
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
