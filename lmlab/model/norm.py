"""Norms over the last dimension. A norm is `norm(x)` and `norm.add(residual, branch, alpha) -> (sum, normed)`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmlab.kernels.norm import add
from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims


class Norm(nn.Module):
    """Base of the norms: `add` in its plain form, for parts without a fused one."""

    def add(self, residual: Tensor, branch: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        """alpha · residual + branch (in the residual's dtype), and its norm (in the weight's)."""
        total = add(residual, branch, alpha)
        return total, self(total)


class LayerNorm(Norm):
    """(x − mean) / √(var + eps) · weight + bias (Ba et al. 2016, 1607.06450); population variance."""

    def __init__(self, spec: specs.LayerNorm, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.eps, self.ops = spec.eps, ops
        self.weight = nn.Parameter(torch.ones(dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_model)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, residual: Tensor, branch: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        if self.ops.add_layer_norm is None:
            return super().add(residual, branch, alpha)
        return self.ops.add_layer_norm(residual, branch, self.weight, self.bias, self.eps, alpha)


class RMSNorm(Norm):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, 1910.07467); `width` serves q and k of one head."""

    def __init__(
        self, spec: specs.RMSNorm, dims: Dims, ops: Ops, layer: int | None = None, *, width: int | None = None
    ) -> None:
        super().__init__()
        self.eps, self.ops = spec.eps, ops
        self.weight = nn.Parameter(torch.ones(dims.d_model if width is None else width))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, branch: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        if self.ops.add_rms_norm is None:
            return super().add(residual, branch, alpha)
        return self.ops.add_rms_norm(residual, branch, self.weight, self.eps, alpha)
