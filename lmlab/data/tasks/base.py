"""What every synthetic task is: it draws examples of an exact length, knows their answers, and what guessing scores.

An example is a row of inputs and their targets; only the targets that are answers count, in the loss and in accuracy.
A task written in text is given the tokenizer that spells it; any other has ids of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Chance(NamedTuple):
    """What a model that gives every possible answer the same probability scores."""

    token: float  # share of single answer tokens that are right
    exact: float  # share of examples whose answers are all right


@dataclass(frozen=True)
class Examples:
    """B examples of T tokens each."""

    inputs_BT: np.ndarray  # int64 ids
    targets_BT: np.ndarray  # int64 ids: what follows each input, or is asked there
    answers_BT: np.ndarray  # bool: which targets are answers
    depth_B: np.ndarray  # float64, 0 … 1: where in the row what is asked stands; nan where the task has no depth


class Task(Protocol):
    """What `registry.make(spec, tokenizer)` gives for an option of `data` that is a task (tokenizer None: ids of its
    own). `lmlab/data/tasks/split.py` draws from it for training, val and test."""

    text: bool  # written in text by the tokenizer
    has_depth: bool
    vocab_size: int  # ids 0 … vocab_size−1 occur

    def least(self) -> int:
        """The shortest length that an example can have."""

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        """n examples of exactly `length` tokens; depth: where what is asked stands (None = anywhere, drawn).
        Raises ConfigError when `length` is below `least()`."""

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        """(B, T) predictions, worked out from the inputs alone: right at every answer."""

    def chance(self, length: int) -> Chance:
        """Of examples of this length."""
