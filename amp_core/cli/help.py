"""The text of `--help`, made of the configuration itself: its files, its types and what is written beside them."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path

from amp_core.cli.command import program, tool
from amp_core.cli.overrides import keys_of
from amp_core.cli.words import WORDS
from amp_core.config import schema
from amp_core.config.errors import ConfigError, suggest
from amp_core.config.options import choices, conf_dir, option_file
from amp_core.config.parse import describe, group_of

HEADER = """amp-recipes: reference training recipes for mixed precision in PyTorch

  python train.py                                      train with the defaults
  python train.py amp=fp16 clip=norm ema.decay=0.99    set what you like: key=value
  python train.py layout=ddp layout.nproc_per_node=2   two processes
  python train.py -m amp=fp32,bf16,fp16 seed=1,2,3     a sweep: every combination
  python train.py resume=last                          resume the newest unfinished run of these settings
"""
FOOTER = """Keys of a group are set with a dot: amp.init_scale=1024; `--cfg job` prints them all. Lists go in quotes:
'amp.keep_fp32=["head","*.norm"]'. Exit codes: 0 done, 1 failed, 2 bad configuration, 3 no usable checkpoint,
4 cannot save, 5 diverged (most steps skipped, or a last metric that is not finite), 75 time limit, 130 and 143
interrupted after a checkpoint.
Own options, experiments and recipes: --config-dir <folder> (docs/YOUR_OWN_MODEL.md).
More: --help GROUP, --help GROUP=OPTION, --help KEY, --help sweep. Also: dry_run=true, --cfg job, --hydra-help.
Tab completion: eval "$(python train.py -sc install=bash)"."""
SWEEP = """A sweep runs every combination of the values that keys are given:

  python train.py -m amp=fp32,bf16,fp16 seed=1,2,3                      one after the other
  python train.py -m ... hydra/launcher=joblib hydra.launcher.n_jobs=4  four at a time; GPUs and cores are shared out
  python train.py -m ... hydra/launcher=submitit_slurm                  as jobs of SLURM (docs/CLUSTERS.md)
  python train.py -m ... hydra.sweep.dir=multirun/mine                  run again: completes what is missing
  python train.py -m experiment=parity_gan                              a named set of settings, see --help experiment
  python train.py -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(1e-4,1e-1))' accumulation=1,2,4
                                                                        a search instead of every combination
  python scripts/report.py multirun/mine                                the report

A failed job is reported and does not end the sweep. Exit codes: 0 all finished, 1 some did not, 2 bad configuration
(nothing was started), 130 and 143 interrupted: running jobs wrote a checkpoint first. docs/SWEEPS.md has the rest."""


def help_text(topics: list[str] | None = None) -> str:
    """The screen of all groups and keys, or the text about groups, options, keys or `sweep`."""
    text = "\n\n".join(_topic(topic) for topic in topics) if topics else _screen()
    return text.replace("python train.py", program()).replace("python scripts/report.py", tool("report"))


def _screen() -> str:
    text = (conf_dir() / "config.yaml").read_text()
    lines = [HEADER, "Groups, chosen with group=option (the default in brackets):"]
    for group, default in _defaults().items():
        options = [f"[{option}]" if option == default else option for option in choices(group)]
        if group == "experiment":
            options = ["one of", str(len(options)), "named sets of settings, see --help experiment"]
        lines += textwrap.wrap(
            " ".join(options), 118, initial_indent=f"  {group:<13}", subsequent_indent=" " * 15, break_on_hyphens=False
        )
    lines += ["", "Keys:"]
    plain = text[text.index("\naccumulation:") : text.index("\nhydra:")]
    lines += [f"  {line}" for line in plain.splitlines() if line.strip()]
    return "\n".join([*lines, "", FOOTER])


def _defaults() -> dict[str, str]:
    text = (conf_dir() / "config.yaml").read_text()
    return dict(re.findall(r"^  - (?:optional )?(\w+): (\w+)$", text, re.MULTILINE))


def _topic(topic: str) -> str:
    groups = _defaults()
    if topic in ("sweep", "sweeps", "-m"):
        return SWEEP
    group, _, option = topic.partition("=")
    if option and group in groups:
        if option not in choices(group):
            raise ConfigError(f"--help {topic}: there is no such option. {suggest(option, choices(group))}")
        return f"{topic} sets\n\n{textwrap.indent(option_file(group, option).read_text().rstrip(), '  ')}"
    if topic in groups:
        return _group(topic, groups[topic])
    keys = _keys()
    if topic in keys:
        kind, said = keys[topic]
        return "\n".join([f"{topic}: {kind}", *textwrap.wrap(said, 116, initial_indent="  ", subsequent_indent="  ")])
    if inside := [key for key in keys if key.startswith(f"{topic}.")]:
        return "\n".join(map(_topic, inside))
    other = [key for key in keys if key.rpartition(".")[2] == topic] or WORDS.get(topic, "").split()
    other += [f"{group}={topic}" for group in groups if topic in choices(group)]
    if other and topic not in other:
        return "\n\n".join(map(_topic, other))
    parts = (key.rpartition(".")[2] for key in keys)
    valid = [*groups, "sweep", *keys, *parts, *WORDS, *(option for group in groups for option in choices(group))]
    raise ConfigError(f"--help {topic}: there is no such topic. {suggest(topic, valid)}")


def _group(group: str, default: str) -> str:
    lines = [f"{group}=", ""]
    for option in choices(group):
        shown = f"[{option}]" if option == default else option
        comments = re.findall(r"^#\s*(?!@package)(\S.*)", option_file(group, option).read_text(), re.MULTILINE)
        lines.append(f"  {shown:<26}{comments[0] if comments else ''}".rstrip())
    if group == "recipe":
        lines += ["", "The keys of a recipe: --help recipe=gan, and the head of recipes/gan.py."]
    elif group != "experiment":
        lines += ["", "Keys:", ""]
    for key, (types, said) in _keys().items():
        if key.startswith(f"{group}."):
            lines += textwrap.wrap(f"{key} ({types})", 116, initial_indent="  ", subsequent_indent="      ")
            lines += textwrap.wrap(said, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _keys() -> dict[str, tuple[str, str]]:
    """By key: what it takes, and what is written about it."""
    said = _documentation()
    keys = [(key, hint, said[owner]) for key, hint, owner in keys_of() if group_of(hint) is None]
    return {key: (describe(hint), about.get(key.rpartition(".")[2], "")) for key, hint, about in keys}


@functools.cache
def _documentation() -> dict[str, dict[str, str]]:
    """By class and field: the text below each field of the dataclasses in config/schema.py."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(schema.__file__).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name] = {}
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[node.name][field.target.id] = " ".join(str(text.value.value).split())
    return found
