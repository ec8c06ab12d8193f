"""What is asked of a model of text at one length and scaling: losses, a repeated row, a needle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmlab.data.tokenizer import Tokenizer
from lmlab.data.tokens import TokenFile
from lmlab.errors import DataError
from lmlab.eval.long.keys import key_tokens
from lmlab.eval.long.recall import N_CANDIDATES, Needle, copies, needles
from lmlab.eval.long.text import TextLoss, context_gain, text_loss
from lmlab.eval.long.windows import TokenSet, token_set
from lmlab.model.transformer import Transformer

LEAST_COPY = 7


@dataclass
class TextPart:
    """unspelled: why no needle can be asked, or ""."""

    tokenizer: Tokenizer
    trained: int
    found: TokenSet
    keys: list[np.ndarray]
    needle: Needle | None
    unspelled: str = ""
    losses: dict[Any, TextLoss] = field(default_factory=dict)

    @classmethod
    def make(cls, tokens: TokenFile, tokenizer: Tokenizer, *, longest: int, trained: int) -> TextPart:
        found = token_set(tokens, longest)
        keys = [key_tokens(unit.ids, trained) for unit in found.units]
        try:
            return cls(tokenizer, trained, found, keys, Needle.of(tokenizer))
        except DataError as error:
            return cls(tokenizer, trained, found, keys, None, error.message)

    def about(self) -> dict[str, Any]:
        own = {"unit": self.found.kind, "n_documents": len(self.found.units), "tokens": self.found.n_targets}
        return own | {"no_needle": self.unspelled or None}

    def figures(self, model: Transformer, key: Any, shortest: Any) -> dict[str, Any]:
        """key: (scaling, factor, length), shortest: the one that the gain of context is counted from, measured before
        (or this one). Raises LmlabError where the model can't read rows so long."""
        length, start = key[2], self.tokenizer.start
        how = dict(length=length, stride=max(1, length // 2), trained=self.trained)
        loss = self.losses[key] = text_loss(model, self.found, self.keys, **how)
        report = loss.figures(self.bytes_per_token())
        short = self.losses.get(shortest)
        gain = (None, None) if short is None else context_gain(short.sliding, loss.sliding)
        report["context_gain"], report["context_gain_se"] = gain
        report["copy"] = copies(model, self.found, start, length) if length >= LEAST_COPY else None
        asked = self.needle is not None and length >= self.needle.least
        report["needle"] = needles(model, self.needle, self.found, start, length) if self.needle and asked else []
        report["needle_chance"] = 1 / N_CANDIDATES
        return report

    def bytes_per_token(self) -> float | None:
        """Of the token set; None where bytes can't be told."""
        if not self.tokenizer.lossless:
            return None
        n = sum(int(self.tokenizer.token_bytes[unit.ids[1:]].sum()) for unit in self.found.units)
        return n / self.found.n_targets or None
