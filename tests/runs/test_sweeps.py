"""Sweeps: GPUs are leased, jobs have processes of their own, searches survive kills, published numbers are recorded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from running import state, summary, wait_until
from shared import script
from small import RUN

import train
from amp_core.cli import compose, sweep
from amp_core.cli.job import check
from amp_core.cli.lease import lease, visible_devices
from amp_core.cli.run_folders import sweep_subdir
from amp_core.config.errors import ConfigError
from amp_core.run.locks import lock_folder
from recipes import find

ROOT = Path(__file__).resolve().parents[2]
SMALL = [*RUN, "save_every=1000000", "eval_every=1000000", "log_every=1"]


pytestmark = pytest.mark.usefixtures("own_folder")


HOLD = """
import subprocess, sys, time
from pathlib import Path
from amp_core.cli.job import check
from amp_core.cli.lease import lease
name, count, devices = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
with lease(count, devices, Path("leases"), waiting=lambda: Path(name + ".waits").touch()) as taken:
    child = None
    if "child" in name:  # a job that outlives who started it
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=taken.values())
    Path(name).write_text(",".join(taken) + " " + str(child.pid if child else 0))
    time.sleep(60)
"""


@pytest.fixture
def holder():
    """`holder(name, count)` starts a process that leases devices and writes them into a file of its name."""
    started = []

    def start(name, count, devices="a,b,c"):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen([sys.executable, "-c", HOLD, name, str(count), devices], env=environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def devices_of(name):
    wait_until(lambda: Path(name).exists() and Path(name).read_text())
    return set(Path(name).read_text().split()[0].split(","))


def test_processes_get_disjoint_devices_in_line_and_a_killed_one_leaves_none_taken(holder):
    first, second = holder("first", 1), holder("child", 1)
    taken = devices_of("first") | devices_of("child")
    assert len(taken) == 2
    holder("both", 2)  # one is free, two are needed
    wait_until(Path("both.waits").exists)
    holder("late", 1)  # may not overtake, though one would do
    wait_until(Path("late.waits").exists)
    time.sleep(0.5)
    assert not Path("both").exists() and not Path("late").exists()
    second.kill()
    second.wait()
    time.sleep(0.5)
    assert not Path("both").exists()  # its job still computes there
    os.kill(int(Path("child").read_text().split()[1]), signal.SIGKILL)
    assert devices_of("both") == {"a", "b", "c"} - devices_of("first") and not Path("late").exists()
    first.kill()
    assert devices_of("late") == devices_of("first")


def test_a_lease_asks_for_no_more_than_there_is_and_can_be_given_up(tmp_path):
    with pytest.raises(ValueError, match="3 devices asked for, and there are 2"), lease(3, ["0", "1"], tmp_path):
        pass
    with lease(2, ["0", "1"], tmp_path) as taken:
        assert list(taken) == ["0", "1"]
        with pytest.raises(InterruptedError), lease(1, ["0", "1"], tmp_path, given_up=lambda: True):
            pass
    with lease(2, ["0", "1"], tmp_path):
        pass


def test_a_folder_without_locks_is_an_error_and_nothing_to_wait_for(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="No locks"), lease(1, ["0"], tmp_path, given_up=lambda: True):
        pass


def test_a_present_choice_of_gpus_is_respected(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-1234, 3")
    assert visible_devices(3) == ["6", "GPU-1234", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices(2) == ["0", "1"]


def test_folders_are_named_after_what_is_varied_and_stay_those_of_their_jobs():
    def folders(*jobs):
        sweep.begin(Path("s"), [job.split() for job in jobs])
        found = [sweep_subdir("s", job.split()) for job in jobs]
        for folder in found:
            Path("s", folder).mkdir(parents=True, exist_ok=True)
        return [folder.rpartition("-")[0] for folder in found]

    assert folders("amp=bf16 steps=3") == ["amp=bf16,steps=3"]  # of a single job nothing is varied
    assert folders("amp=bf16 steps=4", "amp=fp16 steps=4") == ["amp=bf16", "amp=fp16"]
    later = ["amp=bf16 steps=4", "amp=bf16 seed=1 steps=4", "amp=bf16 steps=3"]
    assert folders(*later) == ["amp=bf16", "seed=1,steps=4", "amp=bf16,steps=3"]
    assert len(list(Path("s").iterdir())) == 5  # and .jobs


@pytest.mark.slow
def test_a_killed_job_fails_alone_and_a_signal_saves_the_others():
    settings = [*SMALL, "-m", "hydra.sweep.dir=s", "seed=1,2", "steps=1000000", "schedule=constant"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *settings, *launcher],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: len(list(Path("s").glob("*/metrics.jsonl"))) == 2, seconds=120)
    folders = sorted(path.parent for path in Path("s").glob("*/metrics.jsonl"))
    owners = [int((folder / ".lock").read_text().split()[1]) for folder in folders]
    threads = json.loads((folders[0] / "environment.json").read_text())["threads"]
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else threads
    os.kill(owners[0], signal.SIGKILL)
    wait_until(lambda: sweep.read_record(Path("s"), folders[0].name))
    process.send_signal(signal.SIGTERM)  # to the sweep alone
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143, said
    assert summary(folders[1])["status"] == "preempted" and state(folders[1])["progress"]["step"] > 0
    records = [sweep.read_record(Path("s"), folder.name) for folder in folders]
    assert [(r.status, r.exit_code, r.error) for r in records] == [
        ("failed", 1, "killed by SIGKILL"),
        ("preempted", 143, None),
    ]
    assert "0 of 2 jobs finished; the report: python scripts/report.py s" in said and "killed by SIGKILL" in said


def test_lines_of_jobs_side_by_side_say_whose_they_are(capfd):
    code = "import os, sys; print(os.environ['NO_COLOR']); print('two', flush=True); print('warning: three\\nerror: four', file=sys.stderr); sys.exit(1)"
    assert sweep.run_apart([sys.executable, "-c", code], Path("s"), environ={}, name="seed=1") == (1, "four")
    out, err = capfd.readouterr()
    assert out == "seed=1 | 1\nseed=1 | two\n" and err == "seed=1 | warning: three\nseed=1 | error: four\n"


@pytest.mark.slow
@pytest.mark.parametrize("in_worker", [False, True])
def test_a_job_goes_on_without_the_shell_that_started_the_sweep_and_not_without_the_sweep(in_worker):
    """A worker of a launcher that is gone ends its job by SIGTERM, and then itself: nobody waits for either."""
    job = "import pathlib as p, time; p.Path('began').touch(); time.sleep(1); p.Path('done').touch()"
    run = f"""
import fcntl, sys
from pathlib import Path
from amp_core.cli.sweep import run_apart
held = open("held", "w")
fcntl.flock(held, fcntl.LOCK_EX)
ended = run_apart([sys.executable, "-c", {job!r}], Path("s"), environ={{}}, in_worker={in_worker})
Path("code").write_text(str(ended[0]))
"""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "RUN": run}
    shell = f'"{sys.executable}" -c "$RUN" & while [ ! -e began ] && kill -0 $!; do sleep 0.05; done'  # and is gone
    subprocess.run(["sh", "-c", shell], env=environ, check=True, timeout=60)
    with open("held") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # when the process has ended
    assert [Path(name).exists() for name in ("done", "code")] == [not in_worker] * 2
    assert in_worker or Path("code").read_text() == "0"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_jobs_side_by_side_have_a_gpu_each_or_take_turns():
    settings = [*SMALL, "-m", "device=cuda", "hydra.sweep.dir=s", "seed=1,2,3", "steps=3", "hydra/launcher=joblib"]
    subprocess.run([sys.executable, ROOT / "train.py", *settings, "hydra.launcher.n_jobs=3"], check=True, timeout=300)
    records = [json.loads(path.read_text()) for path in Path("s/.jobs").glob("*.json")]
    assert [record["status"] for record in records] == ["finished"] * 3
    assert all(len(record["devices"]) == 1 for record in records)
    assert {summary(Path("s", record["folder"]))["device"] for record in records} == {"cuda"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("search", [[], ["hydra/sweeper=optuna", "hydra.sweeper.num_trials=2"]], ids=["all", "search"])
def test_a_second_sweep_in_a_folder_is_refused_before_it_changes_what_the_first_one_wrote(search, capsys):
    if search:
        pytest.importorskip("optuna")
    command = [*SMALL, "-m", "hydra.sweep.dir=s", "steps=1", "seed=1,2", *search]
    assert train.main(command) == 0
    before = {path: path.read_bytes() for path in Path("s").rglob("*") if path.is_file()}
    with lock_folder(Path("s")):  # as the first one has it while it runs
        capsys.readouterr()
        assert train.main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: hydra.sweep.dir=s: is being written by process ") and said.count("\n") == 1
        assert "wait for it, or choose another folder" in said
        after = {path: path.read_bytes() for path in Path("s").rglob("*") if path.is_file()}
        assert {path for path in after if after[path] != before.get(path)} <= {Path("s/.lock")}
    assert train.main(command) == 0


@pytest.mark.slow
def test_a_search_that_was_cut_off_tries_what_an_undisturbed_one_tries(capsys):
    optuna = pytest.importorskip("optuna")
    space = ["optimizer=sgd", "optimizer.lr=tag(log,interval(1e-3,1e15))", "accumulation=1,2", "steps=3"]
    space += ["amp.max_consecutive_skips=1", "doctor=off", "hydra/sweeper=optuna", "hydra.sweeper.num_startup=2"]

    def search(folder, num_trials):
        code = train.main([*SMALL, "-m", f"hydra.sweep.dir={folder}", *space, f"hydra.sweeper.num_trials={num_trials}"])
        assert code == 0, capsys.readouterr()
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{folder}/optuna.journal"))
        return optuna.load_study(study_name="search", storage=storage)

    def told(study):
        return [(trial.number, trial.state.name, trial.value, trial.params) for trial in study.trials]

    whole = told(search("a", 5))
    assert {state for _, state, _, _ in whole} == {"COMPLETE", "PRUNED"}  # some learning rates diverge
    # What a kill leaves: a trial with values and half a run, half a line, a lock.
    study = search("b", 3)
    journal = Path("b/optuna.journal").read_bytes()
    last = journal.rindex(b'"state"')  # the result of the last trial
    Path("b/optuna.journal").write_bytes(journal[: last - 3])
    Path("b/optuna.journal.lock").symlink_to("optuna.journal")
    shutil.rmtree(Path("b", study.trials[-1].user_attrs["folder"], "checkpoints"))
    assert told(search("b", 5)) == whole
    results = compose.OmegaConf.load("b/optimization_results.yaml")
    assert results.best.value == max(value for _, state, value, _ in whole if state == "COMPLETE")
    assert results.finished + results.diverged == len(results.trials) == 5
    capsys.readouterr()
    assert train.main([*SMALL, "-m", "hydra.sweep.dir=b", *space, "clip=norm"]) == 2  # another search
    assert "holds another search" in capsys.readouterr().err


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name, make, optuna",
    [
        (".jobs", os.mkfifo, False),
        (".jobs", lambda path: path.symlink_to("."), False),
        ("optuna.journal", os.mkfifo, True),
        ("optuna.journal", lambda path: path.write_bytes(bytes(range(256)) + b"\n"), True),
        ("optuna.journal", lambda path: path.write_text("[1, 2]\n"), True),
        ("optuna.journal", lambda path: path.write_text('{"op_code": 99}\n'), True),
        ("optuna.journal", lambda path: os.truncate(path, path.write_text("x") << 40), True),
    ],
)
def test_what_is_no_file_of_a_sweep_is_named(name, make, optuna, capsys):
    if optuna:
        pytest.importorskip("optuna")
    Path("s").mkdir()
    make(Path("s", name))
    search = ["hydra/sweeper=optuna", "hydra.sweeper.num_trials=1"] if optuna else []
    assert train.main([*SMALL, "-m", "hydra.sweep.dir=s", "steps=1", "seed=1,2", *search]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and f"s/{name}" in said and "choose another folder" in said


@pytest.fixture
def results():
    return script("scripts/results.py")


def test_pages_show_the_numbers_of_the_record(results):
    record = results.load()
    assert set(record) <= set(results.experiments())
    for path, text in results.pages(record).items():
        assert text == path.read_text(), (
            f"{path.name} differs from docs/results.json: python scripts/results.py --write"
        )
    changed = record["parity_custom_function"]["runs"]
    for run in changed:
        run["value"] -= 0.5 * (run["group"] == "bf16")
    texts = results.pages(record)
    for page in (*results.PAGES, ROOT / "conf" / "experiment" / "parity_custom_function.yaml"):
        assert texts[page] != page.read_text()
    assert "worse: custom_function" in texts[ROOT / "README.md"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", json.loads((ROOT / "docs" / "results.json").read_text()))
def test_the_command_of_a_record_makes_its_runs(name, results):
    entry = results.load()[name]
    assert entry["command"] == f"python train.py -m experiment={name}"
    assert f"#   {entry['command']}\n" in (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    planned = compose.sweep_of([f"experiment={name}"])
    assert planned.dir == f"multirun/results/{name}"
    jobs = [(results.group_of(job), [text for text in job if text.startswith("seed=")]) for job in planned.jobs]
    assert jobs == [(run["group"], [f"seed={run['seed']}"]) for run in entry["runs"]]


def entry_of(**values):
    runs = [{"group": mode, "seed": seed, "value": v} for mode, found in values.items() for seed, v in found.items()]
    return {"runs": runs, "better": "max"}


def test_what_is_not_settled_gets_as_many_seeds_as_the_report_asks_for(results, monkeypatch):
    monkeypatch.setattr(results, "conf_dir", lambda: Path())
    Path("experiment").mkdir()
    file, text = Path("experiment/parity_x.yaml"), "    params:\n      amp: fp32,bf16\n      seed: range(1,11)\n"

    def seeds_after(num, noise, gap=0.0):
        file.write_text(text)
        fp32 = dict.fromkeys(range(num), 0.9)
        bf16 = {seed: 0.9 + gap + noise * (-1) ** seed for seed in range(num)}
        added = results.add_seeds("parity_x", entry_of(fp32=fp32, bf16=bf16))
        assert added == (file.read_text() != text)
        return file.read_text().removeprefix(text.removesuffix("range(1,11)\n")).strip() if added else None

    assert seeds_after(10, 0.001) is None  # equal
    assert seeds_after(10, 0.001, gap=0.01) is None  # better
    # 33 is the first n with t(0.975, n - 1) * 0.012 * sqrt(10 / 9) / sqrt(n) within the margin, 0.0045; for 0.008 it is 16.
    assert seeds_after(10, 0.008) == "range(1,21)"
    assert seeds_after(10, 0.012) == "range(1,34)"
    assert seeds_after(10, 0.02) == seeds_after(35, 0.02) == "range(1,41)"
    assert seeds_after(40, 0.02) is None  # stays open, and is printed so


@pytest.mark.slow
def test_an_experiment_names_its_command_and_composes():
    for path in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert re.search(rf"python train.py (-m )?experiment={path.stem}\b", path.read_text()), path
        values = compose.compose([f"experiment={path.stem}"], to_show=True)
        is_lost = str(values["data"]["path"]).startswith("statsmodels:") and not find_spec("statsmodels")
        if values["data"]["name"] not in ("imagenet", "chat", "text") and not is_lost:
            check([], find, values=values)
            continue
        # Data that nobody ships, or of a package that is not installed.
        said = r"data\.path=\S*: needs the package statsmodels" if is_lost else r"data\.path=null: "
        with pytest.raises(ConfigError, match=rf"(?m)^{said}[^\n]*$"):
            check([], find, values=values)


def test_a_sweep_into_the_folder_of_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert train.main(["-m", *SMALL, "seed=1,2", f"hydra.sweep.dir={tmp_path}/run"]) == 2
    assert "run: holds a run; choose another folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_a_dry_sweep_writes_nothing_and_promises_no_report(capsys):
    assert train.main(["-m", "amp=fp32,fp16", "dry_run=true", "device=cpu", "data=synthetic"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 jobs finished" in said and "report" not in said
    assert not list(Path.cwd().iterdir())


def test_a_length_on_the_command_line_takes_the_place_of_that_of_an_experiment():
    experiment = "experiment=smollm2_chat"
    assert compose.compose([experiment])["epochs"] == 2
    for typed, lengths in {"steps=6": (6, None), "epochs=3": (None, 3), "epochs=null": (None, None)}.items():
        values = compose.compose([experiment, typed])
        assert (values["steps"], values["epochs"]) == lengths
    both = compose.compose([experiment, "steps=6", "epochs=3"])
    assert (both["steps"], both["epochs"]) == (6, 3)  # which is refused
