"""Linear maps around the blocks: one input through several weights, and the embedding lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.ops import wide

FEW_ROWS = 64


def fan_apart(x: Tensor, weights: Sequence[Tensor], biases: Optional[Sequence[Tensor]] = None) -> tuple[Tensor, ...]:
    """x · Wᵀ (+ b) for each weight, one by one."""
    if biases is None:
        return tuple(F.linear(x, w) for w in weights)
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def fan_packed(x: Tensor, weights: Sequence[Tensor], biases: Optional[Sequence[Tensor]] = None) -> tuple[Tensor, ...]:
    """The same as one linear over the concatenated weights; nothing is stored packed. Few rows (decoding) are not worth
    the concatenation, which reads every weight once more."""
    if not torch.compiler.is_compiling() and x.numel() < FEW_ROWS * x.shape[-1]:
        return fan_apart(x, weights, biases)
    out = F.linear(x, torch.cat(tuple(weights)), None if biases is None else torch.cat(tuple(biases)))
    return out.split([w.shape[0] for w in weights], -1)


def embedding(ids: Tensor, weight_VD: Tensor) -> Tensor:
    """The rows of `weight_VD` at `ids`. Its gradient is summed in at least fp32: a frequent token's sum would stick at
    256 times its terms in bf16."""
    if wide(weight_VD.dtype) == weight_VD.dtype:
        return F.embedding(ids, weight_VD)
    return _WideSum.apply(ids, weight_VD)


class _WideSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.n_rows = weight_VD.shape[0]
        return F.embedding(ids, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(grad.to(wide(grad.dtype)), ids, ctx.n_rows, -1, False)
        return None, summed.to(grad.dtype)
