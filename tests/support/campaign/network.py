"""Two machines with a network between them that is cut: network namespaces, as root on Linux."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from campaign import ROOT, Plan, Result
from campaign.harness import TELLING, Child, arguments, last_step, outcome, wait_until
from campaign.runs import BAD, Alone, Kind, clear, expect_same

NODES = {"faults1": "10.231.7.1", "faults2": "10.231.7.2"}
"""Namespaces, which are the names of their machines, too, and their addresses."""
PORT = 29511
TIMEOUT = 0.1
"""layout.timeout_minutes."""
TAP, NO_HEADER, SET_INTERFACE = 0x0002, 0x1000, 0x400454CA
"""Constants of linux/if_tun.h."""
BOUND = 60.0
"""Seconds after which both launchers must have ended since their workers did, with the kernel's own timeouts."""
# Of its own name and addresses; the names of both.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && "$@"'


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _carry(folder: Path, seed: int) -> None:
    """A cable that is this process: frames go from one end to the other, or nowhere with the chance in a file."""
    ends, rng = [], random.Random(seed)
    for name in NODES:
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, SET_INTERFACE, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
        ends.append(end)
    (folder / "cable").touch()
    while True:
        for end in select.select(ends, [], [])[0]:
            with contextlib.suppress(OSError, ValueError):  # an end that is not up yet
                frame = os.read(end, 65536)
                if rng.random() >= float((folder / "loss").read_text()):
                    os.write(ends[1 - ends.index(end)], frame)


@contextlib.contextmanager
def two_machines(folder: Path, *, lossy: bool = False) -> Iterator[Path]:
    """Two namespaces with a cable between them. Gives the file of their names.

    Args:
        folder: for that file; with `lossy`, its file `loss` holds the chance of a frame to be lost, at any moment.
        lossy: a cable that can lose frames.
    """
    cable = None
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NODES.items()))
    one, two = NODES
    try:
        for name in NODES:
            _ip("netns", "add", name)
        if lossy:
            (folder / "loss").write_text("0")
            cable = Child(lambda: _carry(folder, 0), folder / "cable.txt")
            if not wait_until((folder / "cable").exists, cable):
                raise OSError(f"no TAP devices: {cable.text.strip().splitlines()[-1:]}")
            for name in NODES:
                _ip("link", "set", name, "netns", name)
        else:
            _ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", two, "netns", two)
        for name, address in NODES.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        if cable is not None:
            cable.kill()
            (folder / "cable").unlink(missing_ok=True)
        for name in NODES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _launch(
    folder: Path, hosts: Path, command: list[str], job: str | None = None, on: str | None = None
) -> list[Child]:
    """A launcher on each machine, or on one."""
    nodes = [
        *([] if any(item.startswith("layout=") for item in command) else ["layout=ddp"]),
        *("layout.nproc_per_node=1", "layout.nnodes=2", f"layout.timeout_minutes={TIMEOUT}"),
        *(f"layout.rdzv_endpoint={NODES['faults1']}:{PORT}", f"layout.rdzv_id={job or f'faults{time.time_ns()}'}"),
    ]
    children = []
    for rank, name in enumerate(NODES):
        if on not in (None, name):
            continue
        inside = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh", str(hosts), name]
        line = [*inside, sys.executable, str(ROOT / "train.py"), *nodes, *command, f"run_dir={folder}"]
        environ = {"GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}

        def act(line: list[str] = line) -> None:
            os.execvp(line[0], line)

        children.append(Child(act, folder.with_name(f"{folder.name}.{rank}.txt"), environ))
    return children


def network(plan: Plan) -> Result:
    """The cable is pulled at a random step, or silent; a machine of an elastic run is lost, and comes back."""
    result = Result()
    folder = plan.inside("network")
    try:
        with two_machines(folder, lossy=True) as hosts:
            _cuts(plan, folder, hosts, result)
    except (OSError, subprocess.CalledProcessError) as error:
        result.facts["left out"] = f"no network namespaces here: {error}"
    return result


def _cuts(plan: Plan, folder: Path, hosts: Path, result: Result) -> None:
    torn, alone = folder / "torn", Alone(folder)
    longest = 0.0
    for case, rng in plan.cases("network", short=1, long=6):
        layout, name = rng.choice(["ddp", "fsdp"]), rng.choice(list(NODES))
        num_steps = 400 if plan.long else 100
        settings = (*TELLING, f"steps={num_steps}", "save_every=20", "eval_every=1000", BAD, f"layout={layout}")
        kind = Kind(settings, num_ranks=2)
        expected, _ = alone.of(kind)
        children = _launch(torn, hosts, arguments(*kind.settings))
        step = rng.randrange(30, num_steps // 2)
        begun = wait_until(lambda step=step: last_step(torn) >= step, children[0], 120)
        if not result.expect(begun, case, f"it does not begin: {[child.text[-700:] for child in children]}"):
            for child in children:
                child.kill()
            clear(torn)
            continue
        is_silent = rng.random() < 0.5
        what = f"the cable of {name} {'loses all' if is_silent else 'is pulled'} at step {step} ({layout})"
        began = time.monotonic()
        if is_silent:
            (folder / "loss").write_text("1")
        else:
            _ip("-n", name, "link", "set", name, "down")
        codes = [child.wait(60 * TIMEOUT + BOUND) for child in children]
        longest = max(longest, time.monotonic() - began)
        result.counts[f"links cut between two machines ({layout})"] += 1
        texts = [child.text[-700:] for child in children]
        result.expect(all(code not in (None, 0) for code in codes), case, f"{what}: exit codes {codes}: {texts}")
        (folder / "loss").write_text("0")
        _ip("-n", name, "link", "set", name, "up")
        time.sleep(1.0)
        children = _launch(torn, hosts, arguments(*kind.settings))
        codes = [child.wait(180) for child in children]
        if result.expect(codes == [0, 0], case, f"{what}: goes on with {codes}: {[c.text[-700:] for c in children]}"):
            expect_same(expected, outcome(torn), result, case, what)
        clear(torn)
    shutil.rmtree(torn, ignore_errors=True)
    result.facts["timeout, and longest until both machines had ended"] = f"{60 * TIMEOUT:.0f} s, {longest:.0f} s"
