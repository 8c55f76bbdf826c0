"""The check of a GPU, rehearsed without one: its stages, what a killed one leaves, the packed wheels."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import wait_until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402
import pack_wheels  # noqa: E402

import train  # noqa: E402

STAGES = ["1", "2", "3", "4"]
MOST_SECONDS, SHOWN = 540, 12_000
"""What a command on a GPU machine may take, and how many characters of its output are seen."""


class Machine:
    """Runs stages with a stand-in for Python that writes down its arguments, and one for `timeout` that does so, too."""

    def __init__(self, folder: Path) -> None:
        self.out, self._bin, self._told = folder / "out", folder / "bin", folder / "told"
        self._bin.mkdir()
        self._told.mkdir()
        self._write(
            "python",
            f"""
echo "$@" >> {self._told}/calls
case "$*" in
    *"$SLOW"*) echo $$ >> {self._told}/asleep; exec sleep 60;;
    *"$STUBBORN"*) (trap "" TERM; echo $BASHPID >> {self._told}/left; exec sleep 60) & sleep 60;;
    *"$BAD"*) exit 3;;
esac
echo done: "$2"
""",
        )
        real = shutil.which("timeout")
        self._write(
            "timeout",
            f'echo "$3" >> {self._told}/limits; [ -n "$HASTE" ] && exec {real} -k 10 $HASTE "${{@:4}}"\nexec {real} "$@"',
        )

        self._write("date", f"echo $(( $({shutil.which('date')} +%s%3N) * ${{PACE:-1}} / 1000 ))")

    def _write(self, name: str, text: str) -> None:
        (self._bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self._bin / name).chmod(0o755)

    def start(self, stage: str, **environ: str) -> subprocess.Popen[str]:
        """A stage in a process group of its own. `SLOW`, `BAD`, `STUBBORN`: of the command lines that hang, fail, leave a process."""
        path = f"{self._bin}:{os.environ['PATH']}"
        names = {"PATH": path, "PYTHON": "python", "OUT": str(self.out), "HASTE": ""}
        names |= dict.fromkeys(("SLOW", "BAD", "STUBBORN"), "nothing")
        command = ["bash", str(ROOT / "scripts/gpu_check.sh"), stage]
        plain = {k: v for k, v in os.environ.items() if k not in ("TINY", "DEVICE", "SECONDS_LEFT")}
        return subprocess.Popen(
            command, env=plain | names | environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, stage: str, **environ: str) -> tuple[int, str]:
        process = self.start(stage, **environ)
        shown = process.communicate(timeout=120)[0]
        return process.returncode, shown

    def told(self, what: str) -> list[str]:
        file = self._told / what
        return file.read_text().splitlines() if file.exists() else []

    def archive(self, stage: str) -> dict[str, str]:
        with tarfile.open(self.out / f"stage{stage}.tar.gz") as tar:
            files = [member for member in tar.getmembers() if member.isfile()]
            return {Path(file.name).name: tar.extractfile(file).read().decode() for file in files}  # type: ignore[union-attr]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.told("asleep"):  # what a killed stage has left
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_leaves_one_archive_of_all_its_steps(stage: str, machine: Machine) -> None:
    code, shown = machine.run(stage)
    assert code == 0 and len(shown) < SHOWN and os.listdir(machine.out) == [f"stage{stage}.tar.gz"]
    found = machine.archive(stage)
    summary = found["summary.txt"].splitlines()
    assert summary and all(re.fullmatch(r"### \w+: ok, \d+ s", line) for line in summary)
    assert found.keys() == {"summary.txt"} | {line.split()[1][:-1] + ".txt" for line in summary}
    assert all(0 < int(limit) <= MOST_SECONDS for limit in machine.told("limits"))


def test_a_stage_that_is_killed_loses_the_step_at_work(machine: Machine) -> None:
    process = machine.start("1", SLOW="-m pytest")
    wait_until(lambda: any("-m pytest" in call for call in machine.told("calls")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert machine.archive("1").keys() == {"versions.txt", "summary.txt"}
    assert machine.archive("1")["summary.txt"].count(": ok") == 1


def test_what_no_time_is_left_for_is_said_and_no_failure(machine: Machine) -> None:
    """By a clock that is ten times as fast: of 24 seconds 20 are over when the tests are stopped after 2."""
    code, shown = machine.run("1", SLOW="-m pytest", SECONDS_LEFT="24", PACE="10", HASTE="2")
    assert code == 0 and re.search(r"### tests: stopped after 2\d s", shown)
    assert (
        "### run_classification_bf16: left out, no time" in shown and "left out" in machine.archive("1")["summary.txt"]
    )


def test_a_step_that_fails_or_hangs_is_a_failure_and_the_others_run(machine: Machine) -> None:
    code, shown = machine.run("1", BAD="amp=fp16")
    assert code == 1 and "### run_classification_fp16: FAILED with 3" in shown and "### mlp: ok" in shown
    code, shown = machine.run("1", SLOW="amp=bf16", HASTE="1")
    assert code == 1 and "### run_classification_bf16: stopped after 40 s" in shown and "### mlp: ok" in shown


def test_what_a_step_has_started_ends_with_it(machine: Machine) -> None:
    """Also a process that outlives a SIGTERM, such as a server that forks workers: it would hold memory of the GPU."""
    code, shown = machine.run("1", STUBBORN="amp=bf16", HASTE="1")
    assert code == 1 and "### run_classification_bf16: stopped after 40 s" in shown
    (left,) = machine.told("left")
    state = subprocess.run(["ps", "-o", "stat=", "-p", left], capture_output=True, text=True).stdout
    assert not state or state.startswith("Z")


def test_a_stage_that_does_not_exist_is_refused(machine: Machine) -> None:
    for stage in ("", "5"):
        assert machine.run(stage)[0] == 2
    assert not machine.out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_command_of_a_stage_is_one_that_its_program_takes(
    stage: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of full size, which no CPU can run; one layer stands for twelve, and one value of `perf` and one mode are built."""
    machine.run(stage, DEVICE="cpu")
    calls = [call.split() for call in machine.told("calls")]
    built = set[str]()
    parser = bench.parser_of(bench.found())
    monkeypatch.chdir(tmp_path)
    for call in calls:
        if call[0] == "scripts/bench.py":
            flags = parser.parse_args(call[1:])
            for recipe in flags.recipes.split(",") if flags.what == "modes" else ():
                varied, _, values = (flags.vary or "seed=0").partition("=")
                settings = [f"recipe={recipe}", "device=cpu", "dry_run=true", *flags.set]
                settings = [text.replace("depth=12", "depth=1") for text in settings]
                for value in values.split(","):
                    train.checked([*settings, f"{varied}={value}"])
                # What only large memories hold is not built here.
                if "data.num_classes" not in varied:
                    assert train.main([*settings, f"{varied}={value}"]) == 0, settings
        elif call[0] == "train.py":
            cfg = train.checked(call[1:]).cfg
            assert cfg.recipe["name"] in built or train.main([*call[1:], "dry_run=true"]) == 0, call
            built.add(cfg.recipe["name"])
    assert sum(call[0] in ("scripts/bench.py", "train.py") for call in calls) >= 5


def test_wheels_that_cannot_be_installed_are_refused(tmp_path: Path) -> None:
    wanted = [*pack_wheels.BUILT, *pack_wheels.WITH_NEEDS, *pack_wheels.ALONE]
    files = [tmp_path / f"{name.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl" for name in wanted]
    for file in files:
        file.touch()
    assert pack_wheels.problems(tmp_path) == []
    (tmp_path / "omegaconf-2.0-py3-none-any.whl").touch()
    (tmp_path / "hydra_core-1.0-py3-none-any.whl").unlink()
    with files[-1].open("wb") as wheel:
        wheel.truncate(pack_wheels.MOST + 1)
    assert [problem.split(":")[0] for problem in pack_wheels.problems(tmp_path)] == [
        "omegaconf",
        "hydra_core",
        str(tmp_path),
    ]
