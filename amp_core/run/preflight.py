"""Checks before the start that need torch: devices, names in torch, packages, files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from amp_core.config.checks import check_data, lacks_data, of_others
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.files import why_no_folder
from amp_core.config.kinds import FILES, TEXTS
from amp_core.config.parse import parse
from amp_core.config.processes import launched
from amp_core.config.schema import ONE_PROCESS, AmpConfig, Config
from amp_core.config.sources import package_folder
from amp_core.lowp.islands import keep_fp32
from amp_core.lowp.products import is_converted, is_emulated, products_of, use_products, why_none
from amp_core.models import Family, build_model, check_model
from amp_core.run.log import check_log
from amp_core.run.pretrained import check_weights
from amp_core.run.process import num_processes, on_cuda
from amp_core.step.optimizers import check_optimizer
from amp_core.step.schedule import check_schedule
from amp_core.tensors import UNTESTED_DEVICES, blocks, is_there
from amp_core.torch_private import cpu_has, need

LAYOUTS = ("single", "data_parallel", "ddp", "fsdp", "hsdp")
"""Layouts of a recipe whose module does not name its own in a constant of this name."""
PROCESSES_PER_CORE = 8
"""More CPU processes than this per core is taken for a mistake."""


def preflight(cfg: Config, recipe: Any, broken: set[str]) -> tuple[list[str], list[str]]:
    """Problems and warnings of a configuration on this machine. Touches no device and creates nothing.

    `broken` are top-level keys whose values do not have their type; what depends on them is not checked.
    """
    problems: list[str] = []
    warnings: list[str] = []

    def sound(*keys: str) -> bool:
        return broken.isdisjoint(keys)

    if sound("recipe"):
        knobs = parse(recipe.Knobs, cfg.recipe, "recipe", problems)
        # Broken groups are null; a recipe's own rules may look at any of them.
        if not problems and not broken and hasattr(recipe, "check"):
            problems += recipe.check(knobs, cfg)
    if sound("recipe", "layout") and cfg.layout.name not in (layouts := getattr(recipe, "LAYOUTS", LAYOUTS)):
        problems.append(
            f"layout={cfg.layout.name}: recipe={cfg.recipe['name']} does not run in it. Valid: {', '.join(layouts)}"
        )
    if sound("device", "layout", "amp", "debug"):
        _check_devices(cfg, problems, warnings)
        if not launched() and cfg.layout.nnodes in (1, "1"):
            # Without a rank WORLD_SIZE may say what layout.nproc_per_node does.
            several = "" if "RANK" in os.environ or cfg.layout.name in ONE_PROCESS else str(num_processes(cfg))
            expected = {"WORLD_SIZE": ("", "1", several), "RANK": ("", "0"), "LOCAL_RANK": ("", "0")}
            problems += [
                f"{name}={os.environ[name]}: was not set by torchrun, so each process would be a run of its own; start "
                f"them with torchrun or layout=ddp layout.nproc_per_node=<number>, or unset {name}"
                for name, values in expected.items()
                if os.environ.get(name, "") not in values
            ][:1]
    if sound("device", "perf") and cfg.perf.compile is not None:
        _check_compiler(cfg, problems)
    if sound("optimizer"):
        problems += check_optimizer(cfg.optimizer, on_cuda=sound("device") and on_cuda(cfg))
    if sound("schedule"):
        problems += check_schedule(cfg.schedule)
    if sound("model"):
        found = check_model(cfg.model.name, cfg.model.options, recipe.MODELS)
        if found and (meant := of_others(cfg.model.name)):
            found = [f"model.name={cfg.model.name}: there is no such network. {meant}"]
        problems += found + check_weights(cfg)
        folder = Path(cfg.model.name.removeprefix("hf:")) if cfg.model.name.startswith("hf:") else None
        # A recipe of the user may load weights itself.
        is_ours = recipe.__name__.startswith("recipes.")
        if is_ours and cfg.model.weights is None and folder is not None and [*folder.glob("*.safetensors")]:
            warnings.append(f"model.name={cfg.model.name}: its weights are not used; model.weights=default loads them")
        is_of_timm = cfg.model.name.startswith("timm:") and cfg.model.weights is not None
        if is_of_timm and sound("data") and cfg.data.name in FILES and cfg.data.like is None:
            warnings.append(
                f"data.like=null: images are prepared as for torchvision's networks; data.like={cfg.model.name}: with "
                f"the crop, interpolation and statistics of these weights"
            )
        if not found and sound("amp", "perf"):
            _check_parts(cfg, recipe.MODELS, problems)
    if sound("data"):
        if cfg.data.check and launched():
            problems.append("data.check=true: starts its own processes; start it without torchrun")
        needless = ("data.path=", "data.exclude=") if not broken and lacks_data(cfg) else ()
        needless += ("data.eval_path=",) if needless and cfg.data.name in TEXTS else ()
        problems += [problem for problem in check_data(cfg.data, recipe.DATA) if not problem.startswith(needless)]
        for key in ("mixup", "cutmix") if not getattr(recipe, "SOFT_TARGETS", False) else ():
            if getattr(cfg.data, key) is not None:
                problems.append(
                    f"data.{key}={getattr(cfg.data, key):g}: labels are probabilities, which recipe="
                    f"{cfg.recipe['name']} does not take; use recipe=classification"
                )
    if sound("export") and cfg.export.to == "onnx":
        lost = [name for name in ("onnx", "onnxscript", "onnxruntime") if package_folder(name) is None]
        if lost:
            problems.append(f"export.to=onnx: needs the package {lost[0]}: pip install 'amp-recipes[onnx]'; or use pt2")
    if sound("log"):
        problems += check_log(cfg.log)
    if sound("run_dir") and cfg.run_dir and cfg.task == "train":
        reason = why_no_folder(Path(cfg.run_dir))
        problems += [f"run_dir={cfg.run_dir}: {reason}"] if reason else []
    return problems, warnings


def _check_parts(cfg: Config, family: Family, problems: list[str]) -> None:
    """Whether islands and blocks are found; names do not depend on the data, so any shape will do."""
    if not (cfg.amp.keep_fp32 or cfg.perf.checkpoint_activations or cfg.amp.format):
        return
    try:
        with torch.device("meta"):
            net = build_model(cfg.model.name, family, options=cfg.model.options, **family.example)
        nets = list(net.values()) if isinstance(net, torch.nn.ModuleDict) else [net]
        if cfg.perf.checkpoint_activations and not all(any(True for _ in blocks(each)) for each in nets):
            problems.append(
                f"perf.checkpoint_activations=true: model.name={cfg.model.name} has no blocks (modules with "
                f"submodules in an nn.ModuleList or nn.Sequential) to recompute; leave it out"
            )
        keep_fp32(net, cfg.amp.keep_fp32)
    except ValueError as problem:
        problems.append(f"amp.keep_fp32={cfg.amp.keep_fp32}: {problem}")
        return
    except (NotImplementedError, RuntimeError):  # a model that cannot be built without memory is checked at the start
        return
    if cfg.amp.format is None:
        return
    try:
        left_alone = use_products(net, products_of(cfg.amp), cfg.amp.keep_bf16)
    except ValueError as problem:
        problems.append(f"amp.keep_bf16={cfg.amp.keep_bf16}: {problem}")
        return
    # amp=fp8 is bf16 where nothing can be converted, with a warning; asking for more is an error.
    if not is_converted(net) and (cfg.amp.format != "fp8" or cfg.amp.granularity == "block"):
        problems.append(
            f"amp.format={cfg.amp.format}: {why_none(left_alone)}; use amp=bf16, or sizes that are multiples"
        )


def _check_devices(cfg: Config, problems: list[str], warnings: list[str]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device == "cuda" and not num_gpus:
        reason = "torch was built without CUDA" if torch.version.cuda is None else "no CUDA GPU was found"
        problems.append(f"device=cuda: {reason}; use device=cpu, or device=auto")
        return
    if cfg.device in UNTESTED_DEVICES:
        if not is_there(cfg.device):
            problems.append(f"device={cfg.device}: torch finds no such accelerator; use device=cpu, or device=auto")
        elif cfg.layout.name != "single":
            problems.append(f"device={cfg.device}: runs in one process on one device; use layout=single")
        elif cfg.device == "mps" and cfg.doctor is not None and cfg.doctor.name != "off":
            problems.append("device=mps: has no float64, which the doctor computes in; use doctor=off")
        else:
            warnings.append(f"device={cfg.device}: is not tested; please compare a short run with device=cpu")
    is_on_cuda = on_cuda(cfg) and num_gpus > 0
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else max(1, num_processes(cfg))
    nodes = cfg.layout.nodes or (1, 1)
    num_ranks = int(os.environ["WORLD_SIZE"]) if launched() else here * nodes[0]
    is_known = launched() or nodes[0] == nodes[1]  # an elastic run knows it only once it has started
    num_stages = cfg.layout.num_stages or 1
    if is_on_cuda and here * num_stages > num_gpus:
        asked = f"layout.nproc_per_node={here}" + (f" with layout.num_stages={num_stages}" if num_stages > 1 else "")
        fitting = f"layout.nproc_per_node={num_gpus // num_stages}, or " if num_gpus >= num_stages else ""
        problems.append(
            f"{asked}: needs {here * num_stages} GPUs; this machine has {num_gpus}. Use {fitting}device=cpu"
        )
    limit = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if not is_on_cuda and here > limit:
        problems.append(
            f"layout.nproc_per_node={here}: too many processes for {os.cpu_count()} cores; expected at most {limit}"
        )
    if launched():
        if cfg.layout.name in ONE_PROCESS and num_ranks > 1:
            problems.append(f"layout={cfg.layout.name}: torchrun started {num_ranks} processes; use layout=ddp")
        elif cfg.layout.nproc_per_node not in (None, here):
            asked = f"layout.nproc_per_node={cfg.layout.nproc_per_node}"
            problems.append(f"{asked}: torchrun started {here} per machine; leave it out")
        if cfg.layout.nodes != (1, 1):
            problems.append(f"layout.nnodes={cfg.layout.nnodes}: torchrun decides about machines; leave it out")
    inject = cfg.debug.inject
    if inject is not None and is_known and inject.rank >= num_ranks and cfg.layout.name not in ONE_PROCESS:
        problems.append(f"debug.inject.rank={inject.rank}: there are {num_ranks} ranks; expected less")
    shard_size = cfg.layout.shard_size if cfg.layout.name == "hsdp" and is_known else None
    if shard_size and (num_ranks == 1 or num_ranks % shard_size):
        problems.append(
            f"layout.shard_size={shard_size}: does not divide the {num_ranks} rank(s); choose a divisor of them, or "
            f"layout=fsdp"
        )
    alone = is_known and num_ranks == 1
    if cfg.layout.name == "fsdp" and alone:
        warnings.append("layout=fsdp with one rank is layout=single: it holds all of the weights")
    for key in ("static_graph", "compress", "shard_optimizer"):
        if cfg.layout.name == "ddp" and alone and getattr(cfg.layout, key):
            warnings.append(f"layout.{key} has no effect with one rank")
    if cfg.layout.name == "data_parallel" and (not is_on_cuda or num_gpus == 1):
        where = "one GPU" if is_on_cuda else "a CPU"
        warnings.append(f"layout=data_parallel on {where} is layout=single: nn.DataParallel passes everything through")
    if cfg.amp.matmul_precision == "high" and not is_on_cuda:
        warnings.append("amp=tf32 on a CPU is plain fp32: TF32 units are in CUDA GPUs")
    low = cfg.amp.dtype if cfg.amp.update is None else cfg.amp.weights
    if low != "float32" and not is_on_cuda and torch.backends.mkldnn.is_available() and not cpu_has(low):
        warnings.append(
            f"amp={cfg.amp.name}: this CPU has no fast {low} units: products and convolutions are computed "
            f"in fp32 and rounded, with the numbers of {low} and without its speed"
        )
    if cfg.amp.format is not None and is_emulated("cuda" if is_on_cuda else "cpu", products_of(cfg.amp)):
        has_units = cfg.amp.format == "fp8" and cfg.amp.granularity != "block"
        where = "no float8 units here (compute capability 8.9 and later has them)" if has_units else "no kernel is used"
        warnings.append(
            f"amp={cfg.amp.name}: {where}: emulated, with the numbers of {cfg.amp.format} and without its speed"
        )
    if is_on_cuda:
        warnings += units_lacking(cfg.amp, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def units_lacking(amp: AmpConfig, name: str, capability: tuple[int, int]) -> list[str]:
    """What a GPU of a compute capability has no units for, and a mode needs."""
    needs = [
        (amp.dtype == "bfloat16", (8, 0), "only emulates bfloat16, which is slow; use amp=fp16"),
        (amp.matmul_precision == "high", (8, 0), "has no TF32 units; this is plain fp32"),
        (amp.dtype == "float16", (7, 0), "has no Tensor Cores"),
    ]
    return [f"amp={amp.name}: {name} {what}" for needed, least, what in needs if needed and capability < least]


def _check_compiler(cfg: Config, problems: list[str]) -> None:
    from amp_core.memory.compiled import NEEDED, missing_compiler  # other runs need no compiler

    try:
        need(f"perf.compile={cfg.perf.compile}", *NEEDED)
    except ConfigError as problem:
        problems += problem.problems
        return
    backends = torch.compiler.list_backends(exclude_tags=None)
    if cfg.perf.backend not in backends:
        known = torch.compiler.list_backends(exclude_tags=("debug", "experimental"))
        problems.append(
            f"perf.backend={cfg.perf.backend}: there is no such backend of torch.compile. "
            f"{suggest(cfg.perf.backend, [*known, 'aot_eager', 'eager'])}"
        )
        return
    reason = missing_compiler(cfg.perf.backend, "cuda" if on_cuda(cfg) else "cpu")
    if reason is not None:
        problems.append(f"perf.compile={cfg.perf.compile}: {reason}; install one, or use perf=default")
