"""Loss scales, formats and the comparison of modes, as settings of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from shared import script
from torch import Tensor, nn

import train

SMALL = ["device=cpu", "data=synthetic", "data.num_samples=64", "data.image_size=8", "batch_size=8", "model=mlp"]
SMALL += ["log=none", "doctor=off", "steps=16"]


GPT = ["recipe=language_model", "device=cpu", "data.length=64", "batch_size=2", "model.options.depth=1"]


@pytest.mark.parametrize(
    "amp, told",
    [
        ("amp=fp8", ("too small", "kept", "no layer is faster in amp=fp8 (4 too small, 1 kept); use amp=bf16")),
        pytest.param("amp=mxfp8", ("emulated", "(4 emulated, 1 kept)"), marks=pytest.mark.slow),
        pytest.param("amp=bf16", (), marks=pytest.mark.slow),
    ],
)
def test_a_dry_run_tells_what_pays(amp: str, told: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*GPT, amp, "dry_run=true"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(each in out for each in told) and ("is faster" in out) is bool(told)


@pytest.mark.parametrize("adds", [0.0, 64.0])
def test_the_first_layer_beyond_rounding_is_named(
    adds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum with 64 that is taken away again costs 6 bits more than one rounding."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        y = F.linear(x, layer.weight, layer.bias)
        return (y + adds) - adds if torch.is_autocast_enabled("cpu") and layer.out_features == 10 else y

    monkeypatch.setattr(nn.Linear, "forward", forward)
    pytest.importorskip("matplotlib")
    picture = tmp_path / "parts.png"
    modes = ["amp=fp32", "amp=bf16", "data.num_classes=10"]
    assert script("scripts/doctor.py").main(["diff", *SMALL, *modes, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.stat().st_size > 1000 and ("rounding explains" in out) is not bool(adds)
    assert ("(Linear) is the first layer beyond rounding" in out) is bool(adds)


def test_a_comparison_takes_two_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("scripts/doctor.py").main(["diff", "amp=bf16"]) == 2
    assert "expected two modes" in capsys.readouterr().err


def test_the_page_of_formats_tells_which_mode_runs_in_which_layout() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "FORMATS.md").read_text()
    table = page.split("<!-- layouts -->\n")[1].split("\n<!-- /layouts -->")[0]
    assert table == script("scripts/formats.py").layouts()


@pytest.mark.slow
def test_modes_resume_from_each_other_as_the_page_says() -> None:
    """A 16-bit mode, one with a remainder and one in fp32, whole and in shards; the script fails where a step does."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, root / "scripts/resumes.py", "--modes", *RESUMED, "--layouts", "single", "fsdp"]
    ours = _cells(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    page = _cells((root / "docs" / "FORMATS.md").read_text().split("resumes -->")[1])
    assert len(ours) == 9 and ours.items() <= page.items()
    assert ours["bf16", "bf16_pure"] == "2^-8" and ours["bf16_pure", "bf16"] == "="


RESUMED = ["bf16", "bf16_pure", "bf16_pure amp.update=remainder"]


def _cells(text: str) -> dict[tuple[str, str], str]:
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.strip().splitlines() if line.startswith("|")]
    together = [(row[0], to, cell) for row in rows for to, cell in zip(head[1:], row[1:], strict=False)]
    return {(a, b): cell for of, to, cell in together for a in of.split(", ") for b in to.split(", ")}
