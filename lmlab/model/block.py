"""One layer: attention and ffn on the residual stream. A block knows roles, never variants.

Made by `Class(spec, dims, ops, layer, parts=...)`, called as `block(x_BTD, view, valid_BT, cache) -> (x_BTD, stats)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.kernels.norm import add
from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.init import Rule, xavier


@dataclass(frozen=True)
class Parts:
    """How a block makes what stands in it, and the dropout of each residual branch."""

    norm: Callable[[], Any]
    attn: Callable[[], Any]
    ffn: Callable[[], Any]
    dropout: float


class Block(nn.Module):
    """Base: one attention, one ffn, and the norms that `norms` names (by default one for each)."""

    norms: ClassVar[tuple[str, ...]] = ("norm1", "norm2")
    norm1: Any
    norm2: Any

    def __init__(self, spec: specs.BlockSpec, dims: Dims, ops: Ops, layer: int | None = None, *, parts: Parts) -> None:
        super().__init__()
        for name in self.norms:
            self.add_module(name, parts.norm())
        self.attn, self.ffn = parts.attn(), parts.ffn()
        self.dropout, self.ops = parts.dropout, ops

    def narrow(self, x_BTD: Tensor) -> Tensor:
        """The residual as a part reads it that has no norm before it."""
        return x_BTD if self.ops.residual_dtype is None else x_BTD.to(self.ops.dtype)

    def drop(self, branch: Tensor) -> Tensor:
        """Dropout of a residual branch, in training only."""
        return F.dropout(branch, self.dropout) if self.dropout and self.training else branch


class PreNorm(Block):
    """x + f(norm(x)) for attention, then for the ffn (Xiong et al. 2020, 2002.04745)."""

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        branch = self.attn(self.norm1(x_BTD, valid_BT), view, cache)
        x_BTD, normed = self.norm2.add(x_BTD, self.drop(branch), valid_BT=valid_BT)
        branch, stats = self.ffn(normed, valid_BT)
        return add(x_BTD, self.drop(branch)), stats


class PostNorm(Block):
    """norm(alpha·x + f(x)) for attention, then for the ffn; no final norm follows. alpha = 1: Vaswani et al. 2017,
    1706.03762."""

    alpha = 1.0

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        branch = self.drop(self.attn(x_BTD, view, cache))
        _, x_BTD = self.norm1.add(x_BTD, branch, self.alpha, valid_BT=valid_BT)
        branch, stats = self.ffn(x_BTD, valid_BT)
        return self.norm2.add(x_BTD, self.drop(branch), self.alpha, valid_BT=valid_BT)[1], stats


class DeepNorm(PostNorm):
    """Postnorm with alpha = (2N)^(1/4), and Xavier-normal matrices with gain beta = (8N)^(−1/4), 1 for what makes q and
    k (Wang et al. 2022, 2203.00555, decoder-only)."""

    def __init__(self, spec: specs.DeepNorm, dims: Dims, ops: Ops, layer: int | None = None, *, parts: Parts) -> None:
        super().__init__(spec, dims, ops, layer, parts=parts)
        self.alpha, self.beta = spec.factors(dims.n_layers)

    def init_rules(self) -> dict[str, Rule]:
        """Every matrix of attention and ffn, of every expert too, whatever they are; a router's is none of them. A
        part's own rules come before these."""
        held = [(n, p) for n, p in self.named_parameters() if p.ndim >= 2 and n.startswith(("attn.", "ffn."))]
        matrices = [(n, p) for n, p in held if not n.endswith((".bias", "router.weight"))]
        gain_1 = ("attn.q", "attn.k")
        return {n: xavier(p.shape, 1.0 if n.startswith(gain_1) else self.beta) for n, p in matrices}


class Sandwich(Block):
    """x + norm(f(norm(x))), a final norm at the end (Ding et al. 2021, 2105.13290; Gemma 2)."""

    norms = ("norm1", "norm1_out", "norm2", "norm2_out")
    norm1_out: Any
    norm2_out: Any

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        branch = self.norm1_out(self.attn(self.norm1(x_BTD, valid_BT), view, cache), valid_BT)
        x_BTD, normed = self.norm2.add(x_BTD, self.drop(branch), valid_BT=valid_BT)
        branch, stats = self.ffn(normed, valid_BT)
        return add(x_BTD, self.drop(self.norm2_out(branch, valid_BT))), stats


class Reordered(Block):
    """x + norm(f(x)), a final norm at the end (OLMo 2 2024, 2501.00656)."""

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        x_BTD = add(x_BTD, self.drop(self.norm1(self.attn(self.narrow(x_BTD), view, cache), valid_BT)))
        branch, stats = self.ffn(self.narrow(x_BTD), valid_BT)
        return add(x_BTD, self.drop(self.norm2(branch, valid_BT))), stats


class Parallel(Block):
    """x + attn(norm1(x)) + ffn(norm2(x)); with one norm, norm2 = norm1 (GPT-J 2021; NeoX: Black et al. 2022,
    2204.06745)."""

    def __init__(self, spec: specs.Parallel, dims: Dims, ops: Ops, layer: int | None = None, *, parts: Parts) -> None:
        self.norms = ("norm1", "norm2")[: spec.n_norms]  # type: ignore[misc]
        super().__init__(spec, dims, ops, layer, parts=parts)
        self.shared = spec.n_norms == 1

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        normed = self.norm1(x_BTD, valid_BT)
        branch, stats = self.ffn(normed if self.shared else self.norm2(x_BTD, valid_BT), valid_BT)
        x_BTD = add(x_BTD, self.drop(self.attn(normed, view, cache)))
        return add(x_BTD, self.drop(branch)), stats


class Simplified(Block):
    """beta_attn · attn(y) + beta_ffn · ffn(y), y = norm(x): no skip (SAS-P of He & Hofmann 2023, 2311.01906).

    Made for attn.weights=shaped, which starts as the identity and so stands in for the skip.
    """

    norms = ("norm1",)

    def __init__(self, spec: specs.Simplified, dims: Dims, ops: Ops, layer: int | None = None, *, parts: Parts) -> None:
        super().__init__(spec, dims, ops, layer, parts=parts)
        self.starts = {"beta_attn": Rule(spec.beta_attn, 0.0), "beta_ffn": Rule(spec.beta_ffn, 0.0)}
        self.beta_attn, self.beta_ffn = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def init_rules(self) -> dict[str, Rule]:
        return self.starts

    def forward(
        self, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor] = None, cache: Any = None
    ) -> tuple[Tensor, Any]:
        normed = self.norm1(x_BTD, valid_BT)
        attended = self.drop(self.attn(normed, view, cache))
        branch, stats = self.ffn(normed, valid_BT)
        return self.beta_attn * attended + self.beta_ffn * self.drop(branch), stats
