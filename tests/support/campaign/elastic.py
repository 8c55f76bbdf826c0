"""Runs whose number of machines changes: every step keeps its samples, or it is said that it does not."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import recipes
from amp_core.cli.compose import compose
from amp_core.cli.overrides import check_overrides
from amp_core.config.job import Job
from amp_core.config.rules import build
from amp_core.run.launch import work
from campaign import Plan, Result
from campaign.harness import (
    LOSES_RANKS,
    Child,
    arguments,
    checkpoints,
    last_step,
    lines,
    run,
    slow_steps,
    start,
    state,
    wait_until,
    wait_without_partner,
)
from campaign.runs import clear

MACHINES = 3
STEPS = 12
# Without BatchNorm and dropout, whose numbers belong to the micro-batch.
KIND = ("model=mlp", "model.options.depth=1", "amp=fp32", f"steps={STEPS}", "save_every=1", "clip=norm", *LOSES_RANKS)


def _machine(command: list[str], *, folder: Path, num_machines: int) -> int:
    """What a worker of our agent does, on one of so many machines with one process each."""
    rank = os.environ["RANK"]
    os.environ |= {"GROUP_WORLD_SIZE": str(num_machines), "TORCHELASTIC_MAX_RESTARTS": "3"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = folder.parent / "jobs" / rank
    place.mkdir(parents=True, exist_ok=True)
    sound, problems = check_overrides(command, multirun=False)
    assert not problems, problems
    (place / "job.json").write_text(Job(build(compose(sound)), str(folder), command).dumps())
    return work(place / "job.json", recipes.run)


def _start(folder: Path, command: list[str], num_machines: int) -> list[Child]:
    elastic = ["layout=ddp", f"layout.nnodes=1:{MACHINES}", "layout.rdzv_endpoint=here:1", "layout.rdzv_id=elastic"]
    main = functools.partial(_machine, folder=folder, num_machines=num_machines)
    return start(folder, [*command, *elastic], num_ranks=num_machines, main=main, before=slow_steps)


def elastic(plan: Plan) -> Result:
    """Machines are lost at random steps, or come back: the samples of each step stay, or the log says what they are."""
    result = Result()
    folder = plan.inside("elastic")
    torn = folder / "torn"
    furthest = 0.0
    for case, rng in plan.cases("elastic", short=2, long=24):
        accumulation = 1 + case % 2  # 2 machines of 3 make 3 micro-batches each, or cannot share them out evenly
        command = [item for item in arguments(*KIND, f"accumulation={accumulation}") if "width" not in item]
        planned = 4 * accumulation * MACHINES
        alone = [*command, f"accumulation={accumulation * MACHINES}"]
        assert run(folder / "alone", alone) == [0]
        numbers = rng.sample([1, 2, 3], 3) if plan.long else [3, 2]
        made = []
        for number in numbers[:-1]:
            children = _start(torn, command, number)
            wait_until(
                functools.partial(_is_beyond, torn, max(len(made), last_step(torn)) + rng.randrange(3)), children[0]
            )
            _lose_one(children, rng, result, case)
            made += [number] * (_saved(torn) - len(made))
        codes = [child.wait() for child in _start(torn, command, numbers[-1])]
        made += [numbers[-1]] * (STEPS - len(made))
        text = torn.with_name("torn.0.txt").read_text()
        what = f"accumulation={accumulation} on {numbers} of {MACHINES} machines"
        if result.expect(codes == [0] * numbers[-1], case, f"{what}: ends with {codes}: {text[-900:]}"):
            steps = [line["step"] for line in lines(torn) if line["split"] == "train"]
            result.expect(steps == list(range(1, STEPS + 1)), case, f"{what}: lines of steps {steps}")
            even = [planned % (4 * number) == 0 for number in made]
            counts = [4 * number * max(1, round(planned / (4 * number))) for number in made]
            samples = state(torn)["progress"]["samples"]
            result.expect(samples == sum(counts), case, f"{what}: {samples} samples, not {sum(counts)}")
            warned = "which no accumulation gives" in text
            # Two of three machines may be lost before their first checkpoint.
            right = warned if not all(even) else not warned or (2 in numbers and accumulation == 1)
            result.expect(right, case, f"{what}: warned of other samples: {warned}")
            if all(even):
                result.counts["runs that lost or regained machines"] += 1
                pairs = zip(state(folder / "alone")["model"].values(), state(torn)["model"].values(), strict=True)
                difference = max((a - b).abs().max().item() for a, b in pairs)
                furthest = max(furthest, difference)
                # fp32 sums in another order, over some steps of AdamW.
                result.expect(difference < 1e-5, case, f"{what}: weights differ by {difference}")
            else:
                result.counts["runs with other samples per step, logged"] += 1
        clear(torn)
        clear(folder / "alone")
    result.facts["largest difference of a weight to the run on one machine"] = f"{furthest:.1e}"
    return result


def _is_beyond(folder: Path, step: int) -> bool:
    return last_step(folder) > step


def _saved(folder: Path) -> int:
    return int(checkpoints(folder)[-1].name.removeprefix("step_")) if checkpoints(folder) else 0


def _lose_one(children: list[Child], rng: random.Random, result: Result, case: int) -> None:
    """A machine is gone; the workers of the others notice it and end, with no more than their last checkpoint."""
    lost = rng.choice(children)
    lost.kill()
    for child, code in wait_without_partner(children):
        result.expect(
            code not in (None, 0), case, f"a partner of a lost machine ends with {code}: {child.text[-3000:]}"
        )
