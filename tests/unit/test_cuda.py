"""The promises of the core on a CUDA GPU, where waiting, streams and half-precision units are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import test_feeding
import torch
import torch.distributed as dist
from running import same_but
from test_graph import Training, computed
from torch import nn

import train
from amp_core import Amp, Checkpoint, Clip, Doctor, Ema, MicroBatch, Schedule, windows
from amp_core.config.errors import ConfigError, RunError
from amp_core.config.rules import amp_config
from amp_core.layouts.ddp import wrap_ddp
from amp_core.lowp.masters import master_params
from amp_core.memory.sync_debug import noted_waits, set_sync_debug, sync_debug
from amp_core.run.teardown import end_process_group

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
MODES = ["fp32", "tf32", "bf16", "fp16", "fp16_capped", "o2", "o3", "bf16_pure", "fp8"]
FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
FUSED += [torch.optim.Adagrad] if torch.__version__ >= "2.12" else []  # before, it was for CPUs only
SMALL = ["device=cuda", "data=synthetic", "data.num_samples=256", "data.image_size=16", "data.num_classes=4"]
SMALL += ["batch_size=16"]
SMALL += ["log.progress=false", "deterministic=true", "clip=norm", "ema.decay=0.9", "accumulation=2"]


@pytest.fixture(autouse=True)
def _no_sync_debug():
    """A test that fails leaves the mode of none to the next."""
    yield
    set_sync_debug("default")


def test_a_wait_is_an_error_inside_and_none_outside():
    """Run first, its first line is the first call in the process, which warns; filterwarnings=error."""
    number = torch.ones((), device="cuda")
    with sync_debug("error"), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        number.item()
    with noted_waits() as waits:
        assert number.item() == 1
    assert len(waits) == 1 and waits[0].startswith("test_cuda.py:")
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("name, number", [("warn", 1), ("error", 2)])
def test_a_region_has_the_mode_and_ends_without_it(name, number):
    with sync_debug(name):
        assert torch.cuda.get_sync_debug_mode() == number
    with pytest.raises(ZeroDivisionError), sync_debug(name):
        raise ZeroDivisionError
    assert torch.cuda.get_sync_debug_mode() == 0


def test_waits_of_this_thread_are_noted_where_they_happen_and_other_warnings_pass():
    """Under filterwarnings=error, as here: the region runs to its end."""
    number = torch.ones((), device="cuda")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with noted_waits() as waits:
            number.item()
            thread = threading.Thread(target=number.item)
            thread.start()
            thread.join()
            warnings.warn("something else", stacklevel=1)
            for _ in range(2):
                number.item()
    assert len(waits) == 3 and waits[1] == waits[2] != waits[0]
    assert [str(warning.message) for warning in shown] == ["something else"]


def test_more_processes_than_gpus_are_refused():
    num = torch.cuda.device_count()
    use = f"needs {num + 1} GPUs; this machine has {num}. Use layout.nproc_per_node={num}, or device=cpu"
    with pytest.raises(ConfigError, match=use):
        train.checked(["layout=ddp", f"layout.nproc_per_node={num + 1}", "device=cuda"])


def net_and_data():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8)).cuda()
    return net, [(torch.randn(8, 3, 8, 8).cuda(), torch.randint(8, (8,)).cuda()) for _ in range(8)]


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_steps_never_wait_for_the_device(mode, cls):
    net, data = net_and_data()
    amp = Amp.named(mode, device="cuda", samples=8)
    amp.prepare(net)
    amp.guard(net)
    optimizer = cls(master_params(net), lr=1e-3, fused=True)
    schedule = Schedule(optimizer, lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n), 200)
    ema = Ema(net, 0.9)

    def steps():
        for window in windows(data, 4):
            for micro in window:
                with amp.autocast():
                    loss = nn.functional.cross_entropy(net(micro.batch[0]), micro.batch[1])
                amp.backward(loss * micro.weight)
            report = amp.step(optimizer, Clip.norm(1.0))
            amp.update()
            optimizer.zero_grad()
            schedule.advance(report)
            ema.update(report)
        return report

    steps()
    with sync_debug("error"):
        for _ in range(100):
            report = steps()
    assert report.taken.item() and all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_batch_leaves_no_trace_on_the_device(mode, index):
    fixed = {"dynamic": False, "init_scale": 256.0} if amp_config(mode).scaling else {}

    def trained(change):
        net, data = net_and_data()
        change(data)
        amp = Amp.named(mode, device="cuda", samples=8, **fixed)
        amp.prepare(net)
        amp.guard(net)
        optimizer = torch.optim.SGD(master_params(net), lr=0.1, momentum=0.9, fused=True)
        for images, labels in data:
            with amp.autocast():
                loss = nn.functional.cross_entropy(net(images), labels)
            amp.backward(loss)
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
        return net.state_dict()

    bad = trained(lambda data: data[index][0].fill_(float("inf")))
    clean = trained(lambda data: data.pop(index))
    assert all(torch.equal(bad[key], clean[key]) for key in clean)


def test_fp16_underflows_without_a_scale_and_learns_with_one():
    net, data = net_and_data()
    images, labels = data[0]
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(images), labels) * 1e-6
    loss.backward()
    assert not net[0].weight.grad.any()
    net.zero_grad()
    amp = Amp.named("fp16", device="cuda")
    with amp.autocast():
        loss = nn.functional.cross_entropy(net(images), labels) * 1e-6
    amp.backward(loss)
    assert (net[0].weight.grad != 0).float().mean() > 0.9


@pytest.mark.parametrize("mode", MODES)
def test_a_run_continues_bit_exactly_on_the_device(mode, own_folder):
    assert train.main([*SMALL, f"amp={mode}", "steps=12", "run_dir=whole", "schedule.horizon=12"]) == 0
    assert train.main([*SMALL, f"amp={mode}", "steps=5", "run_dir=parts", "schedule.horizon=12"]) == 0
    assert train.main([*SMALL, f"amp={mode}", "steps=12", "run_dir=parts", "schedule.horizon=12"]) == 0
    whole, parts = (
        torch.load(Path(folder, "checkpoints/step_00000012/state.pt"), weights_only=True)
        for folder in ("whole", "parts")
    )
    for name in ("model", "ema"):
        assert all(torch.equal(whole[name][key], parts[name][key]) for key in whole[name])
    assert json.loads(Path("parts/summary.json").read_text())["device"] == "cuda"


def test_images_are_decoded_right_while_the_device_is_busy(tmp_path):
    """Into memory that was freed under work that is still waiting."""
    _, files, keys = test_feeding.file_parts(tmp_path)
    batch, labels = files.__getitems__(keys)
    labels = labels.cuda()
    try:
        expected, _ = files.finish((batch, labels))
    except RunError as why:
        pytest.skip(str(why))
    torch.cuda.synchronize()
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        for _ in range(20):  # some ms of work, and as many blocks of the sizes of decoded images as it takes
            matrix = matrix @ matrix * 1e-3
        for _ in range(50):
            torch.full((3, 74, 90), 255, dtype=torch.uint8, device="cuda")
        found, _ = files.finish((batch, labels))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_doctor_finds_an_overflow(place):
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    with torch.no_grad():
        net[0].weight.fill_(0.1)
        net[2].weight.fill_(3e4 if place == "forward" else 1e2)
    amp = Amp.named("fp16", device="cuda", init_scale=2.0**24 if place == "backward" else 1.0, max_scale=2.0**24)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    images, labels = torch.rand(8, 16).cuda() + 1, torch.randint(4, (8,)).cuda()

    def step():
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(images), labels)
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()

    diagnosis = Doctor(amp, net).locate(step, (images, labels))
    assert diagnosis is not None and diagnosis.phase == place
    cause = "overflow in a product" if place == "forward" else "loss scale too large"
    assert diagnosis.cause == cause and diagnosis.fixes[0].verified
    assert diagnosis.module == ("2" if place == "forward" else diagnosis.module)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_a_save_in_the_background_holds_what_was_there(format, tmp_path):
    """Copies go to pinned memory without blocking, and are there when `save` returns."""
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    checkpoint = Checkpoint(tmp_path, model=net, optimizer=optimizer, format=format, background=True)
    for step in (1, 2):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        expected = [param.detach().clone() for param in net.parameters()]
        checkpoint.save(step)
        for param in net.parameters():
            param.data.zero_()
        checkpoint.wait()
        loaded = checkpoint.load()
        assert loaded is not None and loaded.step == step
        assert all(torch.equal(a, b) for a, b in zip(expected, net.parameters(), strict=True))
    assert all(buffer.is_pinned() for kept in checkpoint._copies._free.values() for buffer in kept if buffer.numel())


# --- perf=graph and perf=compile --------------------------------------------------------------------------------------


@pytest.fixture
def side_stream():
    """As `environment` sets it up: nothing of a run happens on the default stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_played_graph_is_the_step(mode, side_stream):
    """Twenty steps of four micro-batches: dropout, clipping, an average, an overflow, one window of another shape."""
    plain, recorded = Training(mode, "cuda"), Training(mode, "cuda")
    expected, whole = plain.run(computed), recorded.graph()
    assert not same_but(expected, recorded.run(whole))
    assert whole._play is not None and expected["skipped"] == 1


def test_a_played_graph_never_waits(side_stream):
    training = Training("fp16", "cuda")
    whole = training.graph()
    training.run(whole, 6)
    window = [MicroBatch(batch, 0.25, i == 3) for i, batch in enumerate(training.data[0])]
    with sync_debug("error"):
        for _ in range(20):
            whole(training.train_step, window)


def test_a_step_that_reads_back_is_computed_as_ever(side_stream):
    def trained(run):
        training = Training("fp16", "cuda")
        training.extra = lambda loss: loss * (2.0 if loss.item() > 1e9 else 1.0)
        whole = None if run is computed else training.graph()
        return training.run(whole or run, 12), whole

    (expected, _), (found, whole) = trained(computed), trained(None)
    assert whole is not None and not same_but(expected, found)
    assert "a step waits for the device at test_cuda.py:" in (whole._refused or "")


def refused_capture():
    """In a process of its own: torch cannot leave such a capture. What waits here is not seen before."""
    with torch.cuda.stream(torch.cuda.Stream()):
        training = Training("fp16", "cuda")
        whole = training.graph()

        def extra(loss):
            if whole.is_capturing:
                torch.cuda.synchronize()
            return loss

        training.extra = extra
        training.run(whole, 12)


def test_a_refused_capture_ends_the_run_and_names_the_operation():
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", "import test_cuda; test_cuda.refused_capture()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert (
        "RunError: perf.graph=true" in done.stderr and "torch.cuda.synchronize()). Use perf.graph=false" in done.stderr
    )


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_played_graph_of_replicas_is_the_step(mode, side_stream, tmp_path):
    def is_the_step() -> bool:  # a function, so that nothing refers to its graph at the end
        trainings = [Training(mode, "cuda", lambda net: wrap_ddp(net, torch.device("cuda", 0))) for _ in range(2)]
        whole = trainings[1].graph()
        assert not same_but(trainings[0].run(computed), trainings[1].run(whole))
        return whole._play is not None and whole._num_warm_ups == 11

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        assert is_the_step()
    finally:
        end_process_group()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_run_as_a_graph_is_the_run(mode, own_folder):
    """With loaders that pin memory in a thread, evaluation, statistics and a resume in between."""
    more = [f"amp={mode}", "schedule.horizon=20", "amp.growth_interval=2", "doctor.statistics_every=7", "eval_every=6"]
    more += ["data.num_workers=2"]
    states = []
    for folder, steps, perf in (("plain", [20], []), ("graph", [9, 20], ["perf=graph"])):
        for step in steps:
            assert train.main([*SMALL, *more, *perf, f"steps={step}", f"run_dir={folder}"]) == 0
        states.append(torch.load(Path(folder, "checkpoints/step_00000020/state.pt"), weights_only=True))
    assert not same_but(*states)
    assert Path("graph/train.log").read_text().count("captured, and replayed from here on") == 2


@pytest.mark.parametrize("graph", ["false", "true"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "o2"])
def test_a_compiled_run_learns_what_the_eager_one_does(mode, graph, own_folder):
    more = ["model=resnet18", f"amp={mode}", "steps=12", "optimizer.lr=1e-3"]
    for folder, perf in (("plain", []), ("compiled", ["perf=compile", f"perf.graph={graph}"])):
        assert train.main([*SMALL, *more, *perf, f"run_dir={folder}"]) == 0
    losses = [json.loads(Path(folder, "summary.json").read_text())["eval"]["loss"] for folder in ("plain", "compiled")]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    text = Path("compiled/train.log").read_text()
    assert "are compiled by inductor" in text and "running it eagerly" not in text
    assert ("captured, and replayed" in text) == (graph == "true")
