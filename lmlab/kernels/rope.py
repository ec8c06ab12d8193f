"""Rotation of channel pairs by position, in (B, T, H, C), before the heads are transposed.

cos and sin are (1 or B, T, 1, d/2); the first d channels of each head turn, the rest pass. Channel i turns with i + d/2
(`half`, as Llama and NeoX store it) or 2i with 2i + 1 (`interleaved`, as the paper writes it). The Triton half is in
rope_triton.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def fused_rotate_half(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_half` in fewer passes, forward and backward; the result lies in memory as (B, H, T, C)."""
    single = x_BTHC.shape[1] == 1 and not torch.is_grad_enabled()  # a token at a time: calls cost more than passes
    if torch.compiler.is_compiling() or single:
        return rotate_half(x_BTHC, cos, sin)
    return _RotateHalf.apply(x_BTHC, cos, sin)


class _RotateHalf(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn_half(x_BTHC, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHC: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn_half(grad_BTHC, cos, sin, -1.0), None, None


def _turn_half(x_BTHC: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    B, T, H, C = x_BTHC.shape
    half = cos.shape[-1]
    out_BTHC = x_BTHC.new_empty(B, H, T, C).transpose(1, 2)
    (a, b, rest), (to_a, to_b, to_rest) = (t.tensor_split((half, 2 * half), -1) for t in (x_BTHC, out_BTHC))
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=sign)
    to_rest.copy_(rest)
    return out_BTHC
