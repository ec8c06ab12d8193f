"""Elementwise activations by ffn name: plain ones h(up), and gated ones h(gate, up) = act(gate) · up."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), GPT-2's approximation."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu}
