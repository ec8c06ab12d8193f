"""How many of a task's answers a model gives: the likeliest id at each, judged alone and example by example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.data.tasks.base import Chance
from lmlab.data.tasks.source import TaskSplit
from lmlab.model.transformer import Transformer


@dataclass(frozen=True)
class Answered:
    """Of n examples and their token_n answers, how many were right; an example is when all of its answers are."""

    n: int
    correct: int
    token_n: int
    token_correct: int

    @property
    def exact(self) -> float:
        return self.correct / self.n

    @property
    def token_accuracy(self) -> float:
        return self.token_correct / self.token_n

    def told(self, chance: Chance) -> dict[str, float]:
        """For a report: counts, shares with their 95 % intervals, and what guessing scores."""
        exact, token = wilson(self.correct, self.n), wilson(self.token_correct, self.token_n)
        found = vars(self) | {"exact": self.exact, "exact_low": exact[0], "exact_high": exact[1]}
        found |= {"token_accuracy": self.token_accuracy, "token_low": token[0], "token_high": token[1]}
        return found | {"chance_exact": chance.exact, "chance_token": chance.token}


def wilson(correct: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    share, z = correct / n, 1.959963984540054
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


@torch.no_grad()
def answered(model: Transformer, split: TaskSplit, *, rows: int) -> Answered:
    """One forward per `rows` examples, in eval mode; of the logits only those at answers outlive it."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    right: list[torch.Tensor] = []
    counted: list[torch.Tensor] = []
    how: dict[str, Any] = {"rows": rows, "seq_len": split.examples.inputs_BT.shape[1], "packing": "rows", "start": -1}
    for batch in split.batches(**how):
        b = batch.to(device)
        best_BT = model(b.tokens_BT, b.positions_BT).logits_BTV.argmax(-1)
        asked_BT = b.weights_BT > 0
        right.append((((best_BT == b.targets_BT) & asked_BT).sum(1)).cpu())
        counted.append(asked_BT.sum(1).cpu())
    model.train(was_training)
    right_N, counted_N = torch.cat(right), torch.cat(counted)
    return Answered(len(right_N), int((right_N == counted_N).sum()), int(counted_N.sum()), int(right_N.sum()))
