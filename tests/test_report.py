"""Reports: one file that loads nothing, below 5 MB, with all that was logged; no text becomes markup."""

import contextlib
import json
import math
import os
import re
import struct
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import TINY, make_data
from webdriver import CHROMEDRIVER, Browser

from nanodiff.common import UserError
from nanodiff.png import encode_png
from nanodiff.training.checkpoint import lock_run
from nanodiff.web.report import BINS, MAX_BYTES, LiveReport, data_url, smooth, thin, write_report

QUARTERS = "loss by quarter of t, q0 next to the images"
VOID = {"meta", "img", "input", "line", "path", "br"}


class Page(HTMLParser):
    """Tags with their attributes, texts by tag, and whether all that was opened was closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.stack = [], [], []
        self.source = page if isinstance(page, str) else page.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    handle_startendtag = lambda self, tag, attrs: self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def charts(self):
        """{title: data} of the charts."""
        data = [json.loads(text) for (tag, text) in self.texts if tag == "script" and text.startswith("{")]
        return {chart["title"]: chart for chart in data}

    def images(self):
        return [attrs for tag, attrs in self.tags if tag == "img"]

    def text(self):
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))


def png(seed=0, size=40):
    return encode_png(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8))


def fake_run(base, tag="a", lines=40, grids=3, word="plain", **config):
    """A folder as base_train leaves it, without its checkpoints; `word` is wherever a text is."""
    folder = base / "runs" / tag
    (folder / "samples").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    described = {
        "config": {"depth": 2, "total_batch_size": 8, "data": word, word: 1} | config,
        "changed_from": {"depth": 4, word: 0},
        "data": {"name": word, "class_names": [word, "b"], "resolution": 8},
        "num_params": 1000,
        "num_iterations": 10 * lines,
        "environment": {"command": ["base_train.py", f"--data={word}"], "device": word, "world_size": 2},
    }
    (folder / "config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(0)
    with open(folder / "metrics.jsonl", "w") as f:
        for i in range(1, lines + 1):
            noise = rng.lognormal(sigma=0.1, size=6)
            line = {"step": 10 * i, "images_seen": 80 * i, "train/loss": noise[0] + 30 / i, "train/grad_norm": noise[1]}
            line |= {f"train/loss_q{q}": noise[2 + q] for q in range(4)} | {"train/mfu": 0.0, f"train/{word}": 2.0}
            f.write(json.dumps(line) + "\n")
            if i % 10 == 0:
                f.write(json.dumps({"step": 10 * i, "val/loss": 1.0 + 1 / i, "val/loss_ema": 1.1}) + "\n")
    for i in range(grids):
        (folder / "samples" / f"step_{i * 100:06d}.png").write_bytes(png(i))
    result = {"metric": word, "step": 5, "checkpoint": word, word: 0.25, "cfg_scale": 2.0, "seed": 0}
    (folder / "eval_x_000005.json").write_text(json.dumps(result))
    return folder


def report(folder):
    path = folder / "report.html"
    write_report([folder], path)
    return Page(path)


def is_offline(page):
    assert "://" not in page.source and "@import" not in page.source and "url(" not in page.source
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "a", "form")
        assert all(v.startswith("data:image/png;base64,") for k, v in attrs.items() if k in ("src", "href"))
        assert not any(k.startswith("on") for k in attrs)


def test_page_is_one_file_that_loads_nothing(base):
    folder = fake_run(base)
    of_a_file = {"metric": "x", "samples_protocol": {"step": 77}, "x": 0.5}
    (folder / "eval_x_file.json").write_text(json.dumps(of_a_file))
    page = report(folder)
    is_offline(page)
    names = [attrs.get("name") for tag, attrs in page.tags if tag == "meta"]
    assert "viewport" in names and "color-scheme: light dark" in page.source
    assert len(page.images()) == 3 and [a["data-step"] for a in page.images()] == ["0", "100", "200"]
    for text in ("a: finished, step 400 of 400", "depth", "--nproc_per_node=2", "0.25", "step 77"):
        assert text in page.text()
    assert os.listdir(base / "runs") == ["a"] and len(list((base / "runs/a").iterdir())) == 7  # no temporary file
    order = "finished, step|<img|:Loss|:Gradient|plain of a, step 5|What differs|scripts.sample --run=a".split("|")
    places = [page.source.replace('"', "").index(word) for word in order]
    assert places == sorted(places)  # what people look at comes first


@pytest.mark.parametrize(
    "word", ["<script>alert(1)</script>", "\"'><img src=x onerror=y>", "</title>&lt;$body${x}", "\ud800"]
)
def test_no_text_becomes_markup(base, word):
    """Whatever the words are, a page has the same tags, and they are read back as they were."""
    tag = word.replace("/", "").encode("utf-8", "replace").decode()
    hostile = report(fake_run(base, tag, word=word))
    plain = report(fake_run(base))
    assert [t for t, _ in hostile.tags] == [t for t, _ in plain.tags]
    assert [sorted(a) for _, a in hostile.tags] == [sorted(a) for _, a in plain.tags]
    assert hostile.text().count(word.encode("utf-8", "replace").decode()) >= 8


def test_whatever_was_logged_is_drawn(base):
    """A metric that the report has never heard of has a chart, with the values that were logged at their steps."""
    folder = fake_run(base)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    charts = report(folder).charts()
    assert charts.keys() == {"Loss", "Gradient norm before clipping", QUARTERS, "plain"}
    loss = {curve["label"]: dict(zip(curve["x"], curve["y"])) for curve in charts["Loss"]["curves"]}
    assert loss.keys() == {"train/loss", "not smoothed", "val/loss", "val/loss_ema"}
    for key, label in (("train/loss", "not smoothed"), ("val/loss", "val/loss")):
        logged = {line["step"]: pytest.approx(line[key], rel=1e-5) for line in lines if key in line}
        assert loss[label] == logged
    assert charts["plain"]["curves"][0]["y"] == [2.0] * 40
    assert len(charts[QUARTERS]["curves"]) == 4  # MFU has none: 0 means that the peak is unknown


@pytest.fixture
def browser(tmp_path):
    if not CHROMEDRIVER:
        pytest.skip("chromedriver is not installed (Debian: chromium-driver)")
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        yield browser
        assert browser.logs() == []


@pytest.mark.slow
def test_curves_are_where_the_data_are(base, browser):
    """Paths are in a picture of 1000 x 1000, axes in percent of it: invert the axes, and read the data off the path."""
    folder = fake_run(base)
    report(folder)
    browser.open((folder / "report.html").as_uri())
    chart = "[...document.querySelectorAll('.chart')].find(f => f.textContent.startsWith('Gradient'))"
    ticks = f"return [...{chart}.querySelectorAll('.ytick')]"
    labels = browser.run(ticks + ".map(tick => +tick.textContent)")
    places = browser.run(ticks + ".map(tick => parseFloat(tick.getAttribute('y')))")
    path = browser.run(f"return {chart}.querySelector('path.raw').getAttribute('d')")
    assert browser.run("return charts.length") == 4
    points = np.array(re.findall(r"([\d.]+),(-?[\d.]+)", path), float)
    slope, offset = np.polyfit(places, np.log10(labels), 1)  # this axis is logarithmic
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    np.testing.assert_allclose(10 ** (slope * points[:, 1] / 10 + offset), logged, rtol=5e-3)
    np.testing.assert_allclose(points[:, 0], np.linspace(25, 1000, 40), atol=0.1)


@pytest.mark.slow
def test_sliders_of_compared_runs_move_together_on_either_axis(base, browser):
    """A slider shows of every run the grid that is nearest in images seen; in log, 100 : 10 is as far as 10 : 1."""
    path = base / "page.html"
    write_report([fake_run(base, "a"), fake_run(base, "b", total_batch_size=16)], path)
    browser.open(path.as_uri())
    shown = "return [...document.querySelectorAll('.strip img:not([hidden])')].map(i => +i.dataset.step)"
    assert browser.run(shown) == [200, 200]  # the newest
    for strip, position, steps in ((0, 1, [100, 100]), (1, 1, [200, 100]), (1, 2, [200, 200]), (0, 0, [0, 0])):
        slider = f"const r = document.querySelectorAll('.strip input')[{strip}]; r.value = {position}; r.oninput();"
        assert browser.run(slider + shown) == steps
    browser.click("#log")
    ticks = "[...document.querySelector('.chart').querySelectorAll('.xtick')]"
    places = browser.run(f"return {ticks}.map(tick => parseFloat(tick.getAttribute('x')))")
    assert np.diff(places) == pytest.approx(100 / math.log10(6400 / 80))


def test_a_long_run_with_many_grids_stays_small(base):
    folder = fake_run(base, grids=0)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    with open(folder / "metrics.jsonl", "w") as f:
        f.writelines(json.dumps(line | {"step": 10 * i, "train/loss": 1 + 1 / i}) + "\n" for i in range(1, 20_001))
        f.write('{"step": 50005, "train/grad_norm": 1e6}\n')
    data = png(size=130)
    assert len(data) > 50_000
    first = folder / "samples/step_000000.png"
    first.write_bytes(data)
    for i in range(1, 400):
        os.link(first, folder / f"samples/step_{i * 100:06d}.png")
    page = report(folder)
    assert (folder / "report.html").stat().st_size < MAX_BYTES
    steps = [int(a["data-step"]) for a in page.images()]
    assert len(steps) > 40 and steps[0] == 0 and steps[-1] == 39900
    assert np.ptp(np.diff(steps)) <= 100  # evenly: gaps differ by one grid at most
    norm = page.charts()["Gradient norm before clipping"]
    assert max(zip(norm["curves"][0]["y"], norm["curves"][0]["x"])) == (1e6, 50005)  # a spike of a single step


def test_grids_that_are_too_large_are_made_smaller():
    noise = png(size=400)
    for budget in range(3000, 2 * len(noise), 30_000):
        assert 0 < len(data_url(noise, budget)) <= budget
    for data in (noise, b"torn"):
        with pytest.raises(ValueError):
            data_url(data, 10)


BROKEN = [
    b'{"step": 10, "train/loss": 1.0}\n{"step": 20, "train/lo',
    b'{"step": 10, "train/loss": NaN, "val/loss": -Infinity}\n{"step": 20, "train/loss": 0.5}\n',
    b'{"train/loss": 1}\n[1]\nnull\n{"step": "x"}\n{"step": -1}\n{"step": 1e3}\n{"step": 5, "a": "b", "c": true}\n',
    b'\xff\xfe\n{"step": 10, "train/grad_norm": 0.0, "train/loss": 1e999, "val/bpd": 1' + b"0" * 400 + b"}\n",
    b"[" * 100_000,
    None,
]  # fmt: skip


@pytest.mark.parametrize("metrics", BROKEN)
def test_what_is_torn_or_missing_is_left_out(base, metrics):
    folder = fake_run(base, grids=0)
    os.remove(folder / "metrics.jsonl")
    os.remove(folder / "eval_x_000005.json")
    if metrics is not None:
        (folder / "metrics.jsonl").write_bytes(metrics)
    page = report(folder)
    assert "step " in page.text() and "skipped:" not in page.text() and not page.images()
    curves = [curve for chart in page.charts().values() for curve in chart["curves"]]
    assert all(math.isfinite(value) for curve in curves for value in curve["y"])
    (folder / "config.json").write_text("{}")
    report(folder)


def put(value, *keys):
    """A change of the object in config.json."""

    def change(folder):
        facts = json.loads((folder / "config.json").read_text())
        within = facts
        for key in keys[:-1]:
            within = within[key]
        within[keys[-1]] = value
        (folder / "config.json").write_text(json.dumps(facts))

    return change


def bomb(folder):
    """A PNG of 16 GB of zeros by its header, in the place of the newest grid."""
    (folder / "samples" / "step_000200.png").write_bytes(png()[:16] + struct.pack(">II", 2**16, 2**16) + png()[24:])


def fifo(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def write(name, *parts):
    return lambda folder: (folder / name).write_bytes(b"".join(parts))


EVAL = b'{"metric": 1, "step": 2, "rows": %s}'
ODD = [None, "x", -1, 2**60, 10**4000, [], [[]], {}, {"a": {}}, True, 1e300]
DAMAGE = [
    *(put(value, key) for value in ODD for key in ("config", "changed_from", "environment", "num_iterations")),
    *(put(value, "config", "total_batch_size") for value in ODD),
    *(put(value, "environment", key) for value in ODD for key in ("command", "world_size")),
    *(write("eval_x_000005.json", EVAL % json.dumps(value).encode()) for value in ODD),
    write("eval_x_000005.json", EVAL % b'[{"sampler": 1, "steps": 1, "evaluations": 1, "error": NaN}]'),
    write("eval_x_000005.json", b"[" * 10**6),
    put("long " * 10**5, "config", "data"),
    put({str(i): i for i in range(10**5)}, "data"),
    lambda folder: (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "a": [' + b"1," * 5 * 10**7),
    write("metrics.jsonl", b'{"step": 1' + b"".join(b', "%d": 1' % i for i in range(10**5)) + b"}"),
    write("metrics.jsonl", b'{"step": 1' + b"0" * 20 + b', "a": 1' + b"0" * 400 + b"}"),
    bomb,
    *(fifo(name) for name in ("metrics.jsonl", "eval_x_000005.json", "samples/step_000300.png", ".lock")),
    lambda folder: (folder / "samples/step_²00300.png").write_bytes(png()),
    lambda folder: (folder / "samples/step_000400.png").symlink_to("nowhere"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damaged_files_cost_one_line_and_no_memory(base, number):
    folder = fake_run(base, lines=5)
    DAMAGE[number](folder)
    tracemalloc.start()
    write_report([folder], folder / "report.html")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    page = Page(folder / "report.html")  # asserts that the page is whole
    assert peak < 60 * 2**20 and len(page.source) < MAX_BYTES
    assert page.images() and page.text().count("skipped:") <= 3


def test_a_run_is_running_while_a_process_holds_it(base):
    folder = fake_run(base)
    put(500, "num_iterations")(folder)
    assert "a: stopped, step 400 of 500, 20" in report(folder).text()
    with lock_run(folder):
        assert "a: running, step 400 of 500, 20" in report(folder).text()
        LiveReport(folder).refresh(last=True)  # the process that holds the lock is about to end
        assert "a: stopped, step 400 of 500, 20" in Page(folder / "report.html").text()


def test_thinned_curves_keep_extremes_and_ends():
    y = np.random.default_rng(0).normal(size=20_000)
    rows = thin(y)
    assert (np.diff(rows) > 0).all() and len(rows) <= 2 * (BINS + 1) and {0, len(y) - 1} <= {*rows}
    assert y[rows].min() == y.min() and y[rows].max() == y.max()
    assert thin(np.array([1.0])).tolist() == [0]


def test_smoothing_is_an_average_of_the_past():
    np.testing.assert_allclose(smooth([3.0] * 20), 3)
    step = smooth(np.repeat([0.0, 1.0], 500))  # a time constant of 1000 / 50 values: 1 - 1/e after 20 of them
    assert (step[:500] == 0).all() and (np.diff(step) >= 0).all()
    assert step[519] == pytest.approx(1 - math.exp(-1), abs=0.02)


def test_comparison_overlays_runs(base, run_script):
    a, b = fake_run(base, "a", lines=20), fake_run(base, "b", lines=40, total_batch_size=16)
    path = run_script("report", "a", b)["path"]
    assert path == base / "runs" / "compare_a_b.html" and path.stat().st_size < MAX_BYTES
    page = Page(path)
    is_offline(page)
    differing = page.source.split("What differs")[1].split("<details>")[0]
    assert "total_batch_size" in differing and "resolution" not in differing
    losses = page.charts()["train/loss"]  # over images: 20 x 10 steps of 8 and 40 x 10 steps of 16
    assert losses["unit"] == "images" and [curve["x"][-1] for curve in losses["curves"]] == [1600, 6400]
    assert sorted(int(attrs["data-x"]) for attrs in page.images()) == [0, 0, 800, 1600, 1600, 3200]
    assert run_script("report", "a", "a", a)["path"] == a.resolve() / "report.html"


def test_mistakes_are_one_line(base, run_script):
    fake_run(base)
    fifo("config.json")(fake_run(base, "pipe"))
    (base / "empty").mkdir()
    not_regular = "config.json is not a regular file"
    for args, wanted in (
        (["b"], "known tags: a, pipe"), (["a"] * 9, "up to 8"), ([base / "empty", "a"], not_regular),
        (["pipe"], not_regular),
    ):  # fmt: skip
        with pytest.raises(UserError, match=wanted):
            run_script("report", *args)


def test_a_report_may_fail_and_takes_one_percent_of_the_time(tmp_path, capsys, monkeypatch):
    LiveReport(tmp_path).refresh()
    assert "no report: UserError" in capsys.readouterr().out
    clock, written = [1000.0], []

    def write(run_dirs, path, has_ended):
        written.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr("nanodiff.web.report.write_report", write)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    report = LiveReport(Path("run"))
    while clock[0] < 11_000:
        report.refresh()
        clock[0] += 1.0
    assert 2.0 * len(written) <= 0.011 * 10_000 and np.diff(written).min() >= 200
    report.refresh(last=True)
    assert written[-1] == clock[0] - 2.0


def test_base_train_writes_it(base, run_script):
    make_data()
    done = run_script("base_train", *TINY, "--num_iterations=2", "--eval_every=1", "--log_every=1", "--eval_images=8")
    described = json.loads((done["run_dir"] / "config.json").read_text())
    changed = described["changed_from"]
    assert changed["depth"] == 4 and changed["total_batch_size"] == 0 and "lr" not in changed
    assert all(described["config"][name] != default for name, default in changed.items())
    page = Page(done["run_dir"] / "report.html")
    assert "2 of 2" in page.text() and len(page.charts()) >= 5 and not page.images()
    run_script("base_train", *TINY, "--num_iterations=3", "--lr=0.125", "--resume=changed", "--eval_every=-1")
    text = Page(done["run_dir"] / "report.html").text()
    assert "3 of 3" in text and "from step 2" in text and "0.125" in text
