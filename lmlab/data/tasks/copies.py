"""Tasks with ids of their own that say tokens again: copy and selective copy."""

from __future__ import annotations

import numpy as np

from lmlab.data.spec import Copy as CopySpec
from lmlab.data.spec import SelectiveCopy as SelectiveCopySpec
from lmlab.data.tasks.asked import blank, check
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.tokens import distinct, following


class Copy:
    """x₁ … xₙ 0 x₁ … xₙ: the row and its last target; after the separator 0 every target is an answer. An odd row
    begins with one more token, 1."""

    text, has_depth = False, False
    SEPARATOR, PADDING, FIRST = 0, 1, 2

    def __init__(self, spec: CopySpec, tokenizer: object = None) -> None:
        self.spec, self.vocab_size = spec, spec.vocab_size

    def least(self) -> int:
        return 2

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        half, odd = divmod(length, 2)
        tokens = rng.integers(self.FIRST, self.vocab_size, (n, half))
        padding, separator = np.full((n, odd), self.PADDING), np.full((n, 1), self.SEPARATOR)
        ids = np.concatenate([padding, tokens, separator, tokens], axis=1)
        answers = np.zeros((n, length), dtype=bool)
        answers[:, length - half :] = True
        return Examples(ids[:, :-1], ids[:, 1:], answers, blank(n))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found, separators = np.zeros_like(inputs_BT), (inputs_BT == self.SEPARATOR).argmax(1)
        for row, inputs, at in zip(found, inputs_BT, separators, strict=True):
            row[at:] = inputs[at - (len(row) - at) : at]
        return found

    def chance(self, length: int) -> Chance:
        token = 1 / (self.vocab_size - self.FIRST)
        return Chance(token, token ** (length // 2))


class SelectiveCopy:
    """· · x₁ · x₂ · · · x₃ ? ? ? → x₁ x₂ x₃: tokens at random places among noise 0, then as many 1, at each of which
    the next of them is the answer (Gu & Dao 2023, arXiv 2312.00752, whose rows of 4,096 hold 16)."""

    text, has_depth = False, False
    NOISE, ASKS, FIRST = 0, 1, 2

    def __init__(self, spec: SelectiveCopySpec, tokenizer: object = None) -> None:
        self.spec, self.vocab_size = spec, spec.vocab_size

    def least(self) -> int:
        return 2 * self.spec.n_tokens

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        k = self.spec.n_tokens
        tokens = rng.integers(self.FIRST, self.vocab_size, (n, k))
        inputs = np.full((n, length), self.NOISE, dtype=np.int64)
        at = np.sort(distinct(rng, n, length - k, k), axis=1)
        np.put_along_axis(inputs, at, tokens, axis=1)
        inputs[:, -k:] = self.ASKS
        targets, answers = following(inputs), np.zeros(inputs.shape, dtype=bool)
        targets[:, -k:], answers[:, -k:] = tokens, True
        return Examples(inputs, targets, answers, blank(n))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        kept = [row[row >= self.FIRST] for row in inputs_BT]
        found = np.zeros_like(inputs_BT)
        found[inputs_BT == self.ASKS] = np.concatenate(kept)
        return found

    def chance(self, length: int) -> Chance:
        token = 1 / (self.vocab_size - self.FIRST)
        return Chance(token, token**self.spec.n_tokens)
