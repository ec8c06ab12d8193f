"""Tiled attention, forward and recomputing backward: the readable FlashAttention (Dao 2023, 2307.08691), in torch.

A tile of queries meets the keys it may see a tile at a time; the parts merge by (m, l, u). Nothing of T×S is made or
saved: the backward makes each tile again from q, k and the log of the row's sum. Every Scores is taken, grouped heads
without expanding k and v. One opaque operator each way, so that a compiler does not unroll the loops.

        keys →
    q   ■ . . .     . skipped: no query of the tile sees a key of it
    ↓   □ ■ . .     ■ the diagonal or the window's edge: made with a mask
        . □ ■ .     □ wholly seen: no mask (window = 2 tiles)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lmlab.kernels.ops import wide
from lmlab.kernels.scores import Scores

ROWS, KEYS = 128, 512  # the size of a tile


class Part(NamedTuple):
    """Attention of rows N to some keys: their softmax is u / l, and e^m · l is its denominator."""

    m_N: Tensor  # the largest logit, −inf where no key is seen
    l_N: Tensor  # Σ e^(logit − m)
    u_NC: Tensor  # Σ e^(logit − m) · v


class Tile(NamedTuple):
    """Some queries and keys, and what of a Scores still acts on them."""

    rows: range
    keys: range
    scores: Scores


def tiles(scores: Scores, T: int, S: int) -> Iterator[tuple[range, list[Tile]]]:
    """The queries in tiles, each with the tiles of keys that it may see by their order in the row."""
    for first in range(0, T, ROWS):
        rows = range(first, min(first + ROWS, T))
        oldest, newest = rows[0] + S - T, rows[-1] + S - T  # the keys at the first and the last query
        stop = min(S, newest + 1) if scores.causal else S
        start = 0 if scores.window is None or scores.kept_BS is not None else max(0, oldest - scores.window + 1)
        parts = (range(key, min(key + KEYS, stop)) for key in range(start, stop, KEYS))
        yield rows, [Tile(rows, keys, _acting(scores, keys, oldest, newest)) for keys in parts]


def _acting(scores: Scores, keys: range, oldest: int, newest: int) -> Scores:
    """Without `causal` and `window` where they hide nothing of a tile."""
    causal = scores.causal and keys[-1] > oldest
    cut = scores.window is not None and keys[0] < newest - scores.window + 1
    return scores._replace(causal=causal, window=scores.window if cut else None)


def attended(logits_GNM: Tensor, v_GMC: Tensor) -> Part:
    """The part of these keys. The logits are used up."""
    m_GN = logits_GNM.amax(-1)
    p_GNM = logits_GNM.sub_(_finite(m_GN)[..., None]).exp_()
    return Part(m_GN, p_GNM.sum(-1), torch.bmm(p_GNM, v_GMC))


def merged(a: Part, b: Part) -> Part:
    """The part of both sets of keys; their order does not matter."""
    m = torch.maximum(a.m_N, b.m_N)
    by_a, by_b = ((part.m_N - _finite(m)).exp() for part in (a, b))
    return Part(m, a.l_N * by_a + b.l_N * by_b, a.u_NC * by_a[..., None] + b.u_NC * by_b[..., None])


def _finite(m: Tensor) -> Tensor:
    """0 for −inf, so that a row that sees nothing has e^−inf = 0 and not e^(−inf + inf)."""
    return m.masked_fill(m == float("-inf"), 0.0)


class Heads(NamedTuple):
    """k and v as matrices, G = B·K of them; the R = H/K query heads that read one are R·t rows of it."""

    q_BTHC: Tensor
    k_GSC: Tensor
    v_GSC: Tensor
    scores: Scores
    scale: float

    @property
    def T(self) -> int:
        return self.q_BTHC.shape[1]

    @property
    def S(self) -> int:
        return self.k_GSC.shape[1]

    def k(self, keys: range) -> Tensor:
        return self.k_GSC[:, keys.start : keys.stop]

    def v(self, keys: range) -> Tensor:
        return self.v_GSC[:, keys.start : keys.stop]

    def per_head(self, x_GMS: Tensor, tile: Tile) -> Tensor:
        """(G, R·t, s) seen as (B, H, t, s)."""
        return x_GMS.view(self.q_BTHC.shape[0], -1, len(tile.rows), len(tile.keys))

    def logits(self, q_GMC: Tensor, tile: Tile) -> tuple[Tensor, Optional[Tensor]]:
        """(logits (G, R·t, s), tanh of the softcap)."""
        cap, scores = tile.scores.softcap, tile.scores
        zero = q_GMC.new_zeros(())
        x_GMS = torch.baddbmm(zero, q_GMC, self.k(tile.keys).transpose(1, 2), beta=0, alpha=self.scale / (cap or 1.0))
        tanh_GMS = None
        if cap is not None:
            tanh_GMS = x_GMS.tanh_()
            x_GMS = tanh_GMS * cap
        x_BHTS = self.per_head(x_GMS, tile)
        bias = scores.bias(tile.rows, tile.keys, x_GMS.dtype)
        if bias is not None:
            x_BHTS.add_(bias)
        seen = scores.seen(tile.rows, tile.keys, self.T, self.S, x_GMS.device)
        if seen is not None:
            x_BHTS.masked_fill_(~seen, float("-inf"))
        return x_GMS, tanh_GMS

    def apart(self, x_BTHC: Tensor, rows: range) -> Tensor:
        """The rows of a tile of (B, T, H, C) as (G, R·t, C), in at least fp32."""
        x_BHTC = _wide(x_BTHC[:, rows.start : rows.stop]).transpose(1, 2)
        return x_BHTC.reshape(self.k_GSC.shape[0], -1, x_BTHC.shape[-1])


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _heads(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, scores: Scores, scale: float) -> Heads:
    k_GSC, v_GSC = (_wide(x).transpose(1, 2).flatten(0, 1) for x in (k_BSKC, v_BSKC))
    return Heads(q_BTHC, k_GSC, v_GSC, scores, scale)


def _forward(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, scale: float, *flat: Any) -> tuple[Tensor, Tensor]:
    """(out (B, T, H, C of v), log of the denominators (B, H, T), +∞ for a query that sees nothing)."""
    heads = _heads(q_BTHC, k_BSKC, v_BSKC, _unflat(*flat), scale)
    out_BTHC, sums_BHT = _forward_fake(q_BTHC, k_BSKC, v_BSKC, scale)
    for rows, row in tiles(heads.scores, heads.T, heads.S):
        q_GMC = heads.apart(q_BTHC, rows)
        m_GM = q_GMC.new_full(q_GMC.shape[:2], float("-inf"))
        part = Part(m_GM, torch.zeros_like(m_GM), q_GMC.new_zeros(*m_GM.shape, v_BSKC.shape[-1]))
        for tile in row:
            part = merged(part, attended(heads.logits(q_GMC, tile)[0], heads.v(tile.keys)))
        nothing = part.l_N == 0
        out_GMC = part.u_NC / part.l_N.masked_fill(nothing, 1.0)[..., None]
        sums_GM = (part.m_N + part.l_N.log()).masked_fill(nothing, float("inf"))  # then e^(logit − sum) = 0
        at = slice(rows.start, rows.stop)
        out_BTHC[:, at] = out_GMC.view(*sums_BHT.shape[:2], len(rows), -1).transpose(1, 2)
        sums_BHT[:, :, at] = sums_GM.view(*sums_BHT.shape[:2], len(rows))
    return out_BTHC, sums_BHT


def _backward(
    dout_BTHC: Tensor,
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    out_BTHC: Tensor,
    sums_BHT: Tensor,
    scale: float,
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias_HR. With p = e^(logit − sum) and δ = out · dout: dlogit = p · (dout · v − δ)."""
    heads = _heads(q_BTHC, k_BSKC, v_BSKC, _unflat(*flat), scale)
    grads = _backward_fake(dout_BTHC, q_BTHC, k_BSKC, v_BSKC, out_BTHC, sums_BHT, scale, *flat)
    dk_GSC, dv_GSC = (torch.zeros_like(x) for x in (heads.k_GSC, heads.v_GSC))
    dbias_HR = torch.zeros_like(grads[3], dtype=sums_BHT.dtype)
    for rows, row in tiles(heads.scores, heads.T, heads.S):
        q_GMC, dout_GMC = heads.apart(q_BTHC, rows), heads.apart(dout_BTHC, rows)
        delta_GM = (dout_GMC * heads.apart(out_BTHC, rows)).sum(-1)
        sums_GM = sums_BHT[:, :, rows.start : rows.stop].reshape(delta_GM.shape)
        dq_GMC = torch.zeros_like(q_GMC)
        for tile in row:
            keys = slice(tile.keys.start, tile.keys.stop)
            logits_GMS, tanh_GMS = heads.logits(q_GMC, tile)
            p_GMS = logits_GMS.sub_(sums_GM[..., None]).exp_()
            dv_GSC[:, keys].baddbmm_(p_GMS.transpose(1, 2), dout_GMC)
            d_GMS = torch.bmm(dout_GMC, heads.v(tile.keys).transpose(1, 2)).sub_(delta_GM[..., None]).mul_(p_GMS)
            heads.scores.add_bias_gradient(dbias_HR, heads.per_head(d_GMS, tile), tile.rows, tile.keys)
            if tanh_GMS is not None:
                d_GMS.mul_(tanh_GMS.square_().neg_().add_(1.0))
            dk_GSC[:, keys].baddbmm_(d_GMS.transpose(1, 2), q_GMC, alpha=scale)
            dq_GMC.baddbmm_(d_GMS, heads.k(tile.keys), alpha=scale)
        dq_BHTC = dq_GMC.view(*sums_BHT.shape[:2], len(rows), -1)
        grads[0][:, rows.start : rows.stop] = dq_BHTC.transpose(1, 2)
    for grad_BSKC, x_GSC in zip(grads[1:3], (dk_GSC, dv_GSC), strict=True):
        grad_BSKC.copy_(x_GSC.unflatten(0, (k_BSKC.shape[0], -1)).transpose(1, 2))
    grads[3].copy_(dbias_HR)
    return grads


_SCORES = (
    "bool causal, SymInt? window, Tensor? q_ids, Tensor? k_ids, Tensor? valid, Tensor? kept,"
    " Tensor? q_pos, Tensor? k_pos, Tensor? slope, Tensor? bias, float? softcap"
)


def _flat(s: Scores) -> tuple[Any, ...]:
    """A Scores as the arguments that an operator can have, in the order of `_SCORES`."""
    ids, positions = s.documents or (None, None), s.positions or (None, None)
    return s.causal, s.window, *ids, s.valid_BS, s.kept_BS, *positions, s.slope_H, s.bias_HR, s.softcap


def _unflat(
    causal: bool, window: Optional[int], q_ids: Any, k_ids: Any, valid: Any, kept: Any, q: Any, k: Any, *rest: Any
) -> Scores:
    documents, positions = (None if a is None else (a, b) for a, b in ((q_ids, k_ids), (q, k)))
    return Scores(causal, window, documents, valid, kept, positions, *rest)


def _forward_fake(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, scale: float, *flat: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q_BTHC.shape
    return q_BTHC.new_empty(B, T, H, v_BSKC.shape[-1]), q_BTHC.new_empty(B, H, T, dtype=wide(q_BTHC.dtype))


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = _unflat(*flat).bias_HR
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0, 0) if bias is None else bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, *flat = inputs
    scores = _unflat(*flat)
    ctx.options = scores.causal, scores.window, scores.softcap
    _, _, *tensors, _ = flat
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *tensors)


def _gradients(ctx: Any, dout_BTHC: Tensor, _: Tensor) -> tuple[Optional[Tensor], ...]:
    q, k, v, out, sums, *tensors = ctx.saved_tensors
    causal, window, softcap = ctx.options
    flat = causal, window, *tensors, softcap
    dq, dk, dv, dbias = torch.ops.lmlab.tiled_attention_backward(dout_BTHC, q, k, v, out, sums, ctx.scale, *flat)
    *others, bias = tensors
    return dq, dk, dv, None, None, None, *(None for _ in others), None if bias is None else dbias, None


tiled_attention = torch.library.custom_op(
    "lmlab::tiled_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, float scale, {_SCORES}) -> (Tensor, Tensor)",
)
tiled_attention_backward = torch.library.custom_op(
    "lmlab::tiled_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, float scale, "
    f"{_SCORES}) -> (Tensor, Tensor, Tensor, Tensor)",
)
tiled_attention.register_fake(_forward_fake)
tiled_attention.register_autograd(_gradients, setup_context=_save)
tiled_attention_backward.register_fake(_backward_fake)


def render_tiled(scores: Scores, T: int, S: int, dtype: torch.dtype, device: torch.device) -> None:
    """Nothing: each tile makes its own mask and bias."""


def tiled(
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    scores: Scores,
    rendered: None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention in memory linear in T, on any device; logits, sums and gradients in at least fp32."""
    assert not dropout, "tiled attention has no dropout"
    out_BTHC: Tensor = tiled_attention(q_BTHC, k_BSKC, v_BSKC, scale, *_flat(scores))[0]
    return out_BTHC
