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

from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.mask import Mask, window
from lmlab.model.norm import RMSNorm
from lmlab.model.pos import PosTables, shared_row

# Below it the scores fit the CPU's caches: forward and backward in bf16, one core, 4096 tokens of 4 heads of 64 take
# 24 ms dense and 41 ms by SDPA at 256 keys, 53 and 61 at 512, 190 and 70 at 1024; in fp32 SDPA wins throughout.
DENSE_MAX_KEYS = 512


class View(NamedTuple):
    """What a layer needs to know of the forward it is in: tensors in the model's dtype, and the backend."""

    backend: str
    why: str
    causal: bool
    mask: Optional[Tensor] = None  # (1 or B, 1 or H, T, S): boolean, or float to add
    attends_BT: Optional[Tensor] = None  # False where a query has nothing to attend
    rotation: Optional[tuple[str, Tensor, Tensor]] = None  # pairing, cos and sin of the new tokens


class Attention(nn.Module):
    """softmax(q·kᵀ/√C + bias) · v, masked before the softmax (Vaswani et al. 2017; gqa: Ainslie et al. 2023,
    2305.13245). Query head h reads key/value head h // (H/K)."""

    def __init__(self, spec: specs.AttnSpec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        D, H, C = dims.d_model, dims.n_heads, dims.head_dim
        K = spec.kv_heads(H)
        assert H % K == 0, f"attn.n_kv_heads {K} does not divide model.n_heads {H}"
        self.ops, self.head_dim, self.scale = ops, C, 1 / math.sqrt(C)
        self.window, self.dropout, self.wanted = spec.window, spec.dropout, spec.backend
        self.q = nn.Linear(D, H * C, bias=spec.bias_qkv)
        self.k = nn.Linear(D, K * C, bias=spec.bias_qkv)
        self.v = nn.Linear(D, K * C, bias=spec.bias_qkv)
        self.o = nn.Linear(H * C, D, bias=spec.bias_o)
        normed = spec.qk_norm == "head"
        self.q_norm = RMSNorm(specs.RMSNorm(), dims, ops, layer, width=C) if normed else None
        self.k_norm = RMSNorm(specs.RMSNorm(), dims, ops, layer, width=C) if normed else None

    @property
    def kind(self) -> Hashable:
        """Layers of one kind share a View."""
        return self.window

    def prepare(self, mask: Mask, tables: PosTables, q_pos_BT: Tensor, k_pos_BS: Tensor, dtype: torch.dtype) -> View:
        """Mask, window and positions as the backend wants them."""
        mask = mask if self.window is None else mask & window(self.window)
        T, S, device = q_pos_BT.shape[1], k_pos_BS.shape[1], q_pos_BT.device
        counted_for = self.ops.device if device.type == "meta" else device
        backend, why = self.choose(mask, tables.biased, S, counted_for, dtype)
        causal = mask.plain_causal() and not tables.biased and (backend == "sdpa")
        seen = None if causal else mask.render(T, S, device)
        attends_BT = None
        if seen is not None and mask.valid_BS is not None:  # only padding can leave a query with nothing
            attends = seen.any(-1, keepdim=True)
            seen, attends_BT = seen | ~attends, attends[:, 0, :, 0]
        if tables.biased:
            bias = tables.bias(shared_row(q_pos_BT)[:, :, None] - shared_row(k_pos_BS)[:, None, :], dtype)
            seen = bias if seen is None else bias.masked_fill(~seen, float("-inf"))
        elif seen is not None and backend == "dense":
            seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        return View(backend, why, causal, seen, attends_BT, tables.rotation(dtype))

    def choose(self, mask: Mask, biased: bool, S: int, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
        """The backend, and why: what `attn.backend` says, else a fixed rule of mask, length, device and dtype."""
        if self.wanted != "auto":
            return self.wanted, "attn.backend"
        if self.ops.attention_default is not None:
            return self.ops.attention_default, "the default of these kernels"
        if device.type != "cpu":
            return "sdpa", f"fused on {device.type}"
        if biased or not mask.plain_causal():
            return "dense", "the mask or bias needs a tensor"
        if S <= DENSE_MAX_KEYS and dtype in (torch.bfloat16, torch.float16):
            return "dense", f"at most {DENSE_MAX_KEYS} keys in a half precision on CPU"
        return "sdpa", "plain causal mask"

    def forward(self, x_BTD: Tensor, view: View, cache: Any = None) -> Tensor:
        B, T, _ = x_BTD.shape
        linears = (self.q, self.k, self.v)
        biases = None if self.q.bias is None else [m.bias for m in linears]
        packed = self.ops.fan(x_BTD, [m.weight for m in linears], biases)
        q_BTHC, k_BTKC, v_BTKC = (p.view(B, T, -1, self.head_dim) for p in packed)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        if view.rotation is not None:
            pairing, cos, sin = view.rotation
            turn = self.ops.rope[pairing]
            q_BTHC, k_BTKC = turn(q_BTHC, cos, sin), turn(k_BTKC, cos, sin)
        if cache is not None:
            k_BTKC, v_BTKC = cache.append(k_BTKC, v_BTKC)
        out_BTHC = self.ops.attention[view.backend](
            q_BTHC,
            k_BTKC,
            v_BTKC,
            mask=view.mask,
            causal=view.causal,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )
        if view.attends_BT is not None:
            out_BTHC = out_BTHC.masked_fill(~view.attends_BT[:, :, None, None], 0.0)
        return self.o(out_BTHC.reshape(B, T, -1))
