"""The Triton kernels of norm_triton.py: each takes rows of x, or of alpha · x + branch, to their norm, or back.

A row that is not longer than a block stays in registers; the `long` ones read it twice, a block at a time, and join the
variances of blocks by pairs (Chan, Golub & LeVeque 1979).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _added(x, branch, total, x_at, branch_at, here, ALPHA: tl.constexpr, WIDE: tl.constexpr):
    """x, or alpha · x + branch rounded to the dtype of the sum."""
    value = tl.load(x + x_at, mask=here, other=0.0).to(WIDE)
    if branch is not None:
        value = value * ALPHA + tl.load(branch + branch_at, mask=here, other=0.0).to(WIDE)
        value = value.to(total.dtype.element_ty).to(WIDE)
    return value


@triton.jit
def _scaled(
    unit, weight, bias, normed, col, D,
    OFFSET: tl.constexpr, AFTER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """unit · (offset + weight) + bias; the product is taken after the cast where AFTER says so."""
    if AFTER:
        unit = unit.to(normed.dtype.element_ty).to(WIDE)
    value = unit * (tl.load(weight + col, mask=col < D, other=0.0).to(WIDE) + OFFSET)
    if bias is not None:
        value += tl.load(bias + col, mask=col < D, other=0.0).to(WIDE)
    return value.to(normed.dtype.element_ty)


@triton.jit
def forward(
    x, branch, weight, bias, total, normed, mean, rstd,
    N, D, x_step, branch_step,
    EPS: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, AFTER: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row, col = rows[:, None], tl.arange(0, BLOCK)[None, :]
    here = (row < N) & (col < D)
    value = _added(x, branch, total, row * x_step + col, row * branch_step + col, here, ALPHA, WIDE)
    if branch is not None:
        tl.store(total + row * D + col, value.to(total.dtype.element_ty), mask=here)
    if CENTRED:
        middle = tl.sum(value, 1) / D
        value = tl.where(here, value - middle[:, None], 0.0)
        tl.store(mean + rows, middle, mask=rows < N)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + EPS)
    tl.store(rstd + rows, scale, mask=rows < N)
    result = _scaled(value * scale[:, None], weight, bias, normed, col, D, OFFSET, AFTER, WIDE)
    tl.store(normed + row * D + col, result, mask=here)


@triton.jit
def forward_long(
    x, branch, weight, bias, total, normed, mean, rstd,
    N, D, x_step, branch_step,
    EPS: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, AFTER: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    middle, squares = tl.full([], 0.0, WIDE), tl.full([], 0.0, WIDE)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        here = col < D
        value = _added(x, branch, total, row * x_step + col, row * branch_step + col, here, ALPHA, WIDE)
        if branch is not None:
            tl.store(total + row * D + col, value.to(total.dtype.element_ty), mask=here)
        if CENTRED:
            n = tl.minimum(D - start, BLOCK)
            own = tl.sum(value, 0) / n
            value = tl.where(here, value - own, 0.0)
            off = own - middle
            squares += off * off * n * start / (start + n)
            middle += off * n / (start + n)
        squares += tl.sum(value * value, 0)
    scale = tl.rsqrt(squares / D + EPS)
    if CENTRED:
        tl.store(mean + row, middle)
    tl.store(rstd + row, scale)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        here = col < D
        value = _added(x, branch, total, row * x_step + col, row * branch_step + col, here, ALPHA, WIDE)
        result = _scaled((value - middle) * scale, weight, bias, normed, col, D, OFFSET, AFTER, WIDE)
        tl.store(normed + row * D + col, result, mask=here)


@triton.jit
def _unit(
    x, mean, rstd, rows, row, col, here, N, x_step,
    CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(the normed rows before the weight, 1/deviation of each)."""
    value = tl.load(x + row * x_step + col, mask=here, other=0.0).to(WIDE)
    scale = tl.load(rstd + rows, mask=rows < N, other=0.0)[:, None]
    if CENTRED:
        value -= tl.load(mean + rows, mask=rows < N, other=0.0)[:, None]
    return value * scale, scale


@triton.jit
def _pulled(d_normed, weight, grad_at, col, here, D, OFFSET: tl.constexpr, WIDE: tl.constexpr):
    """(gradient of the result, that of the normed rows before the weight)."""
    grad = tl.load(d_normed + grad_at, mask=here, other=0.0).to(WIDE)
    return grad, grad * (tl.load(weight + col, mask=col < D, other=0.0).to(WIDE) + OFFSET)


@triton.jit
def _put(
    d_x, d_branch, d_total, grad, at, total_at, here,
    ALPHA: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of the sum and what came for it besides, into those of its two parts."""
    if d_total is not None:
        grad += tl.load(d_total + total_at, mask=here, other=0.0).to(WIDE)
    tl.store(d_x + at, (grad * ALPHA).to(d_x.dtype.element_ty), mask=here)
    if d_branch is not None:
        tl.store(d_branch + at, grad.to(d_branch.dtype.element_ty), mask=here)


@triton.jit
def backward(
    d_normed, d_total, x, weight, mean, rstd,
    d_x, d_branch, d_weight, d_bias, N, D, grad_step, total_step, x_step,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    col = tl.arange(0, BLOCK)[None, :]
    for_weight, for_bias = tl.zeros([1, BLOCK], WIDE), tl.zeros([1, BLOCK], WIDE)
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row = rows[:, None]
        here = (row < N) & (col < D)
        unit, scale = _unit(x, mean, rstd, rows, row, col, here, N, x_step, CENTRED, WIDE)
        grad, inner = _pulled(d_normed, weight, row * grad_step + col, col, here, D, OFFSET, WIDE)
        d_sum = inner - unit * (tl.sum(inner * unit, 1) / D)[:, None]
        if CENTRED:
            d_sum -= (tl.sum(inner, 1) / D)[:, None]
        _put(d_x, d_branch, d_total, d_sum * scale, row * D + col, row * total_step + col, here, ALPHA, WIDE)
        for_weight += tl.sum(grad * unit, 0)[None, :]
        for_bias += tl.sum(grad, 0)[None, :]
    at = tl.program_id(0) * D + col
    tl.store(d_weight + at, for_weight, mask=col < D)
    if d_bias is not None:
        tl.store(d_bias + at, for_bias, mask=col < D)


@triton.jit
def backward_long(
    d_normed, d_total, x, weight, mean, rstd,
    d_x, d_branch, N, D, grad_step, total_step, x_step,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row = rows[:, None]
    along, flat = tl.zeros([1, 1], WIDE), tl.zeros([1, 1], WIDE)
    for start in range(0, D, BLOCK):
        col = (start + tl.arange(0, BLOCK))[None, :]
        here = col < D
        unit, _ = _unit(x, mean, rstd, rows, row, col, here, N, x_step, CENTRED, WIDE)
        _, inner = _pulled(d_normed, weight, row * grad_step + col, col, here, D, OFFSET, WIDE)
        along += (tl.sum(inner * unit, 1) / D)[:, None]
        flat += (tl.sum(inner, 1) / D)[:, None]
    for start in range(0, D, BLOCK):
        col = (start + tl.arange(0, BLOCK))[None, :]
        here = col < D
        unit, scale = _unit(x, mean, rstd, rows, row, col, here, N, x_step, CENTRED, WIDE)
        _, inner = _pulled(d_normed, weight, row * grad_step + col, col, here, D, OFFSET, WIDE)
        d_sum = inner - unit * along
        if CENTRED:
            d_sum -= flat
        _put(d_x, d_branch, d_total, d_sum * scale, row * D + col, row * total_step + col, here, ALPHA, WIDE)


@triton.jit
def backward_long_weight(
    d_normed, x, mean, rstd, d_weight, d_bias,
    N, D, grad_step, x_step,
    CENTRED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    for_weight, for_bias = tl.zeros([1, BLOCK], WIDE), tl.zeros([1, BLOCK], WIDE)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        rows = (n + tl.arange(0, 1)).to(tl.int64)
        row, here = rows[:, None], col < D
        unit, _ = _unit(x, mean, rstd, rows, row, col, here, N, x_step, CENTRED, WIDE)
        grad = tl.load(d_normed + row * grad_step + col, mask=here, other=0.0).to(WIDE)
        for_weight += grad * unit
        for_bias += grad
    at = tl.program_id(0) * D + col
    tl.store(d_weight + at, for_weight, mask=col < D)
    if d_bias is not None:
        tl.store(d_bias + at, for_bias, mask=col < D)
