"""What travels from the command line to the processes of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from amp_core.config.parse import parse
from amp_core.config.schema import Config


@dataclass
class Job:
    """A checked configuration and where it runs. Composed once; other processes get it as JSON."""

    cfg: Config
    run_dir: str | None = None
    """None: nothing is written (dry run, evaluation of a checkpoint)."""
    overrides: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Warnings found before the start."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        values = json.loads(text)
        problems: list[str] = []
        job = cls(**values | {"cfg": parse(Config, values["cfg"], "", problems)})
        assert not problems, problems  # the configuration was checked before it was written
        return job
