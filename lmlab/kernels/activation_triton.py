"""Activations and gated activations in Triton: one pass forward, one backward that computes the activation again.

The formulas are in activation.py. Everything inside is at least fp32 and rounded once. Compiled code fuses the same
pass: against it this is not yet measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.kernels.launch import as_rows, operator, wide_of

BLOCK = 1024


# ---------------------------------------------------------------- kernels


@triton.jit
def _act(x, KIND: tl.constexpr, BETA: tl.constexpr):
    """(act(x), act'(x)). A NaN stays one, so that a run that diverges is seen to."""
    if KIND == "relu":
        value = tl.where(x < 0, 0.0, x)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu2":
        root = tl.where(x < 0, 0.0, x)
        value, slope = root * root, 2 * root
    elif KIND == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == "gelu_tanh":  # 0.5 · (1 + tanh u) = σ(2u)
        below = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * below
        slope = below + value * (1 - below) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif KIND == "silu":
        below = tl.sigmoid(x * BETA)
        value = x * below
        slope = below + value * (1 - below) * BETA
    elif KIND == "sigmoid":
        value = tl.sigmoid(x)
        slope = value * (1 - value)
    else:
        value, slope = x, tl.full(x.shape, 1.0, x.dtype)
    return value, slope


@triton.jit
def _forward(
    x, up, out, width, x_step, up_step,
    KIND: tl.constexpr, BETA: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _ = _act(tl.load(x + row * x_step + col, mask=col < width, other=0.0).to(WIDE), KIND, BETA)
    if up is not None:
        value *= tl.load(up + row * up_step + col, mask=col < width, other=0.0).to(WIDE)
    tl.store(out + row * width + col, value.to(out.dtype.element_ty), mask=col < width)


@triton.jit
def _backward(
    grad, x, up, d_x, d_up, width, grad_step, x_step, up_step,
    KIND: tl.constexpr, BETA: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, at = col < width, row * width + col
    pulled = tl.load(grad + row * grad_step + col, mask=here, other=0.0).to(WIDE)
    value, slope = _act(tl.load(x + row * x_step + col, mask=here, other=0.0).to(WIDE), KIND, BETA)
    if up is not None:
        tl.store(d_up + at, (pulled * value).to(d_up.dtype.element_ty), mask=here)
        pulled *= tl.load(up + row * up_step + col, mask=here, other=0.0).to(WIDE)
    tl.store(d_x + at, (pulled * slope).to(d_x.dtype.element_ty), mask=here)


# ---------------------------------------------------------------- launchers


def _flat(*given: Optional[Tensor]) -> tuple[int, int]:
    """(rows, their width) that all of them are walked by: one row where each lies in one piece."""
    first = given[0]
    assert first is not None
    whole = all(t is None or t.is_contiguous() for t in given)
    return (1, first.numel()) if whole else (first.shape[0], first.shape[1])


def _step(x: Optional[Tensor]) -> int:
    return 0 if x is None else x.stride(0)


@operator("out")
def _act_forward(x: Tensor, up: Optional[Tensor], out: Tensor, kind: str, beta: float) -> None:
    rows, width = _flat(x, up)
    if x.numel():
        _forward[(rows * triton.cdiv(width, BLOCK),)](
            x, up, out, width, _step(x), _step(up), KIND=kind, BETA=beta, WIDE=wide_of(x.dtype), BLOCK=BLOCK
        )


@operator("d_x", "d_up")
def _act_backward(
    grad: Tensor, x: Tensor, up: Optional[Tensor], d_x: Tensor, d_up: Optional[Tensor], kind: str, beta: float
) -> None:
    rows, width = _flat(grad, x, up)
    if x.numel():
        _backward[(rows * triton.cdiv(width, BLOCK),)](
            grad, x, up, d_x, d_up, width, _step(grad), _step(x), _step(up),
            KIND=kind, BETA=beta, WIDE=wide_of(x.dtype), BLOCK=BLOCK,
        )  # fmt: skip


class _Act(torch.autograd.Function):
    """act(x), or act(x) · up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Optional[Tensor], kind: str, beta: float) -> Tensor:
        x_NF, up_NF = as_rows(x), None if up is None else as_rows(up)
        out = torch.empty(x_NF.shape, dtype=x.dtype, device=x.device)
        _act_forward(x_NF, up_NF, out, kind, beta)
        ctx.save_for_backward(x_NF, up_NF)
        ctx.kind, ctx.beta = kind, beta
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        x_NF, up_NF = ctx.saved_tensors
        d_x = torch.empty(x_NF.shape, dtype=x_NF.dtype, device=x_NF.device)
        d_up = None if up_NF is None else torch.empty_like(d_x)
        _act_backward(as_rows(grad), x_NF, up_NF, d_x, d_up, ctx.kind, ctx.beta)
        return d_x.view(grad.shape), None if d_up is None else d_up.view(grad.shape), None, None


# ---------------------------------------------------------------- what Ops gets


def _plain(x: Tensor, *, kind: str, beta: float = 1.0) -> Tensor:
    return _Act.apply(x, None, kind, float(beta))


def _gated(gate: Tensor, up: Tensor, *, kind: str) -> Tensor:
    return _Act.apply(gate, up, kind, 1.0)


def _geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return _Act.apply(gate, up, "gelu" if approximate == "none" else "gelu_tanh", 1.0)


TRITON_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    kind: partial(_plain, kind=kind) for kind in ("relu", "relu2", "gelu", "gelu_tanh", "silu")
}
TRITON_GATES: dict[str, Callable[..., Tensor]] = {
    "glu": partial(_gated, kind="sigmoid"),
    "bilinear": partial(_gated, kind="identity"),
    "reglu": partial(_gated, kind="relu"),
    "geglu": _geglu,
    "swiglu": partial(_gated, kind="silu"),
}
