"""The state of a member, from its run's own directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmlab.runs.rundir import RunDir
from lmlab.sweep.ledger import Made, Rule, is_open, state_of

MADE = Made("code", "data")
THEN, NOW = "2026-01-01T00:00:00", "2026-01-02T00:00:00"


def run_with(path: Path, **manifest: Any) -> Path:
    run = RunDir.create(path, {"version": 1})
    run.update_manifest(**{"code_hash": "code", "fingerprint": "data", "started": THEN, **manifest})
    return path


@pytest.mark.parametrize(
    ("manifest", "state", "is_open_then"),
    [
        ({}, "created", True),
        ({"state": "running"}, "interrupted", True),
        ({"state": "stopped"}, "stopped", True),
        ({"state": "finished"}, "finished", False),
        ({"state": "diverged"}, "diverged", False),
        ({"state": "failed"}, "failed", False),
        ({"state": "finished", "code_hash": "other"}, "stale", True),
        ({"state": "failed", "fingerprint": "other"}, "stale", True),
        ({"state": "stopped", "code_hash": "other"}, "stale", True),
    ],
)
def test_states_and_what_is_open(tmp_path: Path, manifest: dict[str, Any], state: str, is_open_then: bool) -> None:
    found, content = state_of(run_with(tmp_path / "run", **manifest), MADE)
    assert found == state
    assert is_open(found, content, Rule()) == is_open_then


def test_nothing_there_is_planned(tmp_path: Path) -> None:
    assert state_of(tmp_path / "none", MADE) == ("planned", {})
    assert is_open("planned", {}, Rule())


def test_a_held_run_is_running_and_left_alone(tmp_path: Path) -> None:
    run = RunDir(run_with(tmp_path / "run", state="finished"))
    with run.claim():
        state, manifest = state_of(run.path, MADE)
    assert state == "running"
    assert not is_open(state, manifest, Rule())


def test_rules_open_what_they_say(tmp_path: Path) -> None:
    failed = state_of(run_with(tmp_path / "a", state="failed"), MADE)
    finished = state_of(run_with(tmp_path / "b", state="finished"), MADE)
    assert is_open(*failed, Rule(retry_failed=True))
    assert not is_open(*finished, Rule(retry_failed=True))
    assert is_open(*finished, Rule(force_since=NOW))
    assert not is_open(*finished, Rule(force_since=THEN))  # begun since the call: forced once already
    stale = run_with(tmp_path / "c", state="finished", code_hash="other")
    assert state_of(stale, MADE, Rule(reuse_stale=True))[0] == "finished"


def test_an_unreadable_manifest_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    path = run_with(tmp_path / "run", state="finished")
    (path / "manifest.json").write_text("{")
    state, manifest = state_of(path, MADE)
    assert state == "failed"
    assert "can't be read" in manifest["error"]
