"""A command line as one checked `Job`: its flags, its settings, its folder. Nothing is created."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from amp_core.cli.command import LONGEST, program, say_error
from amp_core.cli.compose import check_config_dirs, compose, note_on_run, use_config_dir
from amp_core.cli.overrides import check_overrides
from amp_core.cli.run_folders import check_run_dir, choose_run_dir
from amp_core.config.errors import ConfigError
from amp_core.config.job import Job
from amp_core.config.parse import IN_WORDS
from amp_core.config.processes import launched
from amp_core.config.rules import key_of, validate, warnings_of
from amp_core.run.terminal import say

FindRecipe = Callable[[str], Any]
"""The module of a recipe by its name. ConfigError: there is none."""
_INSTEAD = {
    "config_path": "--config-dir <folder> adds your YAML files to ours",
    "config_name": "put it into <folder>/experiment/mine.yaml; use --config-dir <folder> experiment=mine",
    "experimental_rerun": "use run_dir=<folder of the run>, which continues it",
}


def read(arguments: list[str], find: FindRecipe) -> argparse.Namespace:
    """The flags of a command line, and its `overrides` as they were typed."""
    if endless := [text for text in arguments if len(text) > LONGEST]:
        raise ConfigError(
            f"{endless[0][:40]}...: has {len(endless[0]):,} characters, expected at most {LONGEST:,}; put long "
            f"values into an experiment file"
        )

    def refuse(message: str) -> NoReturn:
        message = message.partition(" could match ")[0]
        if message.startswith("ambiguous option: --config"):
            raise ConfigError(f"--config: is not used here: {_INSTEAD['config_name']}")
        dashed = re.findall(r"(?<=\s)--?([A-Za-z][\w.-]*)(?:=(\S+))?", message) if "unrecognized" in message else []
        hints = [_without_dashes(key.replace("-", "_"), value or None, arguments, find) for key, value in dashed]
        hint = f" Did you mean {' '.join(hints)}?" if hints and all("=" in each for each in hints) else " ".join(hints)
        raise ConfigError(f"{message}.{hint} Settings are written key=value, see {program()} --help")

    parser = get_args_parser()
    parser.error = refuse
    flags = parser.parse_intermixed_args(arguments)
    for name, how in _INSTEAD.items():
        if getattr(flags, name, None):
            raise ConfigError(f"--{name.replace('_', '-')}: is not used here: {how}")
    if flags.config_dir:
        use_config_dir(flags.config_dir)
    check_config_dirs()
    flags.multirun = flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides
    if flags.multirun and (flags.cfg or flags.info):
        raise ConfigError("-m: a sweep has a configuration for each job; leave it out, or leave out --cfg and --info")
    return flags


def _without_dashes(key: str, value: str | None, arguments: list[str], find: FindRecipe) -> str:
    """What a flag of another program is called here; empty: nothing."""
    if value is None:
        flags = [text.lstrip("-").replace("-", "_") for text in arguments]
        after = arguments[flags.index(key) + 1 :][:1] if key in flags else []
        value = after[0] if after and not re.match(r"-|[\w.+~/@]+=", after[0]) else "true"
    value = IN_WORDS.get(key, {}).get(value, value)
    _, problems = sound_form([f"{key}={value}"], find, multirun=True)
    said = re.search(r"Did you mean (.*?)\?", problems[0]) if problems else None
    if problems and said is None:
        reason = re.search(r"such key(?:: |\. It is )(.*)", problems[0])
        return f" {key}: {reason[1]}." if reason else ""
    meant = said[1] if said else f"{key}={value}"
    return meant if "=" in meant else f"{key}={meant}"


def sound_form(overrides: Sequence[str], find: FindRecipe, *, multirun: bool) -> tuple[list[str], list[str]]:
    """(overrides in the form Hydra takes, problems); what an unknown key should have been is tried by a whole check."""

    def problems_of(sound: list[str]) -> list[str]:
        try:
            check(sound, find)
        except ConfigError as refused:
            return refused.problems
        return []

    return check_overrides(overrides, multirun=multirun, problems_of=problems_of)


def check(
    sound: list[str], find: FindRecipe, problems: Sequence[str] = (), values: dict[str, Any] | None = None
) -> Job:
    """The job, without a folder, of sound overrides (composed: `values`). ConfigError: `problems`, and their own."""
    try:
        values = compose(sound) if values is None else values
    except ConfigError as refused:
        raise ConfigError([*problems, *refused.problems]) from None
    problems = list(problems)
    told = {key_of(problem) for problem in problems}
    # With what is suggested there, other settings are other problems, or none: data.root=x, data.path is missing.
    told |= {
        key_of(text)
        for problem in problems
        for text in re.findall(r"(?:mean |or |called )([\w.]+)(?:=| here)", problem)
    }
    if told & {"recipe", "experiment"}:  # they bring most settings
        raise ConfigError(problems)

    def tell(found: Sequence[str]) -> None:
        # Where an option is unknown, the default one has its place, which none of the other settings was meant for.
        problems.extend([text for text in found if told.isdisjoint((key_of(text), key_of(text).partition(".")[0]))])

    cfg, found, broken = validate(values)
    tell(found)
    # torch is imported from here on: `--help` and `--cfg job` do not need it.
    from amp_core.run.preflight import preflight

    warnings = []
    if "recipe" not in broken:
        try:
            found, warnings = preflight(cfg, find(cfg.recipe["name"]), broken)
        except ConfigError as unknown:
            raise ConfigError([*problems, *unknown.problems]) from unknown
        told |= {key_of(problem) for problem in problems}
        if any(key.startswith("optimizer.") for key in told):
            found = [problem for problem in found if "refuses its settings" not in problem]  # which were told
        tell(found)
    if problems:
        raise ConfigError(problems)
    given = {text.split("=")[0].lstrip("+") for text in sound}
    notes = note_on_run(values) + warnings + warnings_of(cfg, given)
    return Job(cfg, None, list(sound), [sys.executable, *sys.argv], notes)


def job_of(overrides: list[str], find: FindRecipe) -> Job:
    """The job of a command line, without a folder. ConfigError: every problem that can be found before the start."""
    sound, problems = sound_form(overrides, find, multirun=False)
    job = check(sound, find, problems)
    job.overrides = overrides
    return job


def prepare(overrides: list[str], find: FindRecipe) -> Job | None:
    """The job of a single run, under torchrun as rank 0 has prepared it; None when its folder holds it finished.

    ConfigError: every problem that can be found before the start; rank 0 has told them, on the others it is empty.
    """
    if not launched():
        return _with_folder(overrides, find)
    from amp_core.run.launch import share
    from amp_core.run.process import check_variables

    check_variables()
    job, refused = None, False
    if os.environ["RANK"] == "0":
        try:
            job = _with_folder(overrides, find)
        except ConfigError as problem:
            refused = True
            say_error(problem)  # before the others hear of it: the agent kills all when the first one leaves
            sys.stderr.flush()
    return share(job, refused=refused)


def _with_folder(overrides: list[str], find: FindRecipe) -> Job | None:
    job = job_of(overrides, find)
    run_dir = choose_run_dir(job.cfg)
    is_finished = run_dir is not None and check_run_dir(run_dir, job.cfg)
    if job.cfg.dry_run or not is_finished:
        job.run_dir = None if job.cfg.dry_run else run_dir
        return job
    say(f"already finished: {run_dir}")
    return None
