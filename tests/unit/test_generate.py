"""Texts that a language model continues: the tokens of one prompt alone, in any batch, the same for a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import summary
from small import COMMON
from test_recipes import run

import train
from amp_core import Amp
from amp_core.data import Data
from amp_core.data.text import IGNORE, num_bytes
from amp_core.data.tokenizers import read_tokenizer
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.run.generate import generate

pytestmark = pytest.mark.usefixtures("own_folder")
PROMPTS = [[5, 6, 7], [1], list(range(9)), [30, 2, 2, 4, 8, 16]]  # one is longer than the network sees
AMP = Amp.named("fp32")


def network(positions: str):
    torch.manual_seed(0)
    options = {"width": 32, "depth": 2, "heads": 2, "positions": positions}
    return build_model("gpt", LANGUAGE_MODELS, options=options, vocab_size=32, length=8).double()


@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_a_greedy_text_is_that_of_a_loop_by_hand_in_any_batch(positions):
    net = network(positions)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(net(torch.tensor([ids[-8:]]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert generate(net, AMP, PROMPTS, num_tokens=12, length=8) == expected
    eos = expected[0][4]
    ended = [ids[: ids.index(eos)] if eos in ids else ids for ids in expected]
    assert generate(net, AMP, PROMPTS, num_tokens=12, length=8, eos=eos) == ended


@pytest.mark.one_in(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["gpt2_tiny", "llama_tiny"])
def test_transformers_generates_what_a_loop_by_hand_does_in_any_batch(kind, temperature):
    pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    net = build_model(f"hf:{kind}", LANGUAGE_MODELS, options={}, vocab_size=32, length=8).double()
    settings = {"num_tokens": 12, "length": 8, "temperature": temperature, "seed": 3}
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(3)  # logits that differ
    whole = generate(net, AMP, PROMPTS, **settings)
    assert whole == [generate(net, AMP, [prompt], first=i, **settings)[0] for i, prompt in enumerate(PROMPTS)]
    if temperature == 0:
        for prompt, new in zip(PROMPTS, whole, strict=True):
            ids = [*prompt, *new]
            logits = net(torch.tensor([ids]))[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == new
        eos = whole[0][4]
        ended = [ids[: ids.index(eos)] if eos in ids else ids for ids in whole]
        assert generate(net, AMP, PROMPTS, eos=eos, **settings) == ended
    assert net(torch.tensor([[1, 2]])).shape == (1, 2, 32)  # it is as before


def test_a_sampled_text_is_a_function_of_its_number_and_the_seed():
    net, settings = network("rope"), {"num_tokens": 12, "length": 8, "temperature": 1.0}
    whole = generate(net, AMP, PROMPTS, seed=3, **settings)
    alone = [generate(net, AMP, [prompt], seed=3, first=i, **settings)[0] for i, prompt in enumerate(PROMPTS)]
    assert whole == alone != generate(net, AMP, PROMPTS, seed=4, **settings)
    assert generate(net, AMP, PROMPTS, num_tokens=0, length=8) == [[], [], [], []]


def test_tokens_are_sampled_as_often_as_the_softmax_says():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))

    class Fixed(torch.nn.Module):
        def forward(self, tokens):
            return logits.expand(*tokens.shape, 4)

    num = 4_000
    drawn = torch.tensor(generate(Fixed(), AMP, [[0]] * num, num_tokens=1, length=1, temperature=1.0))
    share = drawn.flatten().bincount(minlength=4) / num
    assert ((share - logits.exp()).abs() < 5 * (0.25 / num) ** 0.5).all()  # five standard deviations


def test_prompts_in_a_file_get_texts_and_bad_lines_an_error(capsys):
    run("language_model", "a", "steps=2")
    bad = ['{"prompt": 3}', "[]", "{", '{"prompt": ""}', '{"messages": [{"role": "user", "content": "no template"}]}']
    Path("p.jsonl").write_text("\n".join(['{"prompt": "import "}', *bad, '{"prompt": "def é"}']))
    found = []
    for _ in range(2):
        assert train.main(["task=predict", "run_dir=a", "predict_on=p.jsonl", "device=cpu"]) == 0
        found.append([json.loads(line) for line in Path("a/predictions.jsonl").read_text().splitlines()])
    assert found[0] == found[1] and [line["index"] for line in found[0]] == list(range(7))
    assert [line["index"] for line in found[0] if "error" in line] == [1, 2, 3, 4, 5]
    assert found[0][6]["prompt"] == "def é" and found[0][6]["num_tokens"] == 4 and summary("a")["status"] == "finished"
    Path("p.jsonl").write_text("")
    assert train.main(["task=predict", "run_dir=a", "predict_on=p.jsonl", "device=cpu"]) == 2
    assert "predict_on=p.jsonl: is empty; expected a line" in capsys.readouterr().err


def test_prompts_for_a_network_of_images_are_refused(capsys):
    run("classification", "a", "steps=1")
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    assert train.main([*COMMON[:1], "task=predict", "run_dir=a", "predict_on=p.jsonl"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_bytes_are_those_of_valid_targets():
    tokenizer = read_tokenizer("bytes")
    tokenizer.num_bytes = torch.tensor([0, 1, 5])
    data = Data(None, None, {}, tokenizer=tokenizer)
    assert num_bytes(data, torch.tensor([[2, 1, IGNORE], [0, 2, 2]])) == 16
