"""Variable tracking: chains of assignments in filler text, asked for all variables with one value."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import numpy as np

from lmlab.data.spec import VariableTracking as VariableTrackingSpec
from lmlab.data.tasks.asked import blank, check
from lmlab.data.tasks.base import Chance, Examples
from lmlab.data.tasks.rows import Text, at_the_end, examples, in_filler
from lmlab.data.tasks.spelled import Pieces, guessing, spelling
from lmlab.data.tasks.tokens import distinct
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError

NAMES = string.ascii_uppercase
VALUES = [str(value) for value in range(10, 100)]
STATEMENT = re.compile(r"VAR ([A-Z]) = (?:VAR ([A-Z])|(\d+))\.")
QUESTION = re.compile(r"Which variables are (\d+)\?")


class VariableTracking:
    """… VAR Q = 42. … VAR K = VAR Q. … VAR B = 17. … Which variables are 42? They are → Q K (RULER, Hsieh et al. 2024,
    arXiv 2404.06654, in fewer words: names of one letter, values of two digits).

    Chains stand among each other, each in its own order, which is the answer's; chance takes any letter for possible.
    """

    text, has_depth = True, False

    def __init__(self, spec: VariableTrackingSpec, tokenizer: Tokenizer | None = None) -> None:
        self.spec, self.tokenizer = spec, spelling(tokenizer, spec.name)
        self.n_each = spec.n_hops + 1
        self.n_names = spec.n_chains * self.n_each
        if self.n_names > len(NAMES):
            raise ConfigError(
                f"`data.n_chains` {spec.n_chains} with `data.n_hops` {spec.n_hops} needs {self.n_names} variables, "
                f"and there are {len(NAMES)} letters",
                f"set data.n_chains to at most {len(NAMES) // self.n_each}"
                + (f", or data.n_hops to at most {hops}" if (hops := len(NAMES) // spec.n_chains - 1) >= 0 else ""),
            )
        self.pieces, self.vocab_size = Pieces(self.tokenizer, spec.name), self.tokenizer.vocab_size
        of = self.pieces.of
        self.names, self.values = (self.pieces.many([f" {t}" for t in texts], "are") for texts in (NAMES, VALUES))
        self.var, self.is_, self.stop = of(" VAR"), of(" =", "A"), of(".", "A")
        self.which, self.they = of(" Which variables are"), of("? They are", "0")
        self.n_given = _common(self.names)
        for i in range(len(NAMES) - self.n_names + 1):  # each letter in some place
            names, chains = list(range(i, i + self.n_names)), list(range(self.n_names))
            text = self._text(names, chains, list(range(i, i + spec.n_chains)), 0)
            self.pieces.check(np.concatenate([*text.statements, text.question, text.answer]).tolist(), self._written(i))

    def _written(self, i: int) -> str:
        """What the row that is checked must say."""
        said = [
            f" VAR {NAMES[i + j]} = "
            + (f"VAR {NAMES[i + j - 1]}." if j % self.n_each else f"{VALUES[i + j // self.n_each]}.")
            for j in range(self.n_names)
        ]
        asked = "".join(f" {name}" for name in NAMES[i : i + self.n_each])
        return "".join(said) + f" Which variables are {VALUES[i]}? They are{asked}"

    def _text(self, names: Sequence[int], order: Sequence[int], values: Sequence[int], asked: int) -> Text:
        """names: chain after chain. order: of the statements, as places in `names`. asked: which chain."""
        statements = []
        for j in order:
            chain, hop = divmod(j, self.n_each)
            given = [self.var, self.names[names[j - 1]]] if hop else [self.values[values[chain]]]
            statements.append(np.concatenate([self.var, self.names[names[j]], self.is_, *given, self.stop]))
        answers = [self.names[names[j]] for j in range(asked * self.n_each, (asked + 1) * self.n_each)]
        counts = [np.arange(len(ids)) >= self.n_given for ids in answers]
        question = np.concatenate([self.which, self.values[values[asked]], self.they])
        return Text(statements, question, np.concatenate(answers), np.concatenate(counts))

    def least(self) -> int:
        """With names and values that are as many tokens as the longest of them."""
        name, value = (max(range(len(all_)), key=lambda i: len(all_[i])) for all_ in (self.names, self.values))
        text = self._text([name] * self.n_names, range(self.n_names), [value] * self.spec.n_chains, 0)
        return -text.room(0)

    def draw(self, rng: np.random.Generator, n: int, length: int, depth: float | None = None) -> Examples:
        check(self, self.spec.name, length, depth)
        names = distinct(rng, n, len(NAMES), self.n_names).tolist()
        values = distinct(rng, n, len(VALUES), self.spec.n_chains).tolist()
        asked = rng.integers(0, self.spec.n_chains, n).tolist()
        turns = rng.permuted(np.tile(np.repeat(np.arange(self.spec.n_chains), self.n_each), (n, 1)), axis=1)
        rows = []
        for i in range(n):
            text = self._text(names[i], in_turn(turns[i].tolist(), self.n_each), values[i], asked[i])
            before = np.sort(rng.integers(0, text.room(length) + 1, self.n_names)).tolist()
            rows.append(in_filler(self.pieces, text, before, length))
        return examples(rows, blank(n))

    def oracle(self, inputs_BT: np.ndarray) -> np.ndarray:
        found = []
        for row in inputs_BT.tolist():
            text, value_of = self.tokenizer.decode(row), dict[str, str]()
            for name, other, value in STATEMENT.findall(text):
                value_of[name] = value or value_of.get(other, "")
            asked = QUESTION.search(text)
            names = [name for name, value in value_of.items() if asked and value == asked[1]]
            found.append(np.concatenate([self.names[NAMES.index(name)] for name in names or ["A"]]))
        return at_the_end(inputs_BT, found)

    def chance(self, length: int) -> Chance:
        return guessing([ids[self.n_given :] for ids in self.names], self.n_each)


def in_turn(turns: Sequence[int], n_each: int) -> list[int]:
    """[1, 0, 1] → the first of chain 1, the first of chain 0, the second of chain 1, as places in chain after chain."""
    said: dict[int, int] = {}
    order = []
    for chain in turns:
        order.append(chain * n_each + said.get(chain, 0))
        said[chain] = said.get(chain, 0) + 1
    return order


def _common(spelled: Sequence[np.ndarray]) -> int:
    """How many first tokens all of them share, the last one left out: a space, which is no answer."""
    n = 0
    while all(len(ids) > n + 1 and ids[n] == spelled[0][n] for ids in spelled):
        n += 1
    return n
