"""A report as Markdown: the two tables, what probes found, confounds, notes. What came from a run is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmlab.report.model import Report, Table


def render(report: Report) -> str:
    """The whole document; `#` is its title."""
    parts = [f"# {_plain(report.title)}", _about(report)]
    for table in report.tables:
        parts += [f"## {table.name.capitalize()}", _table(table)]
    if report.why is not None:
        said = _bullets([*report.why.findings, *report.why.notes])
        parts += ["## Why: inside the models", *([said] if said else []), _table(report.why.table)]
    for title, lines in (("Confounds", report.confounds), ("Notes", report.notes)):
        if lines:
            parts += [f"## {title}", _bullets(lines)]
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"* {_plain(line)}" for line in lines)


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
