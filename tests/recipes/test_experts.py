"""Routing in fp32 and wrong in 16 bits, auxiliary losses, and experts that got no token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from shared import UNIT, relative
from torch import Tensor, nn

import train
from amp_core import Amp, Clip
from recipes.experts import CHOSEN, Experts, Mixture, auxiliary_losses, choice, combine_weights

NUM, WIDTH, TOKENS = 8, 32, 200_000

pytestmark = pytest.mark.usefixtures("own_folder")


def router() -> tuple[Tensor, Tensor, Tensor]:
    """Normalised tokens, weights, and the exact logits, of variance 1."""
    torch.manual_seed(0)
    tokens, weight = F.layer_norm(torch.randn(TOKENS, WIDTH), (WIDTH,)), torch.randn(NUM, WIDTH) / WIDTH**0.5
    return tokens, weight, tokens.double() @ weight.double().T


def flips(dtype: torch.dtype) -> Tensor:
    """Which tokens go to another expert if the router computes in a dtype."""
    tokens, weight, exact = router()
    return (choice(F.linear(tokens.to(dtype), weight.to(dtype)).double()) != choice(exact)).any(dim=1)


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
def test_a_token_changes_its_experts_only_where_logits_are_closer_than_their_errors(dtype: torch.dtype) -> None:
    tokens, weight, exact = router()
    # Token, weight and result are rounded, and sums of 32 terms are in fp32 or better.
    terms = tokens.double().abs() @ weight.double().abs().T
    error = (2.02 * UNIT[dtype] + WIDTH * UNIT[torch.float32]) * terms + 1.01 * UNIT[dtype] * exact.abs()
    best = exact.topk(CHOSEN + 1, dim=1)
    gap = best.values[:, CHOSEN - 1] - best.values[:, CHOSEN]
    assert not flips(dtype)[gap > 2 * error.amax(1)].any()


def test_16_bits_send_tokens_elsewhere_and_bf16_8_times_as_many() -> None:
    """As many as there are gaps smaller than the error, so in proportion to the unit of the dtype."""
    shares = {dtype: flips(dtype).double().mean().item() for dtype in UNIT}
    assert shares[torch.float32] < 1e-4 < shares[torch.float16] < shares[torch.bfloat16]
    found = shares[torch.bfloat16] * TOKENS, shares[torch.float16] * TOKENS
    # Four standard deviations of two counts.
    assert found[0] / found[1] == pytest.approx(8, rel=4 * (1 / found[0] + 1 / found[1]) ** 0.5)


def test_a_token_that_goes_elsewhere_is_another_function_of_it() -> None:
    tokens, weight, exact = (tensor[:20_000] for tensor in router())
    torch.manual_seed(1)
    experts = Experts(NUM, WIDTH, 2 * WIDTH)
    low = F.linear(tokens.bfloat16(), weight.bfloat16()).float()
    with torch.no_grad():
        right, wrong = (experts(tokens, combine_weights(routed)) for routed in (exact.float(), low))
    off = (wrong - right).norm(dim=1) / right.norm(dim=1)
    elsewhere = flips(torch.bfloat16)[:20_000]
    assert off[elsewhere].mean() > 0.3 and off[~elsewhere].mean() < 4 * UNIT[torch.bfloat16]


def test_the_network_routes_in_fp32_under_autocast_and_its_16_bit_choice_is_for_evaluation() -> None:
    torch.manual_seed(0)
    net, images = Mixture(num_classes=10, image_shape=(1, 28, 28)).eval(), torch.randn(64, 1, 28, 28)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            logits, routed, low = net(images)
            assert net.train()(images)[2].dtype == torch.float32
        net.eval()
        assert (logits.dtype, routed.dtype, low.dtype) == (dtype, torch.float32, dtype)
        assert routed.shape == (64, 16, NUM) and not torch.equal(routed, low.float())


@pytest.mark.usefixtures("own_folder")
def test_a_dry_run_shows_the_router_as_the_island_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["recipe=experts", "device=cpu", "dry_run=true", "data=synthetic", "data.image_size=28"]) == 0
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["router"]]
    assert line[1:] == ["Fp32Linear", "8x32", "fp32", "fp32", "yes", "1,024"]


def test_experts_are_the_sum_over_the_chosen_ones() -> None:
    torch.manual_seed(0)
    experts, x, routed = Experts(4, 8, 16).double(), torch.randn(3, 5, 8).double(), torch.randn(3, 5, 4).double()
    found = experts(x, combine_weights(routed))
    for image in range(3):
        for token in range(5):
            values, chosen = routed[image, token].topk(CHOSEN)
            parts = [F.gelu(x[image, token] @ experts.up[i]) @ experts.down[i] for i in chosen.tolist()]
            expected = (torch.stack(parts) * values.softmax(0)[:, None]).sum(0)
            assert relative(found[image, token].detach(), expected.detach()) < 1e-14


def test_the_z_loss_overflows_fp16_above_256_and_is_fp32_here() -> None:
    for size, overflows in ((250.0, False), (260.0, True)):
        routed = torch.full((1, 1, NUM), size - math.log(NUM)).half().requires_grad_()
        wrong = routed.logsumexp(dim=-1).square().mean()
        with torch.autocast("cpu", torch.float16):
            _, right = auxiliary_losses(routed)
        assert wrong.isinf() == overflows and right.dtype == torch.float32
        exact = routed.double().logsumexp(dim=-1).square().item()
        assert right.item() == pytest.approx(exact, rel=8 * UNIT[torch.float32])


def test_a_load_is_balanced_at_1_and_all_tokens_to_the_same_experts_cost_more() -> None:
    even = torch.eye(NUM).repeat(1, 1, 1) + torch.eye(NUM).roll(1, 1)
    assert auxiliary_losses(even)[0].item() == pytest.approx(1, rel=16 * UNIT[torch.float32])
    same = torch.zeros(1, 16, NUM)
    same[..., :CHOSEN] = 20.0
    assert auxiliary_losses(same)[0].item() == pytest.approx(NUM / CHOSEN, rel=1e-6)  # exp(-20) = 2e-9


def test_a_balance_over_the_batch_depends_on_how_it_is_divided_and_one_per_image_does_not() -> None:
    torch.manual_seed(0)
    routed = torch.randn(8, 16, NUM).double() + 2 * torch.randn(8, 1, NUM)

    def over_the_batch(routed: Tensor) -> Tensor:
        load, probability = choice(routed).mean((0, 1)) / CHOSEN, routed.softmax(dim=-1).mean((0, 1))
        return NUM * (load * probability).sum()

    def off(loss) -> float:  # type: ignore[no-untyped-def]
        return abs(sum(loss(part).item() for part in routed.split(2)) / 4 / loss(routed).item() - 1)

    assert off(lambda routed: auxiliary_losses(routed)[0]) < 16 * UNIT[torch.float32] and off(over_the_batch) > 0.1


class Sparse(nn.Module):
    """The same experts as modules, of which only the chosen ones are called: it has to read back which."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        pairs = zip(experts.up.detach().clone(), experts.down.detach().clone(), strict=True)
        self.experts = nn.ModuleList(nn.ParameterList(pair) for pair in pairs)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number, (up, down) in enumerate(self.experts):  # type: ignore[misc]
            rows = weights[:, number].nonzero()[:, 0]
            if len(rows):
                y = F.gelu(x[rows] @ up) @ down
                found = found.index_add(0, rows, weights[rows, number, None] * y)
        return found


def test_an_expert_without_a_token_has_gradients_of_0_or_none_and_both_clip_and_skip_alike() -> None:
    torch.manual_seed(0)
    dense = Experts(4, 8, 16)
    nets: list[nn.Module] = [dense, Sparse(dense)]
    x, routed = torch.randn(6, 8), torch.randn(6, 4) - torch.tensor([0, 0, 0, 100.0])
    results = []
    for net in nets:
        amp, optimizer = Amp.named("fp32"), torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-2)
        norms, taken = [], []
        for factor in (1.0, math.inf, 1.0):
            amp.backward(factor * net(x, combine_weights(routed)).square().mean())
            report = amp.step(optimizer, Clip.norm(0.1))
            amp.update()
            norms.append(report.grad_norm.item())
            taken.append(bool(report.taken))
            grads = [p.grad for p in net.parameters()]
            amp.zero_grad(optimizer)
        results.append((norms, taken, grads))
    (norms, taken, grads), (sparse_norms, sparse_taken, sparse_grads) = results
    assert taken == sparse_taken == [True, False, True]
    assert norms[0] == pytest.approx(sparse_norms[0], rel=1e-5) and norms[2] == pytest.approx(sparse_norms[2], rel=1e-5)
    assert all(grad is not None and not grad[3].any() and grad[:3].any() for grad in grads)
    assert [grad is None for grad in sparse_grads] == [False] * 6 + [True] * 2
    modules = nets[1].experts
    for number in range(4):  # the last one is as it was
        up, down = modules[number]  # type: ignore[index]
        torch.testing.assert_close(dense.up[number], up, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dense.down[number], down, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["o2", "o3", "bf16_pure"])
def test_an_evaluation_routes_in_the_16_bits_of_the_weights(mode: str) -> None:
    """The router's own weights stay in fp32, in an island."""
    amp, net = Amp.named(mode), Mixture(num_classes=4, image_shape=(1, 14, 14), width=8, num_experts=4)
    amp.prepare(net)
    net.eval()
    with torch.no_grad(), amp.autocast():
        _, routed, low = net(torch.randn(6, 1, 14, 14))
    assert net.router.weight.dtype is torch.float32 and net.head.weight.dtype is not torch.float32
    assert torch.equal(low, low.to(net.head.weight.dtype)) and not torch.equal(low, routed)
