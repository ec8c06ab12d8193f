"""Rows of text: statements hidden in filler, and at the end what asks for them and the answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmlab.data.tasks.base import Examples
from lmlab.data.tasks.spelled import Pieces


class Text(NamedTuple):
    """What of a row is no filler, in ids."""

    statements: Sequence[np.ndarray]
    question: np.ndarray
    answer: np.ndarray
    asked: np.ndarray  # bool, which of the answer's tokens count

    def room(self, length: int) -> int:
        """Tokens of filler: a row and its last target, without the token that a document begins with."""
        return length - sum(map(len, self.statements)) - len(self.question) - len(self.answer)


def in_filler(pieces: Pieces, text: Text, before: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """((T+1,) ids, (T+1,) bool: which are answers). before: for each statement the tokens of filler before it.

    The first filler ends with a whole sentence; every other begins with one.
    """
    gaps = [end - start for start, end in itertools.pairwise((0, *before, text.room(length)))]
    parts = [np.array([pieces.tokenizer.start]), pieces.filler(gaps[0], whole_at_end=True)]
    for statement, gap in zip(text.statements, gaps[1:], strict=True):
        parts += [statement, pieces.filler(gap, whole_at_end=False)]
    ids = np.concatenate([*parts, text.question, text.answer])
    answers = np.zeros(length + 1, dtype=bool)
    answers[len(ids) - len(text.answer) :] = text.asked
    return ids, answers


def examples(rows: Sequence[tuple[np.ndarray, np.ndarray]], depth_B: np.ndarray) -> Examples:
    """Rows of T+1 ids as inputs and the tokens that follow them."""
    ids, answers = (np.stack(part) for part in zip(*rows, strict=True))
    return Examples(ids[:, :-1], ids[:, 1:], answers[:, 1:], depth_B)


def at_the_end(inputs_BT: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
    """Predictions of an oracle that knows each row's answer, which its targets end with; 0 elsewhere."""
    found = np.zeros_like(inputs_BT)
    for row, answer in zip(found, answers, strict=True):
        row[len(row) - len(answer) :] = answer
    return found
