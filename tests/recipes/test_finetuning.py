"""A frozen base in few bits, adapters in fp32: what each costs in the other dtype, and what a checkpoint of them holds."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import same_but, state, summary
from torch import Tensor, nn

import train
from amp_core import Amp, Ema
from amp_core.checkpoints.parts import save_only_trainable
from amp_core.config.errors import ConfigError
from amp_core.lowp.islands import keep_fp32
from amp_core.models.gpt import GPT
from amp_core.step.gradients import weights_of
from recipes.finetuning import Knobs, Lora, adapt, find_layers, freeze, merged

pytestmark = pytest.mark.usefixtures("own_folder")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HALF = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
MODE = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
KNOBS = Knobs("finetuning", "1 steps", "loss", "min", 1, "auto", "lora", None, 4, 8.0, None, 64, 0.0)
LAYERS = ["blocks.0.qkv", "blocks.0.out", "blocks.0.up", "blocks.0.down"]


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs the extra peft: {package}")


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=256, length=16, width=64, depth=1, heads=2, **options)


def adapted(dtype: torch.dtype = BF16, knobs: Knobs = KNOBS, kind: str = "auto", net: GPT | None = None) -> GPT:
    """A frozen network with adapters that are not 0."""
    net = net or gpt()
    freeze(net, dtype, kind, LAYERS)
    torch.manual_seed(1)
    adapt(net, LAYERS, knobs)
    with torch.no_grad():
        for param in trained(net).values():
            param.normal_(std=0.05)
    return net


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in net.named_parameters() if param.requires_grad}


def answers(net: nn.Module, dtype: torch.dtype) -> Tensor:
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad(), Amp.named(MODE[dtype]).autocast():
        return net(tokens)


@HALF
def test_a_base_in_16_bits_gives_the_bits_of_autocast_in_less_memory(dtype: torch.dtype) -> None:
    net = gpt()
    low = copy.deepcopy(net)
    freeze(low, dtype, "auto", [])
    assert torch.equal(answers(net, dtype), answers(low, dtype))
    assert {
        name: p.dtype for name, p in low.named_parameters() if p.ndim == 2 and "embed" not in name
    } == dict.fromkeys([*(f"{layer}.weight" for layer in LAYERS), "head.weight"], dtype)
    assert {p.dtype for name, p in low.named_parameters() if "norm" in name or "embed" in name} == {FP32}
    everything = copy.deepcopy(net).to(dtype)  # norms, embedding and so the whole residual stream
    right = net(torch.arange(32).reshape(2, 16))
    wrong, ours = ((answers(n, dtype).double() - right).norm() for n in (everything, low))
    assert wrong > ours


def test_islands_and_tied_embeddings_keep_fp32_weights() -> None:
    net = gpt(tied=True)
    keep_fp32(net, ["blocks.0.up"])
    freeze(net, BF16, "auto", [])
    assert net.head.weight.dtype is net.blocks[0].up.weight.dtype is FP32  # type: ignore[union-attr]
    assert net.blocks[0].down.weight.dtype is BF16  # type: ignore[union-attr]
    assert answers(net, BF16).isfinite().all()


@pytest.mark.one_in(2)
@needs("bitsandbytes")
@pytest.mark.parametrize("kind, size, error", [("int8", 8, 2 / 127), ("nf4", 4, 0.16)])
def test_a_quantised_base_has_its_bits_and_passes_gradients_to_adapters(kind: str, size: int, error: float) -> None:
    """Rounded to 8 bits, a weight is off by 1/254 of the largest of its row, also when inputs are rounded so.

    Of the 16 values of NF4 two neighbours are at most 0.31 of the largest of 64 apart; off by half of it.
    """
    plain, net = gpt(), adapted(kind=kind)
    layer, other = net.blocks[0].up.base_layer, plain.blocks[0].up  # type: ignore[union-attr]
    assert layer.weight.numel() * layer.weight.element_size() * 8 == size * other.weight.numel()  # type: ignore[union-attr, operator]
    eye = torch.eye(64)
    rows = other.weight.abs().amax(1, keepdim=True) if kind == "int8" else other.weight.abs().max()  # type: ignore[union-attr]
    assert ((layer.train()(eye).T.float() - other.weight).abs() <= error * rows).all()  # type: ignore[operator, union-attr]
    amp = Amp.named("bf16")
    with amp.autocast():
        loss = net(torch.arange(32).reshape(2, 16)).float().square().mean()
    amp.backward(loss)
    assert all(p.grad is not None and p.grad.dtype is FP32 and p.grad.any() for p in trained(net).values())
    assert not layer.weight.requires_grad  # type: ignore[union-attr]


def test_only_adapters_have_gradients_moments_and_averages() -> None:
    net = adapted()
    names = {f"{layer}.{half}.weight" for layer in LAYERS for half in "ab"}
    assert trained(net).keys() == names and {p.dtype for p in trained(net).values()} == {FP32}
    amp = Amp.named("bf16")
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    ema = Ema(net, 0.5, warmup=False, share_frozen=True)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with amp.autocast():
        loss = net(torch.arange(32).reshape(2, 16)).float().square().mean()
    amp.backward(loss)
    ema.update(amp.step(optimizer))
    amp.update()
    assert {name for name, p in net.named_parameters() if p.grad is not None} == names
    assert {name for name, p in net.named_parameters() if not torch.equal(p, before[name])} == names
    assert set(weights_of(optimizer)) == set(trained(net).values()) and len(optimizer.state) == len(names)
    for name, average in ema.model.named_parameters():
        live = net.get_parameter(name)
        assert (average.data_ptr() == live.data_ptr()) is (name not in names)
        if name in names:
            assert torch.equal(average, before[name] + 0.5 * (live.detach() - before[name]))
    assert ema.state_dict().keys() == net.state_dict().keys() == names


def test_16_bit_adapters_under_a_loss_scale_are_refused_by_name_where_torch_names_none(caplog: Any) -> None:
    net = adapted(FP16)
    for param in trained(net).values():
        param.data = param.data.half()
    optimizer, scaler = torch.optim.SGD(trained(net).values(), lr=1.0), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=FP16):
        loss = net(torch.arange(32).reshape(2, 16)).float().mean()
    scaler.scale(loss).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    with pytest.raises(ConfigError, match=r"amp=fp16: blocks\.0\.qkv\.a\.weight, .*param\.data\.float\(\)"):
        Amp.named("fp16").prepare(net)
    Amp.named("bf16").prepare(net)  # no scale, but they stall
    assert "updates below half of their spacing are lost" in caplog.text
    caplog.clear()
    Amp.named("fp16").prepare(adapted(FP16))
    assert not caplog.text


@HALF
def test_adapters_in_16_bits_stall(dtype: torch.dtype) -> None:
    """A hundred updates of a fifth of the spacing: 20 spacings in fp32, none in 16 bits."""
    net = adapted(dtype)
    spacing = torch.finfo(dtype).eps
    moved = []
    for kept in (FP32, dtype):
        a = torch.ones_like(net.blocks[0].up.a.weight, dtype=kept)  # type: ignore[union-attr, arg-type]
        optimizer = torch.optim.SGD([weight := nn.Parameter(a)], lr=spacing / 5)
        for _ in range(100):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        moved.append((weight.detach().double() - 1).mean().item() / spacing)
    assert moved[0] == pytest.approx(20, rel=100 * torch.finfo(FP32).eps / spacing) and moved[1] == 0


@pytest.mark.one_in(2)
@needs("peft")
@HALF
def test_the_adapters_of_peft_compute_the_same_and_would_be_16_bit(dtype: torch.dtype) -> None:
    from amp_core.vision import import_torchvision

    import_torchvision()
    from peft import LoraConfig, inject_adapter_in_model

    by_hand, theirs = adapted(dtype), adapted(dtype, Knobs(**{**vars(KNOBS), "adapter": "peft"}))
    assert len(trained(theirs)) == len(trained(by_hand)) and {p.dtype for p in trained(theirs).values()} == {FP32}
    with torch.no_grad():
        for here, there in zip(trained(by_hand).values(), trained(theirs).values(), strict=True):
            there.copy_(here)
    a, b = (merged(net) for net in (by_hand, theirs))
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=1e-7) for name in a)
    ours, others = answers(by_hand, dtype), answers(theirs, dtype)
    assert (ours - others).norm() <= 4 * torch.finfo(dtype).eps * ours.norm()
    naive = gpt()
    freeze(naive, dtype, "auto", [])
    inject_adapter_in_model(LoraConfig(r=4, target_modules=LAYERS), naive)
    assert {p.dtype for p in trained(naive).values()} == {dtype}


@HALF
def test_merged_in_fp32_it_computes_the_same_and_in_16_bits_the_adapter_is_lost(dtype: torch.dtype) -> None:
    """An adapter of a tenth of the spacing of the weights: half of it would be needed to move one."""
    layer = nn.Linear(64, 64, bias=False).to(dtype)
    nn.init.constant_(layer.weight, 1.0)
    lora = Lora(layer, rank=1, alpha=1.0)
    nn.init.constant_(lora.a.weight, 1.0)
    nn.init.constant_(lora.b.weight, 0.1 * torch.finfo(dtype).eps)
    delta = lora.get_delta_weight("default")
    weight = merged(nn.ModuleDict({"layer": lora}))["layer.weight"]
    assert torch.equal(weight, 1 + delta) and torch.equal(layer.weight + delta.to(dtype), layer.weight)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_merged_network_answers_as_base_and_adapter(dtype: torch.dtype) -> None:
    net, plain = adapted(dtype), gpt()
    assert merged(net).keys() == plain.state_dict().keys()
    plain.load_state_dict(merged(net))
    expected = answers(net.float(), FP32)  # the same numbers, computed in fp32
    assert (answers(plain, FP32) - expected).norm() < 1e-5 * expected.norm()


SMALL = ["recipe=finetuning", "device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000", "log_every=1"]
SIZE = ["model=gpt_small", "model.options.depth=1", "model.options.width=32", "data.num_samples=64", "data.length=32"]
SMALL += [*SIZE, "batch_size=4", "recipe.base_steps=2", "recipe.rank=2"]


def run(folder: str, *overrides: str, code: int = 0) -> str:
    assert train.main([*SMALL, f"run_dir={folder}", *overrides]) == code
    return folder


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused(capsys: Any) -> None:
    run("a", "steps=2", "amp=bf16")
    run("b", "steps=1", "seed=1")
    saved = state("a")
    assert saved["model"] and all(name.split(".")[-2] in "ab" for name in saved["model"])
    assert len(saved["base"]["sha256"]) == 64 and saved["base"] != state("b")["base"]
    capsys.readouterr()
    run("a", "task=evaluate", "model.weights=b/base.pt", code=3)
    err = capsys.readouterr().err
    assert err.count("error:") == 1 and saved["base"]["sha256"] in err and state("b")["base"]["sha256"] in err
    run("a", "task=evaluate", "model.weights=a/base.pt")
    Path("a/base.pt").unlink()
    run("a", "task=evaluate", code=3)
    assert not Path("a/base.pt").exists()


@pytest.mark.slow
def test_a_run_that_trained_its_base_goes_on_as_one_that_was_given_it() -> None:
    settings = ["amp=bf16", "schedule.horizon=3", "ema.decay=0.5"]
    run("whole", "steps=3", *settings)
    run("parts", "steps=2", *settings)
    run("parts", "steps=3", *settings)
    given = run("given", "steps=3", "model.weights=whole/base.pt", *settings)
    assert not same_but(state("whole"), state("parts")) and not same_but(state("whole"), state(given))
    Path("early").mkdir()  # killed before its first checkpoint: the base is there, the adapters are made again
    shutil.copy("whole/base.pt", "early")
    assert not same_but(state("whole"), state(run("early", "steps=3", *settings)))


def test_the_merged_file_is_a_language_model_with_the_loss_of_the_run(capsys: Any) -> None:
    run("a", "steps=6", "amp=fp32", "optimizer.lr=0.02")
    capsys.readouterr()
    settings = ["recipe=language_model", "data=torch_headers", *SIZE, "device=cpu", "log.progress=false", "amp=fp32"]
    assert train.main([*settings, "task=evaluate", "model.weights=a/merged.pt"]) == 0
    assert (
        train.main([*settings, "task=evaluate", "model.weights=a"]) == 0
    )  # the same: checkpoints hold an adapter alone
    loss = float(capsys.readouterr().out.split("loss ")[1].split(",")[0])
    found = summary("a")["eval"]
    assert loss == pytest.approx(found["loss"], abs=1e-4)  # four digits are printed
    assert found["loss"] < found["base_loss"] - 0.01


def test_it_merges_into_the_16_bit_base_that_it_was_trained_with() -> None:
    run("a", "steps=2", "amp=bf16")
    base, adapter, both = (
        torch.load("a/base.pt", weights_only=True),
        state("a")["model"],
        torch.load("a/merged.pt", weights_only=True),
    )
    assert base.keys() == both.keys()
    for layer in LAYERS:
        weight = base[f"{layer}.weight"].bfloat16().float()
        delta = 16 / 2 * adapter[f"{layer}.b.weight"] @ adapter[f"{layer}.a.weight"]
        assert torch.equal(both[f"{layer}.weight"], weight + delta) and delta.any()


@needs("bitsandbytes")
def test_layers_that_4_bits_cannot_hold_are_refused_before_a_base_is_trained(capsys: Any) -> None:
    run("a", "recipe.base=nf4", code=2)
    assert "recipe.base=nf4: blocks.0.qkv has 32 inputs; expected a multiple of 64" in capsys.readouterr().err
    assert not Path("a").exists()


def test_layers_are_found_by_globs() -> None:
    assert find_layers(gpt(), None) == find_layers(gpt(), ["blocks.*"]) == LAYERS
    assert find_layers(gpt(), ["*.up", "head"]) == ["blocks.0.up", "head"]


def test_a_network_that_saves_only_what_is_trainable_loads_it_into_a_copy() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    save_only_trainable(net)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net[1].weight.fill_(3)
    assert list(net.state_dict()) == ["1.weight", "1.bias"]
    assert not any(twin.load_state_dict(net.state_dict()))
    assert torch.equal(twin[1].weight, net[1].weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.bias"):
        twin.load_state_dict({"1.weight": net[1].weight})
    assert F.mse_loss(twin(torch.ones(1, 2)), net(torch.ones(1, 2))) == 0
