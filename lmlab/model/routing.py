"""Who goes where: pure functions from router scores to experts, places and losses.

Tokens stand in groups, G of S each (a row, or all of a batch); a token that does not count (padding) asks for nobody.
Ids of experts are 0 … E−1, and E is nobody.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def limited(choice_GSE: Tensor, n_groups: int, n_limited: int) -> Tensor:
    """The choice with −inf outside each token's `n_limited` best of `n_groups` equal groups of experts; a group is as
    good as the sum of its two best (DeepSeek-AI 2024, 2412.19437)."""
    by_group = choice_GSE.unflatten(-1, (n_groups, -1))
    value = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
    best = value.topk(n_limited, -1).indices
    outside = torch.ones_like(value, dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(outside[..., None], float("-inf")).flatten(-2)


def counts(experts_GM: Tensor, n_experts: int) -> Tensor:
    """(G, E + 1): how many ask for each expert, nobody last."""
    found = torch.zeros(len(experts_GM), n_experts + 1, dtype=torch.long, device=experts_GM.device)
    return found.scatter_add_(1, experts_GM, torch.ones_like(experts_GM))


def places(experts_GM: Tensor, n_experts: int, value_GM: Optional[Tensor] = None) -> Tensor:
    """(G, M): how many that ask for the same expert come before each, by order or by the largest value."""
    order = None if value_GM is None else value_GM.argsort(stable=True, dim=1, descending=True)
    experts = experts_GM if order is None else experts_GM.gather(1, order)
    sorted_GM, by_expert = experts.sort(stable=True, dim=1)
    per_expert = counts(experts_GM, n_experts)
    start = per_expert.cumsum(1) - per_expert
    place = torch.arange(experts_GM.shape[1], device=experts_GM.device) - start.gather(1, sorted_GM)
    where = by_expert if order is None else order.gather(1, by_expert)
    return torch.empty_like(place).scatter_(1, where, place)


@torch.library.custom_op("lmlab::rerouted", mutates_args=())  # opaque, so that a compiler does not unroll it
def rerouted(ranked_GSE: Tensor, k: int, capacity_G1: Tensor, order_GS: Tensor) -> Tensor:
    """(G, S, k) experts of each token, E where none has room: the first k of its list that are not full when its turn
    comes. ranked_GSE: experts by preference, E for those never asked. One token of every group after the other."""
    G, S, E = ranked_GSE.shape
    room = torch.cat((capacity_G1.expand(G, E), torch.zeros_like(capacity_G1)), 1)  # nobody has none
    found = torch.full((G, S, k), E, dtype=torch.long, device=ranked_GSE.device)
    rows = torch.arange(G, device=ranked_GSE.device)
    for turn in range(S):
        token = order_GS[:, turn]
        wanted = ranked_GSE[rows, token]
        free = room.gather(1, wanted) > 0
        taken = free & (free.cumsum(1) <= k)
        first = torch.where(taken, torch.arange(E, device=taken.device), E).sort(1).values[:, :k]
        chosen = torch.cat((wanted, torch.full_like(wanted[:, :1], E)), 1).gather(1, first)
        found[rows, token] = chosen
        room.scatter_add_(1, wanted, -taken.long())
    return found


@rerouted.register_fake
def _(ranked_GSE: Tensor, k: int, capacity_G1: Tensor, order_GS: Tensor) -> Tensor:
    return ranked_GSE.new_empty(*ranked_GSE.shape[:2], k)


def balance(experts_GSk: Tensor, probs_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
    """(G,) E·Σ f·P: f the share of choices that fall on each expert, P its mean probability. Even choices or
    probabilities → 1, all on one expert with certainty → E (Fedus et al. 2021, 2101.03961). Gradient through P."""
    E = probs_GSE.shape[-1]
    chosen = counts(experts_GSk.flatten(1), E)[:, :E].to(probs_GSE.dtype)
    f = chosen / chosen.sum(1, keepdim=True).clamp_min(1)
    return E * (f * mean(probs_GSE, valid_GS)).sum(1)


def mean(x_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
    """(G, E): over the tokens of each group that count; 0 where none does."""
    if valid_GS is None:
        return x_GSE.mean(1)
    n_G1 = valid_GS.sum(1, keepdim=True).clamp_min(1)
    return x_GSE.masked_fill(~valid_GS[..., None], 0).sum(1) / n_G1
