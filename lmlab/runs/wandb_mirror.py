"""Weights & Biases as a mirror of metrics.jsonl: a thread of its own feeds it, so that training never waits.

A resumed run sends what was missed and nothing twice: what W&B has is read from its server, offline from its files.
Whatever goes wrong here is said once and ends the mirror, never the run.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmlab.runs import metrics, wandb_file
from lmlab.runs.files import plain
from lmlab.runs.layout import METRICS
from lmlab.runs.wandb_run import (
    FOLDER,
    Facts,
    Mark,
    file_of,
    first_line,
    has_key,
    keep_inside,
    open_run,
    own_service,
    server_step,
)

Note = Callable[[str], None]
FINISH_TIMEOUT_S = {"online": 60.0, "offline": 20.0}
ENV_MODES = {"dryrun": "offline", "run": "online", "shared": "online"}
_said: set[str] = set()


def start(
    spec: dict[str, Any],
    *,
    run_path: Path,
    run_id: str,
    name: str,
    config: dict[str, Any],
    group: str | None = None,
    tags: Sequence[str] = (),
    cache: Path | None = None,
    note: Note | None = None,
) -> Mirror:
    """Begin mirroring. `spec` is the `wandb` node of the configuration as a dict. Returns at once and never raises."""
    note = note or _to_stderr
    mirror = Mirror(note)
    try:
        mode = resolve_mode(str(spec.get("mode") or "auto"))
        if mode == "disabled":
            return mirror
        keep_inside(cache)
        own_service()
        mark = Mark.of(run_path, run_id)
        facts = Facts(
            mode, run_path, mark.id, name, plain(config), str(spec.get("project") or "lmlab"), spec.get("entity"),
            group or spec.get("group"), tuple(tags) or tuple(spec.get("tags") or ()), spec.get("notes"),
        )  # fmt: skip
        mirror.begin(facts, mark)
        for row in metrics.scan(run_path / METRICS).rows:
            mirror.log(row)
    except Exception as error:
        mirror.give_up(error)
    return mirror


def resolve_mode(mode: str) -> str:
    """online, offline, disabled, or auto. What the user wrote in the configuration counts before WANDB_MODE."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled"
    asked = os.environ.get("WANDB_MODE", "").lower()
    return ENV_MODES.get(asked, asked) or "auto"


class Mirror:
    """Rows go in by `log`, the end by `finish`; both return at once, save that `finish` waits for what is queued."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dead = False
        self._online = False
        self._mark: Mark
        self._facts: Facts

    def begin(self, facts: Facts, mark: Mark) -> None:
        self._facts, self._mark = facts, mark
        self._thread = threading.Thread(target=self._work, name="lmlab-wandb", daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        """Mirror one row of metrics, unless it or a later one was mirrored before."""
        if self._thread is not None and not self._dead:
            self._queue.put(("row", dict(row)))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Hand over the final numbers and how the run ended, and wait (not for long) until they are written."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(("finish", (plain(summary), exit_code)))
        thread.join(FINISH_TIMEOUT_S["online" if self._online else "offline"])
        if thread.is_alive() and not self._dead:
            self._dead = True
            self._say(f"W&B is slow and was left behind; later: {self._later()}")

    def give_up(self, error: BaseException) -> None:
        self._dead = True
        self._say(f"W&B mirrors nothing more: {first_line(error)} (the run goes on)")

    def _later(self) -> str:
        runs = self._facts.path.parent
        return "lmlab runs upload" + ("" if runs.absolute() == Path("runs").absolute() else f" paths.runs={runs}")

    def _say(self, text: str) -> None:
        with suppress(Exception):
            self._note(text)

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            run = self._init()
            while run is not None:
                kind, value = self._queue.get()
                if kind == "finish":
                    run.summary.update(value[0])
                    run.finish(exit_code=value[1])
                    if self._online:
                        wandb_file.mark_synced(self._facts.path / FOLDER, self._facts.id)
                    return
                self._send(run, value)
        except Exception as error:
            self.give_up(error)

    def _init(self) -> Any:
        """The W&B run, offline when there is no key or no network; None when W&B is not installed."""
        try:
            import wandb
        except Exception:
            self._dead = True
            _once(self._say, "W&B is not installed: nothing is mirrored (wandb.mode=disabled says so for good)")
            return None
        mode = self._facts.mode
        if mode in ("auto", "online") and not has_key(wandb):
            _once(self._say, f"W&B: no key, so offline; later: {self._later()}")
            mode = "offline"
        if mode != "offline":
            try:
                return self._open(wandb, "online")
            except Exception as error:
                self._say(f"W&B: {first_line(error)}; offline, later: {self._later()}")
                return self._open_offline(wandb)
        return self._open(wandb, "offline")

    def _open_offline(self, wandb: Any) -> Any:
        """After a failed attempt. When W&B still holds its id: a run of its own, with all rows from the start."""
        try:
            return self._open(wandb, "offline")
        except Exception:
            self._mark = Mark(Mark.fresh_id(self._mark.id.rsplit("-", 1)[0]))
            self._facts = replace(self._facts, id=self._mark.id)
            return self._open(wandb, "offline")

    def _open(self, wandb: Any, mode: str) -> Any:
        """Open the run, and learn which rows it has: from the server, or else from the files W&B wrote before."""
        path = self._facts.path
        on_disk = self._mark.last_step(path) if mode == "offline" else -1
        run = open_run(wandb, self._facts, mode)
        self._online = mode == "online"
        has = server_step(run) if self._online else on_disk
        self._mark = replace(self._mark, step=has, before=has, file=file_of(run, self._facts.id))
        self._mark.write(path)
        return run

    def _send(self, run: Any, row: dict[str, Any]) -> None:
        step = row["step"]
        if step > self._mark.step:
            self._mark = replace(self._mark, step=step)
            self._mark.write(self._facts.path)
            run.log(plain(row), step=step, commit=True)


def _once(say: Note, text: str) -> None:
    """Say it for the first run of this process only."""
    key = text.split(";")[0]
    if key not in _said:
        _said.add(key)
        say(text)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
