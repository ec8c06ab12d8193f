from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.errors import TrainingFailed
from lmlab.runs import metrics
from lmlab.runs.metrics import Metrics


def write(path: Path, *steps: int) -> Path:
    with Metrics(path) as rows:
        for step in steps:
            rows.append({"step": step, "train/loss": 1 / step})
    return path


def steps(path: Path) -> list[int]:
    return [row["step"] for row in metrics.read(path)]


def test_rows_read_back_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", 1, 3, 7)
    assert metrics.read(path) == [{"step": s, "train/loss": 1 / s} for s in (1, 3, 7)]


def test_non_finite_becomes_null(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as rows:
        rows.append({"step": 1, "a": math.nan, "b": math.inf, "c": [-math.inf]})
    text = (tmp_path / "m.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert row == {"step": 1, "a": None, "b": None, "c": [None]}


@pytest.mark.parametrize("row", [{}, {"step": None}, {"step": 1.0}, {"step": True}, {"step": 3}, {"step": 2}])
def test_no_step_twice_and_none_missing(tmp_path: Path, row: dict[str, object]) -> None:
    path = write(tmp_path / "m.jsonl", 1, 3)
    with Metrics(path) as rows, pytest.raises(ValueError, match="step"):
        rows.append(row)
    assert steps(path) == [1, 3]


@pytest.mark.parametrize("torn", ["{", '{"step": 9, "tra', '{"step": 9, "a": 1', "\x00\x00\x00"])
def test_torn_last_line_is_passed_over_and_replaced(
    tmp_path: Path, torn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "m.jsonl", 1, 2)
    with open(path, "a") as f:
        f.write(torn)
    assert metrics.scan(path).torn
    assert steps(path) == [1, 2]
    write(path, 5)
    assert steps(path) == [1, 2, 5]
    assert path.read_bytes().count(b"\n") == 3
    assert capsys.readouterr().err == ""


def test_whole_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", 1, 2)
    os.truncate(path, path.stat().st_size - 1)
    assert steps(path) == [1, 2]
    write(path, 3)
    assert steps(path) == [1, 2, 3]


def test_damage_in_the_middle_is_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "m.jsonl", 1, 2, 3, 4)
    lines = path.read_text().splitlines()
    lines[1], lines[2] = "\x00" * 20, '["no row"]'
    path.write_text("\n".join(lines) + "\n")
    assert steps(path) == [1, 4]
    assert f"{path} has 2 damaged lines: 2, 3" in capsys.readouterr().err
    said: list[str] = []
    metrics.read(path, said.append)
    assert len(said) == 1


def test_cut_back_drops_later_rows_only(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", 1, 2, 3, 4)
    with Metrics(path) as rows:
        assert rows.cut_back(2) == 2
        assert rows.last_step == 2
        rows.append({"step": 3, "again": True})
        assert rows.cut_back(10) == 0
    assert steps(path) == [1, 2, 3]
    assert metrics.read(path)[-1] == {"step": 3, "again": True}
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_cut_back_to_nothing(tmp_path: Path) -> None:
    with Metrics(write(tmp_path / "m.jsonl", 1, 2)) as rows:
        rows.cut_back(0)
        assert rows.last_step is None
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_cut_back_killed_before_the_rename_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", 1, 2, 3)
    code = (
        "import os, sys\nfrom lmlab.runs.metrics import Metrics\nm = Metrics(sys.argv[1])\n"
        "os.replace = lambda *a: os._exit(9)\nm.cut_back(1)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert steps(path) == [1, 2, 3]


def test_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics(path) as rows:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))
        try:
            with pytest.raises(TrainingFailed, match=r"the disk is full: could not write .*m\.jsonl"):
                rows.append({"step": 2, "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        rows.append({"step": 2})
    assert steps(path) == [1, 2]


def test_tail_reads_the_end_and_at_least_one_row(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", *range(1, 2000))
    rows = metrics.tail(path, max_bytes=1000)
    assert rows[-1]["step"] == 1999
    assert 5 < len(rows) < 100
    with Metrics(path) as m:
        m.append({"step": 3000, "long": "x" * 5000})
    assert metrics.tail(path, max_bytes=1000)[-1]["step"] == 3000
    assert metrics.tail(tmp_path / "absent") == []
    assert metrics.read(tmp_path / "absent") == []
