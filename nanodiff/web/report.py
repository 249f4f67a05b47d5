"""The report of a run, or of several overlaid: one HTML file below 5 MB that opens offline.

It shows config.json, metrics.jsonl, samples/step_*.png and eval_*.json of the run folders. Every logged number becomes
a chart, drawn by report.html; a part with a damaged file becomes one line.
"""

import base64
import fcntl
import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, brief, print0
from nanodiff.files import read_small, write_atomic
from nanodiff.png import decode_png, encode_png

MAX_BYTES = 5_000_000  # of the page
MAX_METRICS, MAX_LINE, MAX_KEYS = 2**26, 2**20, 100  # of metrics.jsonl: bytes read, bytes of a line, curves
FEWEST_GRIDS = 12  # shrink the grids rather than show fewer
BINS = 300  # long curves are thinned to the minimum and maximum of this many parts
CHARTS = {  # metric -> title, y axis ("zero": from 0). Other metrics follow
    "loss": ("Loss", ""),
    "fid": ("FID", ""),
    "fd_classifier": ("Fréchet distance in a classifier's features", ""),
    "bpd": ("Bits per dimension", ""),
    "lrm": ("Learning rate, relative to its peak", "zero"),
    "grad_norm": ("Gradient norm before clipping", "log"),
    "images_per_sec": ("Images per second", "zero"),
    "mfu": ("MFU, percent of the peak", "zero"),
}
COUNTERS = ("images_seen", "total_training_flops", "total_training_time_s")  # straight lines, not worth a chart


@dataclass
class Run:
    folder: Path
    facts: dict  # config.json
    step: int = 0  # the last one logged
    skipped: int = 0  # lines of metrics.jsonl that are torn
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # key of metrics.jsonl -> {step: finite value}
    per_step: int = 1  # what the x axis counts: 1 for steps, the batch size for images


def read_json(text: bytes) -> dict:
    """The object in `text`; {} for anything else, such as the torn last line of a killed process."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


def count_of(facts, key: str, default: int) -> int:
    value = facts.get(key) if isinstance(facts, dict) else default
    return value if type(value) is int and 0 <= value < 2**53 else default  # exact in JavaScript


def read_run(folder: Path, over_images: bool) -> Run:
    run = Run(folder.resolve(), read_json(read_small(folder / "config.json")))
    run.per_step = count_of(run.facts.get("config"), "total_batch_size", 1) if over_images else 1
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return run
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - MAX_METRICS))
        while text := file.readline(MAX_LINE):  # a longer line arrives in parts, none of them an object
            line = read_json(text)
            step = count_of(line, "step", -1)
            if step < 0:
                run.skipped += 1
                continue
            run.step = max(run.step, step)
            for key, value in line.items():
                known = key in run.logged or (len(run.logged) < MAX_KEYS and len(key) <= 100 and key != "step")
                if known and type(value) in (int, float) and abs(value) < 1e99:  # false for NaN
                    run.logged.setdefault(key, {})[step] = float(value)
    run.logged = {key: dict(sorted(points.items())) for key, points in run.logged.items()}
    return run


def chart_of(key: str) -> str:
    """The chart "loss" shows train/loss, val/loss and val/loss_ema; another one their quarters loss_q0 to loss_q3."""
    name = key.split("/")[-1].removesuffix("_ema")
    return re.sub("_q[0-3]$", " by quarter of t, q0 next to the images", name)


def smooth(y: np.ndarray) -> np.ndarray:
    """Bias-corrected running average with a time constant of 2% of the values, at least 3."""
    decay = 1 - 1 / max(3, len(y) / 50)
    smoothed = np.empty(len(y))
    total = weight = 0.0
    for i, value in enumerate(y):
        total = decay * total + value
        weight = decay * weight + 1
        smoothed[i] = total / weight
    return smoothed


def thin(y: np.ndarray) -> np.ndarray:
    """Indices to draw: both ends, and the extremes of each of BINS parts, so that a spike of one step stays visible."""
    keep = [0, len(y) - 1]
    for part in np.array_split(np.arange(len(y)), min(BINS, len(y))):
        keep += [part[y[part].argmin()], part[y[part].argmax()]]
    return np.unique(keep)


def curve(label: str, points: dict[int, float], colour: int, style: str = "") -> dict:
    """A curve for report.html. `style`: raw is faint and thin; dots marks each value."""
    x = np.array(list(points))
    y = np.array(list(points.values()))
    rows = thin(y)
    y = [float(f"{value:.6g}") for value in y[rows]]
    return {"label": label, "colour": colour % 8, "style": style, "x": x[rows].tolist(), "y": y}


def chart(title: str, curves: list[dict], axis: str, unit: str) -> str:
    """Curves over x in `unit`; the y axis is "", "zero" (from 0) or "log"."""
    data = {"title": title, "unit": unit, "axis": axis, "curves": curves}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<figure class="chart"><script type="application/json">{text}</script></figure>\n' if curves else ""


def charts(runs: list[Run]) -> str:
    """A chart for each metric; with several runs, a chart for each key and a curve for each run."""
    overlay = len(runs) > 1
    keys = sorted({key for run in runs for key in run.logged if key not in COUNTERS})
    page = ""
    for name in dict.fromkeys([*CHARTS, *map(chart_of, keys)]):
        title, axis = CHARTS.get(name, (name, ""))
        curves = {}  # title -> curves
        for i, key in enumerate(key for key in keys if chart_of(key) == name):
            style = "" if key.startswith("train/") else "dots"
            for j, run in enumerate(runs):
                logged = run.logged.get(key, {}).items()
                points = {step * run.per_step: value for step, value in logged if value > 0 or axis != "log"}
                if not any(points.values()):  # not logged, or an MFU of 0: the peak of the device is not known
                    continue
                drawn = curves.setdefault(key if overlay else title, [])
                if not style and key != "train/lrm":  # noisy
                    if name in CHARTS and not overlay:
                        drawn.append(curve("not smoothed", points, i, "raw"))
                    points = dict(zip(points, smooth(points.values())))
                label, colour = (run.folder.name, j) if overlay else (key, i)
                drawn.append(curve(label, points, colour, style))
        page += "".join(chart(title, curves[title], axis, "images" if overlay else "step") for title in curves)
    return page or "<p>Nothing has been logged so far.</p>"


# ---------------------------------------------------------------------------------------------------------------------
# Text and tables: whatever comes from a file goes through escape


def part(make, *args) -> str:
    """The HTML that `make` gives, or one line if bad file contents break it: they must not end a run."""
    try:
        return make(*args)
    except Exception as error:
        return f'<p class="muted">{make.__name__} skipped: {type(error).__name__}: {escape(str(error)[:200])}</p>'


def number(value) -> str:
    """For the eye: commas in integers and from 1,000 up, else four digits."""
    if type(value) is float:
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(brief(value, 20))[:500]) or '""'


def table(head: list[str], columns: list[dict], differing: bool = False) -> str:
    """A row for each key, or only for those whose values differ."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in ("", *head))]
    for key in list(dict.fromkeys(key for column in columns for key in column))[:500]:
        values = ["" if column.get(key) is None else number(column[key]) for column in columns]
        if not differing or len(set(values)) > 1:
            lines.append(f"<th>{escape(key)}</th>" + "".join(f"<td>{value}</td>" for value in values))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def progress(run: Run, has_ended: bool) -> str:
    """A run's state (running if its trainer holds the lock), last step and time."""
    total = count_of([run.facts, *run.facts.get("changes", [])][-1], "num_iterations", 0)
    state = "finished" if run.step >= total else "stopped"
    lock, metrics = run.folder / ".lock", run.folder / "metrics.jsonl"
    if state == "stopped" and not has_ended and lock.is_file():
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                state = "running"
    at = datetime.fromtimestamp((metrics if metrics.is_file() else run.folder).stat().st_mtime)
    text = f"{run.folder.name}: {state}, step {run.step:,} of {total:,}, {at:%Y-%m-%d %H:%M}"
    return f"<p>{escape(text)}{f'; {run.skipped:,} torn lines skipped' if run.skipped else ''}</p>"


def flat(facts: dict) -> dict:  # config.json without its nesting
    pairs = {}
    for key, value in facts.items():
        if key not in ("changed_from", "changes", "command"):
            pairs |= flat(value) if isinstance(value, dict) else {key: value}
    return pairs


def commands(run: Run) -> str:
    environment = run.facts.get("environment", {})
    script, *args = environment.get("command", ["base_train"])
    world = environment.get("world_size", 1)
    launcher = f"torchrun --standalone --nproc_per_node={world} -m" if world > 1 else "python -m"
    resume = shlex.join([f"scripts.{Path(script).stem}", *(arg for arg in args if not arg.startswith("--resume"))])
    text = f"""export NANODIFF_BASE_DIR={shlex.quote(str(run.folder.parent.parent))}
{launcher} {resume}
python -m scripts.sample --run={shlex.quote(run.folder.name)}"""
    return f"<h2>Resume {escape(run.folder.name)}, and sample</h2><pre>{escape(text)}</pre>"


def evaluation(path: Path, run: Run) -> str:
    """Results of base_eval or compare_samplers: floats except cfg_scale were measured, the rest is protocol."""
    e = read_json(read_small(path))
    rows = e.pop("rows", [])
    step = e.pop("step") if "step" in e else e["samples_protocol"]["step"]  # of a file of samples
    heading = f"{e.pop('metric')} of {run.folder.name}, step {step}"
    measured = {key: value for key, value in e.items() if type(value) is float and key != "cfg_scale"}
    protocol = " · ".join(f"{key} {str(brief(value))[:500]}" for key, value in e.items() if key not in measured)
    shown = table(list(measured), [{"": value} for value in measured.values()])
    return f'<h2>{escape(heading)}</h2>{shown}{samplers(rows) if rows else ""}<p class="muted">{escape(protocol)}</p>'


def samplers(rows: list[dict]) -> str:
    """The rows of compare_samplers: two charts over evaluations of the network, and a table."""
    pictures = ""
    for measured in ("fd_classifier", "error"):
        curves = {}  # sampler -> {evaluations: value}
        for row in rows:
            if row["evaluations"] <= 100 and (row.get(measured) or 0) > 0:  # the axis is logarithmic
                curves.setdefault(row["sampler"], {})[row["evaluations"]] = row[measured]
        drawn = [curve(name, curves[name], i, "dots") for i, name in enumerate(curves)]
        pictures += chart(f"{measured}, up to 100 evaluations", drawn, "log", "evaluations")
    head = [key for key in rows[0] if key not in ("sampler", "steps")]
    columns = [{f"{row['sampler']}, {row['steps']}": row[key] for row in rows} for key in head]
    return f'<div class="charts">{pictures}</div>{table(head, columns)}'


# ---------------------------------------------------------------------------------------------------------------------
# The page


def data_url(png: bytes, max_bytes: int) -> str:
    """A PNG as a data URL, halved until it fits. Raises ValueError if that fails."""
    while len(url := f"data:image/png;base64,{base64.b64encode(png).decode()}") > max_bytes:
        pixels = decode_png(png)
        h, w = pixels.shape[0] // 2, pixels.shape[1] // 2
        blocks = pixels[: 2 * h, : 2 * w].reshape(h, 2, w, 2, -1)
        png = encode_png(blocks.mean((1, 3)).round().astype(np.uint8))
    return url


def strip(run: Run, budget: int) -> str:
    """A run's grids in `budget` bytes, evenly thinned out. A slider shows one, and moves the charts' crosshair too."""
    paths = sorted(run.folder.glob("samples/step_*.png"))
    paths = [path for path in paths if re.fullmatch("[0-9]{1,15}", path.stem[5:]) and path.is_file()]
    largest = max((path.stat().st_size for path in paths), default=0)
    count = min(len(paths), max(FEWEST_GRIDS, budget // (100 + 4 * largest // 3)))  # base64: 4 bytes for 3
    images = []
    for i in np.linspace(0, len(paths) - 1, count).round().astype(int):
        step = int(paths[i].stem[5:])
        with suppress(ValueError):  # the line below the grids says how many are shown
            url = data_url(read_small(paths[i], 2**27), budget // count)
            where = f'data-step="{step}" data-x="{step * run.per_step}"'
            images.append(f'<img alt="samples at step {step}" {where} src="{url}" hidden>')
    last = len(images) - 1
    page = f"""<figure class="strip"><figcaption>{escape(run.folder.name)}<output></output></figcaption>
{"".join(images)}<input type="range" max="{last}" value="{last}" aria-label="step of the samples">
<small>{len(images)} of {len(paths)} grids, all with the same noise and classes</small></figure>"""
    return page if images else ""


def settings(runs: list[Run]) -> str:
    """Settings that differ between runs or from the defaults; then all of config.json."""
    names = [run.folder.name for run in runs]
    everything = [flat(run.facts) for run in runs]
    differing = table(names, everything, differing=True)
    if len(runs) == 1:
        config = runs[0].facts.get("config", {})
        head, columns = ["default", "here"], [config | runs[0].facts.get("changed_from", {}), config]
        for change in runs[0].facts.get("changes", []):  # the run resumed with other settings
            head.append(f"from step {change['step']:,}")
            columns.append(columns[-1] | change["config"])
        differing = table(head, columns, differing=True)
    return f"""<h2>What differs</h2>{differing}
<details><summary>All settings, sizes, machine</summary>{table(names, everything)}</details>"""


def write_report(run_dirs: list[Path], path: Path, has_ended: bool = False) -> None:
    """`has_ended`: this process holds the lock and has finished training."""
    runs = [read_run(folder, over_images=len(run_dirs) > 1) for folder in run_dirs]
    title = escape(" and ".join(run.folder.name for run in runs))
    head = f"<h1>{title}</h1>" + "".join(part(progress, run, has_ended) for run in runs)
    drawn = part(charts, runs)
    foot = ""
    for run in runs:
        foot += "".join(part(evaluation, file, run) for file in sorted(run.folder.glob("eval_*.json")))
    foot += part(settings, runs) + "".join(part(commands, run) for run in runs)

    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    top, bottom = template.replace("$title", title, 1).rsplit("$body", 1)
    text_bytes = len((top + head + drawn + foot + bottom).encode("utf-8", "replace"))
    budget = (MAX_BYTES - 100_000 - text_bytes) // len(runs)  # 100,000 for the markup around the grids
    strips = "".join(part(strip, run, budget) for run in runs)
    page = f'{top}{head}<div class="charts">{strips}{drawn}</div>{foot}{bottom}'
    page = page.encode("utf-8", "replace")  # JSON can hold a lone surrogate, UTF-8 cannot: it becomes a question mark
    if len(page) > MAX_BYTES:
        raise UserError(f"{path} would have {len(page):,} bytes; accepted: {MAX_BYTES:,}")
    write_atomic(path, page)


class LiveReport:
    """Keeps run_dir/report.html up to date, in at most 1% of the run's time. Never raises: neither a bug here nor a
    full disk is a reason to end hours of training."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.due = 0.0

    def refresh(self, last: bool = False) -> None:
        """Write the report, unless it was written lately and this is not the last."""
        start = time.monotonic()
        if start < self.due and not last:
            return
        try:
            write_report([self.run_dir], self.run_dir / "report.html", has_ended=last)
        except Exception as e:
            print0(f"no report: {type(e).__name__}: {e}; see python -m scripts.report {shlex.quote(str(self.run_dir))}")
        self.due = start + 100 * (time.monotonic() - start)  # it takes seconds if metrics.jsonl is long
