"""A sweep as its two files tell it: `sweep.json`, what it is to train, and `ledger.jsonl`, which runs it began.

A sweep only lists runs: they are looked up in the runs folder by name, else by hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmlab.errors import RunError, listed
from lmlab.runs import find
from lmlab.runs.layout import SWEEP_LEDGER as LEDGER
from lmlab.runs.layout import SWEEP_PLAN as PLAN
from lmlab.runs.layout import SWEEPS, parse_name

_HEX = re.compile(r"^[0-9a-f]{4,8}$")


@dataclass
class Member:
    """A run that a sweep lists; `path` is its directory, None when there is none. `began`: the ledger knows it."""

    run: str
    hash: str
    arm: str
    seed: int | None
    overrides: list[str]
    path: Path | None = None
    began: bool = False


@dataclass
class Sweep:
    """A sweep's plan as its sweep.json tells it. arms: {id: {"config": {…}, "label": …}} in the sweep's order."""

    path: Path
    name: str
    used: str  # when it was last started
    baseline: str | None
    arms: dict[str, dict[str, Any]]
    members: list[Member] = field(default_factory=list)


def sweep_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in Path(root).glob(f"{SWEEPS}/*/{PLAN}"))


def sweep_at(path: Path) -> Path | None:
    """The sweep's directory when `path` is that, or its plan."""
    folder = path.parent if path.name == PLAN else path
    try:
        return folder if (folder / PLAN).is_file() else None
    except OSError:  # a folder of somebody else
        return None


def sweep_named(word: str, root: Path) -> Path | None:
    """By its directory's name, its slug, or 4 and more characters of its hash. Raises RunError for several."""
    folders = sweep_folders(root)
    for fits in (
        [f for f in folders if f.name == word],
        [f for f in folders if parse_name(f.name).slug == word],
        [f for f in folders if _HEX.match(word) and parse_name(f.name).hash.startswith(word)],
    ):
        if fits:
            runs = [run for run in find.list_runs(root, set_aside=False) if word in (run.name, run.slug)]
            names = [f"sweep {f.name}" for f in fits] + [f"run {run.name}" for run in runs]
            if len(names) > 1:
                raise RunError(f"{word} could be any of {listed(names)}", "give the whole name, or its path")
            return fits[0]
    return None


def read_sweep(folder: Path) -> Sweep:
    """The plan in `folder`, its members looked up in the runs folder beside. Raises RunError for a damaged plan."""
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        arms = {
            str(name): {"config": dict(arm["config"]), "label": str(arm.get("label") or "")}
            for name, arm in plan["arms"].items()
        }
        members = [_member(entry) for entry in plan["members"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        hint = "move it away; the same `lmlab sweep` command then writes it anew, and the runs are kept"
        raise RunError(f"{path} can't be read: {reason}", hint) from error
    _look_up(members, folder.absolute().parents[1])
    begun = set(_begun(folder / LEDGER))
    for member in members:
        member.began = member.run in begun
    used = str(plan.get("used") or plan.get("created") or "")
    return Sweep(folder, folder.absolute().name, used, plan.get("baseline"), arms, members)


def _member(entry: dict[str, Any]) -> Member:
    seed = entry["seed"] if type(entry.get("seed")) is int else None
    words = [str(word) for word in entry.get("overrides") or []]
    return Member(str(entry["run"]), str(entry.get("hash") or ""), str(entry["arm"]), seed, words)


def _look_up(members: Sequence[Member], root: Path) -> None:
    """Where each member lies: by its directory's name, else by its hash. Runs set aside are nobody's members."""
    there = find.list_runs(root, set_aside=False)
    by_name = {run.name: run.path for run in there}
    by_hash = {run.hash: run.path for run in there if run.hash}
    for member in members:
        member.path = by_name.get(member.run) or by_hash.get(member.hash)


def _begun(ledger: Path) -> Iterator[str]:
    """Names of the runs that any event is about. Lines that can't be read say nothing."""
    try:
        lines = ledger.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("run"), str):
            yield event["run"]


def moment(folder: Path, used: str = "") -> float:
    """When a sweep was last started: by its plan, else by the file."""
    try:
        made = datetime.fromisoformat(used)
        return (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        return (folder / PLAN).stat().st_mtime
