"""Overrides as people type them: what each means to Hydra, and what to type instead of one that means nothing."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.core.plugins import Plugins

from amp_core.cli.command import program
from amp_core.cli.run_folders import check_place
from amp_core.config.checks import tag_of_timm
from amp_core.config.errors import ConfigError, is_misspelt, suggest
from amp_core.config.options import choices, conf_dir, config_dirs, read_option
from amp_core.config.parse import group_of, hints_of
from amp_core.config.redact import refuse_secret
from amp_core.config.schema import Config

HYDRA = {
    "hydra.run.dir": "a sweep has a folder of its own; use hydra.sweep.dir=multirun/mine",
    "hydra.sweep.subdir": "each job gets a folder named after its overrides; leave it out",
    "hydra.output_subdir": "the run folder always holds .hydra; leave it out",
    "hydra.job.chdir": "paths are relative to where you start, and run_dir= is the output folder; leave it out",
    "hydra.job.name": "a run is named by its folder; use run_dir=runs/mine",
    "hydra.job.env_set": "set variables in the shell, before the command; leave it out",
    "hydra/sweeper/sampler": "is a key of the sweeper; use hydra.sweeper.sampler=tpe",
    "hydra.callbacks": "a callback names a class (_target_), and a config never runs code; leave it out",
    "hydra.searchpath": "your own YAML files are found with the flag --config-dir <folder>; leave it out",
    "hydra.verbose": "Hydra's own log is off, and train.log holds all of the run's; leave it out",
    **dict.fromkeys(("hydra/job_logging", "hydra/hydra_logging"), "log= sets what is logged; use log=none to be quiet"),
    "hydra/callbacks": "a callback names a class (_target_), and a config never runs code; leave it out",
}
"""What people set of Hydra, why it is not used here, and what to type instead."""
IN_SWEEPS = ("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper.", "hydra.sweep.dir")
MEANT = {
    "amp": {
        **dict.fromkeys(("16", "16-mixed", "fp16-mixed", "float16", "half", "true"), "fp16"),
        **dict.fromkeys(("bf16-mixed", "bfloat16", "bfloat16-mixed"), "bf16"),
        **dict.fromkeys(("32", "32-true", "float32", "float", "full", "no", "false"), "fp32"),
        **dict.fromkeys(("bf16-true", "bfloat16-true"), "bf16_pure"),
        **dict.fromkeys(("float8", "fp8-mixed", "e4m3", "transformer-engine"), "fp8"),
        **dict.fromkeys(("16-true", "fp16-true"), "o3"),
    },
    "perf": {"true": "compile"},
    "doctor": dict.fromkeys(("true", "on"), "watch"),
    "resume": dict.fromkeys(("true", "latest", "newest"), "last"),
}
"""Values of other projects, in small letters, and ours."""
WORDS = {word: ours for ours, words in {
    "optimizer.lr": "learning_rate base_lr max_lr", "optimizer.weight_decay": "wd", "dry_run": "fast_dev_run",
    "amp": "precision mixed_precision dtype use_amp opt_level", "data.num_workers": "workers", "model": "arch net",
    "accumulation": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "batch_size": "bs batch per_device_train_batch_size train_batch_size", "log": "logger report_to wandb tensorboard",
    "layout.nproc_per_node": "gpus num_gpus nproc devices world_size num_processes",
    "layout.nnodes": "nodes num_nodes num_machines", "layout device": "accelerator trainer strategy parallel",
    "steps": "max_steps num_steps iterations max_iters", "epochs": "max_epochs num_epochs num_train_epochs",
    "clip.max_norm": "grad_clip max_grad_norm gradient_clip_val clip_grad clip_grad_norm norm",
    "max_minutes": "max_time",
    "run_dir": "output_dir out_dir save_dir log_dir", "save_every": "every save_steps checkpoint_every",
    "eval_every": "eval_steps val_check_interval eval_interval", "eval.at_start": "eval_on_start",
    "eval.samples": "max_eval_samples limit_val_batches eval_iters",
    "log_every": "logging_steps log_every_n_steps log_interval", "checkpoint.keep": "save_total_limit save_top_k",
    "perf": "compile torch_compile", "perf.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "resume": "ckpt_path resume_from_checkpoint", "data": "dataset datamodule", "data.path": "root data_dir",
    "model.weights": "pretrained init_from initial_checkpoint checkpoint_path finetune", "log.wandb_tags": "tags",
    "log.progress": "enable_progress_bar progress_bar", "experiment": "hparams_search",
    "schedule": "lr_scheduler scheduler lr_scheduler_type", "amp.init_scale": "scale loss_scale static_loss_scale",
    "data.image_size": "size resolution input_size crop_size img_size", "model.options": "dropout",
    "optimizer.options": "momentum nesterov betas",
    "schedule.options": "warmup_steps warmup_epochs warmup_ratio milestones gamma step_size",
    "data.path data.eval_path": "train_path val_path train_dir val_dir data_path", "layout": "ddp fsdp distributed",
    "log.wandb_project": "project wandb_project", "save_every eval_every log_every": "save",
    "ema.decay": "beta model_ema ema_decay",
}.items() for word in words.split()}  # fmt: skip
"""What other projects call our keys and groups."""
REASONS = {
    **dict.fromkeys(("num_classes", "in_channels", "vocab_size"), "the data set knows it; leave it out"),
    "shuffle": "training data is shuffled by the seed, evaluation data never; leave it out",
    **dict.fromkeys(("transforms", "transform", "augmentation"), "use data.augment=true or false"),
    "verbose": "train.log has everything; log=none is quiet",
    "enabled": "a mode is chosen: use amp=fp32 for none",
}
"""Last parts of keys that are no settings here, and why."""
FREE = ("model", "optimizer", "schedule")
"""Groups whose `options` are arguments of what they build; `name` takes more than there are files."""
PATHS = ("data.path", "data.eval_path", "data.exclude", "model.name", "model.weights", "run_dir", "resume")
PATHS += ("recipe.teacher", "hydra.sweep.dir", "hydra.run.dir")
"""Keys that hold a path."""
PATH = re.compile(rf"\+*({'|'.join(map(re.escape, PATHS))})=(['\"]?)(.*)\2$", re.DOTALL)
Problems = Callable[[list[str]], list[str]]


def groups() -> list[str]:
    """The config groups of settings."""
    folders = (folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    return sorted(name for name in folders if name[0] not in "._" and name not in ("hydra", "experiment"))


def keys_of(kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(full key, type, class that has it) of all keys of a group, and of those in them."""
    for name, hint in hints_of(kind).items():
        yield f"{prefix}{name}", hint, kind.__name__
        if (inner := group_of(hint)) is not None:
            yield from keys_of(inner, f"{prefix}{name}.")


@functools.cache
def typed_keys() -> dict[str, Any]:
    """Every key that may be set, with dots, except those below `options` and `recipe`; and its type."""
    return {key: hint for key, hint, _ in keys_of()}


@functools.lru_cache(4096)
def parse_override(text: str) -> Override:
    """An override as Hydra reads it. The parser raises several kinds."""
    return OverridesParser.create().parse_override(text)


def check_overrides(
    overrides: Sequence[str], *, multirun: bool, problems_of: Problems | None = None
) -> tuple[list[str], list[str]]:
    """(sound overrides in the form Hydra takes, problems) of the command line, each override on its own.

    With `problems_of`, which says what is wrong with sound overrides, what an unknown key should have been is tried
    before it is told.
    """
    sound: list[str] = []
    problems: list[str] = []
    unknown: list[Override] = []
    sign = list(overrides).index("=") if "=" in overrides else len(overrides) + 1
    spaced = overrides[max(0, sign - 1) : sign + 2]
    for text in overrides:
        try:
            text.encode()
        except UnicodeEncodeError:
            problems.append(f"{text!a}: is not valid UTF-8; expected key=value")
            continue
        if problem := refuse_secret(text):
            problems.append(problem)
            continue
        try:
            override = parse_override(text)
        except Exception:  # the parser raises several kinds
            override = None
        if (path := PATH.match(text)) and (
            # Hydra reads neither umlauts nor ~ without quotes, and takes the folder amp=fp16,seed=1 for several values.
            override is None
            or path[3].startswith("~")
            or (
                override.is_sweep_override() and "\0" not in path[3] and len(path[3]) < 4096 and os.path.exists(path[3])
            )
        ):
            override = parse_override(quoted(path[1], os.path.expanduser(path[3])))
        if text in spaced:  # the key, the sign and the value of `key = value`
            if text == "=":
                problems.append(f"{' '.join(spaced)}: has spaces; write key=value without them")
            continue
        if (override is None or not override.key_or_group) and (meant := _meant_by(text, multirun, problems_of)):
            problems.append(f"{text}: expected key=value. {meant}")
            continue
        if override is None or not override.key_or_group:
            how = ", without spaces" if " =" in f" {text}" or "= " in text else ", lists in quotes: 'key=[a,b]'"
            problems.append(f"{text!r}: cannot be read; expected key=value{how}")
            continue
        try:
            sound += _sound_form(override, multirun)
        except KeyError:
            unknown.append(override)
        except ConfigError as refused:
            problems += refused.problems
    return sound, problems + [_say_unknown(override, sound, problems_of) for override in unknown]


def _meant_by(text: str, multirun: bool, problems_of: Problems | None) -> str:
    """What a word without a value was meant for."""
    if text in groups():
        return f"Valid: {', '.join(f'{text}={option}' for option in choices(text)[:3])}, ...; see --help {text}"
    if (pair := re.fullmatch(r"([\w.]+):(\S+)", text)) and (pair[1] in typed_keys() or pair[1] in groups()):
        return f"Did you mean {pair[1]}={pair[2]}?"
    if typed_keys().get(text) is bool:
        return f"Did you mean {text}=true?"
    if text in ("help", "h"):
        return "Did you mean --help?"
    if (group := next((group for group in groups() if text in choices(group)), None)) is not None:
        return f"Did you mean {group}={text}?"
    return ""


def _sound_form(override: Override, multirun: bool) -> list[str]:
    """An override as Hydra takes it; nothing when it asks for what is so anyway.

    ConfigError says what to type instead; KeyError: there is no such key.
    """
    key, text, value = override.key_or_group, override.input_line or "", override.value()
    typed = text.partition("=")[2]
    if "_target_" in text:
        raise ConfigError(f"{key}: _target_ is refused: names are looked up in tables, and a config never runs code")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _hydra_form(override, typed, multirun)
    if override.package is not None:
        raise ConfigError(f"{text}: packages (@) are not used here: each group has one place; use {key}={typed}")
    if override.is_delete():
        raise ConfigError(f"{text}: nothing is deleted here; {_off(key)}")
    if override.is_sweep_override():
        if not multirun:
            takes_list = "options" in key or "list" in str(typed_keys().get(key))
            how = f", or put a list in brackets: '{key}=[...]'" if takes_list else ""
            how = "; use log=all for both" if key == "log" else how
            raise ConfigError(f"{text}: several values are a sweep; add -m{how}")
        if key in (*groups(), "experiment") and override.is_choice_sweep():
            options = value.filter(choices(key)) if isinstance(value, Glob) else [str(v) for v in value.list]  # type: ignore[union-attr]
            for option in options or [typed]:
                _check_option(key, option)
                sweeper = read_once(key, option, tuple(config_dirs())).get("hydra", {}).get("sweeper", {})
                if key == "experiment" and "params" in sweeper:
                    raise ConfigError(f"{text}: {option} is a sweep of its own; start one after the other")
            return [f"{key}={','.join(options)}"]
        if isinstance(value, Glob):
            raise ConfigError(f"{text}: glob chooses among the options of a group; write the values: {key}=a,b")
    elif key in (*groups(), "experiment"):
        option = value.text if isinstance(value, QuotedString) else value
        if key == "experiment" and option is None:
            return []
        _check_option(key, option)
        return [f"{key}={option}"]
    if re.search(r"options(\.|$)", key):  # of a constructor: free keys, and setting one adds it
        return [f"++{key}={typed}"]
    if key in typed_keys() or key.startswith(("recipe.", "debug.inject.")):
        return [f"{key}={typed}"]
    raise KeyError(key)


def _check_option(group: str, option: Any) -> None:
    if isinstance(option, str) and option in choices(group):
        return
    word = "none" if option is None else str(option).lower()
    found = f"{group}={option}: there is no such option."
    if group == "clip" and isinstance(option, int | float) and not isinstance(option, bool):
        raise ConfigError(f"{found} Did you mean clip=norm clip.max_norm={option}?")
    if group == "model" and (meant := tag_of_timm(word)):
        raise ConfigError(f"{found} {meant}")
    if group == "layout" and word in ("zero", "zero1"):
        raise ConfigError(f"{found} Did you mean layout=ddp layout.shard_optimizer=true?")
    if group in FREE and (name := _name_in_torch(group, word)):
        raise ConfigError(f"{found} Did you mean {group}.name={name}?")
    more = f" {group}.name= takes further names, see --help {group}." if group in FREE else ""
    more = (
        " Data of your own: data/<name>.py and data/<name>.yaml under --config-dir (docs/YOUR_OWN_MODEL.md)."
        if group == "data"
        else more
    )
    more = (
        f" {option} is no class of torch.optim, which optimizer.name= takes, as it takes <module.Class> of a package."
        if group == "optimizer"
        else more
    )
    meant = MEANT.get(group, {}).get(word) or (_without(group) if word in ("none", "false", "off") else None)
    raise ConfigError(f"{found} {suggest(meant or str(option), choices(group))}{more}")


def _name_in_torch(group: str, word: str) -> str | None:
    """The name in torch or torchvision that an option was mistaken for."""
    if any(word == option.lower() for option in choices(group)):
        return None
    if group == "model":
        from amp_core.models.images import CLASSIFIERS

        known = CLASSIFIERS.names()
    else:
        import torch  # to refuse something may take a while

        known = dir(torch.optim if group == "optimizer" else torch.optim.lr_scheduler)
    return next((name for name in known if name.lower() == word and name[0] != "_"), None)


@functools.lru_cache(256)
def read_once(group: str, option: str, folders: tuple[Path, ...]) -> dict[str, Any]:
    """The file of an option in these folders of configuration."""
    return read_option(group, option)


def _without(group: str) -> str | None:
    """The option that does nothing."""
    return next((o for o in ("none", "off", "constant", "default", "fp32", "single") if o in choices(group)), None)


def _off(key: str) -> str:
    """How to do without a key or a group."""
    if key in groups() and (option := _without(key)):
        return f"use {key}={option}"
    return f"use {key}=null" if type(None) in get_args(typed_keys().get(key)) else "leave it out"


def _hydra_form(override: Override, typed: str, multirun: bool) -> list[str]:
    key, value = override.key_or_group, override.value()
    if key == "hydra.run.dir" and not multirun and not override.is_delete():
        return _sound_form(parse_override(f"run_dir={typed}"), multirun)
    if (key, str(value)) in (("hydra.job.chdir", "False"), ("hydra.mode", "MULTIRUN" if multirun else "RUN")):
        return []
    for name, reason in HYDRA.items():
        if key == name or key.startswith(f"{name}."):
            raise ConfigError(f"{key}: {reason}")
    if not key.startswith(IN_SWEEPS) or override.is_delete() or override.package is not None:
        if (choice := key.replace(".", "/")) in ("hydra/launcher", "hydra/sweeper"):
            raise ConfigError(f"{key}: names an option; use {choice}={typed}")
        raise ConfigError(
            f"{key}: is not used here; leave it out. A sweep takes hydra.sweep.dir, hydra/launcher, hydra/sweeper and "
            f"the keys of these"
        )
    if not multirun:
        raise ConfigError(f"{override.input_line}: has an effect only in a sweep; add -m, or leave it out")
    if key.startswith("hydra.sweeper.params.") or (key == "hydra.sweeper.params" and isinstance(value, dict)):
        # The same as values on the command line.
        given = value if isinstance(value, dict) else {key.removeprefix("hydra.sweeper.params."): typed}
        return [
            form for name, values in given.items() for form in _sound_form(parse_override(f"{name}={values}"), multirun)
        ]
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: holds for the whole sweep; expected one value")
    if key in ("hydra/launcher", "hydra/sweeper") and (problem := _check_plugin(key, str(value))):
        raise ConfigError(problem)
    if key == "hydra.sweep.dir" and (problem := check_place(key, "" if value is None else str(value))):
        raise ConfigError(problem)
    return [f"{key}={typed}"]


def _say_unknown(override: Override, sound: list[str], problems_of: Problems | None) -> str:
    key, typed = override.key_or_group, (override.input_line or "").partition("=")[2]
    head, _, tail = key.rpartition(".")
    before = problems_of(sound) if problems_of else []
    for candidates in _candidates(key, typed):
        found = [fixed for text in candidates if (fixed := _tried(text, sound, before, problems_of))]
        if found:
            shown = (" ".join(texts) for texts in found[:3])
            meant = " or ".join(shown)
            return f"{key}: there is no such key. Did you mean {meant}? All keys: {program()} --cfg job"
    if reason := REASONS.get(tail):
        return f"{key}: there is no such key: {reason}"
    if targets := WORDS.get(tail):
        called = " or ".join(targets.split())
        return f"{key}: there is no such key. It is called {called} here: {program()} --help {targets}"
    if head in FREE:
        return f"{key}: there is no such key. Arguments of its constructor: {head}.options.<name>; see --help {head}"
    return f"{key}: there is no such key. All keys: {program()} --cfg job"


def _candidates(key: str, typed: str) -> Iterator[list[str]]:
    """What an unknown key may have been meant for, the likeliest first: overrides that are alternatives."""
    head, _, tail = key.rpartition(".")
    known = [*typed_keys(), "experiment"]
    yield [f"{other}={typed}" for other in known if other.rpartition(".")[2] == tail]
    for target in WORDS.get(tail, "").split():
        meant = MEANT.get(target, {}).get(typed.lower(), typed)
        valid = [option for option in choices(target) if meant.lower() in option]
        yield [f"{target}={option}" for option in ([meant] if meant in valid or not valid else valid[:1])]
    if tail in choices("amp"):
        yield [f"amp={'fp32' if typed.lower() in ('false', 'no', '0') else tail}"]
    # Part by part: two long names that share a word are not the same.
    near = [other for other in known if is_misspelt(tail, other.rpartition(".")[2])]
    near = [other for other in near if other.rpartition(".")[0] == head or is_misspelt(head, other.rpartition(".")[0])]
    near.sort(key=lambda other: -difflib.SequenceMatcher(None, key.lower(), other.lower()).ratio())
    yield from ([f"{other}={typed}"] for other in near)
    options = [target for target in WORDS.get(tail, "").split() if target.endswith(".options")]
    yield [f"{target}.{tail}={typed}" for target in ([f"{head}.options"] if head in FREE else options)]


def _tried(text: str, sound: list[str], before: list[str], problems_of: Problems | None) -> list[str] | None:
    """The override with what it needs besides, when a run takes it."""
    texts = [text]
    for _ in range(4):
        if problems_of is None:
            return texts
        form, problems = check_overrides(texts, multirun=True)
        if not problems:
            job = [at_end(parse_override(part), 0) for part in (*sound, *form)]
            problems = [problem for problem in problems_of(job) if problem not in before]
        if not problems:
            return texts
        more = [more for problem in problems for more in re.findall(r"\buse ([\w.]+=\w+)", problem)]
        if not more or more[0].startswith(f"{text.partition('=')[0]}=") or more[0] in texts:
            return None  # device=cuda would fall back to device=cpu, which is not meant
        texts = [more[0], *(text for text in texts if text.partition("=")[0] != more[0].partition("=")[0])]
    return None


def _check_plugin(key: str, option: str) -> str | None:
    """Whether Hydra has a launcher or a sweeper of this name."""
    Plugins.instance()  # they enter themselves into the store
    valid = sorted({name.removesuffix(".yaml") for name in ConfigStore.instance().list(key)} | set(choices(key)))
    if option in valid:
        return None
    if option in ("joblib", "submitit_local", "submitit_slurm"):
        return f"{key}={option}: is not installed: pip install -c constraints.txt hydra-{option.split('_')[0]}-launcher"
    return f"{key}={option}: there is no such option. {suggest(option, [v for v in valid if v != 'optuna_types'])}"


def num_values(override: Override) -> float:
    """How many values an override gives a key."""
    value: Any = override.value()
    if not override.is_sweep_override() or isinstance(value, IntervalSweep | Glob):
        return 1
    if isinstance(value, RangeSweep):
        start, stop, step = (float(each or 0) for each in (value.start, value.stop, value.step))
        return max(0, math.ceil((stop - start) / step)) if step else math.inf
    return len(value.list)


def is_whole_range(override: Override) -> bool:
    """Whether this is a range of integers."""
    value: Any = override.value()
    return isinstance(value, RangeSweep) and isinstance(value.range(), range)


def at_end(override: Override, end: int) -> str:
    """One end of the values of a search space, as an override: 0 the first, -1 the last."""
    if not override.is_sweep_override():
        return f"{override.get_key_element()}={override.get_value_element_as_str()}"
    value = override.value()
    if isinstance(value, IntervalSweep):
        ends = (value.start, value.end)
        return f"{override.get_key_element()}={ends[end]}"
    if is_whole_range(override):
        return f"{override.get_key_element()}={override.value().range()[end]}"  # type: ignore[union-attr]
    return f"{override.get_key_element()}={list(override.sweep_string_iterator())[end]}"


def quoted(key: str, value: str) -> str:
    """An override whose value is this text, whatever is in it."""
    return f"{key}={quoted_value(value)}"


def quoted_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
