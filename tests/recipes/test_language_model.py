"""Text in pieces, losses that count tokens, and positions that 16 bits cannot count."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import same_but, state, summary
from shared import data_config
from torch import Tensor, nn

import train
from amp_core import Amp, windows
from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError, RunError
from amp_core.data import Data, build_data
from amp_core.data.text import IGNORE, TextPieces
from amp_core.data.tokenizers import read_tokenizer
from amp_core.models import build_model
from amp_core.models.gpt import DTYPES, GPT, LANGUAGE_MODELS, POSITIONS, alibi_bias, position_ids, rope_phases, rotate
from recipes import language_model
from recipes.language_model import num_shared_ids, num_valid, token_loss

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def batch_of(part: Any, *indices: int) -> tuple[Tensor, Tensor]:
    return part.__getitems__([(i, 0) for i in indices or range(len(part))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of 0 to 40 bytes, no two bytes of a file alike, in folders; one of the files is hidden."""
    for number, size in enumerate([20, 0, 1, 2, 8, 9, 10, 40, 17]):
        file = tmp_path / "text" / f"{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(range(number + 1, number + 1 + size)))  # a file with zero bytes is no text
    (tmp_path / "text" / "0" / ".hidden").write_bytes(b"hidden" * 9)
    return tmp_path / "text"


def test_every_byte_but_the_first_of_a_file_is_a_target_once(folder: Path) -> None:
    data = build_data(data_config("text", path=str(folder), length=8), seed=0)
    pieces = [batch_of(part, i) for part in (data.train, data.eval) for i in range(len(part))]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    files = [file.read_bytes() for file in sorted(folder.rglob("*.txt"))]
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape
    assert targets[targets != IGNORE].tolist() == [byte for text in files for byte in text[1:]]
    assert inputs[targets != IGNORE].tolist() == [byte for text in files for byte in text[:-1]]
    assert (targets - inputs)[targets != IGNORE].unique().tolist() == [1]  # none is from another file
    # The end of a file is a short piece: valid tokens first, then padding.
    assert (targets != IGNORE).sum(1).tolist() == [
        min(8, len(text) - 1 - start) for text in files for start in range(0, len(text) - 1, 8)
    ]


def test_the_tail_is_held_out_and_fewer_samples_are_spread_evenly(folder: Path) -> None:
    files = sorted(folder.rglob("*.txt"))
    whole = TextPieces(files, 2)
    data = build_data(data_config("text", path=str(folder), length=2), seed=0)
    assert (len(data.train), len(data.eval)) == (len(whole) - len(whole) // 16, len(whole) // 16)
    assert torch.equal(torch.cat([batch_of(data.train)[0], batch_of(data.eval)[0]]), batch_of(whole)[0])
    few = build_data(data_config("text", path=str(folder), length=2, num_samples=7), seed=0)
    assert torch.equal(batch_of(few.train)[0], batch_of(data.train, *[i * len(data.train) // 7 for i in range(7)])[0])
    assert len(few.eval) == 1


def test_one_file_to_train_on_and_another_to_evaluate(folder: Path) -> None:
    cfg = data_config("text", path=str(folder / "1" / "7.txt"), eval_path=str(folder / "2"), length=16)
    data = build_data(cfg, seed=0)
    assert batch_of(data.train)[0][0].tolist() == list(range(8, 24))
    assert len(data.train) == 3 and (batch_of(data.eval)[1] != IGNORE).sum() == 8 + 16
    assert batch_of(data.train, 1)[0].equal(batch_of(build_data(cfg, seed=5).train, 1)[0])
    assert data.facts == {"vocab_size": 256, "length": 16}


def test_text_that_is_not_there_or_too_short_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "0.txt").write_bytes(b"\0")
    for values, problem in [
        ({}, "data.path=null: expected a file of text"),
        ({"path": "/nowhere"}, "data.path=/nowhere: there is no such file"),
        ({"path": str(folder), "eval_path": "/nowhere"}, "data.eval_path=/nowhere: there is no such file"),
        ({"path": str(tmp_path / "empty")}, "has no files"),
        ({"path": str(folder), "augment": True}, "data.augment=true: has no effect"),
        ({"path": str(folder), "length": None}, "data.length=null: data=text needs a number"),
        ({"path": str(folder), "image_size": 8}, "data.image_size=8: has no effect"),
        ({"path": str(tmp_path / "binary")}, "0.txt is no text: it has zero bytes"),
    ]:
        (found,) = check_data(data_config("text", **values))
        assert problem in found
    with pytest.raises(ConfigError, match="too little text"):
        build_data(data_config("text", path=str(folder / "1" / "4.txt")), seed=0)


def test_a_file_that_shrinks_during_a_run_is_named(folder: Path) -> None:
    data = build_data(data_config("text", path=str(folder), length=8), seed=0)
    (folder / "0" / "0.txt").write_bytes(b"short")
    with pytest.raises(RunError, match=r"0\.txt got shorter"):
        batch_of(data.train)
    (folder / "0" / "0.txt").unlink()
    with pytest.raises(RunError, match=r"cannot read .*0\.txt"):
        batch_of(data.train)


def test_the_sources_of_torch_are_a_corpus_of_every_machine() -> None:
    data = build_data(data_config("torch_sources"), seed=0)
    assert (len(data.train), len(data.eval)) == (8192, 512)
    assert data.facts == {"vocab_size": 256, "length": 256}
    whole: Data = build_data(data_config("torch_sources", num_samples=None), seed=0)
    assert len(whole.train) > 100_000 and len(whole.eval) > 50_000
    for part, word in ((data.train, b"torch"), (data.eval, b"sympy")):
        inputs, targets = batch_of(part)
        assert word in bytes(inputs.flatten().tolist())
        counts = (targets != IGNORE).sum(1)
        assert counts.min() < counts.max() == 256


@pytest.mark.parametrize("dtype, distinct, first_wrong", [(BF16, 769, 257), (FP16, 3073, 2049)], ids=str)
def test_positions_share_ids_in_16_bit(dtype: torch.dtype, distinct: int, first_wrong: int) -> None:
    ids = position_ids(4096, dtype=dtype)
    assert ids.unique().numel() == distinct == 4096 - num_shared_ids(4096, dtype=dtype)
    assert int((ids.long() != torch.arange(4096)).nonzero()[0]) == first_wrong
    assert num_shared_ids(4096, dtype=FP32) == 0
    # Vision transformers are safe: 197 tokens of 224 x 224 pixels. Of 384 x 384 there are 577.
    assert num_shared_ids(197, dtype=dtype) == 0 and num_shared_ids(577, dtype=BF16) == 176
    assert num_shared_ids(first_wrong, dtype=dtype) == 0 < num_shared_ids(first_wrong + 1, dtype=dtype)


@pytest.mark.parametrize("dtype, distinct", [(BF16, 769), (FP16, 3073)], ids=str)
def test_a_product_under_autocast_casts_fp32_positions_down_again(dtype: torch.dtype, distinct: int) -> None:
    ids = position_ids(4096, dtype=FP32)
    frequencies = 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
    with torch.autocast("cpu", dtype):
        wrong = ids[:, None] @ frequencies[None]
        right = rope_phases(ids, 64)
    assert wrong.dtype == dtype and wrong.unique(dim=0).shape[0] == distinct
    assert right[0].dtype == right[1].dtype == FP32
    assert torch.stack(right, dim=-1).unique(dim=0).shape[0] == 4096
    assert all(torch.equal(a, b) for a, b in zip(right, rope_phases(ids, 64), strict=True))


def rope_scores(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    phases = rope_phases(ids, queries.shape[-1])
    return rotate(queries, phases) @ rotate(keys, phases).transpose(-1, -2) / queries.shape[-1] ** 0.5


def test_rope_scores_are_those_of_float64_with_fp32_positions_alone() -> None:
    queries, keys = torch.randn(2, 1, 1, 512, 64)
    angles = torch.outer(torch.arange(3584, 4096).double(), 10_000.0 ** (-torch.arange(0, 64, 2).double() / 64))
    turned = [rotate(x.double(), (angles.cos(), angles.sin())) for x in (queries, keys)]
    expected = turned[0] @ turned[1].transpose(-1, -2) / 8

    def error(dtype: torch.dtype, features: torch.dtype = FP32) -> float:
        scores = rope_scores(queries.to(features), keys.to(features), position_ids(512, offset=3584, dtype=dtype))
        assert scores.dtype == features
        return (scores - expected).abs().max().item()

    assert error(FP32) < 1e-3
    assert error(FP32, features=BF16) < 5e-2  # fp32 phases, results rounded to bfloat16
    assert error(FP16) > 1 and error(BF16) > 2  # scores are about 1


def test_alibi_subtracts_before_it_rounds() -> None:
    def bias(ids: Tensor) -> Tensor:
        return alibi_bias(ids, ids, 4).masked_fill(torch.ones(512, 512, dtype=torch.bool).triu(1), -torch.inf)

    expected = bias(torch.arange(512).double()).softmax(-1)

    def error(bias: Tensor) -> float:
        """The largest part of attention that lies on wrong keys, twice."""
        return (bias.double().softmax(-1) - expected).abs().sum(-1).max().item()

    exact, bf16, fp16 = (bias(position_ids(512, offset=3584, dtype=dtype)) for dtype in (FP32, BF16, FP16))
    assert error(exact) == 0 and error(exact.bfloat16()) < 1e-2 and error(exact.half()) < 1e-3
    assert error(bf16) > 0.5 and error(fp16) > 0.1


def small(**options: Any) -> GPT:
    return GPT(**({"vocab_size": 32, "length": 64, "width": 32, "depth": 2, "heads": 2} | options))


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_only_distances_matter_with_exact_ids(positions: str) -> None:
    tokens = torch.randint(32, (2, 64))
    net = small(positions=positions)
    here = net(tokens)
    torch.testing.assert_close(net(tokens, offset=4096), here, rtol=0, atol=2e-3)  # phases of fp32 at 4096 rad
    net.ids_dtype = BF16
    assert torch.equal(net(tokens), here)  # below 256 nothing shows
    assert (net(tokens, offset=4096) - here).abs().max() > 0.1


def test_samples_of_256_tokens_do_not_show_that_ids_are_16_bit() -> None:
    tokens = torch.randint(256, (1, 256))
    grads = []
    for ids in DTYPES:
        torch.manual_seed(0)
        net = small(vocab_size=256, length=256, positions_dtype=ids)
        net(tokens).square().mean().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads, strict=True))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_tensor_follows_16_bit_weights_or_autocast(positions: str, dtype: torch.dtype) -> None:
    tokens = torch.randint(32, (4, 64))
    net = small(positions=positions, dropout=0.1)
    expected = net.eval()(tokens)
    with torch.autocast("cpu", dtype):
        cast = net(tokens)
    pure = copy.deepcopy(net).to(dtype)
    logits = pure(tokens)
    assert cast.dtype == logits.dtype == dtype
    for found in (cast, logits):  # roundings of 2 blocks; logits are about 1
        torch.testing.assert_close(found.float(), expected, rtol=0, atol={BF16: 0.1, FP16: 0.02}[dtype])
    token_loss(pure.train()(tokens), tokens).backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in pure.parameters())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("ids", DTYPES)
def test_no_token_sees_the_future(positions: str, ids: str) -> None:
    net = small(positions=positions, positions_dtype=ids, length=300)
    tokens = torch.randint(32, (1, 300))
    other = tokens.clone()
    other[:, 290:] = (other[:, 290:] + 1) % 32
    before, after = net(tokens), net(other)
    torch.testing.assert_close(before[:, :290], after[:, :290])
    assert (before[:, 290:] != after[:, 290:]).all()


def test_linear_layers_may_be_of_another_class_and_suit_matrix_units() -> None:
    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    net = LANGUAGE_MODELS.builders["gpt"](**LANGUAGE_MODELS.example)
    assert 1e6 < sum(p.numel() for p in net.parameters()) < 3.5e6
    for module in net.modules():
        if isinstance(module, nn.Linear):
            assert module.in_features % 16 == module.out_features % 16 == 0 and module.bias is None
            module.__class__ = Other
    tokens = torch.randint(256, (1, 16))
    assert net(tokens).shape == (1, 16, 256)
    assert not net.state_dict().keys() & {"phases", "frequencies"}  # nothing that `.half()` would round


def test_tied_weights_are_one_tensor() -> None:
    net = small(tied=True)
    assert net.embed.weight is net.head.weight
    assert sum(p.numel() for p in small().parameters()) - sum(p.numel() for p in net.parameters()) == 32 * 32


def test_a_learned_table_ends() -> None:
    net = build_model("gpt", LANGUAGE_MODELS, options={"positions": "learned"}, vocab_size=32, length=16)
    tokens = torch.randint(32, (1, 16))
    assert net(tokens).shape == (1, 16, 32)
    with pytest.raises(ValueError, match="position 16: the model has 16 positions"):
        net(tokens, offset=1)


def token_grads(net: nn.Module, micros: list[Any], weigh: Callable[[Any], Any]) -> Tensor:
    """Gradients of one window, in the order of the recipe."""
    net.zero_grad()
    # Shares of whole numbers are fp32; here they are not to be what limits the comparison.
    (window,) = windows(micros, len(micros), count=lambda batch: num_valid(batch).double())
    for micro in window:
        inputs, targets = micro.batch
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        (loss / num_valid(micro.batch).clamp(min=1) * weigh(micro)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def test_token_weights_give_the_gradients_of_the_big_batch_and_a_mean_of_means_does_not() -> None:
    net = small().double()
    inputs, targets = torch.randint(32, (2, 8, 16))
    for row, num in enumerate([16, 16, 3, 1, 0, 0, 9, 16]):  # the third micro-batch is fully masked
        targets[row, num:] = IGNORE
    micros = [(inputs[i : i + 2], targets[i : i + 2]) for i in range(0, 8, 2)]
    whole = token_grads(net, [(inputs, targets)], lambda micro: 1.0)
    ours = token_grads(net, micros, lambda micro: micro.weight)
    means = token_grads(net, micros, lambda micro: 1 / 4)
    assert ours.isfinite().all() and ((ours - whole).norm() / whole.norm()).item() < 1e-14
    assert ((means - whole).norm() / whole.norm()).item() > 0.5


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_a_fully_masked_micro_batch_costs_nothing_in_any_mode(mode: str) -> None:
    amp, net = Amp.named(mode), small()
    inputs, targets = torch.randint(32, (1, 16)), torch.full((1, 16), IGNORE)
    with amp.autocast():
        logits = net(inputs)
        assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()).isnan()
        loss = token_loss(logits, targets) / num_valid((inputs, targets)).clamp(min=1)
    amp.backward(loss)
    assert loss == 0 and loss.dtype == FP32 and all((p.grad == 0).all() for p in net.parameters())


def test_a_sum_over_many_tokens_does_not_overflow_in_fp16() -> None:
    logits, targets = torch.zeros(1, 20_000, 256, dtype=FP16), torch.zeros(1, 20_000, dtype=torch.int64)
    assert token_loss(logits, targets).item() == pytest.approx(20_000 * math.log(256), rel=1e-5)
    assert F.cross_entropy(logits[0], targets[0], reduction="sum").isinf()  # 110,904 > 65,504


pytestmark = pytest.mark.usefixtures("own_folder")

SMALL = ["recipe=language_model", "device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000"]
SMALL += ["data.num_samples=1024", "data.length=64", "batch_size=8", "recipe.sample_tokens=8"]
SMALL += ["model.options.depth=1", "model.options.width=32", "model.options.heads=1"]


def run(folder: str, *overrides: str, code: int = 0) -> dict[str, float]:
    """A run in this process. Returns its last evaluation."""
    assert train.main([*SMALL, f"run_dir={folder}", *overrides]) == code
    return summary(folder)["eval"] if code == 0 else {}


@pytest.mark.slow
def test_far_down_a_text_16_bit_positions_cost_and_fp32_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    train_on = ["steps=150", "schedule.horizon=150", "data=text", f"data.path={Path('copies.txt').absolute()}"]
    # Lines that are said twice: to say one again is to know how far back it began.
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(97, 123, (4000, 7), generator=generator).repeat(1, 2)
    Path("copies.txt").write_bytes(bytes(halves.flatten().tolist()))
    model = ["model.options.width=64", "model.options.depth=2"]
    exact = run("a", *train_on, *model, "recipe.eval_offset=4096")
    assert exact["loss_at_4096"] == pytest.approx(exact["loss"], abs=5e-3)
    assert exact["loss"] < 2.8  # a new letter costs log(26) = 3.26, and one that is said again should cost nothing
    capsys.readouterr()
    for ids in ("bf16", "fp16"):
        again = ["task=evaluate", f"model.options.positions_dtype={ids}", "recipe.eval_offset=4096"]
        assert train.main([*SMALL, "run_dir=a", *train_on, *model, *again]) == 0
        printed = capsys.readouterr().out
        metrics = dict(pair.split() for pair in printed.splitlines()[-1].split(": ")[1].split(", "))
        assert float(metrics["loss"]) == pytest.approx(exact["loss"], abs=1e-4)
        assert float(metrics["loss_at_4096"]) > exact["loss"] + 0.5
        assert "have the id of another one before them" in printed


def test_a_sampled_text_is_a_function_of_seed_and_weights() -> None:
    run("a", "steps=2", "recipe.prompt=import")
    run("b", "steps=2", "recipe.prompt=import")
    assert not same_but(state("a"), state("b"))
    texts = [Path(f, "samples", "step_00000002.txt").read_bytes() for f in "ab"]
    assert texts[0] == texts[1] and texts[0].startswith(b"import") and len(texts[0]) > 6
    net, amp = small(vocab_size=256), Amp.named("bf16")
    before = torch.get_rng_state()

    def sample(seed: int, temperature: float) -> str:
        knobs = language_model.Knobs(**(state("a")["config"]["recipe"] | {"temperature": temperature}))
        return language_model.sample(net, amp, knobs, read_tokenizer("bytes"), length=4, seed=seed)

    assert sample(0, 1.0) == sample(0, 1.0) != sample(1, 1.0)
    assert sample(0, 1e-6) == sample(1, 1e-6)  # always the most likely
    assert torch.equal(torch.get_rng_state(), before)


def test_none_is_sampled_when_none_is_asked_for_or_nothing_may_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    run("a", "steps=1", "recipe.sample_tokens=0")
    assert not Path("a/samples").exists() and train.main([*SMALL, "run_dir=b", "dry_run=true"]) == 0
    assert not Path("b").exists() and "GFLOP per token; tokens/s at most" in capsys.readouterr().out
