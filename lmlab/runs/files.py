"""Writing files so that a reader, a crash or a full disk never meets half of one."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmlab.errors import LmlabError, RunError, TrainingFailed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def disk_error(error: OSError, path: Path, doing: str) -> LmlabError:
    """The user's error for an OSError met while `doing` something to `path`."""
    if error.errno in FULL:
        return TrainingFailed(
            f"the disk is full: could not {doing} {path}", "free some space, then run the same command to go on"
        )
    if error.errno in CLOSED:
        return RunError(f"may not {doing} {path}: {error.strerror}", "choose another folder with paths.runs=FOLDER")
    return RunError(
        f"could not {doing} {path}: {error.strerror or error}", "see that the folder exists and is a folder"
    )


@contextmanager
def disk(path: Path, doing: str) -> Iterator[None]:
    """Turns an OSError of the block into a user's error that names `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, doing) from error


def sync_dir(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write beside, fsync, rename: `path` holds the old content or the new one, never a part.

    Raises TrainingFailed (disk full) or RunError (not writable); the old content stays.
    """
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk(path, "write"):
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
            sync_dir(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """`value` as strict JSON takes it: non-finite → None, paths and arrays' scalars → plain, tuples → lists."""
    if isinstance(value, float):  # numpy's float64 is one
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (str, bool, int, type(None))):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays
        return plain(value.tolist())
    return str(value)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON of `value`: `NaN` and `Infinity` never appear."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)
