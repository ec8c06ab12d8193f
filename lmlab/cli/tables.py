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


def stdout() -> Any:
    """rich's console on stdout. When whoever reads it is gone it says so, as `print` does; rich would just exit."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError that rich is handling

    return Stdout(highlight=False)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, console: Any = None) -> None:
    """To stdout, or to the console given."""
    from rich.text import Text

    console = console or stdout()
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
