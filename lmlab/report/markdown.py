"""A report as Markdown: the two tables, what probes found, where tokens went, long contexts, confounds, notes. What
came from a run is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmlab.report.long_tables import TITLES, filled
from lmlab.report.model import LongContext, Report, Routing, Table
from lmlab.report.routing import load_bars, load_name


def render(report: Report) -> str:
    """The whole document; `#` is its title."""
    parts = [f"# {_plain(report.title)}", _about(report)]
    for table in report.tables:
        parts += [f"## {table.name.capitalize()}", _table(table)]
    if report.why is not None:
        said = _bullets([*report.why.findings, *report.why.notes])
        parts += ["## Why: inside the models", *([said] if said else []), _table(report.why.table)]
    if report.routing is not None:
        parts += ["## Routing: where tokens went", *_routing(report, report.routing)]
    if report.long_context is not None:
        parts += ["## Long contexts: beyond the trained length", *_long_context(report.long_context)]
    for title, lines in (("Confounds", report.confounds), ("Notes", report.notes)):
        if lines:
            parts += [f"## {title}", _bullets(lines)]
    return "\n\n".join(parts) + "\n"


def _routing(report: Report, found: Routing) -> list[str]:
    """What stands out, the table, and each layer's load as a line of bars."""
    said = _bullets([*found.findings, *found.notes])
    many = len(report.arms) > 1
    bars = [
        f"{line} {_plain(load_name(report, load, many=many))}"
        for load in found.loads
        if (line := _code(load_bars(load)))
    ]
    words = "Load of the experts of a layer, from the busiest to the idlest:"
    return [*([said] if said else []), _table(found.table), *([words + "\n\n" + _items(bars)] if bars else [])]


def _long_context(found: LongContext) -> list[str]:
    """What stands out, perplexities by length, then the tables."""
    said = _bullets([*found.findings, *found.notes])
    tables = [table for table in [found.short, *found.tables] if table.rows]
    return [*([said] if said else []), *(part for t in tables for part in (f"### {TITLES[t.name]}", _table(filled(t))))]


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _bullets(lines: Sequence[str]) -> str:
    return _items([_plain(line) for line in lines])


def _about(report: Report) -> str:
    lines = [f"From {_code(report.source)}, {report.made}."]
    if report.baseline is not None and len(report.arms) > 1:
        lines.append(f"Baseline: {_code(report.arms[report.baseline].label)}.")
    if report.common:
        lines.append("All arms: " + _code(" ".join(f"{key}={value}" for key, value in report.common.items())) + ".")
    return "  \n".join(lines)


def _table(table: Table) -> str:
    head = "| " + " | ".join(_plain(column.title) for column in table.columns) + " |"
    rule = "|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|"
    rows = ["| " + " | ".join(_cell(cell.text, cell.mark) for cell in row) + " |" for row in table.rows]
    return "\n".join([head, rule, *rows])


def _cell(text: str, mark: str) -> str:
    return f"**{_plain(text)}**" if mark in ("bad", "baseline") and text != "–" else _plain(text)


def _plain(text: str) -> str:
    """Text that no Markdown reader takes for markup, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("`", "'") + "`"
