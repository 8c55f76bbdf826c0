"""The doctor of `amp_plugins` in other trainers: five faults, on one rank or on two, and a healthy run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import plugged_faults
import pytest

from amp_core.vision import import_torchvision

ROOT = Path(__file__).resolve().parents[2]

PLACES = {
    "data": ("", "before the window"),
    "log": ("aten.log", "h + torch.log(1.0 - is_bad.float())"),
    "root": ("aten.div", "square().sum(1, keepdim=True).sqrt()"),
    "mask": ("aten._softmax", "scores.softmax(-1) @ h"),
    "product": ("aten.addmm", "self.fc(x.where(~is_bad, 3e4))"),
}
"""Operation and line. Of `root` the backward pass of sqrt, which divides by it."""


@pytest.mark.slow
@pytest.mark.parametrize("trainer, ranks", [("accelerate", 2), ("transformers", 1), ("lightning", 2)])
def test_the_doctor_names_a_fault_in_another_trainer_and_the_weights_stay_sound(trainer: str, ranks: int) -> None:
    import_torchvision()  # Lightning would import it in a way that fails beside a CPU-only torch
    pytest.importorskip(trainer, reason="its doctor examines its steps")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start = [sys.executable] if ranks == 1 else start
    command = [*start, plugged_faults.__file__, trainer, *plugged_faults.FAULTS]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = {row["fault"]: row for row in map(json.loads, re.findall(r"^{\"fault\".*$", ended.stdout, re.MULTILINE))}
    assert rows.keys() == plugged_faults.FAULTS.keys()
    for fault, cause in plugged_faults.FAULTS.items():
        row = rows[fault]
        assert row["finite"], fault
        if cause is None:
            assert (row["reports"], row["skipped"]) == ([], 0)
            continue
        found, (op, code) = row["reports"][0], PLACES[fault]
        assert (found["cause"], found["op"]) == (cause, op), found["text"]
        assert code in (found["source"] if fault == "data" else found["code"])
        # Of one rank sample 21 is in the sixth micro-batch, of two in the third one of the second.
        assert (found["rank"], found["step"]) == ((0, 3) if ranks == 1 else (1, 2))
        assert f"micro-batch {2 if ranks == 1 else 1} of 2" in found["why"]
        if fault == "data":
            x = "x" if trainer == "transformers" else "batch[x]"
            assert f"It is {x} of" in found["why"]
            assert found["samples"] == [2 if (trainer, ranks) == ("lightning", 2) else 1]
        else:
            assert (found["module"] or "").endswith("block.fc" if fault == "product" else "block")
