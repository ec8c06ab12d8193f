"""How fast a model decodes with each kind of cache, and what a row of it keeps, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lmlab.generate.decode import generate
from lmlab.model.cache import CacheKind
from lmlab.model.transformer import Transformer

ROUNDS = 5


def decode_rates(
    model: Transformer, prompt: Sequence[int], max_new: int, kinds: Sequence[CacheKind]
) -> list[tuple[float, int]]:
    """(tokens/s, bytes of the full cache) of each kind: greedy decoding of one row, after a round to warm up; the
    medians of rounds in which the kinds take turns."""
    rates: list[list[float]] = [[] for _ in kinds]
    n_bytes = [0] * len(kinds)
    for turn in range(ROUNDS + 1):
        for n, kind in enumerate(kinds):
            found = generate(model, [prompt], max_new=max_new, kind=kind)
            n_bytes[n] = found.cache_bytes
            if turn:
                rates[n].append(found.decode_tokens_per_s)
    return [(statistics.median(own), size) for own, size in zip(rates, n_bytes, strict=True)]
