"""Networks over several devices and threads: what a thread does not inherit, and that pipelines change no bit."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import same_but, state
from test_recipes import THREADS, WINDOW
from test_recipes import run as run_recipe
from tiers import rows
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply
from torch.utils._pytree import tree_leaves

import train
from amp_core import Amp, Clip, Ema, carry_autocast, keep_fp32, sync_grads
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.checkpoints.reading import read
from amp_core.cli.compose import compose
from amp_core.config.job import Job
from amp_core.config.rules import build
from amp_core.layouts.ddp import ReplicaParallel, wrap_data_parallel, wrap_ddp
from amp_core.layouts.placement import Placement
from amp_core.layouts.stages import Stages, cuts
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS
from amp_core.run.environment import Environment
from amp_core.tensors import unwrap

CPU = torch.device("cpu")
SHAPE = (3, 8, 8)
MODES = pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
NETS = pytest.mark.parametrize("name, options", [("cnn", {"width": 8}), ("mlp", {"width": 32, "depth": 4})])


def make(name: str = "cnn", shape: tuple[int, int, int] = SHAPE, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, CLASSIFIERS, options=options, num_classes=4, image_shape=shape)


def staged(amp: Amp, name: str = "cnn", num_stages: int = 3, *, options: Any = None, **settings: Any) -> Stages:
    return Stages(make(name, **(options or {})), [CPU] * num_stages, amp, image_shape=SHAPE, **settings)


def batch(count: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, *SHAPE, generator=generator), torch.arange(count) % 4


def everything(net: nn.Module, amp: Amp, *, outside: bool = False, images: Tensor | None = None) -> list[Tensor]:
    """Logits, gradients, and running statistics after one forward and backward pass."""
    given, labels = batch()
    images = given if images is None else images
    torch.manual_seed(7)  # dropout
    with amp.autocast() if outside else torch.autocast("cpu", enabled=False):
        logits = net(images)
    amp.backward(F.cross_entropy(logits.float(), labels.to(logits.device)))
    return [logits.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative distance of logits and gradients in the L2 norm."""
    x, y = (torch.cat([t.double().flatten() for t in each]) for each in (a, b))
    return float((x - y).norm() / y.norm())


def in_a_thread(fn: Callable[[], Any]) -> Any:
    """What `fn` returns or raises in another thread."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(fn())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_replica_in_a_thread_computes_in_fp32_or_in_the_wrong_type_unless_autocast_is_carried(dtype: Any) -> None:
    net, x = nn.Linear(4, 2), torch.randn(3, 4)
    replica = copy.deepcopy(net)

    def as_parallel_apply() -> Tensor:
        """What torch does for the threads of nn.DataParallel: it hands on `enabled` and not the dtype."""
        with torch.autocast("cpu", enabled=enabled):
            return replica(x)

    with torch.autocast("cpu", dtype=dtype):
        enabled = torch.is_autocast_enabled("cpu")
        carried, right = carry_autocast(replica), net(x)
        assert in_a_thread(lambda: replica(x)).dtype is torch.float32
        assert torch.equal(in_a_thread(lambda: carried(x)), right) and right.dtype is dtype
        torch.clear_autocast_cache()  # real replicas have weights that are no leaves, which are not cached
        assert in_a_thread(as_parallel_apply).dtype is torch.bfloat16  # the default, also under float16


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replicas_of_data_parallel_get_the_dtype_of_the_caller() -> None:
    net, x = nn.Linear(4, 2).cuda(), torch.randn(3, 4).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        plain = parallel_apply([net, net], [(x,), (x,)], devices=[0, 0])
        carried = parallel_apply([carry_autocast(net)] * 2, [(x,), (x,)], devices=[0, 0])  # type: ignore[list-item]
        assert [y.dtype for y in plain] == [torch.float16] * 2  # CUDA's default
        assert [y.dtype for y in carried] == [torch.bfloat16] * 2


class InThreads(nn.DataParallel):
    """Runs replicas as torch does on GPUs, on a CPU: each in a thread that gets `enabled` and not the dtype."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        enabled = torch.is_autocast_enabled("cpu")

        def run(replica: Any, args: Any, options: Any) -> Tensor:
            with torch.autocast("cpu", enabled=enabled):
                return replica(*args, **options)

        return [in_a_thread(partial(run, *each)) for each in zip(replicas, inputs, kwargs, strict=True)]


class ReplicasInThreads(ReplicaParallel, InThreads): ...


def test_replicas_in_threads_compute_in_the_dtype_of_the_caller_by_our_class_alone() -> None:
    net, parts = nn.Linear(4, 2), torch.randn(2, 3, 4).unbind()
    for dtype, by_torch in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (None, torch.float32)):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            found, theirs = (
                kind(net).parallel_apply([net, copy.deepcopy(net)], [(x,) for x in parts], [{}, {}])
                for kind in (ReplicasInThreads, InThreads)
            )
            assert all(torch.equal(y, net(x)) and y.dtype is net(x).dtype for y, x in zip(found, parts, strict=True))
            assert {y.dtype for y in theirs} == {by_torch}
    assert type(wrap_data_parallel(net, [torch.device("cuda", number) for number in range(2)])) is ReplicaParallel


def test_a_second_stage_in_a_thread_fails_where_16_bit_features_meet_fp32_weights() -> None:
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 2), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        features, carried = first(x), carry_autocast(second)
        assert "same dtype" in str(in_a_thread(lambda: second(features)))
        assert torch.equal(in_a_thread(lambda: carried(features)), second(features))
    # Entered inside of forward it holds in any thread.
    stages = Stages(nn.Sequential(first, second), [CPU] * 2, Amp.named("fp16"), image_shape=(4,))
    assert in_a_thread(lambda: stages(x)).dtype is torch.float16


@MODES
@NETS
def test_stages_compute_the_bits_of_the_network_that_they_were_cut_from(name: str, options: Any, mode: str) -> None:
    amp = Amp.named(mode)
    whole, stages = make(name, **options), staged(amp, name, options=options)
    assert list(stages.state_dict()) == list(whole.state_dict()) and len(stages.stages) == 3
    assert same(everything(stages, amp), everything(whole, amp, outside=True))
    whole.load_state_dict(stages.state_dict())


class OnDevice(Tensor):
    """A tensor of the CPU that says it is on another device: `to` moves it, and tensors of two devices do not meet."""

    where = CPU

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {leaf.where for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)}
        if func == Tensor.to and isinstance(args[1], torch.device):
            func, args, found = Tensor.clone, args[:1], {args[1]}
        elif func == Tensor.data.__set__:  # how nn.Module.to moves its weights
            args[0].where = args[1].where
        elif len(found) > 1 and func is not torch._has_compatible_shallow_copy_type:
            raise RuntimeError(f"tensors of {sorted(map(str, found))} meet in {func.__name__}")
        results = super().__torch_function__(func, types, args, {} if func is Tensor.clone else kwargs or {})
        for leaf in tree_leaves(results):
            if isinstance(leaf, OnDevice) and found:
                (leaf.where,) = found
        return results


@MODES
@pytest.mark.parametrize("threads", [False, True])
def test_stages_of_two_devices_meet_on_neither_and_compute_the_bits_of_one(threads: bool, mode: str) -> None:
    """Real numbers on devices that are only names, so that it needs no GPU."""
    amp, gpus = Amp.named(mode), [torch.device("cuda", number) for number in range(2)]
    net, images = make(), batch()[0].as_subclass(OnDevice)
    for module in net.modules():
        for name, param in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(param.detach().as_subclass(OnDevice)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.as_subclass(OnDevice))
    stages = Stages(net, gpus, amp, image_shape=SHAPE, chunks=2, threads=threads)
    found = everything(stages, amp, images=images)
    assert found[0].where == gpus[0]  # type: ignore[attr-defined]
    assert same(found, everything(staged(amp, num_stages=2, chunks=2, threads=threads), amp))
    stages.devices = [gpus[0]] * 2  # features stay where they are
    with pytest.raises(RuntimeError, match=r"tensors of \['cuda:0', 'cuda:1'\] meet in conv2d"):
        stages(images)


def test_copies_and_averages_of_stages_have_weights_of_their_own() -> None:
    amp = Amp.named("bf16")
    stages = staged(amp, chunks=2, threads=True)
    ema, twin = Ema(stages, 0.9), copy.deepcopy(stages)
    with torch.no_grad():
        for p in stages.parameters():
            p.zero_()
    images, _ = batch()
    assert not stages.eval()(images).any()
    assert twin.eval()(images).any() and torch.equal(twin(images), ema.model(images))
    assert twin(images).dtype is torch.bfloat16


def test_islands_inside_a_stage_compute_in_fp32() -> None:
    amp = Amp.named("bf16")
    net = keep_fp32(make(), ["9", "15"])
    seen = []
    net.get_submodule("9").register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    stages = Stages(net, [CPU] * 2, amp, image_shape=SHAPE, chunks=2, threads=True)
    seen.clear()
    assert stages(batch()[0]).dtype is torch.float32 and seen == [torch.float32] * 2


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_cuts_make_the_costliest_part_as_cheap_as_can_be(num_parts: int) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        costs = torch.randint(0, 9, (7,), generator=generator).tolist()
        ends = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), num_parts - 1)]
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(each)) for each in ends)
        found = cuts(costs, num_parts)
        assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and found[-1][1] == 7
        assert all(a < b for a, b in found) and max(sum(costs[a:b]) for a, b in found) == best


class Flattens(nn.Sequential):
    """A chain as torchvision's: features are flattened before the classifier, if they are images."""

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return self[1](x.flatten(1) if x.ndim == 4 else x)


@pytest.mark.parametrize("shape, first", [((3, 4, 4), nn.Conv2d(3, 2, 1)), ((5, 32), nn.Linear(32, 32))])
def test_images_are_flattened_before_a_linear_layer_and_sequences_are_not(shape: Any, first: nn.Module) -> None:
    net, calls = Flattens(first, nn.Linear(32, 4)), list[int]()
    stages = Stages(net, [CPU] * 2, Amp.named("fp32"), image_shape=shape, chunks=3)
    first.register_forward_hook(lambda _, args, output: calls.append(len(args[0])))
    x = torch.randn(6, *shape)
    assert stages(x).equal(torch.cat([net(part) for part in x.chunk(3)])) and calls == [2] * 6
    calls.clear()
    assert stages.eval()(x).equal(net(x)) and calls == [6] * 2  # an evaluation is not split


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vgg11", "mobilenet_v3_small"])
def test_networks_of_torchvision_that_are_chains_are_cut_in_the_middle(name: str) -> None:
    net = make(name, (3, 32, 32))
    names = list(net.state_dict())
    stages = Stages(net, [CPU] * 2, Amp.named("fp32"), image_shape=(3, 32, 32))
    assert list(stages.state_dict()) == names and min(len(stage) for stage in stages.stages) >= 6


def test_what_cannot_be_cut_is_refused() -> None:
    amp = Amp.named("bf16")
    with pytest.raises(ValueError, match="SqueezeNet is not the chain of its children: it computes something else"):
        Stages(make("squeezenet1_1", (3, 32, 32)), [CPU] * 2, amp, image_shape=(3, 32, 32))
    with pytest.raises(ValueError, match="VisionTransformer is not the chain of its children"):
        Stages(make("vit_b_32", (3, 32, 32)), [CPU] * 2, amp, image_shape=(3, 32, 32))
    with pytest.raises(ValueError, match="16 layers cannot be split into 17 stages"):
        staged(amp, num_stages=17)
    with pytest.raises(ValueError, match="the whole network is an fp32 island"):
        Stages(keep_fp32(make()), [CPU] * 2, amp, image_shape=SHAPE)


@MODES
@NETS
def test_threads_change_no_bit_also_of_running_statistics_and_dropout(name: str, options: Any, mode: str) -> None:
    amp = Amp.named(mode)
    in_turn = everything(staged(amp, name, options=options, chunks=8), amp)
    for _ in range(5):  # a race would not lose each time
        assert same(everything(staged(amp, name, options=options, chunks=8, threads=True), amp), in_turn)


@pytest.mark.slow
@pytest.mark.parametrize("mode, tolerance", [("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 1e-2)])
def test_chunks_change_the_order_of_sums_and_what_batch_norm_normalises_with(mode: str, tolerance: float) -> None:
    amp, options = Amp.named(mode), {"width": 32, "depth": 4}
    assert distance(*(everything(staged(amp, "mlp", options=options, chunks=n), amp) for n in (1, 8))) < tolerance
    assert distance(*(everything(staged(amp, "cnn", chunks=n), amp) for n in (1, 8))) > 0.1
    images, _ = batch()  # not so in evaluation, which cuts nothing
    a, b = (staged(amp, "cnn", chunks=n).eval()(images) for n in (1, 8))
    assert torch.equal(a, b)


def test_several_stages_that_draw_random_numbers_are_refused_in_threads_alone() -> None:
    options = {"width": 32, "depth": 4, "dropout": 0.1}
    with pytest.raises(ValueError, match="the stages 0, 1 have dropout and draw from one random generator"):
        staged(Amp.named("bf16"), "mlp", 2, options=options, chunks=2, threads=True)
    staged(Amp.named("bf16"), "mlp", 2, options=options, chunks=2)


def test_threads_follow_no_grad_and_hand_on_what_is_raised() -> None:
    stages = staged(Amp.named("bf16"), chunks=4, threads=True)
    images, _ = batch()
    assert stages(images).requires_grad
    with torch.no_grad():
        assert not stages(images).requires_grad
    stages.get_submodule("15").weight.data = torch.ones(4, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        stages(images)


def gradients_of(rank: int, threads: bool, num_ranks: int) -> list[Tensor]:
    """One window of two micro-batches, no BatchNorm."""
    amp = Amp.named("fp32")
    net: nn.Module = staged(amp, "mlp", 2, options={"width": 32}, chunks=2, threads=threads)
    net = wrap_ddp(net, None) if num_ranks > 1 else net
    images, labels = (part.chunk(num_ranks)[rank] for part in batch())
    for number in range(2):
        with sync_grads(net, when=number == 1):
            loss = F.cross_entropy(net(images.chunk(2)[number]), labels.chunk(2)[number])
            amp.backward(loss / (2 * num_ranks))
    report = amp.step(torch.optim.SGD(net.parameters(), lr=0.1), Clip.norm(0.1))
    return [report.grad_norm, *(p.detach() for p in unwrap(net).parameters())]


def test_two_processes_of_two_threads_are_one_process(on_ranks: Callable[..., list[Any]]) -> None:
    one = gradients_of(0, False, 1)
    a, b = on_ranks(gradients_of, True, 2)
    assert same(a, b)
    for x, y in zip(a, one, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # fp32 sums in another order


EVERYTHING = [*WINDOW, "schedule.horizon=6"]


def run(folder: str, *overrides: str, recipe: str = "model_parallel") -> str:
    return run_recipe(recipe, folder, "batch_size=8", *overrides)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("mode", rows(["bf16", "fp16"], "fp16"))
def test_a_run_in_threads_is_the_run_without(mode: str) -> None:
    settings = [f"amp={mode}", "recipe.chunks=2", *EVERYTHING]
    in_turn = state(run("off", "steps=6", *settings))
    assert not same_but(in_turn, state(run("threads", "steps=6", *settings, *THREADS)))


@pytest.mark.usefixtures("own_folder")
def test_data_parallel_on_a_cpu_is_a_single_process_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    single = state(run("single", "steps=3", *EVERYTHING, recipe="classification"))
    assert "DataParallel" not in capsys.readouterr().out
    replicas = state(run("replicas", "steps=3", "layout=data_parallel", *EVERYTHING, recipe="classification"))
    assert "layout=data_parallel on a CPU is layout=single" in capsys.readouterr().out
    assert not same_but(single, replicas)


def test_the_state_of_a_data_parallel_network_has_plain_names(tmp_path: Path) -> None:
    net = make()
    wrapped = ReplicaParallel(net)
    assert unwrap(wrapped) is net and isinstance(sync_grads(wrapped, when=False), object)
    Checkpoint(tmp_path, model=wrapped).save(1)
    assert list(read(tmp_path)["model"]) == list(net.state_dict())


def test_a_process_of_model_parallel_has_consecutive_gpus_of_its_own() -> None:
    cfg = build(compose(["recipe=model_parallel", "layout.num_stages=3"]))
    job = Job(cfg, run_dir=None)
    devices = Placement(Environment(job, torch.device("cuda", 3), 1, 1, 2)).devices  # no GPU is touched
    assert devices == [torch.device("cuda", number) for number in (3, 4, 5)]
    assert Placement(Environment(job, CPU, 0, 0, 1)).devices == [CPU] * 3


@pytest.mark.parametrize("layout, device", [("single", "meta"), ("fsdp", "meta"), ("data_parallel", "cpu")])
def test_a_network_of_one_process_goes_to_its_device_in_every_layout(layout: str, device: str) -> None:
    cfg, notes = build(compose([f"layout={layout}"])), list[str]()
    placement = Placement(Environment(Job(cfg, run_dir=None), torch.device(device), 0, 0, 1))
    net = nn.Linear(2, 2)
    assert placement.wrap(net, Amp.named("bf16"), notes) == [("", net)] and notes == []
    assert net.weight.device == torch.device(device)


REFUSED = {
    "layout=single: recipe=model_parallel does not run in it. Valid: model_parallel": ["layout=single"],
    "layout=ddp: recipe=model_parallel": ["layout=ddp"],
    "layout=model_parallel: recipe=classification": ["recipe=classification", "layout=model_parallel"],
    "layout.num_stages=1: expected at least 2": ["layout.num_stages=1"],
    "layout.num_stages=null": ["layout.num_stages=null"],
    "layout.num_stages=2: has no effect with layout=single": ["recipe=classification", "layout.num_stages=2"],
    "layout.nproc_per_node=2: layout=data_parallel": [
        *("recipe=classification", "layout=data_parallel", "layout.nproc_per_node=2")
    ],
    "recipe.pipeline=on": ["recipe.pipeline=on"],
    "recipe.pipeline=threads: recipe.chunks=1": ["recipe.pipeline=threads"],
    "recipe.chunks=0": ["recipe.chunks=0"],
    "model.name=cnn: 16 layers cannot be split into 17 stages": ["layout.num_stages=17"],
    "model.name=mlp: the stages 0, 1 have dropout": ["model=mlp", "model.options.dropout=0.1", *THREADS],
}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("message", rows(REFUSED, every=4))
def test_settings_that_cannot_work_are_refused(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["recipe=model_parallel", "device=cpu", "log.progress=false", *REFUSED[message]]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1
    assert not [path for path in Path().rglob("*") if path.is_file()]
