"""What is named is found, what is written is read, what is wrong is named and counted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lmlab.errors import RunError
from lmlab.report.collect import collect, read_columns, read_run
from lmlab.report.sources import opened
from lmlab.runs.rundir import RunDir
from tests.report import made

ROW = '{"step": 10, "tokens": 100, "train/loss": 2.5}'


def columns(tmp_path: Path, text: str) -> tuple[dict[str, list[float]], list[str]]:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="utf-8")
    found, _, problems = read_columns(path)
    return {key: column.tolist() for key, column in found.items()}, problems


def test_rows_become_columns_with_nan_where_a_row_has_none(tmp_path: Path) -> None:
    found, problems = columns(tmp_path, f'{ROW}\n{{"step": 20, "val/loss": 3}}\n')
    assert found["step"] == [10.0, 20.0]
    np.testing.assert_equal(found["train/loss"], [2.5, np.nan])
    np.testing.assert_equal(found["val/loss"], [np.nan, 3.0])
    assert problems == []


WRONG = {
    "torn": (f'{ROW}\n{{"step": 2', [10], []),
    "last without newline": (f'{ROW}\n{{"step": 20}}', [10, 20], []),
    "no json": (f"{ROW}\nnonsense\n" + '{"step": 30}\n', [10, 30], ["metrics.jsonl has 1 damaged line: 2"]),
    "no step": (f'{ROW}\n{{"tokens": 1}}\n', [10], ["metrics.jsonl has 1 damaged line: 2"]),
    "step is true": ('{"step": true}\n', [], ["metrics.jsonl has 1 damaged line: 1"]),
    "no object": (f"[1]\n{ROW}\n7\n", [10], ["metrics.jsonl has 2 damaged lines: 1, 3"]),
    "blank": (f"{ROW}\n\n", [10], ["metrics.jsonl has 1 damaged line: 2"]),
    "halves of one row": ('{"step": 1,\n"tokens": 2}\n', [], ["metrics.jsonl has 2 damaged lines: 1, 2"]),
    "two rows in a line": ('{"step": 1},{"step": 2}\n', [], ["metrics.jsonl has 1 damaged line: 1"]),
    "deep": ("[" * 100_000 + "\n" + ROW + "\n", [10], ["metrics.jsonl has 1 damaged line: 1"]),
    "zeros": ("\0\0\0\n" + ROW + "\n", [10], ["metrics.jsonl has 1 damaged line: 1"]),
    "goes back": (
        '{"step": 20}\n{"step": 10}\n',
        [20, 10],
        ["metrics.jsonl goes back at line 2: step 10 after step 20"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_damage_is_named_and_the_rest_is_read(tmp_path: Path, case: str) -> None:
    text, steps, problems = WRONG[case]
    found, said = columns(tmp_path, text)
    assert found.get("step", []) == steps
    assert said == problems


TOKENS = ["NaN", "Infinity", "-Infinity", "null", "1e999", '"high"', "[1]", "true", "1" + "0" * 400]


@pytest.mark.parametrize("token", TOKENS, ids=[token[:9] for token in TOKENS])
def test_what_is_no_finite_number_is_missing_and_counted(tmp_path: Path, token: str) -> None:
    found, problems = columns(tmp_path, f'{ROW}\n{{"step": 20, "train/loss": {token}, "tokens": 200}}\n')
    np.testing.assert_equal(found["train/loss"], [2.5, np.nan])
    assert found["tokens"] == [100, 200]
    assert problems == ["metrics.jsonl has 1 line with a value that is no finite number: 2 (train/loss)"]


def test_line_numbers_count_damaged_lines_too(tmp_path: Path) -> None:
    _, problems = columns(tmp_path, f'x\n{ROW}\n{{"step": 20, "train/loss": null}}\n')
    assert problems[0] == "metrics.jsonl has 1 damaged line: 1"
    assert problems[1].endswith(": 3 (train/loss)")


def test_a_long_file_is_read_whole_around_its_damage(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "train/loss": i / 2}) for i in range(1, 50_001)]
    lines[30_000] = "nonsense"
    lines[40_000] = '{"step": 40001, "train/loss": NaN}'
    found, problems = columns(tmp_path, "\n".join(lines) + "\n")
    assert found["step"] == [i for i in range(1, 50_001) if i != 30_001]
    assert found["train/loss"][-1] == 25_000
    assert problems == [
        "metrics.jsonl has 1 damaged line: 30001",
        "metrics.jsonl has 1 line with a value that is no finite number: 40001 (train/loss)",
    ]


def test_an_absent_file_has_no_rows_and_no_problem(tmp_path: Path) -> None:
    assert read_columns(tmp_path / "metrics.jsonl") == ({}, {}, [])


# ---------------------------------------------------------------- a run


def test_config_is_flat_without_seeds_and_what_is_outside_identity(tmp_path: Path) -> None:
    found = read_run(made.run(tmp_path, "a-00000001", seed=3), made.outside)
    assert found.config["norm"] == "rmsnorm"
    assert found.config["optim.lr"] == 0.003
    assert not {"version", "wandb.mode", "name", "train.log_every_steps"} & found.config.keys()
    assert not any(key.startswith("seed") for key in found.config)


def test_null_seeds_follow_seed_all(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", "seed.data=9", seed=3)
    assert read_run(run, made.outside).seeds == {"all": 3, "init": 3, "data": 9, "dropout": 3}


def test_error_is_one_line(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", state="failed", error="error: out of memory\nhint: smaller")
    assert read_run(run, made.outside).error == "out of memory"


def test_a_damaged_manifest_leaves_the_run_unreadable_but_in_its_arm(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001")
    (run.path / "manifest.json").write_text("{")
    found = read_run(run, made.outside)
    assert found.state == "unreadable"
    assert found.config["norm"] == "rmsnorm"
    assert "manifest.json can't be read" in found.problems[0]


def test_sections_of_a_manifest_that_are_no_objects_are_named_and_left_out(tmp_path: Path) -> None:
    data = {"splits": {"val": 3}, "tokenizer": "bpe"}
    found = read_run(made.run(tmp_path, "a-00000001", resolved=[1], data=data, kernels=None), made.outside)
    assert found.problems == ["manifest.json: no object in resolved, data.tokenizer, data.splits.val"]
    assert found.result["val/bits_per_byte"] == 2.0


def test_a_half_written_run_is_created(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a-00000001")
    run.write_config(made.config())
    (run.path / ".claim").touch()
    found = read_run(run, made.outside)
    assert (found.state, found.rows, found.problems) == ("created", {}, [])


# ---------------------------------------------------------------- what words name


def names(root: Path, *words: str) -> list[str]:
    with opened(words, root) as selection:
        return sorted(run.name for run in collect(selection, made.outside))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name in ("one-00000001", "two-00000002", "three-00000003", "two-00000002.old-1"):
        made.run(root, name)
    made.sweep(root, "early-aaaa0001", {"a": []}, [("one-00000001", "a", 0)], used="2026-01-01T00:00:00+00:00")
    members = [("two-00000002", "a", 0), ("never-99999999", "a", 1)]
    made.sweep(root, "late-aaaa0002", {"a": []}, members, used="2026-02-01T00:00:00+00:00")
    return root


WORDS = {
    "nothing: the newest sweep": ([], ["never-99999999", "two-00000002"]),
    "a sweep's directory name": (["early-aaaa0001"], ["one-00000001"]),
    "a sweep's slug": (["early"], ["one-00000001"]),
    "a sweep's path": (["{root}/sweeps/early-aaaa0001"], ["one-00000001"]),
    "a sweep's plan": (["{root}/sweeps/early-aaaa0001/sweep.json"], ["one-00000001"]),
    "a run's directory name": (["three-00000003"], ["three-00000003"]),
    "a run's slug": (["three"], ["three-00000003"]),
    "a run's path": (["{root}/three-00000003"], ["three-00000003"]),
    "a hash": (["00000003"], ["three-00000003"]),
    "one set aside": (["two-00000002.old-1"], ["two-00000002.old-1"]),
    "a folder": (["{root}"], ["one-00000001", "three-00000003", "two-00000002"]),
    "a mixture, each once": (["early", "three", "one-00000001"], ["one-00000001", "three-00000003"]),
}


@pytest.mark.parametrize("case", WORDS)
def test_words_name_runs(root: Path, case: str) -> None:
    words, expected = WORDS[case]
    assert names(root, *(word.format(root=root) for word in words)) == expected


def test_without_sweeps_every_run_is_taken(tmp_path: Path) -> None:
    made.run(tmp_path, "one-00000001")
    made.run(tmp_path, "one-00000001.old-1")
    assert names(tmp_path) == ["one-00000001"]


def test_a_renamed_member_is_found_by_its_hash(root: Path) -> None:
    (root / "one-00000001").rename(root / "uno-00000001")
    assert names(root, "early") == ["uno-00000001"]


def test_a_planned_run_has_the_composition_and_seed_of_the_plan(root: Path) -> None:
    with opened(["late"], root) as selection:
        planned = next(run for run in collect(selection, made.outside) if run.path is None)
    assert (planned.state, planned.config["norm"]) == ("planned", "rmsnorm")
    assert planned.seeds == {"all": 1, "init": 1, "data": 1, "dropout": 1}


@pytest.mark.parametrize(("event", "state"), [("began", "missing"), (None, "planned")])
def test_a_member_that_the_ledger_saw_begin_and_that_is_gone_is_missing(
    root: Path, event: str | None, state: str
) -> None:
    run = "never-99999999" if event else "two-00000002"
    line = json.dumps({"time": "2026-02-01", "event": "began", "run": run})
    (root / "sweeps" / "late-aaaa0002" / "ledger.jsonl").write_text(f'torn"\n{line}\n7\n')
    with opened(["late"], root) as selection:
        gone = next(run for run in collect(selection, made.outside) if run.path is None)
    assert (gone.name, gone.state) == ("never-99999999", state)


def damaged(root: Path, name: str, *, older: bool = False) -> str:
    """The plan of a sweep, cut; what it says of when it was used is lost with it."""
    path = root / "sweeps" / name / "sweep.json"
    path.write_text("{")
    if older:
        os.utime(path, (0, 0))
    return f"warning: {path} can't be read: "


def test_a_damaged_plan_is_named_and_the_newest_taken(root: Path) -> None:
    said = damaged(root, "early-aaaa0001", older=True)
    with opened([], root) as selection:
        assert selection.title == "late-aaaa0002"
        assert selection.notes[0].startswith(said)
        assert selection.notes[0].endswith("; passed over")


def test_when_the_newest_plan_is_damaged_all_runs_are_shown_and_it_is_said(root: Path) -> None:
    said = damaged(root, "late-aaaa0002")
    with opened([], root) as selection:
        assert selection.title == "all runs"
        assert len(selection.runs) == 3
        assert selection.notes[0].startswith(said)
        assert selection.notes[0].endswith("; it was the newest sweep, so all runs are shown")


BAD_WORDS = {
    "no such run": (["nosuch"], "no run or sweep nosuch", "sweeps there: early-aaaa0001, late-aaaa0002"),
    "nearest sweep": (["earlier"], "no run or sweep earlier", "did you mean the sweep early"),
    "no such bundle": (["x.zip"], "there is no file x.zip", "--bundle"),
    "run and sweep": (["same"], "could be any of sweep same-aaaa0003, run same-00000004", "the whole name"),
    "empty folder": (["{root}/../empty"], "there are no runs in", "lmlab train"),
    "damaged plan": (["broken"], "sweep.json can't be read: KeyError: 'members'", "writes it anew"),
}


@pytest.mark.parametrize("case", BAD_WORDS)
def test_wrong_words(root: Path, case: str) -> None:
    (root.parent / "empty").mkdir()
    made.run(root, "same-00000004")
    made.sweep(root, "same-aaaa0003", {"a": []}, [], used="2025-01-01T00:00:00+00:00")
    if case == "damaged plan":
        made.sweep(root, "broken-aaaa0004", {"a": []}, [])
        (root / "sweeps" / "broken-aaaa0004" / "sweep.json").write_text(json.dumps({"arms": {}}))
    words, message, hint = BAD_WORDS[case]
    with pytest.raises(RunError) as caught:
        names(root, *(word.format(root=root) for word in words))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there are no runs in"):
        names(tmp_path / "runs")
