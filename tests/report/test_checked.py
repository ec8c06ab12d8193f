"""A run's files are held against each other: what does not fit is named, and metrics.jsonl is the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmlab.report.collect import read_run
from lmlab.report.model import BPB, Run
from lmlab.runs.rundir import RunDir
from tests.report import made

TEST = "test/bits_per_byte"


def read(run: RunDir) -> Run:
    return read_run(run, made.outside)


def with_result(run: RunDir, change: dict[str, Any]) -> RunDir:
    """The run with its manifest's figures changed, as whoever edits the file does; None takes one out."""
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    result = manifest["result"] | change
    manifest["result"] = {key: value for key, value in result.items() if value is not None}
    path.write_text(json.dumps(manifest))
    return run


def test_files_that_agree_are_no_problem(tmp_path: Path) -> None:
    found = read(made.run(tmp_path, "a-00000001", result={TEST: 2.5}))
    assert found.problems == []
    assert (found.result[BPB], found.result[TEST]) == (2.0, 2.5)


def test_a_figure_that_disagrees_is_named_with_both_values_and_that_of_the_metrics_counts(tmp_path: Path) -> None:
    found = read(with_result(made.run(tmp_path, "a-00000001", bits=2.0), {BPB: 1.5}))
    assert found.result[BPB] == 2.0
    assert found.problems == ["val/bits_per_byte is 1.5 in manifest.json and 2.0 in metrics.jsonl, which counts"]


def test_the_arm_has_the_figure_of_the_metrics(tmp_path: Path) -> None:
    with_result(made.run(tmp_path, "a-00000001", bits=2.0), {BPB: 0.1})
    report = made.report(tmp_path)
    assert report.arms[0].stats[BPB].mean == 2.0
    assert any("a-00000001: val/bits_per_byte is 0.1 in manifest.json" in note for note in report.notes)


def test_a_difference_in_the_last_bits_is_let_pass(tmp_path: Path) -> None:
    found = read(with_result(made.run(tmp_path, "a-00000001", bits=2.0), {BPB: 2.0 * (1 + 1e-12)}))
    assert (found.problems, found.result[BPB]) == ([], 2.0)


@pytest.mark.parametrize("value", [None, float("nan"), "1.9"])
def test_a_figure_that_the_manifest_lacks_is_taken_from_the_metrics(tmp_path: Path, value: Any) -> None:
    found = read(with_result(made.run(tmp_path, "a-00000001", bits=2.0), {BPB: value, "tokens": None}))
    assert (found.result[BPB], found.result["tokens"], found.problems) == (2.0, 409600, [])


def test_a_manifest_without_figures_has_them_all_from_the_metrics(tmp_path: Path) -> None:
    """The speed is the median of the intervals."""
    rows = [{"step": i, "tokens": 10 * i, "train/tokens_per_s": rate} for i, rate in enumerate((9.0, 1.0, 5.0), 1)]
    rows[-1] |= {BPB: 2.0, "val/loss": 4.0}
    run = made.run(tmp_path, "a-00000001", rows=rows)
    (run.path / "manifest.json").write_text(json.dumps(run.manifest() | {"result": None}))
    found = read(run)
    assert {key: found.result[key] for key in ("step", "tokens", BPB, "tokens_per_s")} == {
        **{"step": 3, "tokens": 30},
        **{BPB: 2.0, "tokens_per_s": 5.0},
    }


MISSING = {
    "missing": (None, "metrics.jsonl is missing: the figures are the manifest's"),
    "empty": ("", "metrics.jsonl holds no rows: the figures are the manifest's"),
    "cut": ('{"step": 40, "tokens": 1}\n', "metrics.jsonl ends at step 40 of 100: the figures are the manifest's"),
}


@pytest.mark.parametrize("case", MISSING)
def test_metrics_without_the_final_row_leave_the_manifests_figures_and_say_so(tmp_path: Path, case: str) -> None:
    text, problem = MISSING[case]
    run = made.run(tmp_path, "a-00000001", bits=2.0)
    run.metrics_path.write_text(text or "")
    if text is None:
        run.metrics_path.unlink()
    found = read(run)
    assert (found.problems, found.result[BPB], found.result["tokens"]) == ([problem], 2.0, 409600)


def test_a_last_row_without_the_figure_leaves_the_manifests(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", bits=2.0)
    run.metrics_path.write_text('{"step": 100, "tokens": 409600}\n')
    found = read(run)
    assert found.result[BPB] == 2.0
    assert found.problems == ["no val/bits_per_byte in the last row of metrics.jsonl: the figure is the manifest's"]


def test_a_figure_in_neither_file_is_a_problem(tmp_path: Path) -> None:
    found = read(made.run(tmp_path, "a-00000001", bits=None))
    assert found.problems == ["no val/bits_per_byte in manifest.json and none in the last row of metrics.jsonl"]


def test_of_a_tokenizer_that_loses_bytes_no_bits_per_byte_are_asked_for(tmp_path: Path) -> None:
    data = {"tokenizer": {"name": "hf", "lossless": False}}
    assert read(made.run(tmp_path, "a-00000001", bits=None, result={"val/loss": 3.0}, data=data)).problems == []


def test_of_an_unfinished_run_no_figures_are_asked_for(tmp_path: Path) -> None:
    assert read(made.run(tmp_path, "a-00000001", bits=None, state="stopped")).problems == []


# ---------------------------------------------------------------- manifest and configuration


@pytest.mark.parametrize(("text", "what"), [(None, "missing"), ("{}", "empty")])
def test_a_run_that_lost_its_manifest_is_unreadable(tmp_path: Path, text: str | None, what: str) -> None:
    run = made.run(tmp_path, "a-00000001")
    (run.path / ".claim").touch()
    (run.path / "manifest.json").unlink()
    if text is not None:
        (run.path / "manifest.json").write_text(text)
    found = read(run)
    assert (found.state, found.problems) == ("unreadable", [f"manifest.json is {what}"])


def test_an_empty_manifest_file_is_a_problem(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001")
    (run.path / "manifest.json").write_text("")
    found = read(run)
    assert found.state == "unreadable"
    assert len(found.problems) == 1
    assert found.problems[0].startswith("manifest.json can't be read")


@pytest.mark.parametrize("name", ["a-00000001", "a-00000001.old-2"])
def test_an_edited_configuration_is_a_problem(tmp_path: Path, name: str) -> None:
    run = made.run(tmp_path, name)
    found = read_run(run, made.outside, None, lambda config: "0000000f")
    assert found.edited
    assert found.problems == ["config.yaml was edited: its hash is 0000000f, the directory's 00000001"]


@pytest.mark.parametrize(("name", "told"), [("a-00000001", "00000001"), ("a-00000001", None), ("mine", "0000000f")])
def test_a_configuration_that_fits_or_can_not_be_told_is_none(tmp_path: Path, name: str, told: str | None) -> None:
    """None: its parts are of a plug-in; `mine`: the directory was renamed."""
    found = read_run(made.run(tmp_path, name), made.outside, None, lambda config: told)
    assert (found.edited, found.problems) == (False, [])
