"""Tables of words: a rich one on a terminal; elsewhere aligned columns that cut nothing, for grep and awk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned by spaces, one line per row."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, console: Any = None) -> None:
    """To stdout, or to the console given."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:
        for line in table_lines(head, rows):
            console.print(Text(line), soft_wrap=True)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
