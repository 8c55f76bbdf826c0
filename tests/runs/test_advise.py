"""Advice on speed: what is planted is found, at its place, and a loop without it is told nothing of the kind.

No test compares two times that are near each other: shares are of operations that are planted to be nearly everything,
or profiles are written by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from shared import script
from small import COMMON, IMAGES, SMALL
from torch import nn

import recipes
from amp_core import Amp
from amp_core.doctor.trace import Location
from amp_core.run.replay import rerun_step
from amp_core.torch_private import cpu_has
from amp_tools import findings as advising
from amp_tools import measure as measuring
from amp_tools import profile as profiles
from amp_tools.advise import Report, advise, advise_run, examine
from amp_tools.findings import FINDERS, waits
from amp_tools.profile import Op, Operand, OptimizerFacts, Profile, Trial, Units, trial_of
from amp_tools.trials import Reads, try_out, try_reads

ROOT = Path(__file__).resolve().parents[2]
doctor = script("scripts/doctor.py")
SMALL_RUN = ["recipe=classification", *COMMON, *SMALL["classification"]]


def line_of(mark):
    """file:line of the line of this file that ends with a comment."""
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {mark}"))
    return f"tests/runs/test_advise.py:{number}"


def look_at(net, batch, *, mode="fp32", fused=True, loss_of=None, windows=2, after=lambda loss: None) -> Report:
    """Advice on a plain loop."""
    amp = Amp.named(mode)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=fused)

    def step():
        with amp.autocast():
            out = net(batch)
            loss = loss_of(out) if loss_of else out.float().square().mean()
        after(loss)
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()

    return advise(step, net, amp, optimizers=[optimizer], num_windows=windows)


def named(report, text):
    return [finding for finding in report.findings if text in finding.title]


def recorded(net, batch, **options) -> Profile:
    return look_at(net, batch, **options).profile


def clean():
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.randn(512, 512)


@pytest.fixture(scope="module")
def plain() -> Report:
    """A loop with nothing planted in it, in fp32."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return look_at(*clean(), windows=3, loss_of=torch.sum)


# --- a loop without anything ------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_was_planted(plain):
    assert plain.findings == [] and plain.hints == [] and "nothing was found" in str(plain)
    assert plain.profile.matched == 1.0


def test_where_the_time_goes_adds_up(plain):
    parts = plain.profile.breakdown()
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["products"] > 0.5  # 2 * 3 products of 512^3 and a handful of sums


def test_products_are_counted_forward_and_backward(plain):
    products = [op for op in plain.profile.ops if op.is_product]
    # The first layer needs no gradient of its input.
    assert [op.place.module for op in products[:5]] == ["0", "2", "2", "2", "0"]
    assert [op.backward for op in products[:5]] == [False, False, True, True, True]
    assert {profiles.flops(op) for op in products} == {2 * 512**3}
    assert all(op.seconds > 0 for op in products)


def test_the_text_fits_120_columns_and_the_rest_is_json(plain):
    net, batch = nn.Sequential(nn.Linear(100, 100)), torch.randn(8, 100)
    for report in (plain, look_at(net, batch, mode="bf16", fused=False)):
        assert max(map(len, str(report).splitlines())) <= 120
        assert json.loads(json.dumps(report.to_dict()))["findings"] == report.to_dict()["findings"]


# --- found in a loop --------------------------------------------------------------------------------------------------


def test_a_wait_is_found_at_its_line():
    net, batch = clean()
    report = look_at(net, batch, loss_of=torch.sum, after=lambda loss: loss.item())  # planted: wait
    (finding,) = named(report, "waits for the device")
    assert line_of("planted: wait") in finding.title and finding.evidence.startswith("1 per step")
    assert "planted: wait" in finding.evidence and report.to_dict()["waits_per_step"] == 1
    assert finding is report.findings[0] and finding.tried is not None


class Flipping(nn.Module):
    """Changes the type of its input over and over."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(100):
            x = x.bfloat16().float()  # planted: casts
        return x * self.scale


def test_casts_are_found_in_the_module_that_makes_them(plain):
    net = nn.Sequential(nn.Linear(8, 8), Flipping())
    report = look_at(net, torch.randn(20_000, 8))
    (finding,) = named(report, "casts")
    assert finding.share is not None and finding.share > 0.2
    assert finding.place == f"1 (Flipping), {line_of('planted: casts')}"
    assert finding.evidence.startswith("400 casts per step")  # 2 * 100, forward and backward
    assert "activations" in finding.advice and "weights" not in finding.advice
    assert not named(plain, "casts")


def test_casts_of_weights_are_told_apart():
    net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(3)])
    profile = recorded(net, torch.randn(1, 1024), mode="bf16")
    casts = [op for op in profile.ops if op.is_cast]
    assert {each.weight for op in casts for each in op.inputs if each.weight} == {f"{i}.weight" for i in range(3)}
    for op in casts:  # shares of times would depend on the machine
        op.seconds = op.inputs[0].num_bytes * 1e-12
    profile = dataclasses.replace(profile, steps=[1.0], loads=[0.0])
    profile.profiled = 2 * sum(op.seconds for op in casts)
    (finding,) = advising.find_casts(dataclasses.replace(profile, batch_size=1, accumulation=4))
    assert "weights" in finding.advice and finding.override == "batch_size=2 accumulation=2"


def test_many_small_operations_are_found():
    net = nn.Linear(4, 4)

    def loss_of(out):
        for _ in range(200):
            out = out + 1  # planted: small
        return out.sum()

    report = look_at(net, torch.randn(4, 4), loss_of=loss_of)
    (finding,) = named(report, "small operations")
    assert finding.place.endswith(line_of("planted: small"))
    assert len(report.profile.work) / report.profile.num_steps > 200


def test_an_unfused_optimizer_is_found():
    net, batch = clean()
    report = look_at(net, batch, fused=False)
    (finding,) = named(report, "SGD is not fused")
    assert finding.override == "optimizer.fused=true"
    # The read of whether to skip has the same cause.
    assert not named(report, "waits for the device") and "Also: waits for the device" in finding.evidence
    fused, unfused = (named(r, "not fused") for r in (look_at(net, batch), report))
    assert not fused and unfused[0].share is not None and unfused[0].share > 0


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(64))

    def forward(self, x):
        for _ in range(10):
            x = (x * self.a + 1.0).tanh()  # planted: chain
        return x


def test_chains_of_pointwise_operations_are_found(plain):
    report = look_at(nn.Sequential(nn.Linear(64, 64), Chain()), torch.randn(8192, 64))
    (finding,) = named(report, "could be fused")
    assert finding.share is not None and finding.share > 0.2
    assert finding.place == f"1 (Chain), {line_of('planted: chain')}"
    assert "tanh" in finding.evidence and finding.override is None
    assert not named(plain, "could be fused")


def test_odd_sizes_are_found_in_16_bits_only():
    net = nn.Sequential(nn.Linear(100, 128), nn.Linear(128, 3))
    for mode, sizes in (("bf16", {100}), ("fp32", set())):
        profile = recorded(net, torch.randn(64, 100), mode=mode)
        found = advising.find_odd_sizes(profile)
        assert {int(finding.title.split()[2]) for finding in found} == sizes
        assert [finding.share for finding in found] == [None] * len(sizes)  # a CPU does not mind
        for finding in advising.find_odd_sizes(dataclasses.replace(profile, device="cuda")):
            assert finding.share is not None and finding.share > 0
            assert finding.place.startswith("0 (Linear)") and "104" in finding.advice


def test_an_odd_batch_size_is_told_by_its_setting():
    profile = recorded(nn.Linear(128, 128), torch.randn(100, 128), mode="bf16")
    (finding,) = advising.find_odd_sizes(dataclasses.replace(profile, batch_size=100))
    assert finding.override == "batch_size=104"


def test_odd_channels_are_those_of_a_group():
    net = nn.Sequential(nn.Conv2d(3, 130, 3), nn.Conv2d(130, 130, 3, groups=130), nn.Conv2d(130, 260, 3, groups=2))
    profile = recorded(net, torch.randn(2, 3, 12, 12), mode="bf16", windows=1)
    # 130 outputs of the first, none of the second, 65 inputs and 130 outputs per group of the third.
    found = {finding.title.partition(" is no")[0] for finding in advising.find_odd_sizes(profile)}
    assert found in ({"the size 65 in 2", f"the size 130 in {both}"} for both in ("0 and 2", "2 and 0"))


def test_convolutions_on_nchw_are_found():
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    images = torch.randn(16, 8, 32, 32)
    profile = recorded(net, images, mode="bf16")
    (finding,) = advising.find_channels_first(profile)
    assert finding.override == "perf.channels_last=true" and "(Conv2d)" in finding.place
    assert finding.evidence.startswith("2 convolutions per step")

    last = torch.channels_last
    profile = recorded(net.to(memory_format=last), images.to(memory_format=last), mode="bf16")
    assert advising.find_channels_first(profile) == []


# --- not right in 16 bits ---------------------------------------------------------------------------------------------


class Unsafe(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 1)

    def forward(self, x):
        x = x / (x.half().norm(dim=1, keepdim=True) + 1e-8)  # planted: eps
        x = x + 0 * torch.arange(4096).half().float().mean()  # planted: positions
        return torch.sigmoid(self.fc(x)).squeeze(1)  # planted: sigmoid


def probability_loss(p):
    return F.binary_cross_entropy(p.float(), torch.ones(len(p)))  # planted: bce


def test_what_is_not_right_in_16_bits_has_a_section_of_its_own():
    report = look_at(Unsafe(), torch.randn(8, 16), mode="bf16", loss_of=probability_loss, windows=1)
    by_line = {hint.place.split()[-1]: hint for hint in report.hints}
    assert by_line.keys() == {line_of(f"planted: {name}") for name in ("eps", "positions", "bce")}
    assert line_of("planted: sigmoid") in by_line[line_of("planted: bce")].evidence
    assert "1e-08 in float16" in by_line[line_of("planted: eps")].evidence
    assert "not right in 16 bits" in str(report)


def test_hints_of_settings_are_given_once_and_fp32_gets_none():
    net = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))
    bce = nn.Module()
    bce.net, bce.loss = net, nn.BCELoss()
    bce.forward = lambda x: bce.loss(bce.net(x).float(), torch.ones(8))  # type: ignore[method-assign]
    batch = torch.randn(8, 16)
    (hint,) = look_at(bce, batch, mode="bf16", loss_of=lambda loss: loss, windows=1).hints
    assert hint.place.startswith("loss (BCELoss)")
    assert look_at(bce, batch, mode="fp32", loss_of=lambda loss: loss, windows=1).hints == []


# --- profiles by hand -------------------------------------------------------------------------------------------------

LAYER = Location("fc", "Linear", "net.py:1", "return self.fc(x)")


def product(rows, inner, columns, seconds, dtype="bfloat16", device="cpu", place=LAYER):
    shapes = [(rows, inner), (inner, columns)]
    size = 4 if dtype == "float32" else 2
    operands = [Operand(s, dtype, device, size * s[0] * s[1], i) for i, s in enumerate([*shapes, (rows, columns)])]
    return Op("aten::mm", place, inputs=operands[:2], outputs=operands[2:], seconds=seconds, num_kernels=1)


def by_hand(*ops, **fields) -> Profile:
    """One step of 10 ms."""
    fields = {"steps": [0.01], "loads": [0.0], "amp": "bf16", "dtype": "bfloat16"} | fields
    return Profile(list(ops), 1, 0.01, **fields)  # type: ignore[arg-type]


BIG = product(512, 512, 512, 0.009)

CASES = {
    "find_slow_units": (
        by_hand(BIG, units=Units("this CPU", "has no units for bfloat16, and emulates them", 0.1)),
        by_hand(BIG, units=Units("this CPU", "", 2.0)),
        "amp=fp32",
    ),
    "find_slow_units of float8": (
        by_hand(BIG, units=Units("this CPU", "has no float8 units, and emulates them in fp32", 2.0)),
        by_hand(BIG, dtype="float32", units=Units("this CPU")),
        "amp=bf16",
    ),
    "find_loading": (
        by_hand(BIG, loads=[0.03], loading=0.03, num_cores=16),
        by_hand(BIG, loads=[0.0001], loading=0.03, num_workers=4, num_cores=16),
        "data.num_workers=3",
    ),
    "find_unfused": (
        by_hand(BIG, optimizers=[OptimizerFacts("AdamW", False, True, seconds=0.002)]),
        by_hand(BIG, optimizers=[OptimizerFacts("AdamW", True, True, seconds=0.002)]),
        "optimizer.fused=true",
    ),
    "find_memory_bound": (
        by_hand(product(8, 4096, 4096, 0.008), units=Units("a GPU", balance=200), batch_size=8, accumulation=4),
        by_hand(product(4096, 4096, 4096, 0.008), units=Units("a GPU", balance=200), batch_size=8, accumulation=4),
        "batch_size=16 accumulation=2",
    ),
    "find_cadences": (
        by_hand(BIG, cadences={"eval_every": (10, 1.0)}),
        by_hand(BIG, cadences={"eval_every": (100_000, 1.0)}),
        "eval_every=5000",
    ),
    "find_costly_autocast": (
        by_hand(BIG, trials={"amp=fp32": Trial(0.3, 0.1, 0.4, 6, "CPU time")}),
        by_hand(BIG, trials={"amp=fp32": Trial(0.3, -0.1, 0.4, 6, "CPU time")}),
        "amp=fp32",
    ),
    "find_islands": (
        by_hand(product(512, 512, 512, 0.009, "float32"), keep_fp32=["fc"]),
        by_hand(BIG, keep_fp32=["head"]),
        "amp.keep_fp32=[]",
    ),
    "find_small_operators": (
        by_hand(*[product(8, 8, 8, 1e-6)] * 200, batch_size=4),
        by_hand(BIG, *[product(8, 8, 8, 1e-6)] * 200, batch_size=4),
        "batch_size=8",
    ),
}


@pytest.mark.parametrize("finder", CASES)
def test_a_finder_finds_what_is_there_and_nothing_else(finder):
    there, not_there, override = CASES[finder]
    find = getattr(advising, finder.split()[0])
    (finding,) = find(there)
    assert finding.override == override and finding.place and (finding.share is None or 0 < finding.share <= 1)
    assert find(not_there) == []


def test_small_operations_are_found_on_a_machine_that_is_slow_now():
    """Other processes make views longer, too: a bound in seconds would find nothing beside them."""
    view = Op("aten::view", Location(None, "", "a.py:1", ""), is_view=True)
    for times in (1.0, 20.0):
        views = [dataclasses.replace(view, seconds=1e-6 * times)] * 50
        ops = [*views, *[product(8, 8, 8, 4e-6 * times)] * 200]
        (finding,) = advising.find_small_operators(by_hand(*ops, batch_size=4))
        assert finding.override == "batch_size=8"
        assert advising.find_small_operators(by_hand(*views, *[product(8, 8, 8, 9e-6 * times)] * 200)) == []


def test_shares_are_of_the_whole_step():
    profile = by_hand(BIG, loads=[0.01], loading=0.01)
    # Half of the time is the wait, so the product takes 45 % of it.
    assert profile.breakdown()["products"] == pytest.approx(0.45)
    (finding,) = examine("a profile", profile).findings
    assert finding.share == pytest.approx(0.5)


def test_findings_are_ranked_by_what_was_gained_then_by_forecast():
    gained, nothing = Trial(0.2, 0.1, 0.3, 9, "CPU time"), Trial(0.1, -0.1, 0.3, 9, "CPU time")
    fields = {"loads": [0.01], "loading": 0.01, "num_cores": 16, "cadences": {"save_every": (1, 0.02)}}
    optimizers = [OptimizerFacts("AdamW", False, True, seconds=0.002)]
    trials = {"optimizer.fused=true": gained, "data.num_workers=1": nothing}
    report = examine("a profile", by_hand(BIG, optimizers=optimizers, trials=trials, **fields))
    heads = [str(finding).splitlines()[0] for finding in report.findings]
    assert heads == [
        "gains 20% of a step: AdamW is not fused",
        "checkpoints take part of the run",
        "no gain measured: steps wait for their data",
    ]
    assert "up to" not in str(report)  # no forecast is called a bound
    assert "forecast  it takes 10.0% of a step\n" in str(report)  # stands above what was gained
    assert "tried     20.0% of a step (96% interval 10.0% to 30.0%, 9 pairs of turns, CPU time)" in str(report)
    assert str(report).count("not tried") == 1


def test_findings_that_one_setting_cures_are_one():
    small, thin = [product(8, 8, 8, 1e-6)] * 200, product(8, 4096, 4096, 0.004)
    profile = by_hand(thin, *small, units=Units("a GPU", balance=200), batch_size=8)
    assert len([f for find in FINDERS for f in find(profile) if f.override == "batch_size=16"]) == 2
    (finding,) = examine("a profile", profile).findings
    assert finding.override == "batch_size=16" and "Also: " in finding.evidence


def test_a_gain_is_the_median_of_paired_ratios_with_the_interval_of_a_median():
    # A machine that is four times slower in some pairs changes no ratio; in one turn alone, one ratio.
    pairs = [(1.0, 0.5), (4.0, 2.0), (1.0, 0.4), (2.0, 1.2), (1.0, 2.0), (4.0, 2.0), (4.0, 0.5), (1.0, 0.5), (1, 0.5)]
    trial = trial_of(pairs, 0.5, "CPU time")
    assert (trial.gain, trial.low, trial.high) == pytest.approx((0.25, 0.2, 0.3))
    # The least and the largest of nine ratios lie on one side of their median with 2 (1 + 9) of 2^9 outcomes.
    assert "96% interval 20.0% to 30.0%, 9 pairs" in str(trial)


def test_the_interval_of_a_gain_covers_the_true_one_as_often_as_it_says():
    random = torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(4000):
        noise = torch.randn(9, generator=random).exp().tolist()  # the median of these ratios is 0.8
        trial = trial_of([(1.0, 0.8 * each) for each in noise], 1.0, "CPU time")
        missed += not trial.low <= 0.2 <= trial.high
    # 4000 * 20 / 512 = 156 misses; five standard deviations of a binomial are 61.
    assert abs(missed - 156) < 61


def test_settings_are_tried_in_turns():
    asked, profile = [], by_hand(BIG)

    def turn(override):
        asked.append(override)
        if override == "batch_size=8":
            return None  # it did not fit
        return {"": (2.0, 3.0), "data.num_workers=1": (2.0, 2.4), "amp=fp32": (1.0, 3.0)}[override]

    try_out(profile, ["batch_size=8", "data.num_workers=1", None, "eval_every=100"], turn)
    assert asked[:4] == ["", "batch_size=8", "data.num_workers=1", "amp=fp32"]
    assert asked[4:] == ["amp=fp32", "data.num_workers=1", "", "", "data.num_workers=1", "amp=fp32"] * 4
    gains = {name: (trial.gain, trial.how) for name, trial in profile.trials.items()}
    # The wait for data is that of a whole step, by the clock on the wall.
    assert gains["data.num_workers=1"] == (pytest.approx(0.2), "wall time")
    assert gains["amp=fp32"] == (pytest.approx(0.5), "CPU time") and len(gains) == 2
    try_out(empty := by_hand(dtype="float32"), [], turn)
    assert empty.trials == {}


def test_more_workers_than_cores_are_not_advised():
    (finding,) = advising.find_loading(by_hand(BIG, loads=[0.05], loading=0.1, num_workers=2, num_cores=2))
    assert finding.override is None and "beforehand" in finding.advice


def test_on_a_gpu_kernels_count_and_copies_that_block_are_waits():
    place = Location(None, "", "train.py:7", "x = x.cpu()")
    copies = [
        Op("aten::_to_copy", place, inputs=[Operand((8, 8), "float32", a)], outputs=[Operand((8, 8), "float32", b)])
        for a, b in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda"))
    ]
    for op in copies:
        op.is_blocking = measuring._is_blocking("_to_copy", op.inputs, op.outputs)
        op.host_seconds = 0.002
    profile = by_hand(BIG, *copies, device="cuda")
    assert len(waits(profile)) == 2
    (finding,) = advising.find_waits(profile)
    assert finding.share == pytest.approx(0.4) and "non_blocking" in finding.advice
    assert "idle between kernels" in profile.breakdown()


def test_float8_wants_multiples_of_16():
    op = product(128, 120, 128, 0.005, "float8_e4m3fn", "cuda")
    op.name = "aten::_scaled_mm"
    (finding,) = advising.find_odd_sizes(by_hand(op, device="cuda"))
    assert finding.title.startswith("the size 120 in fc is no multiple of 16") and "128" in finding.advice


def test_every_finder_keeps_quiet_about_an_empty_profile():
    assert [finding for finder in FINDERS for finding in finder(by_hand())] == []


# --- of recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_reports_on_the_default_recipe(tmp_path, own_folder, capsys):
    assert doctor.main(["advise", "--windows", "3", "--json", "report.json", *SMALL_RUN]) == 0
    text = capsys.readouterr().out
    assert "0 waits for the device" in text and "between operations" in text
    report = json.loads(Path("report.json").read_text())
    assert report["waits_per_step"] == 0 and report["matched"] > 0.95
    assert report["operations_per_step"] > 50 and report["amp"] == "bf16" and report["hints"] == []
    assert not any("not fused" in finding["title"] or "waits for" in finding["title"] for finding in report["findings"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]  # no run folder


@pytest.mark.slow
def test_an_unfused_optimizer_of_a_run_is_found(capsys):
    assert doctor.main(["advise", "--windows", "2", *SMALL_RUN, "optimizer.fused=false"]) == 0
    text = capsys.readouterr().out
    assert "pairs of turns, CPU time)" in text
    assert "AdamW is not fused" in text and "optimizer.fused=true" in text and "1 waits for the device" in text


def test_a_wait_in_a_recipe_is_found_at_its_line(own_folder, monkeypatch):
    source = (ROOT / "recipes" / "classification.py").read_text()
    before = "            total += loss.detach() * micro.weight\n"
    assert before in source
    Path("leaky.py").write_text(source.replace(before, "            total += loss.item() * micro.weight\n"))
    monkeypatch.syspath_prepend(Path.cwd())
    leaky = importlib.import_module("leaky")
    monkeypatch.setattr(recipes, "find", lambda name: leaky)
    number = Path("leaky.py").read_text().splitlines().index("            total += loss.item() * micro.weight") + 1
    profiles = []
    assert doctor.visit([*SMALL_RUN, "accumulation=2"], lambda loop, count: advise_run(loop, 2, profiles)) == 0
    report = examine("leaky", profiles[0])
    assert report.to_dict()["waits_per_step"] == 2  # one per micro-batch
    (finding,) = named(report, "waits for")
    assert finding.title.endswith(f"leaky.py:{number}") and "loss.item()" in finding.evidence
    assert finding.tried is not None  # its reads were left out


class Slow:
    """A data set that takes its time."""

    def __init__(self, data, seconds):
        self.data, self.seconds = data, seconds

    def __len__(self):
        return len(self.data)

    def __getitems__(self, keys):
        time.sleep(self.seconds)
        return self.data.__getitems__(keys)


@pytest.mark.slow
@pytest.mark.parametrize("is_slow", [True, False])
def test_slow_data_are_found(is_slow):
    profiles = []

    def driver(loop, count):
        if is_slow:
            loop.feed.data = dataclasses.replace(loop.data, train=Slow(loop.data.train, 0.1))
        yield from advise_run(loop, 2, profiles)

    assert doctor.visit(SMALL_RUN, driver) == 0
    (profile,) = profiles
    assert profile.loading is not None and (profile.loading > 0.1) is is_slow
    found = [finding for finding in advising.find_loading(profile) if (finding.share or 0) > 0.6]
    assert bool(found) is is_slow
    assert profile.cadences.keys() == {"eval_every", "save_every"} and profile.batch_size == 4


@pytest.mark.slow
def test_batches_loaded_ahead_are_not_counted():
    """200 ms a batch by 2 workers are 100 ms a step at best, whatever the machine does besides."""
    at_best, means = 0.2 / 2, []

    def driver(loop, count):
        loop.feed.data = dataclasses.replace(loop.data, train=Slow(loop.data.train, 0.2))
        steps, loads = yield from measuring.time_with_loader(loop, 4)
        # Of the measured batches at most the 4 that workers may hold were begun before.
        assert sum(steps) + sum(loads) >= (len(steps) - 4) * at_best and len(steps) >= 20
        with loop.feed.loading(loop.samples) as windows:  # the broken way: no batch is drained
            next(windows)
            time.sleep(1)
            began = time.perf_counter()
            for _ in range(3):
                with rerun_step(loop, next(windows)) as window:
                    yield window
            means.append((time.perf_counter() - began) / 3)

    settings = [*SMALL_RUN, "data.num_workers=2", "accumulation=1"]
    assert doctor.visit(settings, driver) == 0
    assert means[0] < at_best


# --- planted in a run: found first, and what its cure gains is measured -----------------------------------------------

MLP = ["model=mlp", "model.options.width=512"]
PLANTED = {
    # Loops over weights of 11 MB; with narrow layers a larger batch would gain more than a fused optimizer.
    "an optimizer that is not fused": (
        "optimizer.fused=true",
        ["model=mlp", "model.options.width=1536", "batch_size=64", "optimizer.fused=false"],
    ),
    "a tiny batch": ("batch_size=2", [*MLP, "batch_size=1", "amp=fp32"]),
    "an island over the whole network": ("amp.keep_fp32=[]", [*MLP, "batch_size=256", "amp.keep_fp32=[Linear]"]),
    # 40 ms a batch, against 1 ms of computing on an idle machine.
    "a loader that sleeps": ("data.num_workers=2", ["model=mlp", "model.options.width=16", "data.num_workers=0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_found_first_and_its_cure_is_measured(cause, own_folder, monkeypatch):
    override, settings = PLANTED[cause]
    if "island" in cause and not cpu_has("bfloat16"):
        pytest.skip("fp32 is no slower on a CPU without units for bf16")
    visit, turns = doctor.visit, []

    def planted(overrides, driver):
        def sleeping(loop, count):
            loop.feed.data = dataclasses.replace(loop.data, train=Slow(loop.data.train, 0.04))
            yield from driver(loop, count)

        turns.append(overrides)
        return visit(overrides, sleeping if "sleeps" in cause else driver)

    monkeypatch.setattr(doctor, "visit", planted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)  # workers are offered for 2 cores
    small = ["recipe=classification", *COMMON, *IMAGES, *settings]
    assert doctor.main(["advise", "--windows", "4", "--json", "report.json", *small]) == 0
    first = json.loads(Path("report.json").read_text())["findings"][0]
    assert first["override"] == override and first["tried"]["low"] > 0, first
    assert sum(override in each for each in turns) == 9  # tried as it is advised
    if "sleeps" in cause:  # nothing but the wait can be gained
        assert first["tried"]["gain"] < first["share"]


class Late(torch.Tensor):
    """A number that is computed when it is read, as on a device whose queue is long."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "item":
            a = torch.ones(512, 512)
            for _ in range(10):  # a step has 5 such products
                a = a @ a
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("is_late", [True, False])
def test_what_reads_cost_is_measured_by_leaving_them_out(is_late):
    net, batch = clean()
    number = torch.ones(()).as_subclass(Late if is_late else torch.Tensor)
    source, totals = line_of("planted: read"), []

    place = Location(None, "", source, "total += number.item()")
    profile = by_hand(BIG, Op("aten::_local_scalar_dense", place), dtype="float32")

    def measured():
        yield
        return profile

    steps = try_reads(measured(), contextlib.nullcontext, Amp.named("fp32"))
    with contextlib.suppress(StopIteration):
        while True:
            next(steps)
            net(batch).sum().backward()
            total = 0.0
            for _ in range(2):  # micro-batches
                total += number.item()  # planted: read
            totals.append(total)
    (finding,) = examine("a loop", profile).findings
    assert finding.share is None and finding.tried is not None and "number of the step before" in finding.tried.how
    assert (finding.tried.low > 0.5) is is_late  # 20 of 25 products
    assert set(totals) == {2.0} and "item" not in vars(torch.Tensor)


def test_reads_of_other_lines_are_left_alone():
    reads, value = Reads(line_of("planted: other")), torch.zeros(())

    def window(skip):
        with reads.window(contextlib.nullcontext, skip):
            value.add_(1)
            here = float(value)  # planted: other
            return here, float(value)

    assert [window(skip) for skip in (False, True, True, False)] == [(1, 1), (1, 2), (1, 3), (4, 4)]
    assert reads.num_skipped == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gan", "language_model", "segmentation"])
def test_the_operations_of_recipes_are_matched_with_their_times(recipe):
    profiles = []
    settings = [f"recipe={recipe}", *COMMON, *SMALL[recipe], "accumulation=2"]
    assert doctor.visit(settings, lambda loop, count: advise_run(loop, 2, profiles)) == 0
    (profile,) = profiles
    assert profile.matched > 0.9 and waits(profile) == []
    assert sum(profile.breakdown().values()) == pytest.approx(1.0)
    assert {op.optimizer for op in profile.ops} == {"", "Adam" if recipe == "gan" else "AdamW"}
    assert all(op.place.module is not None for op in profile.ops if op.short == "convolution")


def event(name, microseconds, *children, kernels=()):
    """What torch's profiler says of an operation: on the host, and the microseconds of the kernels it starts itself."""
    return SimpleNamespace(
        name=name,
        cpu_time_total=microseconds,
        device_time_total=sum(kernels) + sum(child.device_time_total for child in children),
        kernels=list(kernels),
        cpu_children=list(children),
        time_range=SimpleNamespace(start=0.0),
    )


def test_operations_that_only_the_dispatch_mode_saw_do_not_shift_the_others():
    names = ["mul", "sin", "tanh", "exp", "neg", "sqrt"]
    events = [event("aten::sin", 1, event("aten::mul", 100)), *[event(f"aten::{name}", 10) for name in names]]
    seen = ["sin", "cos", "mul", "sin", "log_softmax", "tanh", "exp", "neg", "sqrt"]
    ops = [Op(f"aten::{name}", LAYER) for name in seen]
    assert measuring._Events([], on_cuda=False).fill(ops, measuring._in_order(events)) == 7
    assert [round(op.seconds * 1e6) for op in ops] == [1, 0, 10, 10, 0, 10, 10, 10, 10]


def test_on_a_gpu_the_time_of_an_operation_is_that_of_its_kernels():
    cast = event("aten::to", 9, event("aten::_to_copy", 8, event("aten::copy_", 5, kernels=[3.0])))
    linear = event("aten::linear", 50, event("aten::addmm", 40, kernels=[100.0, 20.0]))
    step = event("Optimizer.step#AdamW.step", 30, event("aten::_fused_adamw_", 20, kernels=[7.0]))
    ops = [Op(f"aten::{name}", LAYER) for name in ("_to_copy", "addmm", "_fused_adamw_")]
    assert measuring._Events([], on_cuda=True).fill(ops, measuring._in_order([cast, linear, step])) == 3
    assert [round(op.seconds * 1e6) for op in ops] == [3, 120, 7]
    assert [op.num_kernels for op in ops] == [1, 2, 1]
    assert [op.optimizer for op in ops] == ["", "", "AdamW"]


def test_the_script_refuses_to_measure_nothing(capsys):
    assert doctor.main(["advise", "--windows", "0"]) == 2
    assert "--windows 0" in capsys.readouterr().err
