"""A minute on a GPU: what the core promises there, a line per item. `scripts/gpu_check.sh 1` runs it first.

    python scripts/gpu_smoke.py --log smoke.log
    python scripts/gpu_smoke.py --only replay,float8   # items whose names begin so
    python scripts/gpu_smoke.py --device cpu           # a rehearsal: graphs are tapes, nothing can wait

All items run in one process, which is watched by another: an item that hangs or crashes costs its own line, and the
rest continues in a new process. Exit code 1: an item failed.

`steps` compares 20 steps with the same 20 on the CPU in fp32. How far they may lie apart is computed: the CPU trains
once more with a random relative error in the inputs, weights and results of every linear layer, and in the gradients of
these, as large as the mode may round (`ROUNDING`). The bound is three times the distance that results, as three
standard deviations. True rounding errors are at most as large as those drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.cuda.nccl
import torch.nn.functional as F
from torch import nn

import amp_core.memory.graph
from amp_core import Amp, Checkpoint, Clip, Ema, Schedule, windows
from amp_core.data.loading import to_device
from amp_core.lowp.float8 import float8_is_emulated, use_float8
from amp_core.lowp.weights import fp32_values, master_params
from amp_core.memory.sync_debug import sync_debug

ROOT = Path(__file__).resolve().parents[1]
START, LIMIT = 60.0, 45.0
"""Seconds for the start of the process that runs the items, and for each of them."""
BEGUN = "{begun}"

# Half the distance of two neighbouring numbers, relative.
_FP32, _BF16, _FP16, _E4M3, _E5M2 = 2.0**-24, 2.0**-8, 2.0**-11, 2.0**-4, 2.0**-3
ROUNDING = {
    "fp32": (_FP32, _FP32),
    "tf32": (2 * _FP16, 2 * _FP16),  # as many bits after the point as fp16; the units may cut off the rest
    "bf16": (_BF16, _BF16),
    "fp16": (_FP16, _FP16),
    "fp16_capped": (_FP16, _FP16),
    "o2": (_FP16, _FP16),
    "o3": (_FP16, _FP16),
    "bf16_pure": (_BF16, _BF16),
    "fp8": (_E4M3, _E5M2),
}
"""In the forward and in the backward pass."""
PACKAGES = {
    name: name for name in ("torchvision", "omegaconf", "pytest", "hypothesis", "mlxtend", "matplotlib", "tqdm")
}
PACKAGES |= {"hydra-core": "hydra", "hydra-joblib-launcher": "hydra_plugins.hydra_joblib_launcher"}
PACKAGES |= {"scikit-learn": "sklearn", "pytest-timeout": "pytest_timeout", "pytest-xdist": "xdist"}
PACKAGES |= {name: name for name in ("accelerate", "lightning", "timm", "tensorboard", "triton")}
"""What the stages use, and how it is imported."""
STORED = {"o3": _FP16, "bf16_pure": 2 * _BF16}
"""What a weight is off after each step. Stochastic rounding errs by up to a whole distance."""
SIZES = (64, 128, 16)  # multiples of 16, for float8
SAMPLES = 64


def loop(mode: str, optimizer: str, device: str, noise: bool = False) -> tuple[Any, Callable[[], Any]]:
    """A network and a function that trains it for one step: accumulation, clipping, a schedule, an average.

    Args:
        mode: of `ROUNDING`. With `noise` its rounding is imitated, in fp32.
        optimizer: AdamW or SGD.
        device: where.
        noise: see above.
    """
    forward, backward = (u + max(SIZES) ** 0.5 * _FP32 for u in ROUNDING[mode])  # and sums in fp32, in another order
    generator = torch.Generator().manual_seed(1)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * (1 + forward * (2 * torch.rand(x.shape, generator=generator) - 1))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * (1 + backward * (2 * torch.rand(grads[0].shape, generator=generator) - 1))

    class Noisy(nn.Linear):
        def forward(self, input: Any) -> Any:
            off: Any = Off.apply
            return off(F.linear(off(input), off(self.weight), off(self.bias)))

    torch.manual_seed(0)
    layer = Noisy if noise else nn.Linear
    net = nn.Sequential(layer(*SIZES[:2]), nn.Tanh(), layer(*SIZES[1:]))
    images, teacher = torch.randn(2, SAMPLES, SIZES[0]), torch.randn(SIZES[0], SIZES[-1])
    labels = (images @ teacher).argmax(-1)
    net, images, labels = net.to(device), images.to(device), labels.to(device)
    amp = Amp.named("fp32" if noise else mode, device, samples=SAMPLES)
    amp.prepare(net)
    amp.guard(net)
    weights = master_params(net)
    # An eps far below the gradients would turn the rounding of those near zero into whole steps.
    options = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01, "eps": 1e-3}
    made = getattr(torch.optim, optimizer)(weights, fused=True, **options)
    schedule = Schedule(made, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 100)
    ema = Ema(net, 0.9)

    def step() -> Any:
        window = next(iter(windows(list(zip(images, labels, strict=True)), 2)))
        for micro in window:
            with amp.autocast():
                loss = F.cross_entropy(net(micro.batch[0]).float(), micro.batch[1])
            amp.backward(loss * micro.weight)
        report = amp.step(made, Clip.norm(1.0))
        amp.update()
        made.zero_grad()
        schedule.advance(report)
        ema.update(report)
        if noise and mode in STORED:
            with torch.no_grad():
                for weight in weights:
                    weight *= 1 + STORED[mode] * (2 * torch.rand(weight.shape, generator=generator) - 1)
        return amp.num_skipped

    return net, step


def flat(net: Any) -> Any:
    """The weights as one float64 vector on the CPU, of o2 the fp32 ones."""
    return torch.cat([value.detach().cpu().double().flatten() for value in fp32_values(net.parameters())])


@functools.cache
def reference(mode: str, optimizer: str, noise: bool) -> Any:
    """The weights after 20 steps on the CPU in fp32, and the first ones."""
    net, step = loop(mode if noise else "fp32", optimizer, "cpu", noise)
    first = flat(net)
    for _ in range(20):
        step()
    return flat(net), first


def steps(device: str, mode: str, optimizer: str) -> str:
    """20 steps lie as far from those of the CPU in fp32 as the mode rounds."""
    exact, first = reference("fp32", optimizer, False)
    noisy, _ = reference(mode, optimizer, True)
    net, step = loop(mode, optimizer, device)
    for _ in range(20):
        skipped = step()
    assert skipped.item() == 0, f"{skipped.item():g} of 20 steps were skipped, expected none"
    way = (exact - first).norm()
    found, bound = ((flat(net) - exact).norm() / way).item(), 3 * ((noisy - exact).norm() / way).item()
    assert found <= bound, f"off by {found:.2g} of the way from the first weights; expected at most {bound:.2g}"
    return f"off by {found:.2g} of the way, bound {bound:.2g}"


def no_waits(device: str) -> contextlib.AbstractContextManager[None]:
    """A wait for the device is an error."""
    return contextlib.nullcontext() if device == "cpu" else sync_debug("error")


def waits(device: str, mode: str, optimizer: str) -> str:
    """50 steps never wait for the device."""
    _, step = loop(mode, optimizer, device)
    for _ in range(3):  # kernels are chosen, moments are made
        step()
    with no_waits(device):
        for _ in range(50):
            skipped = step()
    assert skipped.item() == 0, f"{skipped.item():g} steps were skipped, expected none"
    return "50 steps"


def _graphs(device: str) -> Any:
    """The harness of the tests of graphs: dropout, BatchNorm, an overflow, a window of another shape."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("support", "unit", "recipes", "runs")]
    if device == "cpu":
        tape = importlib.import_module("tape")
        amp_core.memory.graph.capture_on_cuda, amp_core.memory.graph.noted_waits = tape.record, tape.noted_waits
    return importlib.import_module("test_graph")


@contextlib.contextmanager
def _side_stream(device: str) -> Iterator[None]:
    """As in a run, nothing happens on the default stream, which cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()) if device != "cpu" else contextlib.nullcontext():
        yield


def replay(device: str, mode: str) -> str:
    """20 replayed steps with dropout are the steps, bit for bit."""
    graphs = _graphs(device)
    with _side_stream(device):
        plain, captured = graphs.Training(mode, device), graphs.Training(mode, device)
        whole = captured.graph()
        differing = graphs.same_but(plain.run(graphs.computed), captured.run(whole))
    assert whole._play is not None, f"not captured: {whole._refused}"
    assert not differing, f"differ from the eager steps: {', '.join(differing[:4])}"
    return "captured, bit-identical"


def failed_capture(device: str) -> str:
    """A step that reads back falls back to eager, and dropout works after it."""
    graphs = _graphs(device)

    def trained(as_graph: bool) -> tuple[dict[str, Any], Any]:
        training = graphs.Training("fp16", device)
        training.extra = lambda loss: loss * (2.0 if loss.item() > 1e9 else 1.0)
        whole = training.graph() if as_graph else None
        return training.run(whole or graphs.computed, 12), whole

    with _side_stream(device):
        (expected, _), (found, whole) = trained(False), trained(True)
        differing = graphs.same_but(expected, found)
        kept = torch.nn.functional.dropout(torch.ones(10000, device=device)).count_nonzero().item()
    assert whole._refused, "a step that reads back was captured"
    assert not differing, f"differ from the eager steps: {', '.join(differing[:4])}"
    assert abs(kept - 5000) < 250, f"dropout kept {kept} of 10000"  # five standard deviations of 50
    return f"refused: {whole._refused[:60]}"


def float8(device: str) -> str:
    """Float8 units compute what the emulation on the CPU computes."""
    linear, x, grad = torch.nn.Linear(256, 128), torch.randn(50, 256), torch.randn(50, 128).bfloat16()
    use_float8(linear)

    def computed(where: str) -> list[Any]:
        twin, inputs = copy.deepcopy(linear).to(where), x.to(where, copy=True).requires_grad_()
        with torch.autocast(where, torch.bfloat16):
            y = twin(inputs)
        y.backward(grad.to(where))
        found: list[Any] = [y, inputs.grad, twin.weight.grad]
        return [t.detach().cpu().double() for t in found]

    found = max(((a - b).norm() / b.norm()).item() for a, b in zip(computed(device), computed("cpu"), strict=True))
    # The same products: what differs is their sum before it is rounded to bfloat16, by one last digit at most.
    assert found <= 2 * _BF16, f"off by {found:.2g}, expected at most {2 * _BF16:.2g}"
    return f"{'emulated here, too' if float8_is_emulated(device) else 'units'}: off by {found:.2g}"


def background_save(device: str) -> str:
    """A save in the background holds what was there when it began."""
    with tempfile.TemporaryDirectory() as folder:
        net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(device)
        checkpoint = Checkpoint(folder, model=net, background=True)
        for step in (1, 2):
            with torch.no_grad():
                for param in net.parameters():
                    param.normal_()
                expected = [param.clone() for param in net.parameters()]
                checkpoint.save(step)
                for param in net.parameters():
                    param.zero_()
            checkpoint.wait()
            loaded = checkpoint.load()
            assert loaded is not None and loaded.step == step, f"loaded {loaded}, expected step {step}"
            for param, value in zip(net.parameters(), expected, strict=True):
                assert torch.equal(param, value), f"step {step}: the weights are not those at the time of the save"
    return "two saves, bit-identical"


def prefetch(device: str) -> str:
    """Batches that are copied ahead are whole when they are used, also by a reader that is behind."""
    expected = [torch.randn(64, 3, 64, 64) for _ in range(8)]
    pinned = [tensor.pin_memory() if device == "cuda" else tensor for tensor in expected]
    found = []
    for images in to_device(pinned * 4, device, ahead=3):
        busy = torch.ones(512, 512, device=device)
        for _ in range(20):
            busy = (busy @ busy).tanh()
        found.append((images + 0 * busy.sum()).clone())
        del images
    for i, images in enumerate(found):
        assert torch.equal(images.cpu(), expected[i % 8]), f"batch {i} is another one than was sent"
    return f"{len(found)} batches"


def one_rank(device: str) -> str:
    """A whole run of one replica: a process group, a graph with its collectives, and the end of both."""
    perf = "graph" if device == "cuda" else "default"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "layout=ddp", "layout.nproc_per_node=1", f"perf={perf}"]
        command += ["data=synthetic", "data.num_samples=64", "data.image_size=16", "batch_size=16", "steps=20"]
        command += [f"device={device}", "log.progress=false", f"run_dir={folder}/run"]
        # Killed with the item, should its end hang.
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr[-2000:]}"
        summary = json.loads(Path(folder, "run/summary.json").read_text())
        log = Path(folder, "run/train.log").read_text()
    said = [line for line in log.splitlines() if "perf.graph" in line]
    assert perf == "default" or (said and " INFO " in said[-1]), f"not captured: {said}"
    return f"{summary['status']}, ended by itself, perf={perf}"


def items(device: str) -> dict[str, Callable[[], str]]:
    """By name, most telling first."""
    found: dict[str, Callable[[], str]] = {}
    for what in (steps, waits):
        for mode in ROUNDING:
            for optimizer in ("AdamW", "SGD"):
                found[f"{what.__name__} {mode} {optimizer}"] = functools.partial(what, device, mode, optimizer)
    found |= {f"replay {mode}": functools.partial(replay, device, mode) for mode in ("fp32", "bf16", "fp16")}
    for other in (failed_capture, float8, background_save, prefetch, one_rank):
        found[other.__name__] = functools.partial(other, device)
    return found


def work(device: str, names: list[str]) -> int:
    """Run items, and write a line of JSON for each. Ends early when the GPU is of no more use."""
    faulthandler.enable()
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    torch.ones(1, device=device)
    print(BEGUN, flush=True)
    for name in names:
        torch.manual_seed(0)
        began, state, problem = time.monotonic(), "ok", None
        try:
            found = items(device)[name]()
            if device == "cuda":
                torch.cuda.synchronize()  # an error of this item is not the next one's
        except Exception as error:
            traceback.print_exc()
            state, problem = "FAILED", error
            found = f"{type(error).__name__}: {str(error).strip()}"
        seconds = time.monotonic() - began
        print(json.dumps({"state": state, "name": name, "seconds": seconds, "found": found}), flush=True)
        if "CUDA error" in str(problem):
            return 0  # after an error of the device all that follows would fail
    return 0


def versions() -> int:
    """Print what is installed and which GPU is there. Exit code 1: a package is missing."""
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores")
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        print(f"{torch.cuda.device_count()} x {gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB")
        print(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}")
    else:
        print("no GPU")
    found = {name: importlib.util.find_spec(module) is not None for name, module in PACKAGES.items()}
    there = ", ".join(f"{name} {importlib.metadata.version(name)}" for name, is_there in found.items() if is_there)
    print(textwrap.fill(there, 120))
    importlib.import_module("train")
    missing = [name for name, is_there in found.items() if not is_there]
    if missing:
        print(f"missing: {', '.join(missing)}. scripts/pack_wheels.py collects what tests and runs need")
    return int(bool(missing))


def show(state: str, name: str, seconds: float, found: str) -> None:
    print(f"{state:6} {name:23} {seconds:5.1f} s  {' '.join(found.split())[:120]}", flush=True)


def _read(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def watch(device: str, names: list[str], log: TextIO | None, limit: float = LIMIT) -> int:
    """Run items in another process, and in a new one after each that hangs or crashes. Returns how many failed."""
    failed, names = 0, list(names)
    while names:
        command = [sys.executable, __file__, "--device", device, "--work", ",".join(names)]
        # A group of its own, so that what an item has started ends with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0)
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        began, patience, problem, has_begun = time.monotonic(), START, None, False
        try:
            while (line := lines.get(timeout=max(began + patience - time.monotonic(), 0.01))) is not None:
                if line.startswith('{"state"'):
                    told = json.loads(line)
                    failed += told["state"] == "FAILED"
                    names.remove(told["name"])
                    show(**told)
                elif not line.startswith(BEGUN):
                    continue  # what a library has to say
                began, patience, has_begun = time.monotonic(), limit, True
        except queue.Empty:
            problem = f"hung for {patience:g} s"
            process.send_signal(signal.SIGABRT)  # faulthandler writes where
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:  # also when this process is ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            reader.join(5)
        if problem is None and code:
            problem = f"the process ended with {code}"
        if not has_begun:
            show("FAILED", "start", time.monotonic() - began, f"{problem}; the log says why. Nothing more was tried")
            return failed + len(names)
        if problem and names:
            failed += 1
            show("FAILED", names.pop(0), time.monotonic() - began, f"{problem}; the log says where")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="beginnings of names, with commas")
    parser.add_argument("--log", type=Path, help="where tracebacks go; default: stderr")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--versions", action="store_true", help="only say what is installed")
    flags = parser.parse_args(arguments)
    if flags.versions:
        return versions()
    if flags.work:
        return work(flags.device, flags.work.split(","))
    names = [name for name in items(flags.device) if name.startswith(tuple(flags.only.split(",")))]
    if not names:
        parser.error(f"--only {flags.only}: expected beginnings of {', '.join(items(flags.device))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other process ends, too
    began = time.monotonic()
    with flags.log.open("w") if flags.log else contextlib.nullcontext() as log:
        failed = watch(flags.device, names, log)
    print(f"{len(names) - failed} of {len(names)} items passed in {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
