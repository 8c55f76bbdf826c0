"""Reports claim what the seeds show and no more, read whatever lies in a folder, and prune nothing but what may go."""

from __future__ import annotations

import fcntl
import html
import json
import math
import os
import random
import re
import statistics
import time
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from omegaconf import OmegaConf
from shared import flip, script

from amp_core.checkpoints import folders as steps
from amp_core.cli.compose import compose
from amp_core.cli.run_folders import stored_config
from amp_core.config.rules import flatten
from amp_tools.report import charts, folders, prune
from amp_tools.report.folders import find, read_curves, read_run
from amp_tools.report.groups import make_study
from amp_tools.report.page import html_page
from amp_tools.report.significance import compare, holm, judge, t_quantile, t_two_sided
from amp_tools.report.table import table
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
    study = make_study([read_run(path) for path in find([folder], notes)], **options)
    study.notes += notes
    return study


def sweep(folder, values, **options):
    """Runs by mode: {"fp32": [values by seed], ...}."""
    for mode, found in values.items():
        for seed, value in enumerate(found, 1):
            speed = (2000.0 if mode == "bf16" else 1000.0) * (1 + 0.002 * seed)
            make_run(folder / f"{mode}_{seed}", f"amp={mode}", seed=seed, value=value, speed=speed, **options)
    return folder


# --- the statistics ---------------------------------------------------------------------------------------------------


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


# --- groups and words -------------------------------------------------------------------------------------------------


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


# --- whatever lies in a folder ----------------------------------------------------------------------------------------


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
    assert find([runs, runs / "a", runs / "file"], notes) == [runs / "a"]
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


EVIL = "<script>alert(1)</script>\x1b[31m\u202e'\"&|"


def test_what_comes_from_outside_is_text(tmp_path):
    sweep(tmp_path, {"fp32": [0.97, 0.98, 0.96], "bf16": [0.98, 0.97, 0.96]})
    folder = tmp_path / EVIL.replace("/", "_")
    make_run(folder, "amp=bf16", seed=4, status=EVIL, error=EVIL, eval={EVIL: 1.0, "accuracy": 1.0})
    named = folder / ".hydra" / "config.yaml"
    named.write_text(named.read_text().replace("name: mlp", "name: cnn") + f"extra: {json.dumps(EVIL)}\n")
    (folder / "doctor").mkdir()
    report = {"step": 1, "cause": EVIL, "module": EVIL, "fixes": [{"override": EVIL}]}
    (folder / "doctor" / "step_00000001.json").write_text(json.dumps(report))
    study = study_of(tmp_path, by=["extra"])
    page = html_page(study, [folder])
    assert "alert(1)" in page and EVIL[:8] not in page and "Content-Security-Policy" in page
    assert not re.search(r"<(script|img|link|iframe|object)|\son\w+=|javascript:|https?://", page)
    for text in (page, markdown(study), "\n".join(left_out(study))):
        assert "\x1b" not in text and "\u202e" not in text
    assert not re.findall(r"&(?!amp;|lt;|gt;|quot;|#x27;|#34;|#39;|apos;)", page)


def test_a_run_that_goes_on_is_shown_so_far(tmp_path):
    sweep(tmp_path, {"fp32": [0.97, 0.971, 0.972], "bf16": [0.97, 0.971, 0.972]})
    folder = make_run(tmp_path / "going", "amp=bf16", seed=4, status="running", step=0)
    assert read_run(folder).status == "stopped"  # nobody holds its lock
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run, study = read_run(folder), study_of(tmp_path)
        assert (run.status, run.count("step")) == ("running", 60)
        page = html_page(study, [tmp_path])
    assert study.headline.startswith("So far, with 1 run still going: ")
    assert "bf16, seed 4: running" in page and "stroke-dasharray" in page


def test_many_runs(tmp_path, capsys):
    draw = random.Random(3)
    sweep(tmp_path, {mode: [draw.gauss(0.97, 0.001) for _ in range(20)] for mode in ("fp32", "bf16", "fp16")})
    out = tmp_path / "out" / "report.html"
    report = script("scripts/report.py")
    assert report.main([str(tmp_path), "--out", str(out), "--json", "--png", str(tmp_path / "png")]) == 0
    assert {path.read_bytes()[:4] for path in (tmp_path / "png").iterdir()} == {b"\x89PNG"}
    assert json.loads(capsys.readouterr().out)["num_runs"] == 60
    assert "60 runs: all finished" in out.read_text() and out.stat().st_size < 300_000
    assert report.main([str(tmp_path), "--by", "amp.nam"]) == 2
    assert "amp.name" in capsys.readouterr().err
    assert report.main([str(tmp_path), "--metric", "acuracy"]) == 2 and "accuracy" in capsys.readouterr().err
    assert report.main([str(tmp_path / "none")]) == 2 == report.main([str(tmp_path), "--margin", "nan"])


def drawn(panel):
    with charts._style("--out"):
        figure, _ = charts._figure(panel)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        axes = figure.axes[0]
        texts = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in axes.texts]
    return axes, texts


def panels():
    """Pictures of numbers large and small, close together and far apart."""
    draw = random.Random(11)
    for scale in ("linear", "log", "log2"):
        for _ in range(15):
            start, width = 10 ** draw.uniform(-3, 7), 10 ** draw.uniform(-6, 4 if scale == "linear" else 6)
            points = [(draw.randint(1, 10**6), start * (1 + width * draw.random())) for _ in range(5)]
            yield charts.LinePanel("t", "n", [charts.Line("fp16", 1, sorted(points))], scale)
    for exponent in (-20, 0, 16, 24):
        points = [(step, 2.0 ** (exponent + step % 2)) for step in range(10)]
        yield charts.LinePanel("t", "n", [charts.Line("fp16", 1, points)], "log2")
        yield charts.LinePanel("t", "n", [charts.Line("fp16", 1, points[::2])], "log2")
    for _ in range(15):
        start, width = draw.choice([0.97, 2.57, 1200.0, 1.0]), 10 ** draw.uniform(-7, 0)
        values = [start * (1 + width * draw.random()) for _ in range(6)]
        rows = [
            charts.Row(f"fp16, init_scale={n}", i, v, f"{v:.4f} ± 0.0011  n = 5", v * 0.99, v)
            for i, (n, v) in enumerate(zip((1, 65536), values, strict=False))
        ]
        rows.append(
            charts.Row(
                "bf16_pure, update=stochastic, keep_fp32=[]", 2, values[-1], "0.9700 ± 0.0026  n = 10", points=values
            )
        )
        yield charts.RowPanel("t", "n", rows, draw.choice([None, values[0]]), draw.choice([None, start * width]))


def test_ticks_have_different_labels_and_no_label_lies_upon_another_or_upon_a_mark_of_its_row():
    for panel in panels():
        axes, texts = drawn(panel)
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            assert not axis.get_visible() or (labels and len(set(labels)) == len(labels)), (labels, panel)
        for i, (text, box) in enumerate(texts):
            assert not [other for other, place in texts[:i] if box.overlaps(place)], text
            if isinstance(panel, charts.RowPanel):
                assert not [line for line in axes.lines if box.overlaps(line.get_window_extent())], text


def test_a_pointer_finds_numbers_and_links_lead_to_the_runs(tmp_path):
    sweep(tmp_path / "runs" / "50% #1?", {"fp32": [0.97, 0.98, 0.96], "bf16": [0.98, 0.97, 0.96]})
    make_run(tmp_path / "runs" / "lost", "amp=bf16", seed=4, status="failed")
    (tmp_path / "pages").mkdir()
    page = html_page(study_of(tmp_path / "runs"), [tmp_path], place=tmp_path / "pages")
    links = re.findall(r'<a class="path" href="([^"]*)" title="([^"]*)">', page)
    assert {html.unescape(title) for _, title in links} == {str(path.parent) for path in tmp_path.rglob("summary.json")}
    for link, title in links:
        assert (tmp_path / "pages" / unquote(link)).resolve() == Path(html.unescape(title))
    titles = re.findall(r"<title>([^<]*)</title>", page)
    assert "step 60\nfp32  0.97  [0.96, 0.98]\nbf16  0.97  [0.96, 0.98]\nbf16, seed 4: failed  0.97" in titles
    assert "fp32: 0.9700 ± 0.0100  n = 3\nseed 1: 0.9700, seed 2: 0.9800, seed 3: 0.9600" in titles
    assert any(text.startswith("bf16: 2.00×\n2.00× as fast as fp32: 95 % interval [") for text in titles)


def test_one_speed_of_a_group_is_told_everywhere_and_two_have_the_ratio_that_is_claimed(tmp_path):
    for mode, speeds in (("fp32", (400.0, 1000.0, 2500.0)), ("bf16", (800.0, 2000.0, 5000.0))):
        for seed, speed in enumerate(speeds, 1):
            make_run(tmp_path / f"{mode}_{seed}", f"amp={mode}", seed=seed, speed=speed)
    study = study_of(tmp_path)
    assert [group.speed for group in study.sections[0].groups] == pytest.approx([1000.0, 2000.0])
    assert study.sections[0].ratios["bf16"].difference == pytest.approx(math.log(2))
    assert "1,000 samples/s, geometric mean" in html_page(study, [tmp_path])
    assert re.search(r"samples/s, geometric mean(.*\n)+\| `fp32` .* 1,000 \|.*\n\| `bf16` .* 2,000 \|", markdown(study))


def test_groups_of_a_picture_have_colours_of_their_own_also_where_references_differ(tmp_path):
    for rate, modes in (("0.1", ("bf16", "fp16")), ("0.01", ("fp32", "bf16", "fp16"))):
        for mode in modes:
            make_run(tmp_path / f"{rate}_{mode}", f"amp={mode}", f"optimizer.lr={rate}")
    pictures = []
    html_page(study_of(tmp_path), [tmp_path], pictures=pictures)
    for panel in pictures:
        about = panel.rows if isinstance(panel, charts.RowPanel) else panel.lines
        assert len({one.colour for one in about}) == len(about)


# --- the list, and pruning --------------------------------------------------------------------------------------------


def test_settings_that_json_has_no_word_for(tmp_path, capsys):
    for seed, value in ((1, "inf"), (2, "nan")):
        make_run(tmp_path / str(seed), f"debug.inject={{where: batch, step: 3, value: {value}}}", seed=seed)

    def refuse(word):
        raise AssertionError(word)

    for name in ("report", "runs"):
        assert script(f"scripts/{name}.py").main([str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_runs_are_listed_picked_and_compared(tmp_path, capsys):
    sweep(tmp_path, {"fp32": [0.97, 0.99], "bf16": [0.98, 0.96]})
    runs = script("scripts/runs.py")

    def say(*arguments):
        assert runs.main([*arguments]) == 0
        return capsys.readouterr().out

    where = ["--where", "amp=bf*", "status=finished", "eval.accuracy>=0.96", "--sort", "-result", "--json"]
    assert [run["result"] for run in json.loads(say(str(tmp_path), *where))] == [0.98, 0.96]
    lines = say(str(tmp_path), "--columns", "amp,optimizer.lr,model,result", "--sort", "seed").splitlines()
    assert lines[0].split() == ["amp", "optimizer.lr", "model", "result"] and len(lines) == 5
    assert lines[1].split() == ["bf16", "0.002", "cnn", "0.9800"]
    rows = [["finished", "a" * 40 + "/" + "b" * 40]]
    [_, line] = table(["status", "folder"], rows, 40)
    assert len(line) == 40 and re.fullmatch(r"finished  a+…b+", line)
    assert table(["status", "folder"], rows, None)[1][-1] == "b"
    text = say("compare", str(tmp_path / "fp32_1"), str(tmp_path / "bf16_1"))
    assert re.search(r"amp.dtype +float32 +bfloat16", text) and re.search(r"speed +1,002 +2,004 +2.00x", text)
    for bad in (["--where", "amp.nam=bf16"], ["--where", "step>x"], ["--sort", "stepp"], ["nowhere"]):
        arguments = bad if bad == ["nowhere"] else [str(tmp_path), *bad]
        assert runs.main(arguments) == 2 and capsys.readouterr().err.startswith("error: ")


def test_runs_are_found_where_the_readme_puts_them(tmp_path, own_folder, capsys):
    for place in ("outputs", "multirun", "runs", "elsewhere"):
        make_run(tmp_path / place / "a", "amp=bf16")
    assert script("scripts/runs.py").main(["--columns", "folder"]) == 0
    assert capsys.readouterr().out.split() == ["folder", "multirun/a", "outputs/a", "runs/a"]


def test_what_no_two_runs_share_is_not_parsed_again(tmp_path):
    """A YAML parser takes a millisecond for a line; 20,000 runs have 20,000 folders."""
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, "amp=bf16")
        path = folder / ".hydra" / "config.yaml"
        path.write_text(re.sub(r"(?m)^run_dir: .*$", f"run_dir: outputs/{name}", path.read_text()))
    assert read_run(tmp_path / "a").config["run_dir"] == "outputs/a"
    before = folders._parsed.cache_info().misses
    assert read_run(tmp_path / "b").config["run_dir"] == "outputs/b"
    assert folders._parsed.cache_info().misses == before


def old(folder):
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return folder


def snapshot(folder):
    return {str(path): path.stat().st_size if path.is_file() else None for path in folder.rglob("*")}


def checkpoint(folder, step, accuracy):
    place = folder / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True)
    (place / "state.pt").write_bytes(bytes(1000))
    files = {"state.pt": steps.digest_of([bytes(1000)])}
    about = {"format": 1, "step": step, "files": files, "metrics": {"accuracy": accuracy}}
    (place / "manifest.json").write_bytes(steps.encode(about))


def test_prune_takes_old_runs_without_a_result_and_nothing_else(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "runs"
    gone = make_run(root / "failed", "amp=bf16", status="failed")
    (gone / "samples").symlink_to(outside)
    checkpoint(gone, 10, 0.5)
    (gone / "checkpoints" / "step_00000010" / "deep").symlink_to(outside)
    mixed = make_run(root / "diverged_with_notes", "amp=bf16", status="diverged")
    (mixed / "notes.txt").write_text("mine")
    nested = make_run(root / "parent", "amp=bf16", status="failed")
    make_run(nested / "child", "amp=bf16", status="finished")
    make_run(root / "finished", "amp=bf16")
    make_run(root / "going", "amp=bf16", status="running")
    (make_run(root / "damaged", "amp=bf16") / "summary.json").write_text('{"status": "fin')
    no_run = root / "no_run"
    no_run.mkdir()
    (no_run / "summary.json").write_text('{"status": "failed"}')
    (root / "linked").symlink_to(make_run(tmp_path / "elsewhere", "amp=bf16", status="failed"))
    for folder in (root, tmp_path / "elsewhere"):
        old(folder)
    make_run(root / "failed_just_now", "amp=bf16", status="failed")
    runs, before = script("scripts/runs.py"), snapshot(tmp_path)

    with open(root / "going" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(root / "going" / ".lock", (1e9, 1e9))
        before = snapshot(tmp_path)
        assert runs.main(["prune", str(root)]) == 0  # dry
        assert snapshot(tmp_path) == before and "nothing was removed" in capsys.readouterr().out
        assert runs.main(["prune", str(root), "--yes"]) == 0
    assert {path.name for path in root.iterdir()} == {
        *("diverged_with_notes", "parent", "finished", "going", "no_run", "linked", "failed_just_now", "damaged")
    }
    assert [path.name for path in mixed.iterdir()] == ["notes.txt"]
    assert [path.name for path in nested.iterdir()] == ["child"]
    lost = {path for path in before if not os.path.lexists(path)}
    parts = [str(gone), str(mixed), str(nested)]
    assert all(any(path == part or path.startswith(part + "/") for part in parts) for path in lost)
    assert (outside / "precious").exists() and (tmp_path / "elsewhere" / "summary.json").exists()


def newer_format(path):
    about = json.loads((path / "manifest.json").read_text()) | {"format": 2}
    (path / "manifest.json").write_bytes(steps.encode(about))


DAMAGES = {
    "a bit of the state": lambda path: flip(path / "state.pt", 500),
    "a bit of the manifest": lambda path: flip(path / "manifest.json", 20),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a pipe": lambda path: ((path / "state.pt").unlink(), os.mkfifo(path / "state.pt")),
    "a newer format": newer_format,
}
NO_METRIC = {2: None, 4: None, 6: None}
BY_NUMBER = {99_999_998: 0.8, 99_999_999: 0.9, 10**8: 0.1, 10**8 + 1: 0.2}
KEPT = [
    ("finished", {10: 0.5, 20: 0.9, 30: 0.7}, None, None, [20, 30]),  # the best, and the newest
    ("preempted", {10: 0.5, 20: 0.9, 30: 0.7}, None, None, [20, 30]),
    ("preempted", BY_NUMBER, 99_999_999, "a bit of the state", [99_999_998, 10**8 + 1]),  # the best sound one
    *(("preempted", NO_METRIC, 6, what, [4, 6]) for what in DAMAGES),  # the newest cannot be loaded
]


@pytest.mark.parametrize("status, accuracies, damaged, what, left", KEPT)
def test_prune_of_checkpoints_keeps_the_newest_sound_one_and_the_best(
    status, accuracies, damaged, what, left, tmp_path
):
    run = make_run(tmp_path / "run", "amp=bf16", status=status)
    for step, accuracy in accuracies.items():
        checkpoint(run, step, accuracy)
    (run / "checkpoints" / "mine").mkdir()
    if what:
        DAMAGES[what](run / "checkpoints" / f"step_{damaged:08d}")
    old(run)
    assert script("scripts/runs.py").main(["prune", str(tmp_path), "--checkpoints", "--older", "0", "--yes"]) == 0
    kept = {f"step_{step:08d}" for step in left} | {"mine"}
    assert set(os.listdir(run / "checkpoints")) == kept


def test_a_checkpoint_that_is_damaged_after_the_look_keeps_the_others(tmp_path):
    folder = make_run(tmp_path / "run", "amp=bf16", status="preempted")
    for step in (2, 4):
        checkpoint(folder, step, None)
    plan = prune.plan_checkpoints(read_run(folder), 0)
    assert plan is not None and [path.name for path in plan.paths] == ["step_00000002"]
    flip(folder / "checkpoints" / "step_00000004" / "state.pt", 0)
    assert "step_00000004: is damaged now" in str(prune.carry_out(plan, whole=False))
    assert len(os.listdir(folder / "checkpoints")) == 2


def test_a_run_that_began_after_the_look_is_left_alone(tmp_path):
    folder = old(make_run(tmp_path / "run", "amp=bf16", status="failed"))
    plan = prune.plan_runs(read_run(folder), 1)
    assert plan is not None
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prune.carry_out(plan, whole=True) == f"{folder}: a run is writing there"
    (folder / "summary.json").write_text((folder / "summary.json").read_text())
    assert prune.carry_out(plan, whole=True) == "has changed since it was looked at"
    assert (folder / "metrics.jsonl").exists()
    assert prune.plan_runs(read_run(folder), 1) is None and math.isfinite(folders.age(read_run(folder)))
