"""The oracle's formulas of experts behind a router: one token, one expert, one choice at a time, in float64.

As in oracle.py: nothing is shared with the model but the state dict. Rows stand alone: of moe.group=batch it says what
a batch of one row gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmlab.check.oracle_parts import Config, NoOracle, feed_forward


def routes(config: Config, layer: int) -> bool:
    """Whether the layer has experts."""
    moe = config.get("moe") or {"name": "none"}
    if moe["name"] == "none":
        return False
    return bool(layer >= moe["first_dense_layers"] and (layer + 1) % moe["every_n_layers"] == 0)


def mixture(config: Config, w: Mapping[str, Tensor], at: str, x: Tensor, valid: list[bool]) -> Tensor:
    """(T, D): what the experts give each token of a row, weighted and summed."""
    moe = config["moe"]
    logits = x @ w[f"{at}.router.weight"].T
    if moe["name"] == "expert_choice":
        pairs = chosen_by_experts(moe, torch.softmax(logits, -1), valid)
    elif moe["name"] in ("topk", "switch"):
        scores = 1 / (1 + torch.exp(-logits)) if moe["score"] == "sigmoid" else torch.softmax(logits, -1)
        pairs = chosen_by_tokens(moe, scores, w.get(f"{at}.router.bias"), valid)
    else:
        raise NoOracle("moe", moe["name"])
    out = torch.zeros_like(x)
    for token, expert, weight in pairs:
        out[token] += weight * feed_forward(config["ffn"], expert_weights(w, at, expert), "e", x[token][None])[0]
    return out + (feed_forward(config["ffn"], w, f"{at}.shared", x) if moe["n_shared"] else 0)


def expert_weights(w: Mapping[str, Tensor], at: str, expert: int) -> dict[str, Tensor]:
    """One expert's own weights: a slice of the stacks, or those of its module."""
    stacked, own = f"{at}.experts.ffn.", f"{at}.experts.each.{expert}."
    found = {f"e.{name.removeprefix(stacked)}": t[expert] for name, t in w.items() if name.startswith(stacked)}
    return found | {f"e.{name.removeprefix(own)}": t for name, t in w.items() if name.startswith(own)}


Pair = tuple[int, int, float]


def room_for(moe: Config, k: int, tokens: int) -> int:
    """ceil(k·T/E·factor), at most T."""
    share = k * tokens / moe["n_experts"] * moe["capacity_factor"]
    return min(tokens, math.ceil(share - 1e-9))


def chosen_by_tokens(moe: Config, scores: Tensor, bias: Any, valid: list[bool]) -> list[Pair]:
    E, k = moe["n_experts"], moe.get("top_k", 1)
    tokens = [t for t in range(len(scores)) if valid[t]]
    wishes = {t: ranked(moe, scores[t] if bias is None else scores[t] + bias) for t in tokens}
    if moe["capacity_factor"] is None:
        taken = {t: wishes[t][:k] for t in tokens}
    else:
        room = [room_for(moe, k, len(tokens))] * E
        fill = rerouted if moe["overflow"] == "reroute" else dropped
        taken = fill(moe, scores, wishes, room, k)
    pairs = []
    for t in tokens:
        asked = taken[t] if moe["overflow"] == "reroute" else wishes[t][:k]
        whole = sum(float(scores[t, e]) for e in asked) if moe.get("norm_topk") else 1.0
        pairs += [(t, e, float(scores[t, e]) / whole * moe.get("weight_scale", 1.0)) for e in taken[t]]
    return pairs


def ranked(moe: Config, choice: Tensor) -> list[int]:
    """The experts that a token may use, best first."""
    E, groups, few = moe["n_experts"], moe.get("n_expert_groups", 1), moe.get("n_limited_groups")
    allowed = list(range(E))
    if few is not None:
        size = E // groups
        best_two = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -best_two[g])[:few]
        allowed = [e for e in allowed if e // size in kept]
    return sorted(allowed, key=lambda e: -float(choice[e]))


def dropped(moe: Config, scores: Tensor, wishes: dict[int, list[int]], room: list[int], k: int) -> dict[int, list[int]]:
    asked = [(t, e) for t in wishes for e in wishes[t][:k]]
    if moe["priority"] == "probability":
        asked.sort(key=lambda pair: -float(scores[pair]))
    taken: dict[int, list[int]] = {t: [] for t in wishes}
    for t, e in asked:
        if room[e]:
            room[e] -= 1
            taken[t].append(e)
    return taken


def rerouted(
    moe: Config, scores: Tensor, wishes: dict[int, list[int]], room: list[int], k: int
) -> dict[int, list[int]]:
    turns = list(wishes)
    if moe["priority"] == "probability":
        turns.sort(key=lambda t: -float(scores[t].max()))
    taken = {}
    for t in turns:
        taken[t] = [e for e in wishes[t] if room[e]][:k]
        for e in taken[t]:
            room[e] -= 1
    return taken


def chosen_by_experts(moe: Config, scores: Tensor, valid: list[bool]) -> list[Pair]:
    tokens = [t for t in range(len(scores)) if valid[t]]
    room, pairs = room_for(moe, 1, len(tokens)), []
    for e in range(moe["n_experts"]):
        best = sorted(tokens, key=lambda t: -float(scores[t, e]))[:room]
        pairs += [(t, e, float(scores[t, e])) for t in best]
    return pairs
