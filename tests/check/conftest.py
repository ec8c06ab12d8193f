"""Compositions by the line that describes them, composed once; and their rows by name."""

from __future__ import annotations

import functools

from lmlab.check.all_rows import ROWS, asked
from lmlab.check.rows import Row
from lmlab.config.load import load
from lmlab.config.tree import Experiment


@functools.cache
def composed(line: str = "") -> Experiment:
    """Not to be changed: it is shared."""
    return load(line.split()).experiment


def row_of(line: str, name: str) -> Row:
    """One row of the composition that the line describes."""
    (row,) = asked(composed(line), {name: ROWS[name]})
    return row
