"""Arms, axes and differences, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lmlab.report.arms import stat
from lmlab.report.model import BPB, Delta, Report
from tests.report import made


def arms(root: Path, *runs: tuple[str, ...]) -> Report:
    """A report of one run per tuple of words."""
    for i, words in enumerate(runs):
        made.run(root, f"r{i}-{i:08x}", *words, started=f"2026-01-01T00:00:{i:02d}+00:00")
    return made.report(root)


def labels(report: Report) -> list[str]:
    return [arm.label for arm in report.arms]


# ---------------------------------------------------------------- axes


def test_runs_that_differ_in_seeds_are_one_arm(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0)
    made.run(tmp_path, "a-00000002", "seed.data=7", seed=0)
    made.run(tmp_path, "a-00000003", seed=1)
    report = made.report(tmp_path)
    assert [len(arm.runs) for arm in report.arms] == [3]
    assert report.axes == []


def test_a_parts_own_fields_are_no_axis(tmp_path: Path) -> None:
    """norm's eps, rope's theta and gqa's n_kv_heads come with their part."""
    report = arms(tmp_path, (), ("norm=layernorm",), ("pos=alibi",), ("attn=gqa",))
    assert report.axes == ["norm", "pos", "attn"]
    assert labels(report) == ["norm=rmsnorm pos=rope attn=mha", "attn=gqa", "pos=alibi", "norm=layernorm"]


def test_a_field_that_differs_within_one_part_is_an_axis(tmp_path: Path) -> None:
    report = arms(tmp_path, ("attn=gqa",), ("attn=gqa", "attn.n_kv_heads=1"), ())
    assert report.axes == ["attn", "attn.n_kv_heads"]
    assert labels(report) == ["attn=mha", "attn=gqa attn.n_kv_heads=1", "attn=gqa attn.n_kv_heads=2"]
    assert report.arms[0].values == {"attn": "mha", "attn.n_kv_heads": None}


def test_a_field_that_someone_typed_is_an_axis_although_the_part_differs(tmp_path: Path) -> None:
    report = arms(tmp_path, ("norm=layernorm",), ("norm.eps=0.1",))
    assert report.axes == ["norm", "norm.eps"]


def test_what_is_the_same_everywhere_is_no_axis(tmp_path: Path) -> None:
    report = arms(tmp_path, ("optim.lr=0.01", "norm=layernorm"), ("optim.lr=0.01",))
    assert report.axes == ["norm"]
    assert report.common == {"optim.lr": "0.01"}


def test_true_and_one_are_not_equal(tmp_path: Path) -> None:
    assert arms(tmp_path, ("compile=true",), ("compile=1",)).axes == ["compile"]


def test_a_named_part_stands_for_its_fields(tmp_path: Path) -> None:
    """model=nano against model=tiny: one axis, not three sizes."""
    sizes = {"nano": ("model.n_layers=4", "model.d_model=128"), "tiny": ("model.n_layers=6", "model.d_model=256")}
    for i, (name, words) in enumerate(sizes.items()):
        made.run(tmp_path, f"r-{i:08x}", *words, changes=[f"model={name}"], choices={"model": name})
    report = made.report(tmp_path)
    assert report.axes == ["model"]
    assert labels(report) == ["model=nano", "model=tiny"]


def test_a_named_part_with_a_field_set_besides_is_told_by_its_fields(tmp_path: Path) -> None:
    for i, (words, changes) in enumerate(
        [(("model.n_layers=4",), ["model=nano"]), (("model.n_layers=6",), ["model=tiny", "model.n_layers=6"])]
    ):
        made.run(tmp_path, f"r-{i:08x}", *words, changes=changes, choices={"model": changes[0][6:]})
    assert made.report(tmp_path).axes == ["model.n_layers"]


def test_a_seed_twice_by_other_code_makes_two_arms(tmp_path: Path) -> None:
    """A run and the one set aside for it are no two draws of one experiment."""
    made.run(tmp_path, "a-00000001", bits=2.0, code_hash="new00000")
    made.run(tmp_path, "a-00000001.old-1", bits=1.0, code_hash="old00000")
    report = made.report(tmp_path, "a-00000001", "a-00000001.old-1")
    assert report.axes == ["code"]
    assert [arm.stats[BPB].mean for arm in report.arms] == [2.0, 1.0]
    assert labels(report) == ["code=new00000", "code=old00000"]


def test_other_data_makes_another_arm(tmp_path: Path) -> None:
    """The corpus changed between the seeds: no two draws of one experiment, whatever the configuration says."""
    val = {"documents": 11, "bytes": 990, "tokens": 250}
    made.run(tmp_path, "a-00000001", seed=0, bits=2.0)
    made.run(tmp_path, "a-00000002", seed=1, bits=1.0, fingerprint="0ther0ther00", data={"splits": {"val": val}})
    report = made.report(tmp_path)
    assert report.axes == ["data"]
    assert labels(report) == ["data=f1f1f1f1", "data=0ther0th"]
    assert [arm.stats[BPB].mean for arm in report.arms] == [2.0, 1.0]
    assert report.arms[1].delta == Delta(None, why="other validation text")


def test_the_group_that_all_share_is_still_said_of_all_beside_the_data_axis(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", "data.name=pycode", seed=0, changes=["data=pycode"])
    made.run(tmp_path, "a-00000002", "data.name=pycode", seed=1, changes=["data=pycode"], fingerprint="0ther0ther00")
    report = made.report(tmp_path)
    assert (report.axes, report.common) == (["data"], {"data": "pycode"})


def test_a_run_whose_data_is_not_known_stays_with_the_others_of_its_configuration(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0)
    made.run(tmp_path, "a-00000002", seed=1, state="failed", fingerprint=None, data={"source_hash": None})
    assert [len(arm.runs) for arm in made.report(tmp_path).arms] == [2]


def test_the_data_axis_has_a_name_of_its_own_beside_the_groups(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0)
    made.run(tmp_path, "a-00000002", seed=1, fingerprint="0ther0ther00")
    made.run(tmp_path, "b-00000003", "data.name=pycode", seed=0)
    assert made.report(tmp_path).axes == ["data", "data.fingerprint"]


# ---------------------------------------------------------------- figures


def test_stat_is_mean_and_sample_sd() -> None:
    assert stat([1.0, 2.0, 6.0]).mean == 3.0
    assert stat([1.0, 2.0, 6.0]).sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert stat([1.0]).sd is None


def test_only_finished_runs_enter_a_figure(tmp_path: Path) -> None:
    for i, (state, bits) in enumerate([("finished", 2.0), ("finished", 2.2), ("diverged", 9.0), ("stopped", 1.0)]):
        made.run(tmp_path, f"a-0000000{i}", seed=i, bits=bits, state=state)
    (arm,) = made.report(tmp_path).arms
    assert arm.states == {"finished": 2, "diverged": 1, "stopped": 1}
    assert (arm.stats[BPB].mean, arm.stats[BPB].n) == (pytest.approx(2.1), 2)
    assert arm.stats[BPB].sd == pytest.approx(math.sqrt(0.02))


def test_a_figure_that_is_no_finite_number_is_missing(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", bits=None, result={"val/bits_per_byte": None, "tokens_per_s": "fast"})
    (arm,) = made.report(tmp_path).arms
    assert not {BPB, "tokens_per_s"} & arm.stats.keys()


def delta(root: Path, base: dict[int, float], other: dict[int, float], **fields: object) -> Delta:
    """Arm minus baseline, each given as {seed: bits}."""
    for seed, bits in base.items():
        made.run(root, f"base-{seed:08x}", seed=seed, bits=bits, started="2026-01-01")
    for seed, bits in other.items():
        made.run(root, f"other-1{seed:07x}", "norm=layernorm", seed=seed, bits=bits, started="2026-01-02", **fields)
    found = made.report(root).arms[1].delta
    assert found is not None
    return found


def test_delta_is_paired_over_common_seeds(tmp_path: Path) -> None:
    """Seeds 0 and 1 are in both: differences −0.1 and −0.3, whose sd is 0.2/√2; seed 2 has no partner."""
    found = delta(tmp_path, {0: 2.0, 1: 3.0}, {0: 1.9, 1: 2.7, 2: 9.0})
    assert found.paired
    assert found.n == 2
    assert found.mean == pytest.approx(-0.2)
    assert found.sd == pytest.approx(0.2 / math.sqrt(2))


def test_delta_of_one_pair_has_no_spread(tmp_path: Path) -> None:
    found = delta(tmp_path, {0: 2.0}, {0: 2.5, 1: 9.0})
    assert (found.mean, found.sd, found.n, found.paired) == (0.5, None, 1, True)


def test_delta_without_common_seeds_is_of_the_means(tmp_path: Path) -> None:
    """Means 2.5 and 4.5; sd √0.5 in both, so √(0.5 + 0.5) = 1 of the difference."""
    found = delta(tmp_path, {0: 2.0, 1: 3.0}, {2: 4.0, 3: 5.0})
    assert (found.mean, found.paired, found.n) == (2.0, False, 2)
    assert found.sd == pytest.approx(1.0)


def test_delta_of_means_needs_two_seeds_on_both_sides_for_a_spread(tmp_path: Path) -> None:
    assert delta(tmp_path, {0: 2.0}, {2: 4.0, 3: 5.0}).sd is None


def test_pairs_are_by_the_seeds_in_effect(tmp_path: Path) -> None:
    """seed.data=1 is another draw than seed=0, although seed.all is 0 in both."""
    made.run(tmp_path, "a-00000001", bits=2.0, started="2026-01-01")
    made.run(tmp_path, "b-00000002", "norm=layernorm", "seed.data=1", bits=3.0, started="2026-01-02")
    found = made.report(tmp_path).arms[1].delta
    assert found is not None
    assert not found.paired


def test_there_is_no_delta_on_other_validation_text(tmp_path: Path) -> None:
    found = delta(tmp_path, {0: 2.0}, {0: 1.0}, data={"source_hash": "other"})
    assert (found.mean, found.why) == (None, "other validation text")


def test_another_share_of_the_same_corpus_is_other_text(tmp_path: Path) -> None:
    found = delta(tmp_path, {0: 2.0}, {0: 1.0}, data={"splits": {"val": {"documents": 12, "bytes": 1001}}})
    assert found.why == "other validation text"


def test_another_tokenizer_on_the_same_text_has_a_delta(tmp_path: Path) -> None:
    """Bits per byte outlive it: the text's bytes are the same, its tokens are not."""
    val = {"documents": 11, "bytes": 1000, "tokens": 999}
    found = delta(tmp_path, {0: 2.0}, {0: 1.5}, fingerprint="other", data={"splits": {"val": val}})
    assert found.mean == -0.5


def test_a_delta_without_finished_runs_says_why(tmp_path: Path) -> None:
    assert delta(tmp_path, {0: 2.0}, {0: 1.5}, state="failed").why == "no finished run"


def test_a_delta_to_an_unfinished_baseline_says_why(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", state="failed", started="2026-01-01")
    made.run(tmp_path, "b-00000002", "norm=layernorm", started="2026-01-02")
    report = made.report(tmp_path, baseline="norm=rmsnorm")
    assert report.arms[1].delta == Delta(None, why="the baseline has no finished run")
    note = "no Δ: the baseline norm=rmsnorm has no finished run (--baseline KEY=VALUE takes another)"
    assert note in report.notes
