"""Numbers of named things in filler text, one of which is asked for at the end, written with the run's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lmlab.data.spec import NeedleText as NeedleTextSpec
from lmlab.data.tasks.asked import check, fractions, places
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.rows import Text, at_the_end, examples, in_filler
from lmlab.data.tasks.spelled import Numbers, Pieces, spelling
from lmlab.data.tasks.tokens import distinct
from lmlab.data.tokenizer import Tokenizer

NAMES = (
    *("apple", "bread", "chair", "drum", "eagle", "flute", "grape", "horse", "island", "juice", "knife", "lemon"),
    *("metal", "north", "onion", "piano", "queen", "river", "sugar", "tiger", "uncle", "violin", "wheel", "zebra"),
)
STATED, ASKED = " The number of", " What is the number of"
STATEMENT = re.compile(r"The number of (\w+) is (\d+)\.")
QUESTION = re.compile(r"What is the number of (\w+)\?")


class NeedleText:
    """… The number of tiger is 42. … What is the number of tiger? The number of tiger is → 42 (after the needle of
    RULER, Hsieh et al. 2024, arXiv 2404.06654, in fewer words and with shorter numbers, for short rows).

    The names in a row differ. The depth is the share of the filler's tokens before the one that is asked for.
    """

    text, has_depth = True, True

    def __init__(self, spec: NeedleTextSpec, tokenizer: Tokenizer | None = None) -> None:
        self.spec, self.tokenizer = spec, spelling(tokenizer, spec.name)
        self.pieces, self.vocab_size = Pieces(self.tokenizer, spec.name), self.tokenizer.vocab_size
        self.numbers = Numbers(self.pieces, spec.digits)
        self.stated, self.asked = self.pieces.of(STATED), self.pieces.of(ASKED)
        self.names = self.pieces.many([f" {name}" for name in NAMES], "of")
        after = NAMES[0]
        self.is_, self.stop = self.pieces.of(" is" + self.numbers.space, after), self.pieces.of(".", "0")
        self.mark = self.pieces.of("?", after)
        for i, name in enumerate(NAMES):
            number = self.numbers.text(i * 1234567 % self.numbers.n)
            text = self._text([i], self.numbers.spelled([number]))
            whole = f"{STATED} {name} is {number}.{ASKED} {name}?{STATED} {name} is {number}"
            self.pieces.check([*text.statements[0], *text.question, *text.answer], whole)

    def _text(self, names: Sequence[int], numbers: Sequence[np.ndarray]) -> Text:
        """The first of them is asked for."""
        stated = [np.concatenate([self.stated, self.names[name], self.is_]) for name in names]
        needles = [np.concatenate([s, number, self.stop]) for s, number in zip(stated, numbers, strict=True)]
        question = np.concatenate([self.asked, self.names[names[0]], self.mark, stated[0]])
        return Text(needles, question, numbers[0], np.ones(len(numbers[0]), dtype=bool))

    def least(self) -> int:
        """With the longest names, and numbers of which every digit is a token of its own."""
        longest = sorted(range(len(NAMES)), key=lambda i: -len(self.names[i]))[: self.spec.n_needles]
        return -self._text(longest, [self.numbers.longest] * self.spec.n_needles).room(0)

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        k = self.spec.n_needles
        numbers = [self.numbers.text(i) for i in rng.integers(0, self.numbers.n, n * k).tolist()]
        spelled, names = self.numbers.spelled(numbers), distinct(rng, n, len(NAMES), k).tolist()
        texts = [self._text(names[i], spelled[i * k : (i + 1) * k]) for i in range(n)]
        room = np.array([text.room(length) for text in texts])
        before = places(rng, room, depth)
        others = rng.integers(0, room[:, None] + 1, (n, k - 1))
        at = np.concatenate([before[:, None], others], axis=1)
        orders = rng.permuted(np.tile(np.arange(k), (n, 1)), axis=1)
        rows = [self._row(text, a[order], order, length) for text, a, order in zip(texts, at, orders, strict=True)]
        return examples(rows, fractions(before, room))

    def _row(self, text: Text, at: np.ndarray, order: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`order` decides between statements with the same filler before them."""
        by_place = np.argsort(at, kind="stable")
        statements = [text.statements[order[i]] for i in by_place]
        return in_filler(self.pieces, text._replace(statements=statements), at[by_place].tolist(), length)

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        numbers = []
        for row in inputs_BT.tolist():
            text = self.tokenizer.decode(row)
            asked = QUESTION.search(text)
            numbers.append(dict(STATEMENT.findall(text)).get(asked[1] if asked else "", "0"))
        return at_the_end(inputs_BT, self.numbers.spelled(numbers))

    def chance(self, length: int) -> Chance:
        return self.numbers.chance
