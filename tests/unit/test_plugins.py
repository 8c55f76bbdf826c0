"""`amp_plugins`: its scaler beside torch's, and its promises in trainers that are installed. See also test_idioms."""

from __future__ import annotations

import collections
import copy
import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp
from amp_core.doctor.plain_loop import RandomState
from amp_core.vision import import_torchvision
from amp_plugins import GradScaler, TooManySkipsError, names

ROOT = Path(__file__).resolve().parents[2]
BAD = float("nan")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def batches(num: int, bad: int | None = None) -> list[Tensor]:
    found = list(torch.randn(num, 8, 4, generator=torch.Generator().manual_seed(1)))
    if bad is not None:
        found[bad][0] = BAD
    return found


def train(scaler: Any, fused: bool, xs: list[Tensor]) -> list[Tensor]:
    """The weights, buffers and moments."""
    model = net()
    scaler.guard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for x in xs:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_bad_batch_leaves_what_it_leaves_with_amp(enabled: bool, fused: bool) -> None:
    xs, policy = batches(6, bad=2), {"init_scale": 1024.0} if enabled else {}
    got = train(GradScaler("cpu", 1024.0, enabled=enabled), fused, xs)
    amp, model = Amp.named("fp16" if enabled else "fp32", **policy), net()
    amp.guard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for x in xs:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
    right = [*model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]
    assert all(map(torch.equal, right, got)) and all(bool(each.isfinite().all()) for each in got)


def test_states_load_both_ways_and_copies_work() -> None:
    ours, torchs = GradScaler("cpu", 512.0), torch.amp.GradScaler("cpu", 8.0)
    ours.scale(torch.ones(()))
    torchs.load_state_dict(ours.state_dict())
    assert torchs.get_scale() == 512.0
    again = GradScaler("cpu")
    again.load_state_dict({**torchs.state_dict(), "growth_interval": 7})
    assert (again.get_scale(), again.get_growth_interval()) == (512.0, 7)
    for twin in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert twin.state_dict() == again.state_dict()


CALLS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "backward": lambda scaler, optimizer, w: scaler.scale(w.sum()).backward(),
    "overflow": lambda scaler, optimizer, w: scaler.scale((w * torch.inf).sum()).backward(),
    "unscale": lambda scaler, optimizer, w: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer, w: scaler.step(optimizer),
    "update": lambda scaler, optimizer, w: scaler.update(),
    "set": lambda scaler, optimizer, w: scaler.update(32.0),
    "clear": lambda scaler, optimizer, w: optimizer.zero_grad(),
    "load": lambda scaler, optimizer, w: scaler.load_state_dict({}),
}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    "calls",
    [
        "step",
        "update",
        "step update",
        "set",
        "backward set",
        "backward unscale update clear backward step update",
        "overflow unscale update clear backward step update",
        "backward unscale unscale",
        "backward step step",
        "backward step unscale",
        "backward step update update",
        "load",
    ],
)
def test_calls_in_any_order_do_what_they_do_with_torchs(calls: str, enabled: bool) -> None:
    outcomes = []
    for kind in (torch.amp.GradScaler, GradScaler):
        weight, error = nn.Parameter(torch.ones(2)), None
        scaler, optimizer = kind("cpu", 64.0, enabled=enabled), torch.optim.SGD([weight], lr=1.0)
        scaler.scale(torch.ones(()))
        try:
            for call in calls.split():
                CALLS[call](scaler, optimizer, weight)
        except (AssertionError, RuntimeError) as raised:
            error = type(raised)
        outcomes.append((error, weight.tolist(), scaler.get_scale()))
    assert outcomes[0] == outcomes[1]


def test_the_doctor_of_a_plain_loop_names_the_fault_and_the_error_holds_it(caplog: Any) -> None:
    from amp_plugins.doctor import LoopDoctor

    model, scaler = net(), GradScaler("cpu", enabled=False, max_consecutive_skips=3)
    scaler.guard(model)
    optimizer, doctor = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), LoopDoctor(scaler, model)

    @doctor.watch
    def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def train(x: Tensor) -> None:
        scaler.scale(compute_loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    x, bad = batches(2, bad=1)
    train(x)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    train(x.clone().fill_(BAD))
    (found,) = doctor.reports
    assert (found.step, found.cause) == (2, "bad input") and "It is batch of micro-batch 1 of 1" in found.why
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), random) and len(caplog.records) == 1
    assert copy.deepcopy(scaler).doctor is None
    train(bad)
    with pytest.raises(TooManySkipsError, match=r"(?s)3 steps in a row were skipped.*The doctor has found.*bad input"):
        train(bad)


def test_a_healthy_window_costs_the_doctor_thirty_calls_and_no_operation(monkeypatch: Any) -> None:
    """Less than 100 us; numpy's state alone took 60: it is read again after a draw only."""
    from amp_plugins.doctor import LoopDoctor

    def get_state(real: Callable[[], Any] = np.random.get_state) -> Any:
        return real()  # Cython's own is not seen

    monkeypatch.setattr(np.random, "get_state", get_state)

    def cost(watches: bool, draw: Callable[[], Any] = int) -> tuple[collections.Counter[str], int]:
        model, (x,), calls = net(), batches(1), collections.Counter[str]()
        scaler, optimizer = GradScaler("cpu", enabled=False), torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler.guard(model)
        compute: Any = LoopDoctor(scaler, model).watch(model) if watches else model
        for i in range(3):
            draw()
            sys.setprofile((lambda frame, event, arg: _called(calls, frame, event, arg)) if i == 2 else None)
            with _Operations() as operations:
                scaler.scale(compute(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            sys.setprofile(None)
        return calls, operations.number

    (alone, operations), (watched, same) = cost(False), cost(True)
    assert operations == same and 5 < watched.total() - alone.total() <= 30
    assert watched["get_state"] == 1 and cost(True, np.random.rand)[0]["get_state"] == 2  # torch's, and numpy's


def _called(calls: collections.Counter[str], frame: Any, event: str, arg: Any) -> None:
    if event in ("call", "c_call"):
        calls[frame.f_code.co_name if event == "call" else arg.__name__] += 1


class _Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_snapshot_has_numpys_state_whatever_was_drawn_since_the_last_one() -> None:
    before = None
    np.random.seed(1)
    for draw in (int, int, np.random.rand, int, np.random.randn, int, np.random.randn, int, lambda: np.random.seed(1)):
        draw()  # of two normal numbers the second is kept, and moves no word of the generator
        right = np.random.get_state()
        before = RandomState(torch.device("cpu"), before)
        np.random.rand(3)
        before.restore()
        assert all(map(np.array_equal, right, np.random.get_state()))


def test_a_trainer_without_a_scale_writes_no_scaler(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="amp_plugins.huggingface is for it")
    import_torchvision()
    from amp_plugins.huggingface import SafeTrainer

    for enabled in (False, True):
        trainer = object.__new__(SafeTrainer)
        scaler = GradScaler("cpu", enabled=enabled)
        trainer.accelerator = SimpleNamespace(scaler=scaler)
        trainer.args = SimpleNamespace(should_save=True)
        trainer._save_scaler(str(tmp_path))
        assert (tmp_path / "scaler.pt").exists() == enabled


def test_what_follows_moves_with_taken_steps_and_its_copies_are_plain() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    schedule, scaler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i), GradScaler("cpu", enabled=False)
    scaler.follow(schedule)
    for value in (1.0, BAD, 1.0):
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    assert (optimizer.param_groups[0]["lr"], scaler.skipped) == (0.25, 1)
    schedule.lr_lambdas = [abs]
    for twin in (copy.deepcopy(schedule), copy.copy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert type(twin) is torch.optim.lr_scheduler.LambdaLR and twin.last_epoch == 2
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step\(\) needs metrics"):
        scaler.follow(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(TypeError, match="object has no step"):
        scaler.follow(object())
    with pytest.raises(RuntimeError, match="takes no closure"):
        scaler.step(optimizer, lambda: 0.0)


@pytest.mark.parametrize("fused", [False, True])
def test_too_many_skips_in_a_row_raise_with_the_finding(fused: bool) -> None:
    scaler = GradScaler("cpu", enabled=False, max_consecutive_skips=3)
    scaler.finding = "the logarithm of 0"
    with pytest.raises(TooManySkipsError, match=r"3 steps in a row were skipped.*the logarithm of 0"):
        train(scaler, fused, [torch.full((8, 4), BAD)] * 3)


@pytest.mark.slow
def test_importing_the_package_imports_no_trainer_and_the_core_does_not_import_it() -> None:
    found = (
        "[m for m in ('accelerate', 'lightning', 'transformers', 'timm', 'hydra', 'torchvision') if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", f"import sys, amp_plugins; assert not {found}"], cwd=ROOT, check=True)
    files = [path for folder in ("amp_core", "amp_tools", "recipes") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in files if re.search(r"^\s*(?:from|import) amp_plugins", path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("library", ["torch", *names.NAMES])
def test_the_private_names_are_there_and_a_missing_one_is_named(library: str, monkeypatch: Any) -> None:
    if library != "torch":
        pytest.importorskip(library, reason="the table is of what is installed")
    import_torchvision()
    assert names.missing(library) == []
    if library != "torch":
        monkeypatch.setitem(names.NAMES, library, ("amp_plugins:GradScaler.gone",))
        with pytest.raises(ImportError, match=r"there is no amp_plugins:GradScaler.gone"):
            names.require("timm" if library == "timm" else library)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gradients_that_accelerate_clips_are_unscaled(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="amp_plugins.accelerate is for it")
    from amp_plugins.accelerate import protect

    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        protect(accelerator)
        net, optimizer = nn.Linear(8, 8), None
        before = [p.detach().clone() for p in net.parameters()]
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        accelerator.backward((net(torch.ones(4, 8)) * 10).float().square().mean())
        norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        update = (
            sum(float((p.detach() - b).square().sum()) for p, b in zip(net.parameters(), before, strict=True)) ** 0.5
        )
        # 24 bits, of 72 squares; torch divides by the norm and 1e-6.
        assert update == pytest.approx(0.5, rel=72 * 2**-24 + 1e-6) and 0.5 < norm < 1000
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def accelerators() -> Any:
    from accelerate import Accelerator

    from amp_plugins.accelerate import protect

    accelerator = Accelerator(cpu=True)
    protect(accelerator)
    accelerator.prepare(net())
    return accelerator


MADE: dict[str, Callable[[], Any]] = {
    "accelerate": accelerators,
    "lightning": lambda: importlib.import_module("amp_plugins.lightning").AmpPrecision("16-mixed", "cpu"),
    "fabric": lambda: importlib.import_module("amp_plugins.lightning").FabricPrecision("bf16-mixed", "cpu"),
    "lightning's doctor": lambda: importlib.import_module("amp_plugins.lightning").LightningDoctor(after_skips=2),
    "timm": lambda: importlib.import_module("amp_plugins.timm").NativeScaler("cpu", init_scale=4.0),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_what_plugins_make_can_be_copied_and_pickled(name: str, copied: Callable[[Any], Any]) -> None:
    pytest.importorskip({"fabric": "lightning"}.get(name, name.split("'")[0]), reason="its plugin is for it")
    import_torchvision()
    made = MADE[name]()
    twin = copied(made)
    assert type(twin) is type(made)
    if name == "accelerate":
        assert twin.prepare_model.args[0] is twin
        made.state._reset_state(True)
    for each, other in ((made, twin), (getattr(made, "_scaler", made), getattr(twin, "_scaler", twin))):
        if isinstance(scaler := getattr(each, "scaler", each), GradScaler):
            got = getattr(other, "scaler", other)
            assert (
                (got is not scaler or twin is made)
                and got.state_dict() == scaler.state_dict()
                and got.is_trainers == scaler.is_trainers
            )


def test_a_doctor_is_not_copied_with_its_loop() -> None:
    from amp_plugins.doctor import LoopDoctor

    model, scaler = net(), GradScaler("cpu")
    doctor = LoopDoctor(scaler, model)
    with pytest.raises(TypeError, match="a LoopDoctor cannot be copied: make a new one"):
        copy.deepcopy(doctor)
    assert pickle.loads(pickle.dumps(scaler)).doctor is None


def test_lightning_refuses_what_its_plugin_is_not_made_for() -> None:
    import_torchvision()
    pytest.importorskip("lightning", reason="amp_plugins.lightning is for it")
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from amp_plugins.lightning import AmpPrecision, FabricPrecision

    plugin = AmpPrecision("bf16-mixed", "cpu")
    with pytest.raises(ValueError, match="the scaler is another trainer's: give each its own"):
        AmpPrecision("bf16-mixed", "cpu", plugin.scaler)
    with pytest.raises(ValueError, match=r"enabled=False, and precision='16-mixed': expected enabled=True"):
        AmpPrecision("16-mixed", "cpu", copy.deepcopy(plugin.scaler))
    with pytest.raises(ValueError, match="precision='16-true': expected one of 32-true, bf16-mixed, 16-mixed"):
        AmpPrecision("16-true", "cpu")
    with pytest.raises(ValueError, match="Received both `precision=16-mixed`"):
        Trainer(accelerator="cpu", precision="16-mixed", plugins=[plugin], logger=False)
    module = SimpleNamespace(_trainer=SimpleNamespace(strategy=object.__new__(DeepSpeedStrategy)))
    with pytest.raises(ValueError, match="DeepSpeedStrategy scales, clips and steps by itself"):
        plugin.connect(module, [], [])
    engine = type("DeepSpeedEngine", (nn.Linear,), {})(1, 1)  # which Fabric passes with each loss
    with pytest.raises(ValueError, match="DeepSpeedEngine scales, clips and steps by itself"):
        FabricPrecision("bf16-mixed", "cpu").backward(engine(torch.ones(1)), engine)


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_the_hf_trainer_refuses_optimizers_that_step_in_the_backward_pass(optim: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="amp_plugins.huggingface is for it")
    import_torchvision()
    from amp_plugins.huggingface import SafeTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", optim=optim)
    with pytest.raises(ValueError, match=rf"optim='{optim}' steps in the backward pass"):
        SafeTrainer(net(), arguments)


def test_accelerate_is_protected_once_and_refuses_what_steps_by_itself() -> None:
    accelerate = pytest.importorskip("accelerate", reason="amp_plugins.accelerate is for it")
    from amp_plugins.accelerate import protect

    accelerator = accelerate.Accelerator(cpu=True)
    scaler = protect(accelerator)
    assert protect(accelerator) is scaler and not scaler.is_enabled()
    accelerator.scaler = None
    with pytest.raises(ValueError, match=r"enabled=True, and the accelerator mixed_precision='no'"):
        protect(accelerator, GradScaler("cpu"))
    accelerator.state.distributed_type = accelerate.utils.DistributedType.DEEPSPEED
    try:
        with pytest.raises(ValueError, match="DeepSpeed scales, clips and steps by itself"):
            protect(accelerator)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("enabled, updates", [(True, True), (False, True), (False, False)])
def test_a_bad_loss_alone_is_skipped_whatever_the_loop_calls(
    enabled: bool, updates: bool, clips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 3 has a loss of NaN and finite gradients. `unscale_` begins no window, and a loop may never update."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", enabled=enabled)
    scaler.guard(model)
    moved = []
    for step in range(6):
        before = [tensor.clone() for tensor in model.state_dict().values()]
        loss = model(torch.randn(16, 8)).square().mean()
        scaler.scale(loss + torch.nan if step == 3 else loss).backward()
        if clips:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if updates:
            scaler.update()
        optimizer.zero_grad()
        scaler.end_window()
        moved.append([not torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True)])
    assert [any(each) for each in moved] == [True, True, True, False, True, True]
    assert not updates or not caplog.records  # that its buffers are not guarded
