"""Overrides as people type them: what each means to Hydra, or what to type instead."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.core.plugins import Plugins

from amp_core.cli.command import program
from amp_core.cli.words import HYDRA, MEANT, REASONS, WORDS
from amp_core.config.checks import of_others
from amp_core.config.errors import SAME, ConfigError, is_misspelt, suggest
from amp_core.config.options import choices, conf_dir, read_option
from amp_core.config.parse import IN_WORDS, group_of, hints_of
from amp_core.config.schema import Config

IN_SWEEPS = ("hydra/launcher", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper.", "hydra.sweep.dir")
FREE = ("model", "optimizer", "schedule")
"""Groups whose `options` are arguments of what they build; `name` takes more than there are files."""
TASKS = {word: task for task in ("train", "evaluate", "predict") for word in (task, *SAME[task])}
"""Words that are tasks."""
PATHS = ("data.path", "data.eval_path", "data.exclude", "model.name", "model.weights", "run_dir", "resume")
PATHS += ("recipe.teacher", "hydra.sweep.dir", "hydra.run.dir")
"""Keys that hold a path."""
PATH = re.compile(rf"\+*({'|'.join(map(re.escape, PATHS))})=(['\"]?)(.*)\2$", re.DOTALL)
Problems = Callable[[list[str]], list[str]]


def groups() -> list[str]:
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
    before it is reported.
    """
    sound: list[str] = []
    problems: list[str] = []
    unknown: list[Override] = []
    overrides, told = _joined(overrides, multirun)
    problems += told
    for text in overrides:
        if re.search("[\ud800-\udfff]", text):  # the bytes that are no UTF-8
            problems.append(f"{text!a}: is not valid UTF-8; expected key=value")
            continue
        try:
            override = parse_override(re.sub(r"(=\d+)\^(\d+)$", r"\1**\2", text))
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
        if override is None or not override.key_or_group:
            problems.append(_say_unreadable(text))
            continue
        try:
            sound += _sound_form(override, multirun)
        except KeyError:
            unknown.append(override)
        except ConfigError as refused:
            problems += refused.problems
    if len(swept := [problem for problem in problems if "; add -m" in problem]) > 1:  # is one mistake
        problems = [problem for problem in problems if problem not in swept[1:]]
    return sound, problems + [_say_unknown(override, sound, problems_of) for override in unknown]


def _joined(overrides: Sequence[str], multirun: bool) -> tuple[list[str], list[str]]:
    """(the others, what to type) for words that the shell took apart: `amp fp16`, `seed=1 2 3`, `key=[0.9, 0.95]`."""
    rest, problems, words = [], [], list(overrides)
    is_name = {*typed_keys(), *groups(), *TASKS, "help", "h"}.__contains__
    while words:
        text, after = words[0], [*itertools.takewhile(lambda word: "=" not in word and not is_name(word), words[1:])]
        key, _, value = text.partition("=")
        has_brackets, said = re.search(r"[\[{(]", text), None
        if words[1:2] == ["="]:
            after, said = words[1:3], "has spaces; write key=value without them"
        elif after and is_name(text):
            meant = f"task={TASKS[text]} run_dir" if text in TASKS else text
            said = f"expected key=value. Did you mean {meant}={after[0]}?"
        elif after and value and multirun and not has_brackets:
            said = f"several values have commas between them. Did you mean {key}={','.join([value, *after])}?"
        elif after and value and (has_brackets or key in PATHS):
            said = f"has spaces, where the shell takes it apart; put it in quotes: '{' '.join([text, *after])}'"
        after = after if said else []
        problems += [f"{' '.join([text, *after])}: {said}"] if said else []
        rest += [] if said else [text]
        words = words[1 + len(after) :]
    return rest, problems


def _say_unreadable(text: str) -> str:
    """What a word without a value was meant for, or how values are written."""
    pair = re.fullmatch(r"([\w.]+):(\S+)", text)
    if text in groups():
        meant = f"Valid: {', '.join(f'{text}={option}' for option in choices(text)[:3])}, ...; see --help {text}"
    elif pair and pair[1] in (*typed_keys(), *groups()):
        meant = f"Did you mean {pair[1]}={pair[2]}?"
    elif typed_keys().get(text) is bool:
        meant = f"Did you mean {text}=true?"
    elif text in ("help", "h"):
        meant = "Did you mean --help?"
    elif text in TASKS:
        meant = f"Did you mean task={TASKS[text]}?"
    elif found := [group for group in groups() if text in choices(group)]:
        meant = f"Did you mean {found[0]}={text}?"
    else:
        how = ", without spaces" if " =" in f" {text}" or "= " in text else ", lists in quotes: 'key=[a,b]'"
        if re.search(r"""[{,]\s*["'][^"',]*["']\s*:""", text):
            how = ", names before a colon without quotes: 'key={a:b}'"
        return f"{text!r}: cannot be read; expected key=value{how}"
    return f"{text}: expected key=value. {meant}"


def _sound_form(override: Override, multirun: bool) -> list[str]:
    """An override as Hydra takes it; nothing if it holds. ConfigError: what to type instead; KeyError: no such key."""
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
                sweeper = read_option(key, option).get("hydra", {}).get("sweeper", {})
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
        raise ConfigError(f"{found} Did you mean clip={f'norm clip.max_norm={option}' if option > 0 else 'none'}?")
    if group == "model" and (of_library := re.fullmatch(r"(timm|hf)[:/.](.+)", str(option))):
        raise ConfigError(f"{found} Did you mean model.name={of_library[1]}:{of_library[2]}?")
    word = word.rpartition(".")[2] if word.startswith("torch") else word
    if group in ("model", "recipe") and (meant := of_others(word)):
        raise ConfigError(f"{found} {meant}")
    if meant := MEANT.get(f"{group}={word}"):
        raise ConfigError(f"{found} Did you mean {meant}?")
    if group in FREE and (name := _name_in_torch(group, word)):
        raise ConfigError(f"{found} {name}")
    more = f" {group}.name= takes further names, see --help {group}." if group in FREE else ""
    more = {
        "model": " model=timm and model=hf take others, see --help model=timm model=hf.",
        "data": " Data of your own: data/<name>.py and data/<name>.yaml under --config-dir (docs/YOUR_OWN_MODEL.md).",
        "optimizer": f" {option} is no class of torch.optim, which optimizer.name= takes, as it takes <module.Class> "
        "of a package.",
    }.get(group, more)
    meant = _without(group) if word in ("none", "false", "off") else None
    raise ConfigError(f"{found} {suggest(meant or word, choices(group))}{more}")


def _name_in_torch(group: str, word: str) -> str | None:
    """What to type for the name in torch or torchvision that an option was mistaken for, or why that cannot be."""
    if any(word in (option.lower(), *option.split("_"), *SAME.get(option, ())) for option in choices(group)):
        return None
    if group == "model":  # to refuse something may take a while
        from amp_core.models.images import CLASSIFIERS

        known, refused = CLASSIFIERS.names(), {}
    else:
        from amp_core.step import optimizers, schedule

        module = optimizers if group == "optimizer" else schedule
        known, refused = [*module.available(), *module.REFUSED], module.REFUSED
    same = [name for name in known if name.lower() in (word, f"{word}lr")]
    near = same or [name for name in known if len(word) > 2 and word in name.lower()]
    near.sort(key=lambda name: not name.lower().startswith(word))
    if near and near[0] in refused:
        return f"{near[0]} {refused[near[0]]}."
    names = " or ".join([f"{group}.name={near[0]}", *near[1:3]]) if near else ""
    return f"Did you mean {names}{', ...' * (len(near) > 3)}?" if near else None


def _without(group: str) -> str | None:
    """The option that does nothing."""
    return next((o for o in ("none", "off", "constant", "default", "fp32", "single") if o in choices(group)), None)


def _off(key: str) -> str:
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
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: holds for the whole sweep; expected one value")
    if key in ("hydra/launcher", "hydra/sweeper") and (problem := _check_plugin(key, str(value))):
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
    if reason := REASONS.get(key) or REASONS.get(tail):
        return f"{key}: there is no such key: {reason}"
    if targets := WORDS.get(key) or WORDS.get(tail):
        called = " or ".join(targets.split())
        return f"{key}: there is no such key. It is called {called} here: {program()} --help {targets}"
    if head in typed_keys() and group_of(typed_keys()[head]) is None:
        return f"{key}: there is no such key: {head} is a value; write {head}={typed}"
    if head in FREE:
        return f"{key}: there is no such key. Arguments of its constructor: {head}.options.<name>; see --help {head}"
    return f"{key}: there is no such key. All keys: {program()} --cfg job"


def _candidates(key: str, typed: str) -> Iterator[list[str]]:
    """What an unknown key may have been meant for, the likeliest first: overrides that are alternatives."""
    head, _, tail = key.rpartition(".")
    known = [*typed_keys(), "experiment"]
    yield [f"{other}={typed}" for other in known if other.rpartition(".")[2] == tail or _parts(other) == _parts(key)]
    targets = (WORDS.get(key) or WORDS.get(tail, "")).split()
    for target in targets:
        meant = IN_WORDS.get(target, {}).get(typed.lower(), typed)
        valid = [option for option in choices(target) if meant.lower() in (option, *SAME.get(option, ()))]
        valid = valid or [option for option in choices(target) if meant.lower() in option]
        yield [f"{target}={valid[0] if valid else meant}"]
    if tail in choices("amp"):
        yield [f"amp={'fp32' if typed.lower() in ('false', 'no', '0') else tail}"]
    # Part by part: two long names that share a word are not the same.
    near = [other for other in known if is_misspelt(tail, other.rpartition(".")[2])]
    near = [other for other in near if other.rpartition(".")[0] == head or is_misspelt(head, other.rpartition(".")[0])]
    near.sort(key=lambda other: -difflib.SequenceMatcher(None, key.lower(), other.lower()).ratio())
    yield from ([f"{other}={typed}"] for other in near)
    # amp.max_skips: some words of one key of this group; or resume.path: a value taken for a group.
    of_group = {other: iter(_parts(other)) for other in known if other.rpartition(".")[0] == head}
    longer = [other for other, rest in of_group.items() if all(word in rest for word in _parts(key))]  # in this order
    yield from ([f"{other}={typed}"] for other in longer[: len(longer) == 1])
    yield [f"{head}={typed}"] if head in known else []
    options = [target for target in targets if target.endswith(".options")]
    yield [f"{target}.{tail}={typed}" for target in ([f"{head}.options"] if head in FREE else options)]


def _parts(key: str) -> list[str]:
    return re.split("[._]", key)


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
    value: Any = override.value()
    return isinstance(value, RangeSweep) and isinstance(value.range(), range)


def at_end(override: Override, end: int) -> str:
    """One end of the values of a search space, as an override: 0 the first, -1 the last."""
    if not override.is_sweep_override():
        return f"{override.get_key_element()}={override.get_value_element_as_str()}"
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        ends: Any = (value.start, value.end)
    else:
        ends = value.range() if is_whole_range(override) else list(override.sweep_string_iterator())
    return f"{override.get_key_element()}={ends[end]}"


def quoted(key: str, value: str) -> str:
    """An override whose value is this text, whatever is in it."""
    return f"{key}={quoted_value(value)}"


def quoted_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
