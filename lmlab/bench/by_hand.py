"""The default's net as one would write it for itself: one file, no parts to choose, the same operations underneath.

What it is faster than the composed model is the price of composing. RMSNorm, prenorm, RoPE (half), grouped heads,
SwiGLU, a tied head; weights are taken from a composed model, so that both start from one loss.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmlab.config.tree import Experiment
from lmlab.kernels.attention import Rendered
from lmlab.kernels.scores import Scores
from lmlab.model.transformer import Output, Transformer

FREE = {  # fields of a part that may be what they like: the net by hand takes them up
    "norm": ("eps",),
    "block": (),
    "pos": ("theta",),
    "rope_scaling": (),
    "attn": ("n_kv_heads", "scale"),
    "ffn": ("d_ff", "mult", "multiple_of"),
    "moe": (),
    "model": ("n_layers", "d_model", "n_heads", "seq_len", "logit_scale"),
}
HEADS = ("mha", "gqa", "mqa")
PARTS = {"norm": "rmsnorm", "block": "prenorm", "pos": "rope", "rope_scaling": "none", "ffn": "swiglu", "moe": "none"}


def same_net(exp: Experiment) -> bool:
    """Whether the composition is the one that is written here: every field that is not FREE at its default."""
    named = all(getattr(exp, group).name == name for group, name in PARTS.items()) and exp.attn.name in HEADS
    train = exp.train.residual_dtype == "compute" and exp.train.activation_checkpointing == "none"
    return named and train and exp.data.packing == "stream" and all(_plain(exp, group) for group in FREE)


def _plain(exp: Experiment, group: str) -> bool:
    spec = getattr(exp, group)
    usual = type(spec)()
    return all(getattr(spec, f.name) == getattr(usual, f.name) for f in fields(spec) if f.name not in FREE[group])


def of(exp: Experiment, net: Transformer) -> ByHand:
    """The composed net's weights in the net by hand."""
    norm, pos, attn = (cast(Any, part) for part in (exp.norm, exp.pos, exp.attn))
    return ByHand(net, eps=norm.eps, theta=pos.theta, scale=attn.scale)


class Layer(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        attn, ffn = block.attn, block.ffn
        self.norm1, self.norm2 = block.norm1.weight, block.norm2.weight
        self.q, self.k, self.v, self.o = (m.weight for m in (attn.q, attn.k, attn.v, attn.o))
        self.gate, self.up, self.down = (m.weight for m in (ffn.gate, ffn.up, ffn.down))


class ByHand(nn.Module):
    """Called as a Transformer is: net(tokens, positions, targets_BT=, weights_BT=) -> Output."""

    def __init__(self, net: Transformer, *, eps: float, theta: float, scale: float | None) -> None:
        super().__init__()
        self.embed, self.norm = net.embed.weight, net.norm.weight  # type: ignore[union-attr]
        self.layers = nn.ModuleList(Layer(block) for block in net.blocks)
        self.C, self.ops, self.eps, self.theta = net.dims.head_dim, net.ops, eps, theta
        self.scale, self.logit_scale = self.C**-0.5 if scale is None else scale, net.logit_scale

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        documents_BT: None,
        targets_BT: Tensor,
        weights_BT: Tensor,
    ) -> Output:
        ops, (B, T) = self.ops, tokens_BT.shape
        x = ops.embedding(tokens_BT, self.embed)
        turns = positions_BT[:1, :, None].double() * self.theta ** -(
            torch.arange(0, self.C, 2, device=x.device).double() / self.C
        )
        cos, sin = turns.cos().to(x.dtype)[:, :, None], turns.sin().to(x.dtype)[:, :, None]
        scores = Scores(causal=True)
        backend = "dense" if T <= 512 and x.dtype != torch.float32 and x.device.type == "cpu" else "sdpa"
        mask: Rendered = ops.render[backend](scores, T, T, x.dtype, x.device)
        layers: list[Any] = list(self.layers)
        for layer in layers:
            h = ops.rms_norm(x, layer.norm1, self.eps, 0.0)
            q, k, v = (p.view(B, T, -1, self.C) for p in ops.fan(h, (layer.q, layer.k, layer.v), None))
            q, k = ops.rope["half"](q, cos, sin), ops.rope["half"](k, cos, sin)
            h = ops.attention[backend](q, k, v, scores, mask, scale=self.scale)
            x, h = self.added(x, h.reshape(B, T, -1) @ layer.o.T, layer.norm2)
            x = x + ops.gates["swiglu"](h @ layer.gate.T, h @ layer.up.T) @ layer.down.T
        h = ops.rms_norm(x, self.norm, self.eps, 0.0).flatten(0, 1)
        loss = ops.linear_cross_entropy(h, self.embed, targets_BT.flatten(), weights_BT.flatten(), self.logit_scale)
        return Output(None, loss, ())

    def added(self, x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        if self.ops.add_rms_norm is not None:
            return self.ops.add_rms_norm(x, branch, weight, self.eps, 1.0, 0.0)
        x = x + branch
        return x, self.ops.rms_norm(x, weight, self.eps, 0.0)

    def after_step(self, loads: Any) -> None:
        """Nothing is done between steps."""
