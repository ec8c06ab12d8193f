"""Loss on a fixed set of tokens: token-weighted, the same figure for every batch size.

nats/token = Σ nats / Σ targets; bits/byte = Σ nats / (ln 2 · Σ raw bytes of the targets); specials stand for 0 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.data.batches import Batch
from lmlab.model.cache import Cache, CacheKind
from lmlab.model.transformer import Transformer


@dataclass(frozen=True)
class LossSum:
    """Sums over targets; add two of them to join two sets."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan


@torch.no_grad()
def evaluate(
    model: Transformer,
    batches: Iterable[Batch],
    token_bytes: torch.Tensor,
    *,
    kind: CacheKind | None = None,
    hear: Callable[[Sequence[Any]], None] = lambda stats: None,
) -> list[LossSum]:
    """One LossSum per batch, in order, with the model in eval mode (and put back as it was).

    token_bytes: (V,) raw bytes each id stands for. Add the list up for the whole set, or its front for a part of it.
    kind: each row by a cache of its own that keeps no more than the kind says. Rows go in whole, so that experts have
    the room of a whole row; token by token is lmlab/eval/caches.py.
    hear: is told each forward's stats, one entry per layer; what fills a batch up is none of the tokens they are of.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums: list[tuple[torch.Tensor, int, int]] = []
    for batch in batches:
        counted = batch.weights_BT > 0
        n_bytes = int(token_bytes[batch.targets_BT][counted].sum())
        b, valid_BT = without_filling(batch.to(device)) if model.routed else (batch.to(device), None)
        how: dict[str, Any] = {"targets_BT": b.targets_BT, "weights_BT": b.weights_BT, "documents_BT": b.documents_BT}
        how |= {"valid_BT": valid_BT}
        if kind is not None:
            how |= {"cache": Cache(model, kind), "length_BT": b.positions_BT[:, -1:] + 1}
        # a batch that is cut short is one alone: not worth graphs of its own
        with nullcontext() if kind is None and valid_BT is None else model.eager():
            out = model(b.tokens_BT, b.positions_BT, **how)
        assert out.loss is not None
        hear(out.stats)
        sums.append((out.loss, int(counted.sum()), n_bytes))
    model.train(was_training)
    return [LossSum(float(nats), tokens, n_bytes) for nats, tokens, n_bytes in sums]


def without_filling(batch: Batch) -> tuple[Batch, torch.Tensor | None]:
    """The batch without rows of weight 0 alone, and which tokens are in the split where some are not: to a router a
    token that fills a row up is one more that asks for room."""
    present = batch.present()
    if bool(present.all()):
        return batch, None
    n_rows = max(1, int(present.any(1).sum()))
    return batch.rows(0, n_rows), present[:n_rows]


def total(sums: Iterable[LossSum]) -> LossSum:
    return sum(sums, LossSum())
