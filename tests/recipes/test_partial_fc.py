"""Partial FC against the full softmax of one process in float64, on one rank and on several."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import Amp, Clip
from amp_core.heads.partial_fc import MARGINS, PartialFC, _initial_centres, arcface
from amp_core.layouts.ddp import wrap_ddp

CLASSES, DIM, BATCH = 11, 16, 12


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch(step=0, classes=CLASSES, size=BATCH):
    """Features [size, DIM] and labels [size] of all ranks."""
    labels = torch.randint(classes, (size,), generator=torch.Generator().manual_seed(100 + step))
    return numbers(size, DIM, seed=step + 1), labels


def part(tensor, rank, num_ranks):
    return tensor.chunk(num_ranks)[rank]


def sgd(head, lr=0.5):
    return torch.optim.SGD([head.active], lr=lr, momentum=0.9, weight_decay=1e-2, fused=True)


def losses(features, labels, centres, kind="arcface", margin=0.5, scale=64.0):
    """Per sample, by the formula of the papers: with acos, on all classes."""
    cosine = F.normalize(features) @ F.normalize(centres).T
    own = cosine.gather(1, labels[:, None])
    moved = (own.acos() + margin).cos() if kind == "arcface" else own - margin
    return F.cross_entropy(cosine.scatter(1, labels[:, None], moved) * scale, labels, reduction="none")


def train(head, state, x, labels, weight=1.0):
    """One step of the centres. Loss and gradient of the features."""
    head.sample(labels)
    output = head(x, labels, weight)
    state.optimizer.step()
    head.write_back()
    state.optimizer.zero_grad()
    return output


def error(ours, reference):
    """Relative, by norm."""
    return ((ours.double() - reference).norm() / reference.norm()).item()


def test_the_margin_without_acos_is_the_margin_with_it():
    cosine = torch.linspace(-0.85, 0.999, 1000, dtype=torch.float64, requires_grad=True)  # angle + 0.5 is below pi
    ours, theirs = arcface(cosine, 0.5), (cosine.acos() + 0.5).cos()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
    slopes = [torch.autograd.grad(value.sum(), cosine)[0] for value in (ours, theirs)]
    assert torch.allclose(*slopes, rtol=1e-12)


def test_the_margin_always_lowers_and_never_turns_back():
    cosine = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    moved = arcface(cosine, 0.5)
    assert (moved <= cosine).all() and (moved.diff() > 0).all()
    turned_back = (cosine.acos() + 0.5).cos()  # beyond pi the plain form rewards what is farthest from its centre
    assert (turned_back.diff() < 0).any()


def test_a_feature_of_zeros_is_nan_in_fp16_and_has_a_loss_here():
    assert F.normalize(torch.zeros(1, 8, dtype=torch.float16)).isnan().all()  # eps=1e-12 is 0 in fp16
    head = PartialFC(CLASSES, DIM)
    loss, x_grad = head(torch.zeros(2, DIM), torch.tensor([0, 1]))
    assert loss.isfinite() and x_grad.isfinite().all() and head.active.grad.isfinite().all()


@pytest.mark.parametrize("kind", MARGINS)
def test_one_rank_equals_the_full_softmax_in_float64(kind):
    head = PartialFC(CLASSES, DIM, kind=kind, margin=0.4, scale=32.0)
    x, labels = batch()
    x64, w64 = x.double().requires_grad_(), head.centres.double().requires_grad_()
    reference = losses(x64, labels, w64, kind, 0.4, 32.0).mean()
    reference.backward()
    head.sample(labels)
    loss, x_grad = head(x, labels)
    assert error(loss, reference) < 1e-6 and error(x_grad, x64.grad) < 1e-6
    assert error(head.active.grad, w64.grad) < 1e-6


def test_under_autocast_everything_is_float32():
    for dtype in (torch.float16, torch.bfloat16):
        heads = [PartialFC(CLASSES, DIM) for _ in range(2)]
        x, labels = batch()
        x = x.to(dtype)
        with torch.autocast("cpu", dtype=dtype):
            loss, x_grad = heads[0](x, labels)
        expected = heads[1](x.float(), labels)
        assert loss.dtype == x_grad.dtype == heads[0].active.grad.dtype == torch.float32
        assert torch.equal(loss, expected[0]) and torch.equal(x_grad, expected[1])


def test_scaling_the_injected_gradient_equals_scaling_the_loss():
    net = nn.Linear(8, DIM)
    inputs, labels = numbers(BATCH, 8), batch()[1]
    injected, centres, moved = [], [], []
    for scale in (1.0, 1024.0):
        amp = Amp.named("fp16", init_scale=scale, dynamic=False)
        head = PartialFC(CLASSES, DIM)
        features = net(inputs)
        _, x_grad = head(features.detach(), labels)
        amp.backward(features, gradient=x_grad)
        injected.append(net.weight.grad.clone())
        centres.append(head.active.grad.clone())
        net.zero_grad()
        (losses(net(inputs), labels, head.centres).mean() * scale).backward()
        assert error(injected[-1], net.weight.grad.double()) < 1e-5
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.0), torch.optim.SGD([head.active], lr=0.5)]
        assert amp.step(optimizers, unscaled=optimizers[1:]).taken
        moved.append(head.centres.clone())
        net.zero_grad()
    assert torch.equal(1024 * injected[0], injected[1])  # a power of two is exact
    assert torch.equal(*centres) and torch.equal(*moved)  # these carry no scale
    assert not torch.equal(moved[0], PartialFC(CLASSES, DIM).centres)


def test_positives_are_always_sampled_and_their_number_is_fixed():
    head = PartialFC(1000, 4, sample_rate=0.1)
    chosen = torch.zeros(1000)
    for step in range(200):
        labels = batch(step, classes=1000, size=64)[1]
        head.sample(labels[:32], labels[32:])
        assert head._index is not None and head.active.shape == (100, 4)
        assert torch.isin(labels, head._index).all()
        assert torch.equal(head._index, head._index.unique())
        assert torch.equal(head.active, head.centres[head._index])
        chosen[head._index] += 1
    # 64 labels have 62 classes on average; the other 38 places are drawn from all the rest.
    assert chosen.min() > 5 and chosen.max() < 45
    head.sample(torch.arange(150))  # more than a tenth: all of them fit
    assert head.active.shape == (150, 4) and torch.isin(torch.arange(150), head._index).all()
    head.sample(torch.arange(1000).repeat(3))
    assert head.active.data_ptr() == head.centres.data_ptr()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_rows_that_were_not_sampled_are_untouched_bit_for_bit(optimizer):
    head = PartialFC(40, DIM, sample_rate=0.5)
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    state = head.carry(optimizer([head.active], lr=0.1, weight_decay=0.1, fused=True, **options))
    for step in range(5):
        x, labels = batch(step, classes=40)
        centres, rows = head.centres.clone(), {key: value.clone() for key, value in state.rows.items()}
        train(head, state, x, labels)
        rest = torch.ones(40, dtype=torch.bool).index_fill_(0, head._index, False)
        assert rest.sum() == 20 and torch.equal(head.centres[rest], centres[rest])
        assert (head.centres[~rest] != centres[~rest]).any(1).all()
        for key, before in rows.items():
            assert torch.equal(state.rows[key][rest], before[rest])
            assert (state.rows[key][~rest] != before[~rest]).any(1).all()
    assert set(state.rows) == ({"momentum_buffer"} if optimizer is torch.optim.SGD else {"exp_avg", "exp_avg_sq"})


def test_a_sample_is_the_full_softmax_over_its_classes():
    head = PartialFC(40, DIM, sample_rate=0.5, scale=32.0)
    x, labels = batch(classes=40)
    head.sample(labels)
    loss, x_grad = head(x, labels)
    x64, w64 = x.double().requires_grad_(), head.centres[head._index].double()
    reference = losses(x64, torch.searchsorted(head._index, labels), w64, scale=32.0).mean()
    reference.backward()
    assert error(loss, reference) < 1e-6 and error(x_grad, x64.grad) < 1e-6


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_accumulated_micro_batches_equal_one_big_batch(rate):
    x, labels = batch(classes=40)
    results = []
    for pieces in (1, 4):
        torch.manual_seed(3)
        head = PartialFC(40, DIM, sample_rate=rate)
        head.sample(*labels.chunk(pieces))
        outputs = [head(a, b, 1 / pieces) for a, b in zip(x.chunk(pieces), labels.chunk(pieces), strict=True)]
        results.append([sum(loss for loss, _ in outputs), torch.cat([grad for _, grad in outputs]), head.active.grad])
    for one, many in zip(*results, strict=True):
        assert error(many, one.double()) < 1e-6


def test_a_skipped_batch_leaves_the_centres_alone_and_the_usual_loop_leaves_nan():
    x, labels = batch()
    x[0, 0] = math.inf

    def one_step(joint):
        net, head = nn.Linear(DIM, DIM), PartialFC(CLASSES, DIM)
        optimizer, head_optimizer = torch.optim.SGD(net.parameters(), lr=0.1), sgd(head)
        before = [p.detach().clone() for p in (*net.parameters(), head.centres)]
        features = net(x)
        _, x_grad = head(features.detach(), labels)
        if joint:
            amp = Amp.named("fp16")
            amp.backward(features, gradient=x_grad)
            report = amp.step([optimizer, head_optimizer], unscaled=[head_optimizer])
            amp.update()
            assert not report.taken
        else:
            scaler = torch.amp.GradScaler("cpu")
            features.backward(scaler.scale(x_grad))
            scaler.step(optimizer)
            head_optimizer.step()
            scaler.update()
        after = [*net.parameters(), head.centres]
        return [torch.equal(a, b) for a, b in zip(before, after, strict=True)], head.centres

    same, centres = one_step(joint=True)
    assert all(same)
    same, centres = one_step(joint=False)
    assert same == [True, True, False] and centres.isnan().all()


def test_initial_centres_do_not_depend_on_the_slice():
    whole = _initial_centres(0, 10_000, 3, seed=1)
    assert torch.equal(whole[4000:9000], _initial_centres(4000, 9000, 3, seed=1))
    assert whole.std().item() == pytest.approx(0.01, rel=0.02)
    assert not torch.equal(whole, _initial_centres(0, 10_000, 3, seed=2))


@pytest.mark.parametrize(
    "options", [{"kind": "sphere"}, {"margin": -0.1}, {"margin": 4.0}, {"scale": 0.0}, {"sample_rate": 0.0}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PartialFC(CLASSES, DIM, **options)


def _train(rank, num_ranks, steps, rate=1.0, weights=None, seed=0, before=None):
    """Steps on the parts of each batch. Losses and feature gradients of this rank, and the state on rank 0."""
    head = PartialFC(CLASSES, DIM, scale=32.0, sample_rate=rate, seed=seed)
    state = head.carry(sgd(head))
    if before is not None:
        head.load_state_dict(before["head"])
        state.load_state_dict(before["rows"])
    outputs = []
    for step in steps:
        x, labels = (part(t, rank, num_ranks) for t in batch(step))
        outputs.append(train(head, state, x, labels, weights[rank] if weights else 1 / num_ranks))
    return {"outputs": outputs, "slice": (head.start, head.stop), "head": head.state_dict(), "rows": state.state_dict()}


def reference_run(steps, sample_weights=None):
    """The full softmax of one process in float64: losses, feature gradients, centres, momentum."""
    centres = nn.Parameter(PartialFC(CLASSES, DIM).centres.double())
    optimizer = torch.optim.SGD([centres], lr=0.5, momentum=0.9, weight_decay=1e-2)
    outputs = []
    for step in range(steps):
        x, labels = batch(step)
        x = x.double().requires_grad_()
        weights = torch.full((BATCH,), 1 / BATCH) if sample_weights is None else sample_weights
        loss = (losses(x, labels, centres, scale=32.0) * weights).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append((loss.detach(), x.grad))
    return outputs, centres.detach(), optimizer.state[centres]["momentum_buffer"]


@pytest.mark.parametrize("weights", [(1 / 2, 1 / 2), (0.75, 0.25), (1 / 3, 1 / 3, 1 / 3)], ids=str)
def test_ranks_equal_the_full_softmax_of_one_process_however_they_weigh(on_ranks, weights):
    num_ranks = len(weights)
    results = on_ranks(_train, num_ranks, range(3), 1.0, weights, num_ranks=num_ranks)
    of_samples = torch.tensor(weights).repeat_interleave(BATCH // num_ranks) * num_ranks / BATCH
    outputs, centres, momentum = reference_run(3, of_samples)
    assert [r["slice"] for r in results] == ([(0, 6), (6, 11)] if num_ranks == 2 else [(0, 4), (4, 8), (8, 11)])
    for step, (loss, x_grad) in enumerate(outputs):
        assert error(sum(r["outputs"][step][0] for r in results), loss) < 1e-6
        assert error(torch.cat([r["outputs"][step][1] for r in results]), x_grad) < 1e-6
    assert error(results[0]["head"]["weight"], centres) < 1e-6
    assert error(results[0]["rows"]["rows"]["momentum_buffer"], momentum) < 1e-6
    assert all(r["head"] == {} and r["rows"] == {} for r in results[1:])


def _sampled(rank):
    head = PartialFC(41, DIM, sample_rate=0.5)
    torch.manual_seed(rank)
    found = []
    for step in range(20):
        labels = batch(step, classes=41)[1]
        head.sample(part(labels, rank, 2))
        mine = labels[(labels >= head.start) & (labels < head.stop)] - head.start
        found.append(bool(torch.isin(mine, head._index).all()) and len(head._index) == 12 - (rank and 0))
    return found, head.start, head.stop


def test_a_rank_keeps_the_positives_of_all_ranks(on_ranks):
    for found, start, stop in on_ranks(_sampled):
        assert all(found), (start, stop)


def _backbone_grads(rank):
    """Gradients of a plain DDP net, of ours, which sums, and of one process."""
    x, labels = batch()
    grads = []
    for wrap in (nn.parallel.DistributedDataParallel, lambda net: wrap_ddp(net, torch.device("cpu"))):
        torch.manual_seed(1)
        net = wrap(nn.Linear(DIM, DIM))
        head = PartialFC(CLASSES, DIM, scale=32.0)
        features = net(part(x, rank, 2))
        _, x_grad = head(features.detach(), part(labels, rank, 2), 0.5)
        features.backward(x_grad)
        grads.append(net.module.weight.grad.clone())
    torch.manual_seed(1)
    net = nn.Linear(DIM, DIM).double()
    full = PartialFC(CLASSES, DIM).gather_rows(head.centres)
    if rank == 0:
        losses(net(x.double()), labels, full.double(), scale=32.0).mean().backward()
        grads.append(net.weight.grad)
    return grads


def test_a_backbone_that_averages_has_exactly_half_the_gradient(on_ranks):
    averaged, summed, reference = on_ranks(_backbone_grads)[0]
    assert torch.equal(averaged, 0.5 * summed)
    assert error(summed, reference) < 1e-6


def _largest(rank, classes, size):
    """Most elements of a matrix with a row per sample of all ranks, in a step."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[0] == 2 * size:
                self.numel = max(self.numel, result.numel())
            return result

    head = PartialFC(classes, DIM, sample_rate=0.25)
    x, labels = batch(classes=classes, size=2 * size)
    with Largest() as largest:
        head.sample(part(labels, rank, 2))
        head(part(x, rank, 2), part(labels, rank, 2), 0.5)
    return largest.numel, head.centres.numel()


def test_no_rank_holds_the_logits_of_all_classes(on_ranks):
    for logits, centres in on_ranks(_largest, 1001, 8):
        assert logits <= 16 * math.ceil(0.25 * 501) and centres <= 501 * DIM


def test_a_checkpoint_of_2_ranks_goes_on_on_1_and_on_3(on_ranks):
    two = on_ranks(_train, 2, range(2))[0]
    assert two["head"]["weight"].shape == (CLASSES, DIM)
    one = _train(0, 1, [], seed=9, before=two)
    assert torch.equal(one["head"]["weight"], two["head"]["weight"])
    assert torch.equal(one["rows"]["rows"]["momentum_buffer"], two["rows"]["rows"]["momentum_buffer"])
    one = _train(0, 1, [2], seed=9, before=two)
    three = on_ranks(_train, 3, [3], 1.0, None, 9, one, num_ranks=3)[0]
    _, centres, momentum = reference_run(4)
    assert error(three["head"]["weight"], centres) < 1e-6
    assert error(three["rows"]["rows"]["momentum_buffer"], momentum) < 1e-6


def test_a_state_of_other_classes_is_refused():
    with pytest.raises(ValueError, match=r"\(10, 16\) there and \(11, 16\) here"):
        PartialFC(CLASSES, DIM).load_state_dict(PartialFC(10, DIM).state_dict())


def _overflow_on_one_rank(rank):
    """Two steps; in the first, a gradient of rank 0's centres is infinite."""
    torch.manual_seed(1)
    net = wrap_ddp(nn.Linear(DIM, DIM), torch.device("cpu"))
    head = PartialFC(CLASSES, DIM, scale=32.0)
    optimizer, head_optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True), sgd(head)
    amp, taken = Amp.named("fp16", init_scale=65536.0), []
    for step in range(2):
        x, labels = (part(t, rank, 2) for t in batch(step))
        features = net(x)
        _, x_grad = head(features.detach(), labels, 0.5)
        before = head.centres.clone()
        amp.backward(features, gradient=x_grad)
        if step == 0 and rank == 0:
            head.active.grad[0, 0] = math.inf
        amp.step([optimizer, head_optimizer], unscaled=[head_optimizer], sharded=[head_optimizer])
        amp.update()
        taken.append(not torch.equal(before, head.centres))
        amp.zero_grad(optimizer, head_optimizer)
    return {"scale": amp.scale, "weight": net.module.weight.detach(), "taken": taken}


def test_all_ranks_skip_although_only_one_overflowed(on_ranks):
    first, second = on_ranks(_overflow_on_one_rank)
    assert first["taken"] == second["taken"] == [False, True] and first["scale"] == second["scale"] == 32768.0
    assert torch.equal(first["weight"], second["weight"])


def _clipped(rank):
    torch.manual_seed(1)
    net = wrap_ddp(nn.Linear(DIM, DIM), torch.device("cpu"))
    head = PartialFC(CLASSES, DIM, scale=32.0)
    optimizers = [torch.optim.SGD(p, lr=1.0, fused=True) for p in (list(net.parameters()), [head.active])]
    before = [net.module.weight.detach().clone(), net.module.bias.detach().clone(), head.centres.clone()]
    amp = Amp.named("fp16_capped", samples=6)
    x, labels = (part(t, rank, 2) for t in batch())
    features = net(x)
    _, x_grad = head(features.detach(), labels, 0.5)
    amp.backward(features, gradient=x_grad)
    amp.step(optimizers, Clip.norm(1e-3), unscaled=[optimizers[1]], sharded=[optimizers[1]])
    after = [net.module.weight, net.module.bias, head.centres]
    weight, bias, centres = ((a - b).square().sum().detach() for a, b in zip(after, before, strict=True))
    dist.all_reduce(centres)
    return amp.scale, (weight + bias).sqrt(), centres.sqrt()


def test_backbone_and_head_are_clipped_each_by_its_norm_over_all_ranks(on_ranks):
    for scale, backbone, centres in on_ranks(_clipped):
        assert scale == 6 * 128 and backbone.item() == pytest.approx(1e-3, rel=1e-3)
        assert centres.item() == pytest.approx(1e-3, rel=1e-3)
