"""The bf16 twin: the fp32 model is drawn, saved and optimised; its copy in the compute dtype is run.

Autocast casts every weight at every use; the twin is refreshed once a step. Gradients of each micro-batch are added
into the fp32 `.grad` of the master, so that many micro-batches lose nothing.
"""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def cast_parameters(model: M, dtype: torch.dtype) -> M:
    """The model's parameters in `dtype`, in place. Buffers stay: a running average in bf16 would stick."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


class Twin(Generic[M]):
    """`model` is what to run; it is the master itself when the dtypes agree."""

    def __init__(self, master: M, dtype: torch.dtype) -> None:
        self.master = master
        self.masters: list[Tensor] = [p for p in master.parameters() if p.requires_grad]
        self.own = any(p.dtype != dtype for p in self.masters)
        self.model: M = cast_parameters(copy.deepcopy(master), dtype) if self.own else master
        self.copies: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self._buffers = list(zip(master.buffers(), self.model.buffers(), strict=True)) if self.own else []

    def grads(self) -> list[Tensor]:
        """The masters' gradients, those that are there."""
        return [p.grad for p in self.masters if p.grad is not None]

    def zero_grads(self) -> None:
        """Zeros in every master gradient (allocated once, then kept)."""
        if kept := self.grads():
            torch._foreach_zero_(kept)
        for p in self.masters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    @torch.no_grad()
    def refresh(self) -> None:
        """The master's values into the copy: once a step, after the optimizer."""
        if self.own:
            torch._foreach_copy_(self.copies, self.masters)
            for mine, theirs in self._buffers:
                theirs.copy_(mine)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the copy's gradients into the master's; buffers the forward changed go back."""
        if not self.own:
            return
        totals: list[Tensor] = []
        parts: list[Tensor] = []
        for master, copied in zip(self.masters, self.copies, strict=True):
            if master.grad is not None and copied.grad is not None:
                totals.append(master.grad)
                parts.append(copied.grad)
                copied.grad = None
        torch._foreach_add_(totals, parts)
        self.collect_buffers()

    @torch.no_grad()
    def collect_buffers(self) -> None:
        """The copy's buffers into the master's."""
        for mine, theirs in self._buffers:
            mine.copy_(theirs)
