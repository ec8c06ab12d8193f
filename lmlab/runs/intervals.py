"""Intervals of shares, for evaluations and reports."""

from __future__ import annotations

import math


def wilson(correct: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """(low, high) of the share correct / n (Wilson 1927); 0 and 1 of nothing. The tokens of one example are not
    independent, so that their interval is narrower than it should be."""
    if n == 0:
        return 0.0, 1.0
    share, scale = correct / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (0.0 if correct == 0 else middle - half), (1.0 if correct == n else middle + half)
