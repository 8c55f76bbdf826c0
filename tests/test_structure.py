"""Dependencies point one way, the public surface is what it says, and no table of the documentation is out of date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core
from recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "amp_core").rglob("*.py"))
RECIPE_FILES = sorted((ROOT / "recipes").glob("*.py"))


def imports(path):
    """Top-level packages (and amp_core or recipes modules in full) that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def importers_of(package):
    return {path.name for path in CORE + RECIPE_FILES if any(name.split(".")[0] == package for name in imports(path))}


def test_the_core_imports_no_recipe_and_a_recipe_imports_no_recipe():
    assert not [path.name for path in CORE if any(name.split(".")[0] in ("recipes", "train") for name in imports(path))]
    lessons = [ROOT / f"{module.replace('.', '/')}.py" for module in RECIPES.values()]
    assert not [path.name for path in lessons if any(name.split(".")[0] == "recipes" for name in imports(path))]


def test_libraries_have_one_door_each():
    assert importers_of("hydra") == {"compose.py"}
    assert importers_of("omegaconf") <= {"compose.py", "config.py", "environment.py"}
    assert importers_of("wandb") <= {"log.py"}
    assert importers_of("tensorboard") <= {"log.py"}
    assert importers_of("torchvision") <= {"vision.py"}


@pytest.mark.parametrize(
    "module", ["amp_core", "amp_core.config", "amp_core.compose", "amp_core.help", "amp_core.checks", "train"]
)
def test_what_help_needs_imports_no_torch(module):
    code = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_public_name_can_be_imported_and_is_documented():
    for name in amp_core.__all__:
        assert getattr(amp_core, name).__doc__, name
    code = "import amp_core.window, amp_core.loop; from amp_core import windows; assert callable(windows)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_architecture_page_lists_every_module():
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    listed = set(re.findall(r"^      ([\w/]+\.py) ", page, re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "amp_core").as_posix() for path in CORE if path.name != "__init__.py"}


def test_the_readme_lists_every_recipe_and_every_mode():
    readme = (ROOT / "README.md").read_text()
    for name in RECIPES:
        assert f"[{name}](recipes/{name}.py)" in readme
    for mode in (ROOT / "conf" / "amp").glob("*.yaml"):
        assert f"| `{mode.stem}` |" in readme
