"""The report of a run, or of several overlaid: one HTML file below 5 MB that opens offline.

It shows what can be read in the run folders: config.json, metrics.jsonl, samples/step_*.png and eval_*.json. Every
number that was logged becomes a chart, which report.html draws.
"""

import base64
import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, brief
from nanodiff.files import write_atomic
from nanodiff.png import decode_png, encode_png
from nanodiff.training.checkpoint import list_checkpoints

MAX_BYTES = 5_000_000
FEWEST_GRIDS = 12  # grids of samples are shrunk rather than fewer shown
BINS = 300  # long curves are thinned to the minimum and the maximum of so many parts
CHARTS = {  # metric -> title, y axis ("zero": from 0). Other metrics follow, folded away
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


@dataclass
class Run:
    folder: Path
    facts: dict  # config.json
    step: int = 0  # the last one logged
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # key of metrics.jsonl -> {step: finite value}
    per_step: int = 1  # what the x axis counts: 1 for steps, the batch size for images


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
    facts = read_json((folder / "config.json").read_bytes())
    metrics = folder / "metrics.jsonl"
    lines = [read_json(text) for text in metrics.read_bytes().splitlines()] if metrics.exists() else []
    lines = [line for line in lines if type(line.get("step")) is int and line["step"] >= 0]
    run = Run(folder.resolve(), facts)
    for line in sorted(lines, key=lambda line: line["step"]):
        run.step = line.pop("step")
        for key, value in line.items():
            if type(value) in (int, float) and abs(value) < 1e99:  # NaN is not
                run.logged.setdefault(key, {})[run.step] = float(value)
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
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<figure class="chart"><script type="application/json">{text}</script></figure>\n' if curves else ""


def charts(runs: list[Run]) -> str:
    """A chart for each metric; with several runs, a chart for each key and a curve for each run."""
    overlay = len(runs) > 1
    logged = sorted({key for run in runs for key in run.logged if key not in COUNTERS})
    in_sight = folded = ""
    for name in dict.fromkeys([*CHARTS, *map(chart_of, logged)]):
        title, axis = CHARTS.get(name, (name, ""))
        curves = {}  # title -> curves
        for i, key in enumerate(key for key in logged if chart_of(key) == name):
            for j, run in enumerate(runs):
                points = {step * run.per_step: value for step, value in run.logged.get(key, {}).items()}
                if not any(points.values()):  # not logged, or an MFU of 0: the peak of the device is not known
                    continue
                drawn = curves.setdefault(key if overlay else title, [])
                label = run.folder.name if overlay else key
                is_noisy = key.startswith("train/") and key != "train/lrm"
                if is_noisy:
                    if name in CHARTS and not overlay:
                        drawn.append(curve("not smoothed", points, i, "raw"))
                    points = dict(zip(points, smooth(points.values())))
                drawn.append(curve(label, points, i + j, "" if key.startswith("train/") else "dots"))
        drawn = "".join(chart(title, curves[title], axis, "images" if overlay else "step") for title in curves)
        if name in CHARTS:
            in_sight += drawn
        else:
            folded += drawn
    if folded:
        folded = f'<details><summary>More</summary><div class="charts">{folded}</div></details>'
    return f'<div class="charts">{in_sight or "Nothing has been logged so far."}</div>{folded}'


# ---------------------------------------------------------------------------------------------------------------------
# Text and tables. Whatever comes from a file goes through escape


def number(value) -> str:
    """For the eye: commas in integers and from 1,000 up, else four digits."""
    if type(value) is float:
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else escape(str(brief(value, 20))) or '""'


def tiles(pairs: dict) -> str:
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{number(value)}</dd></div>" for key, value in pairs.items())
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
    last = {key: list(points.values())[-1] for key, points in sorted(run.logged.items())}
    found = {"step": f"{run.step:,} of {run.facts.get('num_iterations', 0):,}"}
    found |= {key: value for key, value in last.items() if chart_of(key) in CHARTS and value}
    return found | {"minutes in training": round(last.get("total_training_time_s", 0) / 60, 1)}


def flat(facts: dict) -> dict:  # config.json without its nesting
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
    resume = shlex.join([f"scripts.{Path(script).stem}", *(arg for arg in args if not arg.startswith("--resume"))])
    text = f"""export NANODIFF_BASE_DIR={shlex.quote(str(run.folder.parent.parent))}
{launcher} {resume}
python -m scripts.sample --run={shlex.quote(run.folder.name)}"""
    return f"<h2>Resume and sample</h2><pre>{escape(text)}</pre>"


def evaluations(run: Run) -> str:
    found = ""
    for path in sorted(run.folder.glob("eval_*.json")):
        try:
            found += evaluation(read_json(path.read_bytes()), run.folder.name)
        except (KeyError, TypeError) as error:
            found += f'<p class="muted">{escape(path.name)} skipped: {type(error).__name__}</p>'
    return found


def evaluation(e: dict, name: str) -> str:
    """What base_eval or compare_samplers wrote: floats were measured (but for cfg_scale), the rest is the protocol."""
    rows = e.pop("rows", [])
    step = e.pop("step") if "step" in e else e["samples_protocol"]["step"]  # of a file of samples
    heading = f"<h3>{number(e.pop('metric'))} <small>{escape(name)}, step {number(step)}</small></h3>"
    measured = {key: value for key, value in e.items() if type(value) is float and key != "cfg_scale"}
    protocol = " · ".join(f"{key} {brief(value)}" for key, value in e.items() if key not in measured)
    return f'{heading}{tiles(measured)}{samplers(rows) if rows else ""}<p class="muted">{escape(protocol)}</p>'


def samplers(rows: list[dict]) -> str:
    """The rows of compare_samplers: two charts over evaluations of the network, and a table."""
    pictures = ""
    for measured in ("fd_classifier", "error"):
        curves = {}  # sampler -> {evaluations: value}
        for row in rows:
            if row["evaluations"] <= 100 and row.get(measured) is not None:
                curves.setdefault(row["sampler"], {})[row["evaluations"]] = row[measured]
        drawn = [curve(name, curves[name], i, "dots") for i, name in enumerate(curves)]
        pictures += chart(f"{measured}, up to 100 evaluations", drawn, "log", "evaluations")
    head = [key for key in rows[0] if key not in ("sampler", "steps")]
    columns = [{f"{row['sampler']}, {row['steps']}": row[key] for row in rows} for key in head]
    return f'<div class="charts">{pictures}</div>{table(head, columns)}'


# ---------------------------------------------------------------------------------------------------------------------
# The page


def data_url(png: bytes, max_bytes: int) -> str:
    """A PNG as a data URL, halved until it fits. Raises ValueError where it cannot be."""
    while len(url := f"data:image/png;base64,{base64.b64encode(png).decode()}") > max_bytes:
        pixels = decode_png(png)
        h, w = pixels.shape[0] // 2, pixels.shape[1] // 2
        blocks = pixels[: 2 * h, : 2 * w].reshape(h, 2, w, 2, -1)
        png = encode_png(blocks.mean((1, 3)).round().astype(np.uint8))
    return url


def strip(run: Run, budget: int) -> str:
    """A run's grids in `budget` bytes, evenly thinned out. A slider shows one, and moves the charts' crosshair too."""
    paths = [path for path in sorted(run.folder.glob("samples/step_*.png")) if path.stem[5:].isdigit()]
    largest = max((path.stat().st_size for path in paths), default=0)
    count = min(len(paths), max(FEWEST_GRIDS, budget // (100 + 4 * largest // 3)))  # base64: 4 bytes for 3
    images = []
    for i in np.linspace(0, len(paths) - 1, count).round().astype(int):
        step = int(paths[i].stem[5:])
        with suppress(ValueError):
            url = data_url(paths[i].read_bytes(), budget // count)
            where = f'data-step="{step}" data-x="{step * run.per_step}"'
            images.append(f'<img alt="samples at step {step}" {where} src="{url}" hidden>')
    if not images:
        return ""
    return f"""<figure class="strip"><figcaption>{escape(run.folder.name)}<output></output></figcaption>
{"".join(images)}<input type="range" max="{len(images) - 1}" value="{len(images) - 1}" aria-label="step of the samples">
<small>{len(images)} of {len(paths)} grids, all of the same noise and classes</small></figure>"""


def make_page(run_dirs: list[Path]) -> bytes:
    runs = [read_run(folder) for folder in run_dirs]
    names = [run.folder.name for run in runs]
    everything = []
    for run in runs:
        checkpoints = [step for step, _ in list_checkpoints(run.folder)]
        everything.append(flat(run.facts) | {"checkpoints": checkpoints})
    foot = "".join(map(evaluations, runs)) or "None so far."
    if len(runs) == 1:
        facts = runs[0].facts
        config = facts.get("config", {})
        head = f'<progress max="{facts.get("num_iterations", 1)}" value="{runs[0].step}"></progress>'
        head += f"{tiles(figures(runs[0]))}<h2>Changed settings</h2>"
        head += table(["here", "default"], [config, config | facts.get("changed_from", {})], differing=True)
        foot += commands(runs[0])
    else:
        for run, settings in zip(runs, everything):
            run.per_step = settings.get("total_batch_size", 1)
        head = f"{table(names, [figures(run) for run in runs])}<h2>What differs</h2>"
        head += table(names, everything, differing=True)
    title = escape(" and ".join(names))
    head = f"""<h1>{title}</h1>{head}
<details><summary>All settings, sizes, machine</summary>{table(names, everything)}</details>
<h2>Curves</h2>{charts(runs)}<h2>Samples</h2>"""
    foot = f"""<h2>Evaluations</h2>{foot}
<footer class="muted">Training metrics are smoothed by a running average over 2% of the points. Long curves show the
minimum and the maximum of each of {BINS} parts. The first 5% of a curve may leave its chart.</footer>"""

    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    top, bottom = template.replace("$title", title, 1).rsplit("$body", 1)
    text_bytes = len((top + head + foot + bottom).encode("utf-8", "replace"))
    budget = (MAX_BYTES - 100_000 - text_bytes) // len(runs)  # 100,000 for the markup around the grids
    strips = "".join(strip(run, budget) for run in runs)
    page = f'{top}{head}<div class="charts">{strips or "None so far."}</div>{foot}{bottom}'
    return page.encode("utf-8", "replace")  # JSON can hold a lone surrogate, UTF-8 cannot: it becomes a question mark


def write_report(run_dirs: list[Path], path: Path) -> None:
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
