"""The sizes that all contenders of a comparison share, read from a composition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from lmlab.config.tree import Experiment


@dataclass(frozen=True)
class Shape:
    """Letters as in lmlab/model/dims.py; rows of T tokens a step."""

    L: int
    D: int
    H: int
    K: int
    C: int
    F: int
    T: int
    V: int
    rows: int

    @classmethod
    def of(cls, exp: Experiment, vocab_size: int) -> Shape:
        model, attn, ffn = exp.model, cast(Any, exp.attn), cast(Any, exp.ffn)
        return cls(
            L=model.n_layers,
            D=model.d_model,
            H=model.n_heads,
            K=attn.kv_heads(model.n_heads) if hasattr(attn, "kv_heads") else model.n_heads,
            C=exp.arch.head_dim(),
            F=ffn.width(model.d_model),
            T=model.seq_len,
            V=vocab_size,
            rows=exp.train.batch_tokens // model.seq_len,
        )

    def said(self) -> str:
        return f"L={self.L} D={self.D} H={self.H} K={self.K} F={self.F} T={self.T} V={self.V}, {self.rows} rows a step"
