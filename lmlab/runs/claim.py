"""One process per run directory: an OS lock on `.claim`, held for the life of the process.

`flock` (not `lockf`, which a second open of the file in the same process would drop) is released by the kernel when its
holder dies, however it dies. The descriptor is closed on exec and in forked children, so that no child keeps the claim.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
import weakref
from contextlib import suppress
from pathlib import Path

from lmlab.errors import RunError
from lmlab.runs.files import disk, disk_error

NAME = ".claim"
PATIENCE_S = 0.3  # `runs ls` holds a shared lock for a moment when it looks; a new run must not fail on that

_held: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """The right to write one run directory. Raises RunError, naming the holder, when another process has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = _lock(folder)
        _held.add(self)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.time()}
        with disk(folder, "write"):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Give the claim back; doing so twice is harmless."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _drop_in_child() -> None:
    for claim in list(_held):  # close, not unlock: unlocking would take the lock from the parent as well
        with suppress(OSError):
            claim.release()


os.register_at_fork(after_in_child=_drop_in_child)


def _lock(folder: Path) -> int:
    """An open, exclusively locked descriptor of `folder/.claim` as it is now on disk."""
    path, deadline = folder / NAME, time.monotonic() + PATIENCE_S
    while True:
        with disk(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, path):
                return descriptor
            os.close(descriptor)  # the directory was set aside between open and lock: this is the old one
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise disk_error(error, path, "lock") from error
            if time.monotonic() > deadline:
                raise in_use(folder) from None
            time.sleep(0.02)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        here, there = os.fstat(descriptor), os.stat(path)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def holder(folder: Path) -> str:
    """`process 123 on host`, of the last process that claimed `folder`."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / NAME).read_text())
        return f"process {found['pid']} on {found['host']}"
    return "another process"


class InUse(RunError):
    """Another process holds the directory."""


def in_use(folder: Path) -> InUse:
    return InUse(
        f"{folder} is in use by {holder(folder)}",
        "wait for that run, or stop it; another seed= or any other change is a run of its own",
    )


def is_claimed(folder: Path) -> bool:
    """Whether a living process holds `folder`. Only looks: needs no right to write."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(descriptor)
