"""Custom autograd functions under autocast: three cases, three rules.

The lesson: autocast casts the inputs of torch's own operations. It does not handle an `autograd.Function`: the
forward runs under autocast, the backward does not, and saved tensors have the dtypes of the inputs.

    of your own, any dtype will do     `custom_fwd` and `custom_bwd`, bare: the backward sees the autocast of the
                                       forward. Without them it fails where 16-bit gradients meet fp32 weights.
    of your own, needs fp32            `custom_fwd(cast_inputs=torch.float32)`: fp32 inputs, autocast off in both
                                       passes. Without it a square overflows in fp16 from 256 on.
    somebody else's                    call it in an fp32 island, `keep_fp32`; there is nothing to edit.

A function needs one of them when it has several floating-point inputs, when it calls something that autocast casts
(products, convolutions), or when it needs a certain dtype. The network is a small classifier made
of such functions; `model.options.functions=torch` is the same network with torch's operations and the same accuracy.

    python train.py recipe=custom_function
    python train.py recipe=custom_function amp=fp16 model.options.functions=torch

Expected: accuracy 0.970 ± 0.001 on 1,000 held-out digits (bf16, seeds 1 to 3; fp32 0.969, fp16 0.968), in seconds.

Source: "Functions that need a particular dtype" in torch's notes on automatic mixed precision
(docs.pytorch.org/docs/stable/notes/amp_examples.html#autocast-and-custom-autograd-functions).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amp_core import Amp, Clip, MicroBatch, StepReport, keep_fp32, sync_grads
from amp_core.config.schema import Config, RecipeConfig
from amp_core.models import Family
from amp_core.models.family import ImageShape, check_choice, check_count
from amp_core.models.images import top_class
from amp_core.run.recipe import Environment, Loop, build_data, build_ema, build_model, build_optimizer, build_schedule
from amp_core.tensors import widest

DATA = "images"


@dataclass(frozen=True)
class Knobs(RecipeConfig):
    """This recipe's own settings."""


def run(cfg: Config, env: Environment) -> dict[str, float]:
    """Train, and return the last evaluation: loss and accuracy, with the prefix `ema_` for EMA weights."""
    data = build_data(cfg.data, seed=cfg.seed, channels=MODELS.in_channels(cfg.model.name))
    amp = Amp(cfg.amp, env.device, samples=cfg.batch_size)
    model = env.wrap(build_model(cfg.model.name, MODELS, options=cfg.model.options, **data.facts), amp)
    optimizer = build_optimizer(cfg.optimizer, model)
    schedule = build_schedule(cfg.schedule, optimizer, env.num_steps(data))
    ema = build_ema(cfg.ema, model)
    clip = Clip.of(cfg.clip)

    def train_step(window: list[MicroBatch]) -> tuple[StepReport, Tensor]:
        total = torch.zeros((), device=env.device)
        for micro in window:
            images, labels = micro.batch
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    loss = F.cross_entropy(model(images), labels)
                amp.backward(loss, micro.weight)
            total += loss.detach() * micro.weight
        report = amp.step(optimizer, clip)
        amp.update()
        amp.zero_grad(optimizer)
        schedule.advance(report)
        if ema is not None:
            ema.update(report)
        return report, total

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        # loss, correct, samples: summed on the device, read back once.
        totals = torch.zeros(3, dtype=widest(env.device), device=env.device)
        for images, labels in env.eval_batches(data.eval):
            with amp.autocast():
                logits = net(images)
                loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss, (logits.argmax(1) == labels).sum(), labels.new_tensor(len(labels))])
        loss, correct, num_samples = env.sum_over_ranks(totals).tolist()
        return {"loss": loss / num_samples, "accuracy": correct / num_samples}

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    loop = Loop(env, data, amp=amp, evaluate=evaluate, predict=lambda net, batch: top_class(net(batch[0])), **parts)
    for window in loop.windows():
        report, loss = loop.run(train_step, window)
        loop.log(report, loss=loss)
    return loop.eval


# --- the functions ----------------------------------------------------------------------------------------------------


def on_its_device(decorate: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`custom_fwd` or `custom_bwd` for the device of the tensors at the call.

    torch fixes the device when the class is made, and does nothing on another one (`torch.cuda.amp.custom_fwd` on a
    CPU); nesting them does not help, since the inner one overwrites the outer one's state.
    """

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        forms = {kind: decorate(function, device_type=kind, **options) for kind in ("cpu", "cuda")}

        @functools.wraps(function)
        def chosen(ctx: Any, *args: Any) -> Any:
            kind = next(arg.device.type for arg in args if isinstance(arg, Tensor))
            return forms[kind](ctx, *args)

        return chosen

    return decorator


class Product(Function):
    """x [B, N] times the transpose of weight [M, N], in the autocast dtype, forward and backward."""

    @staticmethod
    @on_its_device(custom_fwd)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Saved in the dtypes they came in, weights in fp32: the products cast them, here and in the backward pass.
        return x.mm(weight.t())

    @staticmethod
    @on_its_device(custom_bwd)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # y = x W^T: dL/dx = g W and dL/dW = g^T x, cast by the autocast that `custom_bwd` restores.
        return grad.mm(weight), grad.t().mm(x)


class RowNorm(Function):
    """x / sqrt(mean(x²) + eps) over the last dimension, float32 under autocast (float64 is kept without)."""

    @staticmethod
    @on_its_device(custom_fwd, cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        # eps is inside of the root: a row of zeros gives 0, not 0 / 0.
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = x * inverse
        # The derivative needs y and 1 / norm alone, so x is not kept.
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    @once_differentiable  # a second derivative would treat saved non-inputs as constants
    @on_its_device(custom_bwd)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        # For r = (mean(x^2) + eps)^(-1/2), y = x r and dr/dx = -r^3 x / N: dx = r g - r y mean(g y).
        return inverse * (grad - y * (grad * y).mean(-1, keepdim=True)), None


class SquaredDistance(Function):
    """|x - c|² for rows x [B, N] and centres c [K, N]: [B, K]. Stands for a function of another package.

    It ignores autocast: its matmul would be rounded to 16 bits, and its backward fails for a 16-bit x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, centres: Tensor) -> Tensor:
        ctx.save_for_backward(x, centres)
        # |x|^2 - 2 x c + |c|^2, one product instead of [B, K, N] differences. It cancels where x is near c: fp32.
        return x.square().sum(1, keepdim=True) - 2 * x.mm(centres.t()) + centres.square().sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, centres = ctx.saved_tensors
        # The derivative of |x - c|^2 is 2 (x - c) by x, and its negative by c; summed over centres, and over rows.
        dx = grad.sum(1, keepdim=True) * x - grad.mm(centres)
        dc = grad.sum(0)[:, None] * centres - grad.t().mm(x)
        return 2 * dx, 2 * dc


squared_distance = keep_fp32(SquaredDistance.apply)


@keep_fp32
def plain_norm(x: Tensor, eps: float) -> Tensor:
    """`RowNorm` with torch's operations."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


@keep_fp32
def plain_distance(x: Tensor, centres: Tensor) -> Tensor:
    """`SquaredDistance` with torch's operations."""
    return (x[:, None] - centres).square().sum(2)


# --- the network that they make ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Product, norm with a gain, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, custom: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.gain = nn.Parameter(torch.ones(outputs))
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(x, self.weight) if self.custom else F.linear(x, self.weight)
        x = RowNorm.apply(x, 1e-6) if self.custom else plain_norm(x, 1e-6)
        return F.relu(x * self.gain)


class Prototypes(nn.Module):
    """Logits: negative squared distances to learned class centres in `features` dimensions."""

    def __init__(self, inputs: int, features: int, num_classes: int, *, custom: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, inputs) / inputs**0.5)
        self.centres = nn.Parameter(torch.randn(num_classes, features))
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(x, self.weight) if self.custom else F.linear(x, self.weight)
        distance = squared_distance if self.custom else plain_distance
        # A mean over features, so that the size of the logits does not depend on their number.
        return -distance(x, self.centres) / self.centres.shape[1]


def prototype_net(
    *,
    num_classes: int,
    image_shape: ImageShape,
    width: int = 256,
    depth: int = 2,
    features: int = 64,
    functions: str = "custom",
) -> nn.Module:
    """Fully connected layers with normalised rows, and a centre for each class.

    Args:
        width: units of each hidden layer. Multiples of 8 suit Tensor Cores.
        depth: number of hidden layers.
        features: dimension of the centres.
        functions: custom, or torch for the same network with torch's operations.
    """
    for key, value in (("width", width), ("depth", depth), ("features", features)):
        check_count(key, value)
    check_choice("functions", functions, ("custom", "torch"))
    custom = functions == "custom"
    channels, height, columns = image_shape
    sizes = [channels * height * columns] + [width] * depth
    layers = [Layer(inputs, outputs, custom=custom) for inputs, outputs in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *layers, Prototypes(width, features, num_classes, custom=custom))


MODELS = Family(
    what="a network of custom functions",
    builders={"prototype_net": prototype_net},
    example={"num_classes": 10, "image_shape": (1, 28, 28)},
)
