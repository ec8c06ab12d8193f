"""RMSNorm and LayerNorm in Triton, alone and with the residual addition before them; the formulas are in norm.py.

One pass forward: a row is read once (twice where it is longer than WHOLE), added, normed and written; its mean and
1/deviation are kept in at least fp32, the variance is that of the centred row. One pass backward for x; the gradients
of weight and bias are summed per program, then over programs. Compiled code fuses the same from about 768 channels on:
against it this is not yet measured on a GPU. The kernels are in norm_passes.py.

Dropout of the branch is not fused, because its mask comes from torch's generator: drawn in here it would be another
mask than that of `kernels=reference`, and two runs of one seed would differ by their kernels.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels import norm_passes as passes
from lmlab.kernels.launch import as_rows, operator, power_of_two, rows_of_tile, warps, wide_of
from lmlab.kernels.ops import wide

WHOLE = 8192  # a row of at most so many stays in registers
PIECE = 4096  # of a longer one is held at once
PARTS = 256  # programs that sum the gradients of weight and bias


@operator("total", "normed", "mean", "rstd")
def _norm_forward(
    x: Tensor, branch: Optional[Tensor], weight: Tensor, bias: Optional[Tensor],
    total: Optional[Tensor], normed: Tensor, mean: Optional[Tensor], rstd: Tensor,
    eps: float, alpha: float, offset: float,
) -> None:  # fmt: skip
    N, D = x.shape
    if not x.numel():
        return
    long, branch_step = D > WHOLE, 0 if branch is None else branch.stride(0)
    block = PIECE if long else power_of_two(D)
    tile = 1 if long else rows_of_tile(block)
    kernel: Any = passes.forward_long if long else passes.forward
    kernel[(triton.cdiv(N, tile),)](
        x, branch, weight, bias, total, normed, mean, rstd, N, D, x.stride(0), branch_step,
        EPS=eps, ALPHA=alpha, OFFSET=offset, CENTRED=mean is not None, AFTER=mean is None and offset == 0,
        WIDE=wide_of(rstd.dtype), ROWS=tile, BLOCK=block, num_warps=warps(tile * block),
    )  # fmt: skip


@operator("d_x", "d_branch", "d_weight", "d_bias")
def _norm_backward(
    d_normed: Tensor, d_total: Optional[Tensor], x: Tensor, weight: Tensor, mean: Optional[Tensor], rstd: Tensor,
    d_x: Tensor, d_branch: Optional[Tensor], d_weight: Tensor, d_bias: Optional[Tensor], alpha: float, offset: float,
) -> None:  # fmt: skip
    """d_weight and d_bias are (programs, D)."""
    (N, D), parts = x.shape, len(d_weight)
    if not x.numel():
        return
    total_step = 0 if d_total is None else d_total.stride(0)
    block = PIECE if D > WHOLE else power_of_two(D)
    tile = rows_of_tile(block)
    more = {"CENTRED": mean is not None, "WIDE": wide_of(rstd.dtype), "BLOCK": block, "num_warps": warps(tile * block)}
    given = d_normed, d_total, x, weight, mean, rstd, d_x, d_branch
    steps = d_normed.stride(0), total_step, x.stride(0)
    if D <= WHOLE:
        passes.backward[(parts,)](*given, d_weight, d_bias, N, D, *steps, ALPHA=alpha, OFFSET=offset, ROWS=tile, **more)
        return
    passes.backward_long[(N,)](*given, N, D, *steps, ALPHA=alpha, OFFSET=offset, **more)
    sums = d_normed, x, mean, rstd, d_weight, d_bias, N, D, d_normed.stride(0), x.stride(0)
    passes.backward_long_weight[(parts, triton.cdiv(D, block))](*sums, **more)


class _Norm(torch.autograd.Function):
    """(alpha · x + branch, its norm), or the norm of x alone. RMSNorm where `centred` is False."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Optional[Tensor], weight: Tensor, bias: Optional[Tensor],
        eps: float, alpha: float, offset: float, centred: bool,
    ) -> Any:  # fmt: skip
        x_ND = as_rows(x)
        branch_ND = None if branch is None else as_rows(branch)
        normed = torch.empty(x_ND.shape, dtype=weight.dtype, device=x.device)
        total = None if branch is None else torch.empty(x_ND.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(len(x_ND), dtype=wide(x.dtype), device=x.device)
        mean = torch.empty_like(rstd) if centred else None
        _norm_forward(x_ND, branch_ND, weight, bias, total, normed, mean, rstd, eps, alpha, offset)
        ctx.save_for_backward(x_ND if total is None else total, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.alpha, ctx.offset, ctx.biased = alpha, offset, bias is not None
        ctx.branch = None if branch is None else branch.dtype
        return normed.view(x.shape) if total is None else (total.view(x.shape), normed.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        x_ND, weight, mean, rstd = ctx.saved_tensors
        d_normed, d_total = grads[-1], grads[0] if len(grads) == 2 else None
        shape = next(g.shape for g in grads if g is not None)
        d_normed_ND = torch.zeros_like(x_ND, dtype=weight.dtype) if d_normed is None else as_rows(d_normed)
        d_x = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
        apart = ctx.branch is not None and (ctx.alpha != 1.0 or ctx.branch != x_ND.dtype)
        d_branch = torch.empty_like(d_x, dtype=ctx.branch) if apart else None
        N, D = x_ND.shape
        parts = max(1, min(PARTS, triton.cdiv(N, rows_of_tile(power_of_two(D)))))
        d_weight = torch.zeros(parts, D, dtype=rstd.dtype, device=rstd.device)
        d_bias = torch.zeros_like(d_weight) if ctx.biased else None
        d_total_ND = None if d_total is None else as_rows(d_total)
        _norm_backward(
            d_normed_ND, d_total_ND, x_ND, weight, mean, rstd, d_x, d_branch, d_weight, d_bias, ctx.alpha, ctx.offset
        )
        to_x = d_x.view(shape)
        to_branch = None if ctx.branch is None else to_x if d_branch is None else d_branch.view(shape)
        to_bias = None if d_bias is None else d_bias.sum(0).to(weight.dtype)
        return to_x, to_branch, d_weight.sum(0).to(weight.dtype), to_bias, None, None, None, None


# ---------------------------------------------------------------- what Ops gets


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm`."""
    return _Norm.apply(x, None, weight, None, eps, 1.0, offset, False)


def triton_layer_norm(x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> Tensor:
    """`layer_norm`."""
    return _Norm.apply(x, None, weight, bias, eps, 1.0, 0.0, True)


def triton_add_rms_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, eps: float, alpha: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`."""
    return _Norm.apply(residual, branch, weight, None, eps, alpha, offset, False)


def triton_add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm`."""
    return _Norm.apply(residual, branch, weight, bias, eps, alpha, 0.0, True)
