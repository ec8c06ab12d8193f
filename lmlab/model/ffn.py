"""The feed-forward part: `ffn(x_BTD, valid_BT) -> (y_BTD, stats)`; a plain one has no stats."""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

from torch import Tensor, nn

from lmlab.kernels.ops import Ops
from lmlab.model.dims import Dims
from lmlab.model.spec import FfnSpec


class FFN(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) · up(x)) when gated (Shazeer 2020, 2002.05202)."""

    def __init__(self, spec: FfnSpec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        D, width = dims.d_model, spec.width(dims.d_model)
        self.gate = nn.Linear(D, width, bias=spec.bias) if spec.gated() else None
        self.up = nn.Linear(D, width, bias=spec.bias)
        self.down = nn.Linear(width, D, bias=spec.bias)
        activation = (ops.gates if spec.gated() else ops.activations)[spec.name]
        settings = spec.activation()
        self.activation: Any = partial(activation, **settings) if settings else activation

    def forward(self, x_BTD: Tensor, valid_BT: Optional[Tensor] = None) -> tuple[Tensor, None]:
        up_BTF = self.up(x_BTD)
        hidden_BTF = self.activation(up_BTF) if self.gate is None else self.activation(self.gate(x_BTD), up_BTF)
        return self.down(hidden_BTF), None
