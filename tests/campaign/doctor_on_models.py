"""The doctor on networks of timm and transformers, each healthy and with three faults, beside two other tools.

    pip install timm transformers
    OMP_NUM_THREADS=1 python tests/campaign/doctor_on_models.py --out benchmarks/doctor_on_models.md

The loop is torch's own: autocast to fp16, `GradScaler`. A fault counts only if the loop without any tool is not finite.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from foreign_faults import (  # noqa: E402
    CODE,
    FAULTS,
    IN_LOSS,
    SAMPLES,
    TORCH,
    Case,
    first_broken,
    fit,
    large_weight,
    poisoned_weight,
    seeded,
)
from foreign_models import TIMM, TRANSFORMERS, Foreign, hf, of_words, timm  # noqa: E402

from amp_core import Amp, Diagnosis, Doctor, keep_fp32  # noqa: E402

# --- three tools ------------------------------------------------------------------------------------------------------


def diagnose(case: Case, net: nn.Module | None = None, *, tells: bool = True) -> tuple[Diagnosis | None, float, float]:
    """With wall time and processor time."""
    net = case.net if net is None else net
    torch.manual_seed(1)
    wall, used = time.perf_counter(), time.process_time()
    diagnosis = Doctor(Amp.named("fp16"), net).locate(case.step(net, tells=tells), case.batch)
    return diagnosis, time.perf_counter() - wall, time.process_time() - used


def is_located(case: Case, diagnosis: Diagnosis) -> bool:
    if case.tensor:
        return diagnosis.tensor == case.tensor and diagnosis.samples == case.samples
    if not case.lines:  # a scale that is too large: no module is at fault
        return diagnosis.phase == "backward" and diagnosis.scale_that_fits is not None
    path, _, line = diagnosis.source.rpartition(":")
    return diagnosis.module == case.module and f"{(ROOT / path).resolve() if path else ''}:{line}" in case.lines


def cures(case: Case, diagnosis: Diagnosis) -> tuple[int, int]:
    """Of the changes printed as tried, those after which the loop of the user takes its step."""
    right = tried = 0
    for fix in diagnosis.fixes:
        if fix.verified:
            model = copy.deepcopy(case.net)
            scale = re.search(r"init_scale=([^,)]+)", fix.python)
            for line in fix.python.split("; "):
                if line.startswith("keep_fp32"):
                    exec(line, {"keep_fp32": keep_fp32, "model": model})
            tried += 1
            dtype = torch.bfloat16 if "dtype=torch.bfloat16" in fix.python else torch.float16
            right += case.is_finite(model, scale=float(scale[1]) if scale else None, dtype=dtype)
    return right, tried


def underflow_overflow(case: Case) -> bool:
    """Whether transformers' tool stops at the module at fault, or inside of it."""
    from transformers.debug_utils import DebugUnderflowOverflow  # pyright: ignore[reportMissingImports]

    net, said = copy.deepcopy(case.net), io.StringIO()
    torch.manual_seed(1)
    with contextlib.redirect_stdout(said):
        tool = DebugUnderflowOverflow(net)
        try:
            case.step(net)()
        except ValueError as stopped:
            if "DebugUnderflowOverflow" not in str(stopped):
                raise
            heads = re.findall(rf"^{tool.prefix} (\S*) \w+$", said.getvalue(), re.MULTILINE)
            return bool(heads) and f"{heads[-1]}.".startswith(f"{case.module}.")
    return False


def anomaly(case: Case) -> bool:
    """Whether autograd's tool stops, and shows the line at fault as that of the forward call."""
    net = copy.deepcopy(case.net)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as said, torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("always")
        try:
            case.step(net)()
        except RuntimeError as stopped:
            if "returned nan values" not in str(stopped):
                raise
            text = next(str(each.message) for each in said if "Error detected in" in str(each.message))
            frames = re.findall(r'File "([^"]+)", line (\d+)', text)
            shown = [f"{path}:{line}" for path, line in frames if not path.startswith(TORCH)]
            return bool(shown) and shown[-1] in case.lines
    return False


@dataclass
class Row:
    """What was seen of one fault."""

    model: str
    fault: str
    place: str
    located: bool
    cause: bool
    right: int
    tried: int
    mended: bool
    module_tool: bool
    anomaly: bool
    wall: float
    cpu: float
    report: str


def examine(model: Foreign, make: Callable[[Foreign], Iterator[Case]]) -> Row:
    case = first_broken(make(model))
    before = copy.deepcopy(case.net.state_dict())
    diagnosis, wall, cpu = diagnose(case)
    after = case.net.state_dict()
    assert all(torch.equal(after[k].nan_to_num(), before[k].nan_to_num()) for k in before), "the state has changed"
    located = diagnosis is not None and is_located(case, diagnosis)
    right, tried = cures(case, diagnosis) if diagnosis is not None else (0, 0)
    mended = healthy(case)
    return Row(
        model.name,
        case.fault,
        case.tensor or case.module or "",
        located,
        diagnosis is not None and diagnosis.cause == case.cause,
        right,
        tried,
        mended,
        underflow_overflow(case),
        anomaly(case),
        wall,
        cpu,
        str(diagnosis),
    )


def healthy(case: Case) -> bool:
    """Whether the network without the fault is finite, and the doctor silent."""
    net, batch = seeded(case.model) if case.mended is None else (case.mended, case.batch)
    twin = Case(case.model, "", net, batch, loss=case.healthy_loss)
    twin.scale = fit(twin)  # what mends the forward pass may have steep gradients, as an eps of 1e-6 has
    return bool(twin.scale) and diagnose(twin)[0] is None


LARGE = [
    hf("gpt2, 10.7 million weights", "GPT2LMHeadModel", of_words, vocab_size=96, n_embd=384, n_layer=6, n_head=6),
    timm("vit_tiny_patch16_224", img_size=64, depth=22),
]
"""About 10 million weights, for the time."""


def table(rows: list[Row], silent: list[bool], times: list[str]) -> str:
    import timm as of_timm  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    def mark(yes: bool) -> str:
        return "yes" if yes else "**no**"

    count = len(rows)
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    text = [
        "# The doctor on models of timm and transformers",
        "",
        f"Of {count} faults in {len(silent)} networks that nobody here wrote, the doctor locates "
        f"{sum(r.located for r in rows)} and names the cause of {sum(r.cause for r in rows)}; "
        f"{sum(r.right for r in rows)} of {sum(r.tried for r in rows)} changes that it prints as tried cure the loop. "
        f"`DebugUnderflowOverflow` stops at the right module in {sum(r.module_tool for r in rows)}, autograd's anomaly "
        f"mode shows the right line in {sum(r.anomaly for r in rows)}. Of {len(silent)} networks without a fault the "
        f"doctor says nothing of {sum(silent)}. The doctor was corrected where earlier runs of these faults showed it to "
        "be wrong, so the rates need not hold for others.",
        "",
        f"`python tests/campaign/doctor_on_models.py`, {time.strftime('%Y-%m-%d', time.gmtime())}: torch "
        f"{torch.__version__}, timm {of_timm.__version__}, transformers {transformers.__version__}, python "
        f"{platform.python_version()}, {cpu}, {torch.get_num_threads()} thread(s), fp16 autocast and `GradScaler`, "
        f"random weights, {SAMPLES} samples.",
        "",
        "Located: the module and the line, or the weight, buffer or sample. Cures: of those printed as tried, the ones "
        "after which the loop takes its step. Mended: without the fault, or with what the report asks for, the loop is "
        "finite and the doctor silent. Module: `DebugUnderflowOverflow` stops at it. Line: anomaly mode shows it.",
        "",
        "| network | fault | at | located | cause | cures | mended | module | line |",
        "| --- | --- | --- | --- | --- | ---: | --- | --- | --- |",
    ]
    for r in rows:
        place = f"`{r.place}`" if r.place else ""
        marks = f"{mark(r.located)} | {mark(r.cause)} | {r.right} of {r.tried} | {mark(r.mended)}"
        text.append(
            f"| {r.model} | {r.fault} | {place} | {marks} | {'yes' if r.module_tool else 'no'} | "
            f"{'yes' if r.anomaly else 'no'} |"
        )
    return "\n".join([*text, "", "Time of a diagnosis:", "", *times, ""])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", help="networks whose name contains this")
    options.add_argument("--out", type=Path, help="writes the table here")
    options.add_argument("--times", action="store_true", help="only the time of a diagnosis")
    options.add_argument("--reports", type=Path, help="writes all reports here, to be read")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    if given.times:
        print(*times_of_diagnoses(), sep="\n")
        return
    models = [m for m in (*TIMM, *TRANSFORMERS) if not given.only or given.only in m.name]
    rows, silent, reports = [], [], []
    for model in models:
        net, batch = seeded(model)
        silent.append(diagnose(Case(model, "", net, batch))[0] is None)
        for make in FAULTS[model.name]:
            row = examine(model, make)
            rows.append(row)
            reports.append(f"##### {row.model}: {row.fault} at {row.place}\n{row.report}\n")
            print(
                f"{row.model:32} {row.fault:16} located {row.located:d} cause {row.cause:d} cures {row.right}/{row.tried} "
                f"mended {row.mended:d} module {row.module_tool:d} line {row.anomaly:d} {row.wall:.2f} s {row.cpu:.2f} s",
                flush=True,
            )
    if given.reports:
        given.reports.write_text("\n".join(reports))
    if given.out:
        given.out.write_text(table(rows, silent, times_of_diagnoses()))


def times_of_diagnoses() -> list[str]:
    """Processor time of diagnoses of five faults, the least of three each, and in passes of the network in fp32."""
    times = []
    for model in LARGE:
        cases = [first_broken(make(model)) for make in (large_weight, poisoned_weight, *CODE[:2], IN_LOSS[1])]
        taken = {case.fault: min(diagnose(case, tells=False)[2] for _ in range(3)) for case in cases}
        fp32 = functools.partial(_passed, cases[1].mended, cases[1])
        one = min(_timed(fp32) for _ in range(5))
        middle = statistics.median(taken.values())
        weights = sum(p.numel() for p in cases[0].net.parameters()) / 1e6
        each = ", ".join(f"{fault} {seconds:.2f}" for fault, seconds in taken.items())
        times.append(
            f"- {model.name.split(',')[0]} of {weights:.1f} million weights: median {middle:.2f} s of the processor "
            f"({each}), {middle / one:.1f} times the {one:.3f} s of one forward and backward pass in fp32"
        )
    return times


def _passed(net: nn.Module, case: Case) -> None:
    case.model.loss(net, case.batch).backward()


def _timed(step: Callable[[], Any]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
