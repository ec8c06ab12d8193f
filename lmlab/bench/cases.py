"""The operations of lmlab/kernels that move memory rather than multiply matrices, each at a width.

A case knows what it is given and the least that it must move: every input read once, every result written once. Its
backward reads the gradients that arrive and the inputs that the derivative depends on, and writes the gradients. An
implementation that keeps something else, or reads twice, is held to the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmlab.kernels.norm import add
from lmlab.kernels.ops import Ops
from lmlab.registry import OPTIONS

EPS = 1e-6
HEAD_DIM = 64  # C, for rope
ROW_TOKENS = 480  # T of a row, for rope
FFN_WIDTH = 1024  # of what sees none
ELSEWHERE = {
    "fan": "a matrix product",
    "experts": "a matrix product",
    "render": "`lmlab bench attn`",
    "attention": "`lmlab bench attn`",
}


@dataclass(frozen=True)
class Case:
    """role: of Ops. given: in the order of the operation; those with a gradient require it. pick: the implementation
    out of an Ops. then: what it takes after them. D: None where it sees no width."""

    role: str
    name: str
    D: int | None
    given: tuple[Tensor, ...]
    pick: Callable[[Ops], Callable[..., Any]]
    then: tuple[Any, ...]
    forward_bytes: int
    backward_bytes: int

    @property
    def wants(self) -> list[Tensor]:
        return [x for x in self.given if x.requires_grad]

    def said(self) -> str:
        return self.name if self.D is None else f"{self.name} D={self.D}"


@dataclass(frozen=True)
class Sizes:
    """elements: of x, at every width (those of whole rows). V: rows of the embedding."""

    elements: int
    V: int
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_(grad)


@dataclass(frozen=True)
class Added:
    """What a model does without a fused residual add: the sum, then the norm. Equal where the norms are."""

    norm: Callable[..., Tensor]

    def __call__(self, residual: Tensor, branch: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        total = add(residual, branch)
        return total, self.norm(total, *rest)


def n_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def of_width(D: int, sizes: Sizes) -> Iterator[Case]:
    """What sees a width: norms, alone and after an add, rotations, the embedding."""
    yield from norms(D, sizes)
    yield from rotations(D, sizes)
    yield embedding(D, sizes)


def norms(D: int, sizes: Sizes) -> Iterator[Case]:
    """x and the sum are read again by backward. With alpha 1 residual and branch have one gradient, written once."""
    N = max(1, sizes.elements // D)
    for name in ("rms_norm", "layer_norm"):
        x, branch = sizes.normal(N, D), sizes.normal(N, D)
        weights = [sizes.normal(D) for _ in range(2 if name == "layer_norm" else 1)]
        one, theirs = n_bytes(x), n_bytes(*weights)
        back = 3 * one + n_bytes(weights[0]) + theirs  # the bias is not read, only its gradient written
        picks = _named(name), _after_add(name)
        yield Case(name, name, D, (x, *weights), picks[0], (EPS,), 2 * one + theirs, back)
        role = f"add_{name}"
        yield Case(role, role, D, (x, branch, *weights), picks[1], (EPS,), 4 * one + theirs, back + one)


def rotations(D: int, sizes: Sizes) -> Iterator[Case]:
    """Backward turns the gradient back: x is not read again."""
    C, N = math.gcd(D, HEAD_DIM), max(1, sizes.elements // D)
    T = min(N, ROW_TOKENS)
    x_BTHC = sizes.normal(N // T, T, D // C, C)
    angle_BTHC = torch.rand(1, T, 1, C // 2, device=sizes.device) * math.tau
    tables = tuple(table.to(sizes.dtype) for table in (angle_BTHC.cos(), angle_BTHC.sin()))
    for pairing in ("half", "interleaved"):
        least = 2 * n_bytes(x_BTHC) + n_bytes(*tables)
        yield Case("rope", f"rope {pairing}", D, (x_BTHC, *tables), _keyed("rope", pairing), (), least, least)


def embedding(D: int, sizes: Sizes) -> Case:
    """Ids drawn evenly. Each row that is looked up is read once; the gradient of all rows is written."""
    N = max(1, sizes.elements // D)
    ids_N = torch.randperm(N, device=sizes.device) % sizes.V
    weight_VD = sizes.normal(sizes.V, D)
    row = D * weight_VD.element_size()
    forward = n_bytes(ids_N) + (min(N, sizes.V) + N) * row
    backward = n_bytes(ids_N, weight_VD) + N * row
    return Case("embedding", "embedding", D, (ids_N, weight_VD), _named("embedding"), (), forward, backward)


def elementwise(sizes: Sizes) -> Iterator[Case]:
    """Every ffn option at its own settings; backward reads again what goes in."""
    x, gate = (sizes.normal(max(1, sizes.elements // FFN_WIDTH), FFN_WIDTH) for _ in range(2))
    for name, option in OPTIONS["ffn"].items():
        spec: Any = option()
        role = "gates" if spec.gated() else "activations"
        given = (gate, x) if spec.gated() else (x,)
        least = n_bytes(*given, x), n_bytes(*given, *given, x)
        yield Case(role, name, None, given, _keyed(role, name), tuple(spec.activation().values()), *least)


def _named(role: str) -> Callable[[Ops], Callable[..., Any]]:
    return lambda ops: getattr(ops, role)


def _keyed(role: str, key: str) -> Callable[[Ops], Callable[..., Any]]:
    return lambda ops: getattr(ops, role)[key]


def _after_add(norm: str) -> Callable[[Ops], Callable[..., Any]]:
    return lambda ops: getattr(ops, f"add_{norm}") or Added(getattr(ops, norm))
