"""Notes say what the figures are of."""

from __future__ import annotations

from pathlib import Path

from tests.report import made


def test_a_mean_over_fewer_runs_than_finished_is_noted(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0, bits=2.0)
    made.run(tmp_path, "a-00000002", seed=1, bits=None)
    report = made.report(tmp_path)
    assert "val bits/byte of default is over 1 of its 2 finished runs" in report.notes
    problem = "no val/bits_per_byte in manifest.json and none in the last row of metrics.jsonl"
    assert f"a-00000002: {problem}" in report.notes


def test_a_figure_that_only_the_metrics_have_is_in_the_mean(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0, bits=2.0)
    rows = made.ended({"val/bits_per_byte": 3.0, "val/loss": 6.0})
    made.run(tmp_path, "a-00000002", seed=1, bits=None, rows=rows)
    report = made.report(tmp_path)
    assert report.arms[0].stats["val/bits_per_byte"].mean == 2.5
    assert not [note for note in report.notes if "finished runs" in note and "over 1" in note]


def test_the_fields_that_a_named_part_stands_for_are_noted(tmp_path: Path) -> None:
    sizes = {"nano": ("model.n_layers=4", "model.d_model=128"), "tiny": ("model.n_layers=6", "model.d_model=256")}
    for i, (name, words) in enumerate(sizes.items()):
        made.run(tmp_path, f"r-{i:08x}", *words, changes=[f"model={name}"], choices={"model": name})
    report = made.report(tmp_path)
    assert report.axes == ["model"]
    assert (
        "model: nano is model.n_layers=4 model.d_model=128; tiny is model.n_layers=6 model.d_model=256" in report.notes
    )


def test_lists_of_arms_are_cut(tmp_path: Path) -> None:
    for i in range(9):
        made.run(tmp_path, f"a-0000000{i}", f"optim.lr={i + 1}")
    (note,) = [note for note in made.report(tmp_path).notes if note.startswith("one finished seed")]
    assert note.endswith(": optim.lr=1, optim.lr=2, optim.lr=3, optim.lr=4, … and 5 more")


def test_only_lines_are_passed_over(tmp_path: Path) -> None:
    """A problem that is no damaged line was not passed over."""
    damaged = made.run(tmp_path, "a-00000001")
    damaged.metrics_path.write_text("nonsense\n" + damaged.metrics_path.read_text())
    cut = made.run(tmp_path, "a-00000002", seed=1)
    cut.metrics_path.write_text("")
    notes = made.report(tmp_path).notes
    assert "a-00000001: metrics.jsonl has 1 damaged line: 1; passed over" in notes
    assert "a-00000002: metrics.jsonl holds no rows: the figures are the manifest's" in notes
