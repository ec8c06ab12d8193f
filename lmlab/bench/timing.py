"""Times that can be compared: contenders take turns, and a ratio is taken within a turn.

A shared machine is slow for seconds at a time. Whoever runs A B A B sees both slow together, so the ratio of a round
holds; the median over rounds is the figure, and its smallest and largest are printed beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lmlab.bench.limits import synchronize

ROUNDS = 7


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))

    def said(self, form: str = ".2f", unit: str = "") -> str:
        """`1.31× (1.25–1.38)`."""
        return f"{self.median:{form}}{unit} ({self.low:{form}}–{self.high:{form}})"

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """over / under, round by round."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def in_turns(
    run: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = ROUNDS, least_s: float = 0.2
) -> dict[str, list[float]]:
    """Seconds of a call, per name and round: each is called as often as makes `least_s`, after one call to warm up. The
    order is turned round every other time, so that none always follows the same one."""
    calls = {name: _calls(f, device, least_s) for name, f in run.items()}
    found: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(rounds):
        for name in list(run)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(seconds(run[name], device, calls[name]) / calls[name])
    return found


def _calls(f: Callable[[], object], device: torch.device, least_s: float) -> int:
    f()
    return max(1, round(least_s / max(seconds(f, device, 1), 1e-9)))


def seconds(f: Callable[[], object], device: torch.device, calls: int) -> float:
    """Of so many calls, and of what they set going."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        f()
    synchronize(device)
    return time.perf_counter() - begun
