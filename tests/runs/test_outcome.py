"""A run that made its steps and learned nothing is no finished one."""

from __future__ import annotations

import contextlib
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


OUTCOMES = [  # loss, steps, skipped of them, mode, the last loss scale, steps skipped in a row at the end, what is said
    *[
        (loss, 9, 0, BF16, 1.0, 0, f"loss {loss} at the end, and 0 of 9 steps were")
        for loss in (math.nan, math.inf, -math.inf)
    ],
    # Half of the steps may be skipped, and not more.
    (1.0, 10, 5, BF16, 1.0, 0, None),
    (1.0, 10, 5, FP16, 2.0**20, 0, None),
    (1.0, 10, 6, BF16, 1.0, 0, "6 of 10 steps"),
    (1.0, 10, 6, FP16, 2.0**16, 0, "6 of 10 steps"),
    (1.0, 10, 6, FP16, 2.0**20, 0, "6 of 10 steps"),
    # The search for a loss scale is no failure: 16 halvings, and half of the other steps.
    (1.0, 6, 4, FP16, 2.0**12, 0, None),
    (1.0, 40, 36, FP16, 1.0, 0, None),
    (1.0, 40, 37, FP16, 1.0, 0, "37 of 40 steps"),
    (1.0, 40, 36, FP16, 1.0, 3, "36 of 40 steps"),  # still skipping at the smallest scale: nothing was found
    # Without a single taken step nothing was learned, also while the scale is searched.
    (1.0, 6, 5, FP16, 2.0**11, 0, None),
    (1.0, 6, 6, FP16, 2.0**10, 0, r"from 65536 to 1024 and no step was taken.* amp.init_scale=512"),
    (1.0, 4, 4, amp_config("fp16", init_scale=8.0), 1.0, 0, "4 of 4 steps were skipped, expected at most half"),
]


@pytest.mark.parametrize("loss, step, skipped, amp, scale, streak, said", OUTCOMES)
def test_a_run_that_learned_nothing_is_no_success(loss, step, skipped, amp, scale, streak, said):
    with pytest.raises(Diverged, match=said) if said else contextlib.nullcontext():
        check_result({"loss": loss, "n": 1.0}, step=step, skipped=skipped, amp=amp, scale=scale, streak=streak)


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
