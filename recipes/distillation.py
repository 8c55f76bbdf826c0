"""Distillation: a frozen teacher in 16 bits, a student under autocast.

The lesson: a network that only answers needs no fp32 weights. Half of the memory is enough, and nothing is cast at each
call, as autocast would do. It stays out of autograd by `no_grad` (what was made in `inference_mode` cannot be saved
for the student's backward). And the loss between two networks that agree is a small difference of large numbers: from
16-bit log-probabilities it is mostly rounding, so the divergence is computed in fp32.

    python train.py recipe=distillation                                     trains its own teacher first
    python train.py recipe=distillation recipe.teacher=outputs/classification/<run>
    python train.py recipe=distillation recipe.soft=0                       the student alone, to compare

One run, two phases: which one a step belongs to follows from its number, so that a run goes on in either of them. The
checkpoint holds the teacher in fp32; the 16-bit copy is made when the student begins, and again after a resume.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from amp_core.checkpoint import read
from amp_core.clip import Clip
from amp_core.config import Config
from amp_core.data import build_data, eval_loader, to_device
from amp_core.ema import build_ema
from amp_core.environment import Environment
from amp_core.errors import ConfigError
from amp_core.layout import share_buffers, unwrap
from amp_core.loop import Loop
from amp_core.models import CLASSIFIERS, build_model
from amp_core.optimizers import build_optimizer
from amp_core.precision import Amp, StepReport
from amp_core.schedule import build_schedule
from amp_core.weights import fp32_copy
from amp_core.window import Micro, sync_grads

DATA = "images"
MODELS = CLASSIFIERS
logger = logging.getLogger("amp_recipes")


@dataclass(frozen=True)
class Knobs:
    """What belongs to this recipe alone."""

    name: str
    length: str
    """Length of the run when none is given: a number and steps, epochs or samples. Teacher and student together."""
    best: str
    """The metric that decides which checkpoint is kept as the best."""
    best_is: str
    """max or min."""
    teacher: str | None
    """Run folder or checkpoint of a classification run, the averaged weights if it has any; null: train a teacher."""
    teacher_steps: int
    """Without `teacher`: the first steps of the run train one."""
    teacher_model: str
    """Without `teacher`: its network. The student is the `model` group."""
    teacher_options: dict[str, Any]
    """Without `teacher`: keyword arguments of its network."""
    temperature: float
    """Divides the logits of both, so that wrong classes count, too."""
    soft: float
    """Weight of the teacher's answers, from 0 to 1; the labels have the rest."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation of the student: loss, accuracy, agreement with the teacher's answers."""
    knobs = check(Knobs(**cfg.recipe))
    found = None if knobs.teacher is None else read_teacher(knobs.teacher)
    name, options = (knobs.teacher_model, knobs.teacher_options) if found is None else found[:2]
    channels = MODELS.in_channels(cfg.model.name) or MODELS.in_channels(name)
    data = build_data(cfg.data, seed=cfg.seed, channels=channels)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    # The smallest of what the mode computes with; fp32 where it knows nothing else.
    dtype = min(amp.dtype, getattr(torch, cfg.amp.weights), key=lambda d: d.itemsize)

    student = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, student)
    ema = build_ema(cfg.ema, student)
    clip = Clip.of(cfg.clip)
    parts: dict[str, Any] = {}
    if found is None:
        teacher_steps = knobs.teacher_steps
        teacher = env.wrap(build_teacher(name, options, data.facts), amp)
        teacher_optimizer = build_optimizer(cfg.optimizer, teacher)
        teacher_schedule = build_schedule(cfg.schedule, teacher_optimizer, teacher_steps)
        parts = {"teacher_optimizer": teacher_optimizer, "teacher_schedule": teacher_schedule}
    else:
        teacher_steps = 0
        teacher = build_teacher(name, options, data.facts, weights=found[2], path=knobs.teacher).to(env.device)
    student_steps = env.num_steps(data) - teacher_steps
    if student_steps < 1:
        logger.warning("recipe.teacher_steps=%d: this run ends before the student begins", teacher_steps)
    schedule = build_schedule(cfg.schedule, optimizer, max(student_steps, 1))
    answering: nn.Module | None = None

    def frozen_teacher() -> nn.Module:
        """The copy that answers; while the teacher still learns, of its present weights."""
        nonlocal answering
        if answering is not None:
            return answering
        share_buffers(teacher)
        copy = frozen(unwrap(teacher), dtype)
        answering = copy if loop.step >= teacher_steps else None
        return copy

    def teacher_step(window: list[Micro]) -> tuple[StepReport, dict[str, Tensor]]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, labels = micro.batch
            with sync_grads(teacher, when=micro.is_last):
                with amp.autocast():
                    loss = F.cross_entropy(teacher(images), labels)
                amp.backward(loss * micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(teacher_optimizer, clip)
        amp.update()
        teacher_optimizer.zero_grad(set_to_none=True)
        teacher_schedule.advance(report)
        return report, {"loss": total}

    def student_step(window: list[Micro]) -> tuple[StepReport, dict[str, Tensor]]:
        teacher = frozen_teacher()
        totals = torch.zeros(2, device=env.device)  # soft, hard
        for micro in window:
            images, labels = micro.batch
            with sync_grads(student, when=micro.is_last):
                with amp.autocast():
                    with torch.no_grad():
                        answers = teacher(images.to(dtype))
                    logits = student(images)
                    soft = divergence(logits, answers, knobs.temperature)
                    hard = F.cross_entropy(logits, labels)
                    loss = knobs.soft * soft + (1 - knobs.soft) * hard
                amp.backward(loss * micro.weight)
            totals += torch.stack([soft.detach(), hard.detach()]) * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        soft, hard = totals
        return report, {"loss": knobs.soft * soft + (1 - knobs.soft) * hard, "soft": soft, "hard": hard}

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        teacher = frozen_teacher()
        # loss, correct, teacher correct, agreeing, samples: summed on the device, read back once.
        totals = torch.zeros(5, dtype=torch.float64, device=env.device)
        batches = eval_loader(
            data.eval,
            batch_size=max(cfg.batch_size, 128),
            rank=env.rank,
            world_size=env.world_size,
            num_workers=cfg.data.num_workers,
            pin_memory=env.device.type == "cuda",
        )
        for images, labels in to_device(batches, env.device, channels_last=cfg.perf.channels_last):
            with amp.autocast():
                answer = teacher(images.to(dtype)).argmax(1)
                logits = net(images)
                loss = F.cross_entropy(logits, labels, reduction="sum")
            guess = logits.argmax(1)
            counts = [(guess == labels).sum(), (answer == labels).sum(), (guess == answer).sum()]
            totals += torch.stack([loss, *counts, labels.new_tensor(len(labels))])
        *sums, num_samples = env.sum_over_ranks(totals).tolist()
        names = ("loss", "accuracy", "teacher_accuracy", "agreement")
        return {name: value / num_samples for name, value in zip(names, sums, strict=True)}

    loop = Loop(
        env,
        data,
        amp=amp,
        evaluate=evaluate,
        model=student,
        teacher=teacher,
        optimizer=optimizer,
        schedule=schedule,
        ema=ema,
        **parts,
    )
    for window in loop.windows():
        if loop.step < teacher_steps:
            report, losses = teacher_step(window)
            loop.log(report, of="teacher", **losses)
        else:
            report, losses = student_step(window)
            loop.log(report, **losses)
    return loop.eval


def divergence(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """T² KL(answers || logits) of both at temperature T, mean over samples [B, K]. Float32 from any dtype.

    The factor keeps the size of the gradient, which falls as 1 / T².
    """
    log_q = F.log_softmax(logits.float() / temperature, dim=1)
    log_p = F.log_softmax(answers.float() / temperature, dim=1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


def frozen(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that only answers: in evaluation mode, without gradients, its weights in `dtype`.

    Normalisation with running statistics stays in fp32: a variance above 65504 is infinite in fp16.
    """
    twin = fp32_copy(net).eval().requires_grad_(False)
    for module in twin.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in () if isinstance(module, _NormBase) else tensors:
            tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
    return twin


# --- the teacher --------------------------------------------------------------------------------------------------------


def check(knobs: Knobs) -> Knobs:
    """The knobs, if they are sound.

    Raises:
        ConfigError: with every problem.
    """
    problems = []
    if knobs.teacher_steps < 1:
        problems.append(f"recipe.teacher_steps={knobs.teacher_steps}: expected at least 1")
    if not knobs.temperature > 0:
        problems.append(f"recipe.temperature={knobs.temperature:g}: expected a number above 0")
    if not 0 <= knobs.soft <= 1:
        problems.append(f"recipe.soft={knobs.soft:g}: expected a number from 0 to 1")
    if knobs.teacher is not None and not Path(knobs.teacher).exists():
        problems.append(
            f"recipe.teacher={knobs.teacher}: there is no such file or folder; expected the folder of a run, or null"
        )
    if problems:
        raise ConfigError(problems)
    return knobs


def read_teacher(path: str) -> tuple[str, dict[str, Any], Mapping[str, Tensor]]:
    """Name, options and weights of the network of another run, the averaged weights if it has them.

    Raises:
        CheckpointError: there is none that can be read.
        ConfigError: it is not a run that trained a `model`.
    """
    contents = read(path)
    model = contents["config"].get("model", {}) if isinstance(contents.get("config"), dict) else {}
    if "model" not in contents or not {"name", "options"} <= model.keys():
        raise ConfigError(f"recipe.teacher={path}: its checkpoint has no network `model`; expected a classification run")
    return model["name"], model["options"], contents.get("ema", contents["model"])


def build_teacher(
    name: str,
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    weights: Mapping[str, Tensor] | None = None,
    path: str | None = None,
) -> nn.Module:
    """The teacher's network, with fresh weights or those that were read from `path`.

    Raises:
        ConfigError: it cannot be built, or the weights are of another network or other data.
    """
    key = "recipe.teacher_model" if path is None else f"recipe.teacher={path}"
    try:
        net = build_model(name, MODELS, options=options, **facts)
        if weights is not None:
            net.load_state_dict(weights)
    except ConfigError as refused:
        raise ConfigError([f"{key}: {problem}" for problem in refused.problems]) from refused
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())
        raise ConfigError(f"{key}: its network does not fit these images and classes: {reason}") from problem
    return net
