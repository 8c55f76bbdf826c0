"""Benchmarks run, compare what is the same, and their page says what their files say."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import rows

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
from benches import loops, modes, result, step, waits, work  # noqa: E402

from recipes import RECIPES  # noqa: E402


def test_the_page_is_made_of_the_files() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert page == result.page(ROOT / "benchmarks"), "run python scripts/bench.py table"


def test_the_benchmarks_of_whole_runs_have_every_recipe() -> None:
    assert modes.SMALL.keys() == RECIPES.keys()


def test_every_benchmark_takes_its_own_options() -> None:
    modules = bench.found()
    parser = bench.parser_of(modules)
    assert {"cost", "modes", "step", "waits"} <= modules.keys()
    for name, module in modules.items():
        for chosen in ("SHORT", "FULL"):
            parser.parse_args([name, *getattr(module, chosen, [])])
        assert (module.__doc__ or "").splitlines()[0].endswith((".", "counts"))


def test_a_result_becomes_a_file_a_picture_and_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cost", "step"):
        files = ["--json", str(tmp_path / "pc" / f"{name}.json"), "--picture", str(tmp_path / "pc" / f"{name}.png")]
        chosen = [*bench.found()[name].SHORT, "--against", "ours"]
        bench.main([name, *chosen, "--device", "cpu", *files])
    found = json.loads((tmp_path / "pc" / "step.json").read_text())
    assert {"cpu", "cores", "python", "torch", "date", "command", "commit"} <= found["machine"].keys()
    assert found["interval"] and found["spread"]
    ours = next(row for row in found["rows"] if row["loop"] == "ours")
    assert ours["ratio"].keys() == {"median", "low", "high", "aa"}
    assert (tmp_path / "pc" / "step.png").stat().st_size > 10_000 and not (tmp_path / "pc" / "cost.png").exists()
    page = result.page(tmp_path)
    assert f"| ours | {result.shown(ours['ms'])} |" in page and "![step](pc/step.png)" in page
    assert "## pc" in page and "python scripts/bench.py cost --modes fp32" in page
    # A number that is changed by hand is seen.
    found["rows"][-1]["ms"]["median"] *= 2
    (tmp_path / "pc" / "step.json").write_text(json.dumps(found))
    assert result.page(tmp_path) != page


def test_a_number_is_a_median_with_an_interval_that_holds_it() -> None:
    few = result.Number.of([3.0, 1.0, 2.0])
    assert (few.median, few.low, few.high) == (2.0, 1.0, 3.0)
    many = result.Number.of([float(i % 10) for i in range(100)])
    assert 3 < many.low < many.median == 4.5 < many.high < 6
    assert result.Number.of([1.0, 2.0] * 4).aa == pytest.approx(0.5)  # turns that alternate are no measurement
    times = {"a": [1.0, 2.0], "twin": [1.1, 2.2], "b": [3.0, 6.0]}
    assert result.ratios(times, "a", "twin")["b"] == result.Number(3.0, 3.0, 3.0, pytest.approx(0.1))


COMPARED = [("mlp", "fp32"), ("mlp", "fp16"), ("cnn", "bf16")]


@pytest.mark.parametrize("name, mode", rows(COMPARED, *COMPARED[:2]))
def test_loops_are_compared_only_if_they_train_the_same_network(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step.share_kernels("cpu")
    net = work.WORKS[name]
    batches = net.batches(2, "cpu", 8)
    assert step.distance(net, ["by hand", "best", "textbook", "ours"], batches, mode, "cpu") < step.ALIKE[mode]

    def without_clipping(*arguments: Any) -> Any:
        made = loops.by_hand(*arguments)

        def taken() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
                made()

        return taken

    monkeypatch.setitem(loops.STEPS, "careless", without_clipping)
    with pytest.raises(step.NotAlike, match="careless"):
        step.distance(net, ["by hand", "careless"], batches, mode, "cpu")


@pytest.mark.slow
def test_waits_of_whole_runs_are_counted(own_folder: Path) -> None:
    """None per step, one per log line; an optimizer that is not fused is seen."""
    base = ["recipe=classification", "amp=bf16", "device=cpu", *modes.QUIET, *modes.SMALL["classification"]]
    base += [*waits.EVERYTHING, "batch_size=4"]
    assert waits.of_a_run(base, "cpu") == {"waits per step": 0, "waits per log line": 1}
    assert waits.of_a_run([*base, "optimizer.fused=false"], "cpu")["waits per step"] >= 1


def test_modes_are_measured_in_whole_runs(own_folder: Path) -> None:
    mlp = [*modes.IMAGES, "model=mlp", "model.options.width=32", "model.options.depth=1", "batch_size=8"]
    base = ["recipe=classification", "device=cpu", *modes.QUIET, *mlp]
    flops, samples = modes.count_flops(base)
    # Forward 2 operations per weight and sample, backward twice as much, but the first layer needs no input's gradient.
    weights = [3 * 16 * 16 * 32, 32 * 10]
    assert (flops, samples) == (16 * (4 * weights[0] + 6 * weights[1]), 16)
    found = modes.one_run([*base, "amp=bf16"], 4, 2)
    assert isinstance(found, dict) and len(found["rates"]) == 4 and min(found["rates"]) > 0
    assert "amp=none: there is no such option" in str(modes.one_run([*base, "amp=none"], 4, 2))
    assert modes.matrix_peak("float32", "cpu", seconds=0.001) > 1e8


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["step", "--work", "mlpp"])
    assert "no mlpp; expected some of mlp, cnn" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        step.some_of(work.MODES)("fp17")
