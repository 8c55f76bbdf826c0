"""Nothing outside the run folder is written or deleted, and no key or password reaches a file or the terminal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from running import checkpoints, same_but, state
from small import RUN
from test_recipes import arguments
from tiers import rows

import train
from amp_core.checkpoints.checkpoint import Checkpoint
from amp_core.checkpoints.reading import read
from amp_core.config.redact import known_secrets, redact, secrets_in
from amp_core.run.locks import lock_folder

SMALL = [*RUN, "save_every=1", "eval_every=1000", "amp=bf16", "steps=3"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def everything(folder):
    """Every path below a folder, links not followed, with what a file holds."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sorted(Path(folder).rglob("*"))
    }


def refused(capsys, *overrides):
    """The message of a refused command line, after which all is as it was."""
    before = everything("..")
    assert train.main([*SMALL, *overrides]) == 2 and everything("..") == before
    return capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", [[], ["checkpoint=sharded"], ["checkpoint.background=true"]])
def test_a_folder_that_is_moved_while_a_run_writes_there_ends_it(checkpoint, monkeypatch, capsys):
    """It does not go on in a second folder with the old name."""
    save = Checkpoint.save

    def saved_and_moved(self, step, **about):
        found = save(self, step, **about)
        if step == 1:
            self.wait()
            Path("run").rename("moved")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", saved_and_moved)
        assert train.main([*SMALL, *checkpoint, "run_dir=run"]) == 4
    assert "run_dir=run: the folder or its .lock was moved" in capsys.readouterr().err
    assert not Path("run").exists()
    assert [path.name for path in checkpoints(Path("moved"))] == ["step_00000001"]
    assert train.main([*SMALL, *checkpoint, f"run_dir={os.path.abspath('moved')}"]) == 0


@pytest.mark.parametrize("place", rows(["", " ", "~", "~/", "/", "//", "/usr/..", "$HOME"], "~/", "/usr/.."))
@pytest.mark.parametrize("key", ["run_dir", "hydra.sweep.dir"])
def test_a_place_that_is_no_folder_for_runs_is_refused(key, place, capsys, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place = place.replace("$HOME", str(tmp_path / "home"))
    sweep = ["-m", "seed=1,2"] if key.startswith("hydra") else []
    assert key in refused(capsys, *sweep, f"{key}='{place}'")


@pytest.mark.timeout(60)
def test_a_place_where_no_folder_can_be_made_ends_the_run(capsys, monkeypatch):
    """As in /proc: the error is that of a folder which another process has just removed, but at each try."""

    def refuse(path, *arguments, **options):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        assert train.main([*SMALL, "run_dir=x"]) == 4
    assert "run_dir=x: cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", rows(["train.log", "checkpoints/model.pt", ".hydra/config.yaml", ".lock", "summary.json"], "train.log")
)
def test_files_of_somebody_else_are_not_changed(name, capsys):
    path = Path("theirs", name)
    path.parent.mkdir(parents=True)
    path.write_text("job: {name: theirs}\n")
    assert path.relative_to("theirs").parts[0] in refused(capsys, "run_dir=theirs")


OF_OTHERS = {  # where a link leads: a file, a folder, itself, nowhere; what begins so lies among the checkpoints
    "file": "step_5 step_00000098 ._step_00000002 .DS_Store .nfs000000000012 notes.txt metrics.jsonl~ summary.json.bak",
    "folder": "step_abc step_ step_-1 step_00000097 step_00000007.tmp lost+found checkpoints.old .git plots",
    "loop": "step_loop step_00000099 loop",
    "nowhere": "step_00000096 best",
}
AMONG_CHECKPOINTS = ("step_", ".", "best")


@pytest.mark.parametrize(
    "checkpoint", rows([[], ["checkpoint=sharded", "checkpoint.background=true"]], [], single=True)
)
def test_files_of_others_are_left_alone_and_change_no_run(checkpoint):
    """Beside a run and among its checkpoints, before it is resumed."""
    command, mine = [*SMALL, *checkpoint, "schedule.horizon=5"], []
    assert train.main([*command, "run_dir=whole", "steps=5"]) == 0 == train.main([*command, "run_dir=mixed"])
    for kind, names in OF_OTHERS.items():
        for name in names.split():
            path = Path("mixed", "checkpoints" if name.startswith(AMONG_CHECKPOINTS) else ".", name)
            if kind == "folder":
                path.mkdir()
                path /= "precious"
            path.write_text("mine") if kind in ("file", "folder") else path.symlink_to(name if kind == "loop" else kind)
            mine.append(path)
    before = everything("mixed")
    assert train.main([*command, "run_dir=mixed", "steps=5"]) == 0
    after = everything("mixed")
    assert len(mine) == 22 and [path for path in mine if after[path] != before[path]] == []
    for path in mine:
        path.unlink()
    assert not same_but(read("whole"), read("mixed"))


@pytest.mark.parametrize(
    "name", rows([".hydra", ".lock", "doctor", "metrics.jsonl", "samples", "summary.json", "train.log"], "summary.json")
)
def test_nothing_is_written_through_a_link(name, capsys, tmp_path):
    Path("run").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    Path("run", name).symlink_to(tmp_path / "theirs")
    assert f"{name} is a link" in refused(capsys, "run_dir=run")


def test_a_lock_is_not_opened_through_a_link(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    Path(".lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        lock_folder(Path())
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.slow
def test_pruning_removes_links_and_not_what_they_lead_to(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("precious")
    folder = Path("run/checkpoints")
    assert train.main([*SMALL, "run_dir=run"]) == 0
    # The oldest is a link to a copy elsewhere, another has a link inside; both are due to be pruned.
    oldest, newer = checkpoints("run")
    os.rename(oldest, theirs / "step")
    oldest.symlink_to(theirs / "step")
    (newer / "link").symlink_to(theirs)
    before = everything(theirs)
    # Names like those of our temporary folders, and one that is.
    dead = 2**22 + 1
    for name in (f".tmp-mine-{dead}", f".tmp-step_1-{dead}", "step_1", "step_x", f"tmp-step_00000001-{dead}"):
        (folder / name).mkdir()
    (folder / f".tmp-step_00000001-{dead}").symlink_to(theirs)
    (folder / f".tmp-old-step_00000001-{dead}").mkdir()
    (folder / f".tmp-old-step_00000001-{dead}" / "link").symlink_to(theirs)
    assert train.main([*SMALL, "run_dir=run", "steps=6"]) == 0 and everything(theirs) == before
    assert [path.name for path in checkpoints("run") if path.name.startswith("step_0")] == [
        "step_00000005",
        "step_00000006",
    ]
    left = {path.name for path in folder.iterdir()} - {"step_00000005", "step_00000006"}
    assert left == {f".tmp-mine-{dead}", f".tmp-step_1-{dead}", "step_1", "step_x", f"tmp-step_00000001-{dead}"}


def test_a_folder_of_checkpoints_may_lie_elsewhere(tmp_path):
    (tmp_path / "large").mkdir()
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to(tmp_path / "large")
    assert train.main([*SMALL, "run_dir=run"]) == 0
    assert state("run")["progress"]["step"] == 3 and Checkpoint(tmp_path / "large", writer=False).keep == 2


@pytest.mark.parametrize(
    "override",
    [
        "hydra.job_logging.handlers.x.filename=/tmp/x",
        "hydra.callbacks.x.a=b",
        "hydra.searchpath=[/tmp]",
        "hydra.output_subdir=/tmp",
        "hydra/job_logging=default",
    ],
)
def test_the_rest_of_hydra_is_refused(override, capsys):
    assert override.split("=")[0] in refused(capsys, "-m", "seed=1,2", override)


def test_names_from_a_command_line_stay_in_the_sweep_folder():
    from amp_core.cli.run_folders import sweep_subdir

    for text in ("../../x", "/etc/passwd", "..", "a/../../b", "\0", "." * 300):
        assert Path("s", sweep_subdir("s", [text])).resolve().parent == Path("s").resolve()


def test_usual_settings_hold_no_key():
    from amp_core.cli.overrides import typed_keys

    assert not list(secrets_in({key.rpartition(".")[2]: "0123456789abcdef" for key in typed_keys()}))
    text = '{"loss_per_token": 2.345678901, "num_tokens": 12345678, "tokens": "abcdefghij"}'
    assert redact(text) == text


def test_keys_are_found_where_they_belong(monkeypatch, tmp_path):
    for name in [name for name in os.environ if known_secrets() and os.environ[name] in known_secrets()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password from-netrc\n")
    (tmp_path / "settings").write_text("[default]\napi_key = from-settings\n")
    monkeypatch.setenv("HF_TOKEN", "from-environment")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-false")
    monkeypatch.setenv("MY_KEY", "short")
    assert set(known_secrets()) == {"from-netrc", "from-settings", "from-environment"}
    assert redact("a from-netrc b from-environment https://u:p@h/x") == "a *** b *** https://***@h/x"
    assert redact("wandb_key=0123456789abcdef seed=123456789") == "wandb_key=*** seed=123456789"


@pytest.mark.parametrize("recipe", ["language_model", "diffusion", "gan"])
def test_samples_that_cannot_be_written_end_a_run_with_4(recipe, monkeypatch, capsys):
    """As with any other file of a run: a message and no traceback, and the checkpoint of the step before."""

    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("amp_core.run.samples.write_whole", fails)
    command = arguments(recipe, "steps=2", "save_every=1", "eval_every=2", "run_dir=run")
    assert train.main([text for text in command if not text.startswith("recipe.sample_tokens")]) == 4
    said = capsys.readouterr().err
    assert "cannot save " in said and f"{os.strerror(errno.EIO)} (" in said and "Traceback" not in said
    assert checkpoints("run")
