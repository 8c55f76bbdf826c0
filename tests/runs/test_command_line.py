"""Bad command lines end with exit code 2 and one message that names the key; nothing is created."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from test_hints import WORKS
from tiers import rows

import amp_core
import train
from amp_core.cli import compose, sweep
from amp_core.cli.job import check
from amp_core.cli.overrides import check_overrides, groups, typed_keys
from amp_core.config.errors import ConfigError
from amp_core.config.options import choices
from amp_core.config.rules import build
from recipes import find

ROOT = Path(__file__).resolve().parents[2]


def values_of(*overrides):
    return compose.compose(check_overrides(list(overrides), multirun=False)[0])


def typos(word):
    """Misspellings of a key: a letter less, a letter more, two letters swapped."""
    head, dot, tail = word.rpartition(".")
    if len(tail) > 3:
        yield f"{head}{dot}{tail[:1]}{tail[2:]}"
        yield f"{head}{dot}{tail[:-2]}{tail[-1]}{tail[-2]}"
    yield f"{head}{dot}{tail}x"


KEYS = [key for key in typed_keys() if not key.startswith("recipe")]
LEAVES = [key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)]
UNKNOWN = sorted({f"{typo}=1" for key in LEAVES for typo in typos(key)} - {f"{key}=1" for key in KEYS})[::2]

NUMBERS = [
    "steps", "epochs", "samples", "batch_size", "accumulation", "seed", "save_every", "eval_every", "log_every", "max_minutes",
    "amp.max_consecutive_skips", "layout.nproc_per_node", "layout.max_restarts", "layout.num_stages", "data.num_workers",
    "data.image_size", "optimizer.lr", "optimizer.weight_decay", "schedule.horizon", "checkpoint.keep", "ema.decay", "layout.timeout_minutes",
]  # fmt: skip
WRONG_TYPE = [f"{key}={value}" for key in NUMBERS for value in ("abc", "[1,2]", "{a: 1}", "true")]
WRONG_TYPE += ["steps=1.5", "batch_size=64.0", "seed=null", "deterministic=maybe", "dry_run=yes please"]
WRONG_TYPE += ["amp.keep_fp32=head", "amp.keep_fp32=[1,2]", "amp.scaling=7", "model.options=3", "data.path=[a]"]
WRONG_TYPE += ["amp=1", "amp=null", "amp=true", "model=1.5", "device=tpu", "task=test", "amp.dtype=float64", "ema=0.9"]
WRONG_TYPE += ["debug.inject=3", "debug.inject={where: nowhere, step: 1}", "debug.inject={where: batch}", "log=1"]
WRONG_TYPE += ["debug.inject={where: batch, step: 1, value: much}", "debug=null", "clip={max_norm: 3}", "layout=null"]

OUT_OF_RANGE = [f"{key}={value}" for key in NUMBERS if key not in ("seed", "layout.max_restarts") for value in (-1,)]
OUT_OF_RANGE += [f"{key}=0" for key in ("steps", "epochs", "samples", "batch_size", "accumulation", "log_every")]
OUT_OF_RANGE += ["optimizer.lr=inf", "optimizer.lr=nan", "epochs=nan", "ema.decay=1", "ema.decay=1.5", "seed=-1"]
OUT_OF_RANGE += ["layout.nnodes=0", "layout.nnodes=2:1", "layout.nnodes=a:b", "layout.max_restarts=-1", "run_dir=''"]
OUT_OF_RANGE += ["debug.inject={where: batch, step: 0}", "amp.max_consecutive_skips=0", "seed=9223372036854775808"]

NO_SUCH_NAME = [f"{group}={option}x" for group in groups() for option in choices(group)]
NO_SUCH_NAME += ["optimizer.name=AdamX", "optimizer.name=LBFGS", "optimizer.name=SparseAdam", "schedule.name=cosinus"]
NO_SUCH_NAME += ["schedule.name=ReduceLROnPlateau", "schedule.name=LambdaLR", "model.name=resnt18", "data.name=minst"]
NO_SUCH_NAME += ["recipe.name=clasification", "resume=/no/such/folder", "optimizer.options.momentum=0.9"]
NO_SUCH_NAME += ["schedule.options.gama=0.1", "model.options.witdh=8", "model.options.weights=IMAGENET1K_V1"]

BAD_SYNTAX = [
    "=", "=5", "steps", "steps 5", "[", "{", "amp.keep_fp32=[a", "amp.keep_fp32=a]", "steps=[", "debug.inject={",
    "a=b=", "steps=${nothing}", "steps=${oc.env:NO_SUCH_VARIABLE_HERE}", "steps=???", "~steps", "~amp", "~model",
    "amp@other=fp16", "+model@x=cnn", "amp=fp16 amp", "'", '"', "seed==1", "++", "+", "~", "steps=\x00",
    "steps=\udcff\udcfe", "\udcff=1", "+new=1", "+new.key=1", "++amp.other=1", "amp=fp16,bf16",
    "model.options={_target_: os.system}", "+recipe._target_=os.system", "+model.options._target_=os.system", "steps=range(1,3)", "seed=choice(1,2)", "amp=[fp16]", "hydra.job.chdir=true", "hydra.sweep.subdir=x",
    "hydra/launcher=joblib", "hydra.verbose=true", "--dry-run", "--amp=fp16", "-x", "-\u1346\u1e7ebW!mg",
]  # fmt: skip

HSDP = ["layout=hsdp", "layout.shard_size=2", "layout.nproc_per_node=2"]
PAIRS = {
    "amp.dynamic": ["amp=bf16", "amp.dynamic=false"],
    "amp.growth_factor": ["amp=fp16", "amp.growth_factor=1.0"],
    "amp.backoff_factor": ["amp=fp16", "amp.backoff_factor=1.0"],
    "amp.min_scale": ["amp=fp16", "amp.min_scale=1e9"],
    "clip.max_norm": ["clip=norm", "clip.max_norm=0"],
    "layout.nnodes": ["layout.nnodes=2"],
    "layout.rdzv_endpoint": ["layout=ddp", "layout.nnodes=2"],
    "layout.max_restarts": ["layout.max_restarts=3"],
    "layout.num_stages": ["layout.num_stages=2"],
    "layout=data_parallel": ["layout=data_parallel", "layout.nproc_per_node=2"],
    "layout=model_parallel": ["layout=model_parallel"],
    "layout.nproc_per_node=1000": ["layout=ddp", "layout.nproc_per_node=1000"],
    "optimizer.fused": ["optimizer.name=Adafactor", "optimizer.fused=true"],
    "optimizer.options.lr": ["optimizer.options.lr=1"],
    "cycle_momentum=false": ["schedule=one_cycle", "schedule.options.cycle_momentum=true"],
    "debug.inject.rank": ["debug.inject={where: batch, step: 1, rank: 3}"],
    "task=evaluate": ["task=evaluate"],
    "resume=never": ["task=evaluate", "resume=never", "run_dir=."],
    "resume=last": ["resume=last", "run_dir=somewhere"],
    "no unfinished run": ["resume=last"],
    "data.path": ["data=image_folder"],
    "data.path=/no/such": ["data=image_folder", "data.path=/no/such/folder"],
    "run_dir=/proc/version": ["run_dir=/proc/version"],
    "recipe.length=0": ["recipe.length=0"],
    "recipe.length=3 weeks": ["recipe.length='3 weeks'"],
    "amp.keep_fp32=['head']": ["amp=bf16", "amp.keep_fp32=[head]"],
    "layout.compress=bf16: has no effect with layout=fsdp": ["layout=fsdp", "layout.compress=bf16"],
    "layout.compress=fp16: expected": ["layout=ddp", "layout.compress=fp16"],
    "layout.gather_dtype=bfloat16: has no effect with layout=ddp": ["layout=ddp", "layout.gather_dtype=bfloat16"],
    "layout.gather_dtype=bfloat16: has no effect in amp=o2": [*HSDP, "amp=o2", "layout.gather_dtype=bfloat16"],
    "layout.gather_dtype=float8_e4m3fn: has one scale": [*HSDP, "amp=mxfp8", "layout.gather_dtype=float8_e4m3fn"],
    "layout.bucket_mb=0: expected a finite number above 0": ["layout=ddp", "layout.bucket_mb=0.0"],
    "layout.shard_optimizer=true: has no effect with layout=hsdp": [*HSDP, "layout.shard_optimizer=true"],
    "layout.compress=bf16: has no effect with amp=o2": ["layout=ddp", "amp=o2", "layout.compress=bf16"],
    "layout.static_graph=true: has no effect with amp": ["layout=ddp", "amp=bf16_pure", "layout.static_graph=true"],
    "layout.static_graph=true: recipe=gan": ["recipe=gan", "layout=ddp", "layout.static_graph=true"],
    "amp.hadamard=true: has no effect with amp.format=mxfp8; it is for nvfp4": ["amp=mxfp8", "amp.hadamard=true"],
    "amp.granularity=row: has no effect in amp=bf16": ["amp.granularity=row"],
    "amp.granularity=null: amp.format=fp8 needs a value": ["amp=fp8", "amp.granularity=null"],
    "amp.scale_rule=floor: has no effect with amp.format=nvfp4": ["amp=nvfp4", "amp.scale_rule=floor"],
    "amp.format=fp8: needs autocast to bfloat16": ["amp=fp16", "amp.format=fp8", "amp.granularity=row"],
    "'nix' matches none of the linear layers: 1, 4, 7": ["amp=fp8", "model=mlp", "amp.keep_bf16=[nix]"],
    "(15: 10 outputs: no multiple of 32)": ["amp=mxfp8"],
    "perf.channels_last": ["layout=fsdp", "perf.channels_last=true"],
    "doctor.statistics_every": ["layout=fsdp", "doctor.statistics_every=5"],
    "optimizer.name=Adafactor": ["layout=fsdp", "optimizer.name=Adafactor"],
    "layout.shard_size=null": ["layout=hsdp", "layout.nproc_per_node=4"],
    "layout.shard_size=2: has no effect": ["layout=fsdp", "layout.shard_size=2"],
    "layout.shard_size=3: does not divide the 4": ["layout=hsdp", "layout.shard_size=3", "layout.nproc_per_node=4"],
    "layout=fsdp: recipe=gan": ["layout=fsdp", "recipe=gan"],
    "perf.backend=indctor": ["perf=compile", "perf.backend=indctor"],
    "perf.compile=blocks: recipe=gan": ["perf=compile", "recipe=gan"],
    "perf.compile=blocks: layout=data_parallel": ["perf=compile", "layout=data_parallel"],
    "perf.recast_weights=true: layout=data_parallel": ["perf.recast_weights=true", "layout=data_parallel"],
    "perf.checkpoint_activations=true: model.name=mlp has no blocks": ["perf.checkpoint_activations=true", "model=mlp"],
    "perf.recast_weights=true: amp=fp32": ["perf.recast_weights=true", "amp=fp32"],
    "perf.recast_weights=true: amp=o2": ["perf.recast_weights=true", "amp=o2"],
    "perf.recast_weights=true: layout=fsdp": ["perf.recast_weights=true", "layout=fsdp"],
    "optimizer.fused=true: Muon": ["optimizer=muon", "optimizer.fused=true"],
    "optimizer.state_dtype=bfloat16: is for Adam": ["optimizer=muon", "optimizer.state_dtype=bfloat16"],
    "optimizer.name=Muon": ["optimizer=muon", "layout=fsdp", "layout.nproc_per_node=2"],
    "model.fresh: has no effect without model.weights": ['model.fresh=["fc"]'],
    "use model.weights=<file>, or": ["model.options.weights=DEFAULT"],
}
LONG = "n" * 256
DEEP = "/".join(["d" * 200] * 25)
MALFORMED = [[text] for text in (*UNKNOWN, *WRONG_TYPE, *OUT_OF_RANGE, *NO_SUCH_NAME, *BAD_SYNTAX)]
MALFORMED += PAIRS.values()
MALFORMED += [[f"amp={LONG}"], [f"model.name={LONG}"], ["--config-dir", LONG], ["-m", f"amp=fp32,{LONG}"]]


def refuse(arguments, capsys, folder):
    code = train.main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 2, (arguments, out, err)
    assert err.startswith("error: ") and err.count("error:") == 1, (arguments, err)
    assert "Traceback" not in err and not out, (arguments, err)
    assert len(err) < 2000, (arguments, err)
    assert not list(folder.iterdir()), arguments
    return err


@pytest.mark.parametrize("first", rows([0, 10], 0))
def test_malformed_command_lines_exit_with_2_and_one_message_and_create_nothing(first, tmp_path, own_folder, capsys):
    # Every tenth, since composing takes a tenth of a second; by name and message more of them are held below.
    for arguments in MALFORMED[first::20]:
        refuse(arguments, capsys, tmp_path)


@pytest.mark.parametrize(
    "overrides, group, options",
    [
        (["schedule.name=StepLR", "schedule.options.step_size=10"], "schedule", {"step_size": 10}),
        (["schedule.name=StepLR", "schedule.options={step_size: 10}"], "schedule", {"step_size": 10}),
        (["schedule=step", "schedule.options.gamma=0.5"], "schedule", {"step_size": 500, "gamma": 0.5}),
        (["model=cnn_small", "model.name=mlp"], "model", {}),
        (["optimizer=sgd", "optimizer.name=RMSprop", "optimizer.options.momentum=0.8"], "optimizer", {"momentum": 0.8}),
        (["recipe=language_model", "optimizer.name=SGD"], "optimizer", {}),
    ],
)
def test_another_name_drops_the_options_that_a_file_brought_and_keeps_those_that_were_typed(overrides, group, options):
    cfg = train.checked(overrides).cfg
    assert getattr(cfg, group).options == options


@pytest.mark.slow
def test_glob_chooses_options_and_a_pattern_without_any_is_refused(tmp_path, own_folder, capsys):
    planned, _ = sweep.plan(["amp=glob(fp*,exclude=*_*)", "recipe=glob(c*)"], find)
    chosen = [[f"amp={a}", f"recipe={b}"] for a in ("fp16", "fp32", "fp8") for b in ("classification", "contrastive")]
    assert [job for job in planned.jobs if "recipe=custom_function" not in job] == chosen
    assert "no such option" in refuse(["-m", "amp=glob(zz*)"], capsys, tmp_path)
    assert "amp=glob(fp*)" in refuse(["amp=glob(fp*)"], capsys, tmp_path)
    assert "options of a group" in refuse(["-m", "seed=glob(*)"], capsys, tmp_path)


def test_as_many_loaders_start_as_there_are_cores_unless_somebody_says_otherwise(monkeypatch):
    monkeypatch.setattr(compose, "num_cores", lambda: 3)
    found = [values_of(*typed)["data"]["num_workers"] for typed in (["data=image_folder"], ["data=cifar10"], [])]
    assert found == [3, 2, 0]
    assert values_of("data=image_folder", "data.num_workers=6")["data"]["num_workers"] == 6


def test_no_class_comes_in_by_an_interpolation_or_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIDDEN", "{_target_: os.getcwd}")
    hidden = "'${oc.decode:${oc.env:HIDDEN}}'"
    refuse([f"recipe.teacher={hidden}"], capsys, tmp_path)
    refuse(["-m", "seed=1,2", "hydra/launcher=joblib", f"hydra.launcher.backend={hidden}"], capsys, tmp_path)
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "conf")
    texts = [f"hydra: {{{key}: {{_target_: os.getcwd}}}}" for key in ("sweeper", "launcher")]
    texts += ["hydra: {callbacks: {a: {_target_: os.getcwd}}}", f"hydra: {{sweeper: {{params: {{seed: {hidden}}}}}}}"]
    texts += [
        "defaults: [{override /hydra/sweeper: optuna}]\nhydra: {sweeper: {params: {seed: {_target_: os.getcwd}}}}",
        "hydra: {sweeper: {params: {model.options: '{_target_: os.getcwd}'}}}",
        "model: {options: {_target_: os.getcwd}}",
    ]
    for number, text in enumerate(texts):
        (folder / f"bad{number}.yaml").write_text(f"# @package _global_\n{text}\n")
        assert train.main(["--config-dir=.", "-m", f"experiment=bad{number}", "steps=1,2"]) == 2
        said = capsys.readouterr().err
        assert "_target_" in said and "Traceback" not in said, (text, said)
    assert os.listdir(".") == ["experiment"]


@pytest.mark.parametrize("place", [LONG, f"a/{LONG}/b", DEEP, "ü" * 128])
@pytest.mark.parametrize(
    "arguments",
    [["run_dir="], ["resume="], ["data=image_folder", "data.path="], ["-m", "seed=1,2", "hydra.sweep.dir="]],
)
def test_names_and_paths_that_no_file_system_takes_are_refused(arguments, place, tmp_path, own_folder, capsys):
    *others, key = arguments
    said = refuse([*others, f"{key}{place}"], capsys, tmp_path)
    assert said.startswith(f"error: {key}{place[:20]}") and "longer than" in said


def test_the_jobs_of_a_sweep_share_what_hydra_composes(own_folder, monkeypatch):
    composed = []
    load = ConfigLoaderImpl._load_configuration_impl

    def counted(self, *args, **kwargs):
        composed.append(kwargs)
        return load(self, *args, **kwargs)

    def first_job(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    monkeypatch.setattr(train, "start", first_job)
    compose._read.cache_clear()
    command = ["-m", "hydra.sweep.dir=s", "amp=fp16,bf16", "optimizer.lr=0.1,0.2", "seed=range(4)"]
    assert len(sweep.plan(command[1:], find)[0].jobs) == 16 and train.main(command) == 130
    # The sweep and two modes here; by Hydra the sweep, when it is read and when it is run, and the first job. Each
    # takes a tenth of a second and more.
    assert len(composed) <= 3 + 4


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, how: "a" not in Path(path).parts and may(path, how))  # root may all
    for arguments in ([], ["run_dir=b"], ["-m", "seed=1,2"], ["-m", "seed=1,2", "hydra.sweep.dir=b"]):
        assert "is read-only" in refuse(arguments, capsys, tmp_path / "a")


def test_home_is_put_in_place_of_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values_of("data.path=~/a")["data"]["path"] == values_of("data.path='~/a'")["data"]["path"] == f"{tmp_path}/a"
    assert values_of("hydra.run.dir=~/b")["run_dir"] == f"{tmp_path}/b"
    assert values_of("run_dir='a~/b'")["run_dir"] == "a~/b"


@pytest.mark.parametrize("text", rows([*UNKNOWN[::10], *WRONG_TYPE[::5], *OUT_OF_RANGE[::3]], every=5))
def test_the_message_names_the_full_key(text, tmp_path, own_folder, capsys):
    assert text.split("=")[0] in refuse([text], capsys, tmp_path)


@pytest.mark.parametrize("key", rows(PAIRS, every=5))
def test_settings_that_contradict_each_other_are_refused_by_name(key, tmp_path, own_folder, capsys):
    assert key in refuse(["device=cpu", *PAIRS[key]], capsys, tmp_path)


def test_every_problem_stands_in_one_message(tmp_path, own_folder, capsys):
    bad = ["stepz=1", "amp=fp17", "accumulation=0", "seed=abc", "optimizer.name=Adm", "schedule.name=cos"]
    bad += ["clip.factor=1"]
    message = refuse(bad, capsys, tmp_path)
    for key in ("stepz", *bad[1:-1], "clip.factor"):
        assert key in message


WORKER = "error: python -m recipes is a worker of layout=ddp"
VERSION = f"amp-recipes {amp_core.__version__}, torch {version('torch')}, hydra "
PROCESSES = [
    (["train.py", "amp=fp16", "steps=\udcff"], 2, "error: 'steps="),
    (["-m", "recipes.classification"], 2, "error: recipes.classification is not a program; use python train.py"),
    (["-m", "recipes", "--help"], 2, WORKER),
    (["train.py", "seed=7", "--info=all", "steps=31"], 0, "steps: 31"),
]
CALLS = [
    (["layout=ddp", "steps=0"], 2, "error: steps=0"),
    (["-m", "amp=fp32,x"], 2, "error: amp=x"),
    (["--foo"], 2, "error: unrecognized arguments: --foo"),
    (["--shell-completion", "seed=1"], 2, "error: --shell-completion seed=1: Expecting one subcommand"),
    (["--version"], 0, VERSION),
    (["seed=7", "--cfg", "job", "steps=31"], 0, "steps: 31"),
    (["--hydra-help", "clip=norm"], 0, "Hydra"),
]


@pytest.mark.parametrize("arguments, code, said", CALLS, ids=lambda value: ascii(value))
def test_a_program_ends_with_its_code_and_creates_nothing(arguments, code, said, own_folder, capfd):
    try:
        ended = train.main(arguments)
    except SystemExit as end:
        ended = end.code or 0
    out, err = capfd.readouterr()
    assert ended == code and said in out + err and (not code or err.startswith(said)), err
    assert not list(own_folder.iterdir())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arguments, code, said", PROCESSES, ids=lambda value: ascii(value))
def test_a_process_ends_with_its_code_and_creates_nothing(arguments, code, said, tmp_path):
    encoded = [os.fsencode(str(ROOT / text) if text == "train.py" else text) for text in arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *encoded], cwd=tmp_path, env=environ, capture_output=True, text=True)
    out, err = done.stdout, done.stderr
    assert done.returncode == code and said in out + err and (not code or err.startswith(said)), err
    assert "Traceback" not in err and not list(tmp_path.iterdir())


def test_warnings_name_settings_without_effect():
    def warnings(*overrides):
        return " ".join(train.checked(list(overrides)).notes)

    assert "TF32" in warnings("amp=tf32", "device=cpu")
    assert "amp.growth_interval" in warnings("amp=fp16", "amp.dynamic=false", "amp.growth_interval=5")
    assert "above the cap" in warnings("amp=fp16", "amp.max_scale=1024")
    assert "ema.warmup" in warnings("ema.warmup=false") and not warnings("amp=fp32")
    assert "above the cap" not in warnings("amp=fp16_capped")


def test_defaults_of_the_scale_policy_are_those_of_the_contract():
    amp = build(values_of("amp=fp16")).amp
    assert (amp.init_scale, amp.growth_factor, amp.backoff_factor, amp.growth_interval) == (2.0**16, 2.0, 0.5, 2000)
    assert (amp.max_scale, amp.min_scale, amp.dynamic, amp.max_consecutive_skips) == (2.0**24, 1.0, True, 50)
    capped = build(values_of("amp=fp16_capped")).amp
    assert (capped.max_scale_per_sample, capped.growth_interval) == (128.0, 100)


def test_help_and_cfg_need_no_torch(tmp_path):
    for flag in (["--help"], ["--cfg", "job"]):
        code = f"import sys, runpy; sys.argv = ['train.py', *{flag}]\ntry: runpy.run_path('train.py', run_name='__main__')\n"
        code += "except SystemExit as e: assert not e.code, e.code\nassert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "accumulation" in done.stdout, done.stderr


def test_no_object_is_frozen_at_the_end():
    """nanobind, which binds Triton, lists each one that the last collection does not see: 40 lines after every run."""
    code = "import atexit, gc; gc.disable(); atexit.register(lambda: print(gc.get_freeze_count())); import train\n"
    program = [sys.executable, "-c", code + "train._begin()"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0\n", done


def test_cfg_job_prints_every_key_of_the_schema(capsys):
    assert train.main(["--cfg", "job"]) == 0
    out = capsys.readouterr().out
    for key in LEAVES:
        leaf = key.rpartition(".")[2]
        assert key.startswith("debug.inject") or re.search(rf"^\s*{leaf}:", out, re.MULTILINE), key


def test_the_samples_of_the_readme_are_what_the_program_prints(capsys):
    text = (ROOT / "README.md").read_text()
    sample = r"^    \$ python train\.py ([^#\n]*?) *(?:#.*)?\n((?:    (?!python|\$).*\n)+)"
    samples = re.findall(sample, text, re.MULTILINE)
    assert samples
    for arguments, shown in samples:
        assert train.main(arguments.split()) == 2
        assert capsys.readouterr().err == textwrap.dedent(shown)


def test_help_has_a_text_for_every_key_of_a_group(capsys):
    names = [group for group in groups() if group != "recipe"]
    assert train.main(["--help", *names]) == 0
    out = capsys.readouterr().out
    assert train.main(["--help", "ampp"]) == 2 and "Did you mean amp?" in capsys.readouterr().err
    for key in LEAVES:
        assert key.split(".")[0] not in names or f"{key} (" in out


def test_bash_completes_options_and_keys():
    ask = 'eval "$($PYTHON train.py -sc install=bash)"\n'
    ask += 'ask() { COMP_LINE="$1"; COMP_POINT=${#1}; COMP_CWORD=2; hydra_bash_completion; echo "${COMPREPLY[*]}"; }\n'
    ask += 'ask "python train.py amp=fp1"; ask "python train.py optimizer.w"\n'
    environ = os.environ | {"PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["amp=fp16", "amp=fp16_capped", "optimizer.weight_decay="], done.stderr


RANKS = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "changed, said",
    [
        *(
            (changed, "expected what torchrun sets")
            for changed in (
                {"RANK": "x"},
                {"RANK": "2"},
                {"WORLD_SIZE": "0"},
                {"LOCAL_RANK": "2"},
                {"LOCAL_WORLD_SIZE": "3"},
                {"LOCAL_WORLD_SIZE": None},
                {"MASTER_PORT": "x"},
                {"MASTER_PORT": "9" * 5000},
                {"MASTER_ADDR": None},
            )
        ),
        ({"TORCHELASTIC_RUN_ID": None}, "WORLD_SIZE=2: was not set by torchrun"),
        (dict.fromkeys(RANKS) | {"RANK": "1"}, "RANK=1: was not set by torchrun"),
    ],
)
@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_variables_of_torchrun_that_are_wrong_are_named_before_anything_starts(
    changed, said, layout, own_folder, monkeypatch, capsys
):
    for name, value in (RANKS | changed).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert said in refuse([f"layout={layout}", "device=cpu"], capsys, own_folder)


@pytest.mark.parametrize("given", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"RANK": ""}])
def test_variables_of_one_process_are_no_mistake(given, own_folder, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert train.checked(["device=cpu"]).cfg.layout.name == "single"


def test_null_in_place_of_any_value_is_taken_or_reported():
    values = values_of()
    for key in LEAVES:
        *groups, leaf = key.split(".")
        given = copy.deepcopy(values)
        group = functools.reduce(lambda group, name: group.get(name) or {}, groups, given)
        if group.get(leaf) is not None:
            group[leaf] = None
            with contextlib.suppress(ConfigError):
                check([], find, values=given)


DAMAGES = [*"=:@+~'\"\\\0\n\t ,.[]{}$é", "==", "++"]
VALUES = [
    "1e308", "-1e308", "1e999", "1e-400", "nan", "-inf", "1_000", "0x10", "0b1", "1e", "٣", f"{2**63}", f"{10**40}", "null", "''", "a b",
    "~", "/proc/self/mem", "/dev/null", "~root", "-", "*", "[]", "{}", "[[1]]", "{a: {b: [1]}}", "[null]", "{null: 1}", "{1: 2}", "[,]",
    "(1)", "choice(1)", "glob(*)", "sort(1,2)", "json_str(1)", "${steps}", "${amp.name}", "${oc.env:HOME}", "${oc.decode:1}", "${", "${}",
    "${.name}", "${..seed}", "\\${steps}",
]  # fmt: skip
SIZES = ("width", "depth", "image_size", "num_samples", "length", "num_classes")
"""A random number of gigabytes says nothing about the checks."""


@pytest.mark.slow
def test_command_lines_that_are_damaged_at_random_are_refused_in_one_message_or_planned(own_folder, capfd):
    known = [*(text for line in WORKS for text in line.split()), *(text for line in MALFORMED for text in line)]
    pool = [text for text in known if text not in ("-m", "--multirun", "hydra.mode=MULTIRUN")]  # a sweep makes a folder
    pool += [f"{key}=" for key in LEAVES if not key.endswith(SIZES)]
    rng = random.Random(0)
    for _ in range(60):
        line = rng.sample(pool, rng.choice([1, 1, 2, 3]))
        at = rng.randrange(len(line))
        line[at] += rng.choice(VALUES) if line[at].endswith("=") else ""
        where = rng.randrange(len(line[at]) + 1)
        if rng.random() < 0.4:
            line[at] = line[at][:where] + rng.choice(DAMAGES) + line[at][where + rng.randrange(2) :]
        try:
            code = train.main([*line, "dry_run=true", "device=cpu"])
        except SystemExit as end:  # of argparse
            code = end.code or 0
        out, err = capfd.readouterr()
        assert code in (0, 2) and "Traceback" not in out + err and len(err) < 5000, (line, err)
        assert out if code == 0 else err.startswith("error: ") and err.count("error: ") == 1, (line, out, err)
        assert not list(own_folder.iterdir()), line
