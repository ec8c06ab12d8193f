"""Text as the tasks need it: pieces that are spelled the same wherever they stand, filler of an exact length, and
answers of which it is known what guessing would score.

A piece is the ids that it has after a full stop, so that pieces can be put one after the other to an exact length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lmlab.data.tasks.base import Chance
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError, DataError

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences of Mohtashami & Jaggi 2023 (arXiv 2305.16300)."""
ANCHOR = "."
MOST_DECODED = 500


def spelling(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """The tokenizer, which a task in text can't do without."""
    if tokenizer is None:
        raise ConfigError(f"`data={name}` is a task in text and needs a tokenizer", "build it with one")
    return tokenizer


class Pieces:
    """Ids of texts in the middle of others, for one task."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.filler_ids = self._filler = self.of(FILLER)

    def of(self, text: str, before: str = ANCHOR) -> np.ndarray:
        return self.many([text], before)[0]

    def many(self, texts: Sequence[str], before: str = ANCHOR) -> list[np.ndarray]:
        """The ids that each text adds to `before`. Raises DataError for a tokenizer that can't spell them; of very many
        texts, which are made of the same characters, some are decoded."""
        first, *others = self.tokenizer.encode_batch([before, *(before + text for text in texts)])
        looked_at = range(0, len(texts), 1 + len(texts) // MOST_DECODED)
        for text, ids in zip(texts, others, strict=True):
            if ids[: len(first)] != first:
                raise self.cannot_spell(text)
        for i in looked_at:
            if self.tokenizer.decode(others[i]) != before + texts[i]:
                raise self.cannot_spell(texts[i])
        return [np.array(ids[len(first) :], dtype=np.int64) for ids in others]

    def check(self, ids: Sequence[int], text: str) -> None:
        """Raises DataError unless pieces put together are the text."""
        if self.tokenizer.decode([int(i) for i in ids]).strip() != text.strip():
            raise self.cannot_spell(text)

    def cannot_spell(self, text: str) -> DataError:
        return DataError(
            f"`data={self.name}`: the tokenizer can't spell {text[-40:]!r} (decode(encode(s)) differs from s)",
            "use tokenizer=bpe or tokenizer=byte, or a task with ids of its own (data=needle)",
        )

    def filler(self, n_tokens: int, *, whole_at_end: bool) -> np.ndarray:
        """So many ids of filler, sentence after sentence; what does not fit is cut off at the other end."""
        n_times = -(-n_tokens // len(self.filler_ids))
        if n_times * len(self.filler_ids) > len(self._filler):
            self._filler = np.tile(self.filler_ids, 2 * n_times)
        end = n_times * len(self.filler_ids)
        return self._filler[end - n_tokens : end] if whole_at_end else self._filler[:n_tokens]


class Numbers:
    """Answers of `digits` digits, leading zeros kept, each equally likely, after the word "is".

    space: " " where it is a token of its own before every number and ends the question, so that no answer token is
    given away; "" where it is a part of the answer's first token.
    """

    def __init__(self, pieces: Pieces, digits: int) -> None:
        self.pieces, self.digits, self.n = pieces, digits, 10**digits
        some = [digit * n for digit in "0123456789" for n in {1, digits}]
        try:
            pieces.many(some, "is ")
            self.space = " "
        except DataError:
            self.space = ""

    def spelled(self, numbers: Sequence[str]) -> list[np.ndarray]:
        """Ids of each after "is" and the space."""
        if self.space:
            return self.pieces.many(numbers, "is ")
        return self.pieces.many([f" {number}" for number in numbers], "is")

    def text(self, number: int) -> str:
        return f"{number:0{self.digits}d}"

    @cached_property
    def longest(self) -> np.ndarray:
        """As many ids as a number can have: those of one in which every digit is a token of its own."""
        first, later = self.spelled(list("0123456789")), self.pieces.tokenizer.encode_batch(list("0123456789"))
        n_tokens = max(map(len, first)) + (self.digits - 1) * max(map(len, later))
        return np.zeros(n_tokens, dtype=np.int64)

    @cached_property
    def chance(self) -> Chance:
        return guessing(self.spelled([self.text(i) for i in range(self.n)]))


def guessing(spelled: Sequence[np.ndarray], n_answers: int = 1) -> Chance:
    """What guessing among equally likely answers scores, answer tokens being known up to the one that is asked.

    A token is right with the probability that an answer which begins as the true one does goes on like it; `n_answers`
    of them are asked one after the other. token: Σ of it over all answers / Σ tokens.
    """
    begins = Counter(tuple(ids[:i]) for ids in map(np.ndarray.tolist, spelled) for i in range(len(ids) + 1))
    right = sum(
        begins[tuple(ids[: i + 1])] / begins[tuple(ids[:i])]
        for ids in map(np.ndarray.tolist, spelled)
        for i in range(len(ids))
    )
    return Chance(right / sum(len(ids) for ids in spelled), (1 / len(spelled)) ** n_answers)
