"""A Hydra sweeper that searches with Optuna, and survives being killed at any moment.

The study lies in `<sweep>/optuna.journal`. What a trial tries is a function of (seed, number of the trial, trials
before it), so a search that was killed and continued tries what an undisturbed one would have tried. A trial that had
begun and has no result is run again with the same values, so with the same run folder: it resumes from its last
checkpoint.

Hydra imports this module at every start, in a way in which annotations cannot be text; Optuna is imported when it is
used.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


@dataclass
class OptunaConf:
    """Keys of `hydra/sweeper=optuna`; conf/hydra/sweeper/optuna.yaml has their values."""

    _target_: str = "hydra_plugins.amp_recipes.optuna_sweeper.OptunaSweeper"
    num_trials: int = 20
    sampler: str = "tpe"
    num_startup: int = 10
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="optuna_types", node=OptunaConf, provider="amp_recipes")

STATES = {"COMPLETE": "finished", "PRUNED": "diverged", "FAIL": "failed", "RUNNING": "unfinished"}


class OptunaSweeper(Sweeper):
    """Asks Optuna for values, has the launcher run them, tells Optuna what came out."""

    def __init__(self, num_trials: int, sampler: str, num_startup: int, seed: int, params: DictConfig | None) -> None:
        self.num_trials, self.sampler, self.num_startup, self.seed = num_trials, sampler, num_startup, seed
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self._config = config
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)  # which glob asks for options
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the search to its end.

        Raises:
            ConfigError: Optuna is missing, there is nothing to search, or the folder holds another search.
            RunError: no trial finished.
        """
        from amp_core.cli.sweep import asked_to_stop
        from amp_core.config.errors import ConfigError, RunError
        from amp_core.run.terminal import say

        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("hydra/sweeper=optuna: Optuna is not installed: pip install -c constraints.txt optuna")
        if self.sampler not in ("tpe", "random"):
            raise ConfigError(f"hydra.sweeper.sampler={self.sampler}: expected tpe or random")
        given = self._parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        overrides = {override.get_key_element(): override for override in given}  # the command line wins
        space = {key: distribution(override) for key, override in overrides.items() if override.is_sweep_override()}
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna: nothing to search; give a key several values, as in "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))' accumulation=1,2,4"
            )
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        study = self._open(folder, overrides, space)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        while batch := self._next_trials(study, space):
            if asked_to_stop(folder):
                break
            self._run(study, batch, overrides, space, folder)
        self._tell_all(study, folder)
        if not asked_to_stop(folder) and not any(trial.state.name == "COMPLETE" for trial in study.trials):
            raise RunError(f"{folder}: no trial finished; the error of each is above")
        say(f"results: {folder / 'optimization_results.yaml'}")

    def _open(self, folder: Path, overrides: dict[str, Override], space: dict[str, Any]) -> Any:
        """The study of the folder: a new one, or the one that is there."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        from amp_core.config.errors import ConfigError
        from amp_core.config.files import read_bytes

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = folder / "optuna.journal"
        best_is = str(self._config.recipe.best_is)
        try:
            if path.exists():  # of a search that may have been killed in the middle of a line, or while it had the file
                content = read_bytes(path, 1 << 30)
                if not content.endswith(b"\n"):
                    with open(path, "r+b") as file:
                        file.truncate(content.rfind(b"\n") + 1)
                Path(f"{path}.lock").unlink(missing_ok=True)
            study = optuna.create_study(
                study_name="search",
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(path))),
                direction="maximize" if best_is == "max" else "minimize",
                load_if_exists=True,
            )
        except Exception as problem:  # the reader of the journal raises many kinds
            raise ConfigError(
                f"{path}: cannot be read as a search: {problem}; move it away, or choose another folder"
            ) from problem
        this = {
            "metric": f"{self._config.recipe.best}, {best_is}",
            "sampler": f"{self.sampler}, {self.num_startup} at random, seed {self.seed}",
            **{
                key: (override.input_line or "").partition("=")[2]
                for key, override in overrides.items()
                if key not in ("device", "log")
            },
        }
        there = study.user_attrs.get("settings")
        if there is None:
            study.set_user_attr("settings", this)
        elif there != this:
            changed = [
                f"{key}: {there.get(key, 'not given')} -> {this.get(key, 'not given')}"
                for key in sorted(there.keys() | this.keys())
                if there.get(key) != this.get(key)
            ]
            raise ConfigError(
                [f"hydra.sweep.dir={folder} holds another search; choose another folder, or its settings", *changed]
            )
        return study

    def _next_trials(self, study: Any, space: dict[str, Any]) -> list[Any]:
        """Trials to run at the same time: those that have no result first. Each gets all of its values here."""
        import numpy as np
        import optuna

        trials = study.get_trials(deepcopy=False)
        parallel = self._num_parallel()
        found = [optuna.trial.Trial(study, t._trial_id) for t in trials if t.state.name == "RUNNING"][:parallel]
        number = len(trials)
        for trial in found:
            self._suggest(trial, space)  # those of a trial that was killed half-way; others keep what they have
        while len(found) < parallel and number < self.num_trials:
            entropy = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
            study.sampler = (
                optuna.samplers.RandomSampler(seed=entropy)
                if self.sampler == "random"
                else optuna.samplers.TPESampler(
                    n_startup_trials=self.num_startup, constant_liar=parallel > 1, seed=entropy
                )
            )
            trial = study.ask()
            self._suggest(trial, space)
            found.append(trial)
            number += 1
        return found

    def _num_parallel(self) -> int:
        from amp_core.cli.compose import parallel_jobs

        launcher = self._config.hydra.runtime.choices["hydra/launcher"]
        return parallel_jobs(launcher, self._config.hydra.launcher) or 1

    @staticmethod
    def _suggest(trial: Any, space: dict[str, Any]) -> None:
        for key, values in space.items():
            trial._suggest(key, values)

    def _run(
        self, study: Any, batch: Sequence[Any], overrides: dict[str, Override], space: dict[str, Any], folder: Path
    ) -> None:
        from amp_core.cli.run_folders import sweep_subdir
        from amp_core.cli.sweep import read_record

        jobs: dict[str, list[str]] = {}
        folder_of = {}
        for trial in batch:
            settings = [
                f"{key}={trial.params[key]}" if key in space else f"{key}={override.get_value_element_as_str()}"
                for key, override in overrides.items()
            ]
            folder_of[trial.number] = sweep_subdir(folder, settings)
            jobs[folder_of[trial.number]] = settings  # two trials with the same values are one run
            trial.set_user_attr("folder", folder_of[trial.number])
        self.launcher.launch(list(jobs.values()), initial_job_idx=batch[0].number)
        for trial in batch:
            record = read_record(folder, folder_of[trial.number])
            if record is None or record.status in ("not started", "preempted"):
                continue  # it resumes when the search does
            trial.set_user_attr("seconds", record.seconds)
            if record.status == "finished" and record.value is not None:
                study.tell(trial.number, record.value)
            else:
                trial.set_user_attr("error", record.error)
                # A diverged trial is the worst there is, and Optuna learns from it; a crash says nothing about values.
                study.tell(trial.number, state=_state("PRUNED" if record.status == "diverged" else "FAIL"))

    def _tell_all(self, study: Any, folder: Path) -> None:
        """Print the table of trials and write optimization_results.yaml."""
        from amp_core.run.lines import write_text
        from amp_core.run.terminal import say

        trials = study.get_trials(deepcopy=False)
        finished = [trial for trial in trials if trial.state.name == "COMPLETE"]
        best = study.best_trial if finished else None
        metric = str(self._config.recipe.best)
        rows = [["trial", *trials[0].params, metric, "seconds", ""]] if trials else []
        for trial in trials:
            shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.params.values()]
            value = f"{trial.value:.4f}" if trial.state.name == "COMPLETE" else STATES[trial.state.name]
            seconds = f"{trial.user_attrs.get('seconds') or 0:.1f}"
            mark = "best" if best is not None and trial.number == best.number else ""
            rows.append([str(trial.number), *shown, value, seconds, mark])
        widths = [max(map(len, column)) for column in zip(*rows, strict=False)]
        for row in rows:
            say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
        counts = {
            word: sum(trial.state.name == state for trial in trials) for state, word in STATES.items()
        }  # in the words of summary.json
        say(", ".join(f"{count} {word}" for word, count in counts.items() if count) + f" of {self.num_trials} trials")
        results: dict[str, Any] = {
            "metric": metric,
            "best_is": str(self._config.recipe.best_is),
            "best": None,
            "num_trials": self.num_trials,
            **counts,
            "trials": [
                {
                    "number": trial.number,
                    "state": STATES[trial.state.name],
                    "value": trial.value if trial.state.name == "COMPLETE" else None,
                    "overrides": [f"{key}={value}" for key, value in trial.params.items()],
                    **trial.user_attrs,
                }
                for trial in trials
            ],
        }
        if best is not None:
            chosen = [f"{key}={value}" for key, value in best.params.items()]
            results["best"] = {"number": best.number, "value": best.value, "overrides": chosen}
            say(f"best: {metric} {best.value:.4f} with {' '.join(chosen)}")
        write_text(folder / "optimization_results.yaml", OmegaConf.to_yaml(OmegaConf.create(results)))


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def distribution(override: Override) -> Any:
    """What Optuna draws a key from: `a,b,c`, `range(1,5)`, `interval(0.1,1)`, `int(interval(1,8))`, `tag(log,...)`.

    Raises:
        ConfigError: Optuna cannot draw from it.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from amp_core.config.errors import ConfigError

    value: Any = override.value()
    try:
        if isinstance(value, IntervalSweep):
            kind = IntDistribution if isinstance(value.start, int) else FloatDistribution
            return kind(value.start, value.end, log="log" in value.tags)  # type: ignore[arg-type]
        if isinstance(value, RangeSweep):
            numbers: Any = value.range()
            kind = IntDistribution if isinstance(numbers, range) else FloatDistribution
            numbers = numbers if isinstance(numbers, range) else list(numbers)
            return kind(numbers[0], numbers[-1], step=value.step)  # type: ignore[arg-type]
    except (ValueError, IndexError) as problem:
        raise ConfigError(f"{override.input_line}: {problem}") from problem
    return CategoricalDistribution(list(override.sweep_string_iterator()))
