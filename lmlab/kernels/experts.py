"""Rows through one of several weights: x[m] · W[e]ᵀ (+ b[e]) for the rows m of expert e, which stand together.

ends_E: where each expert's rows end. Rows after the last end belong to nobody and give 0.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

# The CPU's library makes a program for each number of rows and keeps a thousand of them: with a number of its own for
# each expert and step a model of 8 experts takes 1.3 times as long.
STEP = 64


def per_expert(x_MD: Tensor, weight_EFD: Tensor, bias_EF: Optional[Tensor], ends_E: Tensor) -> Tensor:
    """One linear per expert, as it is written down."""
    biases = [None] * len(weight_EFD) if bias_EF is None else bias_EF.unbind()
    parts, end = [], 0
    for weight_FD, bias_F, (start, end) in zip(weight_EFD.unbind(), biases, spans(ends_E, len(x_MD)), strict=True):
        parts.append(F.linear(x_MD[start:end], weight_FD, bias_F))
    parts.append(x_MD.new_zeros(len(x_MD) - end, weight_EFD.shape[1]))
    return torch.cat(parts)


def grouped(x_MD: Tensor, weight_EFD: Tensor, bias_EF: Optional[Tensor], ends_E: Tensor) -> Tensor:
    """The same without a part per expert in the graph. On the CPU torch's grouped_mm takes 1.4 to 9 times as long as
    one product of the same size, so there it is one opaque operator; elsewhere grouped_mm, where the widths allow."""
    if x_MD.device.type in ("cpu", "meta"):
        out_MF: Tensor = rows_by_expert(x_MD, weight_EFD, ends_E)
    elif aligned(weight_EFD):
        out_MF = by_grouped_mm(x_MD, weight_EFD, ends_E)
    else:
        return per_expert(x_MD, weight_EFD, bias_EF, ends_E)
    return out_MF if bias_EF is None else out_MF + by_row(bias_EF, x_MD, ends_E)


def by_grouped_mm(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """By torch's grouped_mm: the host never learns where the experts end. What it leaves in rows of nobody is not
    defined, so they are set to 0, and so are their gradients."""
    inside_M1 = (torch.arange(len(x_MD), device=x_MD.device) < ends_E[-1])[:, None]
    out_MF = F.grouped_mm(torch.where(inside_M1, x_MD, 0), weight_EFD.transpose(1, 2), offs=ends_E)
    return torch.where(inside_M1, out_MF, 0)


def aligned(weight_EFD: Tensor) -> bool:
    """Whether grouped_mm takes it: a half precision or fp32, rows of whole 16 bytes."""
    widths = weight_EFD.shape[1:]
    return weight_EFD.dtype != torch.float64 and all(n * weight_EFD.element_size() % 16 == 0 for n in widths)


def by_row(bias_EF: Tensor, x_MD: Tensor, ends_E: Tensor) -> Tensor:
    """(M, F): each row's expert's bias, 0 for nobody's."""
    rows = torch.arange(len(x_MD), device=x_MD.device)
    expert_M = torch.bucketize(rows, ends_E, right=True)
    padded = torch.cat((bias_EF, torch.zeros_like(bias_EF[:1])))
    return padded.index_select(0, expert_M)


def spans(ends_E: Tensor, M: int) -> list[tuple[int, int]]:
    """(start, end) of each expert's rows; even ones on the meta device, which holds no numbers."""
    E = len(ends_E)
    ends = [M * (e + 1) // E for e in range(E)] if ends_E.is_meta else ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _pieces(start: int, end: int, M: int) -> list[tuple[int, int]]:
    """Rows start … end as multiples of STEP rows: with some of the next experts', which these write anew, or, where
    there are no more than M, in two pieces."""
    cut = start + (end - start) // STEP * STEP
    if cut == end or cut + STEP <= M:
        return [(start, end if cut == end else cut + STEP)]
    return [(start, cut), (cut, end)] if cut > start else [(start, end)]


def _rows_by_expert(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    M, out_MF = len(x_MD), x_MD.new_empty(len(x_MD), weight_EFD.shape[1])
    for weight_FD, (start, end) in zip(weight_EFD, spans(ends_E, M), strict=True):
        if end > start:
            for i, j in _pieces(start, end, M):
                torch.mm(x_MD[i:j], weight_FD.T, out=out_MF[i:j])
    out_MF[int(ends_E[-1]) :] = 0
    return out_MF


def _rows_by_expert_backward(
    grad_MF: Tensor, x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    """The few rows that are no whole STEP come first in a sum: it is rounded in between, and they are small."""
    M, dx_MD, dweight_EFD = len(x_MD), torch.empty_like(x_MD), torch.empty_like(weight_EFD)
    for weight_FD, dweight_FD, (start, end) in zip(weight_EFD, dweight_EFD, spans(ends_E, M), strict=True):
        if end == start:
            dweight_FD.zero_()
            continue
        for i, j in _pieces(start, end, M):
            torch.mm(grad_MF[i:j], weight_FD, out=dx_MD[i:j])
        cut = start + (end - start) // STEP * STEP
        if cut < end:
            torch.mm(grad_MF[cut:end].T, x_MD[cut:end], out=dweight_FD)
        if cut > start:
            kept = 1 if cut < end else 0
            torch.addmm(dweight_FD, grad_MF[start:cut].T, x_MD[start:cut], beta=kept, out=dweight_FD)
    dx_MD[int(ends_E[-1]) :] = 0
    return dx_MD, dweight_EFD


rows_by_expert: Any = torch.library.custom_op("lmlab::rows_by_expert", _rows_by_expert, mutates_args=())
rows_by_expert_backward: Any = torch.library.custom_op(
    "lmlab::rows_by_expert_backward", _rows_by_expert_backward, mutates_args=()
)


@rows_by_expert.register_fake
def _(x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(x_MD.shape[0], weight_EFD.shape[1])


@rows_by_expert_backward.register_fake
def _(grad_MF: Tensor, x_MD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_MD), torch.empty_like(weight_EFD)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad_MF: Tensor) -> tuple[Tensor, Tensor, None]:
    dx_MD, dweight_EFD = rows_by_expert_backward(grad_MF.contiguous(), *ctx.saved_tensors)
    return dx_MD, dweight_EFD, None


rows_by_expert.register_autograd(_back, setup_context=_keep)
