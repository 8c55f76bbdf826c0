"""A run that made its steps and learned nothing is no finished one."""

from __future__ import annotations

import json
import math

import pytest
from running import summary

import train
from amp_core.config.errors import Diverged
from amp_core.config.rules import amp_config
from amp_core.run.evaluation import check_result

SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log=none", "batch_size=8", "doctor=off", "amp.max_consecutive_skips=1000", "run_dir=a"]


BF16, FP16 = amp_config("bf16"), amp_config("fp16")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_last_metric_that_is_not_finite_is_no_success(value):
    with pytest.raises(Diverged, match=r"loss (nan|inf|-inf) at the end, and 0 of 9 steps were skipped"):
        check_result({"accuracy": 0.5, "loss": value}, step=9, skipped=0, amp=BF16, scale=1.0)


def test_half_of_the_steps_may_be_skipped_and_not_more():
    check_result({"loss": 1.0}, step=10, skipped=5, amp=BF16, scale=1.0)
    check_result({"loss": 1.0}, step=10, skipped=5, amp=FP16, scale=2.0**20)
    for amp, scale in ((BF16, 1.0), (FP16, 2.0**16), (FP16, 2.0**20)):
        with pytest.raises(Diverged, match="6 of 10 steps"):
            check_result({"loss": 1.0}, step=10, skipped=6, amp=amp, scale=scale)


def test_the_search_for_a_loss_scale_is_no_failure():
    check_result({"loss": 1.0}, step=6, skipped=4, amp=FP16, scale=2.0**12)
    check_result({"loss": 1.0}, step=40, skipped=36, amp=FP16, scale=1.0)  # 16 halvings, and half of the steps
    with pytest.raises(Diverged):
        check_result({"loss": 1.0}, step=40, skipped=37, amp=FP16, scale=1.0)
    with pytest.raises(Diverged, match="36 of 40 steps"):  # still skipping at the smallest scale: nothing was found
        check_result({"loss": 1.0}, step=40, skipped=36, amp=FP16, scale=1.0, streak=3)


def test_a_run_without_a_single_taken_step_is_no_success_also_while_the_loss_scale_is_searched():
    check_result({"loss": 1.0}, step=6, skipped=5, amp=FP16, scale=2.0**11)
    with pytest.raises(Diverged, match=r"from 65536 to 1024 and no step was taken.* amp.init_scale=512"):
        check_result({"loss": 1.0}, step=6, skipped=6, amp=FP16, scale=2.0**10)
    low = amp_config("fp16", init_scale=8.0)
    with pytest.raises(Diverged, match="4 of 4 steps were skipped, expected at most half"):  # at the floor, 3 halvings
        check_result({"loss": 1.0}, step=4, skipped=4, amp=low, scale=1.0)


@pytest.mark.parametrize(
    "settings, said",
    [
        (["optimizer.lr=1e9", "schedule=constant", "steps=12"], "loss nan at the end"),
        (["debug.inject={where: batch, step: 1}", "steps=1"], "1 of 1 steps"),
        (["debug.inject={where: batch, step: 1}", "steps=1", "amp=fp16"], "from 65536 to 32768 and no step was taken"),
    ],
)
def test_a_run_that_diverged_says_so_and_ends_with_5_also_when_it_is_started_again(settings, said, own_folder, capsys):
    for _ in range(2):
        assert train.main([*SMALL, *settings]) == 5
        out, err = capsys.readouterr()
        assert said in err and err.count("error: diverged: ") == 1 and "finished" not in out
        assert (summary("a")["status"], summary("a")["exit_code"]) == ("diverged", 5)
    json.loads((own_folder / "a" / "summary.json").read_text())
    assert list((own_folder / "a" / "checkpoints").iterdir())


def test_log_none_prints_nothing_and_train_log_has_all(own_folder, capsys):
    assert train.main([*SMALL, "steps=3"]) == 0 and capsys.readouterr() == ("", "")
    assert "finished 3 steps" in (own_folder / "a" / "train.log").read_text()
