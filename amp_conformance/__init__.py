"""Checks of mixed-precision training that any PyTorch trainer can be put through.

import amp_conformance

class MyTrainer:                       # see `task.Trainer`
    name, package = "mine", None
    configuration, documentation = "as it comes", "https://..."

    def run(self, task, after): ...

for result in amp_conformance.run(MyTrainer()):
    print(result)
"""

from amp_conformance import checks_of_state  # registers its checks after those of `checks`  # noqa: F401
from amp_conformance.checks import CHECKS, Check, Failed
from amp_conformance.engine import Result, run
from amp_conformance.task import Batch, NotOffered, Task, Trainer, View, inner_gradient, plain

__all__ = [
    "CHECKS",
    "Batch",
    "Check",
    "Failed",
    "NotOffered",
    "Result",
    "Task",
    "Trainer",
    "View",
    "inner_gradient",
    "plain",
    "run",
]
