"""How a model answers a task: whole examples and single answer tokens, with intervals, by length and depth.

Everything before an answer token is given, the true answer tokens too: one forward per batch of rows, and logits at the
answers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmlab.data.tasks import split as splits
from lmlab.data.tasks.base import Examples, Task
from lmlab.errors import ConfigError, DataError, LmlabError
from lmlab.eval.long.nats import LOGITS, hidden
from lmlab.eval.long.windows import BATCH_TOKENS
from lmlab.model.transformer import Transformer
from lmlab.runs.intervals import wilson


@dataclass(frozen=True)
class Score:
    """Sums over examples; add two of them to join two sets. correct: examples with every answer token right. nats: Σ
    over answer tokens."""

    n: int = 0
    correct: int = 0
    token_n: int = 0
    token_correct: int = 0
    nats: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.n + other.n,
            self.correct + other.correct,
            self.token_n + other.token_n,
            self.token_correct + other.token_correct,
            self.nats + other.nats,
        )

    def figures(self) -> dict[str, Any]:
        """For a report: shares with their Wilson intervals of 95 %, nats per answer token."""
        exact, token = wilson(self.correct, self.n), wilson(self.token_correct, self.token_n)
        return {
            "n": self.n,
            "correct": self.correct,
            "exact": self.correct / self.n,
            "exact_low": exact[0],
            "exact_high": exact[1],
            "token_n": self.token_n,
            "token_correct": self.token_correct,
            "token_accuracy": self.token_correct / self.token_n,
            "token_low": token[0],
            "token_high": token[1],
            "loss": self.nats / self.token_n,
        }


@torch.no_grad()
def score(model: Transformer, examples: Examples, batch_tokens: int = BATCH_TOKENS) -> Score:
    """The model (in eval mode meanwhile) on all examples, in batches of about `batch_tokens`; any gives one figure."""
    was_training = model.training
    model.eval()
    B, T = examples.inputs_BT.shape
    size, found = max(1, batch_tokens // T), Score()
    try:
        for first in range(0, B, size):
            found += _batch(model, splits.taken(examples, np.arange(first, min(first + size, B))))
    finally:
        model.train(was_training)
    return found


def _batch(model: Transformer, examples: Examples) -> Score:
    device = model.embed.weight.device
    tokens_BT, answers_BT = (torch.from_numpy(a).to(device) for a in (examples.inputs_BT, examples.answers_BT))
    target_N = torch.from_numpy(examples.targets_BT[examples.answers_BT]).to(device)
    with model.eager():
        x_ND = hidden(model, tokens_BT)[answers_BT]
    nats, hit_N = _at_answers(model, x_ND, target_N)
    hit_BT = torch.ones_like(answers_BT)
    hit_BT[answers_BT] = hit_N
    return Score(len(tokens_BT), int(hit_BT.all(1).sum()), len(target_N), int(hit_N.sum()), nats)


def _at_answers(model: Transformer, x_ND: Tensor, target_N: Tensor) -> tuple[float, Tensor]:
    """(Σ nats, (N,) whether the target has the largest logit), some logits at a time."""
    nats, hits = 0.0, []
    size = max(1, LOGITS // model.dims.vocab_size)
    for some_ND, targets in zip(x_ND.split(size), target_N.split(size), strict=True):
        logits_NV = model.logits(some_ND[None])[0]
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        nats += float(F.cross_entropy(logits_NV, targets, reduction="none").double().sum())
        hits.append(logits_NV.argmax(-1) == targets)
    return nats, torch.cat(hits)


# ---------------------------------------------------------------- by length and depth


def task_cells(
    task: Task,
    model: Transformer,
    lengths: Sequence[int],
    depths: Sequence[float],
    n: int,
    *,
    name: str,
    seed: int = 0,
    split: str = "val",
    scaling: str = "own",
    factor: float | None = None,
) -> list[dict[str, Any]]:
    """`tasks` of a report on long contexts, one entry per length: n examples there, as evenly as it goes at each of the
    depths (none given, or a task without depth: drawn anywhere); of equal ones one counts, so that n may be less and a
    depth that has none is left out. The examples are the same for every model and scaling.

    A length that the task or the model can't do is told as not available. Raises ConfigError for a model of fewer ids.
    """
    if task.vocab_size > model.dims.vocab_size:
        raise ConfigError(
            f"`data={name}` has {task.vocab_size} ids, the model reads {model.dims.vocab_size}",
            f"set data.vocab_size to at most {model.dims.vocab_size}, or take a task in text",
        )
    cells = []
    for length in lengths:
        first = {"task": name, "scaling": scaling, "factor": factor, "length": length, "not_available": None}
        try:
            cells.append(first | _cell(task, model, length, depths if task.has_depth else (), n, seed, split))
        except LmlabError as error:
            cells.append(first | {"not_available": error.message})
    return cells


def _cell(
    task: Task, model: Transformer, length: int, depths: Sequence[float], n: int, seed: int, split: str
) -> dict[str, Any]:
    found, by_depth, lost = Score(), [], list[DataError]()
    asked: Sequence[float | None] = depths or (None,)
    for k, depth in enumerate(asked):
        rows = n // len(asked) + (k < n % len(asked))
        if not rows:
            continue
        try:
            here = score(model, splits.distinct(splits.draw(task, split, seed, k, rows, length, depth)))
        except DataError as error:  # too few examples at this depth
            lost.append(error)
            continue
        by_depth.append({"depth": depth, "n": here.n, "correct": here.correct})
        found += here
    if not found.n:
        raise lost[0]
    chance = task.chance(length)
    told = {"chance_exact": chance.exact, "chance_token": chance.token, "depths": by_depth if depths else []}
    return found.figures() | told
