"""Small token files, and a child process that may be killed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lmlab.data.tokens import TokenFile


def write(path: Path, docs: Iterable[np.ndarray], *, vocab_size: int = 300, start: int = 0) -> TokenFile:
    pairs = [(d, len(d)) for d in docs]
    return TokenFile.write(path, pairs, vocab_size=vocab_size, start=start, tokenizer_hash="test")


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Runs `work` in a forked process: (its exit status, minus the signal that ended it, and what it returned)."""
    read, wrote = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            os.write(wrote, str(work()).encode())
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            status = 1
        os._exit(status)
    os.close(wrote)
    with os.fdopen(read, "rb") as f:
        said = f.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
