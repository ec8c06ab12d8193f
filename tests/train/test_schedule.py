"""Learning rates against the worked values."""

from __future__ import annotations

import itertools

import pytest

from lmlab.registry import OPTIONS, make
from lmlab.train import spec


def lrs(schedule: spec.ScheduleSpec, peak: float, steps: int) -> list[float]:
    rate = make(schedule, peak, steps)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize("name", OPTIONS["schedule"])
def test_warmup_of_ten_reaches_the_peak_at_step_nine(name: str) -> None:
    found = lrs(OPTIONS["schedule"][name](warmup_steps=10), 1e-3, 200)  # type: ignore[call-arg]
    assert found[:10] == pytest.approx([1e-4 * i for i in range(1, 11)])
    assert max(found) == pytest.approx(1e-3)


def test_cosine_midpoint_is_the_mean_of_peak_and_minimum() -> None:
    found = lrs(spec.Cosine(warmup_steps=0, min_lr_frac=0.1), 1e-3, 101)
    assert found[0] == 1e-3
    assert found[50] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (1, 20), (5, 20), (19, 20)])
def test_last_step_is_exactly_the_minimum(name: str, warmup: int, steps: int) -> None:
    found = lrs(OPTIONS["schedule"][name](warmup_steps=warmup, min_lr_frac=0.1), 3e-3, steps)  # type: ignore[call-arg]
    assert found[-1] == 3e-3 * 0.1


def test_wsd_is_flat_then_linear() -> None:
    found = lrs(spec.WSD(warmup_steps=10, decay_frac=0.2, min_lr_frac=0.0), 1.0, 100)
    assert set(found[10:79]) == {1.0}
    falls = [a - b for a, b in itertools.pairwise(found[80:])]
    assert falls == pytest.approx([1 / 20] * len(falls))


def test_constant_stays_at_the_peak() -> None:
    assert set(lrs(spec.Constant(warmup_steps=2), 0.5, 50)[1:]) == {0.5}


def test_null_warmup_is_a_twentieth_of_the_run() -> None:
    assert lrs(spec.Constant(), 1.0, 200)[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert lrs(spec.Constant(), 1.0, 3)[0] == 1.0
