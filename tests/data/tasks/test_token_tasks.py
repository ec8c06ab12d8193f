"""Tasks with ids of their own: what stands where."""

from __future__ import annotations

import time

import numpy as np
import pytest
from task_cases import task

from lmlab.data.tasks.split import draw
from lmlab.data.tasks.tokens import distinct
from lmlab.errors import ConfigError


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_mqar_is_zoologys() -> None:
    """Pairs first, keys and values from halves that share nothing, then every key once, a slot of two tokens each."""
    e = task("mqar", n_pairs=4, vocab_size=64).draw(rng(), 500, 64)
    keys, values = e.inputs_BT[:, 0:8:2], e.inputs_BT[:, 1:8:2]
    assert (keys.min(), keys.max()) == (1, 31)
    assert (values.min(), values.max()) == (32, 63)
    assert all(len(set(row)) == 4 for row in keys.tolist())
    assert (e.answers_BT.sum(1) == 4).all()
    rows, at = np.nonzero(e.answers_BT)
    assert (at >= 8).all()
    assert (at % 2 == 0).all()
    for row in range(500):
        pairs = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        here = at[rows == row]
        asked = e.inputs_BT[row, here].tolist()
        assert sorted(asked) == sorted(pairs)
        assert e.targets_BT[row, here].tolist() == [pairs[key] for key in asked]
    blank = e.inputs_BT[:, 8:][~e.answers_BT[:, 8:]]
    assert (blank == 0).all()


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_mqar_asks_by_a_power_law(power: float) -> None:
    """One pair: gap g of 28 slots is drawn with probability ∝ g^(power−1)."""
    n = 40_000
    e = task("mqar", n_pairs=1, vocab_size=8, gap_power=power).draw(rng(), n, 58)
    counts = np.bincount((e.answers_BT.argmax(1) - 2) // 2, minlength=28)
    p = np.arange(1, 29) ** (power - 1)
    p /= p.sum()
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 55.5, "χ², 27 degrees of freedom, 1 in 1,000"


def test_distinct_draws_one_after_the_other_by_weight() -> None:
    """First 2 with 3/4, else 1; weights 0, 1, 3 never draw 0 before both."""
    with np.errstate(divide="ignore"):
        found = distinct(rng(), 20_000, 3, 2, np.log([0.0, 1.0, 3.0]))
    assert set(map(tuple, found.tolist())) == {(1, 2), (2, 1)}
    assert (found[:, 0] == 2).mean() == pytest.approx(0.75, abs=0.01)
    everything = distinct(rng(), 100, 5, 5)
    assert (np.sort(everything, axis=1) == np.arange(5)).all()


def test_mqar_filler_of_any_ids() -> None:
    e = task("mqar", filler="random").draw(rng(), 100, 256)
    assert len(np.unique(e.inputs_BT[:, 8:])) > 200
    assert (e.inputs_BT > 0).all()


def test_mqar_is_drawn_fast() -> None:
    """10,000 rows of 256 tokens: well under a second when nothing else runs."""
    started = time.process_time()
    draw(task("mqar"), "train", 0, 0, 10_000, 256)
    assert time.process_time() - started < 4


def test_induction_has_one_special_token_before_the_last() -> None:
    e = task("induction").draw(rng(), 300, 32)
    rows, at = np.nonzero(e.inputs_BT == 0)
    assert np.bincount(rows).tolist() == [2] * 300
    first, last = at[::2], at[1::2]
    assert (last == 31).all()
    assert (e.targets_BT[:, -1] == e.inputs_BT[np.arange(300), first + 1]).all()
    assert e.depth_B == pytest.approx(first / 29)


@pytest.mark.parametrize("length", [2, 3, 64, 65])
def test_copy_says_it_twice(length: int) -> None:
    e = task("copy").draw(rng(), 50, length)
    whole = np.concatenate([e.inputs_BT, e.targets_BT[:, -1:]], axis=1)
    half = length // 2
    assert (whole[:, -half:] == whole[:, length % 2 : length % 2 + half]).all()
    assert (whole[:, length - half] == 0).all()
    assert (whole[:, : length % 2] == 1).all()
    assert e.answers_BT.sum() == 50 * half


def test_selective_copy_keeps_the_order() -> None:
    e = task("selective_copy", n_tokens=4, vocab_size=10).draw(rng(), 200, 40)
    for inputs, targets in zip(e.inputs_BT, e.targets_BT, strict=True):
        assert (inputs[-4:] == 1).all()
        assert inputs[:-4][inputs[:-4] > 0].tolist() == targets[-4:].tolist()
    assert (e.inputs_BT[:, :-4] > 0).any(0).all(), "anywhere before"


def test_selective_copy_draws_by_its_generator() -> None:
    """Another seed, other places and other tokens; the same seed, the same."""
    one, two, again = (task("selective_copy").draw(np.random.default_rng(s), 50, 64) for s in (1, 2, 1))
    assert (one.inputs_BT == again.inputs_BT).all()
    assert ((one.inputs_BT > 1) != (two.inputs_BT > 1)).any(1).all()


@pytest.mark.parametrize("n_needles", [1, 4])
def test_needle_is_marked_and_keys_differ(n_needles: int) -> None:
    t = task("needle", n_needles=n_needles, vocab_size=20)
    for length in (t.least(), 64):
        e = t.draw(rng(), 300, length)
        for inputs, target in zip(e.inputs_BT, e.targets_BT[:, -1], strict=True):
            marks = np.flatnonzero(inputs == 0)
            assert len(marks) == n_needles
            assert (np.diff(marks) >= 3).all()
            pairs = {int(inputs[m + 1]): int(inputs[m + 2]) for m in marks}
            assert len(pairs) == n_needles
            assert inputs[-2] == 1
            assert pairs[int(inputs[-1])] == target


def test_the_needle_asked_for_may_be_any_of_them() -> None:
    e = task("needle", n_needles=4, vocab_size=20).draw(rng(), 2000, 64)
    nth = [int((row[np.flatnonzero(row == 0) + 1] == row[-1]).argmax()) for row in e.inputs_BT]
    assert np.bincount(nth, minlength=4).min() > 300


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("mqar", {"n_pairs": 64, "vocab_size": 128}, "`data.n_pairs` is 64, and `data.vocab_size` 128 has 63 keys"),
        ("needle", {"n_needles": 7, "vocab_size": 8}, "`data.n_needles` is 7, and `data.vocab_size` 8 has 6 keys"),
    ],
    ids=["mqar", "needle"],
)
def test_more_keys_than_ids_are_refused(name: str, values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task(name, **values)
    assert caught.value.message == message
    enough = int(caught.value.hint.split()[-1])
    task(name, **{**values, "vocab_size": enough})
