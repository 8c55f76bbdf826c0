"""What uses private names of torch, computed in a process of its own for each, with that name removed from torch.

    python without_name.py OUT.json NAME ...      # "" removes nothing, "A B" both

Forks from a process that has imported torch and nothing of this project. A name that torch's own Python code needs is
put back as soon as `amp_core.torch_private` has looked for it; others after the steps.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], Any]

STAYS = (
    "torch._foreach_c",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_sub",
    "torch._amp_",
    "torch.autograd.graph._engine",
    "torch.nn.",
    "torch.optim.Optimizer._",
)
"""The beginnings of names without which steps are computed; for other computations torch itself needs them."""


class _Gone:
    """Hides what a class inherits from one that is written in C, and cannot be changed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(self.name)


def remove(name: str) -> Restore:
    """Remove a name from torch; returns what puts it back."""
    path, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    if _is_module(name):
        kept = {key: module for key, module in sys.modules.items() if f"{key}.".startswith(f"{name}.")}
        value = vars(owner).pop(last, None)
        sys.modules.update(dict.fromkeys([*kept, name]))  # None: importing it fails

        def put_back() -> None:
            del sys.modules[name]
            sys.modules.update(kept)
            if value is not None:
                setattr(owner, last, value)

        return put_back
    notes = vars(owner).get("__annotations__", {})
    if not hasattr(owner, last) and last in notes:  # an attribute of instances, of which nothing else is known
        note = notes.pop(last)
        return lambda: notes.update({last: note})
    if path.startswith("torch.ops.") and isinstance(owner, types.ModuleType):  # which looks for operators by itself
        setattr(torch.ops, owner.__name__.rpartition(".")[2], types.SimpleNamespace())
        return lambda: setattr(torch.ops, owner.__name__.rpartition(".")[2], owner)
    value = vars(owner)[last] if last in vars(owner) else getattr(owner, last)
    if last in vars(owner) or isinstance(owner, types.ModuleType):
        delattr(owner, last)
        return lambda: setattr(owner, last, value)
    if isinstance(owner, type):
        setattr(owner, last, _Gone(last))
    return lambda: delattr(owner, last)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def batches(num: int = 7) -> Iterator[Tensor]:
    """The fourth is infinite."""
    generator = torch.Generator().manual_seed(5)
    for i in range(num):
        yield torch.randn(16, 8, generator=generator) * (float("inf") if i == 3 else 1.0)


def train(build: Callable[[nn.Module], torch.optim.Optimizer], mode: Any = "fp16", clip: Any = None) -> Any:
    from amp_core import Amp
    from amp_core.lowp.masters import master_params
    from amp_core.step.ema import Ema

    fields = {"growth_interval": 2, "init_scale": 1024.0} if mode == "fp16" else {}
    net, amp = network(), Amp.named(mode, **fields)
    amp.prepare(net)
    amp.guard(net)
    optimizer, ema = build(nn.ParameterList(master_params(net))), Ema(net, 0.9)
    seen = []
    for inputs in batches():
        with amp.autocast():
            loss = net(inputs).square().mean()
        amp.backward(loss)
        report = amp.step(optimizer, clip=clip)
        amp.update()
        optimizer.zero_grad()
        ema.update(report)
        seen += [loss.detach(), report.taken, amp.scaler.scale.clone()]
    assert [bool(taken) for taken in seen[1::3]] == [True] * 3 + [False] + [True] * 3
    return [seen, net.state_dict(), ema.state_dict(), optimizer.state_dict()["state"]]


def steps(name: str, clip: str | None = None, mode: Any = "fp16", **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        from amp_core.lowp.moments import Adam16
        from amp_core.step.clip import Clip

        cls = Adam16 if name == "Adam16" else getattr(torch.optim, name)
        limit = {"norm": 0.1, "value": 0.001, "adaptive": 0.01}.get(clip or "", 0.0)
        return train(
            lambda net: cls(net.parameters(), lr=0.01, fused=True, **options), mode, clip and getattr(Clip, clip)(limit)
        )

    return run


def unscaled() -> Any:
    from amp_core import Amp

    net, amp = network(), Amp.named("fp16", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    inputs = next(batches())
    amp.backward(net(inputs).mean())
    amp.unscale_(optimizer)
    try:
        amp.backward(net(inputs).mean())
    except RuntimeError:
        return "noticed"
    return "unnoticed"


def recast() -> Any:
    from amp_core import Amp
    from amp_core.memory.recast import Recast

    net, amp = network(), Amp.named("bf16")
    hooks = Recast(net.parameters())
    with hooks.hooks():
        with amp.autocast():
            loss = net(next(batches())).square().mean()
        amp.backward(loss)
    return [p.grad for p in net.parameters()]


def recompute() -> Any:
    from amp_core import Amp
    from amp_core.memory.recompute import recompute_blocks

    net, amp = nn.Sequential(network(), nn.Linear(4, 4)), Amp.named("bf16")
    recompute_blocks(net)
    with amp.autocast():
        loss = net(next(batches())).square().mean()
    amp.backward(loss)
    return [[p.grad for p in net.parameters()], list(net.buffers())]


def island() -> Any:
    """What an island at the end of a network with 16-bit weights returns."""
    from amp_core import Amp
    from amp_core.lowp.islands import keep_fp32

    net, amp = network(), Amp.named("o3")
    keep_fp32(net[3])  # type: ignore[index]
    amp.prepare(net)
    return net(next(batches()))


def float8() -> Any:
    from amp_core.lowp.formats import quantise
    from amp_core.lowp.products import Products, multiply

    torch.manual_seed(0)
    a, b = torch.randn(32, 32), torch.randn(16, 32)
    how = Products.of("fp8")
    return multiply(quantise(a, how.inputs), quantise(b, how.weights), how, torch.float32)


def policy() -> Any:
    from amp_core.lowp.op_policy import cuda_policy

    with cuda_policy(), torch.autocast("cpu", dtype=torch.float16):
        return str(torch.softmax(torch.ones(2, 2).half(), 0).dtype)


def table() -> Any:
    observed = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "op_policy.py"))["observed"]
    return list(observed("cuda").items())[:4]


def doctor() -> Any:
    from amp_core import Amp
    from amp_core.doctor.locate import Doctor

    net, amp = network(), Amp.named("fp16", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    inputs = next(batches()) * 1e5

    def step() -> None:
        with amp.autocast():
            loss = net(inputs).square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()

    found = Doctor(amp, net).locate(step, inputs)
    assert found is not None
    return found.headline


def footprint() -> Any:
    from amp_core.layouts.memory_model import saved_for_backward

    net = network()
    with saved_for_backward(net.parameters()) as saved, torch.autocast("cpu", dtype=torch.bfloat16):
        net(next(batches())).sum().backward()
    return [saved.total, saved.copies]


def units() -> Any:
    from amp_core.torch_private import cpu_has

    return [cpu_has("float16"), cpu_has("bfloat16")]


def loader() -> Any:
    from torch.utils.data import DataLoader

    from amp_core.data.loading import _shut_down

    iterator = iter(DataLoader(list(range(8)), num_workers=1))  # type: ignore[arg-type]
    first = next(iterator)
    workers = iterator._workers  # type: ignore[attr-defined]
    _shut_down(iterator)
    del iterator
    for worker in workers:
        worker.join(10)
    return [first, [worker.is_alive() for worker in workers]]


def graph() -> Any:
    from amp_core.memory.graph import why_not_capturable

    layout: Any = types.SimpleNamespace(name="single", shard_optimizer=False)
    return str(why_not_capturable([torch.device("cuda")], layout, 1, []))


def compiled() -> Any:
    from amp_core.memory.compiled import Compiler, allow_graphs, compile_parts, missing_compiler

    net, compiler = network(), Compiler("aot_eager")
    compile_parts(net, compiler)
    with allow_graphs():
        net(next(batches())).sum().backward()
    assert compiler.num_graphs == 1
    missing_compiler("inductor", "cpu")
    return [p.grad for p in net.parameters()]


def alone(work: Callable[[], Any]) -> Any:
    """In a process group of one."""
    import torch.distributed as dist

    from amp_core.run.teardown import end_process_group

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = work()
        end_process_group()
        return found


def ddp() -> Any:
    def work() -> Any:
        from amp_core.layouts.ddp import wrap_ddp

        net = wrap_ddp(network(), torch.device("cpu"), exact=True)
        net(next(batches())).sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    return alone(work)


def fsdp() -> Any:
    def work() -> Any:
        from amp_core.layouts.fsdp import build_mesh, wrap_fsdp

        net = wrap_fsdp(network(), build_mesh(torch.device("cpu"), 1))
        net(next(batches())).sum().backward()
        with torch.no_grad():
            output = net.eval()(next(batches()))
        return [output, [type(p).__name__ for p in net.parameters()]]

    return alone(work)


FEATURES: dict[str, Callable[[], Any]] = {
    "sgd": steps("SGD", "norm", momentum=0.9),
    "adam": steps("Adam", "value", amsgrad=True),
    "adamw": steps("AdamW", "adaptive"),
    "adam16": steps("Adam16", None, "bf16"),
    "16-bit weights": steps("SGD", None, "o3"),
    "unscaled": unscaled,
    "recast": recast,
    "island": island,
    "float8": float8,
    "policy": policy,
    "footprint": footprint,
    "units": units,
    "graph": graph,
}
SLOW: dict[str, tuple[Callable[[], Any], str]] = {
    "recompute": (recompute, "_buffers"),
    "table": (table, "FakeTensorMode"),
    "doctor": (doctor, "TorchDispatchMode|autograd_node|equence_n|_schema|_cdata"),
    "compiled": (compiled, "_dynamo|_inductor|_functorch"),
    "ddp": (ddp, "Reducer|distributed_c10d"),
    "fsdp": (fsdp, "fsdp"),
    "loader": (loader, "dataloader"),
}
"""Those that take seconds to import, and the names that they use, also those that others use."""


def users(names: str) -> dict[str, Callable[[], Any]]:
    """What is computed without these names: all that is quick, and what is slow and uses one of them."""
    return FEATURES | {key: run for key, (run, uses) in SLOW.items() if re.search(uses, names)}


def digest(value: Any) -> str:
    """A digest of every bit."""
    if isinstance(value, Tensor):
        data = value.detach().clone().contiguous()
        shown = f"{data.dtype}{tuple(data.shape)}".encode() + bytes(data.view(-1).view(torch.uint8).tolist())
        return hashlib.sha256(shown).hexdigest()
    if isinstance(value, dict):
        value = sorted((str(key), digest(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        parts = [digest(each) if isinstance(each, Tensor | dict | list | tuple) else repr(each) for each in value]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return str(value)


def without(*names: str, folder: Path) -> dict[str, dict[str, Any]]:
    """For each of these names, and for none (""): what was `found`, the lines that were `said` of missing names, and
    the names that each feature was the first to `read`."""
    out = folder / "found.json"
    command = [sys.executable, "-W", "error", __file__, str(out), "", *names]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def compute(
    name: str, features: dict[str, Callable[[], Any]], lines: list[str], read: dict[str, list[str]]
) -> dict[str, str]:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("amp_recipes")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    names = name.split()
    put_back = {each: remove(each) for each in names}
    from amp_core import torch_private
    from amp_core.config import errors
    from amp_core.step.optimizers import spare_compiler

    for each in names:
        assert torch_private.is_missing(each), f"{each} is still there"
        # torch's own fused step needs the last one.
        if len(names) > 1 or not each.startswith(STAYS) or each == "torch._foreach_sub_":
            put_back.pop(each)()
    look_up, known = torch_private._look_up, set[str]()

    def noted(name: str) -> tuple[bool, Any]:
        if name not in known:
            known.add(name)
            read[feature].append(name)
        return look_up(name)

    setattr(torch_private, "_look_up", noted)  # noqa: B010 - an observer
    spare_compiler()  # as in a run: optimizers of torch import it otherwise, and it needs these names
    found = {}
    for feature, run in features.items():
        read[feature] = []
        if feature == "policy":  # from here on torch needs them itself
            for restore in put_back.values():
                restore()
        try:
            found[feature] = digest(run())
        except errors.ConfigError as refused:
            found[feature] = f"refused: {refused}"
        except Exception:
            found[feature] = traceback.format_exc()
    return found


def in_a_child(name: str, every: str) -> dict[str, Any]:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        lines: list[str] = []
        names: dict[str, list[str]] = {}
        try:
            found = compute(name, users(name or every), lines, names)
        except BaseException:  # or the child would go on as its parent
            found = {"all": traceback.format_exc()}
        said = [line for line in lines if " has no " in line]
        os.write(write, json.dumps({"found": found, "said": said, "read": names}).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    torch.set_num_threads(1)
    assert torch.ops.aten.add.Tensor  # made at its first use
    Path(sys.argv[1]).write_text(json.dumps({name: in_a_child(name, " ".join(sys.argv)) for name in sys.argv[2:]}))
