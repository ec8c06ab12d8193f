"""Softmax attention with K ≤ H key/value heads: mha (K = H), gqa, mqa (K = 1) are one class.

`prepare` turns mask and positions into a View once per forward and kind of layer, outside the compiled block; `forward`
projects, rotates in (B, T, H, C) and calls the backend the View names.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from lmlab.errors import ConfigError
from lmlab.kernels.ops import Ops, triton_installed
from lmlab.kernels.scores import Scores
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.init import ONES, ZEROS, Rule
from lmlab.model.mask import Mask, window
from lmlab.model.norm import RMSNorm
from lmlab.model.pos import PosTables, shared_row

# Below it the scores fit the CPU's caches: forward and backward in bf16, one core, 4096 tokens of 4 heads of 64 take
# 24 ms dense and 41 ms by SDPA at 256 keys, 53 and 61 at 512, 190 and 70 at 1024; in fp32 SDPA wins throughout.
DENSE_MAX_KEYS = 512
# Above it a T×S mask costs more memory than all else: tiles need none.
TILED_MIN_KEYS = 2048
# In fp32 tiles are also faster than dense scores: these reach 0.82–0.87 of their speed at 512 keys, 0.43–0.78 at 1024,
# 0.36–0.59 at 2048, by window, ALiBi or cap, forward and backward on two AVX2 cores (`lmlab bench attn`). Not so where
# every row has documents of its own, for which each tile is asked: there SDPA is best, dense at 0.88 of it at 256 keys.
DENSE_MAX_KEYS_FP32 = 256
FLEX_CHANNELS = (16, 256)  # of a head: fewer are refused, more do not fit a tile


class View(NamedTuple):
    """What a layer needs to know of the forward it is in: tensors in the model's dtype, and the backend."""

    backend: str
    why: str
    scores: Scores
    rendered: Any  # what the backend made of the scores
    rotation: Optional[tuple[str, Tensor, Tensor]] = None  # pairing, cos and sin of the new tokens
    temperature: float = 1.0  # factor on the scale of all scores


class SoftmaxAttention(nn.Module):
    """What all attentions share: the layer's window and positions, the backend, and the attending itself."""

    def __init__(self, spec: specs.AttnSpec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.ops, self.wanted, self.dropout, self.softcap = ops, spec.backend, spec.dropout, spec.softcap
        self.channels = spec.head_size(dims.d_model, dims.n_heads), spec.value_size(dims.d_model, dims.n_heads)
        self.scale = 1 / math.sqrt(dims.head_dim) if spec.scale is None else spec.scale
        self.window = spec.layer_window(layer or 0)
        self.has_positions = spec.layer_has_positions(layer or 0)
        if spec.backend == "flex" and ops.device.type == "cpu":
            raise ConfigError(
                "`attn.backend` is flex, which has no backward on the CPU", "use attn.backend=tiled, dense or auto"
            )

    @property
    def kind(self) -> Hashable:
        """Layers of one kind share a View."""
        return self.window, self.has_positions

    def prepare(self, mask: Mask, tables: PosTables, q_pos_BT: Tensor, k_pos_BS: Tensor, dtype: torch.dtype) -> View:
        """Mask, window and positions as the backend wants them."""
        T, S, device = q_pos_BT.shape[1], k_pos_BS.shape[1], q_pos_BT.device
        tables = tables if self.has_positions else PosTables()
        scores = self.scores_of(mask, tables, q_pos_BT, k_pos_BS)
        where = self.ops.device if device.type == "meta" else device
        backend, why = self.choose(scores, T, S, where, dtype, cached=mask.windowed)
        rendered = self.ops.render[backend](scores, T, S, dtype, device)
        return View(backend, why, scores, rendered, tables.rotation(dtype))

    def scores_of(self, mask: Mask, tables: PosTables, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Scores:
        """What happens to this layer's scores, its own window and positions among it; nothing of it is T×S."""
        if self.window is not None and self.window < k_pos_BS.shape[1] and not mask.windowed:
            mask = mask & window(self.window)
        tables = tables if self.has_positions else PosTables()
        return mask.scores(
            positions=(shared_row(q_pos_BT), shared_row(k_pos_BS)) if tables.biased else None,
            slope_H=tables.slope_H,
            bias_HR=tables.bias_HR,
            softcap=self.softcap,
        )

    def choose(
        self, scores: Scores, T: int, S: int, device: torch.device, dtype: torch.dtype, *, cached: bool = False
    ) -> tuple[str, str]:
        """The backend, and why: what `attn.backend` says, else a fixed rule of the scores, length, device and dtype."""
        if self.wanted != "auto":
            return self.wanted, "attn.backend"
        if self.ops.attention_default is not None:
            return self.ops.attention_default, "the default of these kernels"
        if T == 1:  # nothing is as small as one row of scores
            return ("sdpa", "a single query") if self.softcap is None else ("dense", "a cap on the scores")
        plain = scores.plain_causal() and not scores.biased and self.softcap is None
        if device.type == "cpu":
            return self._choose_on_cpu(scores, S, dtype, plain=plain, cached=cached)
        if not plain and not cached and device.type == "cuda" and self.flex_can(dtype):
            return "flex", "a mask, bias or cap, compiled into the kernel"
        return ("sdpa", f"fused on {device.type}") if self.softcap is None else ("dense", "a cap on the scores")

    def _choose_on_cpu(
        self, scores: Scores, S: int, dtype: torch.dtype, *, plain: bool, cached: bool
    ) -> tuple[str, str]:
        if plain:
            if S <= DENSE_MAX_KEYS and dtype in (torch.bfloat16, torch.float16):
                return "dense", f"at most {DENSE_MAX_KEYS} keys in a half precision on CPU"
            return "sdpa", "plain causal mask"
        fp32 = dtype == torch.float32 and not cached and not self.dropout
        many = DENSE_MAX_KEYS_FP32 if fp32 and scores.documents is None else TILED_MIN_KEYS
        if many < S and not self.dropout:
            return "tiled", f"a mask, bias or cap over more than {many} keys"
        if self.softcap is not None:
            return "dense", "a cap on the scores"
        if fp32 and S > DENSE_MAX_KEYS_FP32:
            return "sdpa", f"documents over more than {DENSE_MAX_KEYS_FP32} keys in fp32"
        return "dense", "the mask or bias needs a tensor"

    def flex_can(self, dtype: torch.dtype) -> bool:
        """Whether FlexAttention computes this: no dropout of probabilities, no float64, channels it has tiles for. Over
        a cache every length would be compiled anew."""
        fits = all(FLEX_CHANNELS[0] <= n <= FLEX_CHANNELS[1] for n in self.channels)
        return fits and not self.dropout and dtype != torch.float64 and triton_installed()

    def attend(self, q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, view: View) -> Tensor:
        """(B, T, H, channels of v)."""
        dropout = self.dropout if self.training else 0.0
        backend = self.ops.attention[view.backend]
        return backend(
            q_BTHC, k_BSKC, v_BSKC, view.scores, view.rendered, scale=self.scale * view.temperature, dropout=dropout
        )

    def rotate(self, x_BTHC: Tensor, view: View) -> Tensor:
        """x turned by the positions of the new tokens, when positions turn anything."""
        if view.rotation is None:
            return x_BTHC
        pairing, cos, sin = view.rotation
        return self.ops.rope[pairing](x_BTHC, cos, sin)


class Attention(SoftmaxAttention):
    """softmax(q·kᵀ/√C + bias) · v, masked before the softmax (Vaswani et al. 2017; gqa: Ainslie et al. 2023,
    2305.13245). Query head h reads key/value head h // (H/K).

    weights=shaped: a·v + b·softmax(…)·v − c·uniform·v per head, uniform being the same attention with q = 0; it starts
    as the identity, with q at 0 (Noci et al. 2023, 2306.17759; He & Hofmann 2023, 2311.01906).
    """

    def __init__(self, spec: specs.HeadsSpec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        D, H, C = dims.d_model, dims.n_heads, dims.head_dim
        K = spec.kv_heads(H)
        assert H % K == 0, f"attn.n_kv_heads {K} does not divide model.n_heads {H}"
        self.head_dim = C
        self.q = nn.Linear(D, H * C, bias=spec.bias_qkv)
        self.k = nn.Linear(D, K * C, bias=spec.bias_qkv)
        self.v = nn.Linear(D, K * C, bias=spec.bias_qkv) if spec.v_proj == "linear" else None
        self.o = nn.Linear(H * C, D, bias=spec.bias_o) if spec.o_proj == "linear" else None
        self.over_heads = spec.qk_norm == "full"
        widths = {"none": (None, None), "head": (C, C), "full": (H * C, K * C)}[spec.qk_norm]
        inner = specs.RMSNorm()
        inner.eps = spec.qk_norm_eps
        self.q_norm, self.k_norm = (None if w is None else RMSNorm(inner, dims, ops, layer, width=w) for w in widths)
        # a, b, c of every head, as a vector: matrices are decayed, and counted as products with activations
        self.mix = nn.Parameter(torch.empty(3 * H)) if spec.weights == "shaped" else None

    def init_rules(self) -> dict[str, Rule]:
        """Shaped attention starts as the identity: factors 1, and q = 0."""
        return {} if self.mix is None else {"mix": ONES, "q.weight": ZEROS}

    def forward(self, x_BTD: Tensor, view: View, cache: Any = None) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BTHC, k_BTKC, v_BTKC = self.project(x_BTD)
        q_BTHC, k_BTKC = self.rotate(q_BTHC, view), self.rotate(k_BTKC, view)
        k_BSKC, v_BSKC = (k_BTKC, v_BTKC) if cache is None else cache.append(k_BTKC, v_BTKC)
        out_BTHC = self.attend(q_BTHC, k_BSKC, v_BSKC, view)
        if self.mix is not None:
            uniform = self.attend(torch.zeros_like(q_BTHC), k_BSKC, v_BSKC, view)
            own, softmax, flat = self.mix.view(3, -1, 1)
            own_BTHC = v_BTKC.repeat_interleave(q_BTHC.shape[2] // v_BTKC.shape[2], 2)
            out_BTHC = own * own_BTHC + softmax * out_BTHC - flat * uniform
        out_BTD = out_BTHC.reshape(B, T, -1)
        return out_BTD if self.o is None else self.o(out_BTD)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, C), k and v (B, T, K, C), before the rotation."""
        linears = [m for m in (self.q, self.k, self.v) if m is not None]
        biases = None if self.q.bias is None else [m.bias for m in linears]
        q, k, *v = self.ops.fan(x_BTD, [m.weight for m in linears], biases)
        if self.over_heads:
            q, k = self._normed(q, k)
        heads_q, heads_k, heads_v = (p.view(*x_BTD.shape[:2], -1, self.head_dim) for p in (q, k, v[0] if v else x_BTD))
        if not self.over_heads:
            heads_q, heads_k = self._normed(heads_q, heads_k)
        return heads_q, heads_k, heads_v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))
