"""Fine-tunes of one network by `recipe=finetuning`, by transformers' Trainer, and by hand: the same batches and dtypes.

    python scripts/benches/finetune.py smollm2 text.jsonl --adapter lora --amp bf16 --out finetune.json

Each turn starts a process for each way, one after another. CPU seconds count as well as seconds of the clock: on a
machine that others use they vary less. The base is stored as autocast casts it, adapters and all that is trained fully
in fp32. Peak memory is that of the process, with the loading.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = "ours", "trainer", "by_hand"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LEFT_OUT = 2
"""First steps, which allocate."""


class Clock:
    """Seconds and CPU seconds between calls of `begin` and `end`."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def end(self, *_: Any, **__: Any) -> None:
        self.steps.append((time.perf_counter() - self._began[0], time.process_time() - self._began[1]))


def ours(flags: argparse.Namespace, clock: Clock) -> None:
    import train
    from amp_core.run.loop import Loop

    step = Loop.run

    def timed(self: Any, *args: Any) -> Any:
        clock.begin()
        found = step(self, *args)
        clock.end()
        return found

    setattr(Loop, "run", timed)  # noqa: B010 - an observer
    run = ["recipe=finetuning", f"recipe.adapter={flags.adapter}", f"amp={flags.amp}", "model=hf", "log.progress=false"]
    run += [f"model.name={flags.network}", "model.weights=default", f"batch_size={flags.batch}", "eval.samples=1"]
    run += ["data=text", f"data.path={flags.text}", f"data.tokenizer={flags.network}", f"data.length={flags.length}"]
    run += [f"steps={flags.steps}", "schedule=constant", "device=cpu", f"run_dir={flags.folder}/run", "doctor=off"]
    assert train.main([*run, "optimizer.lr=1e-5"]) == 0


def rows_of(flags: argparse.Namespace) -> Any:
    """The samples of the run, in its order."""
    import torch

    from amp_core.config.options import read_option
    from amp_core.config.schema import DataConfig
    from amp_core.data import build_data
    from amp_core.data.loading import Sampler

    given = {"path": flags.text, "tokenizer": flags.network, "length": flags.length}
    data, count = build_data(DataConfig(**read_option("data", "text") | given), seed=0).train, flags.steps * flags.batch
    inputs, targets = data.__getitems__(Sampler(len(data), seed=0, batch_size=count).keys(0, count))
    labels = torch.cat([torch.full_like(targets[:, :1], -100), targets], 1)
    ids = torch.cat([inputs, targets[:, -1:].clamp(min=0)], 1)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]


def network(flags: argparse.Namespace) -> Any:
    """With adapters of peft in fp32 on a base of few bits, or in fp32."""
    import torch

    from amp_core.vision import import_torchvision

    import_torchvision()
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[flags.amp] if flags.adapter == "lora" else "float32"
    net: Any = AutoModelForCausalLM.from_pretrained(flags.network, dtype=getattr(torch, dtype), use_cache=False)
    if flags.adapter == "none":
        return net
    from peft import LoraConfig, get_peft_model

    layers = sorted({name.rpartition(".")[2] for name, _ in net.named_modules() if name.endswith("_proj")})
    return get_peft_model(net, LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM"))


def trainer(flags: argparse.Namespace, clock: Clock) -> None:
    net, rows = network(flags), rows_of(flags)
    import transformers

    settings = transformers.TrainingArguments(
        output_dir=f"{flags.folder}/trainer", max_steps=flags.steps, per_device_train_batch_size=flags.batch,
        train_sampling_strategy="sequential", learning_rate=1e-5, lr_scheduler_type="constant", weight_decay=0.1,
        adam_beta2=0.95, max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=True, bf16=flags.amp == "bf16",
        logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    watch: Any = type("Watch", (transformers.TrainerCallback,), {})()
    watch.on_step_begin, watch.on_step_end = clock.begin, clock.end
    transformers.Trainer(net, settings, train_dataset=rows, callbacks=[watch]).train()


def by_hand(flags: argparse.Namespace, clock: Clock) -> None:
    import torch

    net, rows = network(flags).train(), rows_of(flags)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(flags.steps):
        part = rows[step * flags.batch : (step + 1) * flags.batch]
        batch = {key: torch.tensor([row[key] for row in part]) for key in ("input_ids", "labels")}
        clock.begin()
        with torch.autocast("cpu", getattr(torch, DTYPES[flags.amp]), enabled=flags.amp != "fp32"):
            loss = net(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.end()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", help="a folder of transformers")
    parser.add_argument("text", help="a *.jsonl")
    parser.add_argument("--adapter", choices=["lora", "none"], default="lora")
    parser.add_argument("--amp", choices=["fp32", "bf16"], default="bf16")
    for name, value in {"steps": 8, "batch": 1, "length": 128, "turns": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="where the numbers go")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.way:
        import torch

        torch.set_num_threads(1)
        globals()[flags.way](flags, clock := Clock())
        kept = [[each[kind] for each in clock.steps[LEFT_OUT:]] for kind in (0, 1)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print("\n" + json.dumps({"wall": statistics.median(kept[0]), "cpu": statistics.median(kept[1]), "mib": peak}))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(flags.turns):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, *arguments, "--way", way, "--folder", folder]
                done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
            found[way].append(json.loads([line for line in done.stdout.splitlines() if line.startswith('{"wall')][-1]))
    tokens = flags.batch * flags.length
    rows = {
        way: {key: statistics.median(each[key] for each in turns) for key in ("wall", "cpu", "mib")}
        for way, turns in found.items()
    }
    for way, row in rows.items():
        ratios = [a["cpu"] / b["cpu"] for a, b in zip(found[way], found["ours"], strict=True)]
        row |= {"tokens_per_cpu_second": tokens / row["cpu"], "ours_is_faster_by": statistics.median(ratios)}
        print(way, {key: float(f"{value:.3g}") for key, value in row.items()})
    if flags.out:
        settings = {
            key: value
            for key, value in vars(flags).items()
            if key in ("adapter", "amp", "steps", "batch", "length", "turns")
        }
        flags.out.write_text(json.dumps({"settings": settings, "medians": rows, "turns": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
