"""Fine-tuning: a frozen 16-bit base and fp32 adapters (LoRA), or all weights.

The lesson: what is frozen may be stored in 16 bits, what is trained may not. Autocast casts the matrices of a base at
each call anyway: stored in 16 bits they give the same numbers in half of the memory, without gradients, moments or
averages. Adapters in fp16 fail with "Attempting to unscale FP16 gradients"; in bf16 they stall, since an update below
half of the spacing of a weight is lost. Merge in fp32, too: 16 bits round what an adapter adds, small ones to nothing.

    python train.py recipe=finetuning                                          trains a small base first
    python train.py recipe=language_model model=gpt_small run_dir=runs/base    a base of Python sources, and
    python train.py recipe=finetuning model.weights=runs/base                  its adapter to C++ headers
    python train.py recipe=finetuning model.weights=runs/base recipe.base=nf4 data=text data.path=book.txt

    python train.py recipe=finetuning model=hf model.name=<folder> model.weights=default recipe.adapter=none

A checkpoint holds the adapter alone and the SHA-256 of its base; another base is refused. `merged.pt`, written at the
end, has both as plain weights: `recipe=language_model model.weights=<run>/merged.pt`. `recipe.adapter=peft` uses the
package peft, `recipe.base=int8` and `nf4` bitsandbytes, which also runs on a CPU (int8 evaluates with 8-bit inputs).

Expected, with model.options.width=64 model.options.depth=2 data.length=64 (means of seeds 1 to 3): 3.109 nats per byte
of C++ without an adapter; with it 2.718 in fp32 and fp16, 2.719 in bf16. 6 to 8 s of one core of a server CPU each.

Sources: Hu et al., "LoRA" (arXiv:2106.09685); Dettmers et al., "QLoRA" (arXiv:2305.14314).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.checkpoints.export import write_state
from amp_core.checkpoints.parts import save_only_trainable
from amp_core.config.errors import CheckpointError, ConfigError
from amp_core.config.schema import SHARDED, Config, RecipeConfig, expected
from amp_core.config.sources import package_folder
from amp_core.data.text import bits_per_byte, num_bytes, num_valid, outputs_of, perplexities, token_loss
from amp_core.heads.losses import give_loss
from amp_core.layouts.fsdp import cast_whole
from amp_core.models.adapters import Lora, find_layers, merged, sizes_of
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.packed import check_packing
from amp_core.run.pretrained import load_pretrained, path_of
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.run.terminal import say
from amp_core.tensors import full_copy, is_sharded, unwrap, widest
from amp_core.vision import import_torchvision

DATA = "text"
MODELS = LANGUAGE_MODELS


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    base_steps: int
    """Without model.weights: steps that train a base on torch's Python sources, kept as base.pt of the run folder."""
    base: Literal["auto", "int8", "nf4"]
    """How adapted layers are stored: auto: in the 16 bits of the mode; int8, nf4: in 8 or 4 bits by bitsandbytes."""
    adapter: Literal["none", "lora", "peft"]
    """none: all weights are trained; lora: the class in `models/adapters.py`; peft: the package."""
    targets: list[str] | None
    """Linear layers that get adapters, as globs of names; null: all those of the blocks."""
    rank: int
    """Rank of an adapter."""
    alpha: float
    """An adapter's output is multiplied by alpha / rank."""
    loss_chunk: int | None
    """Tokens whose logits are materialised at a time; null: all. For vocabularies of tens of thousands."""
    sample_tokens: int
    """Tokens at most that task=predict writes after a prompt."""
    temperature: float
    """Sampling temperature of task=predict: 0 takes the most likely token."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    needed = ["peft"] * (knobs.adapter == "peft") + ["bitsandbytes"] * (knobs.base != "auto")
    missing = [name for name in needed if not package_folder(name)]
    problems = expected(
        knobs,
        base_steps=(knobs.base_steps > 0, "a number above 0"),
        rank=(knobs.rank > 0, "a number above 0"),
        alpha=(knobs.alpha > 0, "a number above 0"),
        loss_chunk=(knobs.loss_chunk is None or knobs.loss_chunk >= 1, "a number of tokens above 0, or null"),
        sample_tokens=(knobs.sample_tokens >= 1, "at least 1"),
        temperature=(0 <= knobs.temperature < math.inf, "a finite number, at least 0"),
    )
    problems += [f"recipe=finetuning: needs the package {name}: pip install 'amp-recipes[peft]'" for name in missing]
    if knobs.base != "auto" and cfg.layout.name in SHARDED:
        problems.append(f"recipe.base={knobs.base}: bytes of 8 and 4 bits are not sharded; use layout=ddp")
    if knobs.adapter == "none":
        if cfg.model.weights is None:
            problems.append("recipe.adapter=none: trains all weights of a base; expected its file as model.weights")
        if knobs.base != "auto" or knobs.targets is not None:
            problems.append("recipe.adapter=none: leave out recipe.base and recipe.targets, which are for adapters")
    elif cfg.amp.update is not None or cfg.amp.format is not None:
        problems.append(f"amp={cfg.amp.name}: would convert the adapters, too; use fp32, tf32, bf16 or fp16")
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss in nats per token, bits_per_byte, base_loss without the adapter."""
    knobs = Knobs(**cfg.recipe)
    data = build_data(cfg.data, seed=cfg.seed)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    is_loaded = cfg.model.weights is not None
    net = build_model(cfg.model.name, MODELS, options=cfg.model.options, is_loaded=is_loaded, **data.facts)
    if cfg.data.packing not in (None, "none"):
        check_packing(net, cfg.model.name)
    if knobs.loss_chunk is not None:
        give_loss(net.head, knobs.loss_chunk)  # type: ignore[arg-type]
    base = None if knobs.adapter == "none" else Base(sha256=prepare(net, cfg, env, knobs, amp))
    model = env.wrap(net, amp, has_weights=base is not None)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model, share_frozen=True)
    clip = Clip.of(cfg.clip)

    def loss_of(net: nn.Module, batch: Any) -> Tensor:
        if knobs.loss_chunk is not None:
            return outputs_of(net, batch, targets=batch[1])
        return token_loss(outputs_of(net, batch), batch[1])

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    # Of a micro-batch without a valid token the loss is 0, not 0 / 0.
                    loss = loss_of(model, micro.batch) / num_valid(micro.batch).clamp(min=1)
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        totals = torch.zeros(3, dtype=widest(env.device), device=env.device)  # loss, tokens, bytes: read back once
        for batch in env.eval_batches(data.eval, 32):
            with amp.autocast():
                loss = loss_of(net, batch)
            totals += torch.stack([loss, num_valid(batch), num_bytes(data, batch[1])])
        total, num_tokens, size = env.sum_over_ranks(totals).tolist()
        return {"loss": total / num_tokens, **bits_per_byte(total, size)}

    of_base: dict[str, float] = {}
    parts: dict[str, Any] = {"base": base, "model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=lambda net: evaluate(net) | of_base, predict=perplexities, **parts)
    # Adapters are still 0, also before a resume. After `Loop` has seen that each rank has samples to evaluate.
    if base and base["sha256"] and cfg.task in ("train", "evaluate"):
        of_base["base_loss"] = evaluate(unwrap(model).eval())["loss"]
    for window in loop.windows(count=num_valid):
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    if cfg.task == "train" and env.run_dir is not None and base is not None:
        last = unwrap(model) if ema is None else ema.model
        whole = full_copy(last, "cpu") if is_sharded(last) else last  # on all ranks
        if env.is_main:
            write_state(env.run_dir / "merged.pt", merged(whole))
    return loop.eval


class Base(dict[str, Any]):
    """What the checkpoint says of the base: the SHA-256 of its fp32 weights."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state != self:
            here = f"this one has {self['sha256']}" if self["sha256"] else "there is none here"
            raise CheckpointError(
                f"the adapter belongs to the base with SHA-256 {state.get('sha256')}, {here}; "
                f"expected the base that it was trained with as model.weights"
            )


def prepare(net: nn.Module, cfg: Config, env: Environment, knobs: Knobs, amp: Amp) -> str | None:
    """Load, freeze and adapt a base, in place. Returns its SHA-256."""
    layers = find_layers(net, knobs.targets)
    sizes = {name: sizes_of(net.get_submodule(name))[0] for name in layers}
    if knobs.base == "nf4" and (odd := [name for name in layers if sizes[name] % 64]):
        raise ConfigError(f"recipe.base=nf4: {odd[0]} has {sizes[odd[0]]} inputs; expected a multiple of 64")
    if knobs.base != "auto" and (
        odd := [name for name in layers if not isinstance(net.get_submodule(name), nn.Linear)]
    ):
        kind = type(net.get_submodule(odd[0])).__name__
        raise ConfigError(f"recipe.base={knobs.base}: {odd[0]} is a {kind}; expected nn.Linear, or recipe.base=auto")
    sha256 = load_base(net, cfg, env, knobs)
    keep_fp32(net, cfg.amp.keep_fp32)  # an island keeps fp32 weights
    # Other programs add the adapter to the weights as they are in the file, not as a mode rounds them.
    freeze(net, torch.float32 if cfg.task == "export" else amp.dtype, knobs.base, layers)
    env.seed_step(0)  # the same adapters, whether this process trained the base or read it
    adapt(net, layers, knobs)
    return sha256


def load_base(net: nn.Module, cfg: Config, env: Environment, knobs: Knobs) -> str | None:
    """Load model.weights or base.pt, trained first if missing. Return the SHA-256; None in a dry run without a base."""
    path = cfg.model.weights and path_of(cfg.model.weights, cfg.model.name)
    if path is None:
        places = [Path(folder, "base.pt") for folder in (env.run_dir, cfg.run_dir, cfg.resume) if folder]
        file = next((place for place in places if place.exists()), places[0])
        if env.run_dir is not None and env.any_rank(not file.exists()):
            train_base(net, cfg, env, knobs)  # on all ranks: a step is collective
            if env.is_main:
                write_state(file, net.state_dict())
        if not env.any_rank(file.exists()):
            return None
        path = str(file)
    env.job.notes.append(f"base: {load_pretrained(net, path, cfg.model.fresh or (), cfg.model.rename)}")
    total = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        total.update(f"{name} {tuple(tensor.shape)} ".encode() + tensor.cpu().numpy().tobytes())
    return total.hexdigest()


def train_base(net: nn.Module, cfg: Config, env: Environment, knobs: Knobs) -> None:
    """Train a small base on torch's Python sources, in a plain loop. `recipe=language_model` trains a better one."""
    say(f"no model.weights: training a base for {knobs.base_steps} steps")
    keys = dict.fromkeys(("path", "eval_path", "tokenizer", "text_field", "packing", "mix", "train_on"))
    data = build_data(replace(cfg.data, name="torch_sources", **keys), seed=cfg.seed).train
    amp, optimizer = Amp(cfg.amp, env.device, samples=8), build_optimizer(cfg.optimizer, net.to(env.device))
    picks = torch.randint(len(data), (knobs.base_steps, 8), generator=torch.Generator().manual_seed(cfg.seed))
    for keys in picks.tolist():
        inputs, targets = (tensor.to(env.device) for tensor in data.__getitems__([(key, 0) for key in keys]))
        with amp.autocast():
            loss = token_loss(net(inputs), targets) / num_valid((inputs, targets))
        amp.backward(loss)
        amp.step(optimizer, Clip.norm(1.0))
        amp.update()
        amp.zero_grad(optimizer)


def freeze(net: nn.Module, dtype: torch.dtype, kind: str, layers: list[str]) -> None:
    """Freeze a network in place. What autocast would cast is stored in `dtype`, `layers` in 8 or 4 bits if asked to."""
    net.requires_grad_(False)
    found: dict[Any, str] = dict(cast_whole(net))
    for layer, name in found.items():
        if kind == "auto" or name not in layers:
            layer.to(dtype)
            continue
        import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # tells at each call that int8 rounds its inputs
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        low: Any = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        if kind == "nf4":
            low = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
        low.weight.data.copy_(layer.weight)
        low.bias = layer.bias
        net.set_submodule(name, low.requires_grad_(False).to(layer.weight.device))  # quantises


def adapt(net: nn.Module, layers: list[str], knobs: Knobs) -> None:
    """Give layers of a frozen network adapters, in place, and leave the base out of its state dict."""
    if knobs.adapter == "peft":
        if package_folder("torchvision"):
            import_torchvision()  # peft does so, which fails beside another build of torch
        from peft import LoraConfig, inject_adapter_in_model  # pyright: ignore[reportMissingImports]

        is_turned = any(not isinstance(net.get_submodule(name), nn.Linear) for name in layers)  # GPT-2's Conv1D
        settings: dict[str, Any] = {"r": knobs.rank, "lora_alpha": knobs.alpha, "fan_in_fan_out": is_turned}
        config = LoraConfig(**settings, target_modules=layers)
        inject_adapter_in_model(config, net)
        for param in net.parameters():  # peft gives adapters the dtype of their layer
            param.data = param.data.float() if param.requires_grad else param.data
    else:
        for name in layers:
            net.set_submodule(name, Lora(net.get_submodule(name), knobs.rank, knobs.alpha))  # type: ignore[arg-type]
    save_only_trainable(net)
