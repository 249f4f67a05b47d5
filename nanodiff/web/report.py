"""The report of a run, or of several overlaid: one HTML file that opens offline.

It shows config.json, metrics.jsonl, samples/step_*.png and eval_*.json of the run folders. Every logged number but
the counters becomes a chart, drawn by report.html.
"""

import base64
import json
import math
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import shorten

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.conditions import FIELDS
from nanodiff.files import read_json, write_atomic
from nanodiff.training.checkpoint import list_checkpoints

BINS = 300  # long curves are thinned to the minimum and maximum of this many segments
MOST_GRIDS = 24  # per run; report.html embeds them
BY_QUARTER = " by quarter of t, from image to noise"
WORDS = read_json(Path(__file__).with_name("words.json"))
TITLES = WORDS["charts"]  # of metrics, in the order of their charts; other metrics come last
LOSSES = Path(__file__).parents[2] / "runs" / "records" / "losses.json"  # training losses by recipe and step
LOSS_SPREAD = 0.004  # means over a tenth of the steps around one differ by less between seeds
# Smoothed by the report itself; straight lines
NOT_DRAWN = "train/loss_smooth step images_seen total_training_flops total_training_time_s".split()


@dataclass
class Run:
    folder: Path
    name: str
    facts: dict  # config.json
    history: dict[str, dict[int, float]]  # key of metrics.jsonl -> {step: finite value}
    per_step: int  # what the x axis counts: 1 for steps, the batch size for images
    results: list[dict]  # of base_eval


def read_run(folder: Path, over_images: bool) -> Run:
    facts = {"changes": [], "changed_from": {}} | read_json(folder / "config.json")
    history = {}
    with suppress(FileNotFoundError), open(folder / "metrics.jsonl", "rb") as lines:
        for text in lines:
            with suppress(Exception):  # torn by a kill, or not one of our lines
                line = json.loads(text)
                step = int(line["step"])
                for key, value in line.items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        history.setdefault(key, {})[step] = value
    per_step = facts["config"]["total_batch_size"] if over_images else 1
    results = []
    for path in sorted(folder.glob("eval_*.json")):  # eval_fid_000005_steps=5_0a1b2c3d.json: " steps=5"
        suffix = re.sub(r"^eval_(\D+\d+_?)?|_[0-9a-f]{8}$|(?<![a-z])_(?=[a-z_]+=)", " ", path.stem).rstrip()
        try:
            results.append(read_json(path) | {"changed": suffix})
        except UserError as error:
            print0(f"left out: {error}")
    return Run(folder, folder.resolve().name, facts, history, per_step, results)


# ---------------------------------------------------------------------------------------------------------------------
# Charts


def chart_of(key: str) -> str:
    """A key's chart: train/loss, val/loss and val/loss_ema share one, their quarters loss_q0 to loss_q3 another."""
    return re.sub("_q[0-3]$", BY_QUARTER, key.split("/")[-1].removesuffix("_ema"))


def smooth(y: np.ndarray) -> np.ndarray:
    """Bias-corrected running average with a time constant of 2% of the values, at least 3."""
    decay = 1 - 1 / max(3, len(y) / 50)
    averages = np.empty(len(y))
    total = weight = 0.0
    for i, value in enumerate(y):
        total = decay * total + value
        weight = decay * weight + 1
        averages[i] = total / weight
    return averages


def thin(x: np.ndarray, y: np.ndarray) -> dict:
    """Points to draw: both ends, and the extremes of each of BINS parts, so that a spike of one step stays visible."""
    rows = [0, len(y) - 1]
    for part in np.array_split(np.arange(len(y)), min(BINS, len(y))):
        rows += [part[y[part].argmin()], part[y[part].argmax()]]
    rows = np.unique(rows)
    return {"x": x[rows].tolist(), "y": [float(f"{value:.6g}") for value in y[rows]]}


def in_words(key: str) -> str:
    """A curve's name: "validation loss of the average"; a chart's title if it has no other curve."""
    for part, words in WORDS["curves"].items():
        key = key.replace(part, words)
    name = key.split("/")[-1]
    return TITLES.get(name, name)


def charts(runs: list[Run]) -> str:
    """One chart per metric; with several runs, one chart per key and in it one curve per run."""
    keys = sorted({key for run in runs for key in run.history if key not in NOT_DRAWN})
    page = ""
    for metric in dict.fromkeys([*TITLES, *map(chart_of, keys)]):
        group = [key for key in keys if chart_of(key) == metric]
        if len(runs) == 1:
            page += chart(metric, metric, [(runs[0], key, in_words(key)) for key in group])
            continue
        for key in group:
            page += chart(key, metric, [(run, key, run.name) for run in runs])
    return page or "<p>Nothing has been logged so far.</p>"


def chart(name: str, metric: str, sources: list[tuple[Run, str, str]]) -> str:
    """A chart of a metric or a key with a curve for each (run, key, label); `metric`: see chart_of.

    Noisy metrics are smoothed; a single one is also shown as it was logged. Styles of curves: "line", "raw" is faint,
    "dots" marks each value.
    """
    is_single = sum(key.startswith("train/") for _, key, _ in sources) == 1
    curves = []
    for colour, (run, key, label) in enumerate(sources):
        points = sorted(run.history.get(key, {}).items())
        if not points:  # not every run has each key
            continue
        x, y = map(np.array, zip(*points))
        x *= run.per_step
        style = "dots"
        if key.startswith("train/") and key != "train/lrm" and len(y) >= 10:
            if is_single:
                curves.append({"label": "not smoothed", "style": "raw", "colour": colour} | thin(x, y))
            style = "line"
            y = smooth(y)
        curves.append({"label": label, "style": style, "colour": colour} | thin(x, y))
    if not curves:
        return ""
    unit = "step" if run.per_step == 1 else "images"
    text = json.dumps({"title": in_words(name), "metric": metric, "unit": unit, "curves": curves})
    text = text.replace("<", "\\u003c")  # nothing in it ends the script element
    return f'<figure class="chart"><script type="application/json">{text}</script></figure>\n'


def strip(run: Run) -> str:
    """A run's grids, evenly thinned out. A slider chooses the one that is shown, and moves the charts' crosshair."""
    grids = list_checkpoints(run.folder, "samples/step_*.png")
    if not grids:
        return ""
    selection = [grids[round(i)] for i in np.linspace(0, len(grids) - 1, min(len(grids), MOST_GRIDS))]
    images = ""
    for step, path in selection:
        png = base64.b64encode(path.read_bytes()).decode()
        images += f'<img alt="samples at step {step}" data-step="{step}" data-x="{step * run.per_step}" '
        images += f'src="data:image/png;base64,{png}" hidden>'
    names = ""
    model = run.facts["model"]
    fields = [name for name in FIELDS if model.get(name)]
    if fields == ["num_classes"] and model["num_classes"] <= 10:  # the grid has one row per class
        names = "".join(f"<li>{escape(name)}</li>" for name in run.facts["data"]["class_names"])
    return f"""<figure class="strip"><figcaption>Samples of {escape(run.name)}<output></output></figcaption>
<div class="rows"><ol>{names}</ol>{images}</div>
<input type="range" aria-label="step of the samples">
<small>{len(selection)} of {len(grids)} grids, all with the same noise and classes</small></figure>"""


# ---------------------------------------------------------------------------------------------------------------------
# Text and tables: whatever comes from a file goes through escape


def cell(value) -> str:
    """Format a value: four digits of a float, commas in an integer; long texts and lists are cut."""
    if value is None:
        return ""
    if type(value) is float:
        return f"{value:,.4g}"
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return escape(shorten(str(value), 1000))


def table(columns: dict[str, dict], min_values: int = 1) -> str:
    """A table of columns by heading, with the rows that have at least `min_values` different values; a gap is one."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = f"<tr><th></th>{heads}</tr>"
    keys = {}  # of all columns, in order
    for column in columns.values():
        keys |= column
    for key in keys:
        values = [cell(column.get(key, "-")) for column in columns.values()]
        if any(values) and len(set(values)) >= min_values:
            cells = "".join(f"<td>{value}</td>" for value in values)
            rows += f"<tr><th>{escape(key)}</th>{cells}</tr>"
    return f'<div class="scroll"><table>{rows}</table></div>'


def flat(facts: dict, prefix: str = "") -> dict:
    """Nested facts as one level: {"a": {"b": 1}} -> {"a b": 1}; the settings in "config" keep their names."""
    pairs = {}
    for key, value in facts.items():
        if key == "config":
            pairs = pairs | value
        elif isinstance(value, dict):
            pairs |= flat(value, f"{prefix}{key} ")
        else:
            pairs[prefix + key] = value
    return pairs


def evaluation(result: dict, run: Run) -> str:
    """Results of base_eval: the figures in words, with those of real images beside them; the protocol is folded."""
    rows = result.pop("rows", [])  # for each sampler and number of steps
    real = flat(result.pop("real_images", {}))
    step = f", step {result['step']:,}" if "step" in result else ""  # none in files from elsewhere
    figures = ""
    for key, value in result.items():
        if type(value) is float and not key.endswith(("cfg_scale", "eta")):
            of_real = f"<small>real images {cell(real[key])}</small>" if key in real else ""
            figures += f"<li><b>{cell(value)}</b> {escape(in_words(key))} {of_real}</li>"
    columns = {f"{row['sampler']}, {row['steps']}": flat(row) for row in rows}
    if real:
        columns["real images"] = real
    content = table(columns) if rows else f'<ul class="figures">{figures}</ul>'
    return f"""<h2>{escape(f"{result['metric']}{result['changed']} of {run.name}{step}")}</h2>{content}
<details><summary>All figures, protocol</summary>{table({"samples": flat(result)} | columns)}</details>"""


def summary(run: Run, results: list[dict]) -> dict:
    """What was trained, how far and where, and the figures by which runs are compared: the lowest logged, each metric's
    last of `results` by file name."""
    facts = run.facts
    last = [facts, *facts["changes"]][-1]
    largest = {key: max(values.values()) for key, values in run.history.items()}
    figures = {
        "depth": facts["config"].get("depth"),
        "step": f"{largest.get('step', 0):,} of {last['num_iterations']:,}",
        "images": largest.get("images_seen"),
        "parameters": facts.get("num_params"),
        "minutes": largest.get("total_training_time_s", 0.0) / 60,
        "machine": facts["environment"].get("device"),
        "training loss": compare_loss(run),
    }
    for key in "val/loss val/loss_ema val/fid val/fd_classifier val/fd_simclr".split():
        if key in run.history:
            figures[f"lowest {in_words(key)}"] = min(run.history[key].values())
    for result in results:
        for key in (result["metric"], "total_bpd", "precision", "recall"):
            if key in result:
                figures[f"{result['metric']}{result['changed']}: {in_words(key)}"] = result[key]
    return figures


def compare_loss(run: Run) -> str:
    """The training loss beside the one expected at the last step for which a published recipe has it; "" for others."""
    facts = flat(run.facts)
    losses = run.history.get("train/loss", {})
    line = ""
    for recipe in read_json(LOSSES)["recipes"]:
        if recipe["settings"].items() <= facts.items():
            for text, target in recipe["losses"].items():
                step = int(text)
                near = {i: loss for i, loss in losses.items() if 0.95 * step <= i <= 1.05 * step}
                if max(near, default=0) >= step:
                    mean = sum(near.values()) / len(near)
                    limits = f"{target - LOSS_SPREAD:.3f} to {target + LOSS_SPREAD:.3f}"
                    line = f"{mean:.3f} at step {step:,}; expected {limits} by this recipe"
    return line


def versions(run: Run) -> dict[str, dict]:
    """{heading: config.json as one level}: the defaults, the run's start, each resume that changed settings."""
    facts = flat(run.facts | {"changed_from": {}, "changes": None})
    columns = {"default": facts | run.facts["changed_from"], run.name: facts}
    for change in run.facts["changes"]:
        facts = facts | flat(change)
        columns[f"{run.name} from step {change['step']:,}"] = facts
    return columns


# ---------------------------------------------------------------------------------------------------------------------
# The page


def write_report(run_dirs: list[Path], path: Path) -> None:
    runs = [read_run(folder, over_images=len(run_dirs) > 1) for folder in run_dirs]
    if len({run.name for run in runs}) < len(runs):  # of one name, in several places
        for run in runs:
            run.name = str(run.folder)
    title = escape(" and ".join(run.name for run in runs))
    # The results of a single run stand below its charts
    figures = {run.name: summary(run, run.results if len(runs) > 1 else []) for run in runs}
    strips = evaluations = ""
    settings = {}
    for run in runs:
        strips += strip(run)
        settings |= versions(run)
        for result in run.results:
            evaluations += evaluation(result, run)
    body = f"""<h1>{title}</h1>{table(figures)}
<div class="charts">{strips}{charts(runs)}</div>{evaluations}
<details><summary>Settings that differ (-: unknown then)</summary>{table(settings, 2)}</details>
<details><summary>All settings, sizes, machine</summary>{table(settings)}</details>
<p><small>Written at {time.strftime("%Y-%m-%d %H:%M")}</small></p>"""
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    write_atomic(path, template.replace("$body", body, 1).replace("$title", title, 1).encode())


def refresh_report(run_dir: Path, due: float = 0.0) -> float:
    """Write run_dir/report.html, but not before `due`; return when the next is due, so that reports take at most 1% of
    a run's time. Never raises: neither a bug here nor a full disk should end hours of training."""
    start = time.monotonic()
    if start < due:
        return due
    try:
        write_report([run_dir], run_dir / "report.html")
    except Exception as e:
        print0(f"no report: {type(e).__name__}: {e}; see python3 -m scripts.report {shlex.quote(str(run_dir))}")
    return start + 100 * (time.monotonic() - start)  # writing takes seconds for long logs
