"""E ffns of one kind: pairs of tokens and experts in, the sums of what comes back out.

        tokens   a b c d          pairs sorted by expert        back
        experts  1 0 1 2    →     0: b   1: a c   2: d     →    y_b += w·ffn_0(b), …

What belongs to nobody has the expert E, lies behind all others, and gives 0.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from lmlab.kernels.experts import spans
from lmlab.kernels.ops import Ops
from lmlab.model import routing
from lmlab.model.dims import Dims
from lmlab.model.ffn import StackedLinear
from lmlab.registry import make


class Pairs(NamedTuple):
    """M rows for the experts: which token, which expert (E = nobody), and the factor on what comes back."""

    tokens_M: Tensor
    experts_M: Tensor
    weights_M: Tensor


class Experts(nn.Module):
    """E ffns of one kind. lmlab's own lie stacked, each weight (E, out, in); of others there are E modules."""

    def __init__(self, spec: Any, n_experts: int, dims: Dims, ops: Ops, layer: int | None) -> None:
        super().__init__()
        self.ops, self.n_experts = ops, n_experts
        stacked = stacks(spec)
        self.ffn = make(spec, dims, ops, layer, linear=partial(StackedLinear, n_experts)) if stacked else None
        self.each = None if stacked else nn.ModuleList(make(spec, dims, ops, layer) for _ in range(n_experts))

    def forward(self, x_ND: Tensor, pairs: Pairs) -> Tensor:
        """Σ of each token's pairs (N, D)."""
        order = pairs.experts_M.argsort(stable=True)
        ends_E = routing.counts(pairs.experts_M[None], self.n_experts)[0, : self.n_experts].cumsum(0).int()
        tokens_M = pairs.tokens_M.index_select(0, order)
        weights_M1 = pairs.weights_M.index_select(0, order)[:, None].to(x_ND.dtype)
        out_MD = self.rows(x_ND.index_select(0, tokens_M), weights_M1, ends_E)
        return torch.zeros_like(x_ND).index_add(0, tokens_M, out_MD)

    def rows(self, x_MD: Tensor, weights_M1: Tensor, ends_E: Tensor) -> Tensor:
        """weight · ffn_e(x) of each row."""
        if self.ffn is not None:
            out_MD: Tensor = self.ffn.weighted(x_MD, weights_M1, partial(_through, self.ops, ends_E))
            return out_MD
        parts = []
        for ffn, (start, end) in zip(self.each or (), spans(ends_E, len(x_MD)), strict=True):
            parts.append(ffn(x_MD[None, start:end], None)[0][0])
        parts.append(torch.zeros_like(x_MD[end:]))
        return torch.cat(parts) * weights_M1


def stacks(spec: Any) -> bool:
    """Whether the ffn can be built of stacked weights."""
    module, _, name = spec.build.partition(":")
    return module == "lmlab.model.ffn" and name == "FFN"


def _through(ops: Ops, ends_E: Tensor, linear: StackedLinear, x_MD: Tensor) -> Tensor:
    return ops.experts(x_MD, linear.weight, linear.bias, ends_E)


def expert_spec(spec: Any, width: Optional[int]) -> Any:
    """The ffn's spec at an expert's width."""
    return spec if width is None else dataclasses.replace(spec, d_ff=width, mult=None, multiple_of=None)
