"""Tracking servers that are gone, slow or mad: the run ends with 0 and is not held up."""

from __future__ import annotations

import http.server
import importlib.util
import shutil
import socketserver
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from shared import free_port

from campaign import Plan, Result
from campaign.harness import Child, arguments, outcome, start, state, summary
from campaign.runs import expect_same

SETTINGS = ("accumulation=2", "ema.decay=0.9", "amp=bf16", "model.options.width=32")
NO = b'{"data": null, "errors": [{"message": "no"}]}'
KINDS = {  # what a server answers: code, body, after so many seconds
    "nobody": (0, b"", 0.0),  # there is none
    "slow": (200, NO, 5.0),
    "garbage": (200, b"\x00\xff" * 500, 0.0),
    "refusing": (401, NO, 0.0),
    "failing": (500, NO, 0.0),
    "wrong JSON": (200, b'{"data": [1, 2, {"viewer": 7}]}', 0.0),
    "page": (200, b"<html>", 0.0),
    "silent": (200, NO, 3600.0),
}


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


def _handler(kind: str) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, body, seconds = KINDS[kind]
            time.sleep(seconds)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def serve(kind: str, port: int) -> Callable[[], None]:
    def act() -> None:
        _Server(("127.0.0.1", port), _handler(kind)).serve_forever()

    return act


def trackers(plan: Plan) -> Result:
    """wandb against servers that misbehave."""
    result = Result()
    folder = plan.inside("trackers")
    plain, speeds, took = [], [], []
    settings = (*SETTINGS, "steps=2000" if plan.long else "steps=150", "log_every=10")
    for number in range(3):
        (child,) = start(folder / f"plain{number}", arguments(*settings))
        assert child.wait() == 0, child.text
        plain.append(summary(folder / f"plain{number}")["samples_per_second"])
    expected = outcome(folder / "plain0")
    if importlib.util.find_spec("wandb") is None:
        result.facts["left out"] = "wandb is not installed"
    else:
        kinds = list(KINDS) if plan.long else list(KINDS)[:3]
        for case, _ in plan.cases("wandb", short=2, long=len(kinds)):
            took.append(_against(kinds[case % len(kinds)], case, folder, settings, expected, speeds, result))
        result.facts["seconds of these"] = f"{min(took):.0f} to {max(took):.0f}"
        result.facts["samples per second, relative to runs without wandb"] = (
            f"{statistics.median(speeds) / statistics.median(plain):.2f} (these differ among themselves by "
            f"{max(plain) / min(plain):.2f})"
        )
    return result


def _against(
    kind: str,
    case: int,
    folder: Path,
    settings: tuple[str, ...],
    expected: dict,
    speeds: list[float],
    result: Result,
) -> float:
    """Seconds of a run with log=wandb against a server of this kind."""
    torn, port = folder / "torn", free_port()
    server = None if kind == "nobody" else Child(serve(kind, port), folder / "server.txt")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environ = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    environ |= dict.fromkeys(("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), str(home))
    environ |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    began = time.monotonic()
    (child,) = start(torn, arguments(*settings, "log=wandb"), environ=environ)
    code = child.wait(90)
    seconds = time.monotonic() - began
    if server is not None:
        server.kill()
    result.counts["runs with a misbehaving wandb server"] += 1
    what = f"a server that is {kind}"
    if result.expect(code == 0, case, f"{what}: exit code {code}: {child.text[-1500:]}"):
        result.expect("Traceback" not in child.text, case, f"{what}: {child.text[-1500:]}")
        result.expect("warning: wandb" in child.text, case, f"{what}: no warning: {child.text[-700:]}")
        expect_same(expected["state"]["model"], state(torn)["model"], result, case, what)
        speeds.append(summary(torn)["samples_per_second"])
    shutil.rmtree(torn, ignore_errors=True)
    child.output.unlink()
    return seconds
