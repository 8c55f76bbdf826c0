"""What others add without touching our files, and the program and the library as they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from amp_core.config import options
from amp_core.config.options import CONFIG_DIR, choices

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4", "model.options.width=8"]
SMALL += ["device=cpu", "log=none", "batch_size=8", "steps=2"]

pytestmark = pytest.mark.usefixtures("own_folder")


def write_own(folder):
    """A recipe, a mode and an experiment of somebody's own."""
    for group in ("recipe", "amp", "experiment"):
        (folder / group).mkdir(parents=True)
    recipe = (ROOT / "conf" / "recipe" / "classification.yaml").read_text()
    (folder / "recipe" / "mine.yaml").write_text(recipe.replace("name: classification", "name: mine"))
    shutil.copy(ROOT / "recipes" / "classification.py", folder / "recipe" / "mine.py")
    mode = (ROOT / "conf" / "amp" / "fp16.yaml").read_text()
    (folder / "amp" / "half.yaml").write_text(mode.replace("name: fp16", "name: half"))
    sweep = "hydra: {sweeper: {params: {seed: '1,2'}}}"
    text = f"# @package _global_\n# Mine.\ndefaults:\n  - override /recipe: mine\n{sweep}\n"
    (folder / "experiment" / "both.yaml").write_text(text)
    return folder


def own_run(*arguments):
    assert train.main([*arguments, "recipe=mine", "amp=half", "run_dir=a", *SMALL]) == 0
    summary = json.loads(Path("a/summary.json").read_text())
    assert (summary["status"], summary["amp"]) == ("finished", "half")


def test_recipes_and_options_of_a_config_dir_run_sweep_and_are_explained(own_folder, capsys):
    own = write_own(own_folder / "conf")
    own_run("--config-dir", str(own))
    assert train.main(["--config-dir=conf", "-m", "experiment=both", "hydra.sweep.dir=s", *SMALL]) == 0
    assert "2 of 2 jobs finished" in capsys.readouterr().out
    assert train.main(["--config-dir=conf", "--help", "recipe", "amp=half"]) == 0
    assert "mine" in capsys.readouterr().out
    os.environ[CONFIG_DIR] = ""
    assert train.main(["recipe=mine"]) == 2 and "no such option" in capsys.readouterr().err


def test_an_installed_package_brings_recipes_by_an_entry_point(own_folder, monkeypatch):
    write_own(own_folder / "lib" / "my_project" / "conf")
    info = own_folder / "lib" / "my_project-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_project\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[amp_recipes]\nmine = my_project.conf\n")
    with monkeypatch.context() as installed:
        installed.syspath_prepend(own_folder / "lib")
        options._installed_dirs.cache_clear()
        own_run()
    options._installed_dirs.cache_clear()
    sys.modules.pop("my_project", None)
    assert "half" not in choices("amp")


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda own: shutil.rmtree(own), "there is no such folder"),
        (lambda own: [shutil.rmtree(folder) for folder in list(own.iterdir())], "holds no option of a group"),
        (lambda own: shutil.copy(own / "recipe/mine.py", own / "recipe/gan.py"), "has the name of our recipe gan"),
        (lambda own: shutil.copy(own / "amp/half.yaml", own / "amp/fp16.yaml"), "has the name of"),
        (lambda own: (own / "recipe/mine.yaml").write_text("a: [1"), "mine.yaml"),
        (lambda own: (own / "recipe/mine.py").write_text("import nothing_of_this_name"), "nothing_of_this_name"),
        (lambda own: (own / "recipe/mine.py").write_text("DATA = 'images'"), "it has no Knobs, no MODELS, no run"),
        (lambda own: os.mkfifo(own / "experiment/pipe.yaml"), "pipe.yaml: is a pipe, expected a file"),
        (lambda own: (own / "amp/lost.yaml").symlink_to("nothing"), "lost.yaml: is a link, expected a file"),
        (lambda own: (own / "recipe/mine.py").unlink(), "recipe.name=mine: there is no such recipe"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_message(spoil, said, own_folder, capsys):
    spoil(write_own(own_folder / "conf"))
    before = sorted(own_folder.rglob("*"))
    assert train.main(["--config-dir=conf", "recipe=mine", *SMALL]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("error: ") == 1 and "Traceback" not in err
    assert sorted(path for path in own_folder.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_the_library_imports_torch_and_numpy_and_a_reader_of_yaml_alone():
    code = """
import sys
import torch
before = set(sys.modules)
from amp_core import Amp, Clip, Checkpoint, Ema, Schedule, keep_fp32, sync_grads, windows
from amp_core.config.rules import amp_config
net = torch.nn.Linear(4, 2)
amp = Amp(amp_config("fp16"), torch.device("cpu"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
amp.prepare(net)
with amp.autocast():
    loss = net(torch.randn(3, 4)).square().mean()
amp.backward(loss)
amp.step(optimizer)
amp.update()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.replace("'", '"')))
    assert {"amp_core", "yaml"} <= imported
    heavy = "hydra omegaconf antlr4 torchvision PIL wandb tensorboard matplotlib optuna tqdm".split()  # noqa: SIM905
    assert not imported & set(heavy)


@pytest.mark.slow
def test_the_wheel_holds_all_and_its_program_runs_from_another_folder(own_folder):
    pytest.importorskip("setuptools", "77.0.3")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("needs git to know which files are ours")
    in_image = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    kept = [name for name in names.stdout.split("\n") if name.split("/")[0] in in_image]
    for name in filter(lambda name: (ROOT / name).is_file(), kept):  # as Docker sees them
        (own_folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, own_folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "./source", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheel"]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = Path("wheel").glob("*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", "lib", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    for name in ("amp_core/conf/recipe/gan.yaml", "amp_core/py.typed", "recipes/gan.py", "recipes/py.typed"):
        assert Path("lib", name).is_file()
    assert not Path("lib/train.py").exists()
    shutil.rmtree("source")
    write_own(own_folder / "conf")
    environ = os.environ | {"PYTHONPATH": str(own_folder / "lib")}

    def program(*arguments):
        command = [sys.executable, "lib/bin/amp-recipes", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = program("--help")
    assert "named sets of settings" in shown and "train.py" not in shown
    search = ["hydra/sweeper=optuna", "hydra.sweeper.num_trials=1", "optimizer.lr=interval(0.001,0.01)"]
    assert "1 finished of 1 trials" in program(*SMALL, "-m", *search)
    program(*SMALL, "run_dir=b", "layout=ddp", "layout.nproc_per_node=2", "--config-dir", "conf", "recipe=mine")
    assert json.loads(Path("b/summary.json").read_text())["status"] == "finished"
    ask = 'eval "$(amp-recipes -sc install=bash)"; COMP_LINE="amp-recipes amp=fp1" COMP_POINT=19 COMP_CWORD=1\n'
    ask += 'hydra_bash_completion; complete -p amp-recipes; echo "${COMPREPLY[*]}"'
    on_path = environ | {"PATH": f"{own_folder / 'lib' / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], env=on_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == ["amp=fp16 amp=fp16_capped"], (done.stdout, done.stderr)
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    out = program(*SMALL, "--config-dir", "conf", "-m", "experiment=both", *launcher)
    assert "2 of 2 jobs finished; the report: python -m amp_recipes.scripts.report " in out
    report = [sys.executable, *out.partition("the report: python ")[2].split("\n")[0].split()]
    done = subprocess.run(report, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "over 2 seeds" in done.stdout, (done.stdout, done.stderr)


def test_messages_name_the_program_that_was_called(own_folder, monkeypatch, capsys):
    wrong = ["seeds=1"], ["--seed", "3"], ["--help", "sweep"]
    for argv, name in ((["python", "train.py"], "python train.py"), (["python", "/x/bin/amp-recipes"], "amp-recipes")):
        monkeypatch.setattr(sys, "orig_argv", argv)
        for arguments in wrong:
            train.main(arguments)
        said = "".join(capsys.readouterr())
        other = {"python train.py": "amp-recipes -", "amp-recipes": "train.py"}[name]
        assert said.count(name) > len(wrong) and other not in said


def test_the_command_of_a_checkout_finds_our_sweeper():
    # As an editable installation does it: the packages are known by name, their folder is not on the path.
    known = f"import sys; sys.path.append({str(ROOT)!r}); import amp_core, recipes; sys.path.remove({str(ROOT)!r})"
    code = "sys.argv = ['amp-recipes', '--info', 'plugins']; from amp_core.cli.command import main; main()"
    program = [sys.executable, "-P", "-c", f"{known}; {code}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "OptunaSweeper" in done.stdout, done.stderr
