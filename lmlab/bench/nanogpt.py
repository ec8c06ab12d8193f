"""A GPT-2 as nanoGPT writes it (Karpathy 2022): the code that people start from, for comparison only.

Packed q|k|v, torch's layer norm, SDPA with is_causal, exact GELU, a tied head, and cross-entropy over all logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.bench.shapes import Shape


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        D, self.H = shape.D, shape.H
        self.norm1, self.norm2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, shape.F, bias=False), nn.Linear(shape.F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.H, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(D, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """net(tokens, targets) -> mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(shape.V, shape.D), nn.Embedding(shape.T, shape.D)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.L))
        self.norm, self.head = nn.LayerNorm(shape.D, bias=False), nn.Linear(shape.D, shape.V, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets_BT.flatten())
