"""Curves as SVG for the page: lines, seed bands, axes with round ticks. One small drawing per metric and x axis.

Lines lie in a nested drawing that stretches to any width; text stays outside it, at percentages, so that it has the
same size on a telephone and on a wall. `frame` decides what part of the plane is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from lmlab.report.model import BPB, LOSS, TRAIN_LOSS, Curve, Report
from lmlab.report.palette import BANDS, Stroke

METRICS = {
    BPB: ("val bits/byte", "validation loss (bits per byte)"),
    LOSS: ("val loss", "validation loss (nats per token)"),
    TRAIN_LOSS: ("train loss", "training loss (nats per token)"),
}
AXES = {
    "tokens": ("tokens", "training tokens"),
    "flops": ("FLOPs", "training FLOPs"),
    "elapsed_s": ("seconds", "training time (seconds)"),
}
WIDE, HIGH = 4000, 2000  # the nested drawing's own units, fine enough to write whole numbers
N_TICKS = 6
STEEP_FRAC, FEW = 0.08, 12  # the first steep part of the x axis, which y need not show; points to keep all of
FAR = 2.0  # times the middle arm's loss: an arm above that does not stretch the y axis
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Frame:
    """What is shown: x from x0 to x1, y from y0 to y1; `cut`: the arms that end above it."""

    x0: float
    x1: float
    y0: float
    y1: float
    cut: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ticks:
    """Round values, their texts, and the power of ten that the axis title must name ("" for none)."""

    values: list[float]
    texts: list[str]
    unit: str


def nice_ticks(low: float, high: float, n: int = N_TICKS) -> list[float]:
    """At most n + 1 round values (1, 2 or 5 times a power of ten apart) from `low` to `high`, both included."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def axis_ticks(name: str, low: float, high: float) -> Ticks:
    """Ticks of an x axis (tokens as k, M, B; FLOPs by a power of ten; whole layers) or of a loss."""
    values = nice_ticks(low, high)
    values = [v for v in values if name != "layer" or float(v).is_integer()]
    largest = max((abs(v) for v in values), default=0.0)
    if name == "tokens":
        size, suffix = next(
            ((s, t) for s, t in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= s), (1, "")
        )
        return Ticks(values, [_plain(v / size, values, size) + suffix if v else "0" for v in values], "")
    power = math.floor(math.log10(largest)) if name == "flops" and largest >= 1e4 else 0
    unit = f"×10{str(power).translate(_SUPERSCRIPT)}" if power else ""
    return Ticks(values, [_plain(v / 10.0**power, values, 10.0**power) for v in values], unit)


def _plain(value: float, values: Sequence[float], size: float) -> str:
    """With as many decimals as tell neighbours apart, and thousands set apart."""
    step = (values[1] - values[0]) / size if len(values) > 1 else abs(value) or 1
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def frame(curves: Sequence[Curve], diverged: Collection[int] = ()) -> Frame | None:
    """All of x, from 0. Of y, what lies beyond the first steep part, with its bands, without diverged arms and those
    far above the others, which would press these into a line. None when there is no finite point."""
    lines = {i: line for i, curve in enumerate(curves) if (line := _points(curve))}
    if not lines:
        return None
    x1 = max(line[-1][0] for line in lines.values())
    x0 = min(0.0, *(line[0][0] for line in lines.values()))
    few = statistics.median(map(len, lines.values())) < FEW
    steep = x0 if few else x0 + STEEP_FRAC * (x1 - x0)
    late = {i: [row for row in line if row[0] >= steep] or line[-1:] for i, line in lines.items()}
    tops = {i: max(row[1] for row in rows) for i, rows in late.items()}
    settled = [i for i in late if curves[i].arm not in diverged] or list(late)
    limit = FAR * statistics.median_low(tops[i] for i in settled)
    near = [i for i in settled if tops[i] <= limit] or settled
    low = min(min(row[1:]) for i in near for row in late[i])
    high = max(max(row[1:]) for i in near for row in late[i])
    pad = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    cut = tuple(curves[i].arm for i, line in lines.items() if line[-1][1] > high + pad)
    return Frame(x0, x1 if x1 > x0 else x0 + 1, low - pad, high + pad, cut)


def diverged(report: Report) -> set[int]:
    """The arms of which every run has diverged."""
    return {i for i, arm in enumerate(report.arms) if set(arm.states) == {"diverged"}}


def _points(curve: Curve) -> list[tuple[float, ...]]:
    """The finite points of a curve as (x, mean, low, high)."""
    rows = zip(curve.x, curve.mean, curve.low, curve.high, strict=True)
    return [row for row in rows if _finite(*row)]


def draw(curves: Sequence[Curve], looks: Sequence[Stroke], shown: Frame, *, label: str) -> str:
    """The `<svg>` of one metric against one axis. `label` says in words what it shows."""
    name = curves[0].x_name
    x_ticks, y_ticks = axis_ticks(name, shown.x0, shown.x1), axis_ticks("", shown.y0, shown.y1)
    x_title = AXES.get(name, (name, name))[1] + (f", {x_ticks.unit}" if x_ticks.unit else "")
    bands = len(looks) <= BANDS
    # The baseline last, on top of the others.
    ordered = sorted(curves, key=lambda c: looks[c.arm].colour == 0)
    return "".join(
        [
            f'<svg class="plot" role="img" aria-label="{escape(label)}">',
            *_axes(x_ticks, y_ticks, shown),
            f'<text class="title" x="50%" y="100%" dy="36" text-anchor="middle">{escape(x_title)}</text>',
            f'<svg class="lines" width="100%" height="100%" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none">',
            *(_arm(curve, looks[curve.arm], shown, bands and curve.n > 1) for curve in ordered),
            "</svg></svg>",
        ]
    )


def _axes(x_ticks: Ticks, y_ticks: Ticks, shown: Frame) -> Iterable[str]:
    for value, text in zip(y_ticks.values, y_ticks.texts, strict=True):
        y = f"{100 * (shown.y1 - value) / (shown.y1 - shown.y0):.2f}%"
        yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="-8" y="{y}" dy=".35em" text-anchor="end">{text}</text>'
    for value, text in zip(x_ticks.values, x_ticks.texts, strict=True):
        x = f"{100 * (value - shown.x0) / (shown.x1 - shown.x0):.2f}%"
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>'
        yield f'<text x="{x}" y="100%" dy="18" text-anchor="middle">{text}</text>'
    yield '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'


def _arm(curve: Curve, look: Stroke, shown: Frame, band: bool) -> str:
    dash = f' stroke-dasharray="{" ".join(f"{d:g}" for d in look.dash)}"' if look.dash else ""
    fill = f'<path class="band" d="{_band(curve, shown)}"/>' if band else ""
    line = f'<path class="line" d="{_line(curve, shown)}" stroke-width="{look.width:g}"{dash}/>'
    return f'<g class="arm c{look.colour}" data-arm="{curve.arm}">{fill}{line}</g>'


def _line(curve: Curve, shown: Frame) -> str:
    """A stretch of one point alone goes nowhere (`h0`), which round caps make a dot."""
    parts = []
    for stretch in _stretches(curve.x, curve.mean):
        parts.append("M" + " ".join(_point(x, y, shown) for x, y in stretch) + ("h0" if len(stretch) == 1 else ""))
    return "".join(parts)


def _band(curve: Curve, shown: Frame) -> str:
    """Of every stretch: along the highest seed, back along the lowest."""
    parts = []
    for stretch in _stretches(curve.x, curve.low, curve.high):
        there = " ".join(_point(x, high, shown) for x, _, high in stretch)
        back = " ".join(_point(x, low, shown) for x, low, _ in reversed(stretch))
        parts.append(f"M{there} {back}Z")
    return "".join(parts)


def _stretches(*columns: Sequence[float]) -> Iterable[list[tuple[float, ...]]]:
    """The rows between those that lack a number."""
    stretch: list[tuple[float, ...]] = []
    for row in zip(*columns, strict=True):
        if _finite(*row):
            stretch.append(row)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _point(x: float, y: float, shown: Frame) -> str:
    across = round(WIDE * (x - shown.x0) / (shown.x1 - shown.x0))
    down = round(HIGH * (shown.y1 - y) / (shown.y1 - shown.y0))
    return f"{across} {max(-HIGH, min(2 * HIGH, down))}"


def _finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)


def thinned(curve: Curve, n_points: int) -> Curve:
    """Every k-th point, the first and the last among them, `n_points` at most (2 or more)."""
    if len(curve.x) <= n_points:
        return curve
    keep = [round(i * (len(curve.x) - 1) / (n_points - 1)) for i in range(n_points)]
    pick: dict[str, Any] = {name: [getattr(curve, name)[i] for i in keep] for name in ("x", "mean", "low", "high")}
    return replace(curve, **pick)
