"""Packing: each pair of tokens once, samples as full as best fit makes them, and no leak between documents."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from waits import waits

from amp_core.config.errors import ConfigError
from amp_core.data.packing import IGNORE, plan
from amp_core.data.text import outputs_of
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS
from amp_core.models.packed import causal_mask, check_packing
from amp_core.models.timm_and_hf import CAUSAL, as_published

needs_hf = pytest.mark.skipif(not find_spec("transformers"), reason="needs pip install 'amp-recipes[hf]'")
NETS = [
    *(("gpt", {"positions": each, "width": 64, "depth": 2, "heads": 2}) for each in ("rope", "alibi", "learned")),
    *(pytest.param(f"hf:{each}_tiny", {}, marks=needs_hf) for each in ("gpt2", "llama", "qwen3")),
]
LENGTHS = (9, 1, 8, 6)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def built(name: str, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, LANGUAGE_MODELS, options=options, vocab_size=256, length=24).eval()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["none", "chunks", "best_fit"])
@pytest.mark.parametrize("seed", range(8))
def test_every_pair_of_every_document_is_in_one_sample(packing: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, sizes = int(rng.integers(1, 24)), rng.integers(0, 40, rng.integers(1, 60))
    ends = np.cumsum(sizes)
    found = plan(sizes, length, packing)

    def read(document: int, start: int, count: int) -> Any:
        first = ends[document] - sizes[document] + start  # a token is its place in the row of all documents
        assert count > 0 and start + count < sizes[document]
        return np.arange(first, first + count), np.arange(first + 1, first + count + 1)

    inputs, targets, *packed = found.batch(range(len(found)), read)
    valid = targets != IGNORE
    assert bool(packed) is (packing != "none") and inputs.shape == (len(found), length)
    assert torch.equal((targets - inputs)[valid], torch.ones(int(valid.sum()), dtype=torch.int64))
    pairs = [first for end, size in zip(ends, sizes, strict=True) for first in range(end - size, end - 1)]
    assert sorted(inputs[valid].tolist()) == pairs and valid.any(1).all()
    assert packing != "chunks" or len(found) == -(-len(pairs) // length)
    one_by_one = [found.batch([sample], read) for sample in range(len(found))]
    for whole, parts in zip((inputs, targets, *packed), zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
    if packed:  # a position counts within a piece, and starts at 0 in each and in the padding
        after = packed[0][:, 1:]
        begins = (inputs[:, 1:] != inputs[:, :-1] + 1) | torch.isin(inputs[:, 1:], torch.from_numpy(ends - sizes))
        begins |= valid[:, 1:] != valid[:, :-1]
        begins &= valid[:, 1:] | valid[:, :-1]
        assert torch.equal(after == 0, begins) and not packed[0][:, 0].any()
        assert ((after == 0) | (after == packed[0][:, :-1] + 1)).all()


def one_at_a_time(counts: list[int], length: int) -> list[int]:
    """Best-fit decreasing as it is defined, in quadratic time: the room that each sample keeps."""
    rooms: list[int] = []
    for count in sorted(counts, reverse=True):
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= count]
        rooms += [] if fitting else [length]
        rooms[min(fitting)[1] if fitting else -1] -= count
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_is_best_fit_decreasing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 40))
    counts = rng.integers(1, length + 1, rng.integers(1, 200))
    found = plan(counts + 1, length, "best_fit")
    loads = np.diff(np.append(0, np.cumsum(found.counts))[np.append(0, found.ends)])
    assert sorted((length - loads).tolist()) == one_at_a_time(counts.tolist(), length)
    assert sorted(found.documents.tolist()) == list(range(len(counts)))  # none is cut


@pytest.mark.parametrize("sizes", [[], [0], [1, 1]])
@pytest.mark.parametrize("packing", ["none", "chunks", "best_fit"])
def test_documents_without_a_pair_make_no_sample(sizes: list[int], packing: str) -> None:
    assert len(plan(sizes, 8, packing)) == 0


# --- no leak ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name, options", NETS)
def test_logits_of_a_packed_document_are_those_of_the_document_alone(name, options, dtype):
    net, text = built(name, options).to(dtype), tokens()
    with torch.no_grad():
        packed, begin = outputs_of(net, (text, text, POSITIONS)), 0
        for length in LENGTHS:
            alone = net(text[:, begin : begin + length])
            # Sums of other shapes run in another order: eps per term of the sums that a logit goes through, which are
            # at most 64 features to 3 * 64 and 4 * 64, 24 keys, and 256 back to 64, twice, and 64 to the logits. What
            # is fp32 in any dtype (RoPE's phases, logits of softmax) may round otherwise, once per layer.
            terms = 2 * (64 + 24 + 64 + 64 + 256) + 64
            bound = terms * torch.finfo(dtype).eps * alone.abs().max()
            assert (packed[:, begin : begin + length] - alone).abs().max() <= bound
            begin += length


@pytest.mark.parametrize("mode", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name, options", NETS)
def test_a_document_has_the_bits_of_itself_whatever_it_is_packed_with(name, options, mode):
    second = slice(sum(LENGTHS[:2]), sum(LENGTHS[:3]))
    found = []
    for seed in (1, 2):
        net, text = built(name, options), tokens(seed)
        text[:, second] = tokens()[:, second]
        inputs = net.get_submodule("embed") if name == "gpt" else net.get_input_embeddings()  # type: ignore[operator]
        embedded: list[Tensor] = []
        inputs.register_forward_hook(lambda _, __, out, kept=embedded: (out.retain_grad(), kept.append(out))[1])
        with torch.autocast("cpu", mode, enabled=mode is not None):
            logits = outputs_of(net, (text, text, POSITIONS))[:, second]
            logits.float().square().sum().backward()
        (grad,) = (each.grad for each in embedded if each.grad is not None)
        others = grad.clone()
        others[:, second] = 0
        assert grad[:, second].all(2).any() and not others.any()
        found.append([logits, *(p.grad for _, p in sorted(net.named_parameters()) if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name, options", NETS)
def test_a_network_that_takes_packed_documents_is_let_through(name: str, options: dict[str, Any]) -> None:
    net = built(name, options).train()
    check_packing(net, name)
    assert net.training


@needs_hf
@pytest.mark.parametrize("kind, fields, leaks", [
    ("mamba", {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}, "see each other"),
    ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "see each other"),
])  # fmt: skip
def test_networks_of_transformers_whose_documents_leak_are_refused(kind, fields, leaks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    net = built(f"hf:{tmp_path}", {})
    with pytest.raises(ConfigError, match=rf"data.packing: model.name={kind} .*{leaks}.*; use data.packing=none"):
        check_packing(net, kind)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mistral": {"sliding_window": None, "num_key_value_heads": 2},
    "gpt_neox": {},
}
"""Sizes by type; of the others two heads of keys, so that one serves two of queries."""


@needs_hf
@pytest.mark.parametrize("packs", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_forward_pass_that_never_waits_has_the_bits_of_transformers(kind: str, packs: bool, tmp_path: Path) -> None:
    fields = SIZES | {"pad_token_id": None} | OWN.get(kind, {"num_key_value_heads": 2, "head_dim": 8})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    net, text = built(f"hf:{tmp_path}", {}), torch.cat([tokens(1), tokens(2)])
    batch: Any = (text, text, *[POSITIONS.expand(2, -1)] * packs)

    def step() -> list[Tensor]:
        net.zero_grad()
        logits = outputs_of(net, batch)
        logits.square().sum().backward()
        return [logits.detach(), *(param.grad.clone() for param in net.parameters() if param.grad is not None)]

    found = []
    assert waits(lambda: found.extend(step())) == 0
    published = as_published(net)  # also takes padded prompts from here on
    theirs = published(text).logits
    assert packs or torch.equal(found[0], theirs)
    again = []
    assert waits(lambda: again.extend(step())) == (0 if packs else 1)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)) and len(found) > 10


@needs_hf
@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": 4, "num_key_value_heads": 2, **SIZES},
        {"model_type": "bloom", "n_head": 4},
    ],
)
def test_windows_and_added_biases_are_left_to_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "n_layer": 1, **fields}))
    net, text = built(f"hf:{tmp_path}", {}), tokens()
    with torch.no_grad():
        assert torch.equal(net(text), as_published(net)(text).logits)
    assert net.config._attn_implementation != "amp_causal"  # type: ignore[union-attr]


def test_a_network_without_positions_is_refused() -> None:
    net = build_model("mlp", CLASSIFIERS, options={}, num_classes=4, image_shape=(1, 1, 7))
    with pytest.raises(ConfigError, match=r"model.name=mlp takes no packed documents"):
        check_packing(net, "mlp")


def test_the_mask_of_a_sample_is_blocks() -> None:
    mask = causal_mask(torch.tensor([[0, 1, 0, 0]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
