"""What all Triton kernels here are launched by. Imported only where Triton is: lmlab runs without it.

A launcher writes into tensors that it is given. In eager mode it is called as it is; under torch.compile it is one
opaque operator, so that a block stays one graph; on the meta device nothing is launched.

Kernels take sums in at least fp32 (WIDE) and round once, where they store. Tile sizes are plain functions of the shape:
the same sums, in the same order, on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lmlab.kernels.ops import wide

TILE = 2048  # elements that a program holds of each tensor where rows are short


def operator(*written: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Of a launcher `_name(...)` with annotated arguments, called by position; `written`: those it writes into."""

    def made(launch: Callable[..., None]) -> Callable[..., None]:
        opaque = torch.library.custom_op(f"lmlab::{launch.__name__.lstrip('_')}", launch, mutates_args=written)

        def call(*given: Any) -> None:
            if torch.compiler.is_compiling():
                opaque(*given)
            elif not given[0].is_meta:
                with torch.cuda.device_of(given[0]):  # Triton launches on the current GPU, whatever its arguments say
                    launch(*given)

        return call

    return made


def wide_of(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype that values of `dtype` are summed in."""
    return tl.float64 if wide(dtype) == torch.float64 else tl.float32


def power_of_two(n: int) -> int:
    """The least one that is not below n; at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def rows_of_tile(block: int) -> int:
    """How many rows of `block` elements a program takes at once."""
    return max(1, TILE // block)


def warps(elements: int) -> int:
    """Of a program that holds so many: 16 elements or fewer a thread."""
    return min(16, max(4, elements // 512))


def as_rows(x: Tensor) -> Tensor:
    """(N, D) with neighbouring columns side by side; a copy only where the strides are not those of rows."""
    x_ND = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x_ND if x_ND.stride(-1) == 1 or x_ND.shape[-1] == 1 else x_ND.contiguous()
