"""Softmax attention over (B, T, H, C): dense (the scores in memory) and torch's SDPA.

Every backend is a pair: `render_…(scores, T, S, dtype, device)` makes what it needs of a Scores once per forward, and
`…(q, k, v, scores, rendered, scale=, dropout=)` attends. A query that sees nothing gives 0 and finite gradients. Query
head h reads key/value head h // (H / K). v may have other channels than q and k.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.ops import capped, wide
from lmlab.kernels.scores import Scores


class Rendered(NamedTuple):
    """mask: (1 or B, 1 or H, T, S), boolean (True = attend) or float to add, or None when nothing is hidden."""

    mask: Optional[Tensor] = None
    causal: bool = False  # instead of a mask
    sees_BT: Optional[Tensor] = None  # False where a query sees nothing (its row of the mask then hides nothing)


def render_dense(scores: Scores, T: int, S: int, dtype: torch.dtype, device: torch.device) -> Rendered:
    """A float mask in the dtype of the scores."""
    seen, sees_BT = _seen(scores, T, S, device)
    bias = scores.bias(range(T), range(S), dtype)
    if seen is None:
        return Rendered(bias)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device) if bias is None else bias
    return Rendered(bias.masked_fill(~seen, float("-inf")), sees_BT=sees_BT)


def render_sdpa(scores: Scores, T: int, S: int, dtype: torch.dtype, device: torch.device) -> Rendered:
    """No tensor at all for a plain causal mask; boolean without a bias. Its `is_causal` is top-left: for T = S only."""
    if scores.plain_causal() and not scores.biased and T == S:
        return Rendered(causal=True)
    if scores.biased:
        return render_dense(scores, T, S, dtype, device)
    seen, sees_BT = _seen(scores, T, S, device)
    return Rendered(seen, sees_BT=sees_BT)


def _seen(scores: Scores, T: int, S: int, device: torch.device) -> tuple[Optional[Tensor], Optional[Tensor]]:
    seen = scores.seen(range(T), range(S), T, S, device)
    if seen is None or scores.valid_BS is None:  # only padding can leave a query with nothing
        return seen, None
    sees = seen.any(-1, keepdim=True)
    return seen | ~sees, sees[:, 0, :, 0]


def dense(
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    scores: Scores,
    rendered: Rendered,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(scale · q·kᵀ) + mask) · v with the probabilities in memory.

    Scores and probabilities have q's dtype; only inside the softmax is the arithmetic fp32. In bf16 the output is
    0.33 % off float64 at scores of standard deviation 1 (SDPA: 0.19 %) and 0.9 % at 6 (0.17 %). Scores in fp32 more
    than double the cost on CPU (4096 tokens of 4 heads of 64 at 256 keys, one core: 23 → 55 ms).
    """
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    q = q_BTHC.transpose(1, 2).reshape(B * K, H // K * T, C)
    k, v = (x.transpose(1, 2).reshape(B * K, S, -1) for x in (k_BSKC, v_BSKC))
    product = torch.baddbmm(q.new_zeros(()), q, k.transpose(1, 2), beta=0, alpha=scale).view(B, H, T, S)
    softmax = plain_softmax if torch.compiler.is_compiling() else Softmax.apply
    probs = softmax(product, rendered.mask, scores.softcap)
    if dropout:
        probs = F.dropout(probs, dropout)
    out_BTHC = torch.bmm(probs.view(q.shape[0], -1, S), v).view(B, H, T, -1).transpose(1, 2)
    return _zeroed(out_BTHC, rendered)


def plain_softmax(product_BHTS: Tensor, mask: Optional[Tensor], cap: Optional[float]) -> Tensor:
    """softmax(cap · tanh(product / cap) + mask), the mask of any shape that broadcasts."""
    logits_BHTS = capped(product_BHTS, cap)
    return torch.softmax(logits_BHTS if mask is None else logits_BHTS + mask, -1)


class Softmax(torch.autograd.Function):
    """plain_softmax in the memory of the product, which is used up: no pass more than one over T×S for what it adds."""

    @staticmethod
    def forward(ctx: Any, product_BHTS: Tensor, mask: Optional[Tensor], cap: Optional[float]) -> Tensor:
        tanh_BHTS, logits_BHTS = None, product_BHTS
        if cap is not None:
            tanh_BHTS = _tanh_(product_BHTS, cap)
            logits_BHTS = tanh_BHTS * cap if mask is None else torch.add(mask, tanh_BHTS, alpha=cap)
        elif mask is not None:
            logits_BHTS = product_BHTS.add_(mask)
        probs_BHTS = torch.softmax(logits_BHTS, -1)
        ctx.save_for_backward(probs_BHTS, tanh_BHTS)
        ctx.mask_shape = None if mask is None else mask.shape
        return probs_BHTS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs_BHTS: Tensor) -> tuple[Tensor, Optional[Tensor], None]:
        probs_BHTS, tanh_BHTS = ctx.saved_tensors
        d_BHTS = torch._softmax_backward_data(dprobs_BHTS, probs_BHTS, -1, probs_BHTS.dtype)
        dmask = d_BHTS.sum_to_size(ctx.mask_shape) if ctx.needs_input_grad[1] else None
        if tanh_BHTS is not None:
            into = d_BHTS if dmask is None else torch.empty_like(d_BHTS)  # dmask may be d itself
            d_BHTS = torch.ops.aten.tanh_backward.grad_input(d_BHTS, tanh_BHTS, grad_input=into)
        return d_BHTS, dmask, None


def _tanh_(product_BHTS: Tensor, cap: float) -> Tensor:
    """tanh(product / cap) in place; a row at a time in fp32, for on a CPU that is twice as fast as tanh in bf16."""
    for product_HTS in product_BHTS:
        product_HTS.copy_(product_HTS.to(wide(product_HTS.dtype)).div(cap).tanh_())
    return product_BHTS


def sdpa(
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    scores: Scores,
    rendered: Rendered,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention; it knows no softcap."""
    assert scores.softcap is None, "SDPA has no softcap"
    q, k, v = (x.transpose(1, 2) for x in (q_BTHC, k_BSKC, v_BSKC))
    grouped = q.shape[1] != k.shape[1]
    if grouped and must_expand(rendered.mask, q.device):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=rendered.mask,
        dropout_p=dropout,
        is_causal=rendered.causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return _zeroed(out.transpose(1, 2), rendered)


def must_expand(mask: Optional[Tensor], device: torch.device) -> bool:
    """Whether k and v are repeated per query head: on CUDA no fused kernel takes grouped heads and a mask at once, and
    SDPA would fall to the unfused one without a word."""
    return mask is not None and device.type == "cuda"


def probabilities(q_BTHC: Tensor, k_BSKC: Tensor, scores: Scores, *, scale: float) -> tuple[Tensor, Tensor]:
    """(logits, probabilities), both (B, H, T, S) in at least fp32: what a look at attention shows. Hidden logits are
    −inf, the probabilities of a query that sees nothing are 0."""
    dtype, (T, H), (S, K) = wide(q_BTHC.dtype), q_BTHC.shape[1:3], k_BSKC.shape[1:3]
    k_BSHC = k_BSKC.repeat_interleave(H // K, 2)
    product = torch.einsum("bthc,bshc->bhts", q_BTHC.to(dtype), k_BSHC.to(dtype)) * scale
    logits = capped(product, scores.softcap)
    bias = scores.bias(range(T), range(S), dtype)
    logits = logits if bias is None else logits + bias
    seen = scores.seen(range(T), range(S), T, S, q_BTHC.device)
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    return logits, torch.softmax(logits, -1).nan_to_num(0.0)


def _zeroed(out_BTHC: Tensor, rendered: Rendered) -> Tensor:
    """0 where a query sees nothing."""
    if rendered.sees_BT is None:
        return out_BTHC
    return out_BTHC.masked_fill(~rendered.sees_BT[:, :, None, None], 0.0)
