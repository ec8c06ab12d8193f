"""A needle in random ids: a marked key and its value, asked for at the end."""

from __future__ import annotations

import numpy as np

from lmlab.data.spec import Needle as NeedleSpec
from lmlab.data.tasks.asked import check, fractions, places
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.tokens import distinct, following
from lmlab.errors import ConfigError


class Needle:
    """… 0 key value … 1 key → value: the mark 0 stands before each pair, 1 asks at the end; the noise is of the same
    ids as keys and values, so that the marks alone tell. Keys differ. The depth is that of the pair asked for."""

    text, has_depth = False, True
    MARK, ASKS, FIRST = 0, 1, 2
    WIDE = 3  # mark, key, value

    def __init__(self, spec: NeedleSpec, tokenizer: object = None) -> None:
        self.spec, self.vocab_size, self.n_words = spec, spec.vocab_size, spec.vocab_size - self.FIRST
        if spec.n_needles > self.n_words:
            raise ConfigError(
                f"`data.n_needles` is {spec.n_needles}, and `data.vocab_size` {spec.vocab_size} has "
                f"{self.n_words} keys",
                f"set data.vocab_size to at least {spec.n_needles + self.FIRST}",
            )

    def least(self) -> int:
        """With room for the others wherever the one that is asked for stands."""
        others = self.spec.n_needles - 1
        return self.WIDE + 2 + (self.WIDE * others + 2 if others else 0)

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        rows, room = np.arange(n), np.full(n, length - 2 - self.WIDE)
        inputs = rng.integers(self.FIRST, self.vocab_size, (n, length))
        keys = self.FIRST + distinct(rng, n, self.n_words, self.spec.n_needles)
        before = places(rng, room, depth)
        starts = np.concatenate([before[:, None], self._others(rng, before, room)], axis=1)
        inputs[rows[:, None], starts], inputs[rows[:, None], starts + 1] = self.MARK, keys
        inputs[:, -2], inputs[:, -1] = self.ASKS, keys[:, 0]
        targets, answers = following(inputs), np.zeros(inputs.shape, dtype=bool)
        targets[:, -1], answers[:, -1] = inputs[rows, before + 2], True
        return Examples(inputs, targets, answers, fractions(before, room))

    def _others(self, rng: np.random.Generator, before: np.ndarray, room: np.ndarray) -> np.ndarray:
        """(B, n_needles − 1) where the others begin: any of the places of three tokens that the one leaves whole on
        either side, counted from it."""
        n_before, n_after = before // self.WIDE, (room - before) // self.WIDE
        n_slots = int((n_before + n_after).max(initial=0))
        slots = np.arange(n_slots)
        weights = np.where(slots < (n_before + n_after)[:, None], 0.0, -np.inf)
        slot = distinct(rng, len(before), n_slots, self.spec.n_needles - 1, weights)
        on = np.where(slot < n_before[:, None], slot - n_before[:, None], slot - n_before[:, None] + 1)
        return before[:, None] + self.WIDE * on

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found = following(inputs_BT)
        marked = (inputs_BT[:, :-2] == self.MARK) & (inputs_BT[:, 1:-1] == inputs_BT[:, -1:])
        found[:, -1] = inputs_BT[np.arange(len(inputs_BT)), marked.argmax(1) + 2]
        return found

    def chance(self, length: int) -> Chance:
        return Chance(1 / self.n_words, 1 / self.n_words)
