"""Rotation of channel pairs by position, in (B, T, H, C), before the heads are transposed.

cos and sin are (1 or B, T, 1, d/2); the first d channels of each head turn, the rest pass. Channel i turns with i + d/2
(`half`, as Llama and NeoX store it) or 2i with 2i + 1 (`interleaved`, as the paper writes it).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for a = channel i, b = channel i + d/2."""
    half = cos.shape[-1]
    a, b, rest = x_BTHC.tensor_split((half, 2 * half), -1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(turned if rest.shape[-1] == 0 else [*turned, rest], -1)


def rotate_interleaved(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for a = channel 2i, b = channel 2i + 1."""
    width = 2 * cos.shape[-1]
    pairs = x_BTHC[..., :width].unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return turned if width == x_BTHC.shape[-1] else torch.cat((turned, x_BTHC[..., width:]), -1)
