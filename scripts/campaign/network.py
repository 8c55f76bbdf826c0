"""Two machines with a network between them that is cut: network namespaces, for which one must be root on Linux."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from campaign import ROOT, Plan, Result
from campaign.harness import TELLING, Child, arguments, first, last_step, outcome, unequal, wait_until
from campaign.runs import BAD, Alone, Kind, clear

NODES = {"faults1": "10.231.7.1", "faults2": "10.231.7.2"}
"""Namespaces, which are the names of their machines, too, and their addresses."""
PORT = 29511
TIMEOUT = 0.1
"""layout.timeout_minutes."""
# Of its own name and addresses; the names of both; given up after seconds, not after a quarter of an hour.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && echo 4 > /proc/sys/net/ipv4/tcp_retries2 && shift 2 && "$@"'


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Path]:
    """Two namespaces with a cable between them. Gives the file of their names."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NODES.items()))
    one, two = NODES
    try:
        for name in NODES:
            _ip("netns", "add", name)
        _ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", two, "netns", two)
        for name, address in NODES.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _launch(folder: Path, hosts: Path, command: list[str]) -> list[Child]:
    """A launcher on each machine."""
    nodes = [
        *("layout=ddp", "layout.nproc_per_node=1", "layout.nnodes=2", f"layout.timeout_minutes={TIMEOUT}"),
        *(f"layout.rdzv_endpoint={NODES['faults1']}:{PORT}", f"layout.rdzv_id=faults{time.time_ns()}"),
    ]
    children = []
    for rank, name in enumerate(NODES):
        inside = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", str(hosts), name]
        line = [*inside, sys.executable, str(ROOT / "train.py"), *command, *nodes, f"run_dir={folder}"]
        environ = {"GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}

        def act(line: list[str] = line) -> None:
            os.execvp(line[0], line)

        children.append(Child(act, folder.with_name(f"{folder.name}.{rank}.txt"), environ))
    return children


def network(plan: Plan) -> Result:
    """The cable is pulled at a random step: both machines notice it, and the run goes on when it is back."""
    result = Result()
    if not plan.long:
        result.facts["left out"] = "only in the long form"
        return result
    folder = plan.inside("network")
    try:
        with two_machines(folder) as hosts:
            _cuts(plan, folder, hosts, result)
    except (OSError, subprocess.CalledProcessError) as error:
        result.facts["left out"] = f"no network namespaces here: {error}"
    return result


def _cuts(plan: Plan, folder: Path, hosts: Path, result: Result) -> None:
    kind = Kind((*TELLING, "steps=400", "save_every=20", "eval_every=1000", BAD), num_ranks=2)
    expected, _ = Alone(folder).of(kind)
    torn = folder / "torn"
    longest = 0.0
    for case, rng in plan.cases("network", short=0, long=2):
        children = _launch(torn, hosts, arguments(*kind.settings))
        step = rng.randrange(30, 200)
        begun = wait_until(lambda step=step: last_step(torn) >= step, children[0], 120)
        if not result.expect(begun, case, f"it does not begin: {[child.text[-700:] for child in children]}"):
            for child in children:
                child.kill()
            clear(torn)
            continue
        name = rng.choice(list(NODES))
        _ip("-n", name, "link", "set", name, "down")
        began = time.monotonic()
        codes = [child.wait(180) for child in children]
        longest = max(longest, time.monotonic() - began)
        result.counts["cables pulled between two machines"] += 1
        what = f"the cable of {name} is pulled at step {step}"
        texts = [child.text[-700:] for child in children]
        result.expect(all(code not in (None, 0) for code in codes), case, f"{what}: exit codes {codes}: {texts}")
        _ip("-n", name, "link", "set", name, "up")
        time.sleep(1.0)
        children = _launch(torn, hosts, arguments(*kind.settings))
        codes = [child.wait(180) for child in children]
        if result.expect(codes == [0, 0], case, f"{what}: goes on with {codes}: {[c.text[-700:] for c in children]}"):
            found = unequal(expected, outcome(torn))
            result.expect(not found, case, f"{what}: another result: {first(found)}")
        clear(torn)
    shutil.rmtree(torn, ignore_errors=True)
    result.facts["timeout, and longest until both machines had noticed"] = f"{60 * TIMEOUT:.0f} s, {longest:.0f} s"
