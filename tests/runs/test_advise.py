"""Advice on speed: what is planted is found, at its place, and without it nothing of the kind is said."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import script
from small import COMMON, SMALL
from torch import nn

import recipes
from amp_core import Amp
from amp_core.doctor.places import Location
from amp_core.torch_private import cpu_has
from amp_tools.advise import FINDERS, Finding, Op, Operand, Window, _is_blocking, advise, find_waits
from train import main

ROOT = Path(__file__).resolve().parents[2]
doctor = script("scripts/doctor.py")
SMALL_RUN = ["recipe=classification", *COMMON, *SMALL["classification"]]


def line_of(mark: str) -> str:
    """file:line of the line of this file that ends with a comment."""
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {mark}"))
    return f"tests/runs/test_advise.py:{number}"


class Flipping(nn.Module):
    """Changes the type of its input over and over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x.bfloat16().float()  # planted: casts
        return x


def look_at(
    net: nn.Module, batch: Any, mode: str = "bf16", *, fused: bool = True, reads: bool = False
) -> list[Finding]:
    """Advice on a step of a plain loop."""
    amp = Amp.named(mode)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=fused)

    def step() -> None:
        with amp.autocast():
            loss = net(batch).float().square().mean()
        if reads:
            loss.item()  # planted: wait
        amp.backward(loss)
        amp.step(optimizer)  # planted: step
        amp.update()
        optimizer.zero_grad()

    return [each for each in advise(step, net, amp) if "no units" not in each.title]


def linear(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 130, 3), nn.Conv2d(130, 130, 3, groups=130), nn.Conv2d(130, 260, 3, groups=2))
DEEP = linear(*[256] * 6), torch.randn(512, 256)
WAITS, ODD = "waits for the device at ", "is no multiple of 8, which Tensor Cores want"
THIN, CASTS = "small batches: layers wait for their weights", "casts move more bytes than the products"
READ, STEP, CAST = (line_of(f"planted: {mark}") for mark in ("wait", "step", "casts"))
IN_A_LOOP: dict[str, tuple[Any, dict[str, Any], set[str], str]] = {
    "nothing": (DEEP, {}, set(), ""),
    "nothing in fp32": ((linear(100, 128), torch.randn(512, 100)), {"mode": "fp32"}, set(), ""),
    "a wait": (DEEP, {"reads": True}, {WAITS + READ}, READ),
    "an unfused optimizer": (DEEP, {"fused": False}, {WAITS + STEP}, STEP),
    "casts": ((nn.Sequential(linear(8, 8), Flipping()), torch.randn(2000, 8)), {}, {CASTS}, f"1 (Flipping), {CAST}"),
    "a small batch": ((linear(512, 512), torch.randn(2, 512)), {}, {THIN, CASTS}, "0 (Linear)"),
    "odd sizes": ((linear(100, 128, 3), torch.randn(4096, 100)), {}, {f"the size 100 in 0 {ODD}"}, "0 (Linear)"),
    # 130 outputs of the first, none of the second, 65 inputs and 130 outputs per group of the third.
    "odd channels of a group": (
        (CONVOLUTIONS, torch.randn(2, 3, 12, 12)),
        {},
        {f"the size 65 in 2 {ODD}", f"the size 130 in 0 and 2 {ODD}", CASTS},
        "(Conv2d)",
    ),
}


@pytest.mark.parametrize("planted", IN_A_LOOP)
def test_what_is_planted_in_a_loop_is_found_at_its_place_and_nothing_else(planted: str) -> None:
    loop, settings, titles, place = IN_A_LOOP[planted]
    found = look_at(*loop, **settings)
    assert {each.title.replace("in 2 and 0", "in 0 and 2") for each in found} == titles
    assert not titles or any(place in each.place for each in found)
    assert max([len(line) for each in found for line in str(each).splitlines()], default=0) <= 120


LAYER = Location("fc", "Linear", "net.py:1", "return self.fc(x)")


def product(rows: int, inner: int, columns: int, dtype: str = "bfloat16", name: str = "mm") -> Op:
    shapes, size = [(rows, inner), (inner, columns), (rows, columns)], 4 if dtype == "float32" else 2
    operands = [Operand(s, dtype, "cpu", size * s[0] * s[1], i == 1) for i, s in enumerate(shapes)]
    return Op(name, LAYER, inputs=operands[:2], outputs=operands[2:])


def cast(count: int, *, weight: bool) -> Op:
    shape = (count,)
    wide, low = Operand(shape, "float32", "cpu", 4 * count, weight), Operand(shape, "bfloat16", "cpu", 2 * count)
    return Op("_to_copy", LAYER, inputs=[wide], outputs=[low])


def window(*ops: Op, **fields: Any) -> Window:
    return Window(list(ops), **{"dtype": "bfloat16", "num_cores": 16, **fields})


BIG, WIDE, E4M3 = product(512, 512, 512), product(512, 512, 512, "float32"), "float8_e4m3fn"
LATE, EIGHT = {"compute": 0.01, "loading": 0.03}, {"batch_size": 8, "accumulation": 4}
NO_UNITS = {"missing": "this CPU has no units for bfloat16, and emulates them"}
TWICE = "batch_size=16 accumulation=2"
# What is found, what is not, and the setting that is advised.
BY_HAND: dict[str, tuple[Window, Window, str | None]] = {
    "emulated": (window(BIG, **NO_UNITS, has_bf16=False), window(BIG), "amp=fp32"),
    "emulated: float8": (window(BIG, missing="this CPU has no float8 units"), window(BIG), "amp=bf16"),
    "emulated: a GPU": (window(BIG, **NO_UNITS, has_bf16=False, device="cuda"), window(BIG), "amp=fp16"),
    "loading": (window(**LATE), window(**LATE, num_workers=4), "data.num_workers=3"),
    "loading: no core left": (window(**LATE, num_workers=2, num_cores=2), window(compute=1.0, loading=0.05), None),
    "islands": (window(WIDE, keep_fp32=["fc"]), window(BIG, keep_fp32=["head"]), "amp.keep_fp32=[]"),
    "casts: of weights": (window(BIG, cast(2**20, weight=True), **EIGHT), window(BIG, cast(2**10, weight=True)), TWICE),
    "casts": (window(BIG, cast(2**20, weight=False), **EIGHT), window(BIG), None),
    "small_batch": (window(product(8, 4096, 4096), **EIGHT), window(product(4096, 4096, 4096), **EIGHT), TWICE),
    "odd_sizes": (window(product(100, 512, 512), batch_size=100), window(BIG), "batch_size=104"),
    "odd_sizes: float8": (
        window(product(128, 120, 128, E4M3, "_scaled_mm")),
        window(product(128, 128, 128, E4M3)),
        None,
    ),
}


@pytest.mark.parametrize("finder", BY_HAND)
def test_a_finder_finds_what_is_there_and_nothing_else(finder: str) -> None:
    there, not_there, override = BY_HAND[finder]
    find = next(each for each in FINDERS if each.__name__ == f"find_{finder.partition(':')[0]}")
    (finding,) = find(there)
    assert finding.override == override and finding.place and finding.advice
    assert find(not_there) == [] and find(window()) == []


COPIES = [("cuda", "cpu", (8,), 1), ("cpu", "cuda", (8,), 1), ("cpu", "cuda", (), 0), ("cuda", "cuda", (8,), 0)]


@pytest.mark.parametrize("source, target, shape, blocks", COPIES)
def test_copies_that_block_a_gpu_are_waits(source: str, target: str, shape: tuple[int, ...], blocks: int) -> None:
    inputs, outputs = [Operand(shape, "float32", source)], [Operand(shape, "float32", target)]
    op = Op("_to_copy", LAYER, False, inputs, outputs, 1, _is_blocking("_to_copy", inputs, outputs))
    assert ["non_blocking" in each.advice for each in find_waits(window(op, device="cuda"))] == [True] * blocks


def advice(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, Any]:
    """The findings by title, with what was measured under ""."""
    assert doctor.main(["advise", "--json", "advice.json", *SMALL_RUN, *settings]) == 0
    told, text = json.loads(Path("advice.json").read_text()), capsys.readouterr().out
    assert all(each["title"] in text and (each["override"] or "") in text for each in told["findings"])
    return {each["title"]: each for each in told["findings"]} | {"": told}


def test_a_default_run_has_no_waits_and_a_leaky_recipe_has_one_per_micro_batch(own_folder, monkeypatch, capsys) -> None:
    assert not [title for title in advice(capsys) if "waits for the device" in title]
    assert [path.name for path in Path.cwd().iterdir()] == ["advice.json"]  # no run folder
    source = (ROOT / "recipes" / "classification.py").read_text()
    before, after = "total += loss.detach() * micro.weight\n", "total += loss.item() * micro.weight\n"
    assert before in source
    Path("leaky.py").write_text(source.replace(before, after))
    number = Path("leaky.py").read_text().splitlines().index(" " * 12 + after.strip()) + 1
    monkeypatch.syspath_prepend(Path.cwd())
    leaky = importlib.import_module("leaky")
    monkeypatch.setattr(recipes, "find", lambda name: leaky)
    ((title, wait),) = [each for each in advice(capsys, "accumulation=2").items() if WAITS in each[0]]
    assert title.endswith(f"leaky.py:{number}") and wait["evidence"].startswith("2 per step: ")


class Slow:
    """A data set that takes its time."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, keys: Any) -> Any:
        time.sleep(0.1)
        return self.data.__getitems__(keys)


def test_slow_data_and_islands_of_a_run_are_found(own_folder, monkeypatch, capsys) -> None:
    visit = doctor.visit

    def slowly(overrides: list[str], driver: Any) -> int:
        def slow(loop: Any, count: Any) -> Any:
            loop.feed.data = dataclasses.replace(loop.data, train=Slow(loop.data.train))
            yield from driver(loop, count)

        return visit(overrides, slow)

    monkeypatch.setattr(doctor, "visit", slowly)
    found = advice(capsys, "data.num_workers=0", 'amp.keep_fp32=["*"]')
    assert "steps wait for their data" in found and found[""]["loading"] >= 0.1
    assert found["large fp32 islands"]["override"] == "amp.keep_fp32=[]"
    assert ("no units" in "".join(found)) is not cpu_has("bfloat16")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps, recorded", [(9, "steps_6_to_7"), (6, "steps_6_to_6"), (5, "")])
def test_steps_of_a_run_are_profiled(own_folder, steps: int, recorded: str) -> None:
    assert main([*SMALL_RUN, "run_dir=run", f"steps={steps}", "perf.profile=2"]) == 0
    assert ("nothing was recorded" in Path("run/train.log").read_text()) is not bool(recorded)
    assert {path.stem for path in Path("run").glob("profile/*")} == ({recorded} if recorded else set())
    if recorded:
        events = json.loads(Path(f"run/profile/{recorded}.json").read_text())["traceEvents"]
        optimizer = [each for each in events if each.get("name", "").startswith("Optimizer.step#")]
        assert len(optimizer) == int(recorded[-1]) - 5
        assert "aten::convolution_backward" in Path(f"run/profile/{recorded}.txt").read_text()
