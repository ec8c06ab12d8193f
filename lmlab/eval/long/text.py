"""One length at one scaling: the loss of non-overlapping and of sliding windows, by position, and of key tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmlab.eval.long.nats import token_nats
from lmlab.eval.long.sums import ByPosition, Sums
from lmlab.eval.long.windows import BATCH_TOKENS, TokenSet, batches
from lmlab.model.transformer import Transformer


@dataclass(frozen=True)
class TextLoss:
    length: int
    stride: int
    apart: Sums  # windows that do not overlap
    sliding: Sums
    keys: Sums  # key tokens, sliding
    positions: ByPosition

    def figures(self, bytes_per_token: float | None) -> dict[str, Any]:
        """For the report. bytes_per_token: of the token set, None where bytes can't be told."""
        per_byte = None if bytes_per_token is None else self.apart.mean / (math.log(2) * bytes_per_token)
        return {
            "loss": self.apart.mean,
            "loss_se": self.apart.se,
            "perplexity": perplexity(self.apart.mean),
            "bits_per_byte": per_byte,
            "sliding_loss": self.sliding.mean,
            "sliding_loss_se": self.sliding.se,
            "sliding_perplexity": perplexity(self.sliding.mean),
            "stride": self.stride,
            "buckets": self.positions.buckets(),
            "key_tokens": self.keys.tokens,
            "key_loss": self.keys.mean if self.keys.tokens else None,
            "key_loss_se": self.keys.se,
        }


def perplexity(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def text_loss(
    model: Transformer,
    found: TokenSet,
    keys: list[np.ndarray],
    *,
    length: int,
    stride: int,
    trained: int,
    batch_tokens: int = BATCH_TOKENS,
) -> TextLoss:
    """keys: per unit (n_targets,) bool. The same figures for every batch_tokens."""
    U = len(found.units)
    apart, sliding, of_keys = Sums.of(U), Sums.of(U), Sums.of(U)
    positions = ByPosition(length, trained)
    for rows in batches(found, length, length, batch_tokens):
        nats_BT = token_nats(model, rows.tokens_BT, rows.targets_BT)[0].double().numpy()
        for window, nats in zip(rows.windows, nats_BT, strict=True):
            apart.add(window.unit, nats)
            positions.add(nats)
    for rows in batches(found, length, stride, batch_tokens):
        nats_BT = token_nats(model, rows.tokens_BT, rows.targets_BT)[0].double().numpy()
        for window, nats in zip(rows.windows, nats_BT, strict=True):
            scored, end = nats[window.n - window.scored :], window.begin + window.n
            sliding.add(window.unit, scored)
            of_keys.add(window.unit, scored[keys[window.unit][end - window.scored : end]])
    return TextLoss(length, stride, apart, sliding, of_keys, positions)


def context_gain(short: Sums, long: Sums) -> tuple[float, float | None]:
    """Loss with the short context less that with the long one, same tokens: (nats/token, standard error over units)."""
    gain = Sums(short.nats_U - long.nats_U, long.tokens_U)
    return gain.mean, gain.se
