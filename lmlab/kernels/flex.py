"""FlexAttention (Dong et al. 2024, 2412.05496): a Scores as functions that torch compiles into one kernel.

`mask_mod` says what is seen and, by blocks of 128, what need not be computed; `score_mod` caps and adds the bias. On
CUDA it is always compiled; on the CPU it runs uncompiled, forward only, with the scores in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lmlab.errors import LmlabError
from lmlab.kernels.scores import Scores
from lmlab.kernels.tiled import tiled

BLOCK = 128


def render_flex(scores: Scores, T: int, S: int, dtype: torch.dtype, device: torch.device) -> Any:
    """A torch BlockMask, made a row of blocks at a time; None where everything is seen. Which blocks those are is kept
    where only length, causality and window say so."""
    if device.type == "meta" or scores.seen(range(1), range(1), T, S, device) is None:
        return None
    by_data = (scores.documents, scores.valid_BS, scores.kept_BS)
    kept = all(part is None for part in by_data)
    blocks = _static(scores.causal, scores.window, T, S, device) if kept else _blocks(scores, T, S, device)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    how: Any = dict(zip(names, blocks, strict=True))
    return BlockMask.from_kv_blocks(**how, BLOCK_SIZE=BLOCK, mask_mod=_mask_mod(scores, T, S), seq_lengths=(T, S))


@functools.lru_cache(maxsize=32)
def _static(causal: bool, window: Optional[int], T: int, S: int, device: torch.device) -> tuple[Tensor, ...]:
    return _blocks(Scores(causal=causal, window=window), T, S, device)


def _blocks(scores: Scores, T: int, S: int, device: torch.device) -> tuple[Tensor, ...]:
    """(how many, which) blocks of keys each block of queries sees in part, then in whole."""
    counts = []  # pairs seen in each block
    for first in range(0, T, BLOCK):
        seen = scores.seen(range(first, min(first + BLOCK, T)), range(S), T, S, device)
        assert seen is not None
        counts.append(F.pad(seen.sum(2), (0, -S % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1))
    counts_BHQK = torch.stack(counts, 2)
    whole = counts_BHQK == BLOCK * BLOCK
    return *_listed((counts_BHQK > 0) & ~whole), *_listed(whole)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which) blocks of the last dimension, those first."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().sort(dim=-1, descending=True, stable=True).indices.int()


def _mask_mod(scores: Scores, T: int, S: int) -> Callable[..., Tensor]:
    causal, window, documents, valid_BS = scores.causal, scores.window, scores.documents, scores.valid_BS
    kept_BS = scores.kept_BS

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = q + (S - T)
        seen = k <= own if causal else k >= 0
        if window is not None:
            near = k > own - window
            seen = seen & (near if kept_BS is None else near | _at(kept_BS, b, k))
        if documents is not None:
            seen = seen & (_at(documents[0], b, q) == _at(documents[1], b, k))
        return seen if valid_BS is None else seen & _at(valid_BS, b, k)

    return mask_mod


def _score_mod(scores: Scores) -> Callable[..., Tensor]:
    cap, positions, slope_H, bias_HR = scores.softcap, scores.positions, scores.slope_H, scores.bias_HR

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        if positions is None or not scores.biased:
            return score
        distance = (_at(positions[0], b, q) - _at(positions[1], b, k)).clamp_min(0)
        if slope_H is not None:
            return score - slope_H[h].to(score.dtype) * distance
        assert bias_HR is not None
        return score + bias_HR[h, distance.clamp_max(bias_HR.shape[1] - 1)]

    return score_mod


def _at(x_BT: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return x_BT[b * int(x_BT.shape[0] > 1), t]  # one row serves the whole batch


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def flex(
    q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, scores: Scores, rendered: Any, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """torch's flex_attention. Raises LmlabError where gradients are wanted on the CPU."""
    assert not dropout, "FlexAttention has no dropout"
    if q_BTHC.device.type == "meta":  # it saves what tiled saves
        return tiled(q_BTHC, k_BSKC, v_BSKC, scores, None, scale=scale)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHC, k_BSKC, v_BSKC))
    if q.device.type == "cpu" and any(x.requires_grad for x in (q, k, v)):
        raise LmlabError("attn.backend=flex has no backward on the CPU", "use attn.backend=tiled or dense")
    attend: Any = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    score_mod = _score_mod(scores) if scores.biased or scores.softcap is not None else None
    out: Tensor = attend(q, k, v, score_mod, rendered, scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
