"""THE letter legend. Tensor names carry these letters as a suffix: `x_BTD`, `q_BTHC`, `k_BSKC`.

    B  batch rows           D  width of the residual stream    F  ffn width
    T  query tokens         H  query heads                     E  experts
    S  key tokens           K  key/value heads                 V  vocabulary
    L  layers               C  channels per head               R  distance between query and key

Between modules attention tensors are (B, T, H, C); they are transposed only at the kernel's door.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """The sizes every part is built with."""

    d_model: int  # D
    n_heads: int  # H
    head_dim: int  # C
    n_layers: int  # L
    vocab_size: int  # V, what is predicted
    seq_len: int  # T of a training row
    rotary_dim: int  # of C, those that positions may rotate
