"""Reports: one file that loads nothing, with all that was logged; no text becomes markup."""

import contextlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, refused
from numpy.testing import assert_allclose
from tiny_runs import logged
from webdriver import CHROMEDRIVER, Browser

from nanodiff.files import read_json
from nanodiff.png import encode_png
from nanodiff.web.report import BINS, LOSSES, MOST_GRIDS, refresh_report, smooth, write_report

VOID = {"meta", "img", "input", "line", "path", "br"}


class Page(HTMLParser):
    """Tags with their attributes and texts by tag; all that was opened is closed in order, and nothing is loaded."""

    def __init__(self, path):
        super().__init__()
        self.tags = []
        self.texts = []
        self.stack = [""]
        self.uri = path.as_uri()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.stack == [""]
        assert "://" not in self.source
        assert "@import" not in self.source
        assert "url(" not in self.source
        for tag, attrs in self.tags:
            assert tag not in ("link", "iframe", "object", "embed", "base", "a", "form")
            for k, v in attrs.items():
                if k in ("src", "href"):
                    assert v.startswith("data:image/png;base64,")
        self.images = [attrs for tag, attrs in self.tags if tag == "img"]
        data = [json.loads(text) for tag, text in self.texts if tag == "script" and text.startswith("{")]
        self.charts = {chart["title"]: chart for chart in data}
        self.text = " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append((self.stack[-1], data))


def fake_run(base, tag="a", lines=40, grids=3, word="plain", batch=8):
    """A folder as base_train leaves it, without its checkpoints; `word` is wherever a text is."""
    folder = base / "runs" / tag
    (folder / "samples").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    described = {
        "config": {"depth": 2, "total_batch_size": batch, "data": word, word: 1},
        "changed_from": {"depth": 4, word: 0},
        "changes": [],
        "model": {"num_classes": 2, "low_res": 0, "vector_dim": 0, "vector_len": 0},
        "data": {"name": word, "class_names": [word, "b"], "resolution": 8},
        "num_iterations": 10 * lines,
        "environment": {"command": ["base_train.py", f"--data={word}"], "device": word},
    }
    (folder / "config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(0)
    logged = []
    for i in range(1, lines + 1):
        noise = rng.lognormal(sigma=0.1, size=6)
        line = {
            "step": 10 * i,
            "images_seen": 80 * i,
            "train/loss": noise[0] + 30 / i,
            "train/grad_norm": noise[1],
        }
        line |= {f"train/loss_q{q}": noise[2 + q] for q in range(4)}
        line |= {f"train/{word}": 2.0}
        logged.append(line)
        if i % 10 == 0:
            logged.append({"step": 10 * i, "val/loss": 1.0 + 1 / i, "val/loss_ema": 1.1})
    log(folder, logged)
    for i in range(grids):
        pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
        (folder / "samples" / f"step_{i * 100:06d}.png").write_bytes(encode_png(pixels))
    result = {
        "metric": word,
        "step": 5,
        "checkpoint": word,
        word: 0.25,
        "cfg_scale": 2.0,
        "guide": {word: [0.3, word]},
    }
    (folder / "eval_x_000005.json").write_text(json.dumps(result))
    return folder


def report(*folders):
    write_report(folders, folders[0] / "report.html")
    return Page(folders[0] / "report.html")


def log(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("word", ["<script>alert(1)</script>\"'><img src=x onerror=y>", "</title>&lt;$body${x}"])
def test_no_text_becomes_markup_and_nothing_is_loaded(base, word):
    """Whatever the words are, a page has the same tags, and they are read back as they were."""
    odd = report(fake_run(base, word.replace("/", ""), word=word))
    plain = report(fake_run(base))
    assert [attrs["data-step"] for attrs in plain.images] == ["0", "100", "200"]
    assert [text for tag, text in plain.texts if tag == "li"][:2] == ["plain", "b"]  # beside the grids' rows
    tags_of = lambda page: [(tag, sorted(attrs)) for tag, attrs in page.tags]
    assert tags_of(odd) == tags_of(plain)
    assert odd.text.count(word) >= 8


def test_whatever_was_logged_is_drawn(base):
    """A metric that the report has never heard of has a chart, with the values that were logged at their steps."""
    folder = fake_run(base)
    charts = report(folder).charts
    quarters = "Loss by quarter of t, from image to noise"
    assert charts.keys() == {"Loss", "Gradient norm before clipping", quarters, "plain"}
    loss = {}
    for curve in charts["Loss"]["curves"]:
        loss[curve["label"]] = dict(zip(curve["x"], curve["y"]))
    for key, label in (
        ("train/loss", "not smoothed"),
        ("val/loss", "validation loss"),
    ):
        values = {line["step"]: line[key] for line in logged(folder) if key in line}
        assert loss[label] == pytest.approx(values, rel=1e-5)
    assert charts["plain"]["curves"][0]["y"] == [2.0] * 40
    names = [curve["label"] for curve in charts[quarters]["curves"]]  # MFU has none: 0 means that the peak is unknown
    assert names == [f"training loss, {order} quarter" for order in ("first", "second", "third", "last")]


def test_an_evaluation_is_tables_not_python(base):
    folder = fake_run(base)
    row = {"sampler": "heun", "steps": 5, "evaluations": 9, "error": 0.125}
    of_a_file = {
        "metric": "fd",
        "fd": 2.5,
        "by_class": {"ring": 0.75},
        "samples_protocol": {"step": 77, "eta": 0.0},
    }
    samplers = {"metric": "samplers", "step": 7, "rows": [row]}
    from_elsewhere = {"metric": "features", "fd_features": 1.5}
    (folder / "eval_samplers.json").write_text(json.dumps(samplers))
    (folder / "eval_of_a_file.json").write_text(json.dumps(of_a_file))
    (folder / "eval_from_elsewhere.json").write_text(json.dumps(from_elsewhere))
    of_real = {"fid": 3.5}
    fid = {"metric": "fid", "fid": 2.5, "real_images": of_real}
    (folder / "eval_z.json").write_text(json.dumps(fid))
    source = report(folder).source.split("What differs")[0]
    rows = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", source)
    assert ("by_class ring", "0.75") in rows
    assert ("samples_protocol eta", "0") in rows
    assert ("guide plain", "0.3, plain") in rows
    for text in ("<th>heun, 5</th>", "<th>evaluations</th><td>9</td>", "<th>error</th><td>0.125</td>"):
        assert text in source
    assert "features" not in source.split("<figure")[0]  # facts alone stand above the pictures of a single run
    assert "<h2>features from_elsewhere of a</h2>" in source
    assert "<b>2.5</b> FID, lower is better <small>real images 3.5</small>" in source
    assert source.index("<figure") < source.index("samplers of a")  # pictures stand first


def test_evaluations_of_other_settings_have_other_titles(base):
    folder = fake_run(base)
    for settings in ("_judge=judge_x.pt_96f893b1", "_cfg_scale=10.0_cfg_interval=0,1_judge=judge_x.pt_cb0c3938"):
        (folder / f"eval_fid_000007{settings}.json").write_text('{"metric": "fid", "step": 7, "fid": 2.5}')
    titles = re.findall("<h2>(fid.*?)</h2>", report(folder).source)
    assert titles == [
        "fid cfg_scale=10.0 cfg_interval=0,1 judge=judge_x.pt of a, step 7",
        "fid judge=judge_x.pt of a, step 7",
    ]


@pytest.fixture
def browser(tmp_path):
    if not CHROMEDRIVER:
        pytest.skip("chromedriver is not installed (Debian: chromium-driver)")
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        yield browser
        assert browser.logs() == []


def test_curves_are_where_the_data_are(base, browser):
    """Paths are in a picture of 1000 x 1000, axes in percent of it: invert the axes, and read the data off the path."""
    folder = fake_run(base)
    browser.open(report(folder).uri)
    chart = "[...document.querySelectorAll('.chart')].find(f => f.textContent.startsWith('Gradient'))"
    ticks = f"return [...{chart}.querySelectorAll('.ytick')]"
    labels = browser.run(ticks + ".map(tick => +tick.textContent)")
    places = browser.run(ticks + ".map(tick => parseFloat(tick.getAttribute('y')))")
    path = browser.run(f"return {chart}.querySelector('path.raw').getAttribute('d')")
    points = np.array(re.findall(r"([\d.]+),(-?[\d.]+)", path), float)
    slope, offset = np.polyfit(places, np.log10(labels), 1)  # this axis is logarithmic
    norms = [line["train/grad_norm"] for line in logged(folder) if "train/grad_norm" in line]
    across, down = points.T
    assert_allclose(10 ** (slope * down / 10 + offset), norms, rtol=5e-3)
    assert_allclose(across, np.linspace(25, 1000, 40), atol=0.1)


def test_sliders_of_overlaid_runs_move_together(base, browser):
    """A slider shows of every run the grid that is nearest in images seen."""
    browser.open(report(fake_run(base, "a"), fake_run(base, "b", batch=16)).uri)
    shown = "return [...document.querySelectorAll('.strip img:not([hidden])')].map(i => +i.dataset.step)"
    assert browser.run(shown) == [200, 200]  # the newest
    for strip, position, steps in (
        (0, 1, [100, 100]),
        (1, 1, [200, 100]),
        (0, 0, [0, 0]),
    ):
        slider = f"const r = document.querySelectorAll('.strip input')[{strip}]; r.value = {position}; r.oninput();"
        assert browser.run(slider + shown) == steps


def test_a_long_run_with_many_grids_stays_small(base):
    folder = fake_run(base, grids=100)
    (folder / "samples" / "step_000020 (copy).png").touch()
    lines = [{"step": 10 * i, "train/loss": 1 + 1 / i} for i in range(1, 20_001)]
    lines[5000] = {"step": 50_005, "train/loss": 1e6}
    log(folder, lines)
    page = report(folder)
    steps = [int(attrs["data-step"]) for attrs in page.images]
    assert len(steps) == MOST_GRIDS
    assert steps[0] == 0
    assert steps[-1] == 9900
    raw = page.charts["Loss"]["curves"][0]
    assert len(raw["x"]) <= 2 * (BINS + 1)
    highest, step = max(zip(raw["y"], raw["x"]))
    assert highest == 1e6  # a spike of a single step
    assert step == 50_005


def test_what_is_torn_not_finite_or_missing_is_left_out(base, capsys):
    folder = fake_run(base, grids=0)
    lines = (
        '{"step": 10, "val/loss": 1, "val/x": NaN}',
        "[7]",
        "null",
        '{"val/loss": 2}',
        '{"step": [], "val/loss": 2}',
        '{"step"',
    )
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (chart,) = report(folder).charts.values()
    (curve,) = chart["curves"]
    assert curve["x"] == [10]
    assert curve["y"] == [1]
    (folder / "metrics.jsonl").unlink()
    assert report(folder).charts == {}
    (folder / "eval_loss_000010.json").write_text('{"metric": "lo')
    report(folder)
    assert "left out: " in capsys.readouterr().out


def test_smoothing_is_an_average_of_the_past():
    assert_allclose(smooth([3.0] * 20), 3)
    step = smooth(np.repeat([0.0, 1.0], 500))  # a time constant of 1000 / 50 values: 1 - 1/e after 20 of them
    assert (step[:500] == 0).all()
    assert (np.diff(step) >= 0).all()
    assert step[519] == pytest.approx(1 - math.exp(-1), abs=0.02)


def test_the_script_overlays_runs_and_writes_where_it_is_told(base, run_script):
    a = fake_run(base, "a", lines=20)
    b = fake_run(base, "b", lines=40, batch=16)
    facts = json.loads((b / "config.json").read_text())
    facts["config"]["lr"] = 0.125
    first = {"step": 10, "config": {"lr": 0.5}, "num_iterations": 300}
    second = {"step": 20, "config": {"lr": 0.25}, "num_iterations": 300}
    second["environment"] = {"command": ["--lr=0.25"]}
    facts["changes"] = [first, second]
    (b / "config.json").write_text(json.dumps(facts))
    for run, of in (
        (a, "000020"),
        (b, "000040_steps=5"),
    ):
        (run / f"eval_fid_{of}.json").write_text('{"metric": "fid", "fid": 2.5}')
    path = run_script("report", "a", b)["path"]
    assert path == base / "runs" / "compare_a_b.html"
    page = Page(path)
    differing = page.source.split("Settings that differ")[1].split("</details>")[0]
    assert "total_batch_size" in differing
    assert "resolution" not in differing
    head, *rows = re.findall("<tr>(.*?)</tr>", differing)
    assert re.findall("<th>(.*?)</th>", head) == ["", "default", "a", "b", "b from step 10", "b from step 20"]
    assert "<th>lr</th><td>0.125</td><td>-</td><td>0.125</td><td>0.5</td><td>0.25</td>" in rows
    figures = page.source.split("<figure")[0]
    assert "<th>lowest validation loss</th><td>1.05</td><td>1.025</td>" in figures
    assert "<th>fid steps=5: FID, lower is better</th><td>-</td><td>2.5</td>" in figures
    assert any(row.endswith("<td>base_train.py, --data=plain</td><td>--lr=0.25</td>") for row in rows)
    places = [page.source.index(text) for text in ("<figure", "plain of a", "Settings that differ")]
    assert places == sorted(places)
    losses = page.charts["training loss"]  # over images: 20 x 10 steps of 8 and 40 x 10 steps of 16
    assert losses["unit"] == "images"
    assert [curve["x"][-1] for curve in losses["curves"]] == [1600, 6400]
    assert run_script("report", "a", a)["path"] == a.resolve() / "report.html"
    path = run_script("report", "a", fake_run(base, "other/a"))["path"]
    assert "/runs/other/a</th>" in Page(path).source
    os.utime(a / "config.json", (2**31, 2**31))
    assert run_script("report")["path"] == a / "report.html"  # the one started last, without a checkpoint yet
    for odd in (
        {"changes": 7},
        {"config": []},
        {"model": None},
        {"data": 1, "num_iterations": "x"},
    ):
        (b / "config.json").write_text(json.dumps(facts | odd))
        refused("is not as this version writes it", run_script, "report", "b")


def test_a_published_recipe_is_told_the_loss_to_expect(base):
    """The mean over a tenth of the steps, beside the published one; other recipes are told nothing."""
    folder = fake_run(base, batch=64)
    facts = json.loads((folder / "config.json").read_text())
    facts["model"] |= {"depth": 3, "patch_size": 4}
    facts["data"]["name"] = "cifar10"
    facts["num_iterations"] = 8000
    (folder / "config.json").write_text(json.dumps(facts))
    lines = [{"step": step, "train/loss": 0.15 + 1e-5 * step} for step in range(10, 2500, 10)]
    log(folder, lines)
    assert "0.170 at step 2,000; expected 0.149 to 0.157" in report(folder).text
    facts["num_iterations"] = 3000
    (folder / "config.json").write_text(json.dumps(facts))
    assert "expected" not in report(folder).text


def test_the_losses_to_expect_are_the_guides():
    """One row of its table for each recipe; a loss for each step."""
    table = (ROOT / "runs" / "GUIDE.md").read_text().split("| training loss on CIFAR-10 at step ")[1]
    cells_of = lambda line: [cell.strip() for cell in line.split("|")]
    head, _, *rows = map(cells_of, table.splitlines()[:5])
    for recipe in read_json(LOSSES)["recipes"]:
        text = "depth {model depth}, patch {model patch_size}, {num_iterations:,} steps of {total_batch_size}"
        start = text.format(**recipe["settings"])
        (row,) = [row for row in rows if row[1].startswith(start)]
        published = dict(zip(head[1:], row[2:]))
        for step, loss in recipe["losses"].items():
            assert published[f"{int(step):,}"] == f"{loss:.3f}"


def test_a_report_may_fail_and_takes_one_percent_of_the_time(tmp_path, monkeypatch):
    refresh_report(tmp_path)  # of nothing
    clock = [1000.0]
    written = []
    due = 0.0

    def write(run_dirs, path):
        written.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr("nanodiff.web.report.write_report", write)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    while clock[0] < 11_000:
        due = refresh_report(Path("run"), due)
        clock[0] += 1.0
    assert 2.0 * len(written) <= 0.011 * 10_000
    refresh_report(Path("run"))
    assert written[-1] == clock[0] - 2.0
