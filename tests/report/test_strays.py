"""What looks like a run and is none is named: in a note, and in the error when nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlab.errors import RunError
from tests.report import made


def without(file: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        made.run(path.parent, path.name).path.joinpath(file).unlink()

    return make


STRAYS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no configuration": ("a-00000001", without("config.yaml"), "a-00000001 has no config.yaml"),
    "no configuration, renamed": ("mine", without("config.yaml"), "mine has no config.yaml"),
    "no manifest": ("a-00000001", without("manifest.json"), "a-00000001 has no manifest.json"),
    "empty": ("a-00000001", Path.mkdir, "a-00000001 is empty: it has no config.yaml"),
    "a file": ("a-00000001", Path.touch, "a-00000001 is no directory"),
    "a loop": ("loop", lambda path: path.symlink_to(path), f"loop can't be read: {os.strerror(40)}"),
    "a link to nothing": ("gone", lambda path: path.symlink_to("nowhere"), "gone is a link to nothing"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_what_looks_like_a_run_is_named_in_a_note(tmp_path: Path, case: str) -> None:
    name, make, said = STRAYS[case]
    made.run(tmp_path, "b-00000002")
    make(tmp_path / name)
    for words in ([], [str(tmp_path)]):
        report = made.report(tmp_path, *words)
        assert [run.name for arm in report.arms for run in arm.runs] == ["b-00000002"]
        assert said in report.notes


@pytest.mark.parametrize("case", STRAYS)
def test_it_is_named_in_the_error_when_nothing_is_left(tmp_path: Path, case: str) -> None:
    name, make, said = STRAYS[case]
    make(tmp_path / name)
    with pytest.raises(RunError) as caught:
        made.report(tmp_path)
    assert caught.value.message == f"there are no runs in {tmp_path}: {said}"


@pytest.mark.parametrize("by", ["path", "name"])
def test_a_run_that_is_named_and_has_no_configuration_is_an_error_that_says_so(tmp_path: Path, by: str) -> None:
    without("config.yaml")(tmp_path / "a-00000001")
    with pytest.raises(RunError, match=r"a-00000001 has no config\.yaml"):
        made.report(tmp_path, str(tmp_path / "a-00000001") if by == "path" else "a-00000001")


def test_other_folders_and_files_are_nobodys_business(tmp_path: Path) -> None:
    made.run(tmp_path, "b-00000002")
    for name in ("reports", "sweeps", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    assert not [note for note in made.report(tmp_path).notes if "notes" in note or "reports" in note]


def test_of_words_that_a_shell_made_of_a_star_those_that_name_nothing_are_passed_over(tmp_path: Path) -> None:
    """runs/* also gives files, reports/ and sweeps/."""
    made.run(tmp_path, "b-00000002")
    (tmp_path / "reports").mkdir()
    (tmp_path / "notes.txt").touch()
    without("config.yaml")(tmp_path / "a-00000001")
    report = made.report(tmp_path, *(str(path) for path in sorted(tmp_path.iterdir())))
    assert [run.name for arm in report.arms for run in arm.runs] == ["b-00000002"]
    assert [note for note in report.notes if note.endswith("; passed over")] == [
        f"{tmp_path}/a-00000001 has no config.yaml; passed over",
        f"{tmp_path}/notes.txt is no run, sweep, folder or bundle; passed over",
        f"there are no runs in {tmp_path}/reports; passed over",
    ]


def test_a_file_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunError, match=r"notes.txt is no run, sweep, folder or bundle"):
        made.report(tmp_path, str(tmp_path / "notes.txt"))


def test_a_members_directory_without_its_configuration_is_named(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001")
    without("config.yaml")(tmp_path / "b-00000002")
    without("config.yaml")(tmp_path / "c-00000003")  # none of the sweep's
    members = [("a-00000001", "x", 0), ("b-00000002", "x", 1)]
    made.sweep(tmp_path, "s-aaaa0001", {"x": []}, members)
    notes = made.report(tmp_path).notes
    assert "b-00000002 has no config.yaml" in notes
    assert not [note for note in notes if "c-00000003" in note]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("named", [False, True])
def test_a_directory_that_may_not_be_read_is_named(tmp_path: Path, named: bool) -> None:
    made.run(tmp_path, "b-00000002")
    folder = made.run(tmp_path, "a-00000001").path
    folder.chmod(0)
    try:
        report = made.report(tmp_path, *([str(folder), str(tmp_path)] if named else []))
    finally:
        folder.chmod(0o755)
    assert [run.name for arm in report.arms for run in arm.runs] == ["b-00000002"]
    assert any("a-00000001 can't be read: Permission denied" in note for note in report.notes)
