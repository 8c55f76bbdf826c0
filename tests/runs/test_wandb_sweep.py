"""conf/wandb_sweep.yaml, as `wandb sweep` sends it and an agent of wandb runs it, against a server on this machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

import train
from amp_core.config.options import conf_dir

ROOT = Path(__file__).resolve().parents[2]
SWEEP = yaml.safe_load((conf_dir() / "wandb_sweep.yaml").read_text())
SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log.progress=false", "epochs=1"]
NAMED = ["log.wandb_group=g", "log.wandb_tags=[first,second]", "log.wandb_name=mine"]

pytestmark = pytest.mark.usefixtures("own_folder")


def arguments(values):
    """What an agent puts in place of ${args_no_hyphens}, and what the file adds."""
    typed = [f"{key}={value}" for key, value in values.items()]
    return [*typed, *(text for text in SWEEP["command"] if not text.startswith("${"))]


@pytest.mark.parametrize("end", ["min", "max"])
def test_what_an_agent_types_is_taken_at_both_ends_of_every_parameter(end):
    values = {
        key: space[end] if end in space else space["values"][0 if end == "min" else -1]
        for key, space in SWEEP["parameters"].items()
    }
    pytest.importorskip("wandb")
    cfg, _ = train.checked(arguments(values))
    assert cfg.log.wandb and cfg.optimizer.lr == values["optimizer.lr"] and cfg.amp.name == values["amp"]
    split, _, metric = SWEEP["metric"]["name"].partition("/")
    assert (split, metric, SWEEP["metric"]["goal"]) == ("eval", cfg.recipe["best"], f"{cfg.recipe['best_is']}imize")


class Server(BaseHTTPRequestHandler):
    """The little of wandb's server that a sweep needs: one trial, and what its run sends."""

    protocol_version = "HTTP/1.1"
    sweep: ClassVar[str] = ""
    heartbeats: ClassVar[int] = 0
    runs: ClassVar[list[dict[str, Any]]] = []
    history: ClassVar[list[dict[str, Any]]] = []
    trial: ClassVar[dict[str, Any]] = {"optimizer.lr": 0.003, "accumulation": 2, "amp": "fp16"}

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        if self.path.endswith("file_stream"):
            lines = json.loads(raw).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            Server.history += [json.loads(line) for line in lines]
        if not self.path.endswith("graphql"):
            return self.answer({})
        asked = json.loads(raw)
        name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
        return self.answer({"data": self.data(name[1] if name else "", asked.get("variables") or {})})

    def data(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"}}
        if name == "Viewer":
            user = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": user}
        if name == "UpsertSweep":
            Server.sweep = given["config"]
            return {"upsertSweep": {"sweep": {"name": "s1", "project": project}, "configValidationWarnings": []}}
        if name == "SweepWithRuns":
            empty = dict.fromkeys(("heartbeatAt", "updatedAt", "bestLoss", "controller", "scheduler"))
            sweep = {
                "id": "1",
                "name": "s1",
                "method": "bayes",
                "state": "RUNNING",
                "description": "",
                "runs": {"edges": []},
            }
            about = {"config": Server.sweep, "createdAt": "2026-01-01T00:00:00Z", "earlyStopJobRunning": False}
            return {"project": {"sweep": sweep | empty | about}}
        if name == "CreateAgent":
            return {"createAgent": {"agent": {"id": "a1"}}}
        if name == "Heartbeat":
            Server.heartbeats += 1
            values = {key: {"value": value} for key, value in Server.trial.items()}
            run = {"type": "run", "run_id": "run1", "program": "train.py", "args": values}
            commands = [run] if Server.heartbeats == 1 else [{"type": "exit"}] if Server.history else []
            return {"agentHeartbeat": {"agent": {"id": "a1"}, "commands": json.dumps(commands)}}
        if name == "UpsertBucket":
            Server.runs.append(given)
            bucket = {
                "id": "1",
                "name": "run1",
                "displayName": "",
                "description": "",
                "config": "{}",
                "sweepName": "s1",
            }
            bucket |= {"project": project, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        return {}


@pytest.mark.slow
def test_an_agent_runs_the_file_and_the_server_gets_the_metric(own_folder):
    pytest.importorskip("wandb")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Path("train.py").symlink_to(ROOT / "train.py")
    Path("sweep.yaml").write_text(yaml.safe_dump(SWEEP | {"command": [*SWEEP["command"], *SMALL, *NAMED]}))
    environ = os.environ | {
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "WANDB_API_KEY": "a" * 40,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WANDB_MODE": "online",
        "HOME": str(own_folder),
    }
    try:
        for command in (
            ["sweep", "sweep.yaml", "--entity", "me", "--project", "p"],
            ["agent", "me/p/s1", "--count", "1"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "wandb", *command], env=environ, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
    assert yaml.safe_load(Server.sweep)["parameters"] == SWEEP["parameters"]
    (run_dir,) = Path("outputs/classification").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["amp"]) == ("finished", "fp16")
    typed = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text())
    assert typed[:3] == ["optimizer.lr=0.003", "accumulation=2", "amp=fp16"]
    assert {run["name"] for run in Server.runs} == {"run1"}
    sent = [(run["groupName"], run["displayName"], run["tags"]) for run in Server.runs]
    assert ("g", "mine", ["first", "second"]) in sent
    told = [line["eval/accuracy"] for line in Server.history if "eval/accuracy" in line]
    assert told and told[-1] == pytest.approx(summary["eval"]["accuracy"], abs=0)
