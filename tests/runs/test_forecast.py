"""What is forecast from bf16 is what fp16 does."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import script
from small import COMMON, SMALL
from tiers import rows
from torch import Tensor, nn

from amp_core import keep_fp32
from amp_core.config.errors import ConfigError
from amp_tools.census import LARGEST, Census, Numbers
from amp_tools.forecast import KINDS, Check, Forecast, Score, check_windows, forecast_windows
from amp_tools.heatmap import draw
from recipes import classification, find

doctor = script("scripts/doctor.py")

MLP = [*(one for one in SMALL["classification"] if not one.startswith("model")), "model=mlp", "model.options.width=16"]


pytestmark = pytest.mark.usefixtures("own_folder")


def visited(driver: Any, recipe: str, settings: list[str], mode: str) -> Any:
    """What a driver of doctor.py finds of a recipe."""
    found: list[Any] = []
    overrides = [f"recipe={recipe}", *COMMON, *settings, f"amp={mode}"]
    assert doctor.visit(overrides, lambda loop, count: driver(loop, found)) == 0
    return found[0]


def told(recipe: str, settings: list[str], windows: int = 2) -> Forecast:
    return visited(lambda loop, found: forecast_windows(loop, windows, found), recipe, settings, "bf16")


def checked(recipe: str, settings: list[str], forecast: Forecast) -> Check:
    return visited(lambda loop, found: check_windows(loop, forecast, found), recipe, settings, "fp16")


def plant(monkeypatch: pytest.MonkeyPatch, recipe: str, layer: str, power: int) -> None:
    """Make the weights of a layer larger by a power of two."""
    module = find(recipe)
    build = module.build_model

    def planted(*args: Any, **kwargs: Any) -> nn.Module:
        net = build(*args, **kwargs)
        with torch.no_grad():
            for weight in net.get_submodule(layer).parameters():
                weight.mul_(2.0**power)
        return net

    monkeypatch.setattr(module, "build_model", planted)


def test_shares_are_those_of_a_cast() -> None:
    torch.manual_seed(0)
    values = torch.randn(20_000) * 2.0 ** torch.randint(-44, 10, (20_000,))
    values[::7] = 2.0 ** torch.randint(-44, 10, values[::7].shape).float()  # ties, too
    values[::11] = 0
    for tensor in (values, values.bfloat16(), values.view(100, 200).t()):
        numbers = Numbers.of(tensor)
        not_zero = tensor[tensor != 0].float()
        assert numbers.not_zero == len(not_zero) and numbers.amax == tensor.abs().max().item()
        assert numbers.headroom == math.log2(LARGEST / numbers.amax)
        for scale in (1.0, 2.0**8, 2.0**15):
            lost = ((not_zero * scale).half() == 0).float().mean().item()
            assert numbers.lost(2.0**-25 / scale) == pytest.approx(lost, rel=1e-6)
        exponents = torch.frexp(not_zero).exponent - 1
        assert numbers.exponents == {
            int(e): pytest.approx((exponents == e).float().mean().item(), rel=1e-5) for e in exponents.unique()
        }


@pytest.mark.parametrize("backward", [False, True])
def test_float8_loses_what_its_casts_lose(backward: bool) -> None:
    from amp_core.lowp.formats import E4M3, E5M2, Scaling, quantise

    values = torch.randn(5000) * 2.0 ** torch.randint(-30, 1, (5000,))
    numbers = Numbers.of(values, backward=backward)
    low = quantise(values[None], Scaling(E5M2 if backward else E4M3, (None, None)))
    assert numbers.lost_float8 == pytest.approx(int((low.dense() == 0).sum()), abs=1)  # a number at the very edge


def test_infinities_of_masks_are_no_numbers() -> None:
    numbers = Numbers.of(torch.tensor([1.0, -torch.inf, torch.finfo(torch.bfloat16).min, torch.nan]))
    assert numbers.amax == 1.0 and numbers.to_dict()["not_finite"] == 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * y


def test_a_census_knows_places_and_kinds() -> None:
    """Functional code belongs to the module whose forward it stands in; a weight's gradient to the weight's."""
    net = Nested()
    names = {module: name for name, module in net.named_modules()}
    inputs = torch.randn(3, 4)
    with Census(names) as census:
        with torch.autocast("cpu", torch.bfloat16):
            output = net(inputs)
        output.float().sum().backward()
    found = {(look.module, look.kind): look for look in census.looks}
    own = {("", kind) for kind in ("activations", "activation_gradients")}
    own |= {("inner", kind) for kind in ("weights", "activations", "weight_gradients")}
    assert {key for key in found if key[0] is not None} == own
    casts = [look.numbers.not_zero for look in census.looks if look.kind == "weights"]
    assert sorted(casts) == [4, 16]
    looks = [look for look in census.looks if look.kind == "weight_gradients"]
    expected = [net.inner.weight.grad, net.inner.bias.grad]
    assert sorted(look.numbers.amax for look in looks) == sorted(grad.abs().max().item() for grad in expected)
    product = found["", "activations"]
    assert (product.op, product.numbers.amax) == ("mul", output.abs().max().item())
    assert "test_forecast.py" in product.place.source


def test_imitation_loses_what_fp16_loses() -> None:
    net = nn.Linear(64, 64)
    with torch.no_grad():
        net.weight.mul_(2.0**-22)
    inputs = torch.randn(8, 64)
    zeros = {}
    for dtype, imitate in ((torch.float16, None), (torch.bfloat16, 1.0), (torch.bfloat16, None)):
        with Census({net: "net"}, imitate=imitate) as census, torch.autocast("cpu", dtype):
            net(inputs)
        zeros[dtype, imitate] = [look.numbers.zeros for look in census.looks if look.kind == "weights"]
    fp16 = [int((weight.half() == 0).sum()) for weight in net.parameters()]
    assert sorted(zeros[torch.bfloat16, 1.0]) == sorted(fp16)
    assert sum(zeros[torch.bfloat16, None]) == 0 < sum(fp16)


@pytest.mark.parametrize("recipe", rows(["classification", "language_model", "segmentation"], "language_model"))
def test_healthy_networks_need_no_islands(recipe: str) -> None:
    forecast = told(recipe, SMALL[recipe])
    assert not forecast.islands and not forecast.outside
    assert not forecast.underflowing(forecast.init_scale)
    assert 2.0**10 <= forecast.init_scale == forecast.largest_scale / 2
    check = checked(recipe, SMALL[recipe], forecast)
    assert not check.islands.measured and not check.underflow.measured
    assert 0.5 <= check.scale_forecast / check.scale_measured <= 2


@pytest.mark.parametrize(
    "recipe, layer, power, islands",
    [
        ("classification", "3", 16, ["3"]),  # the normalisation after it makes it small again
        pytest.param(
            "segmentation", "narrow.0", 16, ["narrow.0", "up.0.0"], marks=pytest.mark.slow
        ),  # the next layer's cast would overflow
        pytest.param("language_model", "blocks.0.down", 20, ["blocks.0.down"], marks=pytest.mark.slow),
    ],
)
def test_a_planted_overflow_is_forecast(
    recipe: str, layer: str, power: int, islands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, recipe, layer, power)
    forecast = told(recipe, SMALL[recipe])
    assert forecast.islands == islands
    row = next(row for row in forecast.rows if (row.module, row.kind) == (layer, "activations"))
    assert row.headroom < 0
    check = checked(recipe, SMALL[recipe], forecast)
    assert check.islands.precision == check.islands.recall == 1.0
    assert check.islands.measured == islands
    assert 0.5 <= check.scale_forecast / check.scale_measured <= 2


@pytest.mark.parametrize("typed", [[], ["amp.keep_fp32=['4']"]])
def test_an_island_of_the_program_is_not_advised(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's own stay where they are; those of the command line have to be typed again."""
    build = classification.build_model

    def with_an_island(*args: Any, **kwargs: Any) -> nn.Module:
        net = build(*args, **kwargs)
        keep_fp32(net, ["1"])
        return net

    monkeypatch.setattr(classification, "build_model", with_an_island)
    override = told("classification", [*MLP, *typed]).override
    assert ("keep_fp32" in override) is bool(typed)


def test_a_product_in_a_parents_forward_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(192, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x.flatten(1))
            z = (y * 2.0**12) * (y * 2.0**12)
            return self.b((z * 2.0**-24).relu())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product, self.head = Product(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.product(x))

    monkeypatch.setattr(classification, "build_model", lambda *_, **__: Net())
    settings = [one for one in SMALL["classification"] if not one.startswith("model")]
    forecast = told("classification", settings)
    assert forecast.islands == ["product"]
    overflowing = [row for row in forecast.operations if row.headroom < 0]
    assert [(row.module, row.op) for row in overflowing] == [("product", "mul")]
    assert "(y * 2.0**12) * (y * 2.0**12)" in overflowing[0].code
    assert "amp.keep_fp32=[product]" in forecast.override
    assert checked("classification", settings, forecast).islands.measured == ["product"]


def test_gradients_that_vanish_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that would be large enough themselves, and descend from some that are not."""
    plant(monkeypatch, "classification", "7", -28)
    forecast = told("classification", MLP, windows=1)
    found = {(row.module, row.kind): row.lost["1"] for row in forecast.underflowing(1.0)}
    assert found["4", "weight_gradients"] > 0.9
    check = checked("classification", MLP, forecast)
    assert len(check.underflow.measured) == 6
    assert check.underflow.precision == check.underflow.recall == 1.0


def test_recomputed_activations_are_no_gradients() -> None:
    """They do not grow with the loss scale."""
    forecast = told("custom_function", SMALL["custom_function"])
    assert checked("custom_function", SMALL["custom_function"], forecast).scale_measured == forecast.largest_scale


def test_another_mode_than_bf16_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["recipe=classification", *COMMON, *SMALL["classification"], "amp=fp32"]
    assert doctor.visit(overrides, lambda loop, count: forecast_windows(loop, 1, [])) == 2
    assert "use amp=bf16" in capsys.readouterr().err


def test_a_score_is_counted() -> None:
    score = Score(["a", "b", "c"], ["b", "d"])
    assert (score.precision, score.recall) == (pytest.approx(1 / 3), 1 / 2)
    assert "missed: d; not needed: a, c" in str(score)
    assert Score([], []).precision == Score([], []).recall == 1.0


def test_the_command_writes_table_json_and_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plant(monkeypatch, "classification", "3", 16)
    settings = ["recipe=classification", *COMMON, *SMALL["classification"], "amp=fp16", "amp.init_scale=8"]
    files = ["--json", "a.json", "--picture", "a.png"]
    assert doctor.main(["forecast", *settings, 'amp.keep_fp32=["15"]', "--windows", "2", "--check", *files]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 120 for line in text.splitlines())
    assert 'amp=fp16 \'amp.keep_fp32=["15","3"]\' amp.init_scale=' in text and "OVERFLOW" in text
    assert "more with more headroom" in text
    assert "precision 1.00, recall 1.00 (1 forecast, 1 measured, 1 in both)" in text
    content = json.loads(Path("a.json").read_text())
    assert content["fp16"]["islands"] == ["3"] and content["windows"] == [1, 2]
    assert {row["kind"] for row in content["layers"]} == set(KINDS)
    assert all(row["source"] for row in content["operations"])
    assert content["check"]["islands"] == {"forecast": ["3"], "measured": ["3"], "precision": 1.0, "recall": 1.0}
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = told("classification", MLP, windows=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="amp-recipes\\[data\\]"):
        draw(forecast, "a.png")
    assert not Path("a.png").exists()


def test_a_checkpoint_is_forecast_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_recipes import run

    folder = run("classification", "a", "steps=3", "amp=bf16", "schedule.horizon=9")
    before = sorted(Path(folder).rglob("*"))
    forecast = told("classification", [*SMALL["classification"], f"resume={folder}", "schedule.horizon=9"])
    assert forecast.windows == [4, 5] and sorted(Path(folder).rglob("*")) == before
