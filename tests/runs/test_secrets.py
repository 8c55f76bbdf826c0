"""No key and no password in any byte that a run writes or prints: the usual kinds, through every entrance."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import Forked, lines, state
from secret_kinds import ENVIRON, KINDS, VALUE_OF, found_in, leaks
from small import RUN
from tiers import rows

import train
from amp_core.cli.overrides import quoted
from amp_core.config import redact as redact_module
from amp_core.config.redact import holds_secret, known_secrets, redact, secrets_in
from amp_core.run.loop import Loop

ROOT = Path(__file__).resolve().parents[2]
SMALL = [*RUN, "save_every=2", "eval_every=2", "amp=bf16", "steps=4"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for variable, value in ENVIRON.items():
        monkeypatch.setenv(variable, value)


def everything():
    return {path: path.read_bytes() if path.is_file() else None for path in Path("..").rglob("*")}


def taken(key):
    """An override that takes a value from the environment."""
    return lambda value: [f"{key}=${{oc.env:ENTRANCE}}"]


ENTRANCES = {
    "known key": lambda value: [quoted("log.wandb_project", value)],
    "run name": lambda value: [quoted("log.wandb_name", value)],
    "list": lambda value: [f"log.wandb_tags=[a,{quoted('', value)[1:]}]"],
    "path of data": lambda value: [quoted("data.path", value)],
    "run folder": lambda value: [quoted("run_dir", f"runs/{value}")],
    "constructor": lambda value: [quoted("model.options.x", value)],
    "dictionary": lambda value: [f"model.options={{x: {quoted('', value)[1:]}}}"],
    "unknown key": lambda value: [quoted("+mine", value)],
    "no key": lambda value: [value],
    "flag": lambda value: [f"--config-dir={value}"],
    "another flag": lambda value: [f"--wandb_key={value}"],
    "group": lambda value: [f"amp={value}"],
    "number": lambda value: [quoted("seed", value)],
    "name of a key": lambda value: [f"+{value}=1"],
    "broken list": lambda value: [f"steps=[{value}"],
    "start": lambda value: [quoted("resume", value)],
    "axis of a sweep": lambda value: ["-m", f"log.wandb_group=a,{quoted('', value)[1:]}"],
    "folder of a sweep": lambda value: ["-m", "seed=1,2", quoted("hydra.sweep.dir", f"x/{value}")],
    "sweeper": lambda value: ["-m", f"hydra.sweeper.params={{log.wandb_group: {quoted('', value)[1:]}}}"],
    "taken by a known key": taken("log.wandb_project"),
    "taken by a path": taken("data.path"),
    "taken by the run folder": lambda value: ["run_dir=x/${oc.env:ENTRANCE}"],
    "taken by a constructor": taken("model.options.x"),
    "taken by the folder of a sweep": lambda value: ["-m", "seed=1,2", "hydra.sweep.dir='x/${oc.env:ENTRANCE}'"],
    "taken by an axis": lambda value: ["-m", "log.wandb_group=a,${oc.env:ENTRANCE}"],
    "in a file": lambda value: ["--config-dir", "../own", "experiment=mine"],
}


@pytest.mark.parametrize("entrance", rows(ENTRANCES, "taken by a known key"))
def test_a_secret_in_a_setting_is_refused_unseen(entrance, monkeypatch, capfd):
    """Exit code 2, one message, nothing created, and none of its bytes in what is said.

    Every kind through one entrance, and a third of them through each other one.
    """
    Path("../own/experiment").mkdir(parents=True)
    wrong = []
    third = list(ENTRANCES).index(entrance) % 3
    for kind in KINDS if entrance == "taken by a known key" else KINDS[third::3]:
        monkeypatch.setenv("ENTRANCE", kind.value)
        text = "# @package _global_\nlog:\n  wandb_project: ${oc.env:ENTRANCE}\n"
        Path("../own/experiment/mine.yaml").write_text(text)
        monkeypatch.delenv("AMP_RECIPES_CONFIG_DIR", raising=False)
        before = everything()
        code = train.main([*SMALL, *ENTRANCES[entrance](kind.value)])
        said = "".join(capfd.readouterr())
        clean = code == 2 and said.count("error: ") == 1 and "Traceback" not in said and everything() == before
        if not clean or found_in(said.encode()):
            wrong.append((kind.name, code, found_in(said.encode()), said[:300]))
    assert not wrong


def test_without_the_check_the_key_is_in_the_run_folder(monkeypatch):
    """What the test above would find."""
    monkeypatch.setattr(redact_module, "redact", lambda text: text)
    monkeypatch.setattr("amp_core.cli.compose.secrets_in", lambda *_: [])
    monkeypatch.setattr("amp_core.cli.run_folders.holds_secret", lambda text: False)
    assert train.main([*SMALL, "steps=2", f"log.wandb_project={VALUE_OF['GitHub']}", "run_dir=run"]) == 0
    places = {Path(text.rpartition(" in ")[2]).name for text in leaks(Path())}
    assert {"config.yaml", "overrides.yaml", "state.pt"} <= places


@pytest.mark.parametrize("fails", [True, False])
def test_no_byte_of_a_run_that_meets_them_all_is_one_of_a_secret(fails, monkeypatch, capfd):
    """Metrics, messages, warnings, statistics and a chain of exceptions that have every kind in them."""
    texts = [kind.value for kind in KINDS]

    def after(self, *args, original=Loop._after_step, **named):
        yield from original(self, *args, **named)
        logger = logging.getLogger("amp_recipes")
        for text in texts:
            logger.info("a message: %s", text)
            logger.warning("a warning: %r", {"headers": {"Authorization": f"Bearer {text}"}, text: [text]})
        self._log.metrics({"step": self.step, "split": "mine", "texts": texts, **dict.fromkeys(texts, 1.0)})
        self._log.statistics({"step": self.step, "layers": {}, "texts": texts})
        self.env.summary["texts"] = dict.fromkeys(texts, texts)
        if fails and self.step == 3:
            try:
                raise KeyError(*texts)
            except KeyError as problem:
                raise RuntimeError(f"no answer: {texts}\n" + "\n".join(texts)) from problem

    monkeypatch.setattr(Loop, "_after_step", after)
    monkeypatch.setattr("sys.argv", ["train.py", *texts])
    monkeypatch.setenv("UNSEEN", "no variable is recorded")
    assert train.main([*SMALL, "run_dir=run"]) == int(fails)
    said = "".join(capfd.readouterr())
    assert "a message: " in said and "a warning: " in said and found_in(said.encode()) == []
    assert leaks(Path()) == []
    assert not any(b"no variable is" in path.read_bytes() for path in Path().rglob("*") if path.is_file())
    assert [line for line in lines("run") if line["split"] == "mine"]
    assert "a message" in Path("run/train.log").read_text()
    assert not fails or "no answer: " in said


@pytest.mark.slow
def test_a_report_of_a_run_folder_that_has_them_shows_none(capfd, monkeypatch):
    """Such as one of an earlier version."""
    from omegaconf import OmegaConf

    from amp_core.config.files import read_yaml

    for number, kind in enumerate(KINDS):
        assert train.main([*SMALL, "steps=2", f"run_dir=runs/{number}"]) == 0 if number == 0 else True
        if number:
            subprocess.run(["cp", "-r", "runs/0", f"runs/{number}"], check=True)
        path = Path(f"runs/{number}/.hydra/config.yaml")
        values = read_yaml(path)
        values["log"]["wandb_project"] = values["data"]["path"] = kind.value
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    capfd.readouterr()
    for command in ("report.py runs --out report.html", "runs.py list runs", "runs.py compare runs/1 runs/2"):
        program, *arguments = command.split()
        assert subprocess.run([sys.executable, ROOT / "scripts" / program, *arguments]).returncode == 0, command
    said = "".join(capfd.readouterr())
    page = Path("report.html").read_bytes()
    assert b"***" in page and found_in(page) == [] and found_in(said.encode()) == []


def test_what_is_no_secret_stays(monkeypatch, tmp_path):
    """Digests, commits, paths, addresses, code in a traceback, and all that a run of ours records."""
    commit, digest = "5ecre7aa" * 5, "0123456789abcdef" * 4
    usual = [commit, digest, "/abs/path/of/data", "~/data", "https://host/x", "https://host:8080/a@b", "user@host:/x"]
    usual += ["s3://bucket/key/of@it", "postgresql://db/x", "2026-11-22T11:12:32+00:00", "torch 2.13.0+cpu", "a: b@c"]
    usual += ['{"loss_per_token": 2.345678901, "num_tokens": 12345678}', "token = tokenizer(text)"]
    usual += ["lambda key: key[0]"]
    usual += [
        "task-of-a-rather-long-name-2026",
        "risk-" + "a" * 30,
        "hf_internal_testing/tiny-random-gpt2",
        "sort_key=len",
    ]
    usual += ["https://github.com/pytorch/pytorch/issues/1?page=2", "python:3.11@sha256:0123abcd", "best_key: loss"]
    usual += ["<|endoftext|>"]
    assert [text for text in usual if redact(text) != text] == []
    assert list(secrets_in({"eos_token": "<|endoftext|>", "path": "/abs", "sha": commit, "n": [1, None, 2.5]})) == []
    assert train.main([*SMALL, "run_dir=run"]) == 0
    assert not any("***" in path.read_text(errors="replace") for path in Path("run").rglob("*") if path.is_file())
    assert len(state("run")["config"]) > 5


def test_a_key_that_is_a_path_is_no_key(monkeypatch, tmp_path):
    """The file of a key may be named everywhere; what only begins like a path may not."""
    monkeypatch.setenv("SSH_KEY", str(tmp_path / "id_rsa"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").mkdir()
    (tmp_path / "id_rsa").touch()
    (tmp_path / "keys" / "id").touch()
    monkeypatch.setenv("TLS_KEY", "~/keys/id")
    assert str(tmp_path / "id_rsa") not in known_secrets() and "~/keys/id" not in known_secrets()
    assert not holds_secret(f"data.path={tmp_path}/id_rsa") and not holds_secret("data.path=~/keys/id")
    assert VALUE_OF["base64 that begins with /"] in known_secrets() and VALUE_OF["begins with ~"] in known_secrets()


def test_a_run_goes_on_beside_its_keys(capfd):
    """A run with keys in the environment, paths for settings: stopped, resumed, finished, with the same command."""
    Path("données").mkdir()
    command = [*SMALL, f"run_dir={Path('données').absolute()}/run", "log.wandb_project=mine"]
    assert train.main([*command, "steps=2"]) == 0
    assert train.main([*command, "allow_changes=true"]) == 0
    assert state("données/run")["progress"]["step"] == 4 and leaks(Path()) == []


def test_a_folder_that_holds_a_key_is_no_place_for_runs(capfd, monkeypatch):
    place = Path(VALUE_OF["GitHub"])
    place.mkdir()
    monkeypatch.chdir(place)
    assert train.main([*SMALL, "run_dir=run"]) == 2
    said = "".join(capfd.readouterr())
    assert "run_dir: the name of the folder holds a key" in said
    assert not found_in(said.encode()) and not list(Path().iterdir())


WHOLE = {
    "two ranks that fail": (["layout=ddp", "layout.nproc_per_node=2", "data.path=/nowhere"], None),
    "workers of loaders": (["data.num_workers=2"], 0),
    "sweep": (["-m", "seed=1,2"], 0),
    "sharded, in the background": (["checkpoint=sharded", "checkpoint.background=true"], 0),
    "tensorboard and wandb": (["log=all"], 0),
    "doctor": (["doctor.after_skips=1", "debug.inject={where: batch, step: 2}"], 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_no_byte_of_a_whole_program_is_one_of_a_secret(name):
    if name == "tensorboard and wandb":
        pytest.importorskip("wandb")
        pytest.importorskip("tensorboard")
    settings, expected = WHOLE[name]
    environ = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    if name == "doctor":
        command = [sys.executable, ROOT / "train.py", *SMALL, *settings]
        done = subprocess.run(command, capture_output=True, env=environ)
        code, said = done.returncode, done.stdout + done.stderr
    else:
        done = Forked(with_environ, dict(environ), [*SMALL, *settings])
        said, code = done.communicate(timeout=100)[0].encode(), done.returncode
    assert expected is None or code == expected, said.decode()
    assert said and found_in(said) == [] and leaks(Path()) == []


def with_environ(environ, arguments):
    os.environ.update(environ)
    return train.main(arguments)
