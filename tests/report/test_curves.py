"""Curves over seeds: the common range, the mean and the extremes; one set of val tokens; light smoothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmlab.report.curves import common_grid, smoothed
from lmlab.report.model import BPB, TRAIN_LOSS, Curve, Report
from tests.report import made


def row(step: int, **fields: float) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "flops": 5e6 * step, "elapsed_s": step / 2} | {
        key.replace("__", "/"): value for key, value in fields.items()
    }


def losses(pairs: dict[int, float]) -> list[dict[str, Any]]:
    return [row(step, train__loss=loss) for step, loss in pairs.items()]


def one(report: Report, metric: str, x_name: str = "tokens") -> Curve:
    (curve,) = [c for c in report.curves if (c.metric, c.x_name) == (metric, x_name)]
    return curve


def val(*points: tuple[int, float, int]) -> list[dict[str, Any]]:
    """(step, bits, val tokens)."""
    return [row(step, **{"val__bits_per_byte": bits, "val__tokens": tokens}) for step, bits, tokens in points]


def test_a_curve_is_the_mean_and_the_extremes_over_seeds(tmp_path: Path) -> None:
    for seed, scale in enumerate((1.0, 2.0, 6.0)):
        made.run(tmp_path, f"a-0000000{seed}", seed=seed, rows=losses({1: scale, 2: 10 * scale}))
    curve = one(made.report(tmp_path), TRAIN_LOSS)
    assert (curve.x, curve.n) == ([100, 200], 3)
    assert curve.mean == [3.0, 30.0]
    assert curve.low == [1.0, 10.0]
    assert curve.high == [6.0, 60.0]


@pytest.mark.parametrize(("x_name", "expected"), [("tokens", 300), ("flops", 1.5e7), ("elapsed_s", 1.5)])
def test_there_is_a_curve_for_each_axis(tmp_path: Path, x_name: str, expected: float) -> None:
    made.run(tmp_path, "a-00000001", rows=losses({1: 4.0, 3: 2.0}))
    assert one(made.report(tmp_path), TRAIN_LOSS, x_name).x[-1] == expected


def test_seeds_are_interpolated_within_their_common_range(tmp_path: Path) -> None:
    """From 1 to 3 one falls 4 → 0, from 2 to 6 the other rises 0 → 4: common is 2 to 3, where both are known."""
    made.run(tmp_path, "a-00000001", seed=0, rows=losses({1: 4.0, 3: 0.0}))
    made.run(tmp_path, "a-00000002", seed=1, rows=losses({2: 0.0, 6: 4.0}))
    curve = one(made.report(tmp_path), TRAIN_LOSS)
    assert curve.x == [200, 300]
    assert curve.mean == [1.0, 0.5]
    assert curve.high == [2.0, 1.0]


def test_seeds_without_a_common_range_have_no_curve(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0, rows=losses({1: 4.0, 2: 0.0}))
    made.run(tmp_path, "a-00000002", seed=1, rows=losses({5: 0.0, 6: 4.0}))
    assert made.report(tmp_path).curves == []


def test_long_curves_have_at_most_300_points_and_both_ends() -> None:
    x = np.arange(10_000.0)
    same, other = common_grid([x, x]), common_grid([x, x + 0.5])
    assert len(same) <= 300
    assert len(other) <= 300
    assert (same[0], same[-1]) == (0, 9999)
    assert (other[0], other[-1]) == (0.5, 9999)


def test_unfinished_runs_do_not_cut_a_curve_short(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0, rows=losses({1: 4.0, 9: 2.0}))
    made.run(tmp_path, "a-00000002", seed=1, state="diverged", rows=losses({1: 4.0, 2: 99.0}))
    curve = one(made.report(tmp_path), TRAIN_LOSS)
    assert (curve.x, curve.n) == ([100, 900], 1)


def test_an_arm_without_a_finished_run_shows_how_far_it_came(tmp_path: Path) -> None:
    rows = [*losses({1: 4.0, 2: 9.0}), row(3, train__loss=float("nan"))]
    made.run(tmp_path, "a-00000001", state="diverged", rows=rows)
    assert one(made.report(tmp_path), TRAIN_LOSS).x == [100, 200]


def test_seconds_go_on_over_a_resumed_run(tmp_path: Path) -> None:
    rows = losses({1: 4.0, 2: 3.0, 3: 2.0})
    made.run(tmp_path, "a-00000001", rows=rows, sessions=[{"from_step": 0}, {"from_step": 2}])
    assert one(made.report(tmp_path), TRAIN_LOSS, "elapsed_s").x == [0.5, 1.0, 1.5]


# ---------------------------------------------------------------- val


def test_a_val_curve_ends_on_the_part_of_val_it_was_on(tmp_path: Path) -> None:
    """The end on all of val (2.0) is another figure; on the part it is 2.5."""
    rows = val((10, 4.0, 500), (20, 3.0, 500))
    rows.append(row(30, **{"val__bits_per_byte": 2.0, "val__tokens": 900, "part__val__bits_per_byte": 2.5}))
    made.run(tmp_path, "a-00000001", rows=rows)
    assert one(made.report(tmp_path), BPB).mean == [4.0, 3.0, 2.5]


def test_without_the_part_the_end_on_other_tokens_is_left_out(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", rows=val((10, 4.0, 500), (20, 3.0, 500), (30, 2.0, 900)))
    assert one(made.report(tmp_path), BPB).mean == [4.0, 3.0]


def test_one_interval_and_an_end_on_other_tokens_keep_the_interval(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", rows=val((10, 4.0, 500), (20, 3.0, 900)))
    assert one(made.report(tmp_path), BPB).mean == [4.0]


def test_when_all_points_are_on_all_of_val_all_are_taken(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", rows=val((10, 4.0, 900), (20, 3.0, 900), (30, 2.0, 900)))
    assert one(made.report(tmp_path), BPB).mean == [4.0, 3.0, 2.0]


def test_a_seed_on_another_part_of_val_is_left_out_and_named(tmp_path: Path) -> None:
    for seed, tokens in enumerate((500, 500, 700)):
        rows = val((10, 4.0 + seed, tokens), (20, 3.0 + seed, tokens))
        made.run(tmp_path, f"a-0000000{seed}", seed=seed, rows=rows)
    report = made.report(tmp_path)
    assert one(report, BPB).mean == [4.5, 3.5]
    assert "val curve of default without a-00000002: validated on another part of val at intervals" in report.notes


def test_arms_on_different_parts_of_val_are_noted(tmp_path: Path) -> None:
    whole = {"splits": {"val": {"documents": 10, "bytes": 9000, "tokens": 910}}}
    for i, (words, tokens) in enumerate([((), 500), (("norm=layernorm",), 500), (("pos=alibi",), 700)]):
        made.run(tmp_path, f"a-0000000{i}", *words, rows=val((10, 4.0, tokens), (20, 3.0, tokens)), data=whole)
    made.run(tmp_path, "a-00000009", "attn=gqa", rows=val((10, 4.0, 900), (20, 3.0, 900)), data=whole)
    report = made.report(tmp_path)
    (note,) = [note for note in report.notes if "different parts" in note]
    assert note.endswith("parts of val: 500 tokens in 2 arms, all of val in 1 arm, 700 tokens in 1 arm")
    sizes = {report.arms[c.arm].label: c.size for c in report.curves if c.metric == BPB}
    assert sorted(sizes.values(), key=str) == [500, 500, 700, None]


def test_arms_that_are_all_on_all_of_their_val_are_not_noted(tmp_path: Path) -> None:
    """Another tokenizer makes another number of tokens of the same text."""
    for i, (words, tokens) in enumerate([((), 900), (("tokenizer=byte",), 4000)]):
        whole = {"splits": {"val": {"documents": 10, "bytes": 9000, "tokens": tokens + 1}}}
        made.run(tmp_path, f"a-0000000{i}", *words, rows=val((10, 4.0, tokens), (20, 3.0, tokens)), data=whole)
    report = made.report(tmp_path)
    assert not [note for note in report.notes if "parts of val" in note]
    assert {curve.size for curve in report.curves} == {None}


def test_as_many_tokens_of_another_tokenizer_are_another_part(tmp_path: Path) -> None:
    whole = {"splits": {"val": {"documents": 10, "bytes": 9000, "tokens": 910}}}
    for i, words in enumerate([(), ("tokenizer=byte",)]):
        rows = val((10, 4.0, 500), (20, 3.0, 500))
        made.run(tmp_path, f"a-0000000{i}", *words, rows=rows, data=whole, tokenizer_hash=f"hash{i}")
    (note,) = [note for note in made.report(tmp_path).notes if "different parts" in note]
    assert note.endswith("500 tokens of tokenizer hash0 in 1 arm, 500 tokens of tokenizer hash1 in 1 arm")


SIZES: dict[str, tuple[list[dict[str, Any]], float | None]] = {
    "the end tells of a part": (
        [*val((10, 4.0, 500)), row(30, val__bits_per_byte=2.0, val__tokens=900, part__val__bits_per_byte=2.5)],
        500,
    ),
    "the end is on more": (val((10, 4.0, 500), (20, 3.0, 500), (30, 2.0, 900)), 500),
    "unfinished, and the data are more": (val((10, 4.0, 200)), 200),
    "all of val, less a token of each document": (val((10, 4.0, 239), (20, 3.0, 239)), None),
    "not known": ([row(10, val__bits_per_byte=2.0)], None),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_curve_of_val_knows_the_part_it_is_on(tmp_path: Path, case: str) -> None:
    """All of val is 250 tokens in 11 documents."""
    rows, size = SIZES[case]
    made.run(tmp_path, "a-00000001", rows=rows)
    assert one(made.report(tmp_path), BPB).size == size


def test_a_curve_of_train_has_no_part(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001")
    assert one(made.report(tmp_path), TRAIN_LOSS).size is None


def test_curves_over_different_seeds_are_noted(tmp_path: Path) -> None:
    for name, words, seed, state in (
        ("a-00000001", (), 0, "finished"),
        ("a-00000002", (), 1, "finished"),
        ("b-00000003", ("norm=layernorm",), 0, "finished"),
        ("b-00000004", ("norm=layernorm",), 1, "diverged"),
    ):
        made.run(tmp_path, name, *words, seed=seed, state=state)
    note = "curves are over different seeds: 0, 1 in norm=rmsnorm; 0 in norm=layernorm"
    assert note in made.report(tmp_path).notes


def test_curves_over_the_same_seeds_are_not_noted(tmp_path: Path) -> None:
    for i, words in enumerate([(), ("norm=layernorm",)]):
        made.run(tmp_path, f"a-0000000{i}", *words, seed=3)
    assert not [note for note in made.report(tmp_path).notes if "different seeds" in note]


# ---------------------------------------------------------------- smoothing


def test_short_curves_are_not_smoothed() -> None:
    values = np.random.default_rng(0).normal(size=99)
    assert (smoothed(values) == values).all()


def test_smoothing_is_a_centred_mean_that_narrows_at_the_ends() -> None:
    """200 points: two on each side, the first as it is, the second over three."""
    values = np.random.default_rng(0).normal(size=200)
    found = smoothed(values)
    assert found[0] == pytest.approx(values[0])
    assert found[1] == pytest.approx(values[:3].mean())
    assert found[100] == pytest.approx(values[98:103].mean())
    assert found[-1] == pytest.approx(values[-1])


def test_smoothing_leaves_a_straight_line() -> None:
    values = np.linspace(0, 1, 1000)
    np.testing.assert_allclose(smoothed(values), values, atol=1e-12)
