"""Training batches whose rows are of several parts (lmlab/data/mix.py)."""

from __future__ import annotations

import numpy as np
import torch

from lmlab.data.batches import Batch
from lmlab.data.mix import Mixed, part_of_rows
from lmlab.data.source import Batches
from lmlab.data.spec import Mix
from lmlab.data.tasks.batches import TaskBatches


class MixedBatches:
    """Endless batches of `rows` × `seq_len`; batch k is a pure function of (seed, k)."""

    def __init__(self, spec: Mix, mixed: Mixed, *, rows: int, seq_len: int, seed: int, packing: str) -> None:
        self.shares, self.n_rows, self.seed = [part.share for part in mixed.parts], rows, seed
        self.parts: list[Batches] = [
            source.batches(rows=rows, seq_len=seq_len, packing=packing, seed=seed) for source in mixed.sources
        ]

    def epoch(self, k: int) -> float:
        """Of the corpus that is read most often."""
        return max(share * part.epoch(k) for share, part in zip(self.shares, self.parts, strict=True))

    def batch(self, k: int) -> Batch:
        of_row = part_of_rows(self.shares, self.seed, k, self.n_rows)
        made = [(np.flatnonzero(of_row == i), part) for i, part in enumerate(self.parts)]
        rows = [(at, _rows_of(part, k, at)) for at, part in made if len(at)]
        order = torch.from_numpy(np.argsort(np.concatenate([at for at, _ in rows])))
        return joined([batch for _, batch in rows], order)


def _rows_of(part: Batches, k: int, at: np.ndarray) -> Batch:
    if isinstance(part, TaskBatches):  # as many as are needed: to draw an example takes longer than to read a row
        return part.batch(k, len(at))
    return picked(part.batch(k), torch.from_numpy(at))


def picked(batch: Batch, rows: torch.Tensor) -> Batch:
    """These rows; positions that are one row repeated stay so."""
    documents = None if batch.documents_BT is None else batch.documents_BT[rows]
    positions = batch.positions_BT
    positions = positions[:1].expand(len(rows), -1) if positions.stride(0) == 0 else positions[rows]
    return Batch(batch.tokens_BT[rows], batch.targets_BT[rows], positions, documents, batch.weights_BT[rows])


def joined(batches: list[Batch], order: torch.Tensor) -> Batch:
    """The rows of all, in this order. With documents where some have them: a row without is one document."""

    def column(name: str) -> torch.Tensor:
        return torch.cat([getattr(b, name) for b in batches])[order]

    positions = batches[0].positions_BT[:1].expand(len(order), -1)
    if any(b.positions_BT.stride(0) != 0 for b in batches):
        positions = column("positions_BT")
    documents = None
    if any(b.documents_BT is not None for b in batches):
        of_each = [torch.zeros_like(b.tokens_BT) if b.documents_BT is None else b.documents_BT for b in batches]
        documents = torch.cat(of_each)[order]
    return Batch(column("tokens_BT"), column("targets_BT"), positions, documents, column("weights_BT"))
