"""Where tokens stand: ONE object at the Transformer. `embed` adds to embeddings; `tables` serves the attention layers.

Tables are computed in float64 and cast last (bf16 positions are wrong from 257 on), kept outside the module's buffers
(meta builds and `.bfloat16()` would spoil them), and grow when longer rows arrive. Positions are always passed, never
inferred; rows that share theirs share one table row.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.errors import ConfigError, LmlabError
from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims


class PosTables(NamedTuple):
    """What attention layers may use: rotations of the new tokens, and a bias per head and distance. float64."""

    cos: Optional[Tensor] = None  # (1 or B, T, 1, d/2)
    sin: Optional[Tensor] = None
    bias_HR: Optional[Tensor] = None  # the bias at distance R between query and key
    pairing: str = ""  # how channels pair up for the rotation: a key of Ops.rope

    def rotation(self, dtype: torch.dtype) -> Optional[tuple[str, Tensor, Tensor]]:
        """(pairing, cos, sin) in the dtype of the model: the cast comes last. None when nothing turns."""
        if self.cos is None or self.sin is None:
            return None
        return self.pairing, self.cos.to(dtype), self.sin.to(dtype)


class Position(nn.Module):
    """Base: adds nothing, offers nothing."""

    def __init__(self, spec: specs.Spec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.dims = dims

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """The embeddings with what this kind of position adds to them."""
        return x_BTD

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_B: Optional[Tensor] = None) -> PosTables:
        """Made once per forward, outside the compiled blocks. length_B: tokens of each row (None = all of it)."""
        return PosTables()


class NoPosition(Position):
    """No positions at all: order enters by the causal mask alone (Kazemnejad et al. 2023, 2305.19466)."""


class Sinusoidal(Position):
    """PE(p, 2i) = sin(p·θ_i), PE(p, 2i+1) = cos(p·θ_i), θ_i = theta^(−2i/D) (Vaswani et al. 2017, 1706.03762)."""

    def __init__(self, spec: specs.Sinusoidal, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        self.angles = Angles(spec.theta, dims.d_model + dims.d_model % 2)

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        cos, sin = self.angles(positions_BT)
        table = torch.stack((sin, cos), -1).flatten(-2)[..., : self.dims.d_model]
        return x_BTD + table.to(x_BTD.dtype)


class Learned(Position):
    """One learned vector per position, added to the embeddings; an error past the table, never a clamp."""

    def __init__(self, spec: specs.Learned, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(spec.max_len or dims.seq_len, dims.d_model))

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Raises LmlabError when a row is longer than the table (on CPU: when any position lies past it)."""
        rows = self.weight.shape[0]
        on_host = positions_BT.device.type == "cpu" and positions_BT.numel() > 0
        needed = int(positions_BT.max()) + 1 if on_host else positions_BT.shape[1]
        if needed > rows:
            raise LmlabError(
                f"`pos=learned` has {rows} positions (`pos.max_len`), position {needed - 1} was asked for",
                "use shorter rows, or train with a larger pos.max_len or with pos=rope",
            )
        return x_BTD + self.ops.embedding(shared_row(positions_BT), self.weight)


class Rope(Position):
    """Pairs of channels turn by p·θ_i, θ_i = theta^(−2i/d), d the rotary width (Su et al. 2021, 2104.09864)."""

    def __init__(self, spec: specs.Rope, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        width = spec.width(dims.head_dim)
        if width % 2 or width == 0:
            raise ConfigError(
                f"`pos.fraction` {spec.fraction:g} of `attn.head_dim` {dims.head_dim} turns {width} channels, "
                "which do not pair up",
                "choose them so that the rotary width is even",
            )
        self.pairing, self.angles = spec.pairing, Angles(spec.theta, width)

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_B: Optional[Tensor] = None) -> PosTables:
        cos, sin = self.angles(q_pos_BT)
        return PosTables(cos=cos[:, :, None], sin=sin[:, :, None], pairing=self.pairing)


class Alibi(Position):
    """Scores get −slope_h · (i − j), slopes a geometric series over heads (Press et al. 2021, 2108.12409)."""

    def __init__(self, spec: specs.Alibi, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        self.slopes = alibi_slopes(dims.n_heads)

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_B: Optional[Tensor] = None) -> PosTables:
        distance_R = torch.arange(reach(q_pos_BT, k_pos_BS), dtype=torch.float64, device=q_pos_BT.device)
        slope_H = torch.tensor(self.slopes, dtype=torch.float64, device=q_pos_BT.device)
        return PosTables(bias_HR=-slope_H[:, None] * distance_R)


class Angles:
    """cos and sin of p·θ_i for i < width/2, float64: a table that grows, on the device of the positions asked for."""

    def __init__(self, theta: float, width: int) -> None:
        self.theta, self.width = theta, width
        self.table: Optional[tuple[Tensor, Tensor]] = None

    def __call__(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(1 or B, T, width/2) each. On an accelerator straight from the positions: looking at them would stall it."""
        rows = shared_row(positions_BT)
        if rows.device.type != "cpu":
            return self.compute(rows)
        needed = int(rows.max()) + 1 if rows.numel() else 0
        if self.table is None or self.table[0].shape[0] < needed:
            self.table = self.compute(torch.arange(2 ** max(8, (needed - 1).bit_length())))
        cos, sin = (F.embedding(rows, table) for table in self.table)
        return cos, sin

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin with a last dimension of width/2."""
        even = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64)[..., None] * self.theta ** (-even / self.width)
        return angles.cos(), angles.sin()


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(−8/n), 2^(−16/n), … for n a power of two; else those of the next lower one, then every other of the next."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes if power == n_heads else slopes + alibi_slopes(2 * power)[0::2][: n_heads - power]


def shared_row(positions_BT: Tensor) -> Tensor:
    """(1, T) when all rows are known to be the same, else as it is. Compares values on the CPU only."""
    if positions_BT.shape[0] == 1:
        return positions_BT
    same = positions_BT.stride(0) == 0
    if not same and positions_BT.device.type == "cpu":
        same = torch.equal(positions_BT, positions_BT[:1].expand_as(positions_BT))
    return positions_BT[:1] if same else positions_BT


def reach(q_pos_BT: Tensor, k_pos_BS: Tensor) -> int:
    """Distances a bias table must cover. Off the CPU: S, which suits rows whose positions have no gaps."""
    if q_pos_BT.device.type != "cpu" or q_pos_BT.numel() == 0:
        return k_pos_BS.shape[1]
    return max(1, int(q_pos_BT.max() - k_pos_BS.min()) + 1)
