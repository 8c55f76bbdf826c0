"""Plain values as the dataclasses of schema.py."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from amp_core.config.errors import suggest
from amp_core.config.files import parse_yaml
from amp_core.config.options import choices


def describe(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(k) for k in get_args(kind))
    if origin is list and get_args(kind) != (str,):
        return "a list of groups of keys, in quotes: 'key=[{a:1,b:2}]'"
    if origin is list:
        return 'a list of text, in quotes: \'key=["a","b"]\''
    if origin is dict or kind is dict or dataclasses.is_dataclass(kind):
        return "a group of keys"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, str(kind))


def group_of(hint: Any) -> Any:
    """The dataclass of a group of keys, also of one that may be null; None for the type of a value."""
    return next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return type(value) is str and value in get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(_fits(v, get_args(kind)[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) for k in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return _is_int(value)
    return isinstance(value, kind)


IN_WORDS = {
    "resume": {"false": "never", "null": "never", **dict.fromkeys(("true", "latest", "newest"), "last")},
    "model.weights": {"true": "default", "false": "null"},
    "perf.compile": {"true": "blocks", "false": "null"},
}
"""What was meant by values of a key that takes text."""

hints_of = functools.cache(get_type_hints)


def parse(kind: Any, values: Any, key: str, problems: list[str]) -> Any:
    """Convert `values` to the dataclass `kind`; invalid values are added to `problems` and left out."""
    if not isinstance(values, Mapping):
        names = " or ".join(f"{key}.{name}=..." for name in list(get_type_hints(kind))[:3])
        how = f"choose an option with {key}=<option>" if choices(key) else f"set {names}"
        problems.append(f"{key}={show_value(values)}: expected a group of keys; {how}")
        return None
    fields = hints_of(kind)
    dot = f"{key}." if key else ""
    for name in values:
        if name not in fields:
            problems.append(f"{dot}{name}: there is no such key. {suggest(dot + name, [dot + f for f in fields])}")
    taken = {}
    for name, expected in fields.items():
        if name not in values:  # what few options of a group have has a default
            if not hasattr(kind, name):
                problems.append(f"{dot}{name}: the key is missing; expected {describe(expected)}")
            taken[name] = getattr(kind, name, None)
            continue
        value = values[name]
        group = group_of(expected)
        if group is not None and not (value is None and type(None) in get_args(expected)):
            taken[name] = parse(group, value, f"{dot}{name}", problems)
        elif _is_int(value) and expected in (str, str | None):
            taken[name] = str(value)  # YAML reads run_dir=7 or rdzv_id=42 as numbers; text is meant
        elif _fits(value, expected):
            wants_float = expected is float or (float in get_args(expected) and int not in get_args(expected))
            taken[name] = float(value) if wants_float and value is not None else value
        else:
            literal = [a for k in (expected, *get_args(expected)) if get_origin(k) is Literal for a in get_args(k)]
            hint = " " + suggest(show_value(value), literal) if literal else ""
            if _fits(meant := bool(value) if _is_int(value) and value in (0, 1) else _plain(value), expected):
                hint = f" Write {dot}{name}={show_value(meant)}{', without quotes' * isinstance(value, str)}."
            if isinstance(value, list) and value and all(_fits(one, expected) for one in value):
                hint = f" Several values are a sweep: -m {dot}{name}={','.join(map(show_value, value))}."
            if meant := IN_WORDS.get(dot + name, {}).get(show_value(value)):
                hint = f" Did you mean {meant}?"
            if name.endswith("_minutes") and (minutes := _minutes(str(value))):
                hint = f" Write {dot}{name}={minutes:g}."
            if name == "device" and (number := re.fullmatch(r"(?:(?:cuda|gpu):)?(\d+)", str(value))):
                hint = f" Choose the GPU with CUDA_VISIBLE_DEVICES={number[1]}."
            problems.append(f"{dot}{name}={show_value(value)}: expected {describe(expected)}.{hint}")
            taken[name] = None
    return kind(**taken)


def fill_in(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the dataclass `kind` for keys that `values` lacks, in its groups, too."""
    for name, expected in hints_of(kind).items():
        if name not in values and hasattr(kind, name):
            values[name] = getattr(kind, name)
        elif (group := group_of(expected)) is not None and isinstance(values.get(name), dict):
            fill_in(group, values[name])
    return values


def _plain(value: Any) -> Any:  # what 1000.0, '5', None and 'yes' were meant for
    if isinstance(value, str) and (number := re.fullmatch(r"(\d{1,9})(k|m|\*\*)(\d{1,2})?", value.lower())):
        base, unit, power = number.groups()
        if bool(power) == (unit == "**"):
            return int(base) ** int(power) if power else int(base) * {"k": 1000, "m": 1_000_000}[unit]
    if isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value):
        return None if value.lower() == "none" else parse_yaml(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _minutes(text: str) -> float | None:  # of 2h, 90min and 01:30:00
    if clock := re.fullmatch(r"(\d+):(\d\d):(\d\d)", text):
        return int(clock[1]) * 60 + int(clock[2]) + int(clock[3]) / 60
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(d|h|m|s)[a-z]*", text)
    return float(number[1]) * {"d": 1440, "h": 60, "m": 1, "s": 1 / 60}[number[2]] if number else None


def show_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
