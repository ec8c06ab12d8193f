"""Multi-head latent attention: keys and values of all heads from one narrow latent per token, and one rotated key.

Per head q and k are [nope | rope]; only the rope part turns. Two forms of the same function: naive makes every head's
keys and values, absorbed attends in the latent, with k_up moved to the query's side and v_up to the output's. What is
cached is [latent | rotated key], one for all heads; with keys from a cache the form is absorbed, for naive would make
those of all earlier tokens again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.attn import SoftmaxAttention, View
from lmlab.model.dims import Dims
from lmlab.model.mask import Mask
from lmlab.model.norm import RMSNorm
from lmlab.model.pos import PosTables


class MLA(SoftmaxAttention):
    """softmax([q_nope | q_rope]·[k_nope | k_rope]ᵀ/√(nope+rope)) · v, k_nope and v from a normed latent of kv_rank
    (DeepSeek-V2 2024, 2405.04434, section 2.1)."""

    def __init__(self, spec: specs.MLA, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        D, H = dims.d_model, dims.n_heads
        self.n_heads, self.absorbed = H, spec.form == "absorbed"
        self.nope, self.rope, self.rank = spec.plain_size(D, H), spec.rotary_size(D, H), spec.latent_size(D)
        wide_q = H * (self.nope + self.rope)
        if spec.q_rank is None:
            self.q = nn.Linear(D, wide_q, bias=False)
        else:
            self.q_down = nn.Linear(D, spec.q_rank, bias=False)
            self.q_norm = RMSNorm(specs.RMSNorm(), dims, ops, layer, width=spec.q_rank)
            self.q_up = nn.Linear(spec.q_rank, wide_q, bias=False)
        self.has_q_latent = spec.q_rank is not None
        # DeepNorm's gain is 1 for it ("attn.k…") although values come from it too: the norm of the latent undoes a gain
        self.kv_down = nn.Linear(D, self.rank + self.rope, bias=False)
        self.kv_norm = RMSNorm(specs.RMSNorm(), dims, ops, layer, width=self.rank)
        self.k_up = nn.Linear(self.rank, H * self.nope, bias=False)
        self.v_up = nn.Linear(self.rank, H * spec.value_size(D, H), bias=False)
        self.o = nn.Linear(H * spec.value_size(D, H), D, bias=spec.bias_o)

    def prepare(self, mask: Mask, tables: PosTables, q_pos_BT: Tensor, k_pos_BS: Tensor, dtype: torch.dtype) -> View:
        """YaRN's factor on cos and sin acts on the whole score instead: most of its channels do not turn."""
        view = super().prepare(mask, tables._replace(magnitude=1.0), q_pos_BT, k_pos_BS, dtype)
        return view._replace(temperature=tables.magnitude**2 if self.has_positions else 1.0)

    def forward(self, x_BTD: Tensor, view: View, cache: Any = None) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_up(self.q_norm(self.q_down(x_BTD))) if self.has_q_latent else self.q(x_BTD)
        plain_BTHC, turned_BTHC = q.view(B, T, self.n_heads, -1).split((self.nope, self.rope), -1)
        turned_BTHC = self.rotate(turned_BTHC, view)
        latent, key = self.kv_down(x_BTD).split((self.rank, self.rope), -1)
        shared_BS1C = torch.cat((self.kv_norm(latent)[:, :, None], self.rotate(key[:, :, None], view)), -1)
        if cache is not None:
            (shared_BS1C,) = cache.append(shared_BS1C)
        form = self.in_latent if self.absorbed or shared_BS1C.shape[1] > T else self.per_head
        return self.o(form(plain_BTHC, turned_BTHC, shared_BS1C, view).reshape(B, T, -1))

    def per_head(self, plain: Tensor, turned: Tensor, shared_BS1C: Tensor, view: View) -> Tensor:
        """Every head's own keys and values (B, S, H, ·)."""
        latent_BSR, key_BS1C = shared_BS1C[:, :, 0, : self.rank], shared_BS1C[..., self.rank :]
        made = self.ops.fan(latent_BSR, [self.k_up.weight, self.v_up.weight], None)
        k_plain, v_BSHC = (m.unflatten(-1, (self.n_heads, -1)) for m in made)
        k_BSHC = torch.cat((k_plain, key_BS1C.expand(-1, -1, self.n_heads, -1)), -1)
        return self.attend(torch.cat((plain, turned), -1), k_BSHC, v_BSHC, view)

    def in_latent(self, plain: Tensor, turned: Tensor, shared_BS1C: Tensor, view: View) -> Tensor:
        """One key [latent | rotated key] and one value, the latent, for all heads."""
        k_up, v_up = (w.weight.view(self.n_heads, -1, self.rank) for w in (self.k_up, self.v_up))
        q_BTHR = torch.einsum("bthn,hnr->bthr", plain, k_up)
        out_BTHR = self.attend(torch.cat((q_BTHR, turned), -1), shared_BS1C, shared_BS1C[..., : self.rank], view)
        return torch.einsum("bthr,hvr->bthv", out_BTHR, v_up)
