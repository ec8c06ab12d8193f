"""A number in filler text that is asked for at the end, written with the run's tokenizer."""

from __future__ import annotations

import re

import numpy as np

from lmlab.data.spec import Passkey as PasskeySpec
from lmlab.data.tasks.asked import check, fractions, places
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.rows import Text, at_the_end, examples, in_filler
from lmlab.data.tasks.spelled import FILLER, Numbers, Pieces, spelling
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
        self.numbers = Numbers(self.pieces, spec.digits)
        self.stated, self.asked = (self.pieces.of(text + self.numbers.space) for text in (STATED, ASKED))
        self.remember = self.pieces.of(REMEMBER, "0")
        for number in range(0, self.numbers.n, max(1, self.numbers.n // 10)):
            text, (ids,) = self.numbers.text(number), self.numbers.spelled([self.numbers.text(number)])
            needle, filler = self._text(ids).statements[0], self.pieces.filler_ids
            whole = f"{FILLER}{STATED} {text}{REMEMBER}{FILLER}{ASKED} {text}"
            self.pieces.check([*filler, *needle, *filler, *self.asked, *ids], whole)

    def _text(self, number: np.ndarray) -> Text:
        needle = np.concatenate([self.stated, number, self.remember])
        return Text([needle], self.asked, number, np.ones(len(number), dtype=bool))

    def least(self) -> int:
        """With a number of which every digit is a token of its own."""
        return -self._text(self.numbers.longest).room(0)

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        numbers = [self.numbers.text(i) for i in rng.integers(0, self.numbers.n, n).tolist()]
        texts = [self._text(ids) for ids in self.numbers.spelled(numbers)]
        room = np.array([text.room(length) for text in texts])
        before = places(rng, room, depth)
        rows = [in_filler(self.pieces, t, [b], length) for t, b in zip(texts, before.tolist(), strict=True)]
        return examples(rows, fractions(before, room))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found = [FOUND.search(self.tokenizer.decode(row)) for row in inputs_BT.tolist()]
        return at_the_end(inputs_BT, self.numbers.spelled([match[1] if match else "0" for match in found]))

    def chance(self, length: int) -> Chance:
        return self.numbers.chance
