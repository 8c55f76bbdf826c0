"""Saves in the background: what was there when `save` returned, on disk when `wait` says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpointing import FORMATS, Parts
from running import differing
from shared import names
from test_sharded_checkpoint import checkpoint_of, training_in

from amp_core import Checkpoint
from amp_core.checkpoints import plain_state, sharded
from amp_core.checkpoints.reading import read
from amp_core.config.errors import SaveError

OnRanks = Callable[..., list[Any]]


class Held:
    """Holds the writing of a save until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        serialise = plain_state.serialise

        def held(contents: dict[str, Any]) -> memoryview:
            self.began.set()
            assert self.go.wait(30)
            return serialise(contents)

        monkeypatch.setattr(plain_state, "serialise", held)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "not copied"])
def test_what_is_saved_is_what_was_there_when_save_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, is_copied: bool
) -> None:
    held, parts = Held(monkeypatch), Parts(1.0)
    if not is_copied:
        monkeypatch.setattr(plain_state.Copies, "copy", lambda self, tensor: tensor)
    if format == "sharded":  # its weights are written before its state
        write_shards = sharded._write_shards
        monkeypatch.setattr(
            sharded, "_write_shards", lambda *args: (held.began.set(), held.go.wait(30), write_shards(*args))[-1]
        )
    checkpoint = parts.checkpoint(tmp_path, format=format, background=True)
    for step in (1, 2):  # the second one in the buffers of the first
        held.go.clear(), held.began.clear()
        checkpoint.save(step)
        expected = copy.deepcopy(parts.state())
        assert held.began.wait(30)
        for param in parts.net.parameters():
            param.data.add_(1.0)
        parts.optimizer.step()
        held.go.set()
        checkpoint.wait()
        live = Parts()
        assert live.checkpoint(tmp_path).load().step == step  # type: ignore[union-attr]
        assert bool(differing(expected, live.state())) != is_copied


def addresses(checkpoint: Checkpoint) -> set[int]:
    """Of the memory that is kept for the next save."""
    assert checkpoint._copies is not None
    return {tensor.data_ptr() for kept in checkpoint._copies._free.values() for tensor in kept}


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_counts_when_it_is_on_disk_and_the_next_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    held, parts = Held(monkeypatch), Parts(1.0)
    caplog.set_level("INFO", "amp_recipes")
    checkpoint = parts.checkpoint(tmp_path, format=format, background=True, keep=1)
    held.go.set()
    checkpoint.save(1)
    checkpoint.wait()
    held.go.clear()
    checkpoint.save(2)
    assert held.began.wait(30)
    assert [name for name in names(tmp_path) if not name.startswith(".tmp")] == ["step_00000001"]
    assert caplog.messages == ["the checkpoint of step 1 is on disk"]
    threading.Timer(0.05, held.go.set).start()
    checkpoint.save(3)
    assert (tmp_path / "step_00000002").exists()
    assert checkpoint.load().step == 3  # type: ignore[union-attr] - it waits, too
    assert names(tmp_path) == ["step_00000003"]
    assert checkpoint.newest_before(9) == (3, tmp_path / "step_00000003")
    buffers = addresses(checkpoint)
    checkpoint.save(4)
    checkpoint.wait()
    assert buffers == addresses(checkpoint)


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_that_fails_in_the_background_is_an_error_of_the_next_call_once(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "c"
    checkpoint = Parts(1.0).checkpoint(folder, format=format, background=True)
    for act in (checkpoint.wait, lambda: checkpoint.save(2)):
        folder.touch()
        checkpoint.save(1)
        with pytest.raises(SaveError, match=r"cannot save .*c/step_00000001: .*Earlier checkpoints are intact"):
            act()
        checkpoint.wait()
        folder.unlink()
    checkpoint.save(3)
    checkpoint.wait()
    assert names(folder) == ["step_00000003"]
    with pytest.raises(ValueError, match=r"config.here is a type"):
        checkpoint.save(4, config={"here": int})


def train_in_background(rank: int, folder: str) -> list[Any]:
    """Saves in a thread between the collectives of training; the same without a thread."""
    found = []
    for background in (True, False):
        training = training_in("fsdp", "bf16")
        checkpoint = checkpoint_of(training, f"{folder}/{background}", "sharded", background=background, keep=9)
        windows = []
        for step in range(1, 7):
            windows.append(training.window())
            checkpoint.save(step)
        checkpoint.wait()
        found.append([windows, training.values()])
    return found


def test_saving_in_the_background_changes_no_number(tmp_path: Path, on_ranks: OnRanks) -> None:
    for with_thread, without in on_ranks(train_in_background, str(tmp_path / "c")):
        assert not differing(with_thread, without)
    for step in range(1, 7):
        a, b = (read(tmp_path / "c" / way / f"step_0000000{step}") for way in ("True", "False"))
        assert not differing(a, b)
