"""Small networks and the loops of other people, for the doctor to examine."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from amp_core import Amp, Doctor


def network(factor=1.0):
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        net[0].weight.mul_(factor)
    return net


def images():
    return torch.randn(6, 8), torch.randint(4, (6,))


def filled(layer, value):
    """A layer whose weights are all this number."""
    nn.init.constant_(layer.weight, value)
    return layer


def state_of(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict(), [p.grad for p in net.parameters()]))


def same(a, b):
    flat = [torch.utils._pytree.tree_leaves(each) for each in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(*flat, strict=True)
    )


def sgd(net, rate=0.1):
    return torch.optim.SGD(net.parameters(), rate)


def amps_step(amp, optimizer, loss, losses=None):
    """A step of a loop that uses `Amp`; returns its report and its loss, which `losses` gets, too."""

    def step():
        with amp.autocast():
            result = loss()
        if losses is not None:
            losses.append(result.item())
        amp.backward(result)
        report = amp.step(optimizer)
        amp.update()
        amp.zero_grad(*(optimizer if isinstance(optimizer, list) else [optimizer]))
        return report, result.detach()

    return step


def torchs_step(optimizer, loss, *, scaler=None, dtype=torch.float16, zeroes="first", losses=None):
    """A step of torch's own loop; `dtype` None: in fp32. It zeroes gradients first, last or never."""

    def step():
        if zeroes == "first":
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = loss()
        if losses is not None:
            losses.append(result.item())
        (result if scaler is None else scaler.scale(result)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        if zeroes == "last":
            optimizer.zero_grad()

    return step


def classified(net, batch):
    return lambda: F.cross_entropy(net(batch[0]), batch[1])


def located(net, inputs, mode="fp16", loss=lambda y: y.float().mean(), *, guarded=False, lr=0.1, **fields):
    """The diagnosis of a window of one network."""
    amp = Amp.named(mode, **fields)
    if guarded:
        amp.guard(net)
    return Doctor(amp, net).locate(amps_step(amp, sgd(net, lr), lambda: loss(net(*inputs))), inputs)


def said(diagnosis):
    """What a diagnosis tells and advises."""
    return " ".join([diagnosis.why, *(fix.text for fix in diagnosis.fixes)])
