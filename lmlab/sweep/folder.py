"""A sweep's directory, `runs/sweeps/<name or axes>-<hash8>/`: which runs it lists, and what happened when.

    sweep.json     the plan: arms and members; a later call with more seeds adds to it
    ledger.jsonl   one line per event: began, finished, failed, diverged, stopped, killed (the truth about a run is its
                   own directory)
    logs/          what a member's process wrote besides its run's log.txt

The hash is of the arms, without their seeds, so that more seeds extend the same sweep.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.runs.files import atomic_write, disk, to_json
from lmlab.runs.layout import SWEEP_LEDGER as LEDGER
from lmlab.runs.layout import SWEEP_PLAN as PLAN
from lmlab.runs.layout import SWEEPS, now
from lmlab.sweep.members import Member, arm_config
from lmlab.sweep.space import SWEEPER, Space, is_seed

VERSION = 1
LOGS, LOCK = "logs", ".lock"
RESTORE = "move it away; the same command then writes it anew, and the runs are kept"
SLUG_CHARS = 60


def sweep_name(space: Space, members: Sequence[Member], name: str | None) -> str:
    """`<name, else the axes>-<hash of the arms>`; of the drawn words when a sweeper chooses the members."""
    keys = [key for key in (*space.axes, *(word.partition("=")[0] for word in space.drawn)) if not is_seed(key)]
    slug = name or "-".join(key.rpartition(".")[2] for key in keys)[:SLUG_CHARS] or "seeds"
    told = sorted({m.arm for m in members})
    if space.chosen(SWEEPER):  # its members are not known yet: the words tell one sweep from another
        values = [f"{key}={o.value}" for key, overrides in space.axes.items() for o in overrides]
        told = sorted([*space.hydra, *space.drawn, *values, *map(str, space.fixed)])
    return f"{slug}-{hashlib.blake2b(json.dumps(told).encode(), digest_size=4).hexdigest()}"


class SweepFolder:
    """One sweep's directory, existing or about to be made."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def beside(cls, runs: str, name: str) -> SweepFolder:
        """That of a sweep whose runs lie in `runs` (paths.runs)."""
        return cls(Path(runs).expanduser() / SWEEPS / name)

    @property
    def name(self) -> str:
        return self.path.name

    def plan(self) -> dict[str, Any]:
        """What sweep.json holds; {} before the first write. Raises RunError when it is damaged."""
        try:
            found = json.loads((self.path / PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / PLAN} can't be read: {error}",
                RESTORE,
            ) from error
        if not isinstance(found, dict) or not isinstance(found.get("members"), list):
            raise RunError(
                f"{self.path / PLAN} is not a sweep's plan",
                RESTORE,
            )
        return found

    def add(
        self,
        members: Sequence[Member],
        *,
        command: Sequence[str] | None = None,
        words: Sequence[str] | None = None,
        baseline: str | None = None,
    ) -> None:
        """List these members, beside those that are listed already; what else is given replaces what was there."""
        with self._locked():
            plan = self.plan()
            arms, listed = plan.get("arms", {}), {m["hash"]: m for m in plan.get("members", [])}
            for one in members:
                arms.setdefault(one.arm, {"label": one.label, "config": arm_config(one.loaded.experiment)})
                listed[one.hash] = {
                    "run": one.path.name, "hash": one.hash, "arm": one.arm, "seed": one.seed, "overrides": one.words
                }  # fmt: skip
            whole = {
                "version": VERSION, "name": self.name, "created": plan.get("created", now()), "used": now(),
                "command": plan.get("command") if command is None else list(command),
                "overrides": plan.get("overrides") if words is None else list(words),
                "baseline": baseline or plan.get("baseline"),
                "arms": arms, "members": list(listed.values()),
            }  # fmt: skip
            atomic_write(self.path / PLAN, to_json(whole, indent=1) + "\n")

    def log(self, event: str, run: str, **facts: Any) -> None:
        """Add one line to the ledger, whole, whoever else writes to it."""
        line = {"time": now(), "event": event, "run": run, "pid": os.getpid(), "host": platform.node(), **facts}
        with disk(self.path, "write"):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                os.write(descriptor, (to_json(line) + "\n").encode("utf-8", "replace"))
            finally:
                os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        """The ledger's lines, in order; torn or damaged ones are passed over."""
        try:
            lines = (self.path / LEDGER).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            found += [event] if isinstance(event, dict) else []
        return found

    def log_path(self, run: str) -> Path:
        """Where the process of a member writes what is not its run's own log."""
        return self.path / LOGS / f"{run}.txt"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with disk(self.path, "write"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
