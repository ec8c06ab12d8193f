"""Standard errors over documents, buckets, key tokens, and how far scores hold: against worked values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmlab.eval.long.keys import key_tokens
from lmlab.eval.long.sums import ByPosition, Sums, edges, mean_se, ratio_se


def test_ratio_se_of_equal_documents_is_that_of_their_means() -> None:
    means = np.array([2.0, 3.0, 5.0, 4.0])
    assert ratio_se(means * 10, np.full(4, 10.0)) == pytest.approx(means.std(ddof=1) / 2)


def test_ratio_se_against_the_jackknife() -> None:
    """The leave-one-out estimate of a ratio's error, another formula, agrees on many documents."""
    rng = np.random.default_rng(0)
    n = rng.integers(50, 150, 400).astype(float)
    total = n * rng.normal(4, 0.5, 400)
    left = (total.sum() - total) / (n.sum() - n)
    jackknife = math.sqrt(399 / 400 * ((left - left.mean()) ** 2).sum())
    assert ratio_se(total, n) == pytest.approx(jackknife, rel=0.01)


def test_one_document_has_no_error() -> None:
    assert ratio_se(np.array([3.0, 0.0]), np.array([5.0, 0.0])) is None
    assert mean_se([1.0]) == (1.0, None)
    assert mean_se([1.0, 3.0]) == (2.0, pytest.approx(1.0))


def test_sums_are_token_weighted() -> None:
    sums = Sums.of(2)
    sums.add(0, np.array([2.0]))
    sums.add(1, np.full(9, 10.0))
    assert sums.mean == pytest.approx(9.2)
    assert sums.tokens == 10
    assert math.isnan(Sums.of(1).mean)


@pytest.mark.parametrize(
    ("length", "trained", "wanted"),
    [
        (64, 128, [0, 16, 32, 64]),
        (128, 128, [0, 16, 32, 64, 128]),
        (1000, 128, [0, 16, 32, 64, 128, 384, 640, 896, 1000]),
        (300, 200, [0, 16, 32, 64, 128, 200, 300]),
        (8, 128, [0, 8]),
    ],
)
def test_edges(length: int, trained: int, wanted: list[int]) -> None:
    assert edges(length, trained) == wanted


def test_buckets_sum_to_the_total() -> None:
    rng, found = np.random.default_rng(0), ByPosition(100, 40)
    rows = [rng.random(n) for n in (100, 100, 37, 1)]
    for row in rows:
        found.add(row)
    buckets = found.buckets()
    assert sum(b["tokens"] for b in buckets) == 238
    assert sum(b["nats"] for b in buckets) == pytest.approx(sum(row.sum() for row in rows))
    assert buckets[0]["tokens"] == 16 + 16 + 16 + 1
    assert buckets[0]["nats"] == pytest.approx(sum(row[:16].sum() for row in rows))


def test_key_tokens_are_those_that_only_far_text_gives_away() -> None:
    ids = np.array([7, 8, 9, 1, 2, 3, 4, 7, 8, 9, 5, 7, 8, 9])
    # 7 8 9 ends at 2, 9 and 13: 7 and 4 tokens apart
    assert np.flatnonzero(key_tokens(ids, near=5)).tolist() == [8]  # the target at 9
    assert np.flatnonzero(key_tokens(ids, near=3)).tolist() == [8, 12]
    assert not key_tokens(ids, near=7).any()
    assert len(key_tokens(ids, near=1)) == len(ids) - 1


def test_key_tokens_by_brute_force() -> None:
    ids, near = np.random.default_rng(1).integers(0, 4, 300), 20
    wanted = []
    for end in range(1, 300):
        same = [e for e in range(2, end) if end >= 2 and list(ids[e - 2 : e + 1]) == list(ids[end - 2 : end + 1])]
        wanted.append(bool(same) and end - max(same) > near)
    assert key_tokens(ids, near).tolist() == wanted
