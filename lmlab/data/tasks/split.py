"""Examples of a task for train, val and test: a pure function of what is asked for.

The content of an example decides its split, so that none is in two of them, whatever the seed.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lmlab.data.tasks.base import Examples, Task
from lmlab.errors import ConfigError, DataError

SPLITS = ("train", "val", "test")
PARTS = {0: "val", 1: "test"}  # of 8; the others train
MOST_IN_VAIN = 4096  # draws without one for the split: it may well have none


def split_of(examples: Examples) -> np.ndarray:
    """(B,) train, val or test, by a hash of each row's inputs and targets."""
    content = np.concatenate([examples.inputs_BT.astype("<i4"), examples.targets_BT.astype("<i4")], axis=1)
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in content)
    return np.array([PARTS.get(int.from_bytes(h, "little") % 8, "train") for h in hashes])


def draw(task: Task, split: str, seed: int, k: int, rows: int, length: int, depth: float | None = None) -> Examples:
    """Batch k of a split: `rows` examples of exactly `length` tokens, the same on every machine for the same arguments.

    Raises ConfigError as `task.draw` does, DataError where the task has so few examples that the split has none.
    """
    if split not in SPLITS:
        raise ConfigError(f"a task has no split `{split}`", f"use one of {', '.join(SPLITS)}")
    key = hashlib.blake2b(f"lmlab task {split} {seed} {k} {length} {depth}".encode(), digest_size=32).digest()
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(key, "little"))))
    share = sum(part != split for part in (*PARTS.values(), *["train"] * 6))
    kept: list[Examples] = []
    missing, in_vain = rows, 0
    while missing > 0:
        n = missing * 8 // (8 - share) + 8
        drawn = task.draw(rng, n, length, depth)
        here = np.flatnonzero(split_of(drawn) == split)[:missing]
        in_vain = 0 if len(here) else in_vain + n
        if in_vain >= MOST_IN_VAIN:
            raise DataError(
                f"the task has so few examples of {length} tokens that none is in the split `{split}`",
                "ask for longer ones (model.seq_len), or for more ids",
            )
        kept.append(taken(drawn, here))
        missing -= len(here)
    return joined(kept)


def taken(examples: Examples, rows: np.ndarray) -> Examples:
    return Examples(*(part[rows] for part in _parts(examples)))


def distinct(examples: Examples) -> Examples:
    """Without the copies of an example that a small space has."""
    rows = np.concatenate([examples.inputs_BT, examples.targets_BT], axis=1)
    return taken(examples, np.sort(np.unique(rows, axis=0, return_index=True)[1]))


def joined(examples: list[Examples]) -> Examples:
    return Examples(*(np.concatenate(parts) for parts in zip(*map(_parts, examples), strict=True)))


def _parts(e: Examples) -> tuple[np.ndarray, ...]:
    return e.inputs_BT, e.targets_BT, e.answers_BT, e.depth_B
