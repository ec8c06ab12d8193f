"""The state of each member of a sweep, read from its run's own directory.

planned      nothing was begun          stale     made by other code or other data: to be trained anew
running      a process holds its claim  finished · diverged · failed    ended
stopped · interrupted · created         begun, and goes on from its last checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.runs.rundir import RunDir

MADE = ("finished", "diverged")  # never trained again, unless by --force


@dataclass(frozen=True)
class Made:
    """What a run has to be made by in order not to be stale."""

    code_hash: str
    fingerprint: str


@dataclass(frozen=True)
class Rule:
    """Which ended runs this call opens again."""

    force_since: str | None = None  # --force: runs begun before this moment are trained anew
    retry_failed: bool = False
    reuse_stale: bool = False


def state_of(path: Path, made: Made | None = None, rule: Rule | None = None) -> tuple[str, dict[str, Any]]:
    """The state of the run at `path`, and its manifest. Without `made`, stale is not told."""
    run, rule = RunDir(path), rule or Rule()
    if not run.exists():
        return "planned", {}
    try:
        state, manifest = run.state(), run.manifest()
    except RunError as error:
        return "failed", {"error": error.message}
    if state != "running" and made is not None and not rule.reuse_stale and _is_stale(manifest, made):
        return "stale", manifest
    return state, manifest


def _is_stale(manifest: Mapping[str, Any], made: Made) -> bool:
    known = (manifest.get("code_hash"), manifest.get("fingerprint"))
    return known[0] is not None and known != (made.code_hash, made.fingerprint)


def is_forced(manifest: Mapping[str, Any], rule: Rule) -> bool:
    """Whether the run is to be trained anew: once a call, also when another process of it did so already."""
    return rule.force_since is not None and str(manifest.get("started") or "") < rule.force_since


def is_open(state: str, manifest: Mapping[str, Any], rule: Rule) -> bool:
    """Whether there is something to train."""
    forced = is_forced(manifest, rule)
    if state in MADE:
        return forced
    return forced or rule.retry_failed if state == "failed" else state != "running"
