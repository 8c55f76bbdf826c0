"""Networks of timm and transformers: their own outputs and names, their files of weights, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import refused_before_the_start, state, summary
from shared import data_config
from torch import Tensor, nn

import train
from amp_core.cli.compose import compose
from amp_core.config.errors import ConfigError
from amp_core.data import build_data
from amp_core.heads.losses import give_loss
from amp_core.memory.recompute import recompute_blocks
from amp_core.models import Family, build_model, check_model
from amp_core.models.adapters import Lora, find_layers, merged
from amp_core.models.gpt import GPT, LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS
from amp_core.run.pretrained import load_pretrained
from amp_core.vision import import_torchvision
from recipes import segmentation

if find_spec("torchvision"):
    import_torchvision()  # what both import fails beside a CPU-only torch
if find_spec("timm"):
    import timm
if find_spec("transformers"):
    import transformers

pytestmark = pytest.mark.usefixtures("own_folder")

ROOT = Path(__file__).resolve().parents[2]
needs_timm = pytest.mark.skipif(not find_spec("timm"), reason="needs pip install 'amp-recipes[timm]'")
needs_hf = pytest.mark.skipif(not find_spec("transformers"), reason="needs pip install 'amp-recipes[hf]'")
IMAGES: dict[str, Any] = {"image_shape": (3, 32, 32), "num_classes": 7}
TEXT: dict[str, Any] = {"vocab_size": 256, "length": 24}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64}
SMALL = ["device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000", "log_every=1", "batch_size=4"]
PICTURES = [*SMALL, "data=synthetic", "data.num_samples=96", "data.image_size=32", "data.num_classes=4"]


def build(name: str, family: Family = CLASSIFIERS, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, family, options=options, **(TEXT if family is LANGUAGE_MODELS else IMAGES)).eval()


def folder(path: str, config: dict[str, Any] = GPT2, **fields: Any) -> str:
    Path(path).mkdir()
    Path(path, "config.json").write_text(json.dumps(config | fields))
    return f"hf:{path}"


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (2, TEXT["length"]), generator=torch.Generator().manual_seed(seed))


# --- networks ---------------------------------------------------------------------------------------------------------


@needs_timm
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_a_network_of_timm_is_timms_own(name: str) -> None:
    ours = build(f"timm:{name}")
    size = {"img_size": 32} if "vit" in name else {}
    theirs = timm.create_model(name, num_classes=7, **size).eval()
    theirs.load_state_dict(ours.state_dict())  # also the names of weights are theirs
    images = torch.randn(2, *IMAGES["image_shape"])
    assert torch.equal(ours(images), theirs(images)) and ours(images).shape == (2, 7)
    assert not [
        key for key, value in build(f"timm:{name}").state_dict().items() if not value.equal(ours.state_dict()[key])
    ]


@needs_hf
def test_a_network_of_transformers_gives_its_logits() -> None:
    ours = build("hf:vit_tiny")
    theirs = transformers.ViTForImageClassification(ours.config).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, *IMAGES["image_shape"])
    assert torch.equal(ours(images), theirs(images).logits) and ours(images).shape == (2, 7)


@needs_hf
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny", "qwen3_tiny", "bert"])
def test_a_language_model_sees_no_later_token(name: str) -> None:
    if name == "bert":
        name = folder("bert", BERT).removeprefix("hf:")
    net, text = build(f"hf:{name}", LANGUAGE_MODELS), tokens()
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    with torch.no_grad():
        assert net(text).shape == (2, TEXT["length"], 256)
        # The last token reaches no other position, and its own.
        assert torch.equal(net(text)[:, :-1], net(changed)[:, :-1])
        assert not torch.equal(net(text)[:, -1], net(changed)[:, -1])
        if name == "bert":  # as transformers builds it from this folder
            leaks = transformers.BertLMHeadModel(transformers.AutoConfig.from_pretrained(name)).eval()
            assert not torch.equal(leaks(text).logits[:, :-1], leaks(changed).logits[:, :-1])


@needs_timm
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_a_unet_on_an_encoder_of_timm_gives_a_mask_for_each_pixel(name: str) -> None:
    torch.manual_seed(0)
    shape = (3, 48, 64)
    net = build_model(f"timm:{name}", segmentation.MODELS, options={}, num_masks=2, image_shape=shape)
    images = torch.randn(2, *shape)
    masks = net(images)
    assert masks.shape == (2, 2, 48, 64)
    masks.square().sum().backward()
    unused = [name for name, p in net.named_parameters() if p.grad is None]
    assert not unused  # DDP would wait for them


@pytest.mark.parametrize("typed, name", [
    (["model=timm"], "timm:resnet18"),
    (["model=timm", "model.name=resnet26"], "timm:resnet26"),
    (["model=timm", "model.name=timm:resnet26"], "timm:resnet26"),
    (["model=hf", "model.name=/models/llama"], "hf:/models/llama"),
    (["model=resnet18", "model.name=resnet34"], "resnet34"),
    (["model.name=timm:resnet26"], "timm:resnet26"),
])  # fmt: skip
def test_the_group_decides_whose_network_a_name_is(typed: list[str], name: str) -> None:
    assert compose(typed)["model"]["name"] == name


# --- weights ----------------------------------------------------------------------------------------------------------


@needs_timm
def test_weights_of_timm_reach_the_classifier_and_the_encoder_of_a_unet() -> None:
    from safetensors.torch import save_file

    Path("hub").mkdir()
    theirs = timm.create_model("test_resnet", num_classes=1000)
    save_file(theirs.state_dict(), "hub/model.safetensors")
    ours = build("timm:test_resnet", seed=1)
    with pytest.raises(ConfigError, match=r"To keep the initial weights there: 'model.fresh=\[\"fc\"\]'"):
        load_pretrained(ours, "hub")
    assert "initial: fc.bias, fc.weight" in load_pretrained(ours, "hub", ["fc"])
    assert torch.equal(ours.get_parameter("conv1.0.weight"), theirs.get_parameter("conv1.0.weight"))

    unet = build_model("timm:test_resnet", segmentation.MODELS, options={}, num_masks=1, image_shape=(3, 32, 32))
    fresh = ["encoder.model.fc", "head", "narrow", "up"]
    with pytest.raises(ConfigError, match=r"model.fresh=\[" + ",".join(f'"{name}"' for name in fresh)):
        load_pretrained(unet, "hub")
    before = unet.get_parameter("head.weight").clone()
    load_pretrained(unet, "hub", fresh)
    assert torch.equal(unet.get_parameter("encoder.model.conv1.0.weight"), theirs.get_parameter("conv1.0.weight"))
    assert torch.equal(unet.get_parameter("head.weight"), before)


@needs_hf
@pytest.mark.parametrize("size", ["10MB", "20KB"], ids=["one file", "several files"])
def test_a_folder_of_transformers_gives_its_outputs(size: str) -> None:
    torch.manual_seed(1)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, vocab_size=256)).eval()
    theirs.save_pretrained("theirs", max_shard_size=size)
    assert (len(list(Path("theirs").glob("*.safetensors"))) > 1) == (size == "20KB")
    ours = build("hf:theirs", LANGUAGE_MODELS)
    assert not torch.equal(ours(tokens()), theirs(tokens()).logits)
    load_pretrained(ours, "theirs")
    assert torch.equal(ours(tokens()), theirs(tokens()).logits)
    # And back: our state dict is one of theirs.
    theirs.load_state_dict(build("hf:theirs", LANGUAGE_MODELS, seed=3).state_dict())


@needs_hf
def test_weights_that_transformers_renames_load_from_their_folder() -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=7)
    ).eval()
    theirs.save_pretrained("theirs")
    ours, images = build("hf:theirs"), torch.randn(2, 3, 32, 32)
    load_pretrained(ours, "theirs")
    assert torch.equal(ours(images), theirs(images).logits)
    with pytest.raises(ConfigError, match="the network has no"):  # the file alone has other names
        load_pretrained(build("hf:theirs"), "theirs/model.safetensors")


@needs_hf
def test_our_gpt_with_the_weights_of_gpt2_gives_its_logits() -> None:
    """In fp32 as near to float64 as transformers' own."""
    torch.manual_seed(1)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    for param in theirs.parameters():
        param.data += 0.1 * torch.randn_like(param)  # also biases and norms
    theirs.save_pretrained("gpt2")
    form: Any = {"width": 32, "depth": 2, "heads": 2, "positions": "learned", "tied": True, "bias": True}
    with pytest.raises(ConfigError, match=r"GPT-2 needs model.options.activation=gelu_tanh"):
        load_pretrained(GPT(vocab_size=50257, length=24, **form, activation="gelu"), "gpt2")
    ours = GPT(vocab_size=50257, length=24, **form, activation="gelu_tanh").eval()
    load_pretrained(ours, "gpt2")
    text = torch.randint(0, 50257, (2, 24))
    expected = theirs.double()(text).logits
    single = (theirs.float()(text).logits - expected).norm()
    assert (ours(text) - expected).norm() <= 2 * single


LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 64, "vocab_size": 320}


@needs_hf
def test_a_loaded_network_keeps_the_vocabulary_of_its_folder() -> None:
    name, own = folder("llama", LLAMA), {"vocab_size": 300, "length": 24}
    rows = [build_model(name, LANGUAGE_MODELS, options={}, is_loaded=loaded, **own).head for loaded in (True, False)]
    assert [layer.out_features for layer in rows] == [320, 300]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="knows 320 tokens, the data has 321"):
        build_model(name, LANGUAGE_MODELS, options={}, is_loaded=True, vocab_size=321, length=24)


@needs_hf
@pytest.mark.parametrize("config", [LLAMA, GPT2, LLAMA | {"tie_word_embeddings": True}], ids=["llama", "gpt2", "tied"])
def test_the_loss_and_its_gradients_are_those_of_transformers_and_in_chunks(config: dict[str, Any]) -> None:
    """transformers rounds logits to fp32: softmax sums 320 of them, below 2^10 roundings in each gradient."""
    net = build_model(folder("folder", config), LANGUAGE_MODELS, options={}, vocab_size=320, length=24).double()
    text, found = torch.randint(0, 320, (2, 25)), []

    def note(loss: Tensor) -> None:
        net.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])

    inputs, targets = text[:, :-1], text[:, 1:].contiguous()
    note(net.eval().loss_function(net(inputs), labels=None, shift_labels=targets, vocab_size=320))  # type: ignore[operator]
    note(nn.functional.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()))
    give_loss(net.head, 7)  # type: ignore[arg-type]
    note(net(inputs, targets=targets) / targets.numel())
    assert len(found[0]) > 10
    for theirs, *ours in zip(*found, strict=True):
        assert all((each - theirs).norm() <= 2**10 * 2**-23 * theirs.norm() for each in ours)


@needs_hf
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_blocks_of_transformers_recompute_the_same_bits(config: dict[str, Any]) -> None:
    nets = [build(folder(path, config | {"vocab_size": 256}), LANGUAGE_MODELS) for path in "ab"]
    assert recompute_blocks(nets[1]) == 2
    for net in nets:
        net.train()
        torch.manual_seed(3)  # dropout
        net(tokens()).square().sum().backward()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@needs_hf
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_default_targets_are_the_linear_layers_of_the_blocks_and_merge(config: dict[str, Any]) -> None:
    """Merged in fp32: of some hundred sums in another order a few eps of their size."""
    net = build(folder("folder", config), LANGUAGE_MODELS)
    layers = find_layers(net, None)
    assert len(layers) == 2 * (7 if config is LLAMA else 4) and not [name for name in layers if "head" in name]
    plain = build("hf:folder", LANGUAGE_MODELS)
    for name in layers:
        net.set_submodule(name, Lora(net.get_submodule(name), 4, 8.0))
        nn.init.normal_(net.get_submodule(name).b.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    before = plain(tokens())
    plain.load_state_dict(merged(net), strict=False)
    assert (plain(tokens()) - net(tokens())).norm() <= 100 * 2**-23 * before.norm() < (before - net(tokens())).norm()


@pytest.mark.slow
@needs_hf
@pytest.mark.parametrize("adapter, layout", [("lora", "fsdp"), ("lora", "hsdp"), ("none", "ddp")])
def test_a_fine_tune_over_ranks_equals_that_of_one(adapter: str, layout: str) -> None:
    """With SGD, updates are gradients: two ranks add in another order, of at most 2^10 numbers, in fp32."""
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"vocab_size": 256})).save_pretrained("theirs")
    text = [*SMALL, "data=torch_headers", "data.num_samples=32", "data.length=24", "model=hf", "amp=fp32", "steps=2"]
    text += ["recipe=finetuning", "model.name=theirs", "model.weights=default", f"recipe.adapter={adapter}"]
    text += ["optimizer=sgd", "optimizer.lr=0.1", "doctor=off"]
    assert train.main([*text, "run_dir=one"]) == 0
    ranks = ["layout.nproc_per_node=2", "batch_size=2", *(["layout.shard_size=2"] if layout == "hsdp" else [])]
    assert train.main([*text, f"layout={layout}", *ranks, "run_dir=two"]) == 0
    one, two = (state(run)["model"] for run in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (two[name] - tensor).norm() <= 2**10 * 2**-23 * tensor.norm(), name


@needs_hf
def test_a_run_starts_from_the_folder_of_its_network(capsys: pytest.CaptureFixture[str]) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, vocab_size=256)).save_pretrained("theirs")
    text = [*SMALL, "recipe=language_model", "data.num_samples=32", "data.length=24", "recipe.sample_tokens=0"]
    text += ["model=hf", "model.name=theirs", "steps=1", "amp=fp32", "doctor=off"]
    skipped = "debug.inject={where:drop,step:1,rank:0,value:nan}"
    assert train.main([*text, "dry_run=true"]) == 0
    assert "its weights are not used; model.weights=default loads them" in capsys.readouterr().out
    assert train.main([*text, skipped, "model.weights=default", "run_dir=run"]) in (0, 5)
    theirs = transformers.GPT2LMHeadModel.from_pretrained("theirs").state_dict()
    assert not [name for name, tensor in state("run")["model"].items() if not tensor.equal(theirs[name])]


@needs_hf
def test_adapters_are_trained_on_the_weights_of_a_folder_and_merged_into_them(capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256)).save_pretrained("theirs")
    text = [*SMALL, "data=torch_headers", "data.num_samples=32", "data.length=24", "model=hf", "amp=fp32"]
    tune = ["recipe=finetuning", "model.name=theirs", "model.weights=default", "run_dir=run", "steps=3", *text]
    assert train.main([*tune, 'recipe.targets=["blocks.*"]']) == 2  # the layers of our own GPT
    assert "Valid: model.layers.*.self_attn.q_proj, " in capsys.readouterr().err and not Path("run").exists()
    assert train.main([*tune, 'recipe.targets=["*q_proj","*v_proj"]', "optimizer.lr=0.1"]) == 0
    found, told = summary("run")["eval"], []
    for weights in ("default", "run"):
        capsys.readouterr()
        evaluate = ["recipe=language_model", "model.name=theirs", f"model.weights={weights}", "task=evaluate"]
        assert train.main([*text, *evaluate]) == 0
        told.append(float(re.findall(r"step 0: loss ([\d.]+)", capsys.readouterr().out)[0]))
    # Printed with four digits after the point.
    assert abs(told[0] - found["base_loss"]) < 1e-4 and abs(told[1] - found["loss"]) < 1e-4
    assert abs(found["base_loss"] - found["loss"]) > 1e-3


def test_torchvisions_own_weights_come_from_its_cache_or_are_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TORCH_HOME", str(Path("cache").absolute()))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there: a machine without a network
    torch.manual_seed(1)
    theirs = import_torchvision().models.squeezenet1_1()
    arguments = [*PICTURES, "model.name=squeezenet1_1", "model.weights=default", "amp=fp32", "steps=1", "doctor=off"]
    arguments += ["run_dir=run", "debug.inject={where:drop,step:1,rank:0,value:nan}", 'model.fresh=["classifier.1"]']
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert "cannot load https://download.pytorch.org/models/squeezenet1_1-" in error and "model.weights=<file>" in error
    assert not Path("run").exists()
    url = import_torchvision().models.get_model_weights("squeezenet1_1").DEFAULT.url
    torch.save(theirs.state_dict(), Path("cache/hub/checkpoints", Path(url).name))
    assert train.main(arguments) in (0, 5)
    began = state("run")["model"]
    assert not [n for n, tensor in theirs.state_dict().items() if "classifier" not in n and not tensor.equal(began[n])]


# --- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library, package", [("timm", "timm"), ("hf", "transformers")])
def test_a_missing_package_is_named_with_its_extra(library: str, package: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python then raises what it raises for one that is not there
    expected = f"needs the package {package}: pip install 'amp-recipes[{library}]'"
    refused_before_the_start([f"model={library}", "model.name=vit_tiny"], expected, capsys)


LONG = ["recipe=language_model", "data.num_samples=32", "data.length=32", "model=hf"]
TIED = ["recipe=finetuning", "model=hf", "model.options.n_layer=1", 'recipe.targets=["lm_head"]', *LONG[1:3]]
REFUSED = {
    "timm": [
        (["model=timm", "model.name=resnt18"], "no such model. Did you mean resnet18?"),
        (["model=timm", "model.options.drop_rat=0.1"], "has no such option. Did you mean drop_rate?"),
        (["model=timm", "model.options.img_size=32"], "follows data.image_size"),
        (["model=timm", "model.options.checkpoint_path=x"], "has no such option"),
        (["model=timm", "model.options.block_args=3"], "cannot be built with block_args=3"),
        (["model=timm", "model.weights=default"], "model.name=timm:resnet18 has no weights of its own"),
        (["recipe=language_model", "model=timm"], "is not a language model. Valid: gpt, hf:<name>."),
        (["recipe=gan", "model=timm"], "is not a generator with its discriminator"),
        (["recipe=distillation", "recipe.teacher_model=timm:resnt18"], "recipe.teacher_model=timm:resnt18: timm"),
    ],
    "transformers": [
        (["model=hf", "model.name=org/model"], "nothing is downloaded; expected a folder with a config.json"),
        (["model=hf"], "its type is gpt2, of which transformers has no network for image classification"),
        (["model=hf"], "expected a folder of one that has, or model.name=vit_tiny"),
        (
            ["recipe=language_model", "model=hf", "model.name=vit_tiny"],
            "has no network for causal lm; expected a folder of one that has, or model.name=gpt2_tiny, llama_tiny",
        ),
        (["recipe=language_model", "model=hf", "model.options.n_layers=2"], "no such option. Did you mean n_layer?"),
        (["recipe=language_model", "model=hf", "model.options.vocab_size=9"], "follows the data set"),
        (["recipe=language_model", "model=hf", "model.options.n_head=7"], "cannot be built with n_head=7"),
        (["recipe=language_model", "model=hf", "recipe.eval_offset=8"], "recipe.eval_offset=8: needs model=gpt"),
        ([*LONG, "model.options.n_positions=16"], "data.length=32: model.name=hf:gpt2_tiny has 16 positions"),
        (TIED, "lm_head shares its weight with another layer"),  # merged, its adapter would change the embedding
        (["recipe=language_model", "model=hf", "model.weights=default"], "has no weights of its own"),
    ],
}


@pytest.mark.parametrize(
    "library, arguments, expected", [(library, *row) for library, found in REFUSED.items() for row in found]
)
def test_what_a_library_cannot_do_is_refused_before_the_start(library, arguments, expected, capsys):
    pytest.importorskip(library)
    refused_before_the_start(arguments, expected, capsys)


@needs_hf
def test_a_folder_cannot_run_code_and_a_damaged_one_is_refused() -> None:
    name = folder("code", {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Net"}})
    Path("code/code.py").write_text("from pathlib import Path\nPath('exploded').touch()\n")
    (problem,) = check_model(name, {}, LANGUAGE_MODELS)
    assert "its type is mine, of which transformers has no network" in problem and not Path("exploded").exists()
    known = folder("known", GPT2 | {"auto_map": {"AutoModelForCausalLM": "code.Net"}})
    assert type(build(known, LANGUAGE_MODELS)).__name__ == "GPT2LMHeadModel"
    Path("code/config.json").write_text("{")
    assert "code/config.json cannot be read" in check_model(name, {}, LANGUAGE_MODELS)[0]


@needs_timm
def test_a_network_without_a_classifier_is_refused() -> None:
    expected = r"returns torch.Size\(\[2, 5, 7\]\), expected logits \(2, 7\)"
    with pytest.raises(ConfigError, match=expected):
        build("timm:test_vit", global_pool="")


@needs_hf
@pytest.mark.parametrize("damage", ["cut", "of another shape"])
def test_damaged_weights_and_those_of_another_shape_leave_no_folder(damage: str, capsys: Any) -> None:
    vocab_size = 256 if damage == "cut" else 300
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, vocab_size=vocab_size)).save_pretrained("theirs")
    if damage == "cut":
        file = Path("theirs/model.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    arguments = [*SMALL, "recipe=language_model", "data.num_samples=32", "data.length=24", "model=hf", "steps=1"]
    assert train.main([*arguments, "model.name=theirs", "model.weights=default", "run_dir=run"]) == 2
    error = capsys.readouterr().err
    found = "cannot be read as tensors" if damage == "cut" else "is float32 (300, 32), expected float32 (256, 32)"
    assert found in error and error.count("error:") == 1 and not Path("run").exists(), error


@needs_timm
@needs_hf
@pytest.mark.slow
def test_the_lines_of_the_page_work_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/YOUR_OWN_MODEL.md").read_text()
    section = page.partition("## A model of timm or transformers in 5 lines")[2].partition("\n## ")[0]
    install, *commands = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    assert install == "pip install -e '.[timm,hf]'" and len(commands) == 4
    for command in commands:
        python, program, *arguments = shlex.split(command)
        assert (python, program) == ("python", "train.py")
        assert train.main([*arguments, "device=cpu", "log.progress=false", "steps=2"]) == 0
    assert "weights: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["resnet18.a1_in1k", "tf_efficientnet_lite0.in1k", "vit_tiny_patch16_224.augreg_in21k"]
)
def test_images_are_prepared_as_timm_evaluates_a_network(name, own_folder):
    timm = pytest.importorskip("timm", reason="needs the extra timm")
    for part, (height, width) in itertools.product(("train", "val"), [(60, 43), (45, 91)]):
        noise = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Path("pets", part, str(height)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(f"pets/{part}/{height}/a.png")
    ours = build_data(data_config("image_folder", path="pets", image_size=40, like=f"timm:{name}"), seed=0).eval
    given = timm.data.resolve_data_config(
        {}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict(), use_test_size=False
    )
    theirs = timm.data.create_transform(**given | {"input_size": (3, 40, 40)})
    images, _ = ours.__getitems__([(0, 0), (1, 0)])
    for image, path in zip(images, ["pets/val/45/a.png", "pets/val/60/a.png"], strict=True):
        expected = theirs(Image.open(path))
        # Both normalise in fp32: x / 255, minus the mean, by the deviation.
        assert (image - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * expected.abs().max()
    with pytest.raises(ConfigError, match=r"Invalid pretrained tag .* Did you mean resnet18\.a1_in1k"):
        build_data(data_config("image_folder", path="pets", image_size=40, like="timm:resnet18.a1_in1"), seed=0)
