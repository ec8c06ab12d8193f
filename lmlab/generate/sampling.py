"""From logits to the next token: greedy, temperature, top-k, top-p; each row by its own stream of random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k: of the k likeliest; top_p: of the likeliest that together reach p, after top_k
    (Holtzman et al. 2020, 1904.09751)."""

    temperature: float = 0.0
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    seed: int = 0


GREEDY = Sampling()
COLDEST = 1e-300  # what is picked at lower temperatures is the same, and 1 / temperature stays finite


def uniforms(sampling: Sampling, prompts: Sequence[Sequence[int]], n: int) -> Tensor:
    """(B, n) numbers in [0, 1), a row's being of (seed, its prompt, how often it stood before): a batch gives what its
    rows give alone."""
    rows, seen = [], dict[tuple[int, ...], int]()
    for prompt in prompts:
        key = tuple(prompt)
        seen[key] = copy = seen.get(key, -1) + 1
        digest = hashlib.blake2b(f"{sampling.seed} {copy} {key}".encode(), digest_size=8).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        rows.append(torch.rand(n, generator=draw, dtype=torch.float64))
    return torch.stack(rows)


def allowed(logits_BV: Tensor, forbidden_V: Optional[Tensor]) -> Tensor:
    """At least in fp32, −∞ where forbidden_V is True."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    return logits_BV if forbidden_V is None else logits_BV.masked_fill(forbidden_V, float("-inf"))


def pick(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, forbidden_V: Optional[Tensor] = None) -> Tensor:
    """(B,) ids: the token at which the summed probability passes `uniform`. forbidden_V: True = never. A row without a
    finite largest logit gives any id."""
    logits_BV = allowed(logits_BV, forbidden_V)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    ids_BK = None
    if sampling.top_k is not None or sampling.top_p is not None:
        V = logits_BV.shape[-1]
        logits_BV, ids_BK = logits_BV.topk(V if sampling.top_k is None else min(sampling.top_k, V))
    under_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)
    probs = torch.softmax(under_BV / max(sampling.temperature, COLDEST), -1)
    if sampling.top_p is not None:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    sums = probs.cumsum(-1)
    total = sums[:, -1:]
    below = torch.minimum(uniform_B[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    at_B1 = torch.searchsorted(sums, below, right=True).clamp_max(probs.shape[-1] - 1)
    return (at_B1 if ids_BK is None else ids_BK.gather(1, at_B1))[:, 0]
