"""Linear maps around the blocks: one input through several weights, and the embedding lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def fan_apart(x: Tensor, weights: Sequence[Tensor], biases: Optional[Sequence[Tensor]] = None) -> tuple[Tensor, ...]:
    """x · Wᵀ (+ b) for each weight, one by one."""
    if biases is None:
        return tuple(F.linear(x, w) for w in weights)
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def fan_packed(x: Tensor, weights: Sequence[Tensor], biases: Optional[Sequence[Tensor]] = None) -> tuple[Tensor, ...]:
    """The same as one linear over the concatenated weights; nothing is stored packed."""
    out = F.linear(x, torch.cat(tuple(weights)), None if biases is None else torch.cat(tuple(biases)))
    return out.split([w.shape[0] for w in weights], -1)


def embedding(ids: Tensor, weight_VD: Tensor) -> Tensor:
    """The rows of `weight_VD` at `ids`."""
    return F.embedding(ids, weight_VD)
