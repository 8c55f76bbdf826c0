"""The doctor by hand: where a window breaks, what fp16 would do to a run, and why it is not faster.

    python scripts/doctor.py locate outputs/classification/2026-01-31_12-00-00 --step 137
    python scripts/doctor.py locate amp=fp16 model=resnet18 --step 1        # settings as for train.py
    python scripts/doctor.py zeros amp=fp16 recipe=segmentation --step 5    # what becomes 0 in 16 bits
    python scripts/doctor.py forecast recipe=segmentation                   # headroom and scale, without fp16
    python scripts/doctor.py diff amp=fp32 amp=bf16 --picture parts.png     # where two modes part
    python scripts/doctor.py advise recipe=language_model                   # why is it not faster?

Nothing is trained for good and no run folder is written. docs/DOCTOR.md explains the output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.errors import ConfigError
from amp_core.run.terminal import complain
from train import checked

_OF_MANY_RANKS = ("layout=ddp", "layout=data", "layout=fsdp", "layout=hsdp", "layout.shard_size", "layout.nproc")
_OF_MANY_RANKS += ("layout.nnodes", "layout.rdzv", "layout.max_restarts", "layout.static_graph", "layout.bucket_mb")
_OF_MANY_RANKS += ("layout.compress", "layout.shard_optimizer")
"""Left out: one process looks at a recipe."""


def visit(overrides: list[str], driver: Any) -> int:
    """Build a recipe and let `driver(loop, count)` yield the windows that it computes. Returns an exit code."""
    from amp_core.run.process import in_process
    from recipes import find

    overrides = [text for text in overrides if not text.startswith(_OF_MANY_RANKS)]
    job = checked([*overrides, "dry_run=true"])

    def visited(cfg: Any, env: Any) -> Any:
        env.driver = driver
        return find(cfg.recipe["name"]).run(cfg, env)

    outcome = in_process(job, visited)
    if outcome.error:
        complain(outcome.error)
    return outcome.exit_code


def _settings(args: argparse.Namespace, overrides: list[str] | None = None) -> list[str]:
    """Those of a run folder before a step, or what was typed."""
    from amp_tools.again import overrides_before

    overrides = overrides or list(args.overrides)
    if len(overrides) != 1 or "=" in overrides[0]:
        return overrides
    (folder,) = overrides
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder}: there is no such folder; expected that of a run, or settings (key=value)")
    return overrides_before(folder, args.step)


def locate(args: argparse.Namespace) -> int:
    """Diagnose one step of a run, from its checkpoints or from its start."""
    from amp_core.doctor.watch import diagnose_step

    found: list[Any] = []
    code = visit(_settings(args), lambda loop, count: diagnose_step(loop, args.step, found))
    for diagnosis in found:
        if diagnosis is None:
            print(f"step {args.step}: nothing found; every number is finite and no position is lost")
        else:
            print(json.dumps(diagnosis.to_dict(), indent=2) if args.json else diagnosis)
    return code


def zeros(args: argparse.Namespace) -> int:
    """List the operations of one step whose results become 0 in 16 bits."""
    from amp_tools.zeros import Zero, zeros_of_step

    found: list[Zero] = []
    code = visit(_settings(args), lambda loop, count: zeros_of_step(loop, args.step, args.least, found))
    if code == 0:
        print(*found or [f"step {args.step}: no operation loses {args.least:g} of its results to 0"], sep="\n")
    return code


def forecast(args: argparse.Namespace) -> int:
    """Say what fp16 is going to do to a run, from a few windows of it in bf16."""
    from amp_core.run.lines import write_json
    from amp_tools.forecast import Check, Forecast, check_windows, forecast_windows
    from amp_tools.heatmap import draw

    if args.windows < 1:
        raise ConfigError(f"--windows {args.windows}: expected at least 1")
    # What belongs to a mode, such as a loss scale, another one may refuse.
    of_any_mode = ("amp.keep_fp32=", "amp.op_policy=")
    rest = [o for o in args.overrides if not o.lstrip("+~").startswith(("amp=", "amp.")) or o.startswith(of_any_mode)]
    told: list[Forecast] = []
    checks: list[Check] = []
    code = visit([*rest, "amp=bf16"], lambda loop, count: forecast_windows(loop, args.windows, told))
    if code or not told:
        return code
    print(told[0])
    if args.picture:
        draw(told[0], args.picture)
    if args.check:
        code = visit([*rest, "amp=fp16"], lambda loop, count: check_windows(loop, told[0], checks))
        print("", *checks, sep="\n")
    if args.json:
        write_json(args.json, told[0].to_dict() | ({"check": checks[0].to_dict()} if checks else {}))
    return code


def diff(args: argparse.Namespace) -> int:
    """Compare one window in two modes, or of two runs, layer by layer."""
    import torch

    from amp_tools.diff import Window, compare, draw, record, table

    modes = [each for each in args.overrides if each.startswith("amp=")]
    rest = [each for each in args.overrides if each not in modes]
    pairs = [[mode, *rest] for mode in modes] if modes else [[folder] for folder in rest]
    if len(pairs) != 2:
        raise ConfigError(f"diff: found {modes or rest or 'nothing'}; expected two modes, amp=fp32 amp=bf16, or runs")
    names, windows = tuple(pair[0] for pair in pairs), [Window(pair[0], torch.float32) for pair in pairs]
    for pair, window in zip(pairs, windows, strict=True):
        code = visit(_settings(args, pair), lambda loop, count, into=window: record(loop, args.step, into))
        if code:
            return code
    rows = compare(*windows)
    print(table(rows, names))  # type: ignore[arg-type]
    if args.picture:
        draw(rows, names, args.picture)  # type: ignore[arg-type]
    return 0


def advise(args: argparse.Namespace) -> int:
    """Say what makes the steps of a recipe slower than they could be."""
    from amp_core.run.lines import write_json
    from amp_tools.advise import Window, advise_run, findings_of, to_dict

    found: list[Window] = []
    code = visit(args.overrides, lambda loop, count: advise_run(loop, found))
    if code or not found:
        return code
    if args.json:
        write_json(args.json, to_dict(found[0]))
    print(*findings_of(found[0]) or ["nothing was found; perf.profile=3 shows where the time goes"], sep="\n\n")
    return code


def cost(args: argparse.Namespace) -> int:
    """What watching costs, and sampling statistics, as ratios of step times in one run."""
    from amp_tools.cost import Cost

    costs = Cost(args.steps)
    code = visit([*args.overrides, "doctor.statistics_every=1"], costs)
    if code == 0:
        print(costs)
    return code


@answering
def main(arguments: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("locate", help="the operation that breaks a step")
    command.add_argument("overrides", nargs="*", help="a run folder, or settings as for train.py")
    command.add_argument("--step", type=int, default=1, help="counted from 1, as in metrics.jsonl")
    command.add_argument("--json", action="store_true")
    command.set_defaults(do=locate)

    command = commands.add_parser("zeros", help="the operations of a step whose results become 0 in 16 bits")
    command.add_argument("overrides", nargs="*", help="a run folder, or settings as for train.py")
    command.add_argument("--step", type=int, default=1, help="counted from 1, as in metrics.jsonl")
    command.add_argument("--least", type=float, default=0.5, help="share of an operation's results that counts")
    command.set_defaults(do=zeros)

    command = commands.add_parser(
        "forecast", help="what fp16 would do, told from bf16: overflows, loss scale, underflow"
    )
    command.add_argument("overrides", nargs="*", help="settings as for train.py; the mode is replaced by bf16")
    command.add_argument("--windows", type=int, default=3, help="steps to look at")
    command.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers as JSON")
    command.add_argument(
        "--picture", type=Path, metavar="FILE", help="where to draw layers by exponent (PNG, PDF, SVG)"
    )
    command.add_argument("--check", action="store_true", help="train the same steps in fp16: was the forecast right?")
    command.set_defaults(do=forecast)

    command = commands.add_parser("diff", help="the same window in two modes: errors layer by layer")
    command.add_argument("overrides", nargs="*", help="two modes and settings as for train.py, or two run folders")
    command.add_argument("--step", type=int, default=1, help="counted from 1, as in metrics.jsonl")
    command.add_argument("--picture", type=Path, metavar="FILE", help="where to draw the errors (PNG, PDF, SVG)")
    command.set_defaults(do=diff)

    command = commands.add_parser("advise", help="why it is not faster: sizes, casts, islands, waits, small batches")
    command.add_argument("overrides", nargs="*", help="settings as for train.py")
    command.add_argument("--json", type=Path, metavar="FILE", help="where to write the findings as JSON")
    command.set_defaults(do=advise)

    command = commands.add_parser("cost", help="what the doctor itself costs")
    command.add_argument("overrides", nargs="*", help="settings as for train.py")
    command.add_argument("--steps", type=int, default=400, help="per way")
    command.set_defaults(do=cost)

    args = parser.parse_args(arguments)
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
