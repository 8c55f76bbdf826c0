"""Random command lines: refused with exit code 2 and one message, or a plan; never a traceback, never a file."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import train
from amp_core.cli.overrides import groups, typed_keys
from amp_core.config.options import choices
from campaign import Plan, Result
from campaign.harness import Child

NUMBERS = ["0", "1", "2", "3", "8", "-1", "0.5", "1.0", "1e-3", "1e3", "1e308", "-1e308", "1e999", "1e-400", "nan"]
NUMBERS += ["inf"]
NUMBERS += ["-inf", "NaN", "1_000", "0x10", "0b1", "1e", "٣", "9223372036854775807", "9223372036854775808", f"{10**40}"]
WORDS = ["null", "true", "false", "yes", "None", "''", '""', "auto", "cpu", "cuda", "norm", "sum", "fp16", "a b", "ä"]
WORDS += ["日本"]
WORDS += ["~", "none", "off", "last", "never", "/", ".", "..", "/proc/self/mem", "/dev/null", "~root", "nothing/here"]
WORDS += ["-", "*"]
SHAPES = ["[]", "{}", "[1,2]", "[a,b]", "[[1]]", "{a: 1}", "{a: {b: [1]}}", "[null]", "{null: 1}", "{1: 2}"]
SHAPES += ["{a: nan}", "[,]"]
SHAPES += ["[", "{", "]", "(1)", "1,2", "a,b", "range(1,3)", "choice(1)", "glob(*)", "sort(1,2)", "int(1)", "str(x)"]
SHAPES += ["json_str(1)"]
REFERENCES = ["${steps}", "${amp.name}", "${nothing}", "${oc.env:HOME}", "${oc.env:NO_SUCH}", "${oc.decode:1}", "${"]
REFERENCES += ["$", "${}"]
REFERENCES += ["${now:%Y}", "${hydra:run.dir}", "${.name}", "${..seed}", "${oc.select:a,b}", "???", "\\${steps}"]
REFERENCES += ["${eval:1}"]
DAMAGES = ["=", "==", ":", "@", "+", "++", "~", "'", '"', "\\", "\0", "\n", "\t", " ", ",", ".", "[", "]", "{", "}"]
DAMAGES += ["$", "é", "\udcff"]
FLAGS = ["--help", "--hydra-help", "--version", "--cfg", "--info", "-c", "-p", "--foo", "-x", "--", "-", "--resolve"]
FLAGS += ["--package=amp", "--config-dir=/", "--config-name=x", "-cn", "--shell-completion", "--cfg=job", "--info=all"]
FLAGS += ["--run"]
RECIPE_KEYS = ["recipe.best", "recipe.length", "recipe.embedding", "recipe.margin", "recipe.sample_rate"]
RECIPE_KEYS += ["recipe.scale"]
RECIPE_KEYS += ["recipe.teacher", "recipe.teacher_steps", "recipe.label_smoothing", "recipe.best_is", "recipe.name"]
RECIPE_KEYS += ["recipe.x"]
OPTIONS = ["model.options.width", "model.options.depth", "model.options.dropout", "optimizer.options.betas"]
OPTIONS += ["optimizer.options.momentum", "schedule.options.warmup", "schedule.options.gamma", "model.options.x"]
OPTIONS += ["optimizer.options.eps", "schedule.options.step_size", "optimizer.options.maximize"]
NAMES = ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "mlp", "cnn", "gpt", "unet", "resnet", "AdamW", "SGD"]
NAMES += ["Adafactor"]
NAMES += ["RMSprop", "LBFGS", "Adam", "Muon", "StepLR", "CosineAnnealingLR", "OneCycleLR", "ExponentialLR", "LambdaLR"]
USUAL = ["batch_size=16", "accumulation=2", "steps=5", "epochs=2", "samples=1e3", "seed=7", "save_every=2"]
USUAL += ["eval_every=3"]
USUAL += ["log_every=1", "max_minutes=0.5", "amp=fp16", "amp=bf16", "amp=o2", "amp=bf16_pure", "amp=fp8"]
USUAL += ["amp=fp16_capped"]
USUAL += ["clip=norm", "clip.max_norm=2", "clip=adaptive", "ema.decay=0.9", "ema.warmup=false", "optimizer=sgd"]
USUAL += ["clip=none"]
USUAL += ["optimizer.lr=0.1", "optimizer.weight_decay=0", "optimizer.fused=false", "schedule=one_cycle"]
USUAL += ["schedule=step"]
USUAL += ["schedule=constant", "data=synthetic", "data.num_workers=0", "model=mlp", "model.options.width=8"]
USUAL += ["doctor=off"]
USUAL += ["recipe=gan", "recipe=segmentation", "recipe=contrastive", "recipe=language_model", "recipe=face_recognition"]
USUAL += ["recipe=distillation", "recipe=custom_function", "deterministic=true", "run_dir=x", "log=tensorboard"]
USUAL += ["resume=never"]
USUAL += ["amp.keep_fp32=['*']", "amp.init_scale=1024", "amp.growth_interval=10", "perf.channels_last=true"]
USUAL += ["checkpoint.keep=1"]
USUAL += ["amp.op_policy=cuda", "debug.inject={where: batch, step: 3}", "schedule.horizon=50", "allow_changes=true"]
USUAL += ["device=auto"]
# What sizes of networks and pictures are made of: a random number of gigabytes says nothing about the checks.
SIZES = ("width", "depth", "embedding", "image_size", "num_samples", "length", "heads", "num_classes", "features")
SECONDS = 60


def command_line(rng: random.Random) -> list[str]:
    """1 to 5 overrides or flags, most of them nearly right."""
    keys, names = [*typed_keys(), *RECIPE_KEYS, *OPTIONS], [*groups(), "experiment"]
    line = [_override(rng, keys, names) for _ in range(rng.choice([1, 1, 2, 2, 3, 5]))]
    if rng.random() < 0.05:
        line.insert(rng.randrange(len(line) + 1), rng.choice(FLAGS))
    return line


def _override(rng: random.Random, keys: list[str], groups: list[str]) -> str:
    kind = rng.random()
    if kind < 0.45:
        text = rng.choice(USUAL)
        if rng.random() < 0.7:
            return text
    elif kind < 0.6:
        group = rng.choice(groups)
        text = f"{group}={rng.choice(choices(group) or ['x'])}"
    else:
        key = rng.choice(keys)
        pool = [NUMBERS, NUMBERS, WORDS, SHAPES, REFERENCES, NAMES][rng.randrange(6)]
        value = rng.choice(pool)
        if key.endswith(SIZES) and pool is NUMBERS:
            value = rng.choice(["0", "-1", "1", "2", "8", "0.5", "nan"])
        text = f"{key}={value}"
    damage = rng.random()
    if damage < 0.1:
        text = rng.choice(["+", "++", "~", "-", "--", "@"]) + text
    elif damage < 0.25:
        where = rng.randrange(len(text) + 1)
        text = text[:where] + rng.choice(DAMAGES) + text[where + rng.randrange(2) :]
    elif damage < 0.28:
        text = "".join(
            chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3000)])) for _ in range(rng.randrange(30))
        )
    return text


def fuzz(plan: Plan) -> Result:
    """Random command lines, with `dry_run=true`."""
    result = Result()
    folder = plan.inside("fuzz")
    todo = list(plan.cases("fuzz", short=80, long=1000))
    report = folder / "report"
    while todo:
        place = folder / "here"
        place.mkdir(exist_ok=True)
        child = Child(lambda todo=todo, place=place: _work(todo, place, report), folder / "output.txt")
        child.wait(SECONDS * len(todo))
        done = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        report.unlink(missing_ok=True)
        for (case, _), found in zip(todo, done, strict=False):
            result.counts["command lines"] += 1
            name = "of these refused" if found["code"] == 2 else "of these planned"
            result.counts[name] += found["code"] in (0, 2)
            for problem in found["problems"]:
                result.expect(False, case, f"{found['line']!a}: {problem}")
        todo = todo[len(done) :]
        if todo:
            line = command_line(random.Random(f"{plan.seed}/fuzz/{todo[0][0]}"))
            result.expect(False, todo[0][0], f"{line!a}: ended the process ({child.code}): {child.text[-500:]}")
            todo = todo[1:]
    return result


def _work(todo: list[tuple[int, random.Random]], place: Path, report: Path) -> int:
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    with open(report, "w") as file:
        for case, rng in todo:
            line = command_line(rng)
            code, problems = _try(line, place, report.with_name(f"{case}.out"), report.with_name(f"{case}.err"))
            print(json.dumps({"line": line, "code": code, "problems": problems}), file=file, flush=True)
    return 0


def _try(line: list[str], place: Path, out: Path, err: Path) -> tuple[int, list[str]]:
    """(exit code, what is wrong) of a command line. Workers that it starts write to the same two files."""
    raised = ""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"takes longer than {SECONDS} s")

    kept = os.dup(1), os.dup(2)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    began = time.monotonic()
    try:
        code = train.main([*line, "dry_run=true", "device=cpu"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        code, raised = 99, traceback.format_exc()
    finally:
        signal.alarm(0)
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)
    said, complained = out.read_text(errors="replace"), err.read_text(errors="replace")
    out.unlink()
    err.unlink()
    return code, list(_problems(place, code, said, complained, raised, time.monotonic() - began))


def _problems(place: Path, code: int, out: str, err: str, raised: str, seconds: float) -> Iterator[str]:
    if raised:
        yield raised[-1200:]
        return
    if code not in (0, 2):
        yield f"exit code {code}: {err[-1200:]}"
    elif "Traceback" in err + out:
        yield f"a traceback with exit code {code}: {err[-1200:]}"
    elif code == 2 and (not err.startswith("error: ") or err.count("error: ") != 1):
        yield f"not one message: {err[-500:]!r}"
    elif code == 2 and len(err) > 5000:
        yield f"a message of {len(err)} characters"
    elif code == 0 and not out:
        yield "neither a plan nor a word"
    created = sorted(entry.name for entry in place.iterdir())
    if created:
        yield f"created {created}"
        for name in created:
            shutil.rmtree(place / name, ignore_errors=True)
            (place / name).unlink(missing_ok=True)
    if seconds > SECONDS / 2:
        yield f"took {seconds:.0f} s"
