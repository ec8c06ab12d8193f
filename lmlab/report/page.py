"""The report as one HTML file that needs nothing else: tables, warnings, curves. Readable without JavaScript.

page.html is the skeleton, page.css the looks, page.js what makes tables sortable and curves answer the pointer; all
three are put inline. Whatever came from a run is escaped here and nowhere else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from lmlab.report import page_long, page_routing, page_why, palette
from lmlab.report.captions import above_the_frame, and_, not_causal, part_of_val, unfinished, warning
from lmlab.report.curve_svg import AXES, METRICS, Frame, diverged, draw, frame, thinned
from lmlab.report.model import Arm, Cell, Column, Curve, Report, Table
from lmlab.report.palette import Stroke

MISSING = "–"
MAX_POINTS, ALL_POINTS = 400, 150_000  # of one curve, of all curves together: keeps the page under 5 MB
LONG = 32  # characters of a cell that may take several lines
_HERE = Path(__file__).parent


def render(report: Report) -> str:
    """The whole page."""
    looks = palette.strokes(len(report.arms), report.baseline)
    figures = _figures(report)
    by_name = {table.name: table for table in report.tables}
    return Template(_asset("page.html")).substitute(
        title=escape(report.title),
        css=_colours() + page_long.css() + _asset("page.css"),
        js=_asset("page.js"),
        data=_for_script(_data(report, figures)),
        summary=_summary(report),
        warnings=_warnings(report.confounds),
        tables_arms=_arms(report, by_name.get("arms"), looks),
        curves=_curves(report, figures, looks),
        why=page_why.section(report, looks, _table(report.why.table) if report.why is not None else ""),
        routing=page_routing.section(report, looks, _table(report.routing.table) if report.routing is not None else ""),
        long_context=page_long.section(report, _table),
        tables_runs=_runs(by_name.get("runs")),
        notes=_list("notes", "Notes", report.notes),
        source=f"<code>{escape(report.source)}</code>",
        made=escape(report.made),
    )


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").rstrip("\n")


def _colours() -> str:
    """`.c3{--stroke:…}` for each colour of the palette, light and dark."""
    light = "".join(f".c{i}{{--stroke:{colour}}}" for i, colour in enumerate(palette.LIGHT))
    dark = "".join(f".c{i}{{--stroke:{colour}}}" for i, colour in enumerate(palette.DARK))
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"


# ---------------------------------------------------------------- words


def _summary(report: Report) -> str:
    n_runs = sum(len(arm.runs) for arm in report.arms)
    said = f"{_counted(len(report.arms), 'arm')}, {_counted(n_runs, 'run')}"
    if report.axes:
        said += ", differing in " + and_(f"<b>{escape(axis)}</b>" for axis in report.axes)
    lines = [f"<p>{said}.</p>"]
    if report.baseline is not None:
        lines.append(f"<p>Baseline: <b>{escape(report.arms[report.baseline].label)}</b>.</p>")
    lines.append(f"<p class=faint>From <code>{escape(report.source)}</code>, {escape(report.made)}.</p>")
    if report.common:
        same = " ".join(f"<code>{escape(f'{key}={_word(value)}')}</code>" for key, value in report.common.items())
        lines.append(f"<p>All arms: {same}</p>")
    return "\n".join(lines)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else str(value)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _warnings(confounds: Sequence[str]) -> str:
    return _list("warnings", "Confounds: what else differs, and may explain a difference", confounds)


def _list(name: str, title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}" for line in lines)
    return f"<section class={name} aria-labelledby={name}><h2 id={name}>{escape(title)}</h2><ul>{items}</ul></section>"


# ---------------------------------------------------------------- tables


def _arms(report: Report, table: Table | None, looks: Sequence[Stroke]) -> str:
    if table is None:
        return ""
    # A row is an arm, in the same order; then each row can show the arm's line and the filter can reach the curves.
    known = list(zip(report.arms, looks, strict=True)) if len(table.rows) == len(looks) else []
    return f"<section aria-labelledby=arms><h2 id=arms>Arms</h2>{_table(table, known)}</section>"


def _runs(table: Table | None) -> str:
    if table is None:
        return ""
    heading = f"<summary><h2>Runs</h2> <span class=faint>{len(table.rows)}</span></summary>"
    return f"<details class=fold id=runs>{heading}{_table(table)}</details>"


def _table(table: Table, arms: Sequence[tuple[Arm, Stroke]] = ()) -> str:
    head = "".join(_heading(column) for column in table.columns)
    rows = "".join(
        _row(table.columns, row, i, *(arms[i] if arms else (None, None))) for i, row in enumerate(table.rows)
    )
    key = "".join(f"<dt>{escape(c.title)}<dd>{escape(c.help)}" for c in table.columns if c.help)
    meaning = f"<details class=key><summary>What the columns mean</summary><dl>{key}</dl></details>" if key else ""
    name = escape(table.name)
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{name}"><table data-name="{name}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{meaning}"
    )


def _heading(column: Column) -> str:
    kind = " class=n" if column.numeric else ""
    tip = f' title="{escape(column.help)}"' if column.help else ""
    return f'<th scope=col data-key="{escape(column.key)}"{kind}{tip}>{_breakable(column.title)}</th>'


def _breakable(name: str) -> str:
    """A key may be broken after its dots and underscores, so that a column of short values stays narrow."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _row(columns: Sequence[Column], cells: Sequence[Cell], index: int, arm: Arm | None, look: Stroke | None) -> str:
    which = f" data-arm={index}" if arm else ""
    mark = " class=baseline" if any(cell.mark == "baseline" for cell in cells) else ""
    pairs = list(zip(columns, cells, strict=True))
    inside = "".join(_cell(column, cell, arm, look, heading=i == 0) for i, (column, cell) in enumerate(pairs))
    return f"<tr{which}{mark}>{inside}</tr>\n"


def _cell(column: Column, cell: Cell, arm: Arm | None, look: Stroke | None, *, heading: bool) -> str:
    kinds = ["n"] if column.numeric else []
    kinds += ["long"] if len(cell.text) > LONG and not column.numeric and not heading else []
    kinds += ["missing"] if cell.value is None and cell.text[:1] in ("", MISSING) else []
    kinds += [cell.mark] if cell.mark in ("warn", "bad", "lower", "higher") else []
    number = _number(column, cell, arm)
    value = f" data-v={number!r}" if isinstance(number, (int, float)) and math.isfinite(number) else ""
    named = f' class="{" ".join(kinds)}"' if kinds else ""
    tag = "th scope=row" if heading else "td"
    text = _text(column, cell)
    if heading and look:
        text = f"<div class=named>{_swatch(look)}<span>{text}</span></div>"
    return f"<{tag}{named}{value}{_states(column, cell, arm)}>{text}</{tag.split()[0]}>"


def _text(column: Column, cell: Cell) -> str:
    """Of `−0.1 ± 0.1 (2 of 3 seeds)` the remark may stand below the number, where the screen is narrow."""
    number, bracket, remark = cell.text.partition(" (")
    if column.numeric and bracket:
        return f"<span>{escape(number)}</span> <small>({escape(remark)}</small>"
    return escape(cell.text) or MISSING


def _number(column: Column, cell: Cell, arm: Arm | None) -> object:
    """What a cell sorts by: the baseline as no difference, an arm's state by the share of its runs that finished."""
    if column.key == "delta" and cell.mark == "baseline":
        return 0.0
    if column.key == "state" and arm is not None and arm.runs:
        return round(arm.states.get("finished", 0) / len(arm.runs), 4)
    return cell.value


def _states(column: Column, cell: Cell, arm: Arm | None) -> str:
    """The plain words that `state=` in the filter finds, whatever else stands in the cell."""
    if column.key != "state":
        return ""
    words = " ".join(arm.states) if arm is not None else cell.value
    return f' data-is="{escape(words)}"' if isinstance(words, str) else ""


def _swatch(look: Stroke) -> str:
    dash = f' stroke-dasharray="{" ".join(f"{d:g}" for d in look.dash)}"' if look.dash else ""
    return (
        f'<svg class="swatch c{look.colour}" width=26 height=10 aria-hidden=true>'
        f'<path class=line d="M1 5h24" stroke-width={max(look.width, 1.8) + 0.4:g}{dash} /></svg>'
    )


# ---------------------------------------------------------------- curves


def _figures(report: Report) -> list[tuple[list[Curve], Frame]]:
    """The curves of each metric × x axis that has a point, thinned, with the part of the plane to show."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for metric in METRICS | dict.fromkeys(curve.metric for curve in report.curves):
        for axis in AXES | dict.fromkeys(curve.x_name for curve in report.curves):
            groups[metric, axis] = [c for c in report.curves if (c.metric, c.x_name) == (metric, axis) and c.x]
    n_points = max(2, min(MAX_POINTS, ALL_POINTS // max(1, sum(map(len, groups.values())))))
    figures = []
    for curves in groups.values():
        curves = [thinned(curve, n_points) for curve in curves]
        if shown := frame(curves, diverged(report)):
            figures.append((curves, shown))
    return figures


def _curves(report: Report, figures: Sequence[tuple[list[Curve], Frame]], looks: Sequence[Stroke]) -> str:
    if not figures:
        return "<section aria-labelledby=curves><h2 id=curves>Curves</h2><p>No run has a point to draw.</p></section>"
    names = "".join(
        f"<li data-arm={i}>{_swatch(look)}<span>{escape(arm.label)}</span>{_apart(arm)}</li>"
        for i, (arm, look) in enumerate(zip(report.arms, looks, strict=True))
    )
    drawn = "\n".join(_figure(report, curves, shown, looks) for curves, shown in figures)
    return (
        "<section class=curves aria-labelledby=curves><h2 id=curves>Curves</h2><div class=beside>"
        f"<ul class=legend aria-label=arms>{names}</ul><div class=figures>{drawn}</div></div></section>"
    )


def _apart(arm: Arm) -> str:
    """What the legend says of an arm besides its name."""
    words = [word for word in ("baseline" if arm.is_baseline else "", unfinished(arm), not_causal(arm)) if word]
    return f"<small class=faint>{', '.join(words)}</small>" if words else ""


def _figure(report: Report, curves: Sequence[Curve], shown: Frame, looks: Sequence[Stroke]) -> str:
    metric, axis = curves[0].metric, curves[0].x_name
    metric_words, axis_words = METRICS.get(metric, (metric, metric)), AXES.get(axis, (axis, axis))
    says = ["Lines: the mean over seeds."]
    if len(looks) <= palette.BANDS and any(curve.n > 1 for curve in curves):
        says = ["Lines: the mean over seeds; bands: the lowest and the highest seed."]
    if cut := above_the_frame(report, shown):
        says.append(f"{escape(cut)}.")
    label = f"{metric_words[1]} against {axis_words[1]}, {_counted(len(curves), 'line')}"
    return (
        f'<figure data-metric="{escape(metric)}" data-x="{escape(axis)}" data-metric-name="{escape(metric_words[0])}" '
        f'data-x-name="{escape(axis_words[0])}"><figcaption><b>{escape(metric_words[1])}</b>'
        f"{_measured(report, curves)}</figcaption>"
        f"<div class=frame>{draw(curves, looks, shown, label=label)}</div>"
        f'<p class="faint says">{" ".join(says)}</p></figure>'
    )


def _measured(report: Report, curves: Sequence[Curve]) -> str:
    """What of, where that is not all of val; and a warning where the lines do not compare."""
    said = f" {part}; the table is of all of val" if (part := part_of_val(report, curves)) else ""
    return said + (f" <span class=unlike>{warned}</span>" if (warned := warning(report, curves)) else "")


def _data(report: Report, figures: Sequence[tuple[list[Curve], Frame]]) -> dict[str, Any]:
    """What the pointer is answered from. Columns that several curves share (x, the mean) are stored once, in `pool`."""
    pool: dict[tuple[float | None, ...], int] = {}

    def stored(values: Iterable[float], digits: int) -> int:
        column = tuple(_rounded(v, digits) for v in values)
        return pool.setdefault(column, len(pool))

    drawn, bands = [], len(report.arms) <= palette.MANY
    for curves, shown in figures:
        lines = []
        for curve in curves:
            line = {"arm": curve.arm, "x": stored(curve.x, 7), "y": stored(curve.mean, 5)}
            if bands and curve.n > 1:
                line |= {"low": stored(curve.low, 5), "high": stored(curve.high, 5)}
            lines.append(line)
        drawn.append({"x": [shown.x0, shown.x1], "y": [shown.y0, shown.y1], "lines": lines})
    return {"figures": drawn, "pool": list(pool), "arms": [_searchable(arm.values) for arm in report.arms]}


def _rounded(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _searchable(values: dict[str, Any]) -> dict[str, str]:
    return {key: _word(value) for key, value in values.items()}


def _for_script(data: dict[str, Any]) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
