"""The benchmarks: what is measured against what, on which machine, with which uncertainty.

python scripts/bench.py                             cost and step of a small network, about three minutes
python scripts/bench.py step --work mlp,gpt --modes bf16 --json step.json --picture step.png
python scripts/bench.py modes --help                the options of one
python scripts/bench.py all --out benchmarks/NAME   everything, as files and pictures, about ten minutes
python scripts/bench.py table                       benchmarks/README.md from those files
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
from pathlib import Path
from types import ModuleType

import benches
import torch
from benches.result import page

BENCHMARKS = benches.ROOT / "benchmarks"
DEFAULT = ("cost", "step")
"""What runs without a name."""


def found() -> dict[str, ModuleType]:
    """The benchmarks, by name: modules of `benches` that measure."""
    names = sorted(info.name for info in pkgutil.iter_modules(benches.__path__))
    modules = {name: importlib.import_module(f"benches.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "measure")}


def parser_of(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", metavar="BENCHMARK")
    for name, module in modules.items():
        text = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.options(command)
        _add_device(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
        command.add_argument("--picture", type=Path, metavar="FILE.png", help="where to draw them; needs matplotlib")
    command = commands.add_parser("all", help="Every benchmark: a file and a picture of each, and the page.")
    command.add_argument("--out", type=Path, required=True, help="a folder, such as benchmarks/NAME")
    command.add_argument("--short", action="store_true", help="seconds instead of minutes, to see whether all run")
    command.add_argument("--only", default="", help="some of them, with commas")
    _add_device(command)
    command = commands.add_parser("table", help="Write benchmarks/README.md from the files beside it.")
    command.add_argument("--folder", type=Path, default=BENCHMARKS)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])


def run(what: str, arguments: list[str], modules: dict[str, ModuleType], parser: argparse.ArgumentParser) -> list[str]:
    """One benchmark, as its command line says. Returns its problems."""
    flags = parser.parse_args([what, *arguments])
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; expected --device cpu")
    flags.command = arguments
    result = modules[what].measure(flags)
    result.write(flags.json, flags.picture)
    return result.problems


def run_all(flags: argparse.Namespace, modules: dict[str, ModuleType], parser: argparse.ArgumentParser) -> list[str]:
    problems: list[str] = []
    only = flags.only.split(",") if flags.only else list(modules)
    for name in only:
        began = time.monotonic()
        print(f"\n### {name}", flush=True)
        files = ["--json", str(flags.out / f"{name}.json"), "--picture", str(flags.out / f"{name}.png")]
        chosen = getattr(modules[name], "SHORT" if flags.short else "FULL", [])
        problems += run(name, [*chosen, "--device", flags.device, *files], modules, parser)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if flags.out.resolve().parent == BENCHMARKS:
        write_page(BENCHMARKS)
    return problems


def write_page(folder: Path) -> None:
    """README.md of the folder."""
    (folder / "README.md").write_text(page(folder))
    print(f"page: {folder / 'README.md'}")


def main(arguments: list[str]) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    modules = found()
    parser = parser_of(modules)
    flags = parser.parse_args(arguments)
    problems: list[str] = []
    if flags.what == "table":
        write_page(flags.folder)
    elif flags.what == "all":
        problems = run_all(flags, modules, parser)
    else:
        for what in [flags.what] if flags.what else DEFAULT:
            problems += run(what, arguments[1:], modules, parser)
    if problems:
        raise SystemExit("error: " + "\n       ".join(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
