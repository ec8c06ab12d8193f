"""metrics.jsonl, the truth about a run: one strict-JSON row per logged step, steps strictly increasing.

Rows are appended whole by one write; non-finite numbers are null. A kill can only tear the last line, which readers
pass over and the next append removes; any other damage is named.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlab.runs.files import FULL, atomic_write, disk, disk_error, to_json

Row = dict[str, Any]


@dataclass
class Scan:
    """What a file holds: its rows, the numbers (from 1) of lines that can't be read, whether the last one is torn."""

    rows: list[Row] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    torn: bool = False


def _parse(line: bytes) -> Row | None:
    """The row of one line, or None when it is not a JSON object with an integer step."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def scan(path: Path) -> Scan:
    """Everything in the file at `path`; an absent file holds nothing."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return Scan()
    return _scan(content)


def _scan(content: bytes) -> Scan:
    found = Scan()
    lines = content.split(b"\n")
    last = lines.pop()  # what stands after the last newline: nothing, unless a write was torn
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        found.rows.append(row) if row is not None else found.damaged.append(number)
    if last:
        row = _parse(last)
        found.torn = row is None
        found.rows += [row] if row is not None else []
    return found


def read(path: Path, note: Callable[[str], None] | None = None) -> list[Row]:
    """All rows. A torn last line is passed over; other damaged lines too, and `note` (stderr) hears which."""
    found = scan(path)
    if found.damaged:
        (note or _to_stderr)(f"{damage(path, found)}; passed over")
    return found.rows


def _to_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def damage(path: Path, found: Scan) -> str:
    """`path has 2 damaged lines: 3, 17`."""
    count, numbers = len(found.damaged), ", ".join(map(str, found.damaged[:8]))
    return f"{path} has {count} damaged line{'s' if count > 1 else ''}: {numbers}{', …' if count > 8 else ''}"


def tail(path: Path, *, max_bytes: int = 65536) -> list[Row]:
    """The rows that stand whole in the last `max_bytes` of the file (more, if none does), in order."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - max_bytes))
            content = f.read()
    except FileNotFoundError:
        return []
    if size > max_bytes:
        content = content[content.find(b"\n") + 1 :]
    rows = _scan(content).rows
    return rows if rows or size <= max_bytes else tail(path, max_bytes=16 * max_bytes)


class Metrics:
    """Appends to one metrics.jsonl. The directory must be claimed by this process."""

    def __init__(self, path: Path) -> None:
        """Opens or creates `path`, and removes a torn last line."""
        self.path = Path(path)
        self.last_step: int | None = None
        self._descriptor = -1
        self._open()

    def _open(self) -> None:
        with disk(self.path, "write"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._mend()
        rows = tail(self.path)
        self.last_step = rows[-1]["step"] if rows else None

    def _mend(self) -> None:
        """End the file with a newline: drop a torn last line, complete one that only lacks its newline."""
        content = self.path.read_bytes()
        last = content[content.rfind(b"\n") + 1 :]
        if last and _parse(last) is not None:
            os.write(self._descriptor, b"\n")
        elif last:
            os.ftruncate(self._descriptor, len(content) - len(last))

    def append(self, row: Row) -> None:
        """Add one row, whose `step` must be above the last one's. All or nothing, also when the disk is full."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"a row of metrics needs an integer step, not {step!r}")
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: one row a step (cut_back first when resuming)")
        line = (to_json(row) + "\n").encode("utf-8", "replace")
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise disk_error(error, self.path, "write") from error
        if written != len(line):
            os.ftruncate(self._descriptor, before)
            raise disk_error(OSError(FULL[0], os.strerror(FULL[0])), self.path, "write")
        self.last_step = step

    def cut_back(self, step: int) -> int:
        """Drop the rows after `step`, as if they had never been written (temp and rename). Returns how many."""
        content = self.path.read_bytes()
        lines = [line for line in content.split(b"\n") if line]
        rows = [_parse(line) for line in lines]
        kept = [line for line, row in zip(lines, rows, strict=True) if row is None or row["step"] <= step]
        if len(kept) < len(lines):
            self.close()
            atomic_write(self.path, b"".join(line + b"\n" for line in kept))
            self._open()  # the old descriptor points at the replaced file
        return len(lines) - len(kept)

    def sync(self) -> None:
        """Make every row durable; called before a checkpoint, so that none names rows that a crash lost."""
        with disk(self.path, "write"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
