"""The text of `--help`, made of the configuration itself."""

from __future__ import annotations

import re

from amp_core.config import Config, choices, conf_dir

HEADER = """amp-recipes: reference training recipes for mixed precision in PyTorch

  python train.py                                      train with the defaults
  python train.py amp=fp16 clip=norm ema.decay=0.99    set what you like: key=value
  python train.py layout=ddp layout.nproc_per_node=2   two processes
  python train.py -m amp=fp32,bf16,fp16 seed=1,2,3     a sweep: every combination
  python train.py resume=last                          go on with the newest unfinished run of these settings
"""
FOOTER = """Keys of a group are set with a dot: amp.init_scale=1024; `--cfg job` prints them all. Lists go in quotes:
'amp.keep_fp32=["head","*.norm"]'. Exit codes: 0 done, 1 failed, 2 bad configuration, 3 no usable checkpoint,
4 cannot save, 5 diverged, 75 time limit, 130 and 143 interrupted after a checkpoint.
Also: --cfg job, -m (sweep), --hydra-help. Tab completion: eval "$(python train.py -sc install=bash)"."""


def help_text() -> str:
    """Groups with their options, then the plain keys, on one screen."""
    text = (conf_dir() / "config.yaml").read_text()
    defaults = dict(re.findall(r"^  - (?:optional )?(\w+): (\w+)$", text, re.MULTILINE))
    lines = [HEADER, "Groups, chosen with group=option (the default in brackets):"]
    for group, default in defaults.items():
        options = [f"[{option}]" if option == default else option for option in choices(group)]
        if options:
            lines.append(f"  {group:<13}{' '.join(options)}")
    lines += ["", "Keys:"]
    plain = text[text.index("\naccumulation:") : text.index("\nhydra:")]
    lines += [f"  {line}" for line in plain.splitlines() if line.strip()]
    assert set(re.findall(r"^(\w+):", plain, re.MULTILINE)) <= set(Config.__dataclass_fields__)
    return "\n".join([*lines, "", FOOTER])
