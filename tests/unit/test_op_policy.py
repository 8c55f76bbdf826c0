"""CPU autocast under CUDA's policy: what it decides, that it computes and differentiates for real, and that it goes."""

from __future__ import annotations

import copy
import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import lines, summary
from torch import nn

import train
from amp_core import Amp
from amp_core.config.errors import ConfigError
from amp_core.config.rules import amp_config
from amp_core.lowp import op_policy as policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "OP_POLICY.md").read_text()
MODULE = runpy.run_path(str(ROOT / "scripts" / "op_policy.py"))
observed = MODULE["observed"]
FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
# A CPU has no kernels for fp16 complex numbers. Before torch 2.14 nothing had complex numbers of bf16; since then polar
# differs, which has them on CUDA in 2.14 and raises there in 2.15.
LEFT = {FP16: {"fft", "polar"}, torch.bfloat16: {"polar"} if hasattr(torch, "bcomplex32") else {"fft"}}


GPU_ONLY = """
    cudnn_convolution cudnn_convolution_transpose _thnn_fused_lstm_cell _thnn_fused_gru_cell
    _scaled_dot_product_flash_attention _cudnn_rnn miopen_rnn
"""
"""CUDA decides about kernels that a CPU does not have."""


@pytest.fixture(autouse=True)
def _stock_policy():
    policy.restore_policy()
    yield
    policy.restore_policy()


@pytest.fixture
def cuda_list():
    with policy.cuda_policy():
        yield


def is_cuda_policy():
    return bool(policy._ours.names)


def autocast(dtype=FP16, **options):
    return torch.autocast("cpu", dtype, **options)


# --- what is decided --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(f"torch {MODULE['minor_version']()}" not in PAGE, reason="the page is about another torch")
def test_the_page_says_what_the_installed_torch_does():
    assert MODULE["page"]() == PAGE
    assert json.loads(MODULE["VERSIONS"].read_text())[MODULE["minor_version"]()] == MODULE["decisions"]()


@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
def test_every_operator_gets_the_dtype_that_it_has_on_cuda(dtype):
    cuda, stock = observed("cuda", dtype), observed("cpu", dtype)
    assert sum(cuda[name] != stock[name] for name in cuda) >= 30  # else this test could not fail
    with policy.cuda_policy():
        changed = observed("cpu", dtype)
    assert {name for name in cuda if cuda[name] != changed[name]} == LEFT[dtype]
    assert observed("cpu", dtype) == stock


def test_every_autocast_kernel_that_torch_has_for_cuda_was_thought_of():
    lists = [policy.LOWER, policy.FP32, policy.FP32_RESULT, *policy.FP32_APPENDED, policy.WIDEST, policy.BANNED]
    ours = " ".join(lists).split()
    assert len(ours) == len(set(ours))
    on_cuda, on_cpu = policy.kernels_of("AutocastCUDA"), policy.kernels_of("AutocastCPU")
    named = {name for name in on_cuda if "imname" in name or "names" in name}  # dimensions with names: gone since 2.13
    assert on_cuda - set(ours) - on_cpu - named <= set(GPU_ONLY.split())
    # A CPU kernel that we replace decides otherwise; one that we leave, alike.
    assert set(ours) & on_cpu == {"prod", "prod.dim_int", "grid_sampler", "binary_cross_entropy"}
    assert not set(" ".join(policy.KEPT.values()).split()) & on_cuda


@pytest.mark.usefixtures("cuda_list")
def test_operators_that_the_page_cannot_show_follow_the_list_too():
    x = torch.rand(2, 3)
    with autocast():
        assert nn.GRUCell(3, 4)(x).dtype is FP16 and nn.LSTMCell(3, 4)(x)[0].dtype is FP16
        assert F.grid_sample(x.view(1, 1, 2, 3).half(), torch.rand(1, 2, 2, 2), align_corners=False).dtype is FP32
        assert F.normalize(x.half()).dtype is F.cosine_similarity(x.half(), x.half()).dtype is FP32
        assert torch.cdist(x.half(), x.half()).dtype is FP32
        assert torch.einsum("ij,kj->ik", x, x).dtype is FP16
        assert F.scaled_dot_product_attention(*[x.view(1, 1, 2, 3)] * 3).dtype is FP16
        assert nn.MultiheadAttention(4, 2)(*[torch.rand(2, 1, 4)] * 3)[0].dtype is FP16


@pytest.mark.usefixtures("cuda_list")
def test_float64_and_integers_are_not_cast():
    with autocast():
        assert torch.rand(3, dtype=FP64).softmax(0).dtype is FP64
        assert torch.mv(torch.rand(2, 3, dtype=FP64), torch.rand(3, dtype=FP64)).dtype is FP64
        assert torch.ones(3, dtype=FP64).norm().dtype is FP64
        assert torch.arange(3).sum().dtype is torch.int64
        assert torch.ops.aten.norm.Scalar(torch.rand(3, dtype=FP64)).dtype is FP64


@pytest.mark.usefixtures("cuda_list")
def test_what_cuda_refuses_is_refused():
    bf16, fp16 = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=FP16)
    with autocast(), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.dot(bf16, fp16)
    with autocast(), pytest.raises(RuntimeError, match="either float or double"):
        torch.quantile(fp16, 0.5)


def test_binary_cross_entropy_raises_what_it_raises_on_cuda():
    probabilities, targets = torch.full((3,), 0.5), torch.ones(3)
    expected = F.binary_cross_entropy(probabilities, targets)
    with policy.cuda_policy():
        with autocast(), pytest.raises(RuntimeError, match="unsafe to autocast") as raised:
            F.binary_cross_entropy(probabilities, targets)
        assert "torch.nn.BCEWithLogitsLoss" in str(raised.value)
        assert torch.equal(F.binary_cross_entropy(probabilities, targets), expected)  # outside autocast
        with autocast(), autocast(enabled=False):
            assert torch.equal(F.binary_cross_entropy(probabilities, targets), expected)
    with autocast():
        assert torch.equal(F.binary_cross_entropy(probabilities, targets), expected)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_sum_overflows_by_the_list_of_a_cpu_and_not_by_that_of_cuda():
    ones = torch.ones(70000, dtype=FP16)
    with autocast():
        assert ones.sum() == float("inf")
        with policy.cuda_policy():
            assert ones.sum() == ones.sum(0) == 70000
            assert ones.sum(dtype=FP16) == float("inf")  # the caller's dtype is respected
        assert ones.sum() == float("inf")


def test_an_average_pool_computes_in_fp32_and_returns_16_bits():
    x = torch.rand(1, 2, 4, 4, 4).half()
    with autocast(), policy.cuda_policy():
        pooled = F.avg_pool3d(x, 2)
    assert torch.equal(pooled, F.avg_pool3d(x.float(), 2).half())


@pytest.mark.usefixtures("cuda_list")
def test_in_place_and_out_variants_stay_alone_as_on_cuda():
    x, out = torch.rand(3).half(), torch.empty(3, dtype=FP16)
    with autocast():
        assert torch.exp(x, out=out) is out and torch.equal(out, x.exp().half())
        assert x.clone().exp_().dtype is x.clone().pow_(2).dtype is FP16
        assert x.clone().index_put_((torch.tensor([0]),), x[:1]).dtype is FP16


class Attention(nn.Module):
    """A convolution, layer norm, attention with a softmax of its own, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.gelu(self.conv(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + ((q @ k.transpose(1, 2)) * 8**-0.5).softmax(-1) @ v
        return self.head(F.normalize(x, dim=-1).mean(1))


NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 5)),
    "attention": Attention,
}


def gradients(net, x, target, **region):
    """Gradients of a loss with a gradient penalty, as one vector."""
    x = x.clone().requires_grad_(True)
    with autocast(**region):
        out = net(x)
        loss = F.cross_entropy(out, target)
    (inner,) = torch.autograd.grad(loss.to(x.dtype) * 64, x, create_graph=True)
    (loss + (inner / 64).square().sum()).backward()
    return torch.cat([p.grad.double().flatten() for p in net.parameters()])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("cuda_list")
def test_gradients_and_double_backward_are_those_of_fp64_within_fp16(name):
    net, x, target = NETS[name](), torch.rand(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
    exact = gradients(copy.deepcopy(net).double(), x.double(), target, enabled=False)
    found = gradients(net, x, target)
    # 11 bits are 5e-4 per rounding; over seeds the deviation is 6e-4 to 1.3e-3.
    assert (found - exact).norm() < 5e-3 * exact.norm() and (found != exact).any()


# --- weights ----------------------------------------------------------------------------------------------------------


def used_twice(product, weight, **region):
    """The gradient of a weight that is used twice in one region."""
    x = torch.full((3,), 40000.0)
    with autocast(**region):
        y = product(weight, x).float() + product(weight, x).float()
    return torch.autograd.grad(y.sum(), weight)[0]


@pytest.mark.usefixtures("cuda_list")
def test_a_weight_is_cast_once_per_region_so_that_its_gradients_are_summed_in_16_bits():
    weight = nn.Parameter(torch.full((2, 3), 1e-4))
    as_torch, ours = used_twice(torch.matmul, weight), used_twice(torch.mv, weight)
    assert torch.equal(ours, as_torch) and torch.isinf(ours).all()
    assert torch.equal(used_twice(torch.mv, weight, cache_enabled=False), torch.full((2, 3), 80000.0))
    assert torch.equal(used_twice(lambda w, x: torch.mv(w * 1, x), weight), torch.full((2, 3), 80000.0))


@pytest.mark.usefixtures("cuda_list")
def test_copies_of_weights_go_with_the_region():
    weight, x = nn.Parameter(torch.ones(2, 3)), torch.ones(3)
    with autocast():
        with autocast():
            assert torch.mv(weight, x).sum() == 6
        with torch.no_grad():
            weight.zero_()
        assert torch.mv(weight, x).sum() == 6  # as torch does with its own copies: they go stale inside a region
        assert policy._copies
    assert not policy._copies
    with autocast():
        assert torch.mv(weight, x).sum() == 0
        with torch.no_grad():  # leaves no copy without a graph
            torch.mv(nn.Parameter(torch.ones(2, 3)), x)
        with torch.inference_mode():
            assert torch.mv(weight, x).sum() == 0
    with torch.no_grad(), autocast():
        torch.mv(weight, x)
        with torch.enable_grad():
            assert torch.mv(weight, x).requires_grad


# --- the switch -------------------------------------------------------------------------------------------------------


def answers():
    """Bits of operators whose kernels are replaced, with a seed of their own."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(x[:, :3] - 0.5)
    with autocast():
        y = torch.cat(
            [x.half().softmax(1), F.layer_norm(x.half(), (8,)), x.half().exp(), x.half() ** 3, F.linear(x, x.T @ x)]
        )
        z = F.linear(x[:, :3], weight).sum()
    return [y, z, *torch.autograd.grad(z, weight), F.avg_pool3d(x.view(1, 1, 4, 4, 2), 2)]


def test_the_policy_leaves_no_trace():
    before, kernels, clear = answers(), policy.kernels_of("AutocastCPU"), torch.clear_autocast_cache
    policy.use_cuda_policy()
    policy.use_cuda_policy()
    assert is_cuda_policy() and not torch.equal(answers()[0], before[0])
    policy.restore_policy()
    policy.restore_policy()
    assert not is_cuda_policy()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(answers(), before, strict=True))
    assert policy.kernels_of("AutocastCPU") == kernels and torch.clear_autocast_cache is clear


def test_amp_uses_it_when_asked_and_touches_nothing_otherwise():
    for mode in ("fp16", "fp32", "o2"):
        Amp.named(mode)
        assert not is_cuda_policy()
    Amp.named("fp32", op_policy="cuda")  # nothing is autocast
    assert not is_cuda_policy()
    amp = Amp.named("fp16", op_policy="cuda")
    with amp.autocast():
        assert torch.rand(3).half().softmax(0).dtype is FP32
    Amp.named("fp16")
    assert is_cuda_policy()


def test_the_setting_is_checked():
    assert amp_config("fp16").op_policy == "device"
    with pytest.raises(ConfigError, match="op_policy=gpu: expected one of device, cuda"):
        amp_config("fp16", op_policy="gpu")
    warned = train.checked(["amp=tf32", "amp.op_policy=cuda", "device=cpu"]).notes
    assert any("amp.op_policy=cuda has no effect in amp=tf32" in text for text in warned)
    assert not any("op_policy" in text for text in train.checked(["amp=fp16", "amp.op_policy=cuda"]).notes)


def test_a_run_uses_it_and_puts_it_back(own_folder, monkeypatch):
    small = ["data=synthetic", "data.num_samples=48", "data.image_size=8", "data.num_classes=4"]
    small += ["model.options.width=8"]
    small += ["device=cpu", "log.progress=false", "batch_size=8", "steps=4", "accumulation=2", "log_every=1", "seed=1"]
    used = []
    softmax = policy._fp32_result
    monkeypatch.setattr(policy, "_fp32_result", lambda op: used.append(str(op)) or softmax(op))
    for folder, overrides in {"stock": [], "cuda": ["amp.op_policy=cuda"]}.items():
        assert train.main([*small, "amp=fp16", f"run_dir={folder}", *overrides]) == 0
        assert not is_cuda_policy() and summary(folder)["status"] == "finished"
    assert "aten.softmax.int" in used
    stock, cuda = ([line["loss"] for line in lines(folder) if line["split"] == "train"] for folder in ("stock", "cuda"))
    assert stock == pytest.approx(cuda, rel=1e-2)


def test_explicit_dtypes_compute_norms_and_losses_in_16_bits_and_autocast_in_fp32() -> None:
    explicit, autocast = MODULE["explicit"](torch.float16), MODULE["observed"]("cuda", torch.float16)
    for name in ("layer_norm", "cross_entropy", "softmax", "sum"):
        assert (explicit[name][0], autocast[name]) == ("fp16", "fp32")
    assert explicit["linear"][0] == autocast["linear"] == "fp16" and "raises" in explicit["linear"]
    x = torch.randn(4, 1000) + 30
    exact = F.cross_entropy(x.double(), torch.arange(4))
    off = [
        abs(F.cross_entropy(x.to(dtype), torch.arange(4)).double() - exact) for dtype in (torch.bfloat16, torch.float32)
    ]
    assert off[0] > 1e-3 > 1e3 * off[1]


def test_flex_attention_under_autocast_computes_in_16_bits_also_with_keys_that_were_rotated_in_fp32() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    x, layer = torch.randn(1, 2, 16, 16), nn.Linear(16, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), warnings.catch_warnings():  # no backward on a CPU
        warnings.simplefilter("ignore")  # eager flex_attention is slow and says so
        q = layer(x)
        low, mixed = flex(q, q, q), flex(q, q.float(), q)
    assert q.dtype is low.dtype is torch.bfloat16 and mixed.equal(low)
    exact = F.scaled_dot_product_attention(q.double(), q.double(), q.double())
    torch.testing.assert_close(low.double(), exact, rtol=0, atol=2**-7 * float(q.abs().max()))
