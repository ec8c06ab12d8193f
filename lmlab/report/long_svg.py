"""Panels and maps of the section on long contexts as SVG for the page: text at percentages, lines in a drawing that
stretches, as in curve_svg.py; marks at percentages too, so that they stay round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from lmlab.report.curve_svg import HIGH, WIDE
from lmlab.report.long_panels import GREY, Look, Panel
from lmlab.report.model import DepthMap, LongLine
from lmlab.report.palette import BANDS, heat

Looks = Mapping[tuple[int | None, str], Look]
ROW = 26  # pixels of a map's row
SHAPES = {
    "circle": "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",
    "square": "M-3-3h6v6h-6z",
    "triangle": "M0-4l4 7h-8z",
    "diamond": "M0-4.3l3.6 4.3-3.6 4.3-3.6-4.3z",
    "down": "M0 4l4-7h-8z",
    "plus": "M-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
}


def draw(panel: Panel, looks: Looks) -> str:
    """The `<svg>` of a panel."""
    label = f"{panel.title}: {panel.y_title} against {panel.x_title}, {len(panel.lines)} lines"
    bands = sum(line.arm is not None for line in panel.lines) <= BANDS
    ordered = sorted(panel.lines, key=lambda line: (line.arm is not None, looks[line.arm, line.scaling].colour == 0))
    return "".join(
        [
            f'<svg class="plot" role="img" aria-label="{escape(label)}">',
            *_axes(panel),
            f'<text class="title" x="50%" y="100%" dy="36" text-anchor="middle">{escape(panel.x_title)}</text>',
            f'<text class="title" x="0" y="0" dx="-48" dy="-12">{escape(panel.y_title)}</text>',
            f'<svg class="lines" width="100%" height="100%" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none">',
            *(_line(line, panel, looks[line.arm, line.scaling], bands) for line in ordered),
            "</svg>",
            *(mark for line in ordered for mark in _marks(line, panel, looks[line.arm, line.scaling])),
            "</svg>",
        ]
    )


def _axes(panel: Panel) -> Iterator[str]:
    for value, text in panel.y.ticks:
        y = f"{100 * (1 - panel.y.at(value)):.2f}%"
        yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="-8" y="{y}" dy=".35em" text-anchor="end">{escape(text)}</text>'
    for value, text in panel.x.ticks:
        x = f"{100 * panel.x.at(value):.2f}%"
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>'
        yield f'<text x="{x}" y="100%" dy="18" text-anchor="middle">{escape(text)}</text>'
    yield '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'
    for value, words in panel.levels:
        y = f"{100 * (1 - panel.y.at(value)):.2f}%"
        yield f'<line class="cross" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="100%" y="{y}" dy="-4" text-anchor="end">{escape(words)}</text>' if words else ""
    for i, (value, words) in enumerate(panel.rules):
        x = f"{100 * panel.x.at(value):.2f}%"
        side = 'dx="-5" text-anchor="end"' if panel.x.at(value) > 0.6 else 'dx="5"'
        yield f'<line class="rule" x1="{x}" x2="{x}" y1="0" y2="100%"/>'
        yield f'<text x="{x}" y="0" {side} dy="{11 + 13 * i}">{escape(words)}</text>'


def _group(line: LongLine, look: Look) -> str:
    """Its classes, and the arm that the page's legend hides and lights."""
    kind = "published" if look.colour == GREY else f"c{look.colour}"
    return f'class="arm {kind}" data-arm="{line.arm}"' if line.arm is not None else f'class="{kind}"'


def _line(line: LongLine, panel: Panel, look: Look, bands: bool) -> str:
    rows = [row for row in zip(line.x, line.mean, line.low, line.high, strict=True) if all(map(math.isfinite, row))]
    there = " ".join(_point(x, high, panel) for x, _, _, high in rows)
    back = " ".join(_point(x, low, panel) for x, _, low, _ in reversed(rows))
    band = f'<path class="band" d="M{there} {back}Z"/>' if bands and line.n > 1 and len(rows) > 1 else ""
    dash = f' stroke-dasharray="{" ".join(f"{d:g}" for d in look.dash)}"' if look.dash else ""
    path = "M" + " ".join(_point(x, y, panel) for x, y, *_ in rows) if rows else ""
    return f'<g {_group(line, look)}>{band}<path class="line" d="{path}" stroke-width="{look.width:g}"{dash}/></g>'


def _point(x: float, y: float, panel: Panel) -> str:
    return f"{round(WIDE * panel.x.at(x))} {round(HIGH * (1 - panel.y.at(y)))}"


def _marks(line: LongLine, panel: Panel, look: Look) -> Iterator[str]:
    if len(line.x) > 16:
        return
    open_ = " open" if look.open else ""
    parts = [
        f'<svg x="{100 * panel.x.at(x):.2f}%" y="{100 * (1 - panel.y.at(y)):.2f}%" overflow="visible">'
        f'<path class="mark{open_}" d="{SHAPES[look.mark]}"/></svg>'
        for x, y in zip(line.x, line.mean, strict=True)
        if math.isfinite(y)
    ]
    yield f"<g {_group(line, look)}>{''.join(parts)}</g>"


def swatch(look: Look) -> str:
    """A piece of the line with its mark, for a legend."""
    kind = "published" if look.colour == GREY else f"c{look.colour}"
    dash = f' stroke-dasharray="{" ".join(f"{d:g}" for d in look.dash)}"' if look.dash else ""
    open_ = " open" if look.open else ""
    return (
        f'<svg class="swatch {kind}" width=34 height=12 viewBox="-17 -6 34 12" aria-hidden=true>'
        f'<path class=line d="M-16 0h32" stroke-width={look.width + 0.3:g}{dash} />'
        f'<path class="mark{open_}" d="{SHAPES[look.mark]}"/></svg>'
    )


# ---------------------------------------------------------------- length × depth


def draw_map(found: DepthMap) -> str:
    """Cells with `correct/n`, the trained length at the left of a rule."""
    wide, high = 100 / len(found.lengths), 100 / len(found.depths)
    parts = [f'<svg class="plot" role="img" aria-label="{escape(map_label(found))}">']
    for row, depth in enumerate(found.depths):
        parts.append(f'<text x="-8" y="{high * (row + 0.5):.2f}%" dy=".35em" text-anchor="end">{depth:g}</text>')
        for column in range(len(found.lengths)):
            parts.append(_cell(found, row, column, wide, high))
    for column, length in enumerate(found.lengths):
        text = f"{length:,}".replace(",", "\u202f")
        parts.append(f'<text x="{wide * (column + 0.5):.2f}%" y="100%" dy="17" text-anchor="middle">{text}</text>')
    if inside := sum(length <= found.trained for length in found.lengths):
        x = f"{wide * inside:.2f}%"
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="-4" y2="100%"/>')
    parts.append('<text class="title" x="50%" y="100%" dy="35" text-anchor="middle">length (tokens)</text>')
    parts.append('<text class="title" x="0" y="0" dx="-44" dy="-11">depth (0: beginning)</text></svg>')
    return "".join(parts)


def _cell(found: DepthMap, row: int, column: int, wide: float, high: float) -> str:
    n, correct = found.n[row][column], found.correct[row][column]
    x, y = wide * column, high * row
    if not n:
        return f'<text x="{x + wide / 2:.2f}%" y="{y + high / 2:.2f}%" dy=".35em" text-anchor="middle">–</text>'
    rect = f'<rect x="{x:.2f}%" y="{y:.2f}%" width="{wide:.2f}%" height="{high:.2f}%"/>'
    middle = f'x="{x + wide / 2:.2f}%" y="{y + high / 2:.2f}%" dy=".35em" text-anchor="middle"'
    return f'<g class="heat h{heat(correct / n)}">{rect}<text {middle}>{correct}/{n}</text></g>'


def map_label(found: DepthMap) -> str:
    right, n = (sum(map(sum, grid)) for grid in (found.correct, found.n))
    who = f" of {found.name}" if found.name else ""
    return f"{found.what}{who} by length and depth: {right} of {n} right"
