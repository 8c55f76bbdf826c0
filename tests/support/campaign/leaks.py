"""A key in the environment: it is in no file of a run and in no line of its output, whatever happens to the run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from secret_kinds import ENVIRON, KINDS, found_in
from shared import free_port

from amp_core.run.loop import Loop
from campaign import Plan, Result
from campaign.harness import arguments, start
from campaign.runs import clear

KEY = ENVIRON["WANDB_API_KEY"]
PASSWORD = "pa55-" + "x1y2z3" * 4


def _fail(rank: int) -> None:
    """Fails with a message that has all of it, as a library's may."""

    def fail(self: Loop, **options: bool) -> None:
        texts = [kind.value for kind in KINDS]
        raise RuntimeError(f"no answer of https://user:{PASSWORD}@host/{KEY}: {dict(os.environ)} {texts} {texts[-1]}")

    setattr(Loop, "_save", fail)  # noqa: B010 - a fault


def leaks(plan: Plan) -> Result:
    """Runs in every mode of the trackers, of several ranks, that fail or are refused: then every byte is looked at."""
    result, num_files = Result(), 0
    folder = plan.inside("leaks")
    home, torn = folder / "home", folder / "torn"
    home.mkdir()
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {PASSWORD}\n")
    (home / ".netrc").chmod(0o600)
    environ = ENVIRON | {
        "WANDB_API_KEY": KEY,
        "HOME": str(home),
        "PIPELINE_PASSWORD": PASSWORD,
        "NO_PROXY": "127.0.0.1",
    }
    nobody = {"WANDB_MODE": "online", "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    report = ["doctor.after_skips=1", "debug.inject={where: batch, step: 2}", "amp=bf16"]
    kinds = [
        ("log=all, offline, with a doctor's report", ["log=all", *report], {"WANDB_MODE": "offline"}, 1, 0),
        ("a failing run", [], {}, 1, 1),
        ("log=default", ["log=default"], {}, 1, 0),
        ("log=tensorboard", ["log=tensorboard"], {}, 1, 0),
        ("log=wandb, no server", ["log=wandb"], nobody, 1, 0),
        ("log=wandb, disabled", ["log=wandb"], {"WANDB_MODE": "disabled"}, 1, 0),
        ("two ranks", report, {}, 2, 0),
        ("two ranks that fail", [], {}, 2, 1),
        ("refused", [f"+wandb_key={KEY}", f"data.path=https://user:{PASSWORD}@host"], {}, 1, 2),
        ("taken from the environment", ["log.wandb_project=${oc.env:WANDB_API_KEY}"], {}, 1, 2),
        ("a key that begins with /", ["log.wandb_name=${oc.env:MY_SECRET}"], {}, 1, 2),
        ("in shards, by a thread", ["checkpoint=sharded", "checkpoint.background=true"], {}, 2, 0),
    ]
    for case, _ in plan.cases("leaks", short=2, long=len(kinds)):
        name, settings, more, num_ranks, expected = kinds[case % len(kinds)]
        if "log=" in name and any(importlib.util.find_spec(each) is None for each in ("wandb", "tensorboard")):
            result.facts[f"left out ({name})"] = "wandb or tensorboard is not installed"
            continue
        before = _fail if "fail" in name else None
        command = arguments("steps=4", "save_every=2", "eval_every=2", *settings)
        children = start(torn, command, num_ranks=num_ranks, before=before, environ=environ | more)
        codes = [child.wait() for child in children]
        result.expect(all(code == expected for code in codes), case, f"{name}: {codes}: {children[0].text[-900:]}")
        found, size = _where(folder, home)
        result.counts["runs with a key in their environment"] += 1
        num_files += size
        result.expect(not found, case, f"{name}: a key or a password is in {found}", "leaks")
        clear(torn)
        shutil.rmtree(folder / "outputs", ignore_errors=True)
    result.facts["files looked at"] = str(num_files)
    result.facts["kinds of secrets in each environment"] = str(len(ENVIRON) + 1)
    return result


def _where(folder: Path, home: Path) -> tuple[list[str], int]:
    """Files and names of files that hold a secret, and how many files there are. The home is where it belongs."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(home)]
    found = []
    for path in files:
        data = path.read_bytes() + os.fsencode(path)
        if found_in(data) or PASSWORD.encode() in data:
            found.append(str(path))
    return found, len(files)
