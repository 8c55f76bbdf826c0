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
from amp_core.doctor.trace import Location
from amp_core.torch_private import cpu_has
from amp_tools.advise import (
    FINDERS,
    Op,
    Operand,
    Window,
    _is_blocking,
    advise,
    find_waits,
    findings_of,
)
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


def look_at(net: nn.Module, batch: torch.Tensor, mode: str = "bf16", *, fused: bool = True, reads: bool = False) -> Any:
    """(findings, the window) of a step of a plain loop."""
    seen: list[Window] = []
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_tools.advise.findings_of", lambda window: seen.append(window) or findings_of(window))
        found = advise(step, net, amp)
    return [each for each in found if "no units" not in each.title], seen[0]


def linear(*sizes: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 130, 3), nn.Conv2d(130, 130, 3, groups=130), nn.Conv2d(130, 260, 3, groups=2))
ODD = "is no multiple of 8, which Tensor Cores want"
THIN = "small batches: layers wait for their weights"
CASTS = "casts move more bytes than the products"
IN_A_LOOP: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "nothing": ({"net": linear(*[256] * 6), "batch": torch.randn(512, 256)}, set(), ""),
    "nothing in fp32": ({"net": linear(100, 128), "batch": torch.randn(512, 100), "mode": "fp32"}, set(), ""),
    "a wait": (
        {"net": linear(*[256] * 6), "batch": torch.randn(512, 256), "reads": True},
        {f"waits for the device at {line_of('planted: wait')}"},
        line_of("planted: wait"),
    ),
    "an unfused optimizer": (
        {"net": linear(*[256] * 6), "batch": torch.randn(512, 256), "fused": False},
        {f"waits for the device at {line_of('planted: step')}"},
        line_of("planted: step"),
    ),
    "casts": (
        {"net": nn.Sequential(linear(8, 8), Flipping()), "batch": torch.randn(2000, 8)},
        {CASTS},
        f"1 (Flipping), {line_of('planted: casts')}",
    ),
    "a small batch": (
        {"net": linear(512, 512), "batch": torch.randn(2, 512)},
        {THIN, CASTS},
        "0 (Linear)",
    ),
    "odd sizes": (
        {"net": linear(100, 128, 3), "batch": torch.randn(4096, 100)},
        {f"the size 100 in 0 {ODD}"},
        "0 (Linear)",
    ),
    # 130 outputs of the first, none of the second, 65 inputs and 130 outputs per group of the third.
    "odd channels of a group": (
        {"net": CONVOLUTIONS, "batch": torch.randn(2, 3, 12, 12)},
        {f"the size 65 in 2 {ODD}", f"the size 130 in 0 and 2 {ODD}", CASTS},
        "(Conv2d)",
    ),
}


@pytest.mark.parametrize("planted", IN_A_LOOP)
def test_what_is_planted_in_a_loop_is_found_at_its_place_and_nothing_else(planted: str) -> None:
    settings, titles, place = IN_A_LOOP[planted]
    found, window = look_at(**settings)
    assert {each.title.replace("in 2 and 0", "in 0 and 2") for each in found} == titles
    assert not titles or any(place in each.place for each in found)
    assert max([len(line) for each in found for line in str(each).splitlines()], default=0) <= 120
    products = [op for op in window.ops if op.is_product]
    # The first layer needs no gradient of its input.
    assert len(products) >= 3 * len([m for m in settings["net"].modules() if isinstance(m, nn.Linear)]) - 1
    assert all(op.place.module is not None for op in products)


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


BIG, THIN_ROWS = product(512, 512, 512), product(8, 4096, 4096)
NO_UNITS = {"missing": "this CPU has no units for bfloat16, and emulates them"}
BY_HAND: dict[str, tuple[Window, Window, str | None]] = {
    "find_emulated": (window(BIG, **NO_UNITS, has_bf16=False), window(BIG), "amp=fp32"),
    "find_emulated float8": (window(BIG, missing="this CPU has no float8 units"), window(BIG), "amp=bf16"),
    "find_emulated on a GPU": (window(BIG, **NO_UNITS, has_bf16=False, device="cuda"), window(BIG), "amp=fp16"),
    "find_loading": (
        window(compute=0.01, loading=0.03),
        window(compute=0.01, loading=0.03, num_workers=4),
        "data.num_workers=3",
    ),
    "find_loading, no core left": (
        window(compute=0.01, loading=0.1, num_workers=2, num_cores=2),
        window(compute=0.01, loading=0.0001),
        None,
    ),
    "find_islands": (
        window(product(512, 512, 512, "float32"), keep_fp32=["fc"]),
        window(BIG, keep_fp32=["head"]),
        "amp.keep_fp32=[]",
    ),
    "find_casts of weights": (
        window(BIG, cast(2**20, weight=True), batch_size=1, accumulation=4),
        window(BIG, cast(2**10, weight=True)),
        "batch_size=2 accumulation=2",
    ),
    "find_casts": (window(BIG, cast(2**20, weight=False), batch_size=1), window(BIG), None),
    "find_small_batch": (
        window(THIN_ROWS, batch_size=8, accumulation=4),
        window(product(4096, 4096, 4096), batch_size=8, accumulation=4),
        "batch_size=16 accumulation=2",
    ),
    "find_odd_sizes": (window(product(100, 512, 512), batch_size=100), window(BIG), "batch_size=104"),
    # float8 wants multiples of 16.
    "find_odd_sizes float8": (
        window(product(128, 120, 128, "float8_e4m3fn", "_scaled_mm")),
        window(product(128, 128, 128, "float8_e4m3fn", "_scaled_mm")),
        None,
    ),
}


@pytest.mark.parametrize("finder", BY_HAND)
def test_a_finder_finds_what_is_there_and_nothing_else(finder: str) -> None:
    there, not_there, override = BY_HAND[finder]
    find = next(each for each in FINDERS if each.__name__ == finder.split()[0].rstrip(","))
    (finding,) = find(there)
    assert finding.override == override and finding.place and finding.advice
    assert find(not_there) == [] and find(window()) == []


def test_copies_that_block_a_gpu_are_waits() -> None:
    place = Location(None, "", "train.py:7", "x = x.cpu()")
    for source, target, shape, blocks in (
        ("cuda", "cpu", (8,), True),
        ("cpu", "cuda", (8,), True),
        ("cpu", "cuda", (), False),
        ("cuda", "cuda", (8,), False),
    ):
        inputs, outputs = [Operand(shape, "float32", source)], [Operand(shape, "float32", target)]
        op = Op("_to_copy", place, False, inputs, outputs, 1, _is_blocking("_to_copy", inputs, outputs))
        found = find_waits(window(op, device="cuda"))
        assert ["non_blocking" in each.advice for each in found] == [True] * blocks


# --- of recipes -------------------------------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str], *settings: str) -> list[dict[str, Any]]:
    assert doctor.main(["advise", "--json", "advice.json", *SMALL_RUN, *settings]) == 0
    found = json.loads(Path("advice.json").read_text())["findings"]
    text = capsys.readouterr().out
    assert all(each["title"] in text and (each["override"] or "") in text for each in found)
    return found


def test_a_default_run_has_no_waits_and_a_leaky_recipe_has_one_per_micro_batch(own_folder, monkeypatch, capsys) -> None:
    assert not [each for each in findings(capsys) if "waits for the device" in each["title"]]
    assert [path.name for path in Path.cwd().iterdir()] == ["advice.json"]  # no run folder
    source = (ROOT / "recipes" / "classification.py").read_text()
    before, after = "total += loss.detach() * micro.weight\n", "total += loss.item() * micro.weight\n"
    assert before in source
    Path("leaky.py").write_text(source.replace(before, after))
    number = Path("leaky.py").read_text().splitlines().index(" " * 12 + after.strip()) + 1
    monkeypatch.syspath_prepend(Path.cwd())
    leaky = importlib.import_module("leaky")
    monkeypatch.setattr(recipes, "find", lambda name: leaky)
    (wait,) = [each for each in findings(capsys, "accumulation=2") if "waits for the device" in each["title"]]
    assert wait["title"].endswith(f"leaky.py:{number}") and wait["evidence"].startswith("2 per step: ")


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
    found = {each["title"]: each for each in findings(capsys, "data.num_workers=0", 'amp.keep_fp32=["*"]')}
    assert "of a step in 1" in found["steps wait for their data"]["evidence"]  # 100 ms and more
    assert found["large fp32 islands"]["override"] == "amp.keep_fp32=[]"
    assert ("no units" in "".join(found)) is not cpu_has("bfloat16")


def test_steps_of_a_run_are_profiled(own_folder) -> None:
    assert main([*SMALL_RUN, "run_dir=run", "steps=9", "perf.profile=2"]) == 0
    names = sorted(path.name for path in Path("run/profile").iterdir())
    assert names == ["steps_6_to_7.json", "steps_6_to_7.txt"]
    events = json.loads(Path("run/profile/steps_6_to_7.json").read_text())["traceEvents"]
    assert len([each for each in events if each.get("name", "").startswith("Optimizer.step#")]) == 2
    assert "aten::convolution_backward" in Path("run/profile/steps_6_to_7.txt").read_text()
