"""Cross-entropy of a linear head, from hidden states to a weighted sum of nats: plain, and in chunks of rows.

The chunked form makes the gradients while a chunk's logits live, so that neither the logits of the whole batch nor
their gradient ever stand in memory, and backward only multiplies by the incoming scalar.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.ops import capped, wide


def chunk_rows(device: torch.device, n_vocab: int) -> int:
    """Rows of logits that live at once.

    CPU: 512, measured on 2 cores at V=4096: 57 ms against 57 (256), 60 (1024), 138 (all at once, plain). Elsewhere
    every chunk also reads and writes the (V, D) gradient, which only long chunks pay off: 1 GiB of fp32 logits, but
    never under 4096 rows.
    """
    return 512 if device.type == "cpu" else max(4096, 2**30 // (4 * n_vocab))


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float] = None,
) -> Tensor:
    """Σ weight · nats of cap(scale · hidden · headᵀ), with all logits in memory in at least fp32."""
    logits_NV = capped(F.linear(hidden_ND, head_VD).to(wide(hidden_ND.dtype)) * scale, softcap)
    return (F.cross_entropy(logits_NV, targets_N, reduction="none") * weights_N).sum()


def chunked_linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float] = None,
) -> Tensor:
    """The same in chunks of rows; weights get no gradient."""
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or head_VD.requires_grad):
        return _Chunked.apply(hidden_ND, head_VD, targets_N, weights_N, scale, softcap)
    return _forward(hidden_ND, head_VD, targets_N, weights_N, scale, softcap, None, None)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        scale: float,
        softcap: Optional[float],
    ) -> Tensor:
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(head, dtype=wide(head.dtype)) if ctx.needs_input_grad[1] else None
        loss = _forward(hidden, head, targets, weights, scale, softcap, d_hidden, d_head)
        ctx.save_for_backward(d_hidden, None if d_head is None else d_head.to(head.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        d_hidden, d_head = ctx.saved_tensors
        return (*(None if d is None else _times(d, grad) for d in (d_hidden, d_head)), None, None, None, None)


def _times(d: Tensor, factor: Tensor) -> Tensor:
    """d · factor with one rounding. (torch would round a 0-d factor to d's dtype first.)"""
    return torch.mul(d, factor.reshape(1), out=torch.empty_like(d))


def _forward(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float],
    d_hidden_ND: Optional[Tensor],
    d_head_VD: Optional[Tensor],
) -> Tensor:
    """The loss; fills d_hidden and adds into d_head where they are given."""
    dtype = wide(hidden_ND.dtype)
    loss = torch.zeros((), dtype=dtype, device=hidden_ND.device)
    step = chunk_rows(hidden_ND.device, head_VD.shape[0])
    for start in range(0, hidden_ND.shape[0], step):
        rows = slice(start, start + step)
        hidden, target, weight = hidden_ND[rows], targets_N[rows, None], weights_N[rows, None].to(dtype)
        logits = F.linear(hidden, head_VD).to(dtype)
        logits = logits if scale == 1.0 else logits.mul_(scale)
        logits = logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
        picked, top = logits.gather(-1, target), logits.amax(-1, keepdim=True)
        probs = torch.softmax(logits, -1)
        nats = top - probs.amax(-1, keepdim=True).log() - picked  # log Σ exp = top − log of its own probability
        loss += (nats * weight).sum()
        if d_hidden_ND is None and d_head_VD is None:
            continue
        # The gradient of nats is probs − 1 at the target. Weight and scale act on the narrow side of the products, in
        # `dtype`: rounded by themselves they would be one common error of all gradients.
        d_logits = probs.scatter_(-1, target, torch.expm1(-nats))
        if softcap is not None:
            d_logits *= 1 - (logits / softcap).square_()
        d_logits = d_logits.to(hidden.dtype)
        if d_hidden_ND is not None:
            torch.mm(d_logits, head_VD, out=d_hidden_ND[rows]).mul_(weight * scale)
        if d_head_VD is not None:
            d_head_VD += d_logits.T @ (hidden * weight).to(hidden.dtype)
    if d_head_VD is not None and scale != 1.0:
        d_head_VD *= scale
    return loss
