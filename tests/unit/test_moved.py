"""Imports of before version 0.2 find what is in their place now, and say what to write instead."""

import importlib
import subprocess
import sys

import pytest

import amp_core
from amp_core import moved


@pytest.mark.parametrize("old", sorted(set(moved.MODULES) - {"config"}))
def test_a_module_that_moved_is_found_where_it_was(old):
    sys.modules.pop(f"amp_core.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"amp_core\.{old} is amp_"):
        module = importlib.import_module(f"amp_core.{old}")
    for home in moved.MODULES[old]:
        now = importlib.import_module(home if home.startswith("amp_tools") else f"amp_core.{home}")
        own = (
            []
            if hasattr(now, "__path__")
            else [n for n, v in vars(now).items() if getattr(v, "__module__", None) == now.__name__ and n[0] != "_"]
        )
        assert all(getattr(module, name) is getattr(now, name) for name in own)
    with pytest.raises(AttributeError, match=f"module 'amp_core.{old}' has no attribute 'nonsense'"):
        _ = module.nonsense


@pytest.mark.parametrize("old, new", [("Micro", "MicroBatch"), ("trainable", "master_params")])
def test_a_public_name_that_changed_is_what_it_is_called_now(old, new):
    with pytest.warns(DeprecationWarning, match=rf"amp_core.{old} is amp_core.{new} now; .* until version 0.3"):
        assert getattr(amp_core, old) is getattr(amp_core, new)


def test_the_configuration_is_found_in_its_package_and_by_old_names():
    from amp_core.config import schema

    with pytest.warns(DeprecationWarning, match=r"amp_core.config.Config is amp_core.config.schema.Config"):
        from amp_core.config import Config  # pyright: ignore[reportAttributeAccessIssue]
    assert Config is schema.Config
    with pytest.warns(DeprecationWarning, match="schema.suggest"):
        from amp_core.config import nearest  # pyright: ignore[reportAttributeAccessIssue]
    assert nearest is schema.suggest


def test_renamed_names_are_found_in_a_module_that_was_divided():
    sys.modules.pop("amp_core.shards", None)
    with pytest.warns(DeprecationWarning, match=r"amp_core.shards is amp_core.layouts.fsdp or amp_core.tensors"):
        from amp_core.shards import is_part, whole  # pyright: ignore[reportMissingImports]
    from amp_core.tensors import full_tensor, is_dtensor

    assert (is_part, whole) == (is_dtensor, full_tensor)


def test_a_name_that_never_was_is_an_error_still():
    with pytest.raises(ModuleNotFoundError, match=r"amp_core\.nonsense"):
        importlib.import_module("amp_core.nonsense")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = amp_core.nonsense


def test_nothing_of_ours_uses_an_old_name():
    """Whatever imports an old name in this suite fails, since warnings are errors; so does a start of the program."""
    done = subprocess.run(
        [sys.executable, "-W", "error:.*works until version 0.3:DeprecationWarning", "train.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
