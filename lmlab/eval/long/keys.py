"""Which tokens of a long document only a long context gives away, by the text alone: the same for every model.

A target is a key token when the three tokens that end in it occurred earlier in the document, but not with their end
among the last `near` tokens before it. (LongPPL, Fang et al. 2024, 2410.23771, finds key tokens by what a large model
gains from context; here no model is asked, so that no variant decides on what it is measured.)
"""

from __future__ import annotations

import numpy as np

GRAM = 3


def key_tokens(ids: np.ndarray, near: int) -> np.ndarray:
    """(N−1,) bool for the N−1 targets of ids (N,)."""
    found = np.zeros(max(0, len(ids) - 1), dtype=bool)
    last: dict[tuple[int, ...], int] = {}
    listed = ids.tolist()
    for end in range(GRAM - 1, len(listed)):
        gram = tuple(listed[end - GRAM + 1 : end + 1])
        before = last.get(gram)
        found[end - 1] = before is not None and end - before > near
        last[gram] = end
    return found
