"""Examples of a task as batches: only answers have weight."""

from __future__ import annotations

import numpy as np
import torch

from lmlab.data.batches import Batch
from lmlab.data.tasks.base import Examples, Task
from lmlab.data.tasks.split import draw


class TaskBatches:
    """Endless training batches of `rows` new examples of `seq_len` tokens: batch k is a pure function of (seed, k)."""

    def __init__(self, task: Task, *, rows: int, seq_len: int, seed: int) -> None:
        self.task, self.n_rows, self.seq_len, self.seed = task, rows, seq_len, seed

    def epoch(self, k: int) -> float:
        """None was seen before."""
        return 0.0

    def batch(self, k: int, rows: int | None = None) -> Batch:
        """rows: so many instead, for a batch that others have rows of as well."""
        return batch_of(draw(self.task, "train", self.seed, k, rows or self.n_rows, self.seq_len))


def batch_of(examples: Examples) -> Batch:
    """Each example is a row of its own, from position 0; all of its tokens are seen, whatever they weigh."""
    B, T = examples.inputs_BT.shape
    return Batch(
        torch.from_numpy(examples.inputs_BT),
        torch.from_numpy(examples.targets_BT),
        torch.arange(T).expand(B, T),
        None,
        torch.from_numpy(examples.answers_BT.astype(np.float32)),
        whole=True,
    )
