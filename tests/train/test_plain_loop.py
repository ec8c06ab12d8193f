"""`preset=nanogpt` against a loop written by hand: same weights, batches, groups and schedule → the same 20 steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lmlab.registry import make

STEPS, LR, MIN_FRAC, WARMUP, CLIP = 20, 6e-4, 0.1, 3, 1.0


def gpt_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, n_layers: int, n_heads: int) -> torch.Tensor:
    """nanoGPT's network in functional form: LayerNorm without bias, learned positions, exact GELU, tied head."""
    B, T = tokens.shape
    x = w["embed.weight"][tokens] + w["pos.weight"][:T]
    D = x.shape[-1]
    for i in range(n_layers):
        p = f"blocks.{i}."
        h = F.layer_norm(x, (D,), w[p + "norm1.weight"], None, 1e-5)
        q, k, v = (
            (h @ w[f"{p}attn.{n}.weight"].T).view(B, T, n_heads, D // n_heads).transpose(1, 2) for n in ("q", "k", "v")
        )
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(D // n_heads)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        a = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        x = x + a @ w[p + "attn.o.weight"].T
        h = F.layer_norm(x, (D,), w[p + "norm2.weight"], None, 1e-5)
        x = x + F.gelu(h @ w[p + "ffn.up.weight"].T) @ w[p + "ffn.down.weight"].T
    return F.layer_norm(x, (D,), w["norm.weight"], None, 1e-5) @ w["embed.weight"].T


def lr_at(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    progress = (step - (WARMUP - 1)) / (STEPS - 1 - (WARMUP - 1))
    return LR * (MIN_FRAC + (1 - MIN_FRAC) * 0.5 * (1 + math.cos(math.pi * progress)))


def by_hand(made: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    w = {n: p.detach().clone().requires_grad_() for n, p in made.master.named_parameters()}
    decay = [p for p in w.values() if p.ndim >= 2]
    plain = [p for p in w.values() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch = made.batches.batch(step)
        for g in optimizer.param_groups:
            g["lr"] = lr_at(step)
        logits = gpt_logits(w, batch.tokens_BT, made.exp.model.n_layers, made.exp.model.n_heads)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, w


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("micro_rows", [8, 3])
def test_nanogpt_equals_a_plain_loop(
    trainer: Callable[..., Any], micro_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    sizes = ["model=nano", "model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.seq_len=16"]
    made = trainer("preset=nanogpt", *sizes, f"schedule.warmup_steps={WARMUP}", micro_rows=micro_rows)
    assert (made.exp.optim.lr, made.exp.optim.clip, made.exp.ffn.name) == (LR, CLIP, "gelu")
    made.master.to(dtype)
    losses, weights = by_hand(made)
    rate = make(made.exp.schedule, made.exp.optim.lr, STEPS)
    ours = [float(made.stepper(made.batches.batch(k), step=k, lr=rate(k))[0]) for k in range(STEPS)]
    assert ours == pytest.approx(losses, rel=tolerance)
    assert losses[-1] < losses[0] - 0.1
    if dtype == torch.float64:  # in fp32 Adam's first steps turn rounding of near-zero gradients into whole updates
        for name, p in made.master.named_parameters():
            torch.testing.assert_close(p, weights[name], atol=1e-9, rtol=0)
