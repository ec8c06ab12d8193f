"""What a window of a length needs, before it is tried: about, and on the safe side."""

from __future__ import annotations

from lmlab.eval.long.nats import CHUNK, LOGITS, square
from lmlab.model.transformer import Transformer

LIVE_D, LIVE_F = 8, 3  # rows of width D, and of the widest projection, that live at once without gradients


def window_bytes(model: Transformer, length: int, kept_bytes: int) -> int:
    """Of one row; kept_bytes: its keys and values, where chunks go through a cache."""
    size = model.embed.weight.element_size()
    widest = max((p.shape[0] for b in model.blocks for p in b.parameters() if p.ndim == 2), default=model.dims.d_model)
    live = length * (LIVE_D * model.dims.d_model + LIVE_F * widest) * size
    scores = model.dims.n_heads * min(length, CHUNK) * length * 4 if square(model, length) else 0
    logits = 2 * 4 * max(LOGITS, model.dims.vocab_size)
    return live + 2 * scores + kept_bytes + logits
