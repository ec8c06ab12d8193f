"""Cross-entropy of a linear head on CUDA: the plain form is lmlab/kernels/loss.py, whose chunks and products it uses.

One kernel stands between the products of a chunk. It reads a row of logits twice: for its maximum and sum (online, as
in Milakov and Gimelshein 2018, 1805.02867), and to put the gradient in its place. Statistics are fp32. Checked in
Triton's interpreter and compiled for sm_90; not yet run on a GPU. Importing this needs triton.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmlab.kernels.loss import Blocks, Form, by_chunks
from lmlab.kernels.ops import HeadLoss

LONGEST = 4096  # columns of a row that are read at once


def triton_linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    scale: float,
    softcap: Optional[float] = None,
    z_coef: float = 0.0,
    n_valid: Optional[int] = None,
) -> HeadLoss:
    """The loss of cap(scale · hidden · headᵀ); weights get no gradient. float64, which is for checks, has no kernel."""
    kind = Blocks if hidden_ND.dtype == torch.float64 else Rows
    return by_chunks(kind, hidden_ND, head_VD, targets_N, weights_N, Form(scale, softcap, z_coef, n_valid))


class Rows:
    """A program per row."""

    def __init__(self, form: Form, logits_NV: Tensor, wanted: bool) -> None:
        self.form, self.wanted = form, wanted
        self.objective, self.nats = (logits_NV.new_zeros((), dtype=torch.float32) for _ in range(2))

    def __call__(self, logits_NV: Tensor, target_N1: Tensor, weight_N1: Tensor) -> None:
        (N, V), form = logits_NV.shape, self.form
        objective_N, nats_N = (logits_NV.new_empty(N, dtype=torch.float32) for _ in range(2))
        block, warps = shape_of(V)
        if logits_NV.is_meta:
            return
        with torch.cuda.device_of(logits_NV):
            _differentiate[(N,)](
                logits_NV,
                target_N1.contiguous(),
                objective_N,
                nats_N,
                logits_NV.stride(0),
                V,
                V if form.n_valid is None else form.n_valid,
                form.scale,
                1.0 if form.softcap is None else form.softcap,
                form.z_coef,
                CAPPED=form.softcap is not None,
                WANTED=self.wanted,
                BLOCK=block,
                num_warps=warps,
            )
        self.objective += (objective_N * weight_N1[:, 0]).sum()
        self.nats += (nats_N * weight_N1[:, 0]).sum()


def shape_of(V: int) -> tuple[int, int]:
    """(columns at once, warps) for rows of V logits."""
    block = min(LONGEST, triton.next_power_of_2(V))
    return block, max(1, min(8, block // 256))


@triton.jit
def _shaped(x, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as they are meant: scaled, then capped; tanh is 2σ(2x) − 1."""
    x = x.to(tl.float32) * scale
    if CAPPED:
        x = (2 * tl.sigmoid(2 * (x / softcap)) - 1) * softcap
    return x


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits_ptr,
    targets_ptr,
    objective_ptr,
    nats_ptr,
    stride,
    V,
    n_valid,
    scale,
    softcap,
    z_coef,
    CAPPED: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its logits become the gradient of its objective, 0 from n_valid on, where that is WANTED."""
    n = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + n * stride
    cols = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + n)
    picked = _shaped(tl.load(row_ptr + target), scale, softcap, CAPPED)
    top, total = -float("inf"), 0.0
    for start in range(0, n_valid, BLOCK):
        inside = start + cols < n_valid
        x = _shaped(tl.load(row_ptr + start + cols, mask=inside, other=0.0), scale, softcap, CAPPED)
        x = tl.where(inside, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    tl.store(nats_ptr + n, lse - picked)
    tl.store(objective_ptr + n, lse - picked + z_coef * lse * lse)
    pull = 2 * z_coef * lse
    y = picked - lse  # the gradient of nats is e^y − 1 at the target, near 0 by its series
    near_0 = y * (1 + y * (1 / 2 + y * (1 / 6 + y / 24)))
    d_target = tl.where(y > -0.03, near_0, tl.exp(y) - 1) + pull * tl.exp(y)
    for start in range(0, V if WANTED else 0, BLOCK):
        at = start + cols
        raw = tl.load(row_ptr + at, mask=at < n_valid, other=0.0)
        x = _shaped(raw, scale, softcap, CAPPED)
        d = tl.where(at == target, d_target, tl.exp(x - lse) * (1 + pull))
        if CAPPED:
            d *= 1 - (x / softcap) * (x / softcap)
        d = tl.where(at < n_valid, d, 0.0)
        tl.store(row_ptr + at, d.to(raw.dtype), mask=at < V)
