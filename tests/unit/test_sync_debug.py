"""The mode in which torch tells of waits is set without its own warning, and reset however the region ends.

In a CUDA build of torch the real functions are called, which need no GPU. A CPU build has none: there a stand-in warns and
stores the mode in the order of the real one.
"""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch

from amp_core.memory.sync_debug import noted_waits, sync_debug

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mode(monkeypatch):
    """A function that tells the present mode: 0, 1 or 2. torch warns at each call that sets it, not only at the first."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    if hasattr(torch._C, "_cuda_set_sync_debug_mode"):
        before = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        yield torch._C._cuda_get_sync_debug_mode
        torch.set_warn_always(before)
        return
    state = [0]

    def set_mode(mode):
        state[0] = mode  # C++ collects the warning, and hands it over when it returns
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", set_mode, raising=False)
    yield lambda: state[0]


@pytest.mark.parametrize("name, number", [("warn", 1), ("error", 2)])
def test_a_region_has_the_mode_and_ends_without_it(mode, name, number):
    with sync_debug(name):
        assert mode() == number
    assert mode() == 0
    with pytest.raises(ZeroDivisionError), sync_debug(name):
        raise ZeroDivisionError
    assert mode() == 0


def _wait():
    warnings.warn("called a synchronizing CUDA operation", stacklevel=2)  # as torch does where it waits


def test_waits_are_noted_where_they_happen_and_nothing_else_is(mode):
    """Under filterwarnings=error, as here: the region runs to its end. Another thread may wait."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with noted_waits() as waits:
            assert mode() == 1
            _wait()
            thread = threading.Thread(target=_wait)
            thread.start()
            thread.join()
            warnings.warn("something else", stacklevel=1)
            for _ in range(2):
                _wait()
    assert mode() == 0
    assert len(waits) == 3 and all(re.fullmatch(r"test_sync_debug\.py:\d+", wait) for wait in waits)
    assert waits[1] == waits[2] != waits[0]
    assert [str(warning.message) for warning in shown] == ["something else"]
