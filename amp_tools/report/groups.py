"""Groups of runs, and their comparison in words.

    study = make_study(runs)            # what differs between the runs decides what is compared
    study.headline, study.sections[0].sentences

Runs that differ in nothing but the seed are a *group*. Groups that differ in nothing but what is compared (`by`, by
default the mode) are in one *section*, so a sweep over modes and learning rates compares the modes at each rate.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from amp_core.config.errors import ConfigError, suggest
from amp_tools.report.folders import Run, is_ours
from amp_tools.report.significance import Comparison, compare, judge
from amp_tools.report.words import brief, counted, digits_for, metric_words, speed_words, spread

IRRELEVANT = ("seed", "run_dir", "resume", "allow_changes", "task", "predict_on", "dry_run", "max_minutes", "log")
IRRELEVANT += ("save_every", "eval_every", "eval.at_start", "log_every", "checkpoint", "data.num_workers", "doctor")
"""Settings, with what lies below them, that make no group: results do not depend on them."""
REFERENCES = ("fp32", "o0", "tf32", "bf16")
FIRST = ("recipe.name", "model.name", "data.name", "optimizer.name")
"""What a section is called by, when these tell it from others."""

GOOD = ("equal", "identical", "better")


@dataclass
class Group:
    """Runs with the same settings but for the seed."""

    label: str
    settings: tuple[Any, ...]
    runs: list[Run] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)
    """The metric by seed, of finished runs; a mean where a seed was run twice."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Samples per second by seed."""

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def speed(self) -> float | None:
        """Samples per second: the geometric mean of the seeds, so that two of these have the ratio that is claimed."""
        return statistics.geometric_mean(self.speeds.values()) if self.speeds else None

    @property
    def memory(self) -> float | None:
        """Bytes: the largest peak."""
        return max((peak for run in self.finished if (peak := run.count("peak_memory_bytes"))), default=None)

    @property
    def skipped(self) -> int:
        return int(sum(run.count("skipped") or 0 for run in self.finished))

    @property
    def lost(self) -> Counter[str]:
        """How many ended otherwise, or still run."""
        return Counter(run.status for run in self.runs if run.status != "finished")

    @property
    def fate(self) -> str:
        """Which of its runs did not finish; empty when all did."""
        if not self.lost:
            return ""
        total, lost = len(self.runs), ", ".join(f"{count} {status}" for status, count in sorted(self.lost.items()))
        if total == 1:
            return f" Its only run is no part of the comparison: {next(iter(self.lost))}."
        return f" Of its {total:,} runs, {lost}: not part of the comparison."


@dataclass
class Section:
    """Groups that differ in what is compared, and in nothing else."""

    title: str
    groups: list[Group]
    metric: str
    better: Literal["max", "min"] | None
    reference: Group | None = None
    differences: dict[str, Comparison] = field(default_factory=dict)
    """How the metric differs from the reference's, by label of the group."""
    ratios: dict[str, Comparison] = field(default_factory=dict)
    """The same for the logarithm of the speed."""
    warnings: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """A verdict on each group but the reference, with its statistics."""
        if self.reference is None:
            return []
        found = []
        for group in self.groups:
            if group is not self.reference:
                parts = [f"{claim} ({facts})" for claim, facts in self.claims(group)]
                found.append(f"{group.label}: {'; '.join(parts) or 'nothing to compare yet'}.{group.fate}")
        return found

    def claims(self, group: Group) -> list[tuple[str, str]]:
        """A group compared with the reference: claims, each with its statistics."""
        difference, ratio = self.differences.get(group.label), self.ratios.get(group.label)
        return ([speed_words(ratio)] if ratio else []) + ([metric_words(difference, self.metric)] if difference else [])

    @property
    def headline(self) -> str:
        base = self.reference
        if base is None:
            group = max(self.groups, key=lambda g: len(g.values), default=None)
            if group is None or not group.values:
                return "No run has finished yet."
            return f"{self.metric} {spread(list(group.values.values()))} over {counted(len(group.values), 'seed')}."
        good = [label for label, c in self.differences.items() if c.kind in GOOD]
        faster = [label for label in good if label in self.ratios and self.ratios[label].kind == "better"]
        if faster:
            fastest = max(self.ratios[label].difference for label in faster)
            alike = [label for label in faster if fastest - self.ratios[label].difference < 0.03]
            speeds = " and ".join(dict.fromkeys(f"{math.exp(self.ratios[label].difference):.2f}×" for label in alike))
            train = "trains" if len(alike) == 1 else "train"
            same = "; ".join(dict.fromkeys(self._as_good(label) for label in alike))
            return f"{_listed(alike)} {train} {speeds} as fast as {base.label}, {same}."
        better = [label for label in good if self.differences[label].kind == "better"]
        if better:
            label = max(better, key=lambda name: abs(self.differences[name].difference))
            return f"{label} is no faster than {base.label}, but its {self.metric} is better."
        kinds = {c.kind for c in self.differences.values()}
        if not kinds:
            return (
                f"Nothing can be compared yet: no finished runs beside {base.label}."
                if base.values
                else "No run has finished."
            )
        if kinds == {"too few seeds"}:
            return "Too few seeds to tell: run at least three of each."
        if kinds <= {"not settled", "too few seeds"}:
            return f"Not settled: {self.metric} varies too much between seeds to tell the groups from {base.label}."
        if good:
            named = _listed(good)
            are = "is" if len(good) == 1 else "are"
            return f"Stay with {base.label}: {named} {are} as good, and not shown to be faster."
        return f"Stay with {base.label}: nothing else is shown to be as good."

    def _as_good(self, label: str) -> str:
        c = self.differences[label]
        if c.kind == "identical":
            return f"with the same {self.metric} on every seed"
        if c.kind == "better":
            return f"and its {self.metric} is better"
        assert c.margin is not None
        return f"with {self.metric} equal within ±{c.margin:.{digits_for(c.margin)}f}"


@dataclass
class Study:
    """All that a report says."""

    sections: list[Section]
    by: list[str]
    differing: dict[str, list[Any]]
    """Settings with more than one value, and their values."""
    left_out: list[Run]
    """Runs that belong to no group."""
    runs: list[Run]
    notes: list[str] = field(default_factory=list)
    margin: str = ""

    @property
    def num_comparisons(self) -> int:
        return sum(c.p is not None for section in self.sections for c in section.differences.values())

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        going = sum(run.status == "running" for run in self.runs)
        compared = [section for section in self.sections if section.differences] or self.sections
        text = compared[0].headline if len(compared) == 1 else _headline_of_many(compared)
        if len(compared) < len(self.sections) and len(compared) == 1:
            text = f"{compared[0].title}: {text}"
        return f"So far, with {counted(going, 'run')} still going: {text}" if going else text


def _headline_of_many(sections: list[Section]) -> str:
    if not sections:
        return "No runs to report on."
    kinds: dict[str, list[str]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for section in sections:
        for label, c in section.differences.items():
            kinds[label].append(c.kind)
            if label in section.ratios:
                ratios[label].append(math.exp(section.ratios[label].difference))
    bases = {section.reference.label for section in sections if section.reference and section.differences}
    base = bases.pop() if len(bases) == 1 else "the reference"
    parts = []
    for label, found in sorted(kinds.items(), key=lambda item: -len(item[1]))[:3]:
        good, bad = sum(kind in GOOD for kind in found), sum(kind == "worse" for kind in found)
        text = f"{label} is shown to be as good as {base} in" if not parts else f"{label} in"
        text += f" {good} of {len(found)}" + (" settings" if not parts else "") + (f", worse in {bad}" if bad else "")
        parts.append(text + (f" ({statistics.median(ratios[label]):.2f}× as fast)" if ratios[label] else ""))
    return "; ".join(parts) + "." if parts else f"{counted(len(sections), 'setting')}, nothing to compare within them."


def _listed(labels: Sequence[str]) -> str:
    return " and ".join(labels) if len(labels) < 4 else f"{len(labels)} groups"


# --- groups -----------------------------------------------------------------------------------------------------------


def make_study(
    runs: Sequence[Run],
    *,
    by: Sequence[str] = (),
    metric: str | None = None,
    reference: str | None = None,
    margin: str = "0.5%",
) -> Study:
    """Group runs and compare them. ConfigError: there is no such setting, group or margin.

    Args:
        by: settings whose values are compared; nothing: the mode if it differs, else everything that does.
        metric: default: what each recipe calls best.
        reference: label of the group that the others are compared with; default: the most exact mode.
        margin: the largest difference that counts as equal: a number, or a percentage of the reference's mean.
    """
    check_margin(margin)
    ours, left_out = [run for run in runs if is_ours(run)], [run for run in runs if not is_ours(run)]
    results = sorted({name for run in ours for name in run.evaluation})
    if metric is not None and results and metric not in results:
        raise ConfigError(f"--metric {metric}: no run has such a result. {suggest(metric, results)}")
    differing = differing_settings(ours)
    keys = _keys_of(by, ours) if by else ["amp.name"] if "amp.name" in differing else list(differing)
    names = keys + _belonging(keys, differing, ours)
    splits = _splits(names, differing, ours)
    places: dict[tuple[str, ...], dict[tuple[str, ...], Group]] = defaultdict(dict)
    for run in ours:
        settings = tuple(run.config.get(name) for name in names)
        place = tuple(repr(run.config.get(name)) for name in splits)
        group = places[place].setdefault(tuple(map(repr, settings)), Group(_label(names, settings, keys), settings))
        group.runs.append(run)
    sections = []
    for groups in places.values():
        first = next(iter(groups.values())).runs[0]
        title = ", ".join(_setting(name, first.config.get(name)) for name in splits)
        sections.append(_section(title, list(groups.values()), metric, reference, margin, names))
    labels = {group.label for section in sections for group in section.groups}
    if reference is not None and reference not in labels:
        raise ConfigError(f"--reference {reference}: there is no such group. {suggest(reference, sorted(labels))}")
    for kind in ("differences", "ratios"):  # two families: what is claimed of the metric, and of the speed
        pairs = [(found, label) for section in sections for found in [getattr(section, kind)] for label in found]
        for (found, label), judged in zip(pairs, judge([found[label] for found, label in pairs]), strict=True):
            found[label] = judged
    return Study(sections, keys, differing, left_out, list(runs), margin=margin)


def differing_settings(runs: Sequence[Run], irrelevant: Iterable[str] = IRRELEVANT) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, and their values, in order of their appearance."""
    dropped = tuple(irrelevant)
    keys = {key: None for run in runs for key in run.config}
    found: dict[str, list[Any]] = {}
    for key in keys:
        if key in dropped or key.startswith(tuple(f"{name}." for name in dropped)):
            continue
        first = runs[0].config.get(key)
        if all(run.config.get(key) is first for run in runs):  # what was parsed once is one object
            continue
        values = {repr(run.config.get(key)): run.config.get(key) for run in runs}
        if len(values) > 1:
            found[key] = list(values.values())
    return found


def _keys_of(by: Sequence[str], runs: Sequence[Run]) -> list[str]:
    known = {key for run in runs for key in run.config}
    keys = []
    for key in by:
        full = key if key in known else f"{key}.name"
        if full not in known and runs:
            raise ConfigError(f"--by {key}: there is no such setting. {suggest(key, sorted(known))}")
        keys.append(full)
    return keys


def _values(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(run.config.get(key)) for key in keys)


def _follows(key: str, keys: Sequence[str], runs: Sequence[Run]) -> bool:
    """Whether a setting has one value for each choice of the others."""
    seen: dict[tuple[str, ...], str] = {}
    return all(
        seen.setdefault(_values(run, keys), repr(run.config.get(key))) == repr(run.config.get(key)) for run in runs
    )


def _belonging(keys: list[str], differing: dict[str, list[Any]], runs: Sequence[Run]) -> list[str]:
    """Settings of the same group of the configuration that make groups of their own, such as amp.init_scale."""
    found: list[str] = []
    for key in differing:
        beside = any("." in name and key.startswith(name.rpartition(".")[0] + ".") for name in keys)
        if beside and key not in keys and not _follows(key, keys + found, runs):
            found.append(key)
    return found


def _splits(names: list[str], differing: dict[str, list[Any]], runs: Sequence[Run]) -> list[str]:
    """Settings that make sections: those that are varied besides what is compared, as few as tell them apart."""
    found: list[str] = []
    order = sorted(differing, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    for key in order:
        if key not in names and not _follows(key, names + found, runs):
            found.append(key)
    return found


def _setting(key: str, value: Any) -> str:
    return str(value) if key.endswith(".name") else f"{key}={brief(value)}"


def _label(names: Sequence[str], settings: Sequence[Any], keys: Sequence[str]) -> str:
    parts = []
    for name, value in zip(names, settings, strict=True):
        if name in keys:
            parts.append(str(value) if name.endswith(".name") else f"{name.rpartition('.')[2]}={brief(value)}")
        elif value is not None:
            parts.append(f"{name.rpartition('.')[2]}={brief(value)}")
    return ", ".join(parts) or "all"


def _section(
    title: str, groups: list[Group], metric: str | None, reference: str | None, margin: str, names: list[str]
) -> Section:
    runs = [run for group in groups for run in group.runs]
    metrics = sorted({metric or run.best or "loss" for run in runs})
    sides = {run.config.get("recipe.best_is") for run in runs}
    better = sides.pop() if len(metrics) == 1 and metric in (None, runs[0].best) and len(sides) == 1 else None
    section = Section(title, groups, " or ".join(metrics), better if better in ("max", "min") else None)
    for group in groups:
        found: dict[int, list[Run]] = defaultdict(list)
        for run in group.finished:
            seed = run.config.get("seed")
            found[seed if isinstance(seed, int) else -1].append(run)
        if any(len(several) > 1 for several in found.values()):
            section.warnings.append(
                f"{group.label}: some seeds were run more than once; each counts once, with its mean"
            )
        for seed, several in found.items():
            values = [value for run in several if (value := run.result(metric)) is not None]
            speeds = [speed for run in several if (speed := run.count("samples_per_second")) and speed > 0]
            group.values |= {seed: statistics.fmean(values)} if values else {}
            group.speeds |= {seed: statistics.fmean(speeds)} if speeds else {}
    groups.sort(key=lambda group: _rank(group))
    section.reference = _reference(groups, reference)
    section.warnings += _warnings(section, names)
    if section.reference is None or len(metrics) > 1:
        return section
    base = section.reference
    width = margin_of(margin, statistics.fmean(base.values.values())) if base.values else 0.0
    for group in groups:
        if group is base:
            continue
        if group.values and base.values:
            about = group.label, group.values, base.label, base.values
            section.differences[group.label] = compare(*about, margin=width, better=section.better)
        if group.speeds and base.speeds:
            logs = [{seed: math.log(speed) for seed, speed in g.speeds.items()} for g in (group, base)]
            section.ratios[group.label] = compare(
                group.label, logs[0], base.label, logs[1], better="max", may_pair=False
            )
    return section


def _rank(group: Group) -> tuple[Any, ...]:
    name = group.label.partition(",")[0]
    order = ["fp32", "tf32", "bf16", "fp16"]
    numbers = [value if isinstance(value, int | float) else 0 for value in group.settings]
    return order.index(name) if name in order else len(order), numbers, group.label


def _reference(groups: list[Group], wanted: str | None) -> Group | None:
    if len(groups) < 2:
        return None
    by_label = {group.label: group for group in groups}
    for label in (wanted,) if wanted else REFERENCES:
        if label in by_label and (wanted or by_label[label].finished):
            return by_label[label]
    return None if wanted else max(groups, key=lambda group: len(group.values))


def margin_of(text: str, mean: float) -> float:
    """The margin in units of the metric."""
    return abs(mean) * float(text[:-1]) / 100 if text.endswith("%") else float(text)


def check_margin(text: str) -> None:
    """ConfigError: it is no margin."""
    try:
        if 0 < margin_of(text, 1.0) < math.inf:
            return
    except ValueError:
        pass
    raise ConfigError(f"--margin {text}: expected a number above 0 such as 0.002, or a percentage such as 0.5%")


def _warnings(section: Section, names: Sequence[str]) -> list[str]:
    runs = [run for group in section.groups for run in group.runs]
    found = []
    prefixes = tuple(name.rpartition(".")[0] + "." for name in names if "." in name)
    others = [key for key in differing_settings(runs) if key not in names and not key.startswith(prefixes or ("\0",))]
    if len(section.groups) > 1 and others:
        named = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
        found.append(f"the groups also differ in {named}: what is compared is not the only cause of a difference")
    for what, values in (
        ("devices", {_device(run) for run in runs if run.status == "finished"}),
        ("versions of torch", {_torch(run) for run in runs if run.status == "finished"}),
    ):
        if len(values - {""}) > 1:
            found.append(f"the runs have different {what} ({', '.join(sorted(values - {''}))}): do not compare speeds")
    seeds = {group.label: set(group.values) for group in section.groups if group.values}
    everything = set().union(*seeds.values())
    missing = {label: sorted(everything - own) for label, own in seeds.items() if own != everything}
    if missing:
        each = "; ".join(f"{label}: {', '.join(map(str, absent[:10]))}" for label, absent in list(missing.items())[:8])
        found.append(f"seeds that other groups have finished and these have not: {each}")
    return found


def _device(run: Run) -> str:
    device = run.environment.get("device")
    if not isinstance(device, dict) or not device.get("type"):
        return str(run.summary.get("device") or "")
    return f"{device['type']} ({device['name']})" if device.get("name") else str(device["type"])


def _torch(run: Run) -> str:
    versions = run.environment.get("versions")
    return str(versions.get("torch", "")) if isinstance(versions, dict) else ""


def made_on(runs: Sequence[Run]) -> str:
    """Where the runs were made: devices and versions of torch."""
    devices, versions = sorted({_device(run) for run in runs} - {""}), sorted({_torch(run) for run in runs} - {""})
    return "; ".join([*devices[:4], *(f"torch {version}" for version in versions[:4])])
