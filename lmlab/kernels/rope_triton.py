"""Rotation of channel pairs by position in Triton, both pairings; the formulas are in rope.py.

x is read as it lies, whatever its strides; the result is (B, T, H, C) in one piece. A program takes some heads of some
tokens. The gradient is the rotation by −sin. Compiled code fuses the same pass: against it this is not yet measured on
a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.launch import operator, power_of_two, rows_of_tile, wide_of


@triton.jit
def _turn(
    x, cos, sin, out, N, T, H,
    x_b, x_t, x_h, x_c, cos_b, cos_t, sin_b, sin_t,
    SIGN: tl.constexpr, INTERLEAVED: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    token, head = row // H, row % H
    b, t = token // T, token % T
    at, to = b * x_b + t * x_t + head * x_h, row * C
    pair = tl.arange(0, PAIRS)[None, :]
    here = (row < N) & (pair < HALF)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    c = tl.load(cos + b * cos_b + t * cos_t + pair, mask=here, other=0.0).to(WIDE)
    s = tl.load(sin + b * sin_b + t * sin_t + pair, mask=here, other=0.0).to(WIDE) * SIGN
    left = tl.load(x + at + first * x_c, mask=here, other=0.0).to(WIDE)
    right = tl.load(x + at + second * x_c, mask=here, other=0.0).to(WIDE)
    tl.store(out + to + first, (left * c - right * s).to(out.dtype.element_ty), mask=here)
    tl.store(out + to + second, (right * c + left * s).to(out.dtype.element_ty), mask=here)
    if 2 * HALF < C:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        there = (row < N) & (rest < C)
        tl.store(out + to + rest, tl.load(x + at + rest * x_c, mask=there), mask=there)


@operator("out")
def _rope(x_BTHC: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float, interleaved: bool) -> None:
    B, T, H, C = x_BTHC.shape
    half = cos.shape[-1]
    if not x_BTHC.numel():
        return
    pairs, rest = power_of_two(half), power_of_two(max(1, C - 2 * half))
    tile = rows_of_tile(2 * pairs)
    cos, sin = cos.contiguous(), sin.contiguous()
    shared = cos.shape[0] == 1  # one row of positions serves the batch
    steps = (0 if shared else cos.stride(0), cos.stride(1), 0 if shared else sin.stride(0), sin.stride(1))
    _turn[(triton.cdiv(B * T * H, tile),)](
        x_BTHC, cos, sin, out, B * T * H, T, H, *x_BTHC.stride(), *steps,
        SIGN=sign, INTERLEAVED=interleaved, C=C, HALF=half,
        WIDE=wide_of(x_BTHC.dtype), ROWS=tile, PAIRS=pairs, REST=rest,
    )  # fmt: skip


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHC: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty(x_BTHC.shape, dtype=x_BTHC.dtype, device=x_BTHC.device)
        _rope(x_BTHC, cos, sin, out, 1.0, interleaved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTHC: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        d_x = torch.empty(grad_BTHC.shape, dtype=grad_BTHC.dtype, device=grad_BTHC.device)
        _rope(grad_BTHC, cos, sin, d_x, -1.0, ctx.interleaved)
        return d_x, None, None, None


def triton_rotate_half(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_half`."""
    return _Rotate.apply(x_BTHC, cos, sin, False)


def triton_rotate_interleaved(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_interleaved`."""
    return _Rotate.apply(x_BTHC, cos, sin, True)
