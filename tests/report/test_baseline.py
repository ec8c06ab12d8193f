"""Which arm the others are compared with: named, a sweep's or a bundle's own, or by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.errors import RunError
from lmlab.report.build import build
from lmlab.report.bundle import pack
from lmlab.report.model import Report
from lmlab.report.sources import opened
from tests.report import made
from tests.report.test_arms import arms, labels


def base(report: Report) -> str:
    assert report.baseline is not None
    assert [arm.is_baseline for arm in report.arms] == [i == report.baseline for i in range(len(report.arms))]
    return report.arms[report.baseline].label


def sweep_of_two(root: Path, name: str = "s-aaaa0001", **fields: str) -> None:
    made.run(root, "a-00000001", started="2026-01-01")
    made.run(root, "b-00000002", "norm=layernorm", started="2026-01-02")
    members = [("b-00000002", "ln", 0), ("a-00000001", "rms", 0)]
    made.sweep(root, name, {"ln": ["norm=layernorm"], "rms": []}, members, **fields)


def test_arms_of_a_sweep_stand_in_its_order_and_have_its_baseline(tmp_path: Path) -> None:
    sweep_of_two(tmp_path, baseline="rms")
    report = made.report(tmp_path)
    assert labels(report) == ["norm=layernorm", "norm=rmsnorm"]
    assert (report.baseline, report.arms[1].is_baseline) == (1, True)


def test_of_sweeps_with_baselines_of_their_own_the_first_is_taken(tmp_path: Path) -> None:
    sweep_of_two(tmp_path, "one-aaaa0001", baseline="ln")
    members = [("a-00000001", "x", 0), ("b-00000002", "y", 0)]
    made.sweep(tmp_path, "two-aaaa0002", {"x": [], "y": ["norm=layernorm"]}, members, baseline="x")
    assert base(made.report(tmp_path, "one", "two")) == "norm=layernorm"
    assert base(made.report(tmp_path, "two", "one")) == "norm=rmsnorm"


# ---------------------------------------------------------------- a bundle's own


def bundled(root: Path, path: Path, *words: str, baseline: str) -> str:
    with opened(words, root) as selection:
        pack(path, selection, build(selection, made.outside, baseline=baseline))
    return str(path)


def test_of_bundles_with_other_baselines_the_first_is_taken(tmp_path: Path) -> None:
    """Their labels are others among each other's arms: the runs tell which arm is meant."""
    one, two = tmp_path / "one", tmp_path / "two"
    arms(one, (), ("norm=layernorm",))
    arms(two, ("pos=alibi",), ("pos=alibi", "optim.lr=0.01"))
    first = bundled(one, tmp_path / "1.zip", str(one), baseline="norm=layernorm")
    second = bundled(two, tmp_path / "2.zip", str(two), baseline="optim.lr=0.01")
    assert base(made.report(tmp_path, first, second)) == "norm=layernorm pos=rope"
    assert base(made.report(tmp_path, second, first)) == "pos=alibi optim.lr=0.01"


def test_a_bundle_that_nobody_chose_a_baseline_for_has_the_default_and_says_so(tmp_path: Path) -> None:
    arms(tmp_path / "runs", (), ("norm=layernorm",))
    with opened([str(tmp_path / "runs")], tmp_path) as selection:
        then = build(selection, made.outside)
        pack(tmp_path / "x.zip", selection, then)
    assert made.report(tmp_path, str(tmp_path / "x.zip")).notes == then.notes


# ---------------------------------------------------------------- by default


def why(report: Report) -> list[str]:
    return [note for note in report.notes if note.startswith("the baseline is")]


def test_by_default_it_is_the_arm_nearest_to_the_default_and_a_note_says_so(tmp_path: Path) -> None:
    report = arms(tmp_path, ("optim.lr=0.001",), (), ("optim.lr=0.01",))
    assert base(report) == "optim.lr=0.003"
    assert why(report) == [
        "the baseline is optim.lr=0.003, of those that finished the nearest to the default: nobody chose one "
        "(--baseline KEY=VALUE does)"
    ]


def test_of_equally_near_arms_it_is_the_one_that_most_others_differ_from_in_one_thing(tmp_path: Path) -> None:
    """bf16 and fp32 alone are one change each; two other arms are one step away from fp32 and two from bf16."""
    fp32 = "train.precision=fp32"
    report = arms(tmp_path, ("train.precision=bf16",), (fp32,), (fp32, "optim.lr=1"), (fp32, "norm=layernorm"))
    assert report.arms[report.baseline or 0].config["train.precision"] == "fp32"
    assert report.arms[report.baseline or 0].config["optim.lr"] == 0.003


def test_by_default_an_arm_without_a_finished_run_is_passed_by(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", state="diverged")
    made.run(tmp_path, "b-00000002", "norm=layernorm")
    report = made.report(tmp_path)
    assert base(report) == "norm=layernorm"
    assert report.arms[0].delta is not None


def test_by_default_an_edited_configuration_is_passed_by(tmp_path: Path) -> None:
    """The first run's name says another hash than its configuration has."""
    made.run(tmp_path, "a-00000001")
    made.run(tmp_path, "b-00000002", "norm=layernorm")
    hashes = {"rmsnorm": "99999999", "layernorm": "00000002"}
    with opened([], tmp_path) as selection:
        report = build(selection, made.outside, hash_of=lambda config: hashes[config["norm"]["name"]])
    assert base(report) == "norm=layernorm"


def test_an_edited_member_does_not_stand_for_its_sweeps_baseline(tmp_path: Path) -> None:
    """Of the sweep's arm rms one run was edited to gqa: the arm of the other is meant."""
    made.run(tmp_path, "a-00000001", "attn=gqa", seed=0)
    made.run(tmp_path, "a-00000002", seed=1)
    made.sweep(tmp_path, "s-aaaa0001", {"rms": []}, [("a-00000001", "rms", 0), ("a-00000002", "rms", 1)])
    with opened([], tmp_path) as selection:
        wrong = {"gqa": "99999999", "mha": "00000002"}
        report = build(selection, made.outside, hash_of=lambda config: wrong[config["attn"]["name"]])
    assert base(report) == "attn=mha"


def test_a_chosen_baseline_has_no_note(tmp_path: Path) -> None:
    sweep_of_two(tmp_path)
    assert why(made.report(tmp_path)) == []
    assert why(made.report(tmp_path, str(tmp_path), baseline="norm=layernorm")) == []


# ---------------------------------------------------------------- what a person types

BASELINES = {
    "a run's name": ("b-00000002", "norm=layernorm"),
    "a run's slug": ("b", "norm=layernorm"),
    "a hash": ("00000002", "norm=layernorm"),
    "words": ("norm=layernorm optim.lr=0.003", "norm=layernorm"),
    "words with commas": ("norm=layernorm,optim.lr=3e-3", "norm=layernorm"),
    "a short key": ("norm=rmsnorm lr=0.003", "norm=rmsnorm"),
    "a key outside the axes": ("norm=layernorm model.n_layers=4", "norm=layernorm"),
    "a label": ("norm=rmsnorm optim.lr=0.01", "norm=rmsnorm optim.lr=0.01"),
    "a label's words in another order": ("optim.lr=0.01 norm=rmsnorm", "norm=rmsnorm optim.lr=0.01"),
    "a label that is part of another": ("norm=rmsnorm", "norm=rmsnorm"),
    "an option": ("layernorm", "norm=layernorm"),
    "an option and a key": ("rmsnorm lr=0.01", "norm=rmsnorm optim.lr=0.01"),
}


@pytest.mark.parametrize("case", BASELINES)
def test_baseline_may_be_a_run_or_words(tmp_path: Path, case: str) -> None:
    text, expected = BASELINES[case]
    made.run(tmp_path, "a-00000001", started="2026-01-01")
    made.run(tmp_path, "b-00000002", "norm=layernorm", started="2026-01-02")
    made.run(tmp_path, "c-00000003", "optim.lr=0.01", started="2026-01-03")
    assert base(made.report(tmp_path, baseline=text)) == expected


def test_all_words_of_one_label_go_before_words_that_fit_several(tmp_path: Path) -> None:
    """Two arms have both words; only one has no other."""
    both = ("pos=alibi", "optim.lr=0.01")
    arms(tmp_path, (), ("norm=layernorm",), both, (*both, "attn.window=8"))
    assert base(made.report(tmp_path, baseline="optim.lr=0.01 pos=alibi")) == "pos=alibi optim.lr=0.01"


def test_a_typed_baseline_goes_before_the_sweeps(tmp_path: Path) -> None:
    sweep_of_two(tmp_path, baseline="rms")
    assert made.report(tmp_path, baseline="norm=layernorm").baseline == 0


def test_a_baseline_that_is_not_there_names_the_arms(tmp_path: Path) -> None:
    sweep_of_two(tmp_path)
    with pytest.raises(RunError) as caught:
        made.report(tmp_path, baseline="norm=dyt")
    assert caught.value.message == "`--baseline norm=dyt` is no arm and no run of this report"
    assert caught.value.hint == "the arms: norm=layernorm, norm=rmsnorm"


def test_a_baseline_that_fits_several_names_those(tmp_path: Path) -> None:
    arms(tmp_path, (), ("optim.lr=0.1",), ("norm=layernorm", "pos=alibi"))
    with pytest.raises(RunError) as caught:
        made.report(tmp_path, baseline="rope")
    assert caught.value.message == "`--baseline rope` fits several arms"
    assert caught.value.hint == (
        "name one of them by more words: norm=rmsnorm pos=rope; norm=rmsnorm pos=rope optim.lr=0.1"
    )
