"""One run counts once, wherever and however often it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

from lmlab.report.model import BPB, Report
from tests.report import made


def rows(report: Report) -> dict[str, str]:
    """{run: its problem} of the table of runs."""
    (table,) = [table for table in report.tables if table.name == "runs"]
    at = [column.key for column in table.columns].index("problem")
    return {row[0].text: row[at].text for row in table.rows}


def test_a_copy_counts_once_and_is_named(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", bits=2.0, result={"content_hash": "c0ffee"})
    made.run(tmp_path, "a-00000002", bits=3.0, seed=1, result={"content_hash": "beef"})
    shutil.copytree(run.path, tmp_path / "b-copy")
    report = made.report(tmp_path)
    assert (report.arms[0].stats[BPB].mean, report.arms[0].stats[BPB].n) == (2.5, 2)
    assert "b-copy is a copy of a-00000001: counted once" in report.notes
    assert rows(report)["b-copy"] == "b-copy is a copy of a-00000001: counted once"


def test_a_copy_of_the_same_name_in_another_folder_counts_once(tmp_path: Path) -> None:
    run = made.run(tmp_path / "one", "a-00000001", result={"content_hash": "c0ffee"})
    shutil.copytree(run.path, tmp_path / "two" / "a-00000001")
    report = made.report(tmp_path, str(tmp_path / "one"), str(tmp_path / "two"))
    assert [len(arm.runs) for arm in report.arms] == [1]
    assert "another directory is a copy of a-00000001: counted once" in report.notes


def test_a_link_to_a_run_counts_once(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001")
    (tmp_path / "b-link").symlink_to(run.path)
    assert [len(arm.runs) for arm in made.report(tmp_path).arms] == [1]


def test_the_run_that_was_not_set_aside_counts(tmp_path: Path) -> None:
    run = made.run(tmp_path, "b-00000001", result={"content_hash": "c0ffee"})
    shutil.copytree(run.path, tmp_path / "a-00000001.old-1")
    report = made.report(tmp_path, "a-00000001.old-1", "b-00000001")
    assert [run.name for run in report.arms[0].runs] == ["b-00000001"]
    assert "a-00000001.old-1 is a copy of b-00000001: counted once" in report.notes


def test_the_run_that_a_sweep_lists_counts(tmp_path: Path) -> None:
    run = made.run(tmp_path, "b-00000001", result={"content_hash": "c0ffee"})
    shutil.copytree(run.path, tmp_path / "a-copy")
    made.sweep(tmp_path, "s-aaaa0001", {"x": []}, [("b-00000001", "x", 0)])
    assert [run.name for run in made.report(tmp_path, "a-copy", "s").arms[0].runs] == ["b-00000001"]


def test_equal_weights_of_another_seed_are_no_copy(tmp_path: Path) -> None:
    for seed in (0, 1):
        made.run(tmp_path, f"a-0000000{seed}", seed=seed, result={"content_hash": "c0ffee"})
    assert made.report(tmp_path).arms[0].stats[BPB].n == 2


def test_of_two_results_of_one_seed_the_one_that_ended_last_counts(tmp_path: Path) -> None:
    """The same configuration, seed, code and data, yet other weights: --force, or another machine."""
    for name, bits, ended in (("a-00000001", 2.0, "2026-01-02"), ("b-00000001", 3.0, "2026-01-03")):
        made.run(tmp_path, name, bits=bits, result={"content_hash": name}, ended=ended)
    report = made.report(tmp_path)
    (arm,) = report.arms
    assert (arm.stats[BPB].mean, arm.stats[BPB].n) == (3.0, 1)
    line = "a-00000001 is an older result of what b-00000001 is: the figures are those of the latter"
    assert line in report.notes
    assert rows(report)["a-00000001"] == line


def test_an_unfinished_run_of_the_same_seed_stays_in_sight(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", bits=2.0)
    made.run(tmp_path, "a-00000001.old-1", bits=None, state="stopped")
    (arm,) = made.report(tmp_path, "a-00000001", "a-00000001.old-1").arms
    assert arm.states == {"finished": 1, "stopped": 1}
