"""Tasks with ids of their own that are asked for by a token seen before: MQAR and induction.

Whole batches are drawn at once. The target of a token that asks for nothing is the token after it (0 at the end).
"""

from __future__ import annotations

import numpy as np

from lmlab.data.spec import Induction as InductionSpec
from lmlab.data.spec import Mqar as MqarSpec
from lmlab.data.tasks.asked import blank, check, fractions, places
from lmlab.data.tasks.base import Chance, Examples
from lmlab.errors import ConfigError


class Mqar:
    """k₁ v₁ k₂ v₂ … then each key once more, where its value is the target (Arora et al. 2023, arXiv 2312.04927).

        inputs   7 140 3 201 · · 3  · 7  · · ·        keys 1 … V/2−1, values V/2 … V−1, filler 0
        answers                  201  140

    The slots after the pairs are two tokens wide, as in Zoology's code; slot g is asked in with probability
    ∝ g^(power−1), at most once. Zoology's figure has 8,192 ids; here there are fewer, which is learned sooner.
    """

    text, has_depth = False, False

    def __init__(self, spec: MqarSpec, tokenizer: object = None) -> None:
        self.spec, self.vocab_size, self.first_value = spec, spec.vocab_size, spec.vocab_size // 2
        if spec.n_pairs > self.first_value - 1:
            raise ConfigError(
                f"`data.n_pairs` is {spec.n_pairs}, and `data.vocab_size` {spec.vocab_size} has "
                f"{self.first_value - 1} keys",
                f"set data.vocab_size to at least {2 * spec.n_pairs + 2}",
            )

    def least(self) -> int:
        return 4 * self.spec.n_pairs

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        n_pairs, rows = self.spec.n_pairs, np.arange(n)[:, None]
        inputs = np.zeros((n, length), dtype=np.int64)
        if self.spec.filler == "random":
            inputs[:] = rng.integers(1, self.vocab_size, inputs.shape)
        keys = 1 + distinct(rng, n, self.first_value - 1, n_pairs)
        values = rng.integers(self.first_value, self.vocab_size, (n, n_pairs))
        inputs[:, 0 : 2 * n_pairs : 2], inputs[:, 1 : 2 * n_pairs : 2] = keys, values
        n_slots = (length - 2 * n_pairs) // 2
        powers = (self.spec.gap_power - 1) * np.log(np.arange(1, n_slots + 1))
        asked = 2 * n_pairs + 2 * distinct(rng, n, n_slots, n_pairs, powers)
        inputs[rows, asked] = keys
        targets, answers = following(inputs), np.zeros(inputs.shape, dtype=bool)
        targets[rows, asked], answers[rows, asked] = values, True
        return Examples(inputs, targets, answers, blank(n))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found = np.zeros_like(inputs_BT)
        for i in range(self.spec.n_pairs):
            key, value = inputs_BT[:, 2 * i, None], inputs_BT[:, 2 * i + 1, None]
            found = np.where(inputs_BT == key, value, found)
        return found

    def chance(self, length: int) -> Chance:
        token = 1 / (self.vocab_size - self.first_value)
        return Chance(token, token**self.spec.n_pairs)


class Induction:
    """… 0 x … 0 → x: the special token 0 stands once in random others, and at the end again (the task of Gu & Dao
    2023, arXiv 2312.00752, for the heads of Olsson et al. 2022, arXiv 2209.11895)."""

    text, has_depth = False, True

    def __init__(self, spec: InductionSpec, tokenizer: object = None) -> None:
        self.spec, self.vocab_size = spec, spec.vocab_size

    def least(self) -> int:
        return 3

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        rows, room = np.arange(n), np.full(n, length - 3)
        inputs = rng.integers(1, self.vocab_size, (n, length))
        place = places(rng, room, depth)
        inputs[rows, place] = inputs[:, -1] = 0
        targets, answers = following(inputs), np.zeros(inputs.shape, dtype=bool)
        targets[:, -1], answers[:, -1] = inputs[rows, place + 1], True
        return Examples(inputs, targets, answers, fractions(place, room))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found, first = following(inputs_BT), (inputs_BT == 0).argmax(1)
        found[:, -1] = inputs_BT[np.arange(len(inputs_BT)), first + 1]
        return found

    def chance(self, length: int) -> Chance:
        return Chance(1 / (self.vocab_size - 1), 1 / (self.vocab_size - 1))


def following(inputs_BT: np.ndarray) -> np.ndarray:
    """Each token's next, 0 after the last."""
    return np.pad(inputs_BT[:, 1:], ((0, 0), (0, 1)))


def distinct(rng: np.random.Generator, n: int, of: int, k: int, log_weights: np.ndarray | float = 0.0) -> np.ndarray:
    """(n, k) rows of k different numbers below `of`, drawn one after the other by weight: the k largest of log weight
    plus Gumbel noise (Efraimidis & Spirakis 2006)."""
    if k == 0:
        return np.zeros((n, 0), dtype=np.int64)
    scores = log_weights + rng.gumbel(size=(n, of))
    best = np.argpartition(scores, of - k, axis=1)[:, of - k :]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)  # as they were drawn
    return np.take_along_axis(best, order, 1)
