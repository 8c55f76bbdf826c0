"""Chats: ids and masks are those of transformers, cut and left out by name, and templates that are no good end."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from chats import SMOLLM2, write_tokenizer
from shared import data_config
from torch import nn

from amp_core.config.checks import check_data
from amp_core.config.errors import ConfigError
from amp_core.data import build_data
from amp_core.data.chat import rendered_prompts
from amp_core.data.packing import IGNORE
from amp_core.data.text import num_valid, token_loss
from amp_core.data.tokenizers import read_tokenizer
from amp_core.step.window import windows

pytest.importorskip("tokenizers", reason="needs the extra text")
pytest.importorskip("jinja2", reason="needs the extra text")

INST = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""In Mistral's form: no prompt for the next turn, alternation, a space that merges with the answer's first word."""
MARKED = """{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
<|im_start|>{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
    {%- else -%}
<|im_start|>{{ {"role": message.role} | tojson }} {{ message.content }}{{ eos_token }}
    {%- endif -%}
    {%- if message.content == 'stop' %}{% break %}{% endif -%}
{%- endfor -%}"""
TEMPLATES = {"smollm2": SMOLLM2, "inst": INST, "marked": MARKED}

ANSWERS = "The self returns.", "def f(x):\n    return x\n        # 日本 é", "wörld"


def turns(*answers: str) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": f"return number {number} <b>"} for number in range(len(answers))]
    return [each for pair in zip(asked, answers, strict=True) for each in (pair[0], say(pair[1]))]


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS = [turns(*ANSWERS[:number]) for number in (1, 2, 3)] * 4


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Data of chats, or of lines as they are, by a template."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(chats=CHATS, template=SMOLLM2, **values):
        write_tokenizer(folder := tmp_path / "tokenizer", template)
        lines = chats if isinstance(chats, bytes) else b"".join(line(each) for each in chats)
        (tmp_path / "chat.jsonl").write_bytes(lines)
        cfg = data_config("chat", path=str(tmp_path / "chat.jsonl"), tokenizer=str(folder), **{"length": 256} | values)
        assert check_data(cfg) == []
        return build_data(cfg, seed=0)

    return make


def line(messages) -> bytes:
    return json.dumps({"messages": messages}).encode() + b"\n"


def samples(data, part="train"):
    dataset = getattr(data, part)
    return dataset.__getitems__([(index, 0) for index in range(len(dataset))])


def learned(data):
    """The texts of the trained tokens of each sample."""
    inner = data.tokenizer._inner
    return [inner.decode(row[row != IGNORE].tolist(), skip_special_tokens=False) for row in samples(data)[1]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(chat, tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    data = chat(template=TEMPLATES[name], train_on="all")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    inputs, targets = samples(data)
    assert len(inputs) + len(data.eval) == len(CHATS) and data.notes == ()
    for messages, row, target in zip(CHATS, inputs, targets, strict=False):
        ids = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert row[: len(ids) - 1].tolist() == ids[:-1] and target[target != IGNORE].tolist() == ids[1:]


@pytest.mark.parametrize(
    "name, form",
    [("smollm2", "{}<|im_end|>\n"), ("inst", " {}<|im_end|>"), ("marked", "{}<|im_end|>")],
)  # fmt: skip
def test_the_answers_alone_are_trained(chat, name, form):
    data = chat(template=TEMPLATES[name])
    expected = ["".join(form.format(each["content"]) for each in messages[1::2]) for messages in CHATS]
    assert learned(data) == expected[: len(data.train)]


def test_marked_tokens_are_those_of_transformers(chat, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    messages = turns("The self returns.", "x")
    row = samples(chat([messages] * 2, MARKED))[1][0]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert (row != IGNORE).int()[: len(found["input_ids"]) - 1].tolist() == found["assistant_masks"][1:]


def test_long_chats_are_cut_at_the_end_of_an_answer_and_others_left_out_by_name(chat):
    short, long, hopeless = turns("x", "The self"), turns("x", "The self", "return " * 99), turns("return " * 99)
    only_asked = [{"role": "user", "content": "x"}]
    data = chat([hopeless, short, only_asked, long, short], length=160)
    inputs, targets = samples(data)
    assert torch.equal(inputs[0], inputs[1]) and torch.equal(targets[0], targets[1])  # `long` is cut to `short`
    assert len(inputs) == 2 and learned(data)[0] == "x<|im_end|>\nThe self<|im_end|>\n"
    cut, left_out = data.notes
    assert "1 of 5 chats are cut at the end of an answer, to data.length=160" in cut
    assert "2 of 5 chats are left out" in left_out and "chat.jsonl, line 1" in left_out
    with pytest.raises(ConfigError, match=r"none of its 2 chats has a token to train on within data\.length=160"):
        chat([hopeless, only_asked], length=160)


def test_evaluation_has_its_own_file_or_the_end(chat, tmp_path):
    data = chat(num_samples=4)
    assert (len(data.train), len(data.eval)) == (4, 1)
    (tmp_path / "eval.jsonl").write_bytes(line(CHATS[1]) * 2)
    data = chat(eval_path=str(tmp_path / "eval.jsonl"))
    assert (len(data.train), len(data.eval)) == (12, 2)
    assert torch.equal(samples(data, "eval")[1][0], samples(data)[1][1])


GOOD = line(CHATS[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "lines, template, problem",
    [
        (GOOD + b'{"messages": "\xff"}\n', SMOLLM2, "line 2: is not UTF-8"),
        (GOOD + b"nonsense\n", SMOLLM2, "line 2: is not JSON"),
        (GOOD + b"\n", SMOLLM2, "line 2: is empty"),
        (GOOD + b'{"text": "a"}\n', SMOLLM2, "line 2: has the keys text, not 'messages'"),
        (GOOD + b'{"messages": []}\n', SMOLLM2, "line 2: expected a list of messages, found []"),
        (GOOD + b'{"messages": ["a"]}\n', SMOLLM2, "line 2: 'role' of message 1 is missing; expected text"),
        (GOOD + line([{"role": "user"}]), SMOLLM2, "line 2: 'content' of message 1 is missing; expected text"),
        (GOOD + line([*turns("a"), {"role": 3}]), SMOLLM2, "line 2: 'role' of message 3 is int; expected text"),
        (GOOD + b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', SMOLLM2, "line 2: holds half"),
        (GOOD + line([say("a")]), INST, "line 2: the chat template of {} refuses it: roles must alternate"),
        (GOOD + line([{"role": "judge", "content": "a"}]), INST, "line 2: the chat template of {} refuses it: roles"),
        (GOOD + line([say("a")]), SMOLLM2, "line 2: the chat template of {} refuses it: renders the messages up to number"),
        (GOOD, "{% for", "the chat template of {} refuses it: "),
        (GOOD, "{{ ''.__class__.__mro__ }}", "line 1: the chat template of {} refuses it: access to attribute"),
        (GOOD, "{% set x = 'a' * 10 ** 11 %}{{ x }}", "the chat template of {} refuses it: MemoryError"),
        (GOOD, "{{ messages[0].content.nothing.at_all }}", "line 1: the chat template of {} refuses it: "),
        (GOOD, SMOLLM2, "has one chat to train on; expected another to evaluate"),
        (GOOD, "{% set a %}b{% generation %}a{% endgeneration %}{% endset %}{{ a }}", "inside of a macro"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_by_file_and_line(chat, tmp_path, lines, template, problem):
    with pytest.raises(ConfigError) as error:
        chat(lines, template)
    assert problem.format(tmp_path / "tokenizer") in str(error.value), error.value
    has_one = lines == GOOD and template is SMOLLM2
    assert "\n" not in str(error.value) and bool(list(tmp_path.glob("cache/*/*/*/*.bin"))) == has_one


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_template_that_loops_ends(chat, monkeypatch, where):
    monkeypatch.setattr("amp_core.data.chat._SECONDS", 0.5)
    found = []

    def run():
        with pytest.raises(ConfigError) as error:
            chat(template=LOOP)
        found.append(str(error.value))

    began = time.monotonic()
    if where == "main":
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "chat.jsonl, line 1: the chat template of " in found[0] and "takes more than 0.5 s" in found[0]
    assert time.monotonic() - began < 60


def test_the_date_is_that_of_the_file_and_chats_are_rendered_once(chat, tmp_path, monkeypatch):
    data = chat(template="{{ strftime_now('%Y') }}" + SMOLLM2)
    assert "asks for the date" in data.notes[0]
    made = [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("cache/*/*/*/*"))]
    monkeypatch.setattr("amp_core.data.chat._write", None)
    cfg = data_config("chat", path=str(tmp_path / "chat.jsonl"), tokenizer=str(tmp_path / "tokenizer"), length=256)
    again = build_data(cfg, seed=0)
    assert torch.equal(samples(again)[1], samples(data)[1]) and again.notes == data.notes
    assert made == [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("cache/*/*/*/*"))] != []


def test_ragged_chats_in_windows_have_the_gradients_of_one_batch(chat):
    inputs, targets = samples(chat())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(400, 8), nn.Linear(8, 400)).double()
    whole = token_loss(net(inputs), targets) / num_valid((inputs, targets))
    expected = list(torch.autograd.grad(whole, list(net.parameters())))
    parts = [(inputs[first : first + 4], targets[first : first + 4]) for first in range(0, len(inputs), 4)]
    counts = [int(num_valid(part)) for part in parts]
    assert len(set(counts)) > 1
    for window in windows(parts, len(parts), count=num_valid):
        for micro in window:
            loss = token_loss(net(micro.batch[0]), micro.batch[1]) / num_valid(micro.batch)
            (loss * micro.weight).backward()
    for weight, want in zip(net.parameters(), expected, strict=True):
        # Losses are of fp32: a sum of counts terms errs by eps a term at most.
        bound = torch.finfo(torch.float32).eps * sum(counts) * want.abs().max()
        assert weight.grad is not None and float((weight.grad - want).abs().max()) <= bound


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_that_of_transformers_and_a_bad_chat_costs_its_line_alone(chat, tmp_path, name, monkeypatch):
    monkeypatch.setattr("amp_core.data.chat._SECONDS", 1.0)
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    data = chat(template="{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    ask = turns("")[0]
    asked = {1: [ask], 2: [ask | {"content": "loop"}], 3: [{"role": "user"}], 4: [*turns("a\tü"), ask]}
    found = list(rendered_prompts(asked, data.tokenizer, 0.0))
    assert [number for number, *_ in found] == [1, 2, 3, 4]
    assert "line 2: the chat template" in found[1][2] and "takes more than 1 s" in found[1][2]
    assert found[2][2] == "line 3: 'content' of message 1 is missing; expected text"
    for number in (1, 4):
        text = theirs.apply_chat_template(asked[number], tokenize=False, add_generation_prompt=True)
        assert found[number - 1] == (number, text, None)


def test_a_tokenizer_without_a_template_is_refused(chat, tmp_path):
    with pytest.raises(ConfigError, match=r"has no chat template; expected chat_template\.jinja"):
        chat(template=None)
    assert read_tokenizer(str(tmp_path / "tokenizer")).tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "values, problem",
    [
        ({"tokenizer": "bytes"}, "data.tokenizer=bytes: data=chat needs the folder of a chat model's tokenizer"),
        ({"train_on": None}, "data.train_on=null: expected assistant or all"),
        ({"path": None}, "data.path=null: expected a file of chats"),
        ({"path": "/nowhere"}, "data.path=/nowhere: there is no such file or folder"),
        ({"path": __file__}, "has no *.jsonl; expected lines of"),
        ({"packing": "chunks"}, "data.packing=chunks: chats are not packed; use data.packing=none"),
        ({"mix": {"a": 1.0}}, "data.mix={'a': 1.0}: has no effect"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(values, problem):
    assert any(problem in each for each in check_data(data_config("chat", **values)))
