from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.errors import RunError
from lmlab.runs.find import find, list_runs, newest, resolve
from lmlab.runs.rundir import RunDir


def make(root: Path, name: str, state: str = "finished", ended: str = "2026-01-01") -> RunDir:
    run = RunDir.create(root / name, {"version": 1, "name": None})
    run.update_manifest(state=state, ended=ended, started=ended)
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make(root, "default-0123abcd", ended="2026-01-01")
    make(root, "attn-gqa-0199ffff", ended="2026-01-03")
    make(root, "attn-gqa-77771111", state="running", ended="2026-01-04")
    make(root, "attn-gqa-77771111.old-1", ended="2026-01-05")
    make(root, "mine-abcdef01", state="stopped", ended="2026-01-02")
    (root / "sweeps" / "x").mkdir(parents=True)
    (root / "empty").mkdir()
    step = root / "default-0123abcd" / "checkpoints" / "step-00000100"
    step.mkdir(parents=True)
    (step / "meta.json").write_text("{}")
    return root


def test_list_skips_what_is_no_run(root: Path) -> None:
    names = ["attn-gqa-0199ffff", "attn-gqa-77771111", "attn-gqa-77771111.old-1", "default-0123abcd", "mine-abcdef01"]
    assert [run.name for run in list_runs(root)] == names
    assert len(list_runs(root, set_aside=False)) == 4
    assert list_runs(root / "nowhere") == []


def test_entries_that_can_not_be_read_are_passed_over(root: Path) -> None:
    before = list_runs(root)
    (root / "loop").symlink_to(root / "loop")
    (root / "gone").symlink_to(root / "nowhere")
    assert [run.name for run in list_runs(root)] == [run.name for run in before]


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        (None, "attn-gqa-0199ffff"),
        ("default-0123abcd", "default-0123abcd"),
        ("default", "default-0123abcd"),
        ("0123", "default-0123abcd"),
        ("0123abcd", "default-0123abcd"),
        ("0199f", "attn-gqa-0199ffff"),
        ("7777", "attn-gqa-77771111"),
        ("attn-gqa-77771111.old-1", "attn-gqa-77771111.old-1"),
        ("mine", "mine-abcdef01"),
        ("abcd", "mine-abcdef01"),
    ],
)
def test_found_by_directory_name_slug_or_hash(root: Path, ref: str | None, name: str) -> None:
    assert find(ref, root).name == name


@pytest.mark.parametrize("inside", ["", "config.yaml", "checkpoints", "checkpoints/step-00000100/meta.json"])
def test_found_by_any_path_inside(root: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(root / "default-0123abcd" / inside, Path("elsewhere")).name == "default-0123abcd"
    monkeypatch.chdir(root.parent)
    assert find(f"runs/default-0123abcd/{inside}", Path("elsewhere")).name == "default-0123abcd"


def test_path_of_a_checkpoint_names_it(root: Path) -> None:
    found = resolve(root / "default-0123abcd/checkpoints/step-00000100", root)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 100
    assert resolve("default", root).checkpoint is None


def test_folder_with_one_run_is_that_run(tmp_path: Path) -> None:
    make(tmp_path / "other", "a-00000000")
    assert find(tmp_path / "other", tmp_path).name == "a-00000000"


def test_folder_of_that_name_elsewhere_does_not_hide_a_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "default").mkdir()
    (root.parent / "default" / "config.yaml").write_text("defaults: []")
    monkeypatch.chdir(root.parent)
    assert find("default", root).name == "default-0123abcd"


def test_moved_run_keeps_its_name(root: Path) -> None:
    RunDir.create(root / "moved", {"name": "original"})
    assert find("original", root).name == "moved"


@pytest.mark.parametrize(
    ("ref", "message", "hint"),
    [
        ("attn-gqa", "could be any of attn-gqa-0199ffff, attn-gqa-77771111", "whole name"),
        ("defualt", "no run defualt", "did you mean default-0123abcd?"),
        ("default-0123abce", "no run default-0123abce", "did you mean default-0123abcd?"),
        ("def", "no run def", "did you mean default-0123abcd?"),
        ("012", "no run 012", "at least 4 characters"),
        ("ffff", "no run ffff", "the runs there: attn-gqa-0199ffff"),
        ("", "no run ", "the runs there"),
    ],
)
def test_not_found_or_several_says_which(root: Path, ref: str, message: str, hint: str) -> None:
    with pytest.raises(RunError) as caught:
        find(ref, root)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_same_hash_start_lists_all(root: Path) -> None:
    make(root, "third-0123abff")
    with pytest.raises(RunError, match="default-0123abcd, third-0123abff"):
        find("0123ab", root)


def test_nothing_there_yet(tmp_path: Path) -> None:
    for ref in (None, "x"):
        with pytest.raises(RunError, match=r"there (is no finished or imported run|are no runs) in"):
            find(ref, tmp_path / "runs")


def test_newest_of_given_states_passes_over_unreadable_ones(root: Path) -> None:
    assert newest(root, ("interrupted", "stopped")).name == "attn-gqa-77771111"
    (root / "attn-gqa-77771111" / "manifest.json").write_text("{")
    assert newest(root, ("interrupted", "stopped")).name == "mine-abcdef01"
