"""task=export: what other programs load, with the logits of the run, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from running import refused_before_the_start, summary
from shared import data_config
from test_predict import CLASSES, make_data
from test_recipes import arguments, run

import train
from amp_core import __version__
from amp_core.checkpoints.reading import find_checkpoint
from amp_core.config.errors import SaveError
from amp_core.data import build_data
from amp_core.models import build_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS
from amp_core.run.graph_files import compare
from amp_core.run.pretrained import load_pretrained
from amp_core.vision import import_torchvision
from recipes import RECIPES

import_torchvision()  # transformers and peft do so, which fails beside another build of torch
pytestmark = pytest.mark.usefixtures("own_folder")
TOKENS = torch.arange(64).reshape(2, 32) % 60
TINY = {"width": 32, "depth": 2, "heads": 2}
GPT2 = TINY | {"positions": "learned", "tied": True, "bias": True, "activation": "gelu_tanh"}
"""A GPT-2 by its shape."""


def typed(options):
    return [f"model.options.{key}={json.dumps(value)}" for key, value in options.items()]


def export(to, *more, run_dir="a"):
    return train.main([f"export.to={to}", "task=export", f"run_dir={run_dir}", "device=cpu", *more])


def from_folder(folder="a/export/hf"):
    """What transformers loads, nothing of it missing or unexpected, and its tokenizer."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    net, notes = transformers.AutoModelForCausalLM.from_pretrained(Path(folder).absolute(), output_loading_info=True)
    assert not any(notes.values()) and net.dtype is torch.float32
    return net.eval(), transformers.AutoTokenizer.from_pretrained(Path(folder).absolute())


def close(a, b):
    """fp32 in another order of sums: some eps of the largest."""
    assert (a - b).abs().max() < 64 * torch.finfo(torch.float32).eps * b.abs().max()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options, more",
    [(TINY, []), (GPT2, ["ema.decay=0.5"]), (GPT2 | {"bias": False, "tied": False}, ["checkpoint=sharded"])],
    ids=["rope", "gpt2", "no_bias"],
)
def test_our_gpt_is_a_network_of_transformers_with_its_logits_and_a_tokenizer_of_bytes(options, more):
    pytest.importorskip("transformers", reason="needs the extra hf")
    run("language_model", "a", "steps=3", "data.length=32", "amp=bf16", *typed(options), *more)
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    assert export("hf") == 0 and export("safetensors") == 0
    assert before == {path: path.read_bytes() for path in before}
    state = find_checkpoint(Path("a")).contents
    own = build_model("gpt", LANGUAGE_MODELS, options=options, vocab_size=256, length=32).eval()
    own.load_state_dict(state["ema" if "ema.decay=0.5" in more else "model"])
    theirs, tokenizer = from_folder()
    with torch.no_grad():
        logits = own(TOKENS)
        close(theirs(TOKENS).logits, logits)
        load_pretrained(own, "a/export/model.safetensors")
        assert torch.equal(own(TOKENS), logits)
    text = "def é():\n\t'ü'"
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft asks transformers by the old name
@pytest.mark.parametrize("adapter", ["none", "lora", "peft"])
@pytest.mark.parametrize("kind", ["llama_tiny", "gpt2_tiny"])
def test_a_fine_tuned_network_of_transformers_goes_back_with_adapters_merged_or_alone(kind, adapter):
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    common = ["model=hf", "data.length=32", "data.num_samples=16", "amp=bf16", "device=cpu", "log=none", "batch_size=2"]
    begin = ["recipe=language_model", f"model.name={kind}", "steps=1", "run_dir=base", "recipe.sample_tokens=0"]
    assert train.main([*common, *begin]) == 0 and export("hf", run_dir="base") == 0
    base = str(Path("base/export/hf").absolute())
    tune = ["recipe=finetuning", f"model.name={base}", "steps=3", "run_dir=a", f"recipe.adapter={adapter}"]
    assert train.main([*common, *tune, "model.weights=default", "optimizer.lr=0.01"]) == 0
    assert export("hf") == 0
    merged, _ = from_folder()
    start, _ = from_folder(base)
    with torch.no_grad():
        logits = merged(TOKENS).logits
        assert (logits - start(TOKENS).logits).abs().max() > 1e-3  # it was trained
        if adapter == "none":
            state = find_checkpoint(Path("a")).contents["model"]
            assert all(torch.equal(state[name], value) for name, value in merged.state_dict().items() if name in state)
            return
        assert export("peft") == 0
        close(peft.PeftModel.from_pretrained(start, "a/export/peft").eval()(TOKENS).logits, logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind, step", [("int8", 1 / 254), ("nf4", (1 - 0.6962) / 2)])
def test_a_base_of_few_bits_is_exported_as_what_its_layers_multiply_with(kind, step):
    """Half of the widest gap between two codes, of the largest weight of a row (int8) or of 64 (nf4), and fp32 sums."""
    pytest.importorskip("bitsandbytes", reason="needs the extra peft")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256)).save_pretrained("base")
    net = ["model=hf", "model.name=base", "model.weights=default", f"recipe.base={kind}", "optimizer.lr=0.01"]
    small = ["data.length=32", "data.num_samples=16", "amp=fp32", "device=cpu", "log=none", "batch_size=2", "steps=3"]
    assert train.main(["recipe=finetuning", "run_dir=a", *net, *small]) == 0
    assert export("hf") == 0 and export("peft") == 0
    safetensors = pytest.importorskip("safetensors.torch")
    whole, base, adapter = (
        safetensors.load_file(f"{folder}/{name}model.safetensors")
        for folder, name in (("a/export/hf", ""), ("base", ""), ("a/export/peft", "adapter_"))
    )
    name = "model.layers.0.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    delta, before = b @ a * 16.0 / 8, base[f"{name}.weight"]
    off = (whole[f"{name}.weight"] - delta - before).unflatten(1, (-1, 64 if kind == "nf4" else 128)).abs()
    largest = before.unflatten(1, off.shape[1:]).abs().amax(2, keepdim=True)
    assert delta.abs().max() > 1e-3 and off.max() > 0 and (off <= (step + 1e-3) * largest).all()


@pytest.mark.parametrize(
    "typed, key",
    [
        (["task=export", "run_dir=."], "export.to"),
        (["task=export", "export.to=hf", "run_dir=."], "model.name=cnn"),
        (["task=export", "export.to=onyx", "run_dir=."], "export.to=onyx"),
        (["task=export", "export.to=peft", "run_dir=."], "needs adapters"),
        (["task=export", "export.to=hf", "recipe=language_model", "run_dir=.", "export.path=/"], "export.path=/"),
        (["task=export", "export.to=safetensors", "run_dir=.", "export.path=x.pt"], ".safetensors"),
        (["task=export", "export.to=pt2", "run_dir=.", "export.path=x.pt"], ".pt2"),
        (["task=export", "export.to=safetensors", "export.path=/etc/passwd.safetensors"], "task=export: needs weights"),
        (["task=export", "export.to=safetensors", "run_dir=.", "export.path=/x.safetensors/"], "export.path=/x"),
        (["task=export", "export.to=hf", "run_dir=a"], "run_dir=a: there is no such file"),
        (["export.to=hf"], "task=export"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_the_start(typed, key, capsys):
    refused_before_the_start(typed, key, capsys)


def test_a_target_that_is_there_and_a_network_without_a_place_leave_nothing(capsys):
    run("language_model", "a", "steps=1", "data.length=32", *typed(TINY | {"positions": "alibi"}))
    assert export("hf") == 2 and "positions=alibi" in capsys.readouterr().err and not list(Path("a/export").iterdir())
    Path("b.safetensors").write_bytes(b"mine")
    assert export("safetensors", "export.path=b.safetensors") == 2 and Path("b.safetensors").read_bytes() == b"mine"


IN_ANOTHER_PROCESS = """
import json, sys, numpy
to, file, images, logits = sys.argv[1:]
given = numpy.load(images)
if to == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    entry, = session.get_inputs()
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    run = lambda images: session.run(None, {entry.name: images})[0]
    assert "torch" not in sys.modules and entry.shape[0] == "batch"
else:
    import torch
    files = {"metadata.json": ""}
    net = torch.export.load(file, extra_files=files).module()
    about = json.loads(files["metadata.json"])
    run = lambda images: net(torch.from_numpy(images)).numpy()
numpy.save(logits, numpy.concatenate([run(given[:1]), run(given[1:4]), run(given[4:])]))
assert not any(name.startswith(("amp_core", "recipes")) for name in sys.modules)
print(json.dumps(about))
"""


@pytest.mark.parametrize("to", ["pt2", "onnx"])
@pytest.mark.slow
def test_a_graph_has_the_logits_of_the_averages_and_says_what_it_needs_without_this_project(to, capsys):
    for package in ["onnx", "onnxscript", "onnxruntime"] if to == "onnx" else []:
        pytest.importorskip(package, reason="needs the extra onnx")
    make_data("pets", "image_folder")
    common = [
        "data=image_folder",
        "data.path=pets",
        "data.image_size=32",
        "data.num_workers=0",
        "model.options.width=8",
    ]
    begin = ["ema.decay=0.5", "amp=fp16", "batch_size=4", "steps=3", "optimizer.lr=0.1", "log=none", "run_dir=a"]
    assert train.main([*common, *begin, "device=cpu"]) == 0
    before = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert export(to) == 0
    assert before == {path: path.read_bytes() for path in before}
    assert "compared: at most" in (said := capsys.readouterr().out) and "of the averages" in said

    state = find_checkpoint(Path("a")).contents
    own = build_model("cnn", CLASSIFIERS, options={"width": 8}, num_classes=6, image_shape=(3, 32, 32)).eval()
    images = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    np.save("images.npy", images.numpy())
    file = f"a/export/model.{to}"
    command = [sys.executable, "-I", "-c", IN_ANOTHER_PROCESS, to, file, "images.npy", "logits.npy"]
    about = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    logits = torch.from_numpy(np.load("logits.npy"))
    with torch.no_grad():
        own.load_state_dict(state["ema"])
        close(logits, own(images))
        own.load_state_dict(state["model"])
        assert (logits - own(images)).abs().max() > 1e-3 * logits.abs().max()  # the averages are others
    assert about["classes"] == CLASSES and about["trained_in"] == "fp16" and about["step"] == 3 and about["averaged"]
    assert about["inputs"]["input"]["shape"] == ["batch", 3, 32, 32] and __version__ in about["version"]

    # The metadata are enough to prepare a picture as the evaluation does.
    how, path = about["preprocessing"], sorted(Path("pets/val/cat").iterdir())[0]
    image, side = Image.open(path).convert("RGB"), how["resize_shorter_side"]
    scale = side / min(image.size)
    image = image.resize([round(scale * each) for each in image.size], Image.Resampling[how["interpolation"].upper()])
    left, top = ((have - want) // 2 for have, want in zip(image.size, how["size"][::-1], strict=True))
    pixels = np.asarray(image.crop((left, top, left + how["size"][1], top + how["size"][0]))) / how["divide_by"]
    data = build_data(data_config("image_folder", path="pets", image_size=32), seed=0)
    mine = torch.from_numpy((pixels - how["mean"]) / how["std"]).permute(2, 0, 1).float()
    close(mine, data.eval.__getitems__([(0, 0)])[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_network_of_each_recipe_leaves_as_a_graph(recipe, capsys):
    run(recipe, "a", "steps=1", "amp=bf16")
    assert export("pt2") == 0
    assert "compared: at most" in capsys.readouterr().out


@pytest.mark.parametrize("to_16_bits", [torch.float16, torch.bfloat16])
def test_a_file_of_rounded_weights_is_not_taken_for_the_network(to_16_bits):
    inputs = {"input": torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))}
    net, other = (build_model("cnn", CLASSIFIERS, options={}, num_classes=10, image_shape=(1, 28, 28)) for _ in "ab")
    other.load_state_dict(
        {name: v.to(to_16_bits) if v.is_floating_point() else v for name, v in net.state_dict().items()}
    )
    loop = SimpleNamespace(cfg=SimpleNamespace(export=SimpleNamespace(to="pt2")))
    for each in (net, other):
        each.eval()
    said = compare(loop, net, inputs, 1, lambda given: [net(given["input"])])
    assert "compared: at most" in said
    with pytest.raises(SaveError, match="computes something else"):
        compare(loop, net, inputs, 1, lambda given: [other(given["input"])])


def test_what_leaves_of_an_optimizer_with_an_average_of_its_own_is_what_was_evaluated(capsys):
    pytest.importorskip("schedulefree", reason="needs the package schedulefree")
    own = ["optimizer.name=schedulefree.AdamWScheduleFree", "optimizer.lr=0.1", "optimizer.options={}", "amp=fp32"]
    run("classification", "a", "steps=6", *own)
    assert export("safetensors") == 0
    capsys.readouterr()
    assert (
        train.main(arguments("classification", "task=evaluate", "model.weights=a/export/model.safetensors", "amp=fp32"))
        == 0
    )
    assert f"loss {summary('a')['eval']['loss']:.4f}" in capsys.readouterr().out
    state = find_checkpoint(Path("a")).contents["model"]
    load = pytest.importorskip("safetensors.torch").load_file
    assert any(not torch.equal(state[name], value) for name, value in load("a/export/model.safetensors").items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokenizer", ["bytes", "null"])
def test_a_run_without_its_training_data_exports_and_continues_prompts(tokenizer, capsys):
    Path("book.txt").write_text("def f(x):\n    return x\n" * 60)
    np.save("ids.npy", np.arange(4000, dtype=np.uint16) % 256)
    data = ["data=text", "data.path=book.txt"] if tokenizer == "bytes" else ["data=tokens", "data.path=ids.npy"]
    settings = ["data.length=32", f"data.tokenizer={tokenizer}", "model=gpt", *typed(TINY), "steps=1", "log=none"]
    assert train.main(["recipe=language_model", "run_dir=a", "device=cpu", *data, *settings]) == 0
    for name in ("book.txt", "ids.npy"):
        Path(name).unlink()
    Path("prompts.jsonl").write_text('{"prompt": "def"}\n')
    if tokenizer == "null":  # who wrote the shards alone knows how many tokens there are
        assert export("safetensors") == 2 and "data.path=ids.npy" in capsys.readouterr().err
        return
    assert export("safetensors") == 0 and Path("a/export/model.safetensors").is_file()
    predict = ["task=predict", "predict_on=prompts.jsonl", "run_dir=a", "device=cpu"]
    assert train.main(predict) == 0 and "text" in json.loads(Path("a/predictions.jsonl").read_text())
    assert train.main(["task=evaluate", "run_dir=a", "device=cpu"]) == 2
    assert "data.path=book.txt" in capsys.readouterr().err
