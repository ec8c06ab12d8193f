"""The loss of every token by itself, in one forward per window, without all logits of a long row at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmlab.model.cache import FULL, Cache
from lmlab.model.mask import CAUSAL
from lmlab.model.transformer import Transformer

LOGITS = 1 << 24  # at once
CHUNK = 512  # tokens that enter together where scores would be a T×T matrix
DENSE_MOST = 2048  # tokens of a row up to which they may be


@torch.no_grad()
def token_nats(model: Transformer, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """((B, T) nats of each target, at least fp32; (B, T) whether it had the largest logit), on the host. The model is
    in eval mode. Rows are as long as their texts, which is what scalings that ask for lengths are told."""
    device = model.embed.weight.device
    tokens_BT, targets_BT = tokens_BT.to(device), targets_BT.to(device)
    with model.eager():
        hidden_ND = hidden(model, tokens_BT).flatten(0, 1)
    nats, hits = [], []
    size = max(1, LOGITS // model.dims.vocab_size)
    for x_ND, target_N in zip(hidden_ND.split(size), targets_BT.flatten().split(size), strict=True):
        logits_NV = model.logits(x_ND[None])[0]
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        nats.append(F.cross_entropy(logits_NV, target_N, reduction="none"))
        hits.append(logits_NV.argmax(-1) == target_N)
    return torch.cat(nats).view(targets_BT.shape).cpu(), torch.cat(hits).view(targets_BT.shape).cpu()


@torch.no_grad()
def hidden(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """(B, T, D): what the head is handed. Where attention would hold a T×T matrix of a long row, in chunks by a cache,
    unless a part says that this is not the same."""
    B, T = tokens_BT.shape
    if B > 1 and model.routed and getattr(model.arch.moe, "group", "") == "batch":  # rows would share experts' room
        return torch.cat([hidden(model, row) for row in tokens_BT.split(1)])
    positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
    if T <= DENSE_MOST or not square(model, T) or "cached = full" in model.known_failures():
        return model.hidden(tokens_BT, positions_BT)[0]
    cache, length_B1 = Cache(model, FULL, max_len=T), torch.full((B, 1), T, device=tokens_BT.device)
    parts = []
    for start in range(0, T, CHUNK):
        part = slice(start, start + CHUNK)
        parts.append(model.hidden(tokens_BT[:, part], positions_BT[:, part], cache=cache, length_BT=length_B1)[0])
    return torch.cat(parts, 1)


def square(model: Transformer, T: int) -> bool:
    """Whether some layer's attention would hold T×T scores; a part that does not tell is taken not to."""
    positions_BT = torch.arange(T, device=model.embed.weight.device)[None]
    tables = model.pos.tables(positions_BT, positions_BT, None)
    blocks: list[Any] = list(model.blocks)
    told = [block.attn for block in blocks if hasattr(block.attn, "scores_of")]
    return any(
        attn.choose(
            attn.scores_of(CAUSAL, tables, positions_BT, positions_BT), T, T, positions_BT.device, model.ops.dtype
        )[0]
        == "dense"
        for attn in told
    )
