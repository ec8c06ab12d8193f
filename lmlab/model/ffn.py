"""The feed-forward part: `ffn(x_BTD, valid_BT) -> (y_BTD, stats)`; a plain one has no stats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lmlab.kernels.ops import Ops
from lmlab.model.dims import Dims
from lmlab.model.spec import FfnSpec


class StackedLinear(nn.Module):
    """The weights of E linear maps, (E, out, in) and (E, out); who calls says which rows go through which."""

    def __init__(self, n: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n, n_out)) if bias else None


class FFN(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) · up(x)) when gated (Shazeer 2020, 2002.05202). `linear` makes its maps:
    of experts they are stacked."""

    def __init__(
        self, spec: FfnSpec, dims: Dims, ops: Ops, layer: int | None = None, linear: Callable[..., Any] = nn.Linear
    ) -> None:
        super().__init__()
        D, width = dims.d_model, spec.width(dims.d_model)
        self.gate = linear(D, width, bias=spec.bias) if spec.gated() else None
        self.up = linear(D, width, bias=spec.bias)
        self.down = linear(width, D, bias=spec.bias)
        activation = (ops.gates if spec.gated() else ops.activations)[spec.name]
        settings = spec.activation()
        self.activation: Any = partial(activation, **settings) if settings else activation

    def forward(self, x_BTD: Tensor, valid_BT: Optional[Tensor] = None) -> tuple[Tensor, None]:
        up_BTF = self.up(x_BTD)
        hidden_BTF = self.activation(up_BTF) if self.gate is None else self.activation(self.gate(x_BTD), up_BTF)
        return self.down(hidden_BTF), None

    def weighted(self, x_MD: Tensor, weights_M1: Tensor, through: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """weight · ffn(x) of rows, each map applied by `through`. Without biases the weight meets the hidden row, so
        that no more than the rows in and the rows out are as wide as the model."""
        up_MF = through(self.up, x_MD)
        hidden_MF = self.activation(up_MF) if self.gate is None else self.activation(through(self.gate, x_MD), up_MF)
        if self.down.bias is None:
            return through(self.down, hidden_MF * weights_M1)
        return through(self.down, hidden_MF) * weights_M1
