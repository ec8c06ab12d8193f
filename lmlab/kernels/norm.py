"""RMSNorm and LayerNorm, alone and with the residual addition before them. Statistics in at least fp32.

The result has the weight's dtype; of the adding forms the sum keeps the residual's. On the CPU torch has no fused
RMSNorm, and its bf16 LayerNorm sums the gradients of weight and bias in bf16 (over 4096 rows they are 6 % and 74 %
off): `_RMS` and `_Layer` build both from the passes torch does fuse there. Under torch.compile the plain formulas are
fused by the compiler. The Triton half is in norm_triton.py.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.ops import wide

FEW_ROWS = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / √(mean(x²) + eps) · weight; the weight multiplies after the cast, as in Llama. With an offset the factor is
    offset + weight, before the cast (Gemma)."""
    x_wide = x.to(wide(x.dtype))
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (weight.to(x_wide.dtype) + offset)).to(weight.dtype)
    return normed.to(weight.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> Tensor:
    """(x − mean) / √(population variance + eps) · weight + bias."""
    dtype = wide(x.dtype)
    wide_bias = None if bias is None else bias.to(dtype)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), wide_bias, eps).to(weight.dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm` in few passes: `_RMS` on the CPU, torch's own elsewhere and where calls cost more than passes."""
    if offset:
        dtype = wide(x.dtype)
        return fused_rms_norm(x.to(dtype), weight.to(dtype) + offset, eps).to(weight.dtype)
    if torch.compiler.is_compiling() or x.dtype != weight.dtype:
        return rms_norm(x, weight, eps)
    few = not torch.is_grad_enabled() and x.numel() < FEW_ROWS * x.shape[-1]
    if few or x.device.type != "cpu":
        return torch_rms_norm(x, weight, eps)
    return _RMS.apply(x, weight, eps)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's kernel; given the weight it would multiply before the cast."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> Tensor:
    """`layer_norm` with the weight's gradient summed in fp32 on the CPU too."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return layer_norm(x, weight, bias, eps)
    return _Layer.apply(x, weight, bias, eps) if x.dtype == weight.dtype else layer_norm(x, weight, bias, eps)


def add(residual: Tensor, branch: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha · residual + branch, in the residual's dtype."""
    total = residual + branch if alpha == 1.0 else torch.add(branch, residual, alpha=alpha)
    return total.to(residual.dtype)


def add_rms_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, eps: float, alpha: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(`add`, its `rms_norm`)."""
    total = add(residual, branch, alpha)
    return total, rms_norm(total, weight, eps, offset)


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(`add`, its `layer_norm`)."""
    total = add(residual, branch, alpha)
    return total, layer_norm(total, weight, bias, eps)


class _RMS(torch.autograd.Function):
    """One pass each for the mean square, the scaling by row (batch norm's inference kernel, rows as channels) and the
    weight; backward is layer norm's kernel at mean 0, with its −mean(grad·weight) added back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        square_N = torch.linalg.vector_norm(x_ND, dim=-1, dtype=wide(x.dtype)).square_().mul_(1 / x.shape[-1])
        zeros_N = torch.zeros_like(square_N)
        normed = torch.native_batch_norm(x_ND[None], None, None, zeros_N, square_N, False, 0.0, eps)[0].view_as(x)
        ctx.save_for_backward(x_ND, weight, square_N.add_(eps).rsqrt_())
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x_ND, weight, rstd_N = ctx.saved_tensors
        grad_ND = grad.reshape(x_ND.shape)
        weight_wide, D = weight.to(rstd_N.dtype), x_ND.shape[-1]
        mean = torch.zeros_like(rstd_N)[:, None]
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_ND, x_ND, [D], mean, rstd_N[:, None], weight_wide, None, [True, False, False]
        )
        d_x += (torch.mv(grad_ND, weight) * rstd_N).mul_(1 / D).to(d_x.dtype)[:, None]
        d_weight = (rstd_N.to(x_ND.dtype)[None] @ (grad_ND * x_ND))[0] if ctx.needs_input_grad[1] else None
        return d_x.view(grad.shape), d_weight, None


class _Layer(torch.autograd.Function):
    """torch's kernels for the output and for x's gradient, matrix products for the weight's and the bias's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        wide_bias = None if bias is None else bias.float()
        y, mean, rstd = torch.native_layer_norm(x_ND, [x.shape[-1]], weight.float(), wide_bias, eps)
        ctx.save_for_backward(x_ND, weight, mean, rstd)
        return y.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x_ND, weight, mean, rstd = ctx.saved_tensors
        grad_ND = grad.reshape(x_ND.shape)
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_ND, x_ND, [x_ND.shape[-1]], mean, rstd, weight.float(), None, [True, False, False]
        )
        rows = torch.cat((mean * rstd, torch.ones_like(rstd)), -1).to(grad.dtype).T
        shift, d_bias = rows @ grad_ND
        d_weight = (rstd.to(grad.dtype).T @ (grad_ND * x_ND))[0] - shift
        return d_x.view(grad.shape), d_weight, d_bias if ctx.needs_input_grad[2] else None, None
