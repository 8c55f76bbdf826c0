"""Time of a training step, by the clock and of the CPU, as ratios to the loop by hand; with other libraries.

By hand is autocast, GradScaler, clip_grad_norm_ and a fused AdamW as in torch's tutorials; `textbook` is the same with
torch's default AdamW; `best` is the limit: private kernels of torch, lists made once. Accelerate, Lightning Fabric,
Lightning's Trainer and timm take part where they are installed (pip install -e '.[bench]'). Before anything is timed,
all of them train from the same weights on the same samples and must end with the same weights and the same loss. Then
they take turns in one process, in slices of a twentieth of a second and in another order each round; a second loop
written by hand (`again`) shows which differences mean nothing. On a loaded machine read the CPU times.
"""

from __future__ import annotations

import argparse
import ctypes
import functools

import torch

from amp_core.lowp.through_fp32 import compute_in_fp32
from amp_core.torch_private import NormBase
from benches.loops import LOOPS, STEPS, Make, Optimize, Timed, TimedTrainer, adamw, by_hand, final, sgd, takes_part
from benches.result import Number, Picture, Result, ratios, take_turns
from benches.values import compile_all, count, numbers, some_of
from benches.work import MODES, WORKS, Batch, Work, loss_of

FULL = ["--work", "mlp,cnn,resnet18,gpt", "--rounds", "12"]
SHORT = ["--rounds", "2", "--slice", "0.01", "--modes", "fp32", "--accumulation", "1"]

STEPS_ALIKE = 5
"""Steps after which weights are compared; one, where a network has BatchNorm.

Over few samples BatchNorm makes rounding large: of ResNet-50 in bf16, eight images each, on a CPU, our loop and the one
by hand lie 5e-7 of the way apart after one step with AdamW, and 0.6 after five. Of ResNet-18 in float64, where nothing
but our fp32 learning rate and factor of clipping differs, they lie 1e-7 apart after six.
"""
ALIKE = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.05}
"""How far two contestants may lie from each other, to the way that they went from their first weights.

They round in another order (before or after scaling, clipping), and AdamW makes whole steps of gradients that are
nothing but such rounding. With SGD a loop that does not clip, or divides by another number, lies far apart.
"""


class NotAlike(Exception):
    """A contestant computes something else."""


def add_choices(parser: argparse.ArgumentParser, work: str) -> None:
    """What is trained, and how."""
    parser.add_argument("--work", default=work, type=some_of(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--modes", default="fp32,bf16,fp16", type=some_of(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--accumulation", default="1,4", type=numbers, help="micro-batches of a step")
    parser.add_argument("--against", default=",".join(LOOPS[1:]), type=some_of(LOOPS), help="contestants")
    parser.add_argument("--batch-size", type=count, help="samples of a micro-batch; default: the network's own")


def options(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "mlp")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--slice", type=float, default=0.05, help="seconds of a turn")
    parser.add_argument(
        "--longest", type=float, default=0.5, help="seconds of a step by hand, above which it is left out"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the network, for all")
    parser.add_argument("--channels-last", action="store_true", help="images and networks, for all")


def measure(flags: argparse.Namespace) -> Result:
    result = Result(
        "step",
        flags.command,
        flags.device,
        Picture(
            {"ratio": "time of a step, to that of the loop by hand", "CPU ratio": "CPU time of a step, to the same"},
            lines="loop",
            panels=("work", "accumulation"),
            series="mode",
            at=1.0,
            left_out="by hand",
        ),
    )
    keep_freed_memory()
    share_kernels(flags.device)
    apart: dict[str, float] = {}
    for work in flags.work:
        for mode in flags.modes:
            for accumulation in flags.accumulation:
                try:
                    compare(result, work, mode, accumulation, flags, apart)
                except NotAlike as problem:
                    print(f"error: {problem}", flush=True)
                    result.problems.append(f"Not compared: {problem}.")
    most = ", ".join(f"{mode} {distance:.1e} (at most {ALIKE[mode]:g})" for mode, distance in apart.items())
    if apart:
        result.notes.append(
            f"All loops end with the same weights after {STEPS_ALIKE} steps (one, with BatchNorm), with AdamW and with "
            f"SGD. Largest distance from those of the loop by hand, relative to how far these moved: {most}."
        )
        print(result.notes[-1])
    return result


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as a process with one loop does after a few steps.

    The contestants share a heap. Where it shrinks and grows again, one of them pays page faults for the memory of
    others: up to a tenth of a step of ResNet-18.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, the most that it takes
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def share_kernels(device: str) -> None:
    """Compute in fp32 on a CPU what ours computes in fp32, for all contestants: it is a setting of the whole process.

    Loops are compared, not kernels. torch's own round otherwise: of ResNet-18 on 8 images 0.8 % of the gradients have
    another sign, as far from float64 as those of ours (relative distances 0.11 and 0.11), and the first step of AdamW
    is little more than the sign: the weights of two loops by hand would lie 0.27 of their way apart.
    """
    if device == "cpu":
        compute_in_fp32(torch.float16)
        compute_in_fp32(torch.bfloat16)


def compare(
    result: Result, name: str, mode: str, accumulation: int, flags: argparse.Namespace, apart: dict[str, float]
) -> None:
    """One row for each contestant."""
    work, device = WORKS[name], flags.device
    if flags.compile:
        # Each contestant compiles its own network, and none may fall back to eager.
        compile_all()
    batches = work.batches(accumulation, device, flags.batch_size, channels_last=flags.channels_last)

    def net() -> torch.nn.Module:
        built = work.net(device, channels_last=flags.channels_last)
        return torch.compile(built) if flags.compile else built  # type: ignore[return-value]

    names = ["by hand", "again", *(who for who in flags.against if who != "by hand" and takes_part(who, mode, device))]
    alone = Timed(by_hand(net(), batches, mode, device, adamw), device)
    alone(1)
    if (seconds := alone(1)[0]) > flags.longest:
        result.notes.append(
            f"Left out, since a step takes {seconds:.1f} s here: {name}, {mode}, accumulation {accumulation}."
        )
        print(result.notes[-1], flush=True)
        return
    apart[mode] = max(
        apart.get(mode, 0.0), distance(work, [who for who in names if who != "again"], batches, mode, device)
    )
    runners: dict[str, Timed | TimedTrainer] = {}
    for who in names:
        make: Make = by_hand if who == "again" else STEPS.get(who, by_hand)
        runners[who] = (
            TimedTrainer(net(), batches, mode, device, adamw)
            if who == "trainer"
            else Timed(make(net(), batches, mode, device, adamw), device)
        )
    for run in runners.values():
        run(3)
    num_steps = max(1, round(flags.slice / runners["by hand"](3)[0]))
    turns = take_turns({who: functools.partial(run, num_steps) for who, run in runners.items()}, flags.rounds)
    times, cpu = ({who: [turn[clock] for turn in turns[who]] for who in names} for clock in (0, 1))
    found, of_cpu = ratios(times, "by hand", "again"), ratios(cpu, "by hand", "again")
    num_samples = sum(len(inputs) for inputs, _ in batches)
    for who in names:
        rate = num_samples / Number.of(times[who]).median
        rates = {"samples/s": rate} | ({"tokens/s": rate * work.tokens} if work.tokens else {})
        result.add(
            work=name,
            accumulation=accumulation,
            mode=mode,
            loop=who,
            ms=Number.of([1e3 * seconds for seconds in times[who]]),
            ratio=found[who],
            **{"CPU ms": Number.of([1e3 * seconds for seconds in cpu[who]]), "CPU ratio": of_cpu[who]},
            **rates,
        )


def distance(work: Work, names: list[str], batches: list[Batch], mode: str, device: str) -> float:
    """The largest distance between the weights of a contestant and those of the loop by hand, at the end.

    Networks are not compiled for this, and small batches are enough.

    Raises:
        NotAlike: it is more than rounding, or the losses differ.
    """
    few = [(inputs[:8], targets[:8]) for inputs, targets in batches]
    net = work.net(device)
    first = torch.cat([p.detach().double().flatten().cpu() for p in net.parameters()])
    fewest = 1 if any(isinstance(module, NormBase) for module in net.modules()) else STEPS_ALIKE

    def trained(who: str, optimize: Optimize, num_steps: int) -> tuple[torch.Tensor, float]:
        net = work.net(device)
        end = final(who, net, few, mode, device, optimize, num_steps)
        with torch.no_grad():
            losses = [loss_of(net.to(device)(inputs), targets).item() for inputs, targets in few]
        return end, sum(losses) / len(few)

    most = 0.0
    for optimize in (adamw, sgd):
        num_steps = fewest
        ends = {"by hand": trained("by hand", optimize, num_steps)}
        while torch.equal(ends["by hand"][0], first):  # a loss scale that is too large at first skips steps
            num_steps += 1
            ends["by hand"] = trained("by hand", optimize, num_steps)
        ends |= {who: trained(who, optimize, num_steps) for who in names if who != "by hand"}
        expected, expected_loss = ends["by hand"]
        way = (expected - first).norm().item()
        for who, (end, loss) in ends.items():
            apart = (end - expected).norm().item() / way
            if not apart <= ALIKE[mode] or not abs(loss / expected_loss - 1) <= ALIKE[mode]:
                raise NotAlike(
                    f"{who} trains another network than the loop by hand ({work.title}, {mode}, accumulation "
                    f"{len(few)}, {optimize.__name__}): relative distance of the weights {apart:.2g}, loss "
                    f"{loss:.6g} instead of {expected_loss:.6g}"
                )
            most = max(most, apart)
    return most
