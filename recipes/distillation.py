"""Distillation: a frozen teacher in 16 bits, a student under autocast.

The lesson: an inference-only network needs no fp32 weights. 16-bit ones take half of the memory and need no casts at
each call. Use `no_grad` for it; tensors made in `inference_mode` raise in a loss that saves them for the student's
backward, such as a squared error. The loss between two networks that agree is a small difference of large numbers: if
their logits differ by 0.1, a sample's divergence from bf16 log-probabilities is off by 17 times its size, and every
second one is negative. Compute it in fp32.

    python train.py recipe=distillation                                     trains its own teacher first
    python train.py recipe=distillation recipe.teacher=outputs/classification/<run>
    python train.py recipe=distillation recipe.soft=0                       the student without a teacher, to compare

One run has two phases; the number of a step decides its phase, so a run resumes in either. The checkpoint holds the
teacher in fp32; the 16-bit copy is made when the student starts, and again after a resume.

Expected: accuracy 0.938 ± 0.002 on 1,000 held-out digits with 4,000 weights; the teacher has 0.970 (bf16,
seeds 1 to 3), in 20 s on one CPU core.

Source: Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_core import Amp, Clip, MicroBatch, StepReport, sync_grads
from amp_core.checkpoints.reading import read
from amp_core.config.errors import ConfigError
from amp_core.config.schema import Config, RecipeConfig, expected
from amp_core.lowp.masters import fp32_copy
from amp_core.models import check_model
from amp_core.models.images import CLASSIFIERS, top_class
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import share_buffers, unwrap, widest
from amp_core.torch_private import NormBase

DATA = "images"
MODELS = CLASSIFIERS


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""

    name: str
    length: str
    """Default length of a run: a number and steps, epochs or samples. Teacher and student together."""
    best: str
    """The metric that selects the best checkpoint."""
    best_is: str
    """max or min."""
    teacher: str | None
    """Run folder or checkpoint of a classification run (its EMA weights, if any); null: train a teacher."""
    teacher_steps: int
    """Without `teacher`: number of steps that train one first."""
    teacher_model: str
    """Without `teacher`: its network. The student is the `model` group."""
    teacher_options: dict[str, Any]
    """Without `teacher`: options of its network."""
    temperature: float
    """Temperature: divides the logits of both, so that wrong classes count too."""
    soft: float
    """Weight of the teacher's soft targets, from 0 to 1; the rest is for the labels."""
    label_smoothing: float
    """Label smoothing for teacher and student, from 0 to below 1."""


def check(knobs: Knobs, cfg: Config) -> list[str]:
    """Problems of this recipe's own settings, found before the start."""
    problems = expected(
        knobs,
        teacher_steps=(knobs.teacher_steps >= 1, "at least 1"),
        temperature=(knobs.temperature > 0, "a number above 0"),
        soft=(0 <= knobs.soft <= 1, "a number from 0 to 1"),
        label_smoothing=(0 <= knobs.label_smoothing < 1, "at least 0 and below 1"),
    )
    if knobs.teacher is None:
        found = check_model(knobs.teacher_model, knobs.teacher_options, MODELS)
        problems += [problem.replace("model.", "recipe.teacher_", 1).replace("_name", "_model", 1) for problem in found]
    elif not Path(knobs.teacher).exists():
        problems.append(
            f"recipe.teacher={knobs.teacher}: there is no such file or folder; expected the folder of a run"
        )
    return problems


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the student's last evaluation: loss, accuracy, agreement with the teacher."""
    knobs = Knobs(**cfg.recipe)
    name, options, weights = knobs.teacher_model, knobs.teacher_options, None
    if knobs.teacher is not None:
        name, options, weights = read_teacher(knobs.teacher)
    channels = MODELS.in_channels(cfg.model.name) or MODELS.in_channels(name)
    data = build_data(cfg.data, seed=cfg.seed, channels=channels)
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    # The smallest dtype of the mode; fp32 if it has no other.
    dtype = min(amp.dtype, getattr(torch, cfg.amp.weights), key=lambda d: d.itemsize)

    student = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, student)
    ema = build_ema(cfg.ema, student)
    clip = Clip.of(cfg.clip)
    teacher = build_model(name, MODELS, options=options, **data.facts)
    if weights is None:
        teacher_steps = knobs.teacher_steps
        teacher = env.wrap(teacher, amp)
        teacher_optimizer = build_optimizer(cfg.optimizer, teacher)
        teacher_schedule = build_schedule(cfg.schedule, teacher_optimizer, teacher_steps)
    else:
        teacher_steps = 0
        teacher = load(teacher, weights, knobs.teacher).to(env.device)
        teacher_optimizer = teacher_schedule = None
    student_steps = env.num_steps(data) - teacher_steps
    if student_steps < 1:
        env.job.notes.append(f"recipe.teacher_steps={teacher_steps}: this run ends before the student begins")
    # Each phase has a schedule of its own length.
    schedule = build_schedule(cfg.schedule, optimizer, max(student_steps, 1))
    answering: nn.Module | None = None

    def frozen_teacher() -> nn.Module:
        """The frozen copy; while the teacher trains, of its current weights."""
        nonlocal answering
        if answering is not None:
            return answering
        # Running statistics differ between ranks; all are to ask the same teacher.
        share_buffers(teacher)
        copy = frozen(unwrap(teacher), dtype)
        answering = copy if loop.step >= teacher_steps else None
        return copy

    def teacher_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        assert teacher_optimizer is not None and teacher_schedule is not None
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, labels = micro.batch
            with sync_grads(teacher, when=micro.is_last):
                with amp.autocast():
                    loss = F.cross_entropy(teacher(images), labels, label_smoothing=knobs.label_smoothing)
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        # One scale for both phases: the student begins with the teacher's.
        report = amp.step(teacher_optimizer, clip)
        amp.update()
        amp.zero_grad(teacher_optimizer)
        teacher_schedule.advance(report)
        return report, total

    def student_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor, Tensor]:
        teacher = frozen_teacher()
        totals = torch.zeros(2, device=env.device)  # soft, hard
        for micro in window:
            images, labels = micro.batch
            with sync_grads(student, when=micro.is_last):
                with amp.autocast():
                    with torch.no_grad():  # not inference_mode, whose tensors no backward pass may save
                        answers = teacher(images.to(dtype))
                    logits = student(images)
                    soft = divergence(logits, answers, knobs.temperature)
                    hard = F.cross_entropy(logits, labels, label_smoothing=knobs.label_smoothing)
                    # Both are means over samples, so one weight of the micro-batch suits their sum.
                    loss = knobs.soft * soft + (1 - knobs.soft) * hard
                amp.backward(loss, micro.weight)
            totals += torch.stack([soft.detach(), hard.detach()]) * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, totals[0], totals[1]

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        teacher = frozen_teacher()
        # loss, correct, teacher correct, agreeing, samples: summed on the device, read back once.
        totals = torch.zeros(5, dtype=widest(env.device), device=env.device)
        for images, labels in env.eval_batches(data.eval):
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
        predict=lambda net, batch: top_class(net(batch[0])),
        model=student,
        teacher=teacher,
        optimizer=optimizer,
        schedule=schedule,
        ema=ema,
        teacher_optimizer=teacher_optimizer,
        teacher_schedule=teacher_schedule,
    )
    for window in loop.windows():
        # By the number of the step: a resumed run finds its phase without a flag in the checkpoint.
        if loop.step < teacher_steps:
            report, loss = loop.run(teacher_step, window)
            loop.log(report, of="teacher", loss=loss)
        else:
            report, soft, hard = loop.run(student_step, window)
            loop.log(report, loss=knobs.soft * soft + (1 - knobs.soft) * hard, soft=soft, hard=hard)
    return loop.eval


def divergence(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """T² KL(answers || logits) at temperature T, mean over samples [B, K]. Float32 from any dtype.

    T² cancels the 1 / T² of the gradient.
    """
    # In fp32 before the softmax: bf16 rounds each logarithm by up to 2^-8 of it, and their difference is small.
    log_q = F.log_softmax(logits.float() / temperature, dim=1)
    log_p = F.log_softmax(answers.float() / temperature, dim=1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


def frozen(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An inference-only copy: in evaluation mode, without gradients, weights in `dtype`.

    Normalisation with running statistics stays in fp32: a variance above 65504 is infinite in fp16.
    """
    twin = fp32_copy(net).eval().requires_grad_(False)
    for module in twin.modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in () if isinstance(module, NormBase) else tensors:
            tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
    return twin


# --- the teacher ------------------------------------------------------------------------------------------------------


def read_teacher(path: str) -> tuple[str, dict[str, Any], Mapping[str, Tensor]]:
    """Name, options and weights of another run's network (EMA weights, if any).

    Raises:
        CheckpointError: no readable checkpoint.
        ConfigError: the run did not train an image classification network.
    """
    contents = read(path, key="recipe.teacher")
    model = contents["config"].get("model", {})
    if "model" not in contents or check_model(model.get("name", ""), model.get("options", {}), MODELS):
        raise ConfigError(
            f"recipe.teacher={path}: it trained {model.get('name')} and no {MODELS.what}; expected a classification run"
        )
    return model["name"], model["options"], contents.get("ema", contents["model"])


def load(net: nn.Module, weights: Mapping[str, Tensor], path: str | None) -> nn.Module:
    """The teacher with the weights of `path`.

    Raises:
        ConfigError: they belong to another network.
    """
    try:
        net.load_state_dict(weights)
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())
        raise ConfigError(f"recipe.teacher={path}: was trained on other images or classes: {reason}") from problem
    return net
