"""How fast a model decodes with each kind of cache, and what a row of it keeps, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch

from lmlab.data.batches import Batch
from lmlab.eval.loss import LossSum, without_filling
from lmlab.generate.decode import generate
from lmlab.model.cache import Cache, CacheKind
from lmlab.model.transformer import Transformer

ROUNDS = 5
DECODED_TOKENS = 4096  # of the rows that are fed token by token, at least one of them


def decode_rates(
    model: Transformer, prompt: Sequence[int], max_new: int, kinds: Sequence[CacheKind]
) -> list[tuple[float, int]]:
    """(tokens/s, bytes of the full cache) of each kind: greedy decoding of one row, after a round to warm up; the
    medians of rounds in which the kinds take turns."""
    rates: list[list[float]] = [[] for _ in kinds]
    n_bytes = [0] * len(kinds)
    for turn in range(ROUNDS + 1):
        for n, kind in enumerate(kinds):
            found = generate(model, [prompt], max_new=max_new, kind=kind)
            n_bytes[n] = found.cache_bytes
            if turn:
                rates[n].append(found.decode_tokens_per_s)
    return [(statistics.median(own), size) for own, size in zip(rates, n_bytes, strict=True)]


@torch.no_grad()
def token_by_token(
    model: Transformer, batches: Iterable[Batch], token_bytes: torch.Tensor, *, kind: CacheKind
) -> LossSum:
    """The loss of rows whose tokens go in one after the other, as they do in decoding. token_bytes: (V,)."""
    device, found = next(model.parameters()).device, LossSum()
    for batch in batches:
        counted = batch.weights_BT > 0
        (b, valid_BT), cache = without_filling(batch.to(device)), Cache(model, kind)
        length_BT, nats = b.positions_BT[:, -1:] + 1, []
        with model.eager():
            for t in range(b.tokens_BT.shape[1]):
                part = slice(t, t + 1)
                how = {"targets_BT": b.targets_BT[:, part], "weights_BT": b.weights_BT[:, part]}
                how |= {} if valid_BT is None else {"valid_BT": valid_BT[:, part]}
                out = model(b.tokens_BT[:, part], b.positions_BT[:, part], cache=cache, length_BT=length_BT, **how)
                nats.append(out.loss)
        n_bytes = int(token_bytes[batch.targets_BT][counted].sum())
        found += LossSum(float(torch.stack(nats).double().sum()), int(counted.sum()), n_bytes)
    return found
