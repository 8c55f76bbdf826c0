"""Predictions of a run's network: a line per sample in predictions.jsonl of the run folder.

A class has its name beside it, where the data set names classes, and the five most probable ones are in lists
`top_...`. What else has more than one number per sample, such as masks, goes to predictions/<index>.npz, which the line
names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from amp_core.checkpoints.reading import Selection, find_checkpoint
from amp_core.config.checks import lacks_data
from amp_core.config.errors import ConfigError, Diverged, RunError
from amp_core.config.files import open_file, remove
from amp_core.config.kinds import TEXTS
from amp_core.config.schema import Config
from amp_core.config.sources import IMAGE_ENDINGS, Skipped, images_below, skipped_note
from amp_core.data import Data, Dataset
from amp_core.data.base import Key
from amp_core.run.environment import Environment
from amp_core.run.folder import writing
from amp_core.run.generate import answers
from amp_core.run.lines import dumps, write_text
from amp_core.run.terminal import say
from amp_core.step.amp import Amp
from amp_core.tensors import unwrap


def with_data(cfg: Config) -> Config:
    """The configuration of a task with a run. What a network learned a table as is that of its checkpoint; without the
    training data, the files to predict replace them."""
    if cfg.data.name in TEXTS:
        nothing = replace(cfg.data, path=None, eval_path=None, mix=None, num_samples=0)
        return replace(cfg, data=nothing) if lacks_data(cfg) else cfg
    is_table = cfg.data.name == "table" and cfg.model.weights is None
    if not is_table and (cfg.task != "predict" or not lacks_data(cfg)):
        return cfg
    if not is_table:
        _images_of(cfg.predict_on or "")
    found = find_checkpoint(Path(cfg.origin or cfg.run_dir or ""), select=lambda *_: Selection(lambda entry: None))
    if is_table:
        from amp_core.data.table import with_schema

        return replace(cfg, data=with_schema(cfg, found.contents["table"]))
    classes = found.contents["progress"].get("classes", [])
    return replace(cfg, data=replace(cfg.data, path=cfg.predict_on, exclude=None, num_classes=max(len(classes), 1)))


def predict(loop: Any) -> None:
    """The whole of task=predict: the network of a loop, or its average, predicts; each rank its share. Collective.

    Raises:
        ConfigError: the recipe predicts nothing, or there are no images.
        RunError: no image can be read; the files are written. Where some can, the others are named and counted.
        SaveError: the files cannot be written.
        Diverged: a prediction is not finite; the files are written.
    """
    env, net = loop.env, unwrap(loop.model) if loop.ema is None else loop.ema.model
    if loop.predict is None:
        name = loop.cfg.recipe["name"]
        raise ConfigError(f"task=predict: recipe={name} does not say what it predicts; use task=evaluate")
    is_table = loop.cfg.data.name == "table"  # `with_data` made its evaluation data of them
    texts = loop.cfg.predict_on if Path(loop.cfg.predict_on or "").is_file() and not is_table else None
    samples, skipped = (loop.data.eval, []) if texts or is_table else _samples(loop.cfg.predict_on, loop.data)
    file = env.run_dir / "predictions.jsonl"
    if env.any_rank(env.is_main and not (env.run_dir / ".hydra").exists()):  # the folder of a run stays unchanged
        env.folder.begin()
    with writing(env.run_dir), loop.evaluation.averaged():
        if texts:
            lines = sorted(answers(loop, net, texts))
        else:
            lines = list(_lines(env, samples, loop.amp, net.eval(), loop.predict, loop.classes))
        if env.world_size > 1:
            parts: list[Any] = [None] * env.world_size
            dist.all_gather_object(parts, lines, group=env.host_group)
            lines = sorted(line for part in parts for line in part)
        if env.is_main:
            write_text(file, "".join(f"{text}\n" for _, text, _ in lines))
    if unread := sum('"error": ' in text for _, text, _ in lines):
        what = "prompts" if texts else "images"
        found = f"{unread} of {len(lines)} {what} cannot be read: their lines in {file} have an error instead"
        if unread == len(lines):
            raise RunError(found)
        if env.is_main:
            say(found)
    if bad := sum(not is_finite for *_, is_finite in lines):
        raise Diverged(f"{bad} of {len(lines)} predictions in {file} are not finite; try amp=fp32, or amp=bf16")
    env.folder.write_summary("finished", 0)
    if env.is_main:
        for note in [*skipped, f"predictions{'' if loop.ema is None else ' of the average'}: {file}"]:
            say(note)


@torch.no_grad()
def _lines(
    env: Environment, samples: Dataset, amp: Amp, net: nn.Module, predict: Callable[..., Any], classes: list[str]
) -> Iterator[tuple[int, str, bool]]:
    """(index, line, whether it is finite) of this rank's samples. Writes their arrays."""
    assert env.run_dir is not None
    batches = env.eval_loader(samples, 32)
    paths, names_of = getattr(samples, "paths", None), np.array(classes)
    for rows, batch in zip(batches.rows, env.eval_batches(batches), strict=True):
        with amp.autocast():
            said = predict(net, batch).items()
        found = {name: np.array(value) if isinstance(value, list) else value.cpu().numpy() for name, value in said}
        for row, index in enumerate(range(rows.start, rows.stop)):
            values = {name: value[row] for name, value in found.items()}
            line = {"index": index} | ({} if paths is None else {"path": paths[index]})
            if isinstance(samples, _Files) and batch[-1][row]:
                yield index, dumps(line | {"error": batch[-1][row]}), True
                continue
            arrays = {name: value for name, value in values.items() if value.ndim and not name.startswith("top_")}
            line |= {name: value.tolist() for name, value in values.items() if name not in arrays}
            for key, name in (("class", "name"), ("top_classes", "top_names")):
                if classes and key in values:
                    line[name] = names_of[values[key]].tolist()
            if arrays:
                line["file"] = f"predictions/{index:08d}.npz"
                (env.run_dir / "predictions").mkdir(exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    remove(env.run_dir / line["file"])  # perhaps a pipe, or a link to somewhere else
                place = open_file(env.run_dir / line["file"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                with os.fdopen(place, "wb") as file:
                    np.savez_compressed(file, **arrays)
            yield (
                index,
                dumps(line),
                all(np.isfinite(value).all() for value in values.values() if value.dtype.kind != "U"),
            )


class _Files:
    """Image files prepared as those of `like`; a batch ends with a list of errors, whose images are black."""

    def __init__(self, paths: list[str], like: Any) -> None:
        self.paths, self._files = paths, like.of_files(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        none = self._files.__getitems__([])
        parts, errors = [none], []
        for key in keys:
            try:
                parts.append(self._files.__getitems__([key]))
                errors.append(None)
            except RunError as problem:
                parts.append([tensor.new_zeros(1, *tensor.shape[1:]) for tensor in none])
                errors.append(str(problem))
        return *map(torch.cat, zip(*parts, strict=True)), errors


def _samples(folder: str | None, data: Data) -> tuple[Dataset, list[str]]:
    if folder is None:
        return data.eval, []
    if hasattr(data.eval, "of_folder"):
        return cast(Any, data.eval).of_folder(folder), []
    skipped = Skipped()
    found = _images_of(folder, skipped)
    if not hasattr(data.eval, "of_files"):
        raise ConfigError(f"predict_on={folder}: this data set reads no image files; {_EXPECTED}")
    return _Files(found, data.eval), skipped_note(f"predict_on={folder}", skipped)


_EXPECTED = f"expected files of {', '.join(IMAGE_ENDINGS)}, and a data set of such files"


def _images_of(folder: str, skipped: Skipped | None = None) -> list[str]:
    found = sorted(images_below(Path(folder), skipped))
    if not found:
        raise ConfigError(f"predict_on={folder}: has no images; {_EXPECTED}")
    return found
