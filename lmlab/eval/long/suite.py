"""The whole of `lmlab eval --long-context` for one checkpoint: every scaling at every length, on one set of tokens, and
on the same examples of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmlab.data.tasks.base import Task
from lmlab.errors import LmlabError
from lmlab.eval.long.lengths import score_summary
from lmlab.eval.long.scaled import NONE, OWN, Choice, scaled
from lmlab.eval.long.textual import TextPart
from lmlab.eval.task_scores import task_cells
from lmlab.model.transformer import Transformer

MULTIPLES = (0.5, 1, 2, 4, 8, 16)
LEAST_LENGTH = 4
TASK_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TASK_TOKENS, LEAST_EXAMPLES, MOST_EXAMPLES = 65_536, 20, 200  # of one task at one length

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
        return [
            Choice(name, factor) for name in self.scalings for factor in ((None,) if name in (OWN, NONE) else factors)
        ]


def default_lengths(trained: int) -> tuple[int, ...]:
    """0.5 … 16 times the trained length."""
    return tuple(dict.fromkeys(max(LEAST_LENGTH, int(m * trained)) for m in MULTIPLES))


def key_of(choice: Choice, length: int) -> Key:
    """A scaling by 1 is plain RoPE, to the last bit: it has the key of `none`, and is not computed again."""
    return (NONE, None, length) if choice.plain else (choice.name, choice.factor, length)


@dataclass
class Suite:
    """What is asked of a model: of its text (None where it was not trained on any), and of tasks by name."""

    model: Transformer
    asked: Asked
    text: TextPart | None
    tasks: Mapping[str, Task]
    split: str  # that tasks' examples are drawn from
    memo: dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)

    def run(self, say: Say) -> dict[str, Any]:
        """`long_context` of the report, without what its command adds."""
        asked, cells, of_tasks = self.asked, list[dict[str, Any]](), list[dict[str, Any]]()
        todo = [(length, choice) for length in asked.lengths for choice in asked.choices(length)]
        for done, (length, choice) in enumerate(todo):
            say(f"{length:,} tokens, rope_scaling {choice}", done / len(todo))
            text, tasks = self.figures(length, choice)
            where = {"scaling": choice.name, "factor": choice.factor, "length": length}
            if self.text is not None:
                cells.append(where | text)
            of_tasks += [{**cell, **where} for cell in tasks]
        order = {name: i for i, name in enumerate(asked.scalings)}
        names = list(self.tasks)
        cells.sort(key=lambda cell: order[cell["scaling"]])
        of_tasks.sort(key=lambda cell: (names.index(cell["task"]), order[cell["scaling"]]))
        return {
            "trained_length": asked.trained,
            "original_length": asked.original,
            "lengths": list(asked.lengths),
            "scalings": list(asked.scalings),
            "factors": None if asked.factors is None else list(asked.factors),
            "left_out": list(asked.left_out),
            **({} if self.text is None else self.text.about()),
            "cells": cells,
            "tasks": of_tasks,
            "summary": self.summary(cells, of_tasks),
        }

    def figures(self, length: int, choice: Choice) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(of the text, of each task), with why they are not available."""
        key = key_of(choice, length)
        if key not in self.memo:
            with scaled(self.model, choice, self.asked.original):
                self.memo[key] = self.of_text(key), self.of_tasks(length)
        return self.memo[key]

    def of_text(self, key: Key) -> dict[str, Any]:
        if self.text is None:
            return {}
        try:
            return {"not_available": None} | self.text.figures(self.model, key, self.shortest(key))
        except LmlabError as error:
            return {"not_available": error.message}

    def shortest(self, key: Key) -> Key:
        """Of the same scaling (and typed factor) at the shortest length, which is measured first."""
        name, factor, _ = key
        at = min(self.asked.lengths)
        same = [c for c in self.asked.choices(at) if c.name == name]
        own = next((c for c in same if self.asked.factors is None or c.factor == factor), Choice(NONE))
        return key_of(own, at)

    def of_tasks(self, length: int) -> list[dict[str, Any]]:
        n = min(MOST_EXAMPLES, max(LEAST_EXAMPLES, TASK_TOKENS // length))
        how: dict[str, Any] = dict(lengths=[length], depths=TASK_DEPTHS, n=n, split=self.split)
        made = (task_cells(task, self.model, name=name, **how) for name, task in self.tasks.items())
        return [cell for one in made for cell in one]

    # ------------------------------------------------------------ how far scores hold

    def summary(self, cells: Sequence[dict[str, Any]], tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Per score and scaling (with typed factors, per factor)."""
        scores: dict[tuple[str, str, float | None], dict[int, tuple[int, int, float]]] = {}
        for cell in (*cells, *tasks):
            if cell["not_available"]:
                continue
            factor = cell["factor"] if self.asked.factors else None
            for what, found in _scores(cell):
                scores.setdefault((what, cell["scaling"], factor), {})[cell["length"]] = found
        return [
            {"what": what, "scaling": scaling, "factor": factor} | score_summary(found, self.asked.trained)
            for (what, scaling, factor), found in scores.items()
        ]


def _scores(cell: dict[str, Any]) -> list[tuple[str, tuple[int, int, float]]]:
    """(what, (right, asked, chance)) of a cell."""
    if "task" in cell:
        return [(cell["task"], (cell["correct"], cell["n"], cell["chance_exact"]))]
    found = []
    if cell["needle"]:
        n, correct = (sum(one[key] for one in cell["needle"]) for key in ("n", "correct"))
        found.append(("needle", (correct, n, cell["needle_chance"])))
    if (copied := cell["copy"]) is not None:
        found.append(("copy", (copied["correct"], copied["tokens"], copied["first_correct"] / copied["tokens"])))
    return found
