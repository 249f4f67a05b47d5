"""Reports: one file that loads nothing, below 5 MB; curves are where the data are, and no text becomes markup."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import ROOT
from tiny_runs import TINY, make_data

from nanodiff.common import UserError
from nanodiff.png import encode_png
from nanodiff.web.chart import BINS, Curve, chart, limits, smooth, thin, ticks
from nanodiff.web.report import MAX_BYTES, LiveReport, embed, main, write_report

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
        return [json.loads(text) for (tag, text) in self.texts if tag == "script" and text.startswith("{")]

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


def is_offline(page):
    assert "://" not in page.source and "@import" not in page.source and "url(" not in page.source
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "a", "form")
        assert all(v.startswith("data:image/png;base64,") for k, v in attrs.items() if k in ("src", "href"))
        assert not any(k.startswith("on") for k in attrs)


def test_page_is_one_file_that_loads_nothing(base):
    page = Page(write_report(fake_run(base)))
    is_offline(page)
    names = [attrs.get("name") for tag, attrs in page.tags if tag == "meta"]
    assert "viewport" in names and "prefers-color-scheme: dark" in page.source
    assert len(page.images()) == 3 and [a["data-step"] for a in page.images()] == ["0", "100", "200"]
    assert ["hidden" in a for a in page.images()] == [True, True, False]
    for text in ("400 of 400", "depth", "--nproc_per_node=2", "scripts.sample --run=a", "0.2500"):
        assert text in page.text()
    assert "utilisation" not in page.text()  # an MFU of 0 says that the peak is not known
    assert os.listdir(base / "runs") == ["a"] and len(list((base / "runs/a").iterdir())) == 6  # no temporary file


@pytest.mark.parametrize(
    "word", ["<script>alert(1)</script>", "\"'><img src=x onerror=y>", "</title>&lt;$body${x}", "\ud800"]
)
def test_no_text_becomes_markup(base, word):
    """Whatever the words are, a page has the same tags, and they are read back as they were."""
    tag = word.replace("/", "").encode("utf-8", "replace").decode()
    hostile = Page(write_report(fake_run(base, tag, word=word)))
    plain = Page(write_report(fake_run(base)))
    assert [t for t, _ in hostile.tags] == [t for t, _ in plain.tags]
    assert [sorted(a) for _, a in hostile.tags] == [sorted(a) for _, a in plain.tags]
    assert hostile.text().count(word.encode("utf-8", "replace").decode()) >= 10


def test_script_has_no_syntax_error(base):
    node = shutil.which("node")
    if not node:
        pytest.skip("node is the independent reader of the script")
    script = [text for tag, text in Page(write_report(fake_run(base))).texts if tag == "script"][-1]
    subprocess.run([node, "--check", "-"], input=script, text=True, check=True)


@pytest.mark.parametrize("axis", ["", "zero", "log"])
def test_curves_are_where_the_data_are(axis):
    """Paths are in a picture of 1000 x 1000: x from 0 to x_max, y from the upper to the lower end of y_range."""
    x, y = 7 * np.arange(1, 50), np.random.default_rng(0).lognormal(size=49)
    page = Page(chart("title", x, [Curve("label", y, 3)], axis))
    (data,) = page.charts()
    scale, back = (np.log10, lambda v: 10**v) if axis == "log" else (float, float)
    low, high = map(scale, data["y_range"])
    points = np.array(re.findall(r"(-?[\d.]+),(-?[\d.]+)", next(a["d"] for t, a in page.tags if t == "path")), float)
    np.testing.assert_allclose(points[:, 0] * data["x_max"] / 1000, x, atol=0.06 * x[-1] / 1000)
    found = np.array([back(high - v / 1000 * (high - low)) for v in points[:, 1]])
    np.testing.assert_allclose(found, y, rtol=1e-3, atol=0.06 * max(y) / 1000)
    assert data["x"] == x.tolist() and data["ys"] == [pytest.approx(y.tolist(), rel=1e-5)]
    assert f"{y[-1]:#.4g}" in page.text()


def test_a_long_run_with_many_grids_stays_small(base):
    folder = fake_run(base, grids=0)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    with open(folder / "metrics.jsonl", "w") as f:
        f.writelines(json.dumps(line | {"step": 10 * i, "train/loss": 1 + 1 / i}) + "\n" for i in range(1, 100_001))
        f.write('{"step": 500005, "train/grad_norm": 1e6}\n')
    data = png(size=130)
    assert len(data) > 50_000
    first = folder / "samples/step_000000.png"
    first.write_bytes(data)
    for i in range(1, 400):
        os.link(first, folder / f"samples/step_{i * 100:06d}.png")
    path = write_report(folder)
    assert path.stat().st_size < MAX_BYTES
    page = Page(path)
    steps = [int(a["data-step"]) for a in page.images()]
    assert len(steps) > 40 and steps[0] == 0 and steps[-1] == 39900
    assert np.ptp(np.diff(steps)) <= 100  # evenly: gaps differ by one grid at most
    spike = next(c for c in page.charts() if any(1e6 in ys for ys in c["ys"]))
    assert spike["x"][spike["ys"][0].index(1e6)] == 500005
    assert all(len(c["x"]) <= 2 * (BINS + 1) * len(c["ys"]) for c in page.charts())


def test_grids_that_are_too_large_are_made_smaller(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i, size=400))
    budget = paths[0].stat().st_size
    urls = embed(paths, budget)
    assert list(urls) == paths and sum(map(len, urls.values())) <= budget
    assert not embed(paths, 10) and not embed([], 10**6) and not embed(paths, -1)
    # Enlarged pixels are cheap, and averages over other blocks than theirs are not: no smaller for being fewer
    enlarged = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8).repeat(3, 0).repeat(3, 1)
    paths[2].write_bytes(encode_png(enlarged))
    for budget in range(3000, 2 * paths[2].stat().st_size, 3000):
        (url,) = embed(paths[2:], budget).values()
        assert len(url) <= budget
    paths[1].write_bytes(b"torn")
    assert list(embed(paths, 10**7)) == [paths[0], paths[2]]


BROKEN = [
    b"",
    b'{"step": 10, "train/loss": 1.0}\n{"step": 20, "train/lo',
    b'{"step": 10, "train/loss": NaN, "val/loss": -Infinity}\n{"step": 20, "train/loss": 0.5}\n',
    b'{"train/loss": 1}\n[1]\nnull\n{"step": "x"}\n{"step": -1}\n{"step": 1e3}\n{"step": 5, "a": "b", "c": true}\n',
    b'\xff\xfe\n{"step": 10, "train/grad_norm": 0.0, "train/loss": 1e999, "val/bpd": 1' + b"0" * 400 + b"}\n",
    b'{"step": 0, "val/loss": 2.5}\n',
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
    page = Page(write_report(folder))
    assert page.text().count("None so far") == 2 and not page.images()
    assert not any(not math.isfinite(v) for c in page.charts() for ys in c["ys"] for v in ys if v is not None)
    (folder / "config.json").write_text("{}")
    Page(write_report(folder))


def test_thinned_curves_keep_extremes_and_ends():
    rng = np.random.default_rng(0)
    x = np.sort(rng.choice(10**6, 20_000, replace=False))
    ys = [rng.normal(size=len(x)), np.where(rng.random(len(x)) < 0.01, rng.normal(size=len(x)), np.nan)]
    rows = thin(x, ys)
    assert (np.diff(rows) > 0).all() and len(rows) <= 2 * (BINS + 1) * len(ys)
    part = ((x - x[0]) * BINS) // (x[-1] - x[0] + 1)
    for y in ys:
        kept = np.full(len(y), np.nan)
        kept[rows] = y[rows]
        for p in np.unique(part[np.isfinite(y)]):
            assert np.nanmin(kept[part == p]) == np.nanmin(y[part == p])
            assert np.nanmax(kept[part == p]) == np.nanmax(y[part == p])
        assert np.isfinite(kept[np.flatnonzero(np.isfinite(y))[[0, -1]]]).all()
    assert thin(np.array([7]), [np.array([1.0])]).tolist() == [0]


RANGES = [(0, 1), (-3, 7), (0, 123456), (0.26, 1.55), (1e-7, 3e-7), (5e8, 9e9), (99.5, 100.5), (1e-9, 1e9)]


@pytest.mark.parametrize("low, high, log", [(*r, log) for r in RANGES for log in (False, True) if r[0] > 0 or not log])
def test_ticks_are_in_range_and_say_where_they_are(low, high, log):
    found = ticks(low, high, log)
    values = [v for v, _ in found]
    assert 2 <= len(found) <= 8 and low <= values[0] and values[-1] <= high
    for value, text in found:
        number, unit = re.fullmatch(r"(-?[\d.]+(?:e-?\d+)?)([kMG]?)", text).groups()
        assert float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit] == pytest.approx(value, rel=1e-5, abs=1e-12)
    if not log:
        np.testing.assert_allclose(np.diff(values), values[1] - values[0])


def test_smoothing_is_an_average_of_the_past():
    y = np.array([3.0] * 10 + [np.nan] + [3.0] * 10)
    np.testing.assert_allclose(smooth(y), y)
    step = smooth(np.repeat([0.0, 1.0], 500))  # a time constant of 1000 / 50 values: 1 - 1/e after 20 of them
    assert (step[:500] == 0).all() and (np.diff(step) >= 0).all()
    assert step[519] == pytest.approx(1 - math.exp(-1), abs=0.02)


def test_limits_hold_all_but_the_start():
    y = np.r_[1000.0, np.linspace(2, 1, 99)]
    low, high = limits([y], "")
    assert low < 1 and 2 < high < 3
    assert limits([y], "zero")[0] == 0 and limits([np.array([5.0])], "")[0] < 5 < limits([np.array([5.0])], "")[1]
    low, high = limits([y], "log")
    assert 0 < low < 1 and 2 < high < 3
    assert chart("nothing", np.arange(3), [Curve("a", np.full(3, np.nan), 0)]) == ""


def test_comparison_lays_runs_over_each_other(base):
    a, b = fake_run(base, "a", lines=20), fake_run(base, "b", lines=40, total_batch_size=16)
    path = main(["a", str(b)])
    assert path == base / "runs" / "compare_a_b.html" and path.stat().st_size < MAX_BYTES
    page = Page(path)
    is_offline(page)
    text = page.text()
    assert "total_batch_size" in text and "resolution" not in text  # what differs, and that alone
    losses = page.charts()[0]  # over images: 20 x 10 steps of 8 and 40 x 10 steps of 16
    assert losses["unit"] == "images" and losses["x_max"] == 6400 and len(losses["ys"]) == 2
    assert max(x for x, y in zip(losses["x"], losses["ys"][0]) if y is not None) == 1600
    assert sorted(int(attrs["data-x"]) for attrs in page.images()) == [0, 0, 800, 1600, 1600, 3200]
    assert main(["a", "a", str(a)]) == main(["a"]) == a.resolve() / "report.html"
    assert main([]) in (a.resolve() / "report.html", b.resolve() / "report.html")


@pytest.mark.parametrize("args, wanted", [(["b"], "known tags: a"), (["--help"], "--help"), (["a"] * 9, "at most 8")])
def test_mistakes_are_one_line(base, args, wanted):
    fake_run(base)
    with pytest.raises(UserError, match=wanted):
        main(args)
    (base / "empty").mkdir()
    with pytest.raises(UserError, match="holds no config.json"):
        main([str(base / "empty"), "a"])
    assert not list(base.glob("runs/*.html"))


def test_command_line(base):
    fake_run(base)
    command = [sys.executable, "-m", "nanodiff.web.report"]
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and re.fullmatch(r"error: .*\n", done.stderr)


def test_a_report_that_fails_ends_no_run(base, capsys, monkeypatch):
    LiveReport(base / "nowhere").refresh()
    assert re.fullmatch(r"no report: UserError: .*\n", capsys.readouterr().out)
    folder = fake_run(base)
    monkeypatch.setattr("nanodiff.web.report.make_page", lambda folders: 1 / 0)
    LiveReport(folder).refresh()
    assert "ZeroDivisionError" in capsys.readouterr().out and not (folder / "report.html").exists()


def test_a_report_takes_a_hundredth_of_the_time(monkeypatch):
    clock, written = [1000.0], []

    def write(run_dir):
        written.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr("nanodiff.web.report.write_report", write)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    report = LiveReport(None)
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
    assert changed["depth"] == 4 and changed["total_batch_size"] == 64 and "lr" not in changed
    assert all(described["config"][name] != default for name, default in changed.items())
    page = Page(done["run_dir"] / "report.html")
    assert "2 of 2" in page.text() and len(page.charts()) >= 5 and not page.images()
