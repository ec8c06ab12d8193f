"""In which order arms stand, and what their labels say and leave out."""

from __future__ import annotations

from pathlib import Path

from lmlab.report.model import Report
from tests.report import made
from tests.report.test_arms import arms, labels


def test_arms_stand_by_their_values_and_the_default_part_first(tmp_path: Path) -> None:
    """rmsnorm is no change of the default, so it comes before layernorm, whatever was begun first."""
    made.run(tmp_path, "a-00000001", started="2026-01-02")
    made.run(tmp_path, "b-00000002", "norm=layernorm", started="2026-01-01")
    assert labels(made.report(tmp_path)) == ["norm=rmsnorm", "norm=layernorm"]


def test_numbers_stand_by_size_and_not_by_their_digits(tmp_path: Path) -> None:
    report = arms(tmp_path, ("optim.lr=0.02",), ("optim.lr=1e-05",), ("optim.lr=0.1",), ("optim.lr=3",))
    assert labels(report) == [f"optim.lr={lr}" for lr in ("1e-05", "0.02", "0.1", "3")]


def test_arms_of_a_sweep_stand_in_its_order_before_others(tmp_path: Path) -> None:
    for i, words in enumerate([("norm=layernorm",), (), ("pos=alibi",)]):
        made.run(tmp_path, f"r-{i:08x}", *words)
    members = [("r-00000000", "ln", 0), ("r-00000001", "rms", 0)]
    made.sweep(tmp_path, "s-aaaa0001", {"ln": ["norm=layernorm"], "rms": []}, members)
    report = made.report(tmp_path, "s", "r-00000002")
    assert [arm.values["norm"] + arm.values["pos"] for arm in report.arms] == [
        *("layernormrope", "rmsnormrope", "rmsnormalibi")
    ]


# ---------------------------------------------------------------- labels


def test_a_label_leaves_out_a_field_that_is_as_in_most_arms(tmp_path: Path) -> None:
    report = arms(tmp_path, (), ("norm=layernorm",), ("optim.lr=0.01",))
    assert labels(report) == ["norm=rmsnorm", "norm=rmsnorm optim.lr=0.01", "norm=layernorm"]
    assert report.arms[0].values == {"norm": "rmsnorm", "optim.lr": 0.003}


def test_of_four_arms_a_part_that_three_share_goes_without_saying(tmp_path: Path) -> None:
    report = arms(tmp_path, (), ("norm=layernorm",), ("pos=alibi",), ("pos=alibi", "attn=gqa"))
    assert labels(report) == ["pos=rope", "pos=alibi", "pos=alibi attn=gqa", "norm=layernorm pos=rope"]


def test_the_arm_of_which_nothing_would_be_left_says_its_parts(tmp_path: Path) -> None:
    report = arms(tmp_path, (), ("norm=layernorm",), ("pos=alibi",), ("optim.lr=0.01",))
    assert labels(report)[0] == "norm=rmsnorm pos=rope"


def test_of_three_arms_every_part_is_said(tmp_path: Path) -> None:
    report = arms(tmp_path, (), ("norm=layernorm",), ("pos=alibi",))
    assert labels(report) == ["norm=rmsnorm pos=rope", "norm=rmsnorm pos=alibi", "norm=layernorm pos=rope"]


def test_labels_of_a_star_are_different(tmp_path: Path) -> None:
    words = [(), *((f"optim.lr={i}",) for i in range(1, 5)), ("norm=layernorm",), ("attn.window=8",)]
    found = labels(arms(tmp_path, *words))
    assert len(set(found)) == len(words)


def test_a_single_field_behind_a_named_part_is_shown_beside_it(tmp_path: Path) -> None:
    """model=one and model=two differ in one field, which the name would hide."""
    for i, (name, word) in enumerate({"one": "model.n_layers=4", "two": "model.n_layers=6"}.items()):
        made.run(tmp_path, f"r-{i:08x}", word, changes=[f"model={name}"], choices={"model": name})
    report: Report = made.report(tmp_path)
    assert report.axes == ["model", "model.n_layers"]
    assert labels(report) == ["model=one model.n_layers=4", "model=two model.n_layers=6"]


def test_the_only_arm_is_named_by_what_differs_from_the_default(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", "optim.lr=0.01")
    assert labels(made.report(tmp_path)) == ["optim.lr=0.01"]
    made.run(tmp_path / "plain", "b-00000002")
    assert labels(made.report(tmp_path / "plain")) == ["default"]
