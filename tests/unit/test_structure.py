"""Dependencies point one way, the public surface is what it says, and no table of the documentation is out of date."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core
from recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted((ROOT / "amp_core").rglob("*.py"))
RECIPE_FILES = sorted((ROOT / "recipes").glob("*.py"))


@functools.cache
def imports(path):
    """Top-level packages (and amp_core or recipes modules in full) that a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return found + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


def importers_of(package):
    return {path.name for path in CORE + RECIPE_FILES if any(name.split(".")[0] == package for name in imports(path))}


def test_the_core_imports_no_recipe_and_a_recipe_imports_no_recipe():
    assert not [path.name for path in CORE if any(name.split(".")[0] in ("recipes", "train") for name in imports(path))]
    lessons = [ROOT / f"{module.replace('.', '/')}.py" for module in RECIPES.values()]
    assert not [path.name for path in lessons if any(name.split(".")[0] == "recipes" for name in imports(path))]


def test_libraries_have_one_door_each():
    assert importers_of("hydra") == {"compose.py", "job.py", "overrides.py", "sweep.py"}
    assert importers_of("omegaconf") == {"compose.py", "folder.py"}
    assert importers_of("wandb") <= {"trackers.py"}
    assert importers_of("tensorboard") <= {"trackers.py"}
    assert importers_of("torchvision") <= {"vision.py"}


def test_what_help_needs_imports_no_torch():
    modules = "amp_core, amp_core.config.schema, amp_core.cli.compose, amp_core.cli.help, amp_core.config.checks"
    code = f"import {modules}, amp_tools.report.page, train, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


START = """
import gc, runpy, sys, torch
sys.argv = ["train.py", "steps=2", "log_every=1", "save_every=1", "run_dir=r"]
try:
    runpy.run_path("ROOT/train.py", run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
assert gc.isenabled() and gc.get_freeze_count()
unused = ["amp_core.lowp.op_policy", "matplotlib", "mlxtend", "pandas", "sympy", "tensorboard", "torch._dynamo", "torch.distributed.tensor", "torchvision", "timm",
          "transformers", "wandb"]
print("imported:", [name for name in unused if name in sys.modules])

# Compiled code may still call them.
optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
optimizer.step()
assert "torch._dynamo" in sys.modules
seen = torch.compile(lambda x: (optimizer.zero_grad(), x + 1)[1], backend="eager")(torch.zeros(1))
assert seen.item() == 1.0
"""


@pytest.mark.slow
def test_a_run_imports_what_it_uses_and_no_compiler(tmp_path):
    """Importing torch's compiler takes as long as importing torch; every optimizer would, when it is made."""
    code = START.replace("ROOT", str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imported: []" in done.stdout


EXECUTES = {"eval", "exec", "compile", "__import__"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
# The campaign makes hostile files, breaks the reader on purpose, and takes a list from its own child.
MAKES_PICKLES = {"tests/support/campaign/files.py", "tests/support/campaign/saves.py"}
LOADS_ANYTHING = {"tests/support/campaign/breaks.py"}


def executing(path):
    """What a file does that could execute what it reads: as `line: what`."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    for node in ast.walk(ast.parse(path.read_text())):
        found = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            is_true = {key for key, value in given.items() if not (isinstance(value, ast.Constant) and not value.value)}
            found += [called] if called in EXECUTES | {"os.system", "os.popen", "torch.jit.load"} else []
            found += [called] if called.split(".")[-1] in ("instantiate", "get_class", "get_method") else []
            found += [called] if called in ("np.load", "numpy.load", "torch.hub.load") else []
            found += [f"{called}({key}=...)" for key in ("shell", "allow_pickle") if key in is_true]
            safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True
            if called == "torch.load" and not safe and name not in LOADS_ANYTHING:
                found.append(f"{called} without weights_only=True")
        elif isinstance(node, ast.Import | ast.ImportFrom) and name not in MAKES_PICKLES:
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if ast.unparse(node) != "from yaml import SafeLoader":  # which makes nothing but plain data
                found += [f"import {module}" for module in modules if (module or "").split(".")[0] in UNSAFE]
        yield from (f"{name}:{node.lineno}: {what}" for what in found)


def test_nothing_that_is_read_can_be_executed():
    files = [*CORE, *RECIPE_FILES, *(ROOT / "scripts").rglob("*.py"), ROOT / "train.py"]
    assert len(files) > 80 and not [found for path in files for found in executing(path)]


HOSTILE = """torch.load(f)
torch.load(f, weights_only=False)
torch.load(f, weights_only=flag)
import pickle
from yaml import load
eval(text)
exec(text)
hydra.utils.instantiate(cfg)
subprocess.run(line, shell=True)
np.load(f, allow_pickle=True)
np.load(f)
os.system(line)"""


def test_what_could_execute_is_seen(tmp_path):
    for code in HOSTILE.splitlines():
        (tmp_path / "code.py").write_text(f"def f():\n    {code}\n")
        assert list(executing(tmp_path / "code.py")), code


def test_every_public_name_can_be_imported_and_is_documented():
    for name in amp_core.__all__:
        assert getattr(amp_core, name).__doc__, name
    code = "import amp_core.step.window, amp_core.run.loop; from amp_core import windows; assert callable(windows)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_readme_lists_every_recipe_and_every_mode():
    readme = (ROOT / "README.md").read_text()
    for name in RECIPES:
        assert f"[{name}](recipes/{name}.py)" in readme
    for mode in (ROOT / "conf" / "amp").glob("*.yaml"):
        assert f"| `{mode.stem}` |" in readme
