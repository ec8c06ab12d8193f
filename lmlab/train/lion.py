"""Lion: steps of one size in every coordinate, by the sign of a momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmlab.train.optim import groups
from lmlab.train.spec import Lion as Spec


class Lion(torch.optim.Optimizer):
    """W ← (1 − lr·decay)·W − lr · sign(β₁·m + (1 − β₁)·g), then m ← β₂·m + (1 − β₂)·g (Chen et al. 2023, 2302.06675).

    One moment instead of AdamW's two. Its steps are larger, so that lr is smaller and decay larger by the same factor.
    """

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        super().__init__(groups(list(model.named_parameters()), spec.weight_decay), {"lr": spec.lr})
        self.betas = spec.betas[0], spec.betas[1]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            grads: list[Tensor] = [p.grad for p in moved]
            for p in moved:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments: list[Tensor] = [self.state[p]["exp_avg"] for p in moved]
            steps = torch._foreach_lerp(moments, grads, 1 - self.betas[0])
            torch._foreach_sign_(steps)
            torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(moved, steps, alpha=-group["lr"])
            torch._foreach_lerp_(moments, grads, 1 - self.betas[1])
