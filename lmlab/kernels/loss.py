"""Cross-entropy of a linear head, from hidden states to a weighted sum of nats: plain, and in chunks of rows.

The chunked form makes the gradients while a chunk's logits live, so that neither the logits of the whole batch nor
their gradient ever stand in memory, and backward only multiplies by the incoming scalar. The Triton form of the same
is lmlab/kernels/loss_triton.py.

    objective = Σ weight · (nats + z_coef · log²Σe^logit)        nats = log Σe^logit − logit of the target

The second term is the z-loss (Chowdhery et al. 2022, 2204.02311): it keeps the logits from drifting. All of this is of
the scaled and capped logits of the first n_valid columns; a padded vocabulary has more, which get zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.ops import HeadLoss, capped, wide

IGNORED = -100  # the target of a token that counts nothing, as torch has it


def chunk_rows(device: torch.device, n_vocab: int) -> int:
    """Rows of logits that live at once.

    CPU: 512, measured on 2 cores at V=4096: 57 ms against 57 (256), 60 (1024), 138 (all at once, plain). Elsewhere
    every chunk also reads and writes the (V, D) gradient, which only long chunks pay off: 1 GiB of fp32 logits, but
    never under 4096 rows.
    """
    return 512 if device.type == "cpu" else max(4096, 2**30 // (4 * n_vocab))


def block_rows(device: torch.device, n_vocab: int) -> int:
    """Rows of a chunk that are worked on at once. CPU: 2 MiB in fp32, which stay in a cache while a dozen passes go
    over them; measured without the products, of bf16 logits at V=4096 and V=50257: 33 and 321 ms, 37 and 424 ms for
    whole chunks."""
    return max(1, 2**19 // n_vocab) if device.type == "cpu" else chunk_rows(device, n_vocab)


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float] = None,
    z_coef: float = 0.0,
    n_valid: Optional[int] = None,
) -> HeadLoss:
    """The loss of cap(scale · hidden · headᵀ), with all logits in memory in at least fp32."""
    logits_NV = capped(F.linear(hidden_ND, head_VD[:n_valid]).to(wide(hidden_ND.dtype)) * scale, softcap)
    weights_N = counted(targets_N, weights_N)
    nats = (F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=IGNORED) * weights_N).sum()
    if z_coef == 0:
        return HeadLoss(nats, nats)
    return HeadLoss(nats + z_coef * (logits_NV.logsumexp(-1).square() * weights_N).sum(), nats.detach())


def counted(targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """The weights, 0 where the target is ignored."""
    return weights_N.masked_fill(targets_N == IGNORED, 0)


def chunked_linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float] = None,
    z_coef: float = 0.0,
    n_valid: Optional[int] = None,
) -> HeadLoss:
    """The same in chunks of rows; weights get no gradient."""
    return by_chunks(Blocks, hidden_ND, head_VD, targets_N, weights_N, Form(scale, softcap, z_coef, n_valid))


@dataclass(frozen=True)
class Form:
    """What stands between the product and the loss."""

    scale: float
    softcap: Optional[float]
    z_coef: float
    n_valid: Optional[int]


class Differentiator(Protocol):
    """What happens to a chunk between its products."""

    objective: Tensor
    nats: Tensor

    def __init__(self, form: Form, logits_NV: Tensor, wanted: bool) -> None:
        """logits_NV: what chunks will look like, of as many rows or fewer. wanted: whether gradients are."""

    def __call__(self, logits_NV: Tensor, target_N1: Tensor, weight_N1: Tensor) -> None:
        """Put the gradient of each row's objective, as if its weight were 1 and the logits not scaled, in place of its
        logits; add weight times what it comes to to `objective` and `nats`."""


def by_chunks(
    kind: type[Differentiator], hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, form: Form
) -> HeadLoss:
    """The loss, and in the same pass the gradients that are wanted."""
    rows = hidden, head, targets.masked_fill(targets == IGNORED, 0), counted(targets, weights)
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        objective, nats = _WithGradients.apply(kind, form, *rows)
    else:
        objective, nats = _fill(kind, form, rows, None, None)
    return HeadLoss(objective, nats if form.z_coef else objective)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Any, form: Form, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        d_head = torch.zeros_like(head, dtype=wide(head.dtype)) if ctx.needs_input_grad[3] else None
        objective, nats = _fill(kind, form, (hidden, head, targets, weights), d_hidden, d_head)
        ctx.save_for_backward(d_hidden, None if d_head is None else d_head.to(head.dtype))
        ctx.mark_non_differentiable(nats)
        return objective, nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Optional[Tensor], ...]:
        d_hidden, d_head = ctx.saved_tensors
        return (None, None, *(None if d is None else _times(d, grad) for d in (d_hidden, d_head)), None, None)


def _times(d: Tensor, factor: Tensor) -> Tensor:
    """d · factor with one rounding. (torch would round a 0-d factor to d's dtype first.)"""
    return torch.mul(d, factor.reshape(1), out=torch.empty_like(d))


def _fill(
    kind: type[Differentiator],
    form: Form,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    d_hidden_ND: Optional[Tensor],
    d_head_VD: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """(objective, nats); writes d_hidden and adds to d_head where they are given. Buffers are made once: fresh ones
    cost a page fault per 4 KiB in every chunk."""
    hidden_ND, head_VD, targets_N, weights_N = rows
    N, V, device, dtype = len(hidden_ND), len(head_VD), hidden_ND.device, wide(hidden_ND.dtype)
    step = max(1, min(N, chunk_rows(device, V)))
    logits_NV = hidden_ND.new_empty(step, V)
    differentiate = kind(form, logits_NV, d_hidden_ND is not None or d_head_VD is not None)
    part = summand = None
    if d_head_VD is not None and hidden_ND.dtype != dtype:
        part, summand = (torch.empty_like(d_head_VD, dtype=t) for t in (hidden_ND.dtype, dtype))
    for start in range(0, N, step):
        chunk = slice(start, min(start + step, N))
        hidden, weight, d_logits = hidden_ND[chunk], weights_N[chunk, None].to(dtype), logits_NV[: N - start]
        torch.mm(hidden, head_VD.T, out=d_logits)
        differentiate(d_logits, targets_N[chunk, None], weight)
        # Weight and scale act on the narrow side of the products, in `dtype`: rounded by themselves they would be one
        # common error of all gradients.
        if d_hidden_ND is not None:
            torch.mm(d_logits, head_VD, out=d_hidden_ND[chunk]).mul_(weight * form.scale)
        if d_head_VD is not None:
            weighted = (hidden * weight).to(hidden.dtype)
            if part is None or summand is None:
                d_head_VD.addmm_(d_logits.T, weighted)
            else:
                d_head_VD += summand.copy_(torch.mm(d_logits.T, weighted, out=part))
    if d_head_VD is not None and form.scale != 1.0:
        d_head_VD *= form.scale
    return differentiate.objective, differentiate.nats


class Blocks:
    """Plain torch, a few rows at a time, in at least fp32."""

    def __init__(self, form: Form, logits_NV: Tensor, wanted: bool) -> None:
        n_rows, V = min(len(logits_NV), block_rows(logits_NV.device, logits_NV.shape[1])), logits_NV.shape[1]
        self.form, self.wanted, self.buffer = form, wanted, logits_NV.new_empty(n_rows, V, dtype=wide(logits_NV.dtype))
        self.slope = None if form.softcap is None else torch.empty_like(self.buffer)
        self.objective, self.nats = self.buffer.new_zeros(()), self.buffer.new_zeros(())

    def __call__(self, logits_NV: Tensor, target_N1: Tensor, weight_N1: Tensor) -> None:
        parts = (t.split(len(self.buffer)) for t in (logits_NV, target_N1, weight_N1))
        for product, target, weight in zip(*parts, strict=True):
            same = product.dtype == self.buffer.dtype
            work = product if same else self.buffer[: len(product)].copy_(product)
            slope = self._shaped(work)
            self._differentiate(work, target, weight)
            if slope is not None and self.wanted:
                work.mul_(slope)
            if not same and self.wanted:
                product.copy_(work)

    def _shaped(self, logits: Tensor) -> Optional[Tensor]:
        """Scale, cap and cut the logits, in place; returns the cap's slope, 1 − tanh²."""
        slope, softcap = None, self.form.softcap
        if self.form.scale != 1.0:
            logits.mul_(self.form.scale)
        if self.slope is not None and softcap is not None:
            slope = self.slope[: len(logits)]
            logits.div_(softcap).tanh_()
            torch.mul(logits, logits, out=slope).neg_().add_(1)
            logits.mul_(softcap)
        if self.form.n_valid is not None:
            logits[:, self.form.n_valid :] = -torch.inf
        return slope

    def _differentiate(self, logits: Tensor, target: Tensor, weight: Tensor) -> None:
        picked, top = logits.gather(-1, target), logits.amax(-1, keepdim=True)
        probs = torch.softmax(logits, -1, out=logits)
        lse = top - probs.amax(-1, keepdim=True).log()  # log Σ exp = top − log of its own probability
        nats = ((lse - picked) * weight).sum()
        self.nats += nats
        self.objective += nats
        if z_coef := self.form.z_coef:
            self.objective += z_coef * (lse.square() * weight).sum()
        if not self.wanted:
            return
        d_target = torch.expm1(picked - lse)  # the gradient of nats is probs − 1 at the target
        if z_coef:
            d_target += 2 * z_coef * lse * (picked - lse).exp()
            probs.mul_(1 + 2 * z_coef * lse)
        probs.scatter_(-1, target, d_target)
