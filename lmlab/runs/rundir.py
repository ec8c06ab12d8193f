"""A run's directory, and how one is found.

What the manifest says is what was last written; whether a process still lives is known from the claim alone, so a run
that says "running" while nobody holds its claim is shown as "interrupted".
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from lmlab.errors import RunError
from lmlab.runs import yamlio
from lmlab.runs.claim import NAME as CLAIM
from lmlab.runs.claim import Claim, in_use, is_claimed
from lmlab.runs.files import atomic_write, disk, sync_dir, to_json
from lmlab.runs.layout import (
    CONFIG,
    LOG,
    MANIFEST,
    METRICS,
    PLUGINS,
    TOKENIZER,
    CheckpointRef,
    list_checkpoints,
    now,
    parse_name,
    rename_to_free,
)

ENDED = ("finished", "imported", "diverged", "stopped", "failed")
_RESTORE = "restore it from a copy, or train again with --force"


class Saves(Protocol):
    """Whatever can write itself into a folder (a tokenizer)."""

    def save(self, folder: Path, /) -> Any: ...


class RunDir:
    """One run directory, existing or about to be made."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._claim: Claim | None = None

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(cls, path: Path | str, config: dict[str, Any]) -> RunDir:
        """Make the directory with its config.yaml and an empty manifest. Where others may want it too, `claim()` first,
        then `write_config`."""
        run = cls(path)
        run.write_config(config)
        run.update_manifest()
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """An existing run. Raises RunError when there is none at `path`."""
        run = cls(path)
        if not run.exists():
            raise RunError(
                f"{path} is not a run directory: it has no {CONFIG} and {MANIFEST}", "`lmlab runs ls` lists the runs"
            )
        return run

    # ------------------------------------------------------------ names

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def hash(self) -> str:
        """The 8 hex characters of the configuration's hash; "" when the directory was renamed."""
        return parse_name(self.name).hash

    @property
    def slug(self) -> str:
        """The directory's name without hash and `.old-<n>`."""
        return parse_name(self.name).slug

    @property
    def is_set_aside(self) -> bool:
        return parse_name(self.name).old is not None

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    def exists(self) -> bool:
        """Whether a run was begun here. A config.yaml alone does not make one: other programs write such files."""
        return (self.path / CONFIG).is_file() and any((self.path / name).is_file() for name in (MANIFEST, CLAIM))

    # ------------------------------------------------------------ content

    def config(self) -> dict[str, Any]:
        return yamlio.read(self.path / CONFIG)

    def write_config(self, config: dict[str, Any]) -> None:
        self._make()
        yamlio.write(self.path / CONFIG, config)

    def manifest(self) -> dict[str, Any]:
        """What was written so far; {} before the first write. Raises RunError when the file is damaged."""
        path = self.path / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"{path} can't be read: {error}", _RESTORE) from error
        if not isinstance(found, dict):
            raise RunError(f"{path} holds no JSON object", _RESTORE)
        return found

    def update_manifest(self, **fields: Any) -> dict[str, Any]:
        """Set these fields, leave the others, atomically. A state that ends the run also sets `ended`; one that goes on
        clears `ended` and `error`. `started` stays the first one, a later one becomes `resumed`."""
        if fields.get("state") in ENDED:
            fields = {"ended": now(), **fields}
        known = self.manifest()
        if fields.get("state") == "running":
            known = {key: value for key, value in known.items() if key not in ("ended", "error")}
        if "started" in known and "started" in fields:
            fields["resumed"] = fields.pop("started")
        merged = {**known, **fields}
        self._make()
        atomic_write(self.path / MANIFEST, to_json(merged, indent=1) + "\n")
        return merged

    def state(self) -> str:
        """running, finished, diverged, stopped, failed; interrupted: says running, but no process holds the claim."""
        if self.is_claimed():
            return "running"
        written = str(self.manifest().get("state") or "created")
        return "interrupted" if written == "running" else written

    def append_log(self, text: str) -> None:
        """Add lines to log.txt; a full disk loses the lines, not the run."""
        with (
            suppress(OSError),
            open(self.path / LOG, "a", encoding="utf-8", errors="backslashreplace") as f,
        ):
            f.write(text if text.endswith("\n") else text + "\n")

    def save_tokenizer(self, tokenizer: Saves) -> Path:
        """Store the tokenizer in the run, once, so that the run can be loaded without the cache."""
        with disk(self.tokenizer_path, "write"):
            if not self.tokenizer_path.is_dir():
                temporary = self.path / f".{TOKENIZER}.tmp"
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                tokenizer.save(temporary)
                os.rename(temporary, self.tokenizer_path)
                sync_dir(self.path)
        return self.tokenizer_path

    def save_plugins(self, sources: dict[str, str]) -> None:
        """Copy the source of every plug-in, {file name: text}, into plugins/."""
        for file, text in sources.items():
            with disk(self.path / PLUGINS, "write"):
                (self.path / PLUGINS).mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / PLUGINS / Path(file).name, text)

    def plugins(self) -> list[Path]:
        return sorted((self.path / PLUGINS).glob("*.py"))

    def checkpoints(self) -> list[CheckpointRef]:
        """By step, unread and unverified."""
        return list_checkpoints(self.path)

    def _make(self) -> None:
        with disk(self.path, "write"):
            self.path.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------ claim

    def is_claimed(self) -> bool:
        """Whether a living process, this one included, holds the directory."""
        return self._claim is not None or is_claimed(self.path)

    @contextmanager
    def claim(self) -> Iterator[RunDir]:
        """Hold the directory, made if it is not there, for the block. Raises RunError naming who has it."""
        if self._claim is not None:
            raise in_use(self.path)
        self._claim = Claim(self.path)
        try:
            yield self
        finally:
            claim, self._claim = self._claim, None
            if claim is not None:
                claim.release()

    def set_aside(self) -> RunDir:
        """Rename the directory to `<dir>.old-<n>` and return it under that name; nothing is deleted.

        Inside `claim()` a fresh, empty directory is made and claimed at once; outside, the run must not be in use.
        """
        held, self._claim = self._claim, None
        guard = held or Claim(self.path)
        try:
            old = RunDir(rename_to_free(self.path))
            if held is not None:
                self._claim = Claim(self.path)
            return old
        finally:
            guard.release()
