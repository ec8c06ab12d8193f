"""Training FLOPs per token of a composed model, counted from its parameters.

    6 · N_matmul + 6 · L · H · C · T      (Kaplan et al. 2020, arXiv 2001.08361, with the causal half of attention)

N_matmul: parameters that multiply activations. The head always counts (a tied embedding once, as the head); looking up
an embedding or a position costs nothing. A window replaces T/2 by the mean number of keys a query attends to; an
attention of other shape than H heads of C channels says what a key costs (`context_flops`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lmlab.model.spec import Arch

LOOKUPS = ("embed.weight", "pos.weight")


def matmul_parameters(model: nn.Module, arch: Arch) -> float:
    """Parameters that a token meets in matrix products: of experts as many as it goes through. A tied embedding counts
    as the head."""
    free = LOOKUPS[1:] if arch.model.tie_embeddings else LOOKUPS
    return sum(
        p.numel() * share(arch, name)
        for name, p in model.named_parameters()
        if p.ndim >= 2 and name not in free and not name.endswith(".bias")
    )


def active_parameters(model: nn.Module, arch: Arch) -> float:
    """All parameters, of experts those that a token goes through; biases and embeddings too."""
    return sum(p.numel() * share(arch, name) for name, p in model.named_parameters())


def share(arch: Arch, name: str) -> float:
    """The part of a parameter that one token meets: of experts that are chosen, k of E (where capacity leaves choices
    out, no more than there is room for)."""
    moe: Any = arch.moe
    return moe.computed(arch.model.seq_len) / moe.n_experts if ".ffn.experts." in name else 1.0


def dispatch_bytes(arch: Arch, bytes_each: int) -> float:
    """Bytes of a token's rows on their way to its experts and back, over all layers: 2 · k · D · bytes in each that has
    experts. Choices that find no room are moved as well; experts that choose take as many as they have room for."""
    moe: Any = arch.moe
    layers = sum(moe.routes(layer) for layer in range(arch.model.n_layers))
    return layers * 2 * moe.gathered(arch.model.seq_len) * arch.model.d_model * bytes_each if layers else 0.0


def mean_context(seq_len: int, window: int | None) -> float:
    """Keys attended per query, minus one half: T/2 without a window."""
    w = min(window or seq_len, seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len - 0.5


def flops_per_token(model: nn.Module, arch: Arch) -> float:
    """Forward and backward FLOPs of one training token at `model.seq_len`, the causal half of attention."""
    return 6 * matmul_parameters(model, arch) + _attention(arch)


def palm_flops_per_token(model: nn.Module, arch: Arch) -> float:
    """The same with attention not halved: 6N + 12·L·H·C·T (Chowdhery et al. 2022, arXiv 2204.02311), what MFU is of."""
    return 6 * matmul_parameters(model, arch) + 2 * _attention(arch)


def _attention(arch: Arch) -> float:
    """Scores and their sum over values, forward and backward, by the pairs that each layer's window leaves."""
    m, attn = arch.model, arch.attn
    contexts = sum(mean_context(m.seq_len, attn.layer_window(layer)) for layer in range(m.n_layers))
    return 3 * attn.context_flops(m.d_model, m.n_heads) * contexts
