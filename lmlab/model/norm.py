"""Norms over the last dimension, batch norm over the tokens, and none at all.

A norm is `norm(x, valid_BT) -> normed` and `norm.add(residual, branch, alpha, valid_BT) -> (sum, normed)`. Only batch
norm asks which tokens are valid; a norm that looks at one token at a time leaves `valid_BT` out of its signature.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from lmlab.kernels.norm import add
from lmlab.kernels.ops import Ops, wide
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.init import ZEROS, Rule


class Norm(nn.Module):
    """Base of the norms: `add` in its plain form, for parts without a fused one."""

    across_tokens: ClassVar[bool] = False  # True: it is also handed valid_BT

    def __call__(self, x: Tensor, valid_BT: Optional[Tensor] = None) -> Any:
        """The norm of x; which tokens are valid goes only to those that ask."""
        return super().__call__(x, valid_BT) if self.across_tokens else super().__call__(x)

    def add(
        self, residual: Tensor, branch: Tensor, alpha: float = 1.0, valid_BT: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor]:
        """alpha · residual + branch (in the residual's dtype), and its norm (in the weight's)."""
        total = add(residual, branch, alpha)
        return total, self(total, valid_BT)


class LayerNorm(Norm):
    """(x − mean) / √(var + eps) · weight + bias (Ba et al. 2016, 1607.06450); population variance."""

    def __init__(self, spec: specs.LayerNorm, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.eps, self.ops = spec.eps, ops
        self.weight = nn.Parameter(torch.ones(dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_model)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(
        self, residual: Tensor, branch: Tensor, alpha: float = 1.0, valid_BT: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor]:
        if self.ops.add_layer_norm is None:
            return super().add(residual, branch, alpha)
        return self.ops.add_layer_norm(residual, branch, self.weight, self.bias, self.eps, alpha)


class RMSNorm(Norm):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, 1910.07467); `width` serves q and k.

    With offset 1 the factor is 1 + weight, multiplied before the cast (Gemma 2024, 2403.08295).
    """

    def __init__(
        self, spec: specs.RMSNorm, dims: Dims, ops: Ops, layer: int | None = None, *, width: int | None = None
    ) -> None:
        super().__init__()
        self.eps, self.ops, self.offset = spec.eps, ops, spec.offset
        self.weight = nn.Parameter(torch.ones(dims.d_model if width is None else width))

    def init_rules(self) -> dict[str, Rule]:
        """A weight that is added to the offset starts at 0."""
        return {"weight": ZEROS} if self.offset else {}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)

    def add(
        self, residual: Tensor, branch: Tensor, alpha: float = 1.0, valid_BT: Optional[Tensor] = None
    ) -> tuple[Tensor, Tensor]:
        if self.ops.add_rms_norm is None:
            return super().add(residual, branch, alpha)
        return self.ops.add_rms_norm(residual, branch, self.weight, self.eps, alpha, self.offset)


class BatchNorm(Norm):
    """(x − mean) / √(var + eps) · weight + bias per channel over the valid tokens of the micro-batch (Ioffe & Szegedy
    2015, 1502.03167); the running mean and the running unbiased variance in evaluation. Here to show what is wrong
    with it: in training a token sees the later ones."""

    across_tokens = True
    known_failures: ClassVar[dict[str, str]] = {
        "causality in training": "in training the mean and the variance are taken over all tokens, later ones too",
        "micro-batches": "the statistics are those of a micro-batch, so that splitting a batch changes them",
    }
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, spec: specs.BatchNorm, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.eps, self.momentum = spec.eps, spec.momentum
        self.weight = nn.Parameter(torch.ones(dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_model)) if spec.bias else None
        self.register_buffer("running_mean", torch.zeros(dims.d_model))
        self.register_buffer("running_var", torch.ones(dims.d_model))

    def forward(self, x: Tensor, valid_BT: Optional[Tensor] = None) -> Tensor:
        dtype = wide(x.dtype)
        x_wide = x.to(dtype)
        mean, var = self.statistics(x_wide, valid_BT) if self.training else (self.running_mean, self.running_var)
        normed = (x_wide - mean.to(dtype)) * torch.rsqrt(var.to(dtype) + self.eps) * self.weight.to(dtype)
        return (normed if self.bias is None else normed + self.bias.to(dtype)).to(self.weight.dtype)

    def statistics(self, x_BTD: Tensor, valid_BT: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and population variance (D,) of the valid tokens; moves the running ones towards them."""
        weight_BT1 = torch.ones_like(x_BTD[..., :1]) if valid_BT is None else valid_BT[..., None].to(x_BTD.dtype)
        n = weight_BT1.sum().clamp_min(1)
        mean = (x_BTD * weight_BT1).sum((0, 1)) / n
        var = ((x_BTD - mean).square() * weight_BT1).sum((0, 1)) / n
        with torch.no_grad():
            unbiased = var * (n / (n - 1).clamp_min(1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, var


class DyT(Norm):
    """tanh(alpha · x) · weight + bias with one learned alpha: no statistics at all (Zhu et al. 2025, 2503.10622)."""

    def __init__(self, spec: specs.DyT, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.start = spec.alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.ones(dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_model)) if spec.bias else None

    def init_rules(self) -> dict[str, Rule]:
        return {"alpha": Rule(self.start, 0.0)}

    def forward(self, x: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        squashed = torch.tanh(self.alpha.to(dtype) * x) * self.weight.to(dtype)
        return (squashed if self.bias is None else squashed + self.bias.to(dtype)).to(self.weight.dtype)


class NoNorm(Norm):
    """x as it is, in the dtype that is computed in where the residual has another."""

    def __init__(self, spec: specs.NoNorm, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return x if self.ops.residual_dtype is None else x.to(self.ops.dtype)
