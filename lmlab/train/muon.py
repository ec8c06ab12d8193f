"""Muon: matrices inside the blocks move by an orthogonal step, everything else by AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.train.device import bf16_is_native
from lmlab.train.optim import adamw_of, groups
from lmlab.train.spec import Muon as Spec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steepest at 0, singular values end between 0.7 and 1.2
EPS = 1e-7
CHUNK = 2**26  # numbers that are made orthogonal at once


class Muon(torch.optim.Optimizer):
    """m ← momentum·m + (1 − momentum)·g, u = m, or with nesterov momentum·m + (1 − momentum)·g once more, and
    W ← (1 − lr·decay)·W − lr · 0.2·√max(out, in) · orthogonal(u), for each matrix of attention and ffn by itself: q, k
    and v apart, each expert's apart (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    2502.16982, whose factor gives the step the size of AdamW's, so that both halves share lr and decay).

    Embedding, head, norms, biases and routers are AdamW's. Equal shapes are taken together; torch.optim.Muon is the
    same, a matrix at a time.
    """

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        named = list(model.named_parameters())
        own = [p for n, p in named if spec.moves(n, p.ndim)]
        super().__init__([{"params": own, "lr": spec.lr, "weight_decay": spec.weight_decay}], {})
        self.spec = spec
        self.dtype = torch.bfloat16 if own and bf16_is_native(own[0].device) else torch.float32
        rest = groups([(n, p) for n, p in named if not spec.moves(n, p.ndim)], spec.weight_decay)
        self.adamw = adamw_of(rest, spec.lr, spec.betas, spec.eps)
        self.adamw.state = self.state  # one state and one list of groups, as with any other optimizer
        self.param_groups += self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.adamw.step()
        group, spec = self.param_groups[0], self.spec
        moved = [p for p in group["params"] if p.grad is not None]
        if not moved:
            return
        grads: list[Tensor] = [p.grad for p in moved]
        for p in moved:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta: list[Tensor] = [self.state[p]["momentum_buffer"] for p in moved]
        torch._foreach_lerp_(momenta, grads, 1 - spec.momentum)
        updates = torch._foreach_lerp(grads, momenta, spec.momentum) if spec.nesterov else momenta
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        for some in _alike(moved):
            made = orthogonal(_stacked([updates[i] for i in some]).to(self.dtype), spec.ns_steps)
            factor = 0.2 * max(made.shape[1:]) ** 0.5
            parts = made.split([max(1, moved[i].shape[:-2].numel()) for i in some])
            steps = [part.view_as(moved[i]).to(moved[i].dtype) for part, i in zip(parts, some, strict=True)]
            torch._foreach_add_([moved[i] for i in some], steps, alpha=-group["lr"] * factor)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """(N, out, in): matrices and stacks of them in one stack."""
    return torch.cat([m.reshape(-1, *m.shape[-2:]) for m in matrices])


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of those whose matrices have one shape, as many at a time as CHUNK numbers, or one."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, t in enumerate(tensors):
        by_shape.setdefault(t.shape[-2:], []).append(i)
    for places in by_shape.values():
        some: list[int] = []
        for i in places:
            if some and sum(tensors[j].numel() for j in [*some, i]) > CHUNK:
                yield some
                some = []
            some.append(i)
        yield some


def orthogonal(x_NOI: Tensor, steps: int) -> Tensor:
    """Each matrix with its singular values brought near 1, U·Vᵀ of U·S·Vᵀ, by the Newton-Schulz iteration of Jordan et
    al. 2024; zeros stay zeros."""
    tall = x_NOI.shape[1] > x_NOI.shape[2]
    x = x_NOI.mT if tall else x_NOI
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
