"""Elementwise activations by ffn name: plain ones h(up), and gated ones h(gate, up) = act(gate) · up.

The Triton half is in activation_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, 2109.08668)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), GPT-2's approximation."""
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor, beta: float = 1.0) -> Tensor:
    """x · σ(beta · x), swish (Ramachandran et al. 2017, 1710.05941): 1 → SiLU, 0 → x/2, ∞ → ReLU."""
    return F.silu(x) if beta == 1 else x * torch.sigmoid(beta * x)


def glu(gate: Tensor, up: Tensor) -> Tensor:
    """σ(gate) · up (Dauphin et al. 2016, 1612.08083); this one and the next four: Shazeer 2020, 2002.05202."""
    return torch.sigmoid(gate) * up


def bilinear(gate: Tensor, up: Tensor) -> Tensor:
    """gate · up."""
    return gate * up


def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate) · up."""
    return F.relu(gate) * up


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) · up."""
    return F.gelu(gate, approximate=approximate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}
GATES: dict[str, Callable[..., Tensor]] = {
    "glu": glu,
    "bilinear": bilinear,
    "reglu": reglu,
    "geglu": geglu,
    "swiglu": swiglu,
}
