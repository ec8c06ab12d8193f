"""What is said before texts are made by a model whose parts declare that decoding is not the whole row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmlab.model.transformer import Transformer

DECODING, BATCH = "cached = full", "batched = alone"  # rows of `lmlab check`, by which parts declare it


def unlike_whole_rows(model: Transformer, so: str, beside: str = "") -> str | None:
    """One line that names the keys and values by which it is so; None where decoding is the whole row. so: what
    follows from it; beside: what does where the rows of a batch act on each other as well."""
    known = model.known_failures()
    if DECODING not in known:
        return None
    reasons = dict.fromkeys(known[row] for row in (DECODING, BATCH) if row in known)
    return f"decoding is not the whole row: {so}{beside if BATCH in known else ''}: {'; '.join(reasons)}"
