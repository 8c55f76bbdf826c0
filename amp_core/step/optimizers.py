"""Optimizers by name: fused where torch supports it, weight decay only on weights of two or more dimensions."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_core.config.errors import suggest
from amp_core.config.schema import OptimizerConfig
from amp_core.lowp.masters import master_params

REFUSED = {
    "LBFGS": "needs a closure, which evaluates the loss several times per step",
    "SparseAdam": "takes only sparse gradients",
    "Optimizer": "is abstract",
}


def available() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: cls for name, cls in sorted(vars(torch.optim).items()) if inspect.isclass(cls)}
    return {name: cls for name, cls in found.items() if issubclass(cls, Optimizer) and name not in REFUSED}


def _class_of(name: str, package: str | None) -> type[torch.optim.Optimizer]:
    if "." in name:
        from amp_core.step import foreign  # other runs need none of it

        return foreign.find_optimizer(name, package)
    if name != "AdamW8bit":
        return available()[name]
    from amp_core.lowp.adam8 import AdamW8bit  # imports torchao, for seconds

    return AdamW8bit


def _has_fused(cls: type[torch.optim.Optimizer], *, on_cuda: bool = False) -> bool:
    if on_cuda and cls is torch.optim.Adagrad and torch.__version__ < "2.12":
        return False  # its first step would raise
    return "fused" in inspect.signature(cls).parameters and cls.__module__.startswith(("torch.", "amp_core."))


def check_optimizer(cfg: OptimizerConfig, *, on_cuda: bool = False) -> list[str]:
    """Problems of the `optimizer` group, found by building one over a single CPU weight."""
    if reason := REFUSED.get(cfg.name.removeprefix("torch.optim.")):
        return [f"optimizer.name={cfg.name}: {reason}. {suggest('', available())}"]
    if "." in cfg.name and not cfg.name.startswith("torch.optim."):
        try:
            _class_of(cfg.name, cfg.package)
        except ValueError as problem:
            return [f"optimizer.name={cfg.name}: {problem}"]
    elif cfg.name not in (names := [*available(), "AdamW8bit"]):
        return [f"optimizer.name={cfg.name}: there is no such optimizer. {suggest(cfg.name, names)}"]
    # torchao compiles its step for a GPU.
    for package in ("torchao", "triton") if cfg.name in ("AdamW8bit", "torchao.optim.AdamW8bit") else ():
        if find_spec(package) is None and (on_cuda or package == "torchao"):
            hint = "pip install torchao, or use optimizer=adamw optimizer.state_dtype=bfloat16"
            return [f"optimizer.name=AdamW8bit: needs the package {package}; {hint}"]
    cls = _class_of(cfg.name, cfg.package)
    ours = ("params", "lr", "weight_decay", "fused", "bf16_stochastic_round")
    defaults = {key: each.default for key, each in inspect.signature(cls).parameters.items() if key not in ours}
    parameters = [*defaults, *(["betas"] if cls is torch.optim.Muon else [])]  # of AdamW beside it
    unknown = [key for key in cfg.options if key not in parameters]
    problems = [f"optimizer.options.{k}: {cfg.name} has no such option. {suggest(k, parameters)}" for k in unknown]
    for key, value in cfg.options.items():
        default = defaults.get(key)
        if isinstance(default, tuple) and not (isinstance(value, list | tuple) and len(value) == len(default)):
            problems.append(f"optimizer.options.{key}={value}: expected {len(default)} numbers, such as {[*default]}")
    if cfg.fused and not _has_fused(cls, on_cuda=on_cuda):
        fused = [name for name, other in available().items() if _has_fused(other, on_cuda=on_cuda)]
        where = f" on CUDA in torch {torch.__version__}" if _has_fused(cls) else ""
        problems.append(
            f"optimizer.fused=true: {cfg.name} has no fused form{where}; use optimizer.fused=null, or one of "
            f"{', '.join(fused)}"
        )
    if cfg.state_dtype == "bfloat16":
        problems += _check_16bit(cfg)
    if cfg.groups or cfg.layer_decay is not None:
        from amp_core.step.groups import check_groups

        problems += check_groups(cfg, parameters)
    if not problems:
        try:
            plain = replace(cfg, groups=None, layer_decay=None)
            build_optimizer(plain, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        except Exception as problem:  # report to the user whatever the constructor raises
            problems.append(f"optimizer.name={cfg.name}: refuses its settings: {problem}")
    return problems


def _check_16bit(cfg: OptimizerConfig) -> list[str]:
    key = "optimizer.state_dtype=bfloat16"
    if cfg.name not in ("Adam", "AdamW"):
        return [f"{key}: is for Adam and AdamW; {cfg.name} keeps its state in float32"]
    unknown = [name for name in cfg.options if name not in ("betas", "eps")]
    problems = [f"{key}: has no {name}; leave out optimizer.options.{name}" for name in unknown]
    if cfg.fused is False:
        problems.append(f"{key}: its step is torch's fused one; leave out optimizer.fused=false")
    return problems


def build_optimizer(cfg: OptimizerConfig, *nets: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the `optimizer` group over the weights of `nets` that need gradients.

    Weight decay applies to weights of two and more dimensions; norms and biases have none. A fused step never syncs
    with the device, others once. Muon has AdamW beside it (`amp_core.step.muon`).
    """
    # Lists of a config as tuples, which torch expects of betas.
    options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in cfg.options.items()}
    if cfg.name == "Muon":
        from amp_core.step import muon  # other runs need none of it

        fused = True if cfg.fused is None else cfg.fused
        return muon.build(nets, cfg.lr, cfg.weight_decay, fused=fused, **options)
    if cfg.groups or cfg.layer_decay is not None:
        from amp_core.step.groups import weight_groups

        groups = weight_groups(cfg, nets)
    else:
        params = [p for net in nets for p in master_params(net) if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
    groups = [group for group in groups if group["params"]]  # a schedule asks the first weight for its device
    cls = _class_of(cfg.name, cfg.package)
    # A differentiable step excludes fused and wins unless both were requested. So do weights on several devices in SGD,
    # whose fused form takes its learning rate from one device.
    devices = {p.device for group in groups for p in group["params"]}
    spread = cls is torch.optim.SGD and len(devices) > 1
    has_fused = _has_fused(cls, on_cuda=any(device.type == "cuda" for device in devices))
    if cfg.fused or (cfg.fused is None and has_fused and not options.get("differentiable") and not spread):
        options["fused"] = True
    if "weight_decay" not in inspect.signature(cls).parameters:
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    spare_compiler()
    if cfg.state_dtype == "bfloat16":
        first = [{**group, "params": group["params"][:1]} for group in groups]
        cls(first, lr=cfg.lr, **options)  # type: ignore[arg-type]  # torch's checks of the values
        from amp_core.lowp.moments import Adam16

        return Adam16(groups, cfg.lr, **options, decoupled_weight_decay=cfg.name == "AdamW")
    optimizer = cls(groups, lr=cfg.lr, **options)  # type: ignore[arg-type]
    if hasattr(optimizer, "eval"):
        optimizer.train()  # type: ignore[attr-defined]  # of schedulefree, whose step refuses without
    return optimizer


def spare_compiler() -> None:
    """Keep optimizers from importing torch's compiler, which takes as long as importing torch itself.

    Four of their methods are excluded from compiled code by `torch._disable_dynamo`, which imports the compiler at the
    first call and caches its answer beside the method. Here the answer is the method, which nothing of ours compiles.
    If a torch version caches it elsewhere, this has no effect but a second at start-up.
    """
    answer = "__dynamo_disable"
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        own = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if own is not None and not hasattr(own, answer):
            setattr(own, answer, own)
