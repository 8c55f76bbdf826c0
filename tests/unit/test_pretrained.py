"""Pretrained weights: every format gives the same numbers, and what does not fit changes nothing."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Forked, checkpoints, state
from safetensors.torch import save_file
from torch import Tensor, nn

import train
from amp_core.checkpoints.reading import NoCheckpoint
from amp_core.config.errors import ConfigError
from amp_core.models import build_model
from amp_core.models.images import CLASSIFIERS
from amp_core.run.pretrained import load_pretrained

FACTS: dict[str, Any] = {"image_shape": (1, 16, 16)}
SMALL = ["device=cpu", "log.progress=false", "data=synthetic", "data.num_samples=64", "data.image_size=16"]
SMALL += ["log_every=1"]
UNCHANGED = ["steps=1", "debug.inject={where:drop,step:1,rank:0,value:nan}", "doctor=off"]
"""A run whose only step is skipped: it ends with the weights with which it began."""
SMALL += ["batch_size=8", "model.options.width=8", "save_every=1000", "eval_every=1000"]


def network(num_classes: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("cnn", CLASSIFIERS, options={"width": 8}, num_classes=num_classes, **FACTS)


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def unlike(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("write", [
    lambda state: save_file(state, "w.safetensors"),
    lambda state: torch.save(state, "w.pt"),
    lambda state: torch.save(state, "w.pth", _use_new_zipfile_serialization=False),
    lambda state: torch.save({"epoch": 3, "state_dict": prefixed(state, "model.")}, "w.pt"),
    lambda state: torch.save({"model": prefixed(state, "module._orig_mod."), "optimizer": {}}, "w.bin"),
    lambda state: torch.save({k: v for k, v in state.items() if "num_batches" not in k}, "w.pt"),
], ids=["safetensors", "state dict", "old format", "lightning", "compiled under ddp", "older BatchNorm"])  # fmt: skip
@pytest.mark.usefixtures("own_folder")
def test_every_usual_file_gives_the_same_weights(write: Any) -> None:
    pretrained, net = network(seed=1), network(seed=2)
    write(pretrained.state_dict())
    assert unlike(copy(net), copy(pretrained))
    (file,) = Path().glob("w.*")
    assert "tensors (float32" in load_pretrained(net, str(file))
    assert not unlike(copy(net), copy(pretrained))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.usefixtures("own_folder")
def test_other_dtypes_are_converted_and_said(dtype: torch.dtype) -> None:
    pretrained, net = network(seed=1), network(seed=2)
    narrow = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in copy(pretrained).items()
    }
    torch.save(narrow, "w.pt")
    said = load_pretrained(net, "w.pt")
    assert str(dtype).removeprefix("torch.") in said
    assert all(p.dtype is torch.float32 for p in net.parameters())
    # Each 16-bit number is an fp32 number; fp64 is rounded once.
    assert not unlike(copy(net), {name: t.to(net.state_dict()[name].dtype) for name, t in narrow.items()})


@pytest.mark.usefixtures("own_folder")
def test_tied_weights_may_have_one_name_in_the_file() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    pretrained, net = Tied(), Tied()
    torch.save({"head.weight": pretrained.head.weight.detach()}, "w.pt")
    load_pretrained(net, "w.pt")
    assert torch.equal(net.embedding.weight, pretrained.embedding.weight) and net.head.weight is net.embedding.weight


@pytest.mark.usefixtures("own_folder")
def test_a_new_head_is_refused_with_the_setting_that_is_then_accepted() -> None:
    pretrained, net = network(num_classes=10, seed=1), network(num_classes=4, seed=2)
    torch.save(pretrained.state_dict(), "w.pt")
    before = copy(net)
    with pytest.raises(ConfigError) as refused:
        load_pretrained(net, "w.pt")
    assert not unlike(before, copy(net))
    hint = re.search(r"'model\.fresh=(\[.*\])'", str(refused.value))
    assert hint is not None
    fresh = json.loads(hint[1])
    said = load_pretrained(net, "w.pt", fresh)
    head = [name for name in before if name.startswith(f"{fresh[0]}.")]
    assert head and all(name in said for name in head[:1])
    assert sorted(unlike(copy(net), before | {n: t for n, t in copy(pretrained).items() if n not in head})) == []


@pytest.mark.parametrize("name, hint", [("tokens", "vocabularies differ"), ("positions", "model.fresh=")])
@pytest.mark.usefixtures("own_folder")
def test_weights_of_another_vocabulary_are_not_said_to_need_a_new_embedding(name: str, hint: str) -> None:
    def net(rows: int) -> nn.Module:
        return nn.ModuleDict({name: nn.Embedding(rows, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, rows)})

    torch.save(net(12).state_dict(), "w.pt")
    with pytest.raises(ConfigError) as refused:
        load_pretrained(net(8), "w.pt")
    assert hint in str(refused.value) and ("model.fresh" in str(refused.value)) == (name == "positions")


def broken(change: Any) -> Any:
    def write() -> None:
        state = network(seed=1).state_dict()
        torch.save(state if (changed := change(state)) is None else changed, "w.pt")

    return write


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


class Blocked:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def _nan(state: dict[str, Tensor]) -> None:
    next(iter(state.values())).view(-1)[1] = float("nan")


REFUSED: dict[str, tuple[Any, str]] = {
    "nan": (broken(_nan), "holds NaN or inf"),
    "beyond fp32": (broken(lambda state: {k: v.double() + 1e300 for k, v in state.items()}), "numbers beyond torch.float32"),
    "sparse": (broken(lambda state: {k: v.to_sparse() for k, v in state.items()}), "is sparse float32"),
    "without data": (broken(lambda state: {k: v.to("meta") for k, v in state.items()}), "is meta float32"),
    "a count": (broken(lambda state: state | {"steps": 3}), "steps of 27 names hold no tensor"),
    "an object beside": (broken(lambda state: {"state_dict": state, "args": argparse.Namespace(lr=1)}), "holds an object of the class argparse.Namespace"),
    "missing": (broken(lambda state: {k: v for k, v in state.items() if "bias" not in k}), "has no .*bias"),
    "of another network": (broken(lambda state: {"a.weight": torch.ones(3)}), "Is it of another network"),
    "one name more": (broken(lambda state: state | {"extra.weight": torch.ones(3)}), "the network has no extra.weight"),
    "whole numbers": (broken(lambda state: {k: v.long() for k, v in state.items()}), "is int64"),
    "no names": (broken(lambda state: list(state.values())), "holds a list"),
    "nothing in it": (broken(lambda state: {}), "holds an empty dict"),
    "text": (lambda: Path("w.pt").write_text("hello"), "cannot be read"),
    "empty": (lambda: Path("w.pt").touch(), "cannot be read"),
    "code": (lambda: Path("w.pt").write_bytes(pickle.dumps(Bomb())), "cannot be read"),
    "code that torch names otherwise": (lambda: torch.save({"a": Blocked()}, "w.pt"), "holds an object of the class posix.mkdir, which could run code"),
    "a page of the web": (lambda: Path("w.pt").write_text("<!doctype html>"), r"cannot be read as tensors \(ValueError: at position 0, opcode b'<' unknown\)"),
    "nothing": (lambda: None, "there is no such file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.usefixtures("own_folder")
def test_what_does_not_fit_is_refused_and_nothing_changes(kind: str) -> None:
    write, message = REFUSED[kind]
    write()
    net = network(seed=2)
    before = copy(net)
    with pytest.raises((ConfigError, NoCheckpoint), match=message) as refused:
        load_pretrained(net, "w.pt")
    assert not unlike(before, copy(net)) and not Path("exploded").exists()
    assert "w.pt" in str(refused.value) and "Traceback" not in str(refused.value)


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.usefixtures("own_folder")
def test_a_file_with_a_flipped_bit_is_refused_though_torch_loads_it(has_checksums: bool) -> None:
    net = network()
    torch.serialization.set_crc32_options(has_checksums)
    try:
        torch.save(net.state_dict(), "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    load_pretrained(network(seed=1), "w.pt")
    if not has_checksums:  # nothing to compare a file with
        return
    data, weight = bytearray(Path("w.pt").read_bytes()), next(net.parameters())
    data[data.index(weight.detach().numpy().tobytes())] ^= 1
    Path("w.pt").write_bytes(data)
    assert not torch.equal(next(iter(torch.load("w.pt", weights_only=True).values())), weight)
    before = copy(net)
    with pytest.raises(ConfigError, match="the file is damaged"):
        load_pretrained(net, "w.pt")
    assert not unlike(before, copy(net))


DOUBLED_TUPLES = b"N\x85q\x80" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(0x80, 0x80 + 60))
KEYED = b"\x80\x02}" + DOUBLED_TUPLES + b"Ns."
"""A dictionary with a key whose hash takes 2^60 steps: a tuple that holds another one twice, and so on."""


def seconds_to_refuse(path: str) -> int:
    began = time.perf_counter()
    with pytest.raises(ConfigError, match="damaged: its tuples hold each other more often than the file has bytes"):
        load_pretrained(network(), path)
    print(time.perf_counter() - began)
    return 0


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("is_old_format", [False, True])
def test_a_key_that_takes_forever_to_hash_is_refused_at_once(is_old_format: bool) -> None:
    if is_old_format:
        torch.save({}, "w.pt", _use_new_zipfile_serialization=False)
        data = Path("w.pt").read_bytes()
        empty = pickle.dumps({}, 2)
        assert data.count(empty) == 1
        Path("w.pt").write_bytes(data.replace(empty, KEYED))
    else:
        with zipfile.ZipFile("w.pt", "w") as archive:
            archive.writestr("archive/data.pkl", KEYED)
            archive.writestr("archive/version", "3\n")
    loading = Forked(seconds_to_refuse, "w.pt")  # nothing but a signal ends it otherwise
    try:
        assert float(loading.communicate(timeout=30)[0]) < 1.0 and loading.returncode == 0
    finally:
        loading.process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_tuples_that_are_shared_by_many_are_no_damage() -> None:
    shared = (0.9, 0.999)
    groups = [{"betas": shared, "milestones": Counter([n, n]), (n, shared): n} for n in range(20_000)]
    torch.save({"state_dict": copy(network(seed=1)), "optimizer": {"param_groups": groups}}, "w.pt")
    net = network(seed=2)
    load_pretrained(net, "w.pt")
    assert not unlike(copy(network(seed=1)), copy(net))


@pytest.mark.usefixtures("own_folder")
def test_a_cut_safetensors_file_and_an_unknown_name_are_refused() -> None:
    net = network()
    save_file(net.state_dict(), "w.safetensors")
    with pytest.raises(ConfigError, match=r"nothing of model.weights=w.safetensors is left"):
        load_pretrained(net, "w.safetensors", ["*"])
    Path("folder").mkdir()
    Path("w.safetensors").rename("folder/w.safetensors")
    with pytest.raises(NoCheckpoint, match=r"such as folder/w.safetensors"):
        load_pretrained(net, "folder")
    Path("folder/w.safetensors").rename("w.safetensors")
    with pytest.raises(ConfigError, match=r"model.fresh=heed: matches neither a module nor a tensor"):
        load_pretrained(net, "w.safetensors", ["heed"])
    Path("w.safetensors").write_bytes(Path("w.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_pretrained(net, "w.safetensors")


@pytest.mark.usefixtures("own_folder")
def test_a_run_starts_from_another_run_and_resumes_without_it(capsys: Any) -> None:
    assert train.main([*SMALL, "run_dir=first", "steps=2", "amp=fp32", "ema.decay=0.5"]) == 0
    second = [*SMALL, "run_dir=second", "ema.decay=0.5", "model.weights=first"]
    assert train.main([*second, *UNCHANGED]) in (0, 5)
    began, parameters = state("second"), dict(network().named_parameters())
    assert not [n for n in parameters if not torch.equal(began["model"][n], state("first")["ema"][n])]
    assert not [n for n in parameters if not torch.equal(began["ema"][n], state("first")["ema"][n])]
    Path("first").rename("gone")
    assert train.main([*second, "steps=2"]) == 0
    assert "model.weights has no effect: all weights come from a checkpoint" in Path("second/train.log").read_text()
    assert len(checkpoints("second")) == 2
    capsys.readouterr()
    assert train.main([*SMALL, "run_dir=third", "model.weights=first"]) == 2
    assert "model.weights=first: there is no such file or folder" in capsys.readouterr().err
    assert not Path("third").exists()


@pytest.mark.parametrize("mode", ["o2", "bf16_pure", "fp8"])
@pytest.mark.usefixtures("own_folder")
def test_master_weights_begin_at_the_fp32_weights_of_the_file(mode: str) -> None:
    options = ["model=mlp", "model.options.depth=1"]
    assert train.main([*SMALL, *options, "run_dir=first", "steps=2", "amp=fp32"]) == 0
    second = [*SMALL, *options, f"amp={mode}", "model.weights=first", *UNCHANGED]
    assert train.main([*second, "run_dir=second"]) in (0, 5)
    low, full = state("second")["model"], state("first")["model"]
    kept = torch.bfloat16 if mode == "bf16_pure" else torch.float32  # bf16_pure has no master weights
    assert not unlike(low, {name: tensor.to(kept).to(low[name].dtype) for name, tensor in full.items()})


@pytest.mark.usefixtures("own_folder")
def test_weights_of_a_file_are_evaluated_without_a_run(capsys: Any) -> None:
    assert train.main([*SMALL, "run_dir=first", "steps=2", "amp=fp32"]) == 0
    torch.save(state("first")["model"], "w.pt")
    capsys.readouterr()
    told = []
    for source in ("model.weights=w.pt", "run_dir=first"):
        assert train.main([*SMALL, "amp=fp32", "task=evaluate", source]) == 0
        told.append(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    assert told[0] == told[1] and "accuracy" in told[0]
    assert sorted(path.name for path in Path().iterdir()) == ["first", "w.pt"]
