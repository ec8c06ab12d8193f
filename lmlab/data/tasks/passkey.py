"""A number in filler text that is asked for at the end, written with the run's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lmlab.data.spec import Passkey as PasskeySpec
from lmlab.data.tasks.asked import check, fractions, places
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.rows import Text, at_the_end, examples, in_filler
from lmlab.data.tasks.spelled import FILLER, Pieces, guessing, spelling
from lmlab.data.tokenizer import Tokenizer

STATED, REMEMBER, ASKED = " The pass key is", ". Remember it.", " What is the pass key? The pass key is"
FOUND = re.compile(r"The pass key is (\d+)\. Remember it\.")


class Passkey:
    """… The grass is green. The pass key is 71429. Remember it. The sky … What is the pass key? The pass key is → 71429
    (Mohtashami & Jaggi 2023, arXiv 2305.16300; without the instruction before, which a short row has no room for).

    A row begins as a document does; all numbers of `digits` digits are equally likely. The depth is the share of the
    filler's tokens that stand before the needle: those end with a whole sentence, and the ones after it begin with one.
    """

    text, has_depth = True, True

    def __init__(self, spec: PasskeySpec, tokenizer: Tokenizer | None = None) -> None:
        self.spec, self.tokenizer = spec, spelling(tokenizer, spec.name)
        self.pieces, self.vocab_size = Pieces(self.tokenizer, spec.name), self.tokenizer.vocab_size
        digits, some = list("0123456789"), [digit * spec.digits for digit in "0123456789"]
        self.space = self.pieces.space("is", [*digits, *some])
        self.stated, self.asked = (self.pieces.of(text + self.space) for text in (STATED, ASKED))
        self.remember = self.pieces.of(REMEMBER, "0")
        for number, ids in zip(some, self._spelled(some), strict=True):
            needle, question = self._needle(ids), [*self.asked, *ids]
            whole = [*self.pieces.filler_ids, *needle, *self.pieces.filler_ids, *question]
            self.pieces.check(whole, f"{FILLER}{STATED} {number}{REMEMBER}{FILLER}{ASKED} {number}")
        first, later = self._spelled(digits), self.tokenizer.encode_batch(digits)
        self.most = max(map(len, first)) + (spec.digits - 1) * max(map(len, later))

    def _spelled(self, numbers: Sequence[str]) -> list[np.ndarray]:
        return self.pieces.answers(numbers, "is", self.space)

    def _needle(self, number: np.ndarray) -> np.ndarray:
        return np.concatenate([self.stated, number, self.remember])

    def _text(self, number: np.ndarray) -> Text:
        return Text([self._needle(number)], self.asked, number, np.ones(len(number), dtype=bool))

    def least(self) -> int:
        """With a number of which every digit is a token of its own."""
        return -self._text(np.zeros(self.most, dtype=np.int64)).room(0)

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        numbers = rng.integers(0, 10**self.spec.digits, n).tolist()
        texts = [self._text(ids) for ids in self._spelled([f"{i:0{self.spec.digits}d}" for i in numbers])]
        room = np.array([text.room(length) for text in texts])
        before = places(rng, room, depth)
        rows = [in_filler(self.pieces, t, [b], length) for t, b in zip(texts, before.tolist(), strict=True)]
        return examples(rows, fractions(before, room))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found = [FOUND.search(self.tokenizer.decode(row)) for row in inputs_BT.tolist()]
        return at_the_end(inputs_BT, self._spelled([match[1] if match else "0" for match in found]))

    def chance(self, length: int) -> Chance:
        return self._chance

    @cached_property
    def _chance(self) -> Chance:
        return guessing(self._spelled([f"{i:0{self.spec.digits}d}" for i in range(10**self.spec.digits)]))
