"""The report of a run, or of several overlaid: one HTML file below 5 MB that opens offline.

It shows what lies in the run folders: config.json, metrics.jsonl, samples/step_*.png, eval_*.json and the names of the
checkpoints. What cannot be read is skipped. Every number that was logged becomes a chart; report.html draws it.
"""

import base64
import json
import math
import re
import shlex
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, brief
from nanodiff.files import write_atomic
from nanodiff.png import decode_png, encode_png
from nanodiff.training.checkpoint import list_checkpoints

MAX_BYTES = 5_000_000
FEWEST_GRIDS = 12  # shrink grids of samples rather than show fewer
BINS = 300  # long curves are thinned to the least and the greatest value of so many parts
CHARTS = {  # name of a metric -> title, y axis ("zero": from 0). Others follow, folded away
    "loss": ("Loss", ""),
    "fid": ("FID", ""),
    "fd_classifier": ("Fréchet distance in a classifier's features", ""),
    "bpd": ("Bits per dimension", ""),
    "lrm": ("Learning rate, relative to its peak", "zero"),
    "grad_norm": ("Gradient norm before clipping", "log"),
    "images_per_sec": ("Images per second", "zero"),
    "mfu": ("MFU, percent of the bf16 peak", "zero"),
}
COUNTERS = ("images_seen", "total_training_flops", "total_training_time_s")  # straight lines, not worth a chart

# ---------------------------------------------------------------------------------------------------------------------
# Reading a run


@dataclass
class Run:
    folder: Path
    facts: dict  # config.json
    steps: np.ndarray  # (n,) int64, ascending
    columns: dict[str, np.ndarray]  # key of metrics.jsonl, CHARTS first -> (n,) float64, NaN where it was not logged
    grids: dict[Path, int]  # PNG of samples -> its step, ascending

    def last(self, key: str) -> float | None:
        logged = self.columns.get(key, np.empty(0))
        logged = logged[np.isfinite(logged)]
        return float(logged[-1]) if len(logged) else None


def name_of(key: str) -> str:
    """train/loss, val/loss and val/loss_ema are "loss"."""
    return key.split("/")[-1].removesuffix("_ema")


def read_json(text: bytes) -> dict:
    """The object in `text`; {} for anything else, such as the torn last line of a killed process."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Run:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not the folder of a run: it holds no config.json")
    metrics = folder / "metrics.jsonl"
    rows = {}  # step -> {key: number}; the lines of a step are merged
    for text in metrics.read_bytes().splitlines() if metrics.exists() else ():
        line = read_json(text)
        step = line.pop("step", None)
        if type(step) is int and 0 <= step < 2**40:
            numbers = {k: float(v) for k, v in line.items() if type(v) in (int, float) and abs(v) < 1e99}
            rows[step] = rows.get(step, {}) | numbers
    steps = sorted(rows)
    order = list(CHARTS)
    keys = sorted({key for row in rows.values() for key in row})
    keys.sort(key=lambda key: order.index(name_of(key)) if name_of(key) in order else len(order))
    columns = {key: np.array([rows[step].get(key, math.nan) for step in steps]) for key in keys}
    grids = [path for path in sorted(folder.glob("samples/step_*.png")) if path.stem[5:].isdigit()]
    facts = read_json((folder / "config.json").read_bytes())
    return Run(folder.resolve(), facts, np.array(steps, np.int64), columns, {p: int(p.stem[5:]) for p in grids})


# ---------------------------------------------------------------------------------------------------------------------
# Charts


@dataclass
class Curve:
    label: str
    y: np.ndarray  # (n,) float, NaN where there is no value
    colour: int
    style: str = ""  # raw: faint and thin; dots: a dot at each value


def smooth(y: np.ndarray) -> np.ndarray:
    """Bias-corrected running average with a time constant of 2% of the values, at least 3; NaN stays NaN."""
    finite = np.flatnonzero(np.isfinite(y))
    decay = 1 - 1 / max(3, len(finite) / 50)
    smoothed = np.full(len(y), math.nan)
    total = weight = 0.0
    for i in finite:
        total = decay * total + y[i]
        weight = decay * weight + 1
        smoothed[i] = total / weight
    return smoothed


def thin(ys: list[np.ndarray]) -> np.ndarray:
    """The rows to draw: the ends of each curve and the extremes of each of its BINS parts, so that a spike of a single
    step stays visible."""
    keep = []
    for y in ys:
        rows = np.flatnonzero(np.isfinite(y))
        keep += [rows[0], rows[-1]]
        for part in np.array_split(rows, min(BINS, len(rows))):
            keep += [part[y[part].argmin()], part[y[part].argmax()]]
    return np.unique(keep)


def chart(title: str, x: np.ndarray, curves: list[Curve], axis: str = "", unit: str = "step") -> str:
    """Curves over x (n,), in `unit`; y axis "", "zero" (from 0) or "log". "" if there is nothing to draw."""
    curves = [c for c in curves if np.isfinite(c.y).any()]
    if not curves:
        return ""
    rows = thin([c.y for c in curves])
    data = {"title": title, "unit": unit, "axis": axis, "x": x[rows].tolist(), "curves": []}
    for c in curves:
        y = [float(f"{v:.6g}") if math.isfinite(v) else None for v in c.y[rows].tolist()]
        data["curves"].append({"label": c.label, "y": y, "colour": c.colour % 8, "style": c.style})
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<figure class="chart"><script type="application/json">{text}</script></figure>\n'


def charts(runs: list[Run], names: list[str], unit: str, per_step: list[int]) -> str:
    """A chart for each metric: train/loss, val/loss and val/loss_ema share one, and so do loss_q0 to loss_q3. Of
    several runs a chart for each key, with a curve for each run."""
    overlay = len(runs) > 1
    x = np.unique(np.concatenate([run.steps * n for run, n in zip(runs, per_step)]))
    groups = {}  # (title, y axis, is it in sight?) -> keys
    for key in dict.fromkeys(key for run in runs for key in run.columns if key not in COUNTERS):
        name = name_of(key)
        title, axis = CHARTS.get(name, (name, ""))
        if re.search(r"_q[0-3]$", key):
            title = f"{key[:-3]} by quarter of t, q0 next to the images"
        groups.setdefault((key if overlay else title, axis, name in CHARTS), []).append(key)
    in_sight = folded = ""
    for (title, axis, is_in_sight), keys in groups.items():
        curves = []
        for i, key in enumerate(keys):
            is_noisy = key.startswith("train/") and key != "train/lrm"
            style = "" if key.startswith("train/") else "dots"
            for j, (run, n) in enumerate(zip(runs, per_step)):
                y = np.full(len(x), math.nan)
                y[np.searchsorted(x, run.steps * n)] = run.columns.get(key, math.nan)
                if not np.nan_to_num(y).any():  # not logged, or an MFU of 0: the peak of the device is not known
                    continue
                if is_noisy and is_in_sight and not overlay:
                    curves.append(Curve("not smoothed", y, i + j, "raw"))
                y = smooth(y) if is_noisy else y
                curves.append(Curve(names[j] if overlay else key, y, i + j, style))
        drawn = chart(title, x, curves, axis, unit)
        in_sight += drawn if is_in_sight else ""
        folded += "" if is_in_sight else drawn
    if folded:
        folded = f'<details><summary>More</summary><div class="charts">{folded}</div></details>'
    return f'<div class="charts">{in_sight or "Nothing has been logged so far."}</div>{folded}'


# ---------------------------------------------------------------------------------------------------------------------
# Text and tables. Whatever comes from a file goes through escape


def number(value) -> str:
    """For the eye: commas in integers and from 1,000 up, else four digits."""
    if type(value) is float and math.isfinite(value):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(brief(value, 20))) or '""'


def tiles(pairs: dict) -> str:
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{number(v)}</dd></div>" for k, v in pairs.items() if v is not None)
    return f'<dl class="tiles">{items}</dl>'


def table(head: list[str], columns: list[dict], differing: bool = False) -> str:
    """A row for each key, or only for those whose values differ."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in ("", *head))]
    for key in dict.fromkeys(key for column in columns for key in column):
        values = ["" if column.get(key) is None else number(column[key]) for column in columns]
        if not differing or len(set(values)) > 1:
            lines.append(f"<th>{escape(key)}</th>" + "".join(f"<td>{value}</td>" for value in values))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def figures(run: Run) -> dict:
    """How far the run is, and the last values of the metrics in CHARTS."""
    found = {"step": f"{max([0, *run.steps]):,} of {run.facts.get('num_iterations', 0):,}"}
    for key in run.columns:
        if name_of(key) in CHARTS and run.last(key):  # an MFU of 0: the peak is not known
            found[key] = run.last(key)
    return found | {"minutes in training": round((run.last("total_training_time_s") or 0) / 60, 1)}


def flat(facts: dict) -> dict:
    """config.json without its nesting."""
    pairs = {}
    for key, value in facts.items():
        if key not in ("changed_from", "command"):
            pairs |= flat(value) if isinstance(value, dict) else {key: value}
    return pairs


def commands(run: Run) -> str:
    """What to type next, in the repository."""
    environment = run.facts.get("environment", {})
    script, *args = environment.get("command", ["base_train"])
    world = environment.get("world_size", 1)
    launcher = f"torchrun --standalone --nproc_per_node={world} -m" if world > 1 else "python -m"
    resume = [f"{launcher} scripts.{shlex.quote(Path(script).stem)}"]
    resume += [shlex.quote(arg) for arg in args if not arg.startswith("--resume")]
    lines = [" ".join(resume), f"python -m scripts.sample --run={shlex.quote(run.folder.name)}"]
    base = run.folder.parent.parent
    if base != Path.home() / ".cache" / "nanodiff":
        lines.insert(0, f"export NANODIFF_BASE_DIR={shlex.quote(str(base))}")
    return f"<h2>Resume and sample</h2><pre>{escape(chr(10).join(lines))}</pre>"


def evaluation(e: dict, name: str) -> str:
    """What base_eval or compare_samplers wrote: floats were measured (but for cfg_scale), the rest is the protocol."""
    if not e:
        return ""
    rows = e.pop("rows", [])
    heading = f"<h3>{number(e.pop('metric', ''))} <small>{escape(name)}, step {number(e.pop('step', ''))}</small></h3>"
    measured = {key: value for key, value in e.items() if type(value) is float and key != "cfg_scale"}
    protocol = " · ".join(f"{key} {brief(value)}" for key, value in e.items() if key not in measured)
    return f'{heading}{tiles(measured)}{samplers(rows)}<p class="muted">{escape(protocol)}</p>'


def samplers(rows: list[dict]) -> str:
    """What compare_samplers measured: two charts over evaluations of the network, and a table."""
    if not rows:
        return ""
    few = [row for row in rows if row["evaluations"] <= 100]
    x = np.unique([row["evaluations"] for row in few])
    pictures = ""
    for key in ("fd_classifier", "error"):
        curves = {row["sampler"]: np.full(len(x), math.nan) for row in few}
        for row in few:
            curves[row["sampler"]][np.searchsorted(x, row["evaluations"])] = row.get(key)  # None becomes NaN
        curves = [Curve(sampler, y, i, "dots") for i, (sampler, y) in enumerate(curves.items())]
        pictures += chart(f"{key}, up to 100 evaluations", x, curves, "log", "evaluations")
    head = [key for key in rows[0] if key not in ("sampler", "steps")]
    columns = [{f"{row['sampler']}, {row['steps']}": row[key] for row in rows} for key in head]
    return f'<div class="charts">{pictures}</div>{table(head, columns)}'


# ---------------------------------------------------------------------------------------------------------------------
# Grids of samples


def shrunk(png: bytes, factor: int) -> bytes:
    if factor == 1 and png.startswith(b"\x89PNG"):
        return png
    pixels = decode_png(png)
    h, w = pixels.shape[0] // factor, pixels.shape[1] // factor
    blocks = pixels[: h * factor, : w * factor].reshape(h, factor, w, factor, -1)
    return encode_png(blocks.mean((1, 3)).round().astype(np.uint8))


def embed(paths: list[Path], budget: int) -> dict[Path, str]:
    """{path: data URL} of PNG files in at most `budget` bytes: evenly thinned out, from the first to the last, but
    shrunk where that would leave fewer than FEWEST_GRIDS."""
    largest = max((path.stat().st_size for path in paths), default=0)
    for factor in (1, 2, 4, 8, 16, 32):
        count = min(len(paths), int(max(budget, 0) / (100 + 4 / 3 * largest / factor**2)))  # base64: 4 bytes for 3
        if count < min(len(paths), FEWEST_GRIDS):
            continue
        urls = {}
        for i in np.linspace(0, len(paths) - 1, count).round().astype(int):
            try:
                png = shrunk(paths[i].read_bytes(), factor)
            except ValueError:  # torn, or not ours
                continue
            urls[paths[i]] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        if sum(map(len, urls.values())) <= budget:
            return urls
    return {}


def strip(run: Run, name: str, per_step: int, budget: int) -> str:
    """A run's grids, of which a slider shows one, at first the last. It moves the crosshair of the charts too."""
    urls = embed(list(run.grids), budget)
    if not urls:
        return ""
    images = ""
    for path, url in urls.items():
        step = run.grids[path]
        images += f'<img alt="samples at step {step}" data-step="{step}" data-x="{step * per_step}" src="{url}" hidden>'
    return f"""<figure class="strip"><figcaption>{escape(name)}<output></output></figcaption>{images}
<input type="range" max="{len(urls) - 1}" value="{len(urls) - 1}" aria-label="step of the samples">
<small>{len(urls)} of {len(run.grids)} grids, all of the same noise and classes</small></figure>"""


# ---------------------------------------------------------------------------------------------------------------------
# The page


def make_page(run_dirs: list[Path]) -> bytes:
    runs = [read_run(folder) for folder in run_dirs]
    names = [run.folder.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    everything = []
    for run in runs:
        checkpoints = [step for step, _ in list_checkpoints(run.folder)]
        everything.append(flat(run.facts) | {"checkpoints": checkpoints})
    if len(runs) == 1:
        unit, per_step = "step", [1]
        facts = runs[0].facts
        head = f'<progress max="{facts.get("num_iterations", 1)}" value="{max([0, *runs[0].steps])}"></progress>'
        head += f"{tiles(figures(runs[0]))}<h2>Changed settings</h2>"
        config = facts.get("config", {})
        defaults = config | facts.get("changed_from", {})
        head += table(["here", "default"], [config, defaults], differing=True)
    else:
        unit, per_step = "images", [pairs.get("total_batch_size", 1) for pairs in everything]
        head = f"{table(names, [figures(run) for run in runs])}<h2>What differs</h2>"
        head += table(names, everything, differing=True)
    title = " and ".join(names)
    head = f"""<h1>{escape(title)}</h1>{head}
<details><summary>All settings, sizes, machine</summary>{table(names, everything)}</details>
<h2>Curves</h2>{charts(runs, names, unit, per_step)}<h2>Samples</h2>"""
    evaluations = ""
    for run, name in zip(runs, names):
        for path in sorted(run.folder.glob("eval_*.json")):
            evaluations += evaluation(read_json(path.read_bytes()), name)
    foot = f"""<h2>Evaluations</h2>{evaluations or "None so far."}{commands(runs[0]) if len(runs) == 1 else ""}
<footer class="muted">Training metrics are smoothed by a running average over 2% of the points. Long curves show the
least and the greatest value of each of {BINS} parts. The first 5% of a curve may leave its chart.</footer>"""

    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    top, bottom = template.replace("$title", escape(title), 1).rsplit("$body", 1)
    text_bytes = len((top + head + foot + bottom).encode("utf-8", "replace"))
    budget = (MAX_BYTES - 100_000 - text_bytes) // len(runs)  # 100,000 for the markup around the grids
    strips = "".join(strip(run, name, n, budget) for run, name, n in zip(runs, names, per_step))
    page = f'{top}{head}<div class="charts">{strips or "None so far."}</div>{foot}{bottom}'
    return page.encode("utf-8", "replace")  # JSON can hold a lone surrogate, UTF-8 cannot: it becomes a question mark


def write_report(run_dirs: list[Path], path: Path) -> None:
    """Write the page of one run, or of several overlaid, to `path`."""
    write_atomic(path, make_page(run_dirs))


class LiveReport:
    """Keeps run_dir/report.html up to date. Never raises, and uses at most 1% of the run's time: all it shows is on
    disk already, so neither a bug here nor a full disk is a reason to end hours of training."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.due = 0.0

    def refresh(self, last: bool = False) -> None:
        """Write the report, unless it was written lately; the last one is always written."""
        start = time.monotonic()
        if start < self.due and not last:
            return
        try:
            write_report([self.run_dir], self.run_dir / "report.html")
        except Exception as e:
            print(f"no report: {type(e).__name__}: {e}; see python -m scripts.report {self.run_dir}", flush=True)
        self.due = start + 100 * (time.monotonic() - start)  # it takes seconds if metrics.jsonl is long
