"""The doctor on networks of timm and transformers, each healthy and with three faults: needs both packages.

The loop is torch's own: autocast to fp16, `GradScaler`. Each fault is located at its module and line, or its weight; its
cause is named; each change that is printed as tried lets the loop take its step; and without the fault, or with what the
report asks for, the doctor is silent.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from foreign_models import MODELS, NEEDED

from amp_core import Amp, Doctor, keep_fp32

pytestmark = [*NEEDED, pytest.mark.filterwarnings("ignore")]  # of these packages
HERE = str(Path(__file__).relative_to(Path(__file__).resolve().parents[2]))
INF = float("inf")


def normed(y, eps):
    y = y * (torch.arange(len(y)) > 0).to(y.dtype).view(-1, *[1] * (y.ndim - 1))  # a sample that was dropped
    return y / (y.square().mean(-1, keepdim=True).sqrt().detach() + eps)  # the eps


def masked(y, first):
    mask = torch.zeros_like(y)
    mask[0, ..., first:] = -INF
    return y * torch.softmax(y + mask, -1)  # the mask


def large(y):
    return torch.exp(12 * y.abs() / y.abs().max().detach())  # the exponential


CODE = {  # what a module does with its result, and with what the doctor asks for; the cause, and the end of the line
    "eps": (lambda y: normed(y, 1e-8), lambda y: normed(y, 1e-3), "eps lost in 16 bits", "# the eps"),
    "mask": (lambda y: masked(y, 0), lambda y: masked(y, 1), "nothing left by a mask", "# the mask"),
    "exp": (large, lambda y: large(y.float()).log1p(), "overflow in a function", "# the exponential"),
}
FAULTS = {  # the modules whose weight is large, is NaN, and whose code is wrong
    "vit_tiny_patch16_224": ("blocks.2.attn.qkv", "blocks.0.mlp.fc2", "blocks.3.attn.qkv", "eps"),
    "mobilenetv3_small_100": ("blocks.3.0.conv_dw", "blocks.2.0.se.conv_reduce", "blocks.4.0.conv_pwl", "mask"),
    "llama": ("model.layers.1.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.2.self_attn.v_proj", "exp"),
    "t5": (
        *("decoder.block.0.layer.1.EncDecAttention.q", "encoder.block.1.layer.0.SelfAttention.v"),
        *("decoder.block.1.layer.0.SelfAttention.o", "eps"),
    ),
}


def patched(net, name, function):
    module = net.get_submodule(name)
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, *args: function(cls.forward(self, *args))})
    return net


def looped(model, net, batch, scale=1024.0, dtype=torch.float16):
    """A step of the loop that a user has; whether it was taken."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=scale), torch.optim.SGD(net.parameters(), 0.0)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model.loss(net, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = [loss, *(p.grad for p in net.parameters() if p.grad is not None)]
        scaler.step(optimizer)
        scaler.update()
        return all(bool(each.isfinite().all()) for each in found)

    torch.manual_seed(1)
    return step


def diagnosed(model, net, batch):
    return Doctor(Amp.named("fp16"), net).locate(looped(model, net, batch), batch)


def is_fixed(model, net, batch, python):
    """Whether the loop takes its step with a change that was printed as tried."""
    net, scale = copy.deepcopy(net), re.search(r"init_scale=([^,)]+)", python)
    for line in python.split("; "):
        if line.startswith("keep_fp32"):
            exec(line, {"keep_fp32": keep_fp32, "model": net})
    dtype = torch.bfloat16 if "dtype=torch.bfloat16" in python else torch.float16
    return looped(model, net, batch, float(scale[1]) if scale else 1024.0, dtype)()


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_networks_of_others_are_found_and_is_fixed(name):
    model, (*places, kind) = MODELS[name], FAULTS[name]
    wrong, right, cause, line = CODE[kind]
    torch.manual_seed(0)
    sound, batch = model.build(), model.batch(4)
    assert diagnosed(model, sound, batch) is None
    grown, poisoned, coded = (copy.deepcopy(sound) for _ in range(3))
    outputs = []
    hook = sound.get_submodule(places[0]).register_forward_hook(lambda module, inputs, y: outputs.append(y.detach()))
    with torch.no_grad():
        torch.manual_seed(1)
        model.loss(sound, batch)
        hook.remove()
        weight = grown.get_submodule(places[0]).weight.mul_(4 * 65504 / outputs[0].abs().max())
        poisoned.get_submodule(places[1]).weight.view(-1)[0] = float("nan")
    size = "overflow in a cast" if weight.abs().max() > 65504 else "overflow in a product"
    for net, place, expected in (
        (grown, places[0], size),
        (poisoned, places[1], "poisoned weight"),
        (patched(coded, places[2], wrong), places[2], cause),
    ):
        assert not looped(model, copy.deepcopy(net), batch)()
        before, diagnosis = copy.deepcopy(net.state_dict()), diagnosed(model, net, batch)
        assert all(torch.equal(value.nan_to_num(), before[k].nan_to_num()) for k, value in net.state_dict().items())
        assert diagnosis is not None and diagnosis.cause == expected, str(diagnosis)
        if net is poisoned:
            assert diagnosis.tensor == f"weight {place}.weight"
        else:
            assert diagnosis.module == place
            assert net is grown or (diagnosis.source.startswith(HERE) and diagnosis.code.endswith(line))
        assert all(is_fixed(model, net, batch, fix.python) for fix in diagnosis.fixes if fix.verified), str(diagnosis)
    assert diagnosed(model, patched(sound, places[2], right), batch) is None
