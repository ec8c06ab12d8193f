"""Training FLOPs per token of a composed model, counted from its parameters.

    6 · N_matmul + 6 · L · H · C · T      (Kaplan et al. 2020, arXiv 2001.08361, with the causal half of attention)

N_matmul: parameters that multiply activations. The head always counts (a tied embedding once, as the head); looking up
an embedding or a position costs nothing. A window replaces T/2 by the mean number of keys a query attends to; an
attention of other shape than H heads of C channels says what a key costs (`context_flops`).
"""

from __future__ import annotations

from torch import nn

from lmlab.model.spec import Arch

LOOKUPS = ("embed.weight", "pos.weight")


def matmul_parameters(model: nn.Module, *, tied: bool) -> int:
    """Parameters in matrix products; `tied`: the embedding is also the head."""
    free = LOOKUPS[1:] if tied else LOOKUPS
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and name not in free)


def mean_context(seq_len: int, window: int | None) -> float:
    """Keys attended per query, minus one half: T/2 without a window."""
    w = min(window or seq_len, seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len - 0.5


def flops_per_token(model: nn.Module, arch: Arch) -> float:
    """Forward and backward FLOPs of one training token at `model.seq_len`, the causal half of attention."""
    return 6 * matmul_parameters(model, tied=arch.model.tie_embeddings) + _attention(arch)


def palm_flops_per_token(model: nn.Module, arch: Arch) -> float:
    """The same with attention not halved: 6N + 12·L·H·C·T (Chowdhery et al. 2022, arXiv 2204.02311), what MFU is of."""
    return 6 * matmul_parameters(model, tied=arch.model.tie_embeddings) + 2 * _attention(arch)


def _attention(arch: Arch) -> float:
    """Scores and their sum over values, forward and backward, by the pairs that each layer's window leaves."""
    m, attn = arch.model, arch.attn
    contexts = sum(mean_context(m.seq_len, attn.layer_window(layer)) for layer in range(m.n_layers))
    return 3 * attn.context_flops(m.d_model, m.n_heads) * contexts
