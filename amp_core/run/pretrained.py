"""Weights to start from: a file of tensors from another program, or another run."""

from __future__ import annotations

import fnmatch
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_core.checkpoints.parts import first_few
from amp_core.checkpoints.plain_state import scan
from amp_core.checkpoints.reading import NoCheckpoint, read
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import holds_checkpoint, open_file, read_json
from amp_core.config.schema import Config
from amp_core.data.tokenizers import BYTES, tokenizer_file, vocabulary_of
from amp_core.models.gpt import GPT
from amp_core.models.images import CLASSIFIERS
from amp_core.vision import import_torchvision

DEFAULT = "default"
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
IN_FOLDERS = "model[.-]*safetensors"
"""One file, or several, in a folder of timm or transformers."""
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which other programs store the weights beside other state."""
PREFIXES = ("_orig_mod.", "module.", "model.")
"""What `torch.compile`, `DistributedDataParallel` and Lightning put before every name."""

_COUNTER = "num_batches_tracked"


def check_weights(cfg: Config) -> list[str]:
    """Problems of `model.weights` and `model.fresh` that can be found without reading the file."""
    path = cfg.model.weights
    if path is None:
        given = [key for key in ("fresh", "rename") if getattr(cfg.model, key)]
        return [f"model.{key}: has no effect without model.weights; leave it out" for key in given]
    if problem := _another_tokenizer(cfg):
        return [problem]
    if path == DEFAULT and _default(cfg.model.name) is None:
        how = "networks of torchvision and folders of transformers do; use model.weights=<file>"
        return [f"model.weights={DEFAULT}: model.name={cfg.model.name} has no weights of its own, {how}"]
    if path == DEFAULT or _resumes(cfg, cfg.run_dir) or Path(path).exists():
        return []
    return [f"model.weights={path}: there is no such file or folder; expected {DEFAULT}, {_EXPECTED}"]


def _another_tokenizer(cfg: Config) -> str | None:
    """What is wrong with a tokenizer that has other tokens by the ids that a pretrained network knows."""
    folder = Path(cfg.model.name.removeprefix("hf:")) if cfg.model.weights == DEFAULT else Path(cfg.model.weights or "")
    own, given = folder / "tokenizer.json", tokenizer_file(cfg.data.tokenizer or BYTES)
    if cfg.data.tokenizer in (None, BYTES) or not (own.is_file() and given.is_file()) or own.samefile(given):
        return None
    try:
        there, here = vocabulary_of(own), vocabulary_of(given)
    except (OSError, ValueError, KeyError, TypeError):  # said where it is used
        return None
    if all(here.get(number, token) == token for number, token in there.items()):
        return None
    return (
        f"data.tokenizer={cfg.data.tokenizer}: has other tokens than {own}, by whose ids the weights were trained; use "
        f"data.tokenizer={folder}, or leave out model.weights"
    )


def start_from(cfg: Config, run_dir: Path | None, net: nn.Module) -> str:
    """Load `model.weights` into a network, unless a checkpoint replaces all of it anyway. Returns a line to log."""
    assert cfg.model.weights is not None
    if _resumes(cfg, run_dir):
        return "model.weights has no effect: all weights come from a checkpoint"
    path = path_of(cfg.model.weights, cfg.model.name)
    return f"weights: {load_pretrained(net, path, cfg.model.fresh or (), cfg.model.rename or {})}"


def path_of(weights: str, name: str) -> str:
    """What `model.weights` names: its path, or where the default weights of the network are."""
    path = _default(name) if weights == DEFAULT else weights
    assert path is not None, "check_weights was not asked"
    return path


def _default(name: str) -> str | None:
    """The folder of a network of transformers, or the address of torchvision's newest weights."""
    if name.startswith("hf:") and Path(name[3:]).is_dir():
        return name[3:]
    is_of_torchvision = ":" not in name and name not in CLASSIFIERS.builders and name in CLASSIFIERS.names()
    return import_torchvision().models.get_model_weights(name).DEFAULT.url if is_of_torchvision else None


def _resumes(cfg: Config, run_dir: str | Path | None) -> bool:
    run_dir = run_dir or cfg.run_dir  # an evaluation writes to no run folder
    return cfg.origin is not None or (run_dir is not None and holds_checkpoint(run_dir))


def load_pretrained(
    net: nn.Module, path: str, fresh: Sequence[str] = (), rename: Mapping[str, str] | None = None
) -> str:
    """Copy the weights of a file or of another run into a network: every tensor, or none.

    Floating-point tensors may have any floating dtype; they are converted to that of the network. Nothing that is read
    can execute code. The network must not have been sharded yet.

    Args:
        net: a network, or an `nn.ModuleDict` of those of a run.
        path: a file (safetensors, or a state dict written by `torch.save`), or a run folder or checkpoint of ours (EMA
            weights, if any).
        fresh: globs of names of modules or tensors that keep their initial values, such as a new head.
        rename: parts of names in the file, one or several between dots, to those here, applied in this order.

    Returns a line for the log.

    Raises:
        ConfigError: no such file, another kind of file, weights of another network or with NaN or inf in them. The
            network is unchanged then.
    """
    own = {name: tensor for name, tensor in net.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    found = _with_prefix(_renamed(_without_prefix(_read(path, net), own), rename or {}, path), own)
    # A counter in a floating dtype was cast along with the weights, and may have been rounded: as good as missing.
    found = {name: v for name, v in found.items() if not (name.endswith(_COUNTER) and v.is_floating_point())}
    below = {pattern: {name for name in (*own, *found) if _is_below(name, pattern)} for pattern in fresh}
    kept = set().union(*below.values())
    modules = dict.fromkeys(name.rpartition(".")[0] or name for name in own)
    problems = [
        f"model.fresh={pattern}: matches neither a module nor a tensor. {suggest(pattern, modules)}"
        for pattern, names in below.items()
        if not names
    ]
    taken = {name: tensor for name, tensor in own.items() if name in found and name not in kept}
    there = {id(tensor) for tensor in taken.values()}  # tied weights may have one name in a file
    missing = [
        name
        for name, tensor in own.items()
        if name not in (*found, *kept) and id(tensor) not in there and not name.endswith(_COUNTER)
    ]
    unknown = [name for name in found if name not in (*own, *kept)]
    unlike = [name for name, tensor in taken.items() if not _fits(found[name], tensor)]
    shapes = [f"{name} is {_describe(found[name])}, expected {_describe(own[name])}" for name in unlike]
    said = {"has no ": missing, "the network has no ": unknown, "": shapes}
    problems += [f"model.weights={path}: {what}{first_few(names)}" for what, names in said.items() if names]
    if not taken and not problems:
        problems.append(f"model.fresh={list(fresh)}: nothing of model.weights={path} is left to load; leave out both")
    if wrong := [*missing, *unlike, *unknown]:
        places = sorted({_outermost(name, taken.keys() - unlike) for name in wrong})
        if any(found[name].shape[1:] == own[name].shape[1:] and _holds_tokens(net, name) for name in unlike):
            has_tokenizer = (Path(path) / "tokenizer.json").is_file()
            how = f"use data.tokenizer={path}" if has_tokenizer else "leave out model.weights"
            problems[-1] += f". The vocabularies differ, so no token means the same: {how}"
        elif len(wrong) < len(own) and len(places) <= 4:
            listed = ",".join(f'"{name}"' for name in places)
            problems[-1] += f". To keep the initial weights there: 'model.fresh=[{listed}]'"
        else:
            other = f"Is it of another network than model.name, with {first_few(list(own), 2)}?"
            problems[-1] += f". {other} Parts of names are replaced by model.rename={{there:here}}"
    problems += [
        f"model.weights={path}: {name} holds NaN or inf, or numbers beyond {tensor.dtype}"
        for name, tensor in taken.items()
        if name not in unlike and not torch.isfinite(found[name].to(tensor.dtype)).all()
    ][:3]
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, tensor in taken.items():
            tensor.copy_(found[name])
    dtypes = sorted({str(found[name].dtype).removeprefix("torch.") for name in taken})
    left = sorted(name for name in own if name in kept)
    return f"{len(taken)} tensors ({', '.join(dtypes)}) from {path}" + (f"; initial: {first_few(left)}" if left else "")


def _renamed(state: dict[str, Any], rename: Mapping[str, str], path: str) -> dict[str, Any]:
    names = {name: name for name in state}
    for there, here in rename.items():
        part = re.compile(rf"(?<![^.]){re.escape(there)}(?![^.])")
        if not any(part.search(name) for name in names.values()):
            raise ConfigError(
                f"model.rename={{{there}:{here}}}: model.weights={path} has no such part of a name, but "
                f"{first_few(list(names.values()))}; parts lie between dots, and earlier ones are renamed first"
            )
        names = {name: part.sub(lambda _, here=here: here, new) for name, new in names.items()}
    if twice := [new for new, count in Counter(names.values()).items() if count > 1]:
        before = [name for name, new in names.items() if new == twice[0]]
        raise ConfigError(f"model.rename: {first_few(before)} of model.weights={path} all become {twice[0]}")
    return {new: state[name] for name, new in names.items()}


def _holds_tokens(net: nn.Module, name: str) -> bool:
    """Whether a tensor has a row for each token of a vocabulary."""
    module = net.get_submodule(name.rpartition(".")[0])
    return isinstance(module, nn.Embedding) and re.search("pos|wpe", name) is None


_EXPECTED = f"a file ({', '.join(SUFFIXES)}), the folder of a run, or one with model.safetensors"


def _read(path: str, net: nn.Module) -> dict[str, Any]:
    """The state dict of a file or a run, on the CPU."""
    place = Path(path)
    if path.startswith("https://"):
        try:
            return torch.hub.load_state_dict_from_url(path, map_location="cpu", check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as problem:
            how = "download it elsewhere, and use model.weights=<file>"
            raise ConfigError(f"model.weights={DEFAULT}: cannot load {path} ({problem}); {how}") from problem
    try:
        if hasattr(net, "from_pretrained") and (place / "config.json").is_file():
            return _of_transformers(place, net)
        if isinstance(net, GPT) and (place / "config.json").is_file():
            return _of_gpt2(place, net)
        files = [place] if place.suffix == ".safetensors" else sorted(place.glob(IN_FOLDERS))
        if files:
            return {name: tensor for file in files for name, tensor in _load_safetensors(str(file)).items()}
        # What recipe=finetuning merged: its checkpoints hold an adapter alone.
        place = next((file for name in ("merged.pt", "pytorch_model.bin") for file in place.glob(name)), place)
        contents: Any = None
        if place.is_file():
            is_zip = zipfile.is_zipfile(place)
            if is_zip:
                with zipfile.ZipFile(place) as archive:  # torch writes checksums and does not read them
                    archive.filelist = [member for member in archive.filelist if member.CRC]  # 0: not computed
                    if damaged := archive.testzip():
                        raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong: the file is damaged")
            with place.open("rb") as file:
                scan(file, is_ours=False, is_zip=is_zip)
            with warnings.catch_warnings(action="ignore"):  # about pickles that are refused anyway
                # Mapped where the format allows it: the whole may not fit beside the network.
                contents = torch.load(place, map_location="cpu", weights_only=True, mmap=is_zip)
        if contents is None or (isinstance(contents, dict) and {"progress", "config"} <= contents.keys()):
            return _of_run(read(place, key="model.weights"), net)
    except ConfigError:
        raise
    except NoCheckpoint as problem:
        inside = sorted(file.name for file in place.glob("*") if file.suffix in SUFFIXES)
        hint = f"; expected {_EXPECTED}, such as {place / inside[0]}" if inside else ""
        raise NoCheckpoint(f"{problem}{hint}") from problem
    except Exception as problem:  # torch.load raises a dozen kinds for bytes that are no checkpoint
        raise ConfigError(f"model.weights={path}: {why_unreadable(problem)}; expected {_EXPECTED}") from problem
    if isinstance(contents, dict):
        contents = next((contents[key] for key in NESTED if isinstance(contents.get(key), Mapping)), contents)
    state = {str(name): value for name, value in contents.items()} if isinstance(contents, Mapping) else {}
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        what = f"{first_few(others)} of {len(state)} names hold no tensor"
    elif state:
        return state
    else:
        what = f"holds {'an empty' if isinstance(contents, Mapping) else 'a'} {type(contents).__name__}"
    raise ConfigError(
        f"model.weights={path}: {what}; expected names with tensors, at the top or under {', '.join(NESTED)}: save "
        f"model.state_dict()"
    )


def _of_transformers(folder: Path, net: Any) -> dict[str, Any]:
    """What the folder holds, under the names that the library gives its weights when it loads them."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True, "dtype": "auto"}
    loaded, notes = type(net).from_pretrained(str(folder), **options)
    return {name: value for name, value in loaded.state_dict().items() if name not in notes["missing_keys"]}


OF_GPT2 = {"wte": "embed", "wpe": "table", "h": "blocks", "ln_1": "norm_attention", "attn.c_attn": "qkv"}
OF_GPT2 |= {"attn.c_proj": "out", "ln_2": "norm_mlp", "mlp.c_fc": "up", "mlp.c_proj": "down", "ln_f": "norm"}


def _of_gpt2(folder: Path, net: GPT) -> dict[str, Any]:
    """GPT-2's weights under our names, of its positions as many as the network has. It computes x W, we x W^T."""
    config = read_json(folder / "config.json")
    needed = {"model_type": "gpt2", "n_head": net.heads, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    needed |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    there = {key: config.get(key, needed[key]) for key in needed} | {"model_type": config.get("model_type")}
    if wrong := [f"{key}={there[key]}, expected {value}" for key, value in needed.items() if there[key] != value]:
        raise ConfigError(f"model.weights={folder}: config.json has {', '.join(wrong)}")
    if net.blocks[0].gelu != "tanh":  # type: ignore[union-attr]
        raise ConfigError(f"model.weights={folder}: GPT-2 needs model.options.activation=gelu_tanh")
    found = {}
    for file in sorted(folder.glob(IN_FOLDERS)):
        for name, tensor in _load_safetensors(str(file)).items():
            name = re.sub(r"\b(?:" + "|".join(map(re.escape, OF_GPT2)) + r")\b", lambda match: OF_GPT2[match[0]], name)
            name = name.removeprefix("transformer.").replace("lm_head", "head")
            is_product = name.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight"))
            found[name] = tensor.T if is_product else tensor
    found = {name: tensor for name, tensor in found.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if net.table is not None and "table.weight" in found:
        found["table.weight"] = found["table.weight"][: net.table.num_embeddings]
    return found


def why_unreadable(problem: Exception) -> str:
    """Why `torch.load` refused a file, without its advice, which names ways to run the code in it."""
    text = re.split(r"trusted source\. |WeightsUnpickler error: ", " ".join(str(problem).split()))[-1]
    text = text.partition(" Check the documentation")[0]
    if found := re.search(r"GLOBAL (\S+)|Unsupported (?:global|class) (\S+)", text):
        what = (found[1] or found[2]).strip(":,")
        return f"holds an object of the class {what}, which could run code; save model.state_dict() alone"
    return f"cannot be read as tensors ({type(problem).__name__}: {text[:100]}): it is damaged, or of another kind"


def _load_safetensors(path: str) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError as missing:
        raise ConfigError(f"model.weights={path}: needs the package safetensors: pip install safetensors") from missing
    os.close(open_file(path))  # the library waits for a pipe
    return load_file(path)


def _of_run(contents: Mapping[str, Any], net: nn.Module) -> dict[str, Any]:
    if isinstance(net, nn.ModuleDict):
        return {f"{name}.{key}": value for name in net for key, value in contents.get(name, {}).items()}
    state = contents.get("ema", contents.get("model"))
    if not isinstance(state, dict):
        raise ValueError("the run has no network named model")
    return dict(state)


def _without_prefix(state: dict[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names without what all of them begin with, unless those of the network begin with it, too."""
    while prefix := next((p for p in PREFIXES if state and all(name.startswith(p) for name in state)), None):
        if any(name.startswith(prefix) for name in own):
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _with_prefix(state: dict[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names with the prefix of most of the network, such as `encoder.`, if none fits unchanged."""
    if own.keys() & state.keys():
        return state
    befores = Counter(full.removesuffix(name) for name in state for full in own if full.endswith(f".{name}"))
    ((before, count),) = befores.most_common(1) or [("", 0)]
    return {f"{before}{name}": value for name, value in state.items()} if 2 * count > len(state) else state


def _outermost(name: str, fitting: Collection[str]) -> str:
    """The largest module around a tensor that holds nothing which fits, or the tensor."""
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next((module for module in around if not any(n.startswith(f"{module}.") for n in fitting)), name)


def _is_below(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _fits(found: Tensor, own: Tensor) -> bool:
    is_alike = found.shape == own.shape and found.is_floating_point() == own.is_floating_point()
    return is_alike and found.layout is torch.strided and not found.is_meta


def _describe(tensor: Tensor) -> str:
    kind = "meta " if tensor.is_meta else "" if tensor.layout is torch.strided else "sparse "
    return f"{kind}{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
