"""Reports claim what the seeds show and no more, read whatever lies in a folder, and prune nothing but what may go."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from xml.etree import ElementTree

import pytest
from omegaconf import OmegaConf
from shared import script

from amp_core.cli.compose import compose
from amp_core.cli.run_folders import stored_config
from amp_core.config.rules import flatten
from amp_tools.report.folders import find_runs, read_curves, read_run
from amp_tools.report.groups import make_study
from amp_tools.report.page import html_page
from amp_tools.report.significance import compare, holm, judge, t_quantile, t_two_sided
from amp_tools.report.text import as_dict, left_out, markdown
from amp_tools.report.words import metric_words

SEED = 918273
CONFIGS: dict[tuple[str, ...], str] = {}


def make_run(folder, *overrides, seed=1, value=0.97, speed=1000.0, status="finished", steps=60, error=None, **summary):
    """A run folder with real settings; the numbers are made up."""
    if overrides not in CONFIGS:
        values = compose([*overrides, "device=cpu", f"seed={SEED}"])
        CONFIGS[overrides] = OmegaConf.to_yaml(OmegaConf.create(values))
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIGS[overrides].replace(str(SEED), str(seed)))
    about = {"status": status, "exit_code": 0, "step": steps, "eval": {"loss": 0.2, "accuracy": value}, "device": "cpu"}
    about |= {"samples_per_second": speed, "peak_memory_bytes": 4e8, "skipped": 0, "seconds": 9.0, "error": error}
    (folder / "summary.json").write_text(json.dumps(about | summary))
    lines = []
    for step in range(10, steps + 1, 10):
        lines.append({"step": step, "split": "train", "loss": 3 / step, "loss_scale": 2.0**16, "skipped": 0})
        lines.append({"step": step, "split": "eval", "loss": 3 / step, "accuracy": value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def study_of(folder, **options):
    notes = []
    study = make_study([read_run(path) for path in find_runs([folder], notes)], **options)
    study.notes += notes
    return study


def sweep(folder, values, **options):
    """Runs by mode: {"fp32": [values by seed], ...}."""
    for mode, found in values.items():
        for seed, value in enumerate(found, 1):
            speed = (2000.0 if mode == "bf16" else 1000.0) * (1 + 0.002 * seed)
            make_run(folder / f"{mode}_{seed}", f"amp={mode}", seed=seed, value=value, speed=speed, **options)
    return folder


def test_tests_and_intervals_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(0)
    for _ in range(100):
        df, t = draw.choice([1, 2, 3, 4.7, 9, 30, 1000.5]), 40 * draw.random() ** 3
        assert t_two_sided(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-7, abs=1e-300)
        assert t_quantile(0.05, df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    assert (t_quantile(0.05, 1), t_quantile(0.05, 1e7)) == pytest.approx((12.7062, 1.95996), abs=1e-4)
    a = {seed: draw.gauss(1.0, 0.1) for seed in range(6)}
    b = {seed: draw.gauss(1.1, 0.3) for seed in range(6)}
    for name, test, options in (
        ("paired t-test", stats.ttest_rel, {}),
        ("Welch's t-test", stats.ttest_ind, {"equal_var": False}),
    ):
        ours, other = compare("a", a, "b", b), test(list(a.values()), list(b.values()), **options)
        assert (ours.test, ours.p) == (name, pytest.approx(other.pvalue, rel=1e-9))
        assert (ours.low, ours.high) == pytest.approx(tuple(other.confidence_interval()), rel=1e-9)
        b[7] = 1.4
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])


OFTEN = 36
"""Out of 500 sweeps 25 may be wrong; by chance more than this many are in one of a hundred tests."""


def claims(gap, *, digits=None, rate=500, noise=0.002, seeds=5, margin=0.004):
    """What is said of two groups beside a reference, in many sweeps; both are `gap` better than it."""
    draw = random.Random(2026)
    for _ in range(rate):
        means = (0.9, 0.9 + gap, 0.9 + gap)
        groups = [{seed: round(draw.gauss(mean, noise), digits or 12) for seed in range(seeds)} for mean in means]
        yield judge([compare("g", group, "r", groups[0], margin=margin, better="max") for group in groups[1:]])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(
    "gap, digits, wrong", [(0.0, None, "better worse"), (0.0, 3, "better worse"), (0.004, None, "equal identical")]
)
def test_at_most_one_sweep_in_twenty_claims_a_difference_or_an_equality_that_is_not_there(gap, digits, wrong, seeds):
    found = list(claims(gap, digits=digits, seeds=seeds))
    assert sum(any(c.kind in wrong.split() for c in sweep) for sweep in found) <= OFTEN
    # Without the adjustment, and with p > 0.05 taken for equal, both would be said far too often.
    naive = [[c.p for c in sweep if c.p is not None] for sweep in claims(gap, seeds=3 if gap else 5, margin=None)]
    assert sum(any((p > 0.05) if gap else (p < 0.05) for p in sweep) for sweep in naive) > (250 if gap else OFTEN)


def test_what_is_there_is_found():
    assert sum(all(c.kind == "better" for c in sweep) for sweep in claims(0.02, rate=100)) > 95
    assert sum(all(c.kind == "equal" for c in sweep) for sweep in claims(0.0, seeds=20, rate=100)) > 95
    for c in next(iter(claims(0.0, seeds=3, noise=0.1))):
        assert c.kind == "not settled" and c.seeds_needed is not None and c.seeds_needed > 100


def values_with(mean, spread, count):
    """Numbers by seed with exactly this mean and standard deviation."""
    raw = [(-1.0) ** i * (1 + i // 2) for i in range(count)]
    centre, size = statistics.fmean(raw), statistics.stdev(raw)
    return {seed: mean + spread * (value - centre) / size for seed, value in enumerate(raw)}


@pytest.mark.parametrize(
    "difference", [0.0, 0.001, 0.002, 0.0035, 0.006]
)  # within the margin, near its middle, beyond it
@pytest.mark.parametrize("spread, comparisons, paired", [(0.003, 1, True), (0.004, 3, True), (0.004, 1, False)])
def test_the_seeds_that_a_verdict_asks_for_settle_it(difference, spread, comparisons, paired):
    def judged(count):
        found = values_with(difference, spread, count)
        others = values_with(0.0, spread, count)
        others = dict.fromkeys(found, 0.0) if paired else {seed + 100: value for seed, value in others.items()}
        about = {"margin": 0.004, "better": "max"}
        return judge([compare("g", found, "r", others, **about) for _ in range(comparisons)])[0]  # type: ignore[arg-type]

    first = judged(3)
    assert (
        first.kind == "not settled"
        and f"about {first.seeds_needed} seeds each would tell" in metric_words(first, "x")[0]
    )
    assert first.seeds_needed is not None and 3 < first.seeds_needed < 1000
    assert judged(first.seeds_needed).kind in ("equal", "better")
    assert first.seeds_needed == 4 or judged(first.seeds_needed - 1).kind == "not settled"


THREE = {1: 0.97, 2: 1.1, 3: 2.3}
SHIFTED = {seed: value + 0.001 for seed, value in THREE.items()}  # a t-test would find a t of some 10^13


@pytest.mark.parametrize(
    "values, others, expected",
    [
        (SHIFTED, THREE, ("not settled", "sign test", 0.25, 6)),
        (dict(THREE), THREE, ("identical", None, None, None)),
        (dict.fromkeys((1, 2, 3), 0.9), dict.fromkeys((4, 5, 6), 0.8), ("not settled", None, None, None)),
        ({1: 0.9, 2: 0.9}, THREE, ("too few seeds", None, None, None)),
    ],
)
def test_what_is_left_of_rounding_and_too_few_seeds_are_no_evidence(values, others, expected):
    assert len({SHIFTED[seed] - THREE[seed] for seed in THREE}) > 1
    [c] = judge([compare("a", values, "b", others, margin=0.01, better="max")])
    assert (c.kind, c.seeds_needed) == (expected[0], expected[3])
    assert expected[1] is None or c.test == expected[1]
    assert c.kind == "identical" or c.p == expected[2]


def test_a_sweep_is_answered_in_a_sentence(tmp_path):
    fp32 = [0.9700, 0.9712, 0.9691, 0.9705, 0.9698]
    noise = [0.0004, -0.0003, 0.0006, -0.0005, 0.0001]
    bf16 = [a + b for a, b in zip(fp32, noise, strict=True)]
    fp16 = [a - 0.02 + b for a, b in zip(fp32, noise, strict=True)]
    study = study_of(sweep(tmp_path, {"fp32": fp32, "bf16": bf16, "fp16": fp16}))
    [section] = study.sections
    assert study.headline == "bf16 trains 2.00× as fast as fp32, with accuracy equal within ±0.0049."
    equal, worse = section.sentences
    assert re.fullmatch(
        r"bf16: 2.00× as fast as fp32 \(95 % interval \[.*\]\); accuracy equal within ±0.0049 \(difference \+0.00006, "
        r"95 % interval \[−0.0\d+, \+0.0\d+\], p = 0.79 \(Holm 0.79\), n = 5 seeds each, paired t-test\)\.",
        equal,
    )
    assert "accuracy worse by 0.0199" in worse and "p < 0.001" in worse
    page = html_page(study, [tmp_path])
    assert study.headline in page and page.count("<svg") > 5
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert all(ElementTree.fromstring(picture).tag == "svg" for picture in pictures)  # well-formed
    assert all("var(--c1)" in picture for picture in pictures)  # the page's colours, light or dark, and no others
    assert not re.search(r"(?:fill|stroke): (?!var|none)|<g id=|xmlns", "".join(pictures))
    assert "**bf16 trains" in markdown(study) and "| `fp16` | 5 | 0.9502" in markdown(study)
    plain = json.loads(json.dumps(as_dict(study), allow_nan=False))
    assert plain["sections"][0]["groups"][2]["difference"]["kind"] == "worse"


def test_published_verdicts_are_those_of_the_report(tmp_path):
    results = script("scripts/results.py")
    draw = random.Random(5)
    fp32 = [draw.gauss(0.97, 0.002) for _ in range(10)]
    values = {"fp32": fp32, "bf16": [a + draw.gauss(0, 0.001) for a in fp32], "fp16": [a - 0.02 for a in fp32[::-1]]}
    [section] = study_of(sweep(tmp_path, values)).sections
    runs = [{"group": m, "seed": seed, "value": v} for m, found in values.items() for seed, v in enumerate(found, 1)]
    assert results.verdicts("parity_x", {"runs": runs, "better": "max"}) == section.differences
    assert [c.kind for c in section.differences.values()] == ["equal", "worse"]


def test_too_few_seeds_lost_runs_and_one_seed_run_twice_are_said(tmp_path):
    sweep(tmp_path, {"fp32": [0.97, 0.971], "bf16": [0.98, 0.981]})
    make_run(tmp_path / "lost", "amp=bf16", seed=3, status="diverged", exit_code=5, error="30 steps in a row")
    for copy in range(4):
        make_run(tmp_path / f"copy{copy}", "amp=bf16", seed=1, value=0.98)
    study = study_of(tmp_path)
    [section] = study.sections
    assert study.headline == "Too few seeds to tell: run at least three of each."
    assert section.differences["bf16"].kind == "too few seeds"
    assert "Of its 7 runs, 1 diverged: not part of the comparison." in section.sentences[0]
    assert any("more than once" in warning for warning in section.warnings)
    assert any("exit code 5: 30 steps in a row" in line for line in left_out(study))
    assert "30 steps in a row" in html_page(study, [tmp_path])


def test_what_is_varied_besides_makes_sections_and_what_is_mixed_up_is_warned_of(tmp_path):
    for rate in ("0.001", "0.01"):
        for mode in ("fp32", "bf16"):
            for seed in (1, 2, 3):
                place = tmp_path / "grid" / f"{rate}_{mode}_{seed}"
                make_run(place, f"amp={mode}", f"optimizer.lr={rate}", seed=seed, value=0.9 + seed / 1000)
    study = study_of(tmp_path / "grid")
    assert {section.title for section in study.sections} == {"optimizer.lr=0.001", "optimizer.lr=0.01"}
    assert all(section.differences["bf16"].kind == "identical" for section in study.sections)
    by_rate = study_of(tmp_path / "grid", by=["optimizer.lr"])
    assert {section.title for section in by_rate.sections} == {"fp32", "bf16"}

    for mode, size in (("fp32", 32), ("bf16", 64)):
        for seed in (1, 2, 3):
            make_run(tmp_path / "mixed" / f"{mode}_{seed}", f"amp={mode}", f"batch_size={size}", seed=seed)
    [section] = study_of(tmp_path / "mixed").sections
    assert any("also differ in batch_size" in warning for warning in section.warnings)


def test_settings_read_in_pieces_are_those_read_whole(tmp_path):
    folder = make_run(tmp_path / "run", "recipe=language_model", "amp=fp16", "amp.keep_fp32=['*.norm']")
    path = folder / ".hydra" / "config.yaml"
    places = ["outputs/a/2026-01-31_12-00-00-123", "/tmp/a=1,b-3f", "./a", "../b/1", "a/b.c", "1/2", "'a/b'", "a/", "x"]
    for place in places:
        path.write_text(re.sub(r"(?m)^run_dir: .*$", f"run_dir: {place}", path.read_text()))
        assert read_run(folder).config == flatten(stored_config(folder) or {})
    for more in ("", "x:\n- 1\n- {a: b}\n", 'y: "two\n\n  lines"\n', "# of\nz: {a: {b: [1, '&c']}}\n"):
        path.write_text(path.read_text() + more)
        assert read_run(folder).config == flatten(stored_config(folder) or {})
    path.write_text("a: 1\na: 2\n")
    assert "duplicate" in " ".join(read_run(folder).problems)


HOSTILE = {
    "truncated": lambda f: (f / "summary.json").write_text('{"status": "fin'),
    "empty": lambda f: [
        path.write_text("") for path in (f / "summary.json", f / "metrics.jsonl", f / ".hydra/config.yaml")
    ],
    "no_summary": lambda f: (f / "summary.json").unlink(),
    "nan": lambda f: (f / "summary.json").write_text(
        '{"status": "finished", "eval": {"accuracy": NaN}, "step": 1e999}'
    ),
    "deep": lambda f: (f / "summary.json").write_text("[" * 100_000),
    "strings": lambda f: (f / "summary.json").write_text('{"status": ["x"], "eval": "y", "error": 7, "step": "z"}'),
    "code": lambda f: (f / ".hydra" / "config.yaml").write_text(
        "amp: !!python/object/apply:os.system ['touch pwned']\n"
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_folder_is_named_and_harms_nothing(name, tmp_path, own_folder):
    HOSTILE[name](make_run(tmp_path / "runs" / name, "amp=bf16", seed=9))
    sweep(tmp_path / "runs", {"fp32": [0.97], "bf16": [0.98]})
    started = time.process_time()
    study = study_of(tmp_path / "runs")
    page, text, lines = html_page(study, [tmp_path]), markdown(study), left_out(study)
    assert time.process_time() - started < 5
    assert len(study.runs) == 3 and "too few seeds" in text and not (tmp_path / "pwned").exists()
    assert any(f"runs/{name}:" in line for line in lines) and f">{name}</a>" in page


def test_links_files_and_what_is_no_run_are_passed_over(tmp_path):
    runs = tmp_path / "runs"
    make_run(runs / "a", "amp=bf16")
    (runs / "loop").symlink_to(runs)
    (runs / "link").symlink_to(runs / "a")
    (runs / "file").write_text("")
    (runs / "multirun.yaml").write_text("")
    (runs / "never_began").mkdir()
    (runs / ".jobs").mkdir()  # a sweep's records
    (runs / ".submitit").mkdir()
    notes = []
    assert find_runs([runs, runs / "a", runs / "file"], notes) == [runs / "a"]
    notes = sorted(re.sub(r".*/runs/(\w+): (\w+ \w+).*", r"\1: \2", note) for note in notes)
    assert notes == ["file: a file", "link: a link", "loop: a link", "never_began: a job"]


def test_damaged_lines_are_counted_and_the_others_read(tmp_path):
    folder = make_run(tmp_path / "run", "amp=bf16")
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n{"step": 70, "split": "train", "lo\nnull\n{"step": 70, "split": "train", "loss": NaN}\n')
        file.write(b'{"step": 80, "split": "train", "loss": 1' + b"0" * 5_000_000 + b"}\n")
        file.write(b'{"step": 90, "split": "train", "loss": 0.5}\n{"step": 91, "split": "tr')
    run = read_run(folder)
    curves = read_curves(run, ["loss"])
    assert [step for step, _ in curves.train["loss"]] == [10, 20, 30, 40, 50, 60, 90]
    assert (curves.damaged, run.problems[-1]) == (4, "metrics.jsonl: 4 damaged lines")
    few = read_curves(run, ["loss"], most=4)
    assert few.thinned and few.train["loss"][0][0] == 10 and few.train["loss"][-1][0] == 90
