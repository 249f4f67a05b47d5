"""Line charts as inline SVG, with axes, a legend, and the data for the crosshair of report.html."""

import json
import math
from html import escape
from typing import NamedTuple

import numpy as np

BINS = 300  # a curve of many rows is thinned to the least and the greatest value of each of so many equal parts


class Curve(NamedTuple):
    label: str
    y: np.ndarray  # (n,) float, NaN where there is none
    colour: int  # 0 to 7
    style: str = ""  # raw: faint and thin; dots: a dot at each of few values


def smooth(y: np.ndarray) -> np.ndarray:
    """Running average with a time constant of 2% of the values, at least 3; bias-corrected; NaN stays NaN."""
    finite = np.flatnonzero(np.isfinite(y))
    out, total, weight, decay = np.full(len(y), math.nan), 0.0, 0.0, 1 - 1 / max(3, len(finite) / 50)
    for i in finite:
        total, weight = decay * total + y[i], decay * weight + 1
        out[i] = total / weight
    return out


def thin(x: np.ndarray, ys: list[np.ndarray]) -> np.ndarray:
    """Indices of the rows to draw: of each curve its ends, and the least and greatest value of each of BINS parts of x.

    So a spike of one step is still there, and every value that is shown was logged at the step it is shown at.
    """
    keep = []
    for y in ys:
        i = np.flatnonzero(np.isfinite(y))
        part = ((x[i] - x[0]) / (x[-1] - x[0] + 1) * BINS).astype(int)
        order = np.lexsort((y[i], part))  # by part, and by value within it
        changes = np.diff(part[order], prepend=-1, append=BINS) > 0  # (n + 1,): before and after each part
        keep += [i[order][changes[:-1] | changes[1:]], i[:1], i[-1:]]
    return np.unique(np.concatenate(keep))


def ticks(low: float, high: float, log: bool = False) -> list[tuple[float, str]]:
    """Two to eight round numbers in [low, high] with their labels; logarithmic: 1, 2 and 5 of each power of ten."""
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high))) if log else ()
    values = [digit * 10.0**ten for ten in tens for digit in (1, 2, 5) if low <= digit * 10.0**ten <= high]
    values = values if len(values) <= 8 else values[:: math.ceil(len(values) / 8)]
    if len(values) < 2:
        size = 10.0 ** math.floor(math.log10((high - low) / 5))
        size = next(size * m for m in (1, 2, 5, 10) if high - low <= 7 * size * m)
        values = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
    most = max(map(abs, values))
    unit, letter = next((u for u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if most >= u[0]), (1, ""))
    texts = [f"{v / unit:.6g}" for v in values]
    places = max(len(text.partition(".")[2]) for text in texts)
    if not log and places and not any("e" in text for text in texts):  # 0.0, 0.5, 1.0
        texts = [f"{v / unit:.{places}f}" for v in values]
    return [(v, text + letter * (v != 0)) for v, text in zip(values, texts)]


def limits(ys: list[np.ndarray], axis: str) -> tuple[float, float]:
    """The range of the y axis, which the first twentieth of a curve may leave: losses come from far above."""
    ys = [y[np.isfinite(y)] for y in ys]
    values = np.concatenate([y[len(y) // 20 :] for y in ys])
    low, high = values.min(), values.max()
    if axis == "log":
        space = max((high / low) ** 0.05, 1.01)
        return low / space, high * space
    low = min(low, 0.0) if axis == "zero" else low
    space = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return low - space * (low != 0 or axis != "zero"), high + space


def number(value) -> str:
    """For the eye: whole numbers and those from 1,000 up with commas, others with four digits."""
    if type(value) is int and abs(value) < 2**63:
        return f"{value:,}"
    if type(value) is not float or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:#.4g}".rstrip(".")


def chart(title: str, x: np.ndarray, curves: list[Curve], axis: str = "", unit: str = "step") -> str:
    """A <figure> of curves over x (n,), in `unit`; `axis` of y: "", "zero" (from 0) or "log". "" if there is nothing.

    Axes are in percent and CSS pixels, and paths in a picture of 1000 x 1000 that is stretched over the plot: so it is
    as wide as its place on any screen, while letters and lines keep their size.
    """
    if axis == "log":
        curves = [c._replace(y=np.where(c.y > 0, c.y, math.nan)) for c in curves]
    curves = [c for c in curves if np.isfinite(c.y).any()]
    if not curves:
        return ""
    rows = thin(x, [c.y for c in curves])
    x, curves = x[rows], [c._replace(y=c.y[rows]) for c in curves]
    x_max, (low, high) = max(int(x[-1]), 1), limits([c.y for c in curves], axis)
    scale = np.log10 if axis == "log" else np.asarray
    down = lambda y: (scale(high) - scale(y)) / (scale(high) - scale(low))  # 0 at the top, 1 at the bottom

    drawn, legend = [], []
    for y, text in ticks(low, high, axis == "log"):
        at = f"{100 * down(y):.2f}%"
        drawn.append(f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text class="ytick" x="-8" y="{at}" dy=".32em">{text}</text>')
    for v, text in ticks(0, x_max):
        drawn.append(f'<text class="xtick" x="{100 * v / x_max:.2f}%" y="100%" dy="1.6em">{text}</text>')
    drawn.append('<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none">')
    for c in curves:
        has = np.isfinite(c.y)
        points = zip(1000 * x[has] / x_max, (1000 * down(c.y[has])).clip(-9999, 9999))
        points = [f"{across:.1f},{y:.1f}" for across, y in points]
        drawn.append(f'<path class="c{c.colour} {c.style}" d="M{"L".join(points)}"/>')
        if len(points) == 1 or (c.style == "dots" and len(points) <= 60):
            drawn.append(f'<path class="c{c.colour} dot" d="M{"h0M".join(points)}h0"/>')
        last = number(float(c.y[has][-1]))
        legend.append(f'<li class="c{c.colour} {c.style}"><i></i>{escape(c.label)} <b>{last}</b></li>')
    drawn += [f'<path class="c{c.colour} mark" d=""/>' for c in curves]
    ys = [[float(f"{v:.6g}") if math.isfinite(v) else None for v in c.y.tolist()] for c in curves]
    data = dict(x=x.tolist(), ys=ys, x_max=x_max, y_range=(low, high), log=axis == "log", unit=unit)
    return f"""<figure class="chart">
<figcaption>{escape(title)} <output>{unit}</output></figcaption><ul class="legend">{"".join(legend)}</ul>
<div class="box"><svg class="plot" role="img" aria-label="{escape(title)}">
{"".join(drawn)}</svg><line class="cross" y2="100%"/></svg></div>
<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script></figure>
"""
