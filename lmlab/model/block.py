"""One layer: attention and ffn on the residual stream. A block knows roles, never variants.

Made by `Class(spec, dims, ops, layer, parts=...)`, called as `block(x_BTD, view, valid_BT, cache) -> (x_BTD, stats)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.kernels.norm import add
from lmlab.kernels.ops import Ops
from lmlab.model.dims import Dims
from lmlab.model.spec import BlockSpec


@dataclass(frozen=True)
class Parts:
    """How a block makes what stands in it, and the dropout of each residual branch."""

    norm: Callable[[], Any]
    attn: Callable[[], Any]
    ffn: Callable[[], Any]
    dropout: float


class Block(nn.Module):
    """Base: one attention, one ffn, a norm for each."""

    def __init__(self, spec: BlockSpec, dims: Dims, ops: Ops, layer: int | None = None, *, parts: Parts) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.ffn = parts.norm(), parts.attn(), parts.norm(), parts.ffn()
        self.dropout = parts.dropout

    def drop(self, branch: Tensor) -> Tensor:
        """Dropout of a residual branch, in training only."""
        return F.dropout(branch, self.dropout) if self.dropout and self.training else branch


class PreNorm(Block):
    """x + f(norm(x)) for attention, then for the ffn (Xiong et al. 2020, 2002.04745)."""

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        branch = self.attn(self.norm1(x_BTD), view, cache)
        x_BTD, normed = self.norm2.add(x_BTD, self.drop(branch))
        branch, stats = self.ffn(normed, valid_BT)
        return add(x_BTD, self.drop(branch)), stats


class PostNorm(Block):
    """norm(x + f(x)) for attention, then for the ffn (Vaswani et al. 2017, 1706.03762); no final norm follows."""

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        _, x_BTD = self.norm1.add(x_BTD, self.drop(self.attn(x_BTD, view, cache)))
        branch, stats = self.ffn(x_BTD, valid_BT)
        return self.norm2.add(x_BTD, self.drop(branch))[1], stats
