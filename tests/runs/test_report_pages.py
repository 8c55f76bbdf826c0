"""Pages and pictures of reports, and their text: what comes from outside is text, numbers and links are right."""

from __future__ import annotations

import fcntl
import html
import itertools
import json
import math
import random
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from shared import script
from test_report import make_run, study_of, sweep

from amp_tools.report import charts
from amp_tools.report.folders import read_run
from amp_tools.report.page import html_page
from amp_tools.report.text import left_out, markdown

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


@pytest.mark.slow
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
    for scale, start, width in itertools.product(("linear", "log", "log2"), (1e-3, 0.97, 1e6), (1e-6, 1e-2, 1e4)):
        points = [(step, start * (1 + width * step / 7)) for step in (1, 30, 999, 10**6)]
        yield charts.LinePanel("t", "n", [charts.Line("fp16", 1, points)], scale)
    for start, width in itertools.product((0.97, 1200.0), (1e-7, 1e-3, 1.0)):
        values = [start * (1 + width * number / 6) for number in range(6)]
        rows = [
            charts.Row(f"fp16, init_scale={n}", i, v, f"{v:.4f} ± 0.0011  n = 5", v * 0.99, v)
            for i, (n, v) in enumerate(zip((1, 65536), values, strict=False))
        ]
        rows.append(
            charts.Row(
                "bf16_pure, update=stochastic, keep_fp32=[]", 2, values[-1], "0.9700 ± 0.0026  n = 10", points=values
            )
        )
        yield charts.RowPanel("t", "n", rows, values[0], start * width)


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


@pytest.mark.slow
def test_groups_of_a_picture_have_colours_of_their_own_also_where_references_differ(tmp_path):
    for rate, modes in (("0.1", ("bf16", "fp16")), ("0.01", ("fp32", "bf16", "fp16"))):
        for mode in modes:
            make_run(tmp_path / f"{rate}_{mode}", f"amp={mode}", f"optimizer.lr={rate}")
    pictures = []
    html_page(study_of(tmp_path), [tmp_path], pictures=pictures)
    for panel in pictures:
        about = panel.rows if isinstance(panel, charts.RowPanel) else panel.lines
        assert len({one.colour for one in about}) == len(about)
