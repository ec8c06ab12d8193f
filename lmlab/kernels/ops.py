"""Ops: the frozen set of operations a model is built with. `resolve()` chooses them once; modules only call them.

Layouts are the legend's (lmlab/model/dims.py): activations (B, T, D), heads (B, T, H, C). Every implementation has the
same signature as the plain one beside it, and takes statistics in at least fp32.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor


class Attention(Protocol):
    """softmax(cap(scale·q·kᵀ) + bias) · v per head, in (B, T, H, C). `scores` is a kernels.scores.Scores, `rendered`
    what the backend's `Ops.render` made of it; see lmlab/kernels/attention.py."""

    def __call__(
        self,
        q_BTHC: Tensor,
        k_BSKC: Tensor,
        v_BSKC: Tensor,
        scores: Any,
        rendered: Any,
        *,
        scale: float,
        dropout: float = 0.0,
    ) -> Tensor: ...


class HeadLoss(NamedTuple):
    """Two scalars in at least fp32. objective: what backward runs on. nats: Σ weight · nats of the targets, without the
    z-loss; where there is none it is the objective itself, else it has no gradient."""

    objective: Tensor
    nats: Tensor


class LinearCrossEntropy(Protocol):
    """The loss of `cap(scale · hidden · headᵀ)`: lmlab/kernels/loss.py. A target of -100 counts nothing; columns from
    n_valid on (None = there are none) take no part."""

    def __call__(
        self,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        scale: float,
        softcap: Optional[float] = None,
        z_coef: float = 0.0,
        n_valid: Optional[int] = None,
    ) -> HeadLoss: ...


@dataclass(frozen=True)
class Ops:
    """Callables by role. `names` says which implementation stands behind each and why, for the run's manifest; `said`
    the same of all in one line."""

    embedding: Callable[[Tensor, Tensor], Tensor]  # (ids_BT, weight_VD) -> x_BTD
    rms_norm: Callable[[Tensor, Tensor, float, float], Tensor]  # (x, weight, eps, offset) -> normed
    layer_norm: Callable[[Tensor, Tensor, Optional[Tensor], float], Tensor]  # (x, weight, bias, eps) -> normed
    activations: Mapping[str, Callable[..., Tensor]]  # ffn name -> h(up, …its settings)
    gates: Mapping[str, Callable[..., Tensor]]  # gated ffn name -> h(gate, up, …its settings)
    rope: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]  # pairing -> rotate(x_BTHC, cos, sin)
    render: Mapping[str, Callable[..., Any]]  # backend -> (Scores, T, S, dtype, device) -> what it attends by
    attention: Mapping[str, Attention]  # backend -> attention
    attention_default: Optional[str]  # the backend of attn.backend=auto; None = a rule of mask, length and device
    fan: Callable[[Tensor, Sequence[Tensor], Optional[Sequence[Tensor]]], tuple[Tensor, ...]]  # x through many weights
    experts: Callable[
        [Tensor, Tensor, Optional[Tensor], Tensor], Tensor
    ]  # (x_MD, weight_EFD, bias_EF, ends_E) -> (M, F)
    linear_cross_entropy: LinearCrossEntropy
    names: Mapping[str, str]
    said: str
    device: torch.device
    dtype: torch.dtype
    # Each (residual, branch, …as above, alpha) -> (sum, normed); None = add, then the norm.
    add_rms_norm: Optional[Callable[..., tuple[Tensor, Tensor]]] = None
    add_layer_norm: Optional[Callable[..., tuple[Tensor, Tensor]]] = None
    residual_dtype: Optional[torch.dtype] = None  # of the sum that blocks add to; None = as it is computed

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        return self  # functions only: a copied model shares them


def capped(x: Tensor, cap: Optional[float]) -> Tensor:
    """cap · tanh(x / cap), a soft bound on scores or logits (Gemma 2 2024, 2408.00118); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


@functools.cache
def triton_installed() -> bool:
    """Whether there is what our own kernels are written in, and what torch compiles FlexAttention with on CUDA."""
    return importlib.util.find_spec("triton") is not None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics for values of `dtype`: at least fp32, so that float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)
