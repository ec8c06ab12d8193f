"""Means over tokens with standard errors over documents, and losses by the position in the window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FAR = 256  # positions past the trained length share a bucket by this many


@dataclass
class Sums:
    """Σ nats and targets of each unit (document or stretch)."""

    nats_U: np.ndarray
    tokens_U: np.ndarray

    @classmethod
    def of(cls, n_units: int) -> Sums:
        return cls(np.zeros(n_units), np.zeros(n_units))

    def add(self, unit: int, nats: np.ndarray) -> None:
        self.nats_U[unit] += nats.sum(dtype=np.float64)
        self.tokens_U[unit] += len(nats)

    @property
    def tokens(self) -> int:
        return int(self.tokens_U.sum())

    @property
    def mean(self) -> float:
        """nats per token; nan of nothing."""
        return float(self.nats_U.sum() / self.tokens_U.sum()) if self.tokens else math.nan

    @property
    def se(self) -> float | None:
        return ratio_se(self.nats_U, self.tokens_U)


def ratio_se(sum_U: np.ndarray, n_U: np.ndarray) -> float | None:
    """Standard error of Σ sum / Σ n when units (documents) are what was drawn (Cochran 1977, section 6.4: the ratio
    estimator); None of fewer than two units that count."""
    counted = n_U > 0
    U = int(counted.sum())
    if U < 2:
        return None
    mean = sum_U.sum() / n_U.sum()
    residual = (sum_U - mean * n_U)[counted]
    return float(math.sqrt(U / (U - 1) * (residual**2).sum()) / n_U.sum())


def mean_se(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of independent values and its standard error (None of one)."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def edges(length: int, trained: int) -> list[int]:
    """Where buckets of positions begin, and the end: 0, 16, 32, … doubling to the trained length, then every 256."""
    found, edge = [0], 16
    while edge < min(length, trained):
        found.append(edge)
        edge *= 2
    if trained < length:
        found += range(trained, length, FAR)
    return [*found, length]


@dataclass
class ByPosition:
    """Σ nats and targets at each position of windows of `length` inputs."""

    length: int
    trained: int
    nats_T: np.ndarray = field(init=False)
    tokens_T: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.nats_T, self.tokens_T = np.zeros(self.length), np.zeros(self.length, dtype=np.int64)

    def add(self, nats: np.ndarray) -> None:
        """One window's, from its first position on."""
        self.nats_T[: len(nats)] += nats
        self.tokens_T[: len(nats)] += 1

    def buckets(self) -> list[dict[str, float]]:
        """{from, to, nats, tokens} of each bucket that has any."""
        found = []
        for start, stop in itertools.pairwise(edges(self.length, self.trained)):
            tokens = int(self.tokens_T[start:stop].sum())
            if tokens:
                nats = float(self.nats_T[start:stop].sum())
                found.append({"from": start, "to": stop, "nats": nats, "tokens": tokens})
        return found
