"""How far a score holds as rows get longer: the field's measures, of {length: score}."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from lmlab.runs.intervals import wilson

HOLDS, WELL, FOUND = 0.85, 0.8, 0.2


def effective_length(scores: Mapping[int, float], trained: int) -> int | None:
    """The largest length with at least 85 % of the score at the trained length; None without a score there, or of 0."""
    base = scores.get(trained)
    return largest(scores, HOLDS * base) if base else None


def largest(scores: Mapping[int, float], at_least: float) -> int | None:
    """The largest length with such a score: 0.8 in YaRN (Peng et al. 2023, 2309.00071), 0.2 in PI, whose k_max it is
    (Chen et al. 2023, 2306.15595)."""
    return max((length for length, score in scores.items() if score >= at_least), default=None)


def area(scores: Mapping[int, float]) -> float | None:
    """Mean score over log2 length, by trapezoids; None of a single length."""
    points = sorted((math.log2(length), score) for length, score in scores.items())
    if len(points) < 2:
        return None
    under = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    return under / (points[-1][0] - points[0][0])


def score_summary(found: Mapping[int, tuple[int, int, float]], trained: int) -> dict[str, Any]:
    """Of {length: (right, asked, chance)}. A score at the trained length that is not above chance (the Wilson interval
    of 95 % reaches down to it) is one that nothing can hold: no length is effective then. above_chance None: there is
    no score at the trained length."""
    scores = {length: right / n for length, (right, n, _) in found.items()}
    right, n, chance = found.get(trained, found[min(found)])
    above = wilson(right, n)[0] > chance if trained in found else None
    return {
        "chance": chance,
        "trained_score": scores.get(trained),
        "above_chance": above,
        "effective_length": effective_length(scores, trained) if above else None,
        "largest_80": largest(scores, WELL),
        "k_max": largest(scores, FOUND) if chance < FOUND else None,
        "area": area(scores),
    }
