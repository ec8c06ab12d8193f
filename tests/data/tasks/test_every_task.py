"""What holds for every task: exact lengths, oracle 100 %, chance, depth, splits that share nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from task_cases import CASES, TASKS, TOKENIZERS, case_id, task

from lmlab.data.tasks import split
from lmlab.data.tasks.base import Chance, Examples, Task
from lmlab.errors import ConfigError, DataError

every = pytest.mark.parametrize("case", CASES, ids=case_id)
DEEP = [case for case in CASES if task(case[0]).has_depth]


def made(case: Any) -> Task:
    return task(case[0], case[1], **case[2])


def lengths(t: Task) -> list[int]:
    """The shortest, odd and even ones, up to 16 times a row of 256."""
    return sorted({t.least(), t.least() + 1, max(t.least(), 64), 255, 256, 1001, 4096})


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@every
def test_lengths_are_exact_and_the_oracle_is_right_everywhere(case: Any) -> None:
    t = made(case)
    for length in lengths(t):
        e = t.draw(rng(), 40, length)
        assert e.inputs_BT.shape == e.targets_BT.shape == e.answers_BT.shape == (40, length)
        assert e.depth_B.shape == (40,)
        assert (e.inputs_BT.dtype, e.targets_BT.dtype, e.answers_BT.dtype) == (np.int64, np.int64, bool)
        for ids in (e.inputs_BT, e.targets_BT):
            assert ids.min() >= 0
            assert ids.max() < t.vocab_size
        assert e.answers_BT.any(1).all()
        assert (t.oracle(e.inputs_BT) == e.targets_BT)[e.answers_BT].all(), f"at {length}"


@every
def test_the_oracle_reads_the_inputs(case: Any) -> None:
    """Other inputs, other answers: it knows them by nothing else."""
    t = made(case)
    one, two = (t.draw(rng(seed), 64, 256) for seed in (1, 2))
    right = (t.oracle(one.inputs_BT) == two.targets_BT)[two.answers_BT]
    assert right.mean() < 0.9


@every
def test_a_row_below_the_least_is_refused(case: Any) -> None:
    t = made(case)
    with pytest.raises(ConfigError) as caught:
        t.draw(rng(), 2, t.least() - 1)
    assert f"needs {t.least()} tokens, rows have {t.least() - 1}" in caught.value.message
    assert f"model.seq_len to at least {t.least()}" in caught.value.hint


@every
def test_defaults_fit_a_row_of_the_default_model(case: Any) -> None:
    assert made(case).least() <= 256


def uniform(t: Task, e: Examples) -> np.ndarray:
    """Guesses at every answer: any of what occurs there in other examples that begin as this one's answers do."""
    pool = t.draw(rng(7), 5000, e.inputs_BT.shape[1])
    at: dict[tuple[int, ...], list[int]] = {}
    for row, here in zip(pool.targets_BT, pool.answers_BT, strict=True):
        ids = row[here].tolist()
        for i, token in enumerate(ids):
            at.setdefault(context(t, ids, i), []).append(token)
    guesses, draws = np.full(e.targets_BT.shape, -1), rng(8)
    for b, (row, here) in enumerate(zip(e.targets_BT, e.answers_BT, strict=True)):
        ids = row[here].tolist()
        seen = [at.get(context(t, ids, i), [-1]) for i in range(len(ids))]
        guesses[b, here] = [s[i] for s, i in zip(seen, draws.integers(0, [len(s) for s in seen]), strict=True)]
    return guesses


def context(t: Task, ids: list[int], i: int) -> tuple[int, ...]:
    return tuple(ids[:i]) if t.text else ()


SMALL = [
    *((name, "byte", {}) for name in TASKS if not task(name).text),
    ("mqar", "byte", {"n_pairs": 2, "vocab_size": 8}),
    ("induction", "byte", {"vocab_size": 5}),
    ("needle", "byte", {"n_needles": 3, "vocab_size": 8}),
    ("copy", "byte", {"vocab_size": 4}),
    ("selective_copy", "byte", {"n_tokens": 3, "vocab_size": 5}),
    *(("passkey", kind, {"digits": 2}) for kind in TOKENIZERS),
    *((name, kind, {}) for kind in TOKENIZERS for name in ("needle_text", "vt")),
]


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_a_uniform_model_scores_chance(case: Any) -> None:
    t, n = made(case), 3000
    e = t.draw(rng(3), n, max(t.least(), 96))
    right, chance = uniform(t, e) == e.targets_BT, t.chance(e.inputs_BT.shape[1])
    n_tokens = int(e.answers_BT.sum())
    shares = right[e.answers_BT].mean(), (right | ~e.answers_BT).all(1).mean()
    for share, p, times in zip(shares, (chance.token, chance.exact), (n_tokens, n), strict=True):
        assert abs(share - p) <= 3 * (p * (1 - p) / times) ** 0.5 + (p * times < 1) / times


# ---------------------------------------------------------------- depth


@pytest.mark.parametrize("case", DEEP, ids=case_id)
def test_depths_are_drawn_evenly(case: Any) -> None:
    """χ² of 10 bins: below 27.9, which one draw in a thousand passes (9 degrees of freedom)."""
    depths = made(case).draw(rng(5), 5000, 1024).depth_B
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 27.9
    assert (depths.min(), depths.max()) == pytest.approx((0, 1), abs=0.005)


@pytest.mark.parametrize("case", DEEP, ids=case_id)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_a_depth_that_is_asked_for_is_kept(case: Any, depth: float) -> None:
    t = made(case)
    e = t.draw(rng(), 20, 1024, depth)
    assert np.abs(e.depth_B - depth).max() <= 0.5 / (1024 - t.least()) + 1e-12
    assert (t.oracle(e.inputs_BT) == e.targets_BT)[e.answers_BT].all()


@pytest.mark.parametrize("depth", [-0.1, 1.5])
def test_a_depth_beyond_the_row_is_refused(depth: float) -> None:
    with pytest.raises(ConfigError, match="not between 0 and 1"):
        task("induction").draw(rng(), 2, 64, depth)


@pytest.mark.parametrize("name", [name for name in TASKS if not task(name).has_depth])
def test_a_task_without_depth_says_so(name: str) -> None:
    assert np.isnan(task(name).draw(rng(), 3, 256).depth_B).all()
    with pytest.raises(ConfigError, match=f"`data={name}` has no depth"):
        task(name).draw(rng(), 2, 256, 0.5)


# ---------------------------------------------------------------- splits


def rows(e: Examples) -> set[bytes]:
    return {i.tobytes() + t.tobytes() for i, t in zip(e.inputs_BT, e.targets_BT, strict=True)}


@pytest.mark.parametrize(
    ("name", "values", "length"),
    [("mqar", {"n_pairs": 1, "vocab_size": 6}, 6), ("induction", {"vocab_size": 4}, 6), ("passkey", {"digits": 2}, 90)],
    ids=["mqar", "induction", "passkey"],
)
def test_splits_share_no_example_in_a_small_space(name: str, values: dict[str, Any], length: int) -> None:
    t = task(name, **values)
    train, val, test = (rows(split.draw(t, s, 0, 0, 3000, length)) for s in split.SPLITS)
    everything = rows(t.draw(rng(), 60_000, length))
    assert len(everything) < 12_000, "the space is small: nearly all of it is drawn"
    assert not train & val | train & test | val & test
    assert len(val | test) / len(everything) < 0.5
    assert min(len(val), len(test)) > 0


@pytest.mark.parametrize("name", TASKS)
def test_draws_are_pure(name: str) -> None:
    t = task(name)
    e = split.draw(t, "val", 3, 5, 9, 256)
    assert_same(e, split.draw(t, "val", 3, 5, 9, 256))
    assert len(e.inputs_BT) == 9
    for other in (("train", 3, 5), ("val", 4, 5), ("val", 3, 6)):
        assert not rows(e) & rows(split.draw(t, *other, 9, 256))


def assert_same(one: Examples, two: Examples) -> None:
    for name in ("inputs_BT", "targets_BT", "answers_BT", "depth_B"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_every_example_is_in_the_split_that_was_asked_for() -> None:
    for name in split.SPLITS:
        assert set(split.split_of(split.draw(task("mqar"), name, 1, 0, 500, 64))) == {name}
    found = split.split_of(task("mqar").draw(rng(), 4000, 64))
    assert [(found == name).mean() for name in split.SPLITS] == pytest.approx([6 / 8, 1 / 8, 1 / 8], abs=0.02)


def test_a_split_without_examples_is_an_error_and_no_endless_loop() -> None:
    t = task("induction", vocab_size=3)  # two examples of 3 tokens
    there = set(split.split_of(t.draw(rng(), 100, 3)))
    missing = next(name for name in split.SPLITS if name not in there)
    with pytest.raises(DataError, match=f"none is in the split `{missing}`"):
        split.draw(t, missing, 0, 0, 4, 3)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="no split `dev`"):
        split.draw(task("mqar"), "dev", 0, 0, 1, 64)


def test_chance_is_a_probability() -> None:
    for case in CASES:
        chance = made(case).chance(256)
        assert isinstance(chance, Chance)
        assert 0 < chance.exact <= chance.token < 1
