"""The whole of `lmlab eval --long-context` for one checkpoint: every scaling at every length, on one token set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmlab.data.tokenizer import Tokenizer
from lmlab.data.tokens import TokenFile
from lmlab.errors import DataError, LmlabError
from lmlab.eval.long.keys import key_tokens
from lmlab.eval.long.lengths import score_summary
from lmlab.eval.long.recall import N_CANDIDATES, Needle, copies, needles
from lmlab.eval.long.scaled import NONE, OWN, Choice, scaled
from lmlab.eval.long.text import TextLoss, context_gain, text_loss
from lmlab.eval.long.windows import TokenSet, token_set
from lmlab.model.transformer import Transformer

MULTIPLES = (0.5, 1, 2, 4, 8, 16)
LEAST_LENGTH, LEAST_COPY = 4, 7

Say = Callable[[str, "float | None"], None]
Key = tuple[str, "float | None", int]


@dataclass(frozen=True)
class Asked:
    """trained: tokens of the rows of training; original: of those that plain rotations were trained at. factors None:
    length / original, at least 1."""

    trained: int
    original: int
    lengths: tuple[int, ...]
    scalings: tuple[str, ...]
    factors: tuple[float, ...] | None = None
    left_out: tuple[dict[str, Any], ...] = ()

    def choices(self, length: int) -> list[Choice]:
        factors = self.factors or (max(1.0, length / self.original),)
        alone = (OWN, NONE)
        return [Choice(name, factor) for name in self.scalings for factor in ((None,) if name in alone else factors)]


def default_lengths(trained: int) -> tuple[int, ...]:
    """0.5 … 16 times the trained length."""
    return tuple(dict.fromkeys(max(LEAST_LENGTH, int(m * trained)) for m in MULTIPLES))


def key_of(choice: Choice, length: int) -> Key:
    return (NONE, None, length) if choice.plain else (choice.name, choice.factor, length)


@dataclass
class TextSuite:
    """What is asked of a model of text."""

    model: Transformer
    tokens: TokenFile
    tokenizer: Tokenizer
    asked: Asked
    found: TokenSet
    keys: list[np.ndarray]
    needle: Needle | None
    unspelled: str = ""  # why there is no needle
    memo: dict[Key, dict[str, Any]] = field(default_factory=dict)
    losses: dict[Key, TextLoss] = field(default_factory=dict)

    @classmethod
    def make(cls, model: Transformer, tokens: TokenFile, tokenizer: Tokenizer, asked: Asked) -> TextSuite:
        found = token_set(tokens, max(asked.lengths))
        keys = [key_tokens(unit.ids, asked.trained) for unit in found.units]
        needle, why = None, ""
        try:
            needle = Needle.of(tokenizer)
        except DataError as error:
            why = str(error)
        return cls(model, tokens, tokenizer, asked, found, keys, needle, why)

    def run(self, say: Say) -> dict[str, Any]:
        """`long_context` of the report."""
        cells: list[dict[str, Any]] = []
        todo = [(length, choice) for length in self.asked.lengths for choice in self.asked.choices(length)]
        for done, (length, choice) in enumerate(todo):
            named = choice.name if choice.factor is None else f"{choice.name} {choice.factor:g}"
            say(f"{length:,} tokens, rope_scaling {named}", done / len(todo))
            cells.append(self.cell(length, choice))
        order = {name: i for i, name in enumerate(self.asked.scalings)}
        cells.sort(key=lambda cell: order[cell["scaling"]])
        return {
            "trained_length": self.asked.trained,
            "original_length": self.asked.original,
            "lengths": list(self.asked.lengths),
            "scalings": list(self.asked.scalings),
            "factors": None if self.asked.factors is None else list(self.asked.factors),
            "left_out": list(self.asked.left_out),
            "unit": self.found.kind,
            "n_documents": len(self.found.units),
            "tokens": self.found.n_targets,
            "no_needle": self.unspelled or None,
            "cells": cells,
            "tasks": [],
            "summary": self.summary(cells),
        }

    # ------------------------------------------------------------ one cell

    def cell(self, length: int, choice: Choice) -> dict[str, Any]:
        """All figures of a length and a scaling. A scaling by 1 is plain RoPE, to the last bit: it is not computed
        again."""
        key = key_of(choice, length)
        if key not in self.memo:
            try:
                with scaled(self.model, choice, self.asked.original):
                    self.memo[key] = self.figures(length, choice)
            except LmlabError as error:
                self.memo[key] = {"not_available": error.message}
        first = {"scaling": choice.name, "factor": choice.factor, "length": length, "not_available": None}
        return first | self.memo[key]

    def figures(self, length: int, choice: Choice) -> dict[str, Any]:
        start = self.tokenizer.start
        stride, trained = max(1, length // 2), self.asked.trained
        loss = text_loss(self.model, self.found, self.keys, length=length, stride=stride, trained=trained)
        self.losses[key_of(choice, length)] = loss
        report = loss.figures(self.bytes_per_token())
        short = self.shortest(choice)
        gain = (None, None) if short is None else context_gain(short.sliding, loss.sliding)
        report["context_gain"], report["context_gain_se"] = gain
        report["copy"] = copies(self.model, self.found, start, length) if length >= LEAST_COPY else None
        needle = self.needle
        asked = needle is not None and length >= needle.least
        report["needle"] = needles(self.model, needle, self.found, start, length) if needle and asked else []
        return report

    def shortest(self, choice: Choice) -> TextLoss | None:
        """The loss by the same scaling (and typed factor) at the shortest length, which is measured first."""
        at = min(self.asked.lengths)
        same = [c for c in self.asked.choices(at) if c.name == choice.name]
        own = next((c for c in same if self.asked.factors is None or c.factor == choice.factor), None)
        return None if own is None else self.losses.get(key_of(own, at))

    def bytes_per_token(self) -> float | None:
        if not self.tokenizer.lossless:
            return None
        n = sum(int(self.tokenizer.token_bytes[unit.ids[1:]].sum()) for unit in self.found.units)
        return n / self.found.n_targets or None

    def summary(self, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """How far each score holds, per scaling (with typed factors, per factor)."""
        told = []
        for what, score in (("needle", _needle_score), ("copy", _copy_score)):
            by_choice: dict[tuple[str, float | None], dict[int, float]] = {}
            for cell in cells:
                value = score(cell)
                if value is not None:
                    factor = cell["factor"] if self.asked.factors else None
                    by_choice.setdefault((cell["scaling"], factor), {})[cell["length"]] = value
            for (scaling, factor), scores in by_choice.items():
                chance = 1 / N_CANDIDATES if what == "needle" else None
                own = {"what": what, "scaling": scaling, "factor": factor, "chance": chance}
                told.append(own | score_summary(scores, self.asked.trained))
        return told


def _needle_score(cell: dict[str, Any]) -> float | None:
    asked = cell.get("needle") or []
    n = sum(one["n"] for one in asked)
    return sum(one["correct"] for one in asked) / n if n else None


def _copy_score(cell: dict[str, Any]) -> float | None:
    found = cell.get("copy")
    return found["accuracy"] if found else None
