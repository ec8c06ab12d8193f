"""Which experts tokens choose, and how many of these choices two models of one shape have in common.

Taken by a forward pass of its own, eager, of few tokens: RouterStats are sums, and tell of no token.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lmlab.data.batches import Batch
from lmlab.model.transformer import Transformer
from lmlab.runs.routing_names import STABILITY, name

Asked = list[Optional[Tensor]]  # per layer (N, E) bool on the CPU: who asks for whom; None without experts


@torch.no_grad()
def choices(model: Transformer, batches: Iterable[Batch]) -> Asked:
    """Of the tokens that count, in eval mode; before any is dropped."""
    device = next(model.parameters()).device
    found: list[list[Tensor]] = [[] for _ in model.blocks]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            present = batch.present()
            kept = batch.rows(0, max(1, int(present.any(1).sum())))
            valid_BT = present[: len(kept.tokens_BT)]
            with model.eager(), ExitStack() as until:
                for own, block in zip(found, model.blocks, strict=True):
                    _listen(block, own, valid_BT, until)
                b = kept.to(device)
                valid = None if bool(valid_BT.all()) else valid_BT.to(device)
                model(b.tokens_BT, b.positions_BT, documents_BT=b.documents_BT, valid_BT=valid, last=1)
    finally:
        model.train(was_training)
    return [torch.cat(own) if own else None for own in found]


def _listen(block: nn.Module, own: list[Tensor], valid_BT: Tensor, until: ExitStack) -> None:
    ffn: Any = getattr(block, "ffn", None)
    if not hasattr(ffn, "asked"):
        return

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        own.append(ffn.asked(*args).cpu()[valid_BT])

    until.callback(ffn.register_forward_pre_hook(before).remove)


def stability(before: Asked, now: Asked, split: str) -> dict[str, float]:
    """{"val/moe/<layer>/stability": share of the choices now that were made before too}; pairs of a token and an
    expert, of which both have as many. A layer without experts, or without a choice, has none."""
    found = {}
    for layer, (old, new) in enumerate(zip(before, now, strict=True)):
        if old is not None and new is not None and bool(new.any()):
            found[name(layer, STABILITY, split)] = float((old & new).sum() / new.sum())
    return found
