"""The rows of a composition by name."""

from __future__ import annotations

from lmlab.check.all_rows import ROWS, asked
from lmlab.check.rows import Row
from lmlab.config.load import load


def row_of(line: str, name: str) -> Row:
    """One row of the composition that the line describes."""
    (row,) = asked(load(line.split()).experiment, {name: ROWS[name]})
    return row
