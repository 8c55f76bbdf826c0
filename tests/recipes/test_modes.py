"""Modes beyond autocast, in whole runs: the apex levels, 16-bit weights, float8."""

from __future__ import annotations

import pytest
import torch
from running import lines, state
from test_recipes import MLP, STATIC, on_two_ranks, run, weights
from tiers import rows

from amp_core.lowp.masters import master_params
from amp_core.step.amp import Amp

pytestmark = pytest.mark.usefixtures("own_folder")
GRADIENT_UNIT = {"o2": 2.0**-11, "bf16_pure": 2.0**-8, "fp8": 2.0**-3}
"""The most that one rounding of a gradient changes, relative; e5m2 in fp8, with a scale of each half's own."""


@pytest.mark.parametrize(
    "mode",
    rows([["o2", *STATIC], ["bf16_pure"], ["bf16_pure", "amp.update=remainder"], ["fp8"]], ["bf16_pure"]),
    ids=" ".join,
)
def test_two_ranks_agree_with_one(mode):
    # No BatchNorm: its statistics belong to the micro-batch. SGD: what AdamW makes of a gradient near 0 is its rounding.
    # One step: after it, weights that differ by a rounding may lie on two sides of a ReLU's kink.
    common = ["steps=1", *MLP, f"amp={mode[0]}", *mode[1:]]
    common += ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.options.momentum=0", "optimizer.options.nesterov=false"]
    start = run("classification", "start", "debug.inject={where: drop, step: 1}", *common)
    one = run("classification", "one", "batch_size=8", *common)
    two = on_two_ranks("classification", "two", *common)
    # Half of each gradient is rounded before it is summed. 16-bit weights may end at the other neighbour.
    unit, moved = GRADIENT_UNIT[mode[0]], (weights(one) - weights(start)).abs().mean()
    assert (weights(one) - weights(two)).abs().mean() < unit * moved
    for a, b in zip(lines(one), lines(two), strict=True):  # of the step, and of the evaluation after it
        assert a["loss"] == pytest.approx(b["loss"], rel=unit)


@pytest.mark.slow
def test_every_mode_goes_on_from_every_other(capsys):
    order = ["fp32", "o2", "bf16_pure", "fp8", "o3", "bf16", "o1", "bf16_pure", "fp16", "o2", "o0"]
    for number, mode in enumerate(order, 1):
        folder = run("classification", "a", f"steps={2 * number}", f"amp={mode}", "ema.decay=0.9", "schedule=constant")
        assert state(folder)["progress"]["step"] == 2 * number
        assert torch.isfinite(weights(folder)).all()
        if mode == "fp16":
            assert state(folder)["scaler"]["scale"] == 65536.0  # a fresh one
    assert capsys.readouterr().out.count("the checkpoint was made with amp=") == len(order) - 1


def test_rounding_to_nearest_stalls_and_the_cures_do_not():
    # Steps of 1e-5, below half of a last digit (2^-10 of it and more) of every weight beyond 0.02.
    common = ["steps=40", "model=mlp", "model.options.width=32", "optimizer.lr=1e-5", "schedule=constant"]
    common += ["optimizer.weight_decay=0"]
    start = weights(run("classification", "start", *common, "steps=1", "debug.inject={where: drop, step: 1}"))
    large = start.abs() > 0.02

    def moved(name, *mode):
        return (weights(run("classification", name, *common, *mode)) - start)[large]

    reference = moved("fp32", "amp=fp32")
    assert (reference != 0).double().mean() > 0.7  # pixels that are dark in all images have no gradient
    rounded = (start.bfloat16().double() - start)[large]
    assert torch.equal(moved("nearest", "amp=bf16_pure", "amp.update=nearest"), rounded)  # not one has moved
    remainder = moved("remainder", "amp=bf16_pure", "amp.update=remainder")
    assert (remainder - reference).norm() < 0.2 * reference.norm()
    # By chance up or down by far more than a step, and right in the mean.
    stochastic = moved("stochastic", "amp=bf16_pure") - rounded
    along = torch.sign(reference)
    assert (stochastic * along).mean().item() == pytest.approx(reference.abs().mean().item(), rel=0.3)


def test_an_optimizer_of_the_16_bit_weights_themselves_is_refused():
    net = torch.nn.Linear(4, 4)
    amp = Amp.named("bf16_pure")
    amp.prepare(net)
    wrong, right = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(master_params(net), lr=0.1)
    amp.backward(net(torch.ones(2, 4)).sum())
    with pytest.raises(TypeError, match=r"master_params\(net\)"):
        amp.step(wrong)
    assert amp.step(right).taken
    amp.update()
