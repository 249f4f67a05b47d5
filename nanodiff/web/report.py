"""
One page per run, or one that lays several runs over each other.

    python -m nanodiff.web.report                     # the run that was written to last: runs/<tag>/report.html
    python -m nanodiff.web.report RUN                 # a run by its tag or folder
    python -m nanodiff.web.report RUN_A RUN_B ...     # up to eight: runs/compare_RUN_A_RUN_B.html

A page is one file below 5 MB that needs no other and no network. It is made of what lies in the folders of the runs and
nothing else: config.json, metrics.jsonl, samples/step_*.png, eval_*.json and the names of the checkpoints.
"""

import base64
import json
import math
import re
import shlex
import sys
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

from nanodiff.common import UserError, base_dir, brief
from nanodiff.files import write_atomic
from nanodiff.formats.load import find_run
from nanodiff.png import decode_png, encode_png
from nanodiff.training.checkpoint import list_checkpoints
from nanodiff.web.chart import BINS, Curve, chart, number, smooth

MAX_BYTES = 5_000_000
MAX_RUNS = 8  # on one page: as many as there are colours
FEWEST_GRIDS = 12  # rather than leave out more grids than that, they are made smaller

QUARTERS = ("t in 0–¼", "¼–½", "½–¾", "¾–1")  # t = 0 is the image, 1 the noise
CHARTS = [  # heading, {key of metrics.jsonl: label}, y axis
    ("Loss", {"train/loss": "train", "val/loss": "validation", "val/loss_ema": "of averaged weights"}, ""),
    ("Training loss by quarter of t, smoothed", {f"train/loss_q{i}": q for i, q in enumerate(QUARTERS)}, ""),
    ("Validation loss by quarter of t", {f"val/loss_q{i}": q for i, q in enumerate(QUARTERS)}, ""),
    ("Learning rate", {"train/lrm": "relative to the full one"}, "zero"),
    ("Gradient norm", {"train/grad_norm": "before clipping"}, "log"),
    ("Speed", {"train/images_per_sec": "images per second"}, "zero"),
    ("Model FLOPs utilisation", {"train/mfu": "percent of the peak in bf16"}, "zero"),
    ("Bits per dimension", {"val/bpd": "of averaged weights"}, ""),
    ("Fréchet distance", {"val/fid": "FID", "val/fd_classifier": "in a classifier's features"}, ""),
]
COUNTERS = ("images_seen", "total_training_flops", "total_training_time_s")
NOISY = re.compile(r"train/(?!lrm).+")  # shown smoothed


class Run(NamedTuple):
    folder: Path
    described: dict  # config.json
    steps: np.ndarray  # (n,) int64, ascending
    columns: dict[str, np.ndarray]  # key of metrics.jsonl -> (n,) float64, NaN where it was not logged
    grids: dict[Path, int]  # PNG of samples -> step, ascending
    evals: list[dict]

    def part(self, name: str) -> dict:
        """A part of config.json; {} where it is not there."""
        value = self.described.get(name)
        return value if isinstance(value, dict) else {}

    def last(self, key: str) -> float | None:
        """The last value of a metric."""
        y = self.columns.get(key, np.empty(0))
        y = y[np.isfinite(y)]
        return float(y[-1]) if len(y) else None


def read_json(text: bytes) -> dict:
    """The object in `text`; {} for anything else, such as the torn last line of a process that was killed."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Run:
    """Raises UserError where there is no config.json."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not the folder of a run: it holds no config.json")
    rows = {}  # step -> {key: number}; the lines of one step are put together
    if (folder / "metrics.jsonl").exists():
        with open(folder / "metrics.jsonl", "rb") as f:
            for line in map(read_json, f):
                if type(step := line.pop("step", None)) is int and 0 <= step < 2**40:
                    numbers = {k: float(v) for k, v in line.items() if type(v) in (int, float) and abs(v) < 1e99}
                    rows[step] = rows.get(step, {}) | numbers
    steps, keys = sorted(rows), dict.fromkeys(key for row in rows.values() for key in row)
    columns = {key: np.array([rows[step].get(key, math.nan) for step in steps]) for key in keys}
    grids = {p: re.fullmatch(r"step_(\d{1,12})", p.stem) for p in folder.glob("samples/step_*.png")}
    grids = dict(sorted(((p, int(match[1])) for p, match in grids.items() if match), key=lambda grid: grid[1]))
    evals = [read_json(path.read_bytes()) for path in sorted(folder.glob("eval_*.json"))]
    described = read_json((folder / "config.json").read_bytes())
    return Run(folder.resolve(), described, np.array(steps, np.int64), columns, grids, [e for e in evals if e])


# ---------------------------------------------------------------------------------------------------------------------
# What there is to say of a run


def duration(seconds: float) -> str:
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    size, unit = next((u for u in units if seconds >= 2 * u[0]), (1, "seconds"))
    return f"{seconds / size:.1f} {unit}"


def figures(run: Run) -> dict:
    """How far it has come, and the last values."""
    step, horizon = int(run.steps[-1]) if len(run.steps) else 0, run.described.get("num_iterations")
    seconds, dt_ms = run.last("total_training_time_s"), run.last("train/dt_ms")
    left_s = (horizon - step) * (dt_ms or 0) / 1000 if type(horizon) is int else 0
    return {
        "Step": f"{step:,} of {number(horizon)}",
        "Training loss": run.last("train/loss"),
        "Validation loss": run.last("val/loss"),
        "Validation, averaged": run.last("val/loss_ema"),
        "Bits per dimension": run.last("val/bpd"),
        "FID": run.last("val/fid"),
        "Classifier's FD": run.last("val/fd_classifier"),
        "Images per second": run.last("train/images_per_sec"),
        "MFU in percent": run.last("train/mfu") or None,  # 0 where the peak of the device is not known
        "Time in training": duration(seconds) if seconds else None,
        "Time left": duration(left_s) if left_s > 0 else None,
    }


def sizes(run: Run) -> dict:
    """The rest of config.json, flat: sizes, model, data, environment; and what was used and kept."""
    parts = (run.described, *map(run.part, ("model", "data", "environment")))
    flat = {k: v for part in parts for k, v in part.items() if k != "command" and not isinstance(v, dict)}
    for key, many in flat.items():
        if isinstance(many, list):
            flat[key] = ", ".join(map(str, many[:20])) + f", … {len(many):,} in all" * (len(many) > 20)
    flat |= {key: int(run.last(key)) for key in ("images_seen", "total_training_flops") if run.last(key)}
    return flat | {"checkpoints": ", ".join(f"{step:,}" for step, _ in list_checkpoints(run.folder)) or "none"}


def commands(run: Run) -> dict:
    """What one may want to type next, in the repository."""
    machine, tag, base = run.part("environment"), shlex.quote(run.folder.name), run.folder.parent.parent
    argv, world = machine.get("command"), machine.get("world_size")
    script, *args = map(str, argv) if isinstance(argv, list) and argv else ["base_train"]
    args = [shlex.quote(arg) for arg in args if not arg.startswith("--resume")]
    launcher = f"torchrun --standalone --nproc_per_node={world}" if type(world) is int and world > 1 else "python"
    where = "" if base == Path.home() / ".cache" / "nanodiff" else f"NANODIFF_BASE_DIR={shlex.quote(str(base))} "
    return {
        "Resume": " ".join([f"{where}{launcher} -m scripts.{shlex.quote(Path(script).stem)}", *args]),
        "Sample": f"{where}python -m scripts.sample --run={tag}",
        "Evaluate": f"{where}python -m scripts.base_eval --run={tag} --metric=loss",
        "Make this page anew": f"{where}python -m nanodiff.web.report {tag}",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a page. Whatever comes from a file goes through escape.


def shown(value) -> str:
    return escape("–" if value is None else '""' if value == "" else number(value))


def facts(pairs: dict, css: str = "facts") -> str:
    """Names and values; those that are None are left out."""
    items = (f"<div><dt>{escape(k)}</dt><dd>{shown(v)}</dd></div>" for k, v in pairs.items() if v is not None)
    return f'<dl class="{css}">{"".join(items)}</dl>'


def table(head: list[str], columns: list[dict], differing: bool = False) -> str:
    """A row for each key of the columns, if any has a value for it; or only if their values differ."""
    rows = {key: [column.get(key) for column in columns] for key in dict.fromkeys(k for c in columns for k in c)}
    rows = {k: v for k, v in rows.items() if any(x != (v[0] if differing else None) for x in v)}
    lines = ["".join(f"<th>{escape(name)}</th>" for name in ("", *head))]
    lines += [f"<th>{escape(k)}</th>" + "".join(f"<td>{shown(x)}</td>" for x in v) for k, v in rows.items()]
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def charts(runs: list[Run], names: list[str], unit: str, per_step: list[int]) -> str:
    """What CHARTS lists and, folded, what else was logged; of several runs a chart for each key, with a curve a run."""
    x = np.unique(np.concatenate([run.steps * n for run, n in zip(runs, per_step)]))
    known = {key for _, keys, _ in CHARTS for key in keys}.union(COUNTERS)
    others = dict.fromkeys(key for run in runs for key in run.columns if key not in known)
    layout = CHARTS + [(key, {key: key}, "") for key in others]
    if len(runs) > 1:
        smoothed = lambda key: f"{key}, smoothed" if NOISY.fullmatch(key) else key
        layout = [(smoothed(key), {key: key}, axis) for _, keys, axis in layout for key in keys]
    first, more = "", ""
    for title, keys, axis in layout:
        curves = []
        for i, (key, label) in enumerate(keys.items()):
            for j, (run, name, n) in enumerate(zip(runs, names, per_step)):
                y = np.full(len(x), math.nan)
                y[np.searchsorted(x, run.steps * n)] = run.columns.get(key, math.nan)
                if not np.nan_to_num(y).any():  # not logged, or an MFU of 0: the peak of the device is not known
                    continue
                label, noisy = name if len(runs) > 1 else label, NOISY.fullmatch(key)
                if noisy and len(runs) == 1 and "_q" not in key:
                    curves.append(Curve(label, y, i, "raw"))
                    label += ", smoothed"
                y, style = smooth(y) if noisy else y, "" if key.startswith("train/") else "dots"
                curves.append(Curve(label, y, i + j, style))
        drawn = chart(title, x, curves, axis, unit)
        folded = "_q" in title or others.keys() & keys.keys()
        first, more = (first, more + drawn) if folded else (first + drawn, more)
    more = f'<details><summary>More</summary><div class="charts">{more}</div></details>' if more else ""
    return f'<div class="charts">{first or "Nothing was logged so far."}</div>{more}'


def embed(paths: list[Path], budget: int, shrink: int = 1) -> dict[Path, str]:
    """{path: data URL} of PNG files in at most `budget` bytes: evenly thinned out, the first and the last kept.

    Rather than be fewer than FEWEST_GRIDS, they are drawn at half the size, and so on. Other files are left out.
    """
    largest = 100 + 4 / 3 * max((path.stat().st_size for path in paths), default=0)  # base64: 4 bytes for 3
    count = min(len(paths), int(budget / largest * shrink**2)) if budget > 0 else 0
    chosen = np.linspace(0, len(paths) - 1, count).round().astype(int)
    urls = {}
    for path in (paths[i] for i in chosen if count >= min(len(paths), FEWEST_GRIDS)):
        with suppress(ValueError):
            png = path.read_bytes()
            if shrink > 1:
                pixels = decode_png(png)
                h, w = pixels.shape[0] // shrink, pixels.shape[1] // shrink
                blocks = pixels[: h * shrink, : w * shrink].reshape(h, shrink, w, shrink, -1)
                png = encode_png(blocks.mean((1, 3)).round().astype(np.uint8))
            if png.startswith(b"\x89PNG"):
                urls[path] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    if count >= min(len(paths), FEWEST_GRIDS) and sum(map(len, urls.values())) <= budget:
        return urls
    return embed(paths, budget, 2 * shrink) if shrink < 64 else {}


def strip(run: Run, name: str, per_step: int, budget: int) -> str:
    """The grids of samples, one of which is seen: the last, until the range is moved. It moves the crosshair too."""
    urls = embed(list(run.grids), budget)
    if not urls:
        return ""
    steps, last = [run.grids[path] for path in urls], len(urls) - 1
    images = [
        f'<img alt="samples at step {step}" data-step="{step}" data-x="{step * per_step}" src="{url}" hidden>'
        for step, url in zip(steps, urls.values())
    ]
    images[-1] = images[-1].replace(" hidden>", ">")
    return f"""<figure class="strip"><figcaption>{escape(name)}<output>step {steps[-1]:,}</output></figcaption>
{"".join(images)}<input type="range" max="{last}" value="{last}" aria-label="step of the samples">
<small>{len(urls)} of {len(run.grids)} grids, all of the same noise and classes</small></figure>"""


def evaluation(e: dict, name: str) -> str:
    """What base_eval wrote: its floats were measured (but for a setting of the sampler), the rest is the protocol."""
    measured = {k: v for k, v in e.items() if type(v) is float and k != "cfg_scale"}
    known = (*measured, "metric", "step", "rows")
    protocol = " · ".join(f"{k} {brief(v)}" for k, v in e.items() if k not in known)
    measured = {k.replace("_", " "): v for k, v in measured.items()}
    heading = f"<h3>{shown(e.get('metric'))} <small>{escape(name)}, step {shown(e.get('step'))}</small></h3>"
    return f'{heading}{facts(measured, "tiles")}{samplers(e.get("rows"))}<p class="muted">{escape(protocol)}</p>'


def samplers(rows) -> str:
    """What compare_samplers wrote: quality over evaluations of the network, of samplers; "" if it is anything else."""
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    rows = [row for row in rows if type(row.get("evaluations")) is int and 0 < row["evaluations"] < 2**31]
    x = sorted({row["evaluations"] for row in rows if row["evaluations"] <= 100})
    pictures = ""
    for key in ("fd_classifier", "error"):
        curves = []
        for i, name in enumerate(dict.fromkeys(str(row.get("sampler")) for row in rows)):
            y = {row["evaluations"]: row.get(key) for row in rows if str(row.get("sampler")) == name}
            y = [float(y[v]) if type(y.get(v)) in (int, float) else math.nan for v in x]
            curves.append(Curve(name, np.array(y), i % 8, "dots"))
        pictures += chart(f"{key}, up to 100 evaluations", np.array(x), curves, "log", "evaluations") if x else ""
    columns = [{k: v for k, v in row.items() if k not in ("sampler", "steps")} for row in rows]
    head = [f"{row.get('sampler')}, {row.get('steps')}" for row in rows]
    return f'<div class="charts">{pictures}</div>{table(head, columns)}' if rows else ""


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def make_page(folders: list[Path]) -> bytes:
    """The page of one run or of several, in UTF-8. Raises UserError for a folder that is none of a run."""
    runs = [read_run(folder) for folder in folders]
    tags = [run.folder.name for run in runs]
    names = tags if len(set(tags)) == len(tags) else [str(run.folder) for run in runs]
    title, run = " and ".join(names), runs[0]
    settings = [{name: str(value) for name, value in run.part("config").items()} for run in runs]
    if len(runs) == 1:
        unit, per_step = "step", [1]
        step, horizon = int(run.steps[-1]) if len(run.steps) else 0, run.described.get("num_iterations")
        done = f'<progress max="{horizon}" value="{step}"></progress>' if type(horizon) is int and horizon > 0 else ""
        defaults = {name: str(value) for name, value in run.part("changed_from").items()}
        changes = table(["here", "default"], [{name: settings[0].get(name) for name in defaults}, defaults])
        head = f"""{done}{facts(figures(run), "tiles")}<h2>Settings</h2>{changes if defaults else ""}
<details><summary>All {len(settings[0])} settings</summary>{facts(settings[0])}</details>
<h2>Sizes and machine</h2>{facts(sizes(run))}"""
        foot = "".join(f"<p>{what}</p><pre>{escape(command)}</pre>" for what, command in commands(run).items())
        foot = f"<h2>Resume, sample, evaluate</h2>{foot}"
    else:
        batches = [run.part("config").get("total_batch_size") for run in runs]
        unit, per_step = "images", [b if type(b) is int and 0 < b < 2**20 else 1 for b in batches]
        differing = table(names, [s | sizes(run) for s, run in zip(settings, runs)], differing=True)
        head, foot = f"{table(names, [figures(run) for run in runs])}<h2>What differs</h2>{differing}", ""
    head = f"<h1>{escape(title)}</h1>{head}<h2>Curves</h2>{charts(runs, names, unit, per_step)}"
    evaluations = "".join(evaluation(e, name) for run, name in zip(runs, names) for e in run.evals)
    foot = f"""<h2>Evaluations</h2>{evaluations or "<p>None so far.</p>"}{foot}
<footer class="muted">A curve of many points is drawn through the least and the greatest value of each of {BINS} parts.
Smoothed: a running average over 2% of the points. A curve may leave its chart in its first twentieth.</footer>"""

    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    rest = len((title + template.template + head + foot).encode("utf-8", "replace"))
    budget = (MAX_BYTES - 100_000 - rest) // len(runs)  # the 100,000 are for the text around the pictures
    strips = "".join(strip(run, name, n, budget) for run, name, n in zip(runs, names, per_step))
    body = f'{head}<h2>Samples</h2><div class="charts">{strips or "None so far."}</div>{foot}'
    # A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark
    return template.substitute(title=escape(title), body=body).encode("utf-8", "replace")


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html. Raises UserError where there is no run, OSError where it cannot be written."""
    path = run_dir / "report.html"
    write_atomic(path, make_page([run_dir]))
    return path


class LiveReport:
    """The report of a run that goes on: it never ends the run, and costs it at most one percent of its time.

    What a report shows lies on the disk already, so nothing is lost with it, and hours of training would be: a bug here
    is no better reason to end a run than a full disk. Whatever is wrong is told in one line, and by the command in it
    with its traceback.
    """

    def __init__(self, run_dir: Path):
        self.run_dir, self.due = run_dir, 0.0

    def refresh(self, last: bool = False) -> None:
        """Write it, unless the one before is of late; the last is always written."""
        start = time.monotonic()
        if start < self.due and not last:
            return
        try:
            write_report(self.run_dir)
        except Exception as e:
            print(f"no report: {type(e).__name__}: {e}; see python -m nanodiff.web.report {self.run_dir}", flush=True)
        self.due = start + 100 * (time.monotonic() - start)  # of a long metrics.jsonl it takes seconds


def main(args: list[str]) -> Path:
    if any(arg.startswith("-") for arg in args):
        raise UserError(f"{' '.join(args)!r}: accepted are tags or folders of runs, or nothing for the newest run")
    if len(args) > MAX_RUNS:
        raise UserError(f"{len(args)} runs on one page; accepted: at most {MAX_RUNS}")
    folders = list(dict.fromkeys(find_run(arg).resolve() for arg in args or [""]))
    if len(folders) == 1:
        return write_report(folders[0])
    path = base_dir() / "runs" / f"compare_{'_'.join(folder.name for folder in folders)[:200]}.html"
    page = make_page(folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page)
    return path


if __name__ == "__main__":
    print(main(sys.argv[1:]))
