"""Turns and ratios, on contenders whose times are known."""

from __future__ import annotations

import time

import pytest
import torch

from lmlab.bench.limits import copy_rate
from lmlab.bench.timing import Spread, in_turns, ratio

CPU = torch.device("cpu")


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that is slow for a while is slow for both: 2, 2, 2 though the times go up tenfold."""
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == Spread(2.0, 2.0, 2.0)
    assert ratio([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]).said(unit="×") == "2.00× (1.00–3.00)"


def test_each_takes_its_turn_and_the_order_is_turned_round() -> None:
    order: list[str] = []
    times = in_turns({n: lambda n=n: order.append(n) for n in "abc"}, CPU, rounds=3, least_s=1e-12)  # type: ignore[misc]
    assert "".join(order[-9:]) == "abccbaabc"
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_seconds_are_of_one_call() -> None:
    times = in_turns({"short": lambda: time.sleep(0.01), "long": lambda: time.sleep(0.04)}, CPU, rounds=3, least_s=0.05)
    assert 0.01 <= Spread.of(times["short"]).low < 0.04 <= Spread.of(times["long"]).low


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("lmlab.bench.limits.COPIED_BYTES", {"cpu": 1024})
    monkeypatch.setattr("lmlab.bench.limits.time.perf_counter", lambda: float(next(clock)))
    assert copy_rate(CPU) == 2048  # bytes in the second that each copy takes by this clock
