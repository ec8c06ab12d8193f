"""What every task refuses, and how depth is measured."""

from __future__ import annotations

import math

import numpy as np

from lmlab.data.tasks.base import Task
from lmlab.errors import ConfigError


def check(task: Task, name: str, length: int, depth: float | None) -> None:
    """Raises ConfigError for a length below the task's least, and for a depth that the task has not."""
    if length < task.least():
        raise ConfigError(
            f"`data={name}` with these settings needs {task.least()} tokens, rows have {length}",
            f"set model.seq_len to at least {task.least()}, or make the task smaller",
        )
    if depth is not None and not task.has_depth:
        raise ConfigError(f"`data={name}` has no depth: what is asked stands all over the row", "leave the depth out")
    if depth is not None and not 0 <= depth <= 1:
        raise ConfigError(f"a depth is {depth:g}, which is not between 0 and 1", "0 is the row's start, 1 its end")


def places(rng: np.random.Generator, room_B: np.ndarray, depth: float | None) -> np.ndarray:
    """(B,) how many of the `room` tokens that may stand on either side stand before: round(depth · room), or drawn,
    each number equally often."""
    if depth is None:
        return rng.integers(0, room_B + 1)
    return np.floor(depth * room_B + 0.5).astype(np.int64)


def fractions(before_B: np.ndarray, room_B: np.ndarray) -> np.ndarray:
    """(B,) the depth that `before` of `room` tokens are; 0 where there is no choice."""
    return before_B / np.maximum(room_B, 1)


def blank(n: int) -> np.ndarray:
    """The depths of a task that has none."""
    return np.full(n, math.nan)
