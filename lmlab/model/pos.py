"""Where tokens stand: ONE object at the Transformer. `embed` adds to embeddings; `tables` serves the attention layers.

Tables are computed once, in float64, and cast last (bf16 positions are wrong from 257 on); they are kept outside the
module's buffers (meta builds and `.bfloat16()` would spoil them). Positions are always passed, never inferred, and
never looked at: on an accelerator that would stall it. Rows that share theirs share one table row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.errors import ConfigError, LmlabError
from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.init import ZEROS, Rule
from lmlab.model.rope_scaling import Scaling, plain


class PosTables(NamedTuple):
    """What attention layers may use: rotations of the new tokens, and a bias per head and distance. float64."""

    cos: Optional[Tensor] = None  # (1 or B, T, 1, d/2)
    sin: Optional[Tensor] = None
    bias_HR: Optional[Tensor] = None  # the bias at distance R between query and key; the last holds from there on
    slope_H: Optional[Tensor] = None  # a bias of −slope · distance, at any distance
    pairing: str = ""  # how channels pair up for the rotation: a key of Ops.rope
    magnitude: float = 1.0  # factor on cos and sin (YaRN)

    def rotation(self, dtype: torch.dtype) -> Optional[tuple[str, Tensor, Tensor]]:
        """(pairing, cos, sin) in the dtype of the model: the cast comes last. None when nothing turns."""
        if self.cos is None or self.sin is None:
            return None
        cos, sin = self.cos, self.sin
        if self.magnitude != 1:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return self.pairing, cos.to(dtype), sin.to(dtype)

    @property
    def biased(self) -> bool:
        """Whether scores get a bias."""
        return self.bias_HR is not None or self.slope_H is not None


class Position(nn.Module):
    """Base: adds nothing, offers nothing."""

    needs_length = False  # whether `tables` is handed the lengths; otherwise nobody works them out

    def __init__(self, spec: specs.Spec, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__()
        self.dims = dims

    def scale_by(self, scaling: Any) -> None:
        """Take a scaling of rotations (lmlab/model/rope_scaling.py). Raises ConfigError: only rotations have one."""
        raise ConfigError(
            f"{type(self).__name__} has no rotations that could be scaled", "use pos=rope, or rope_scaling=none"
        )

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """The embeddings with what this kind of position adds to them."""
        return x_BTD

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_BT: Optional[Tensor] = None) -> PosTables:
        """Made once per forward, by a cache once for all layers that keep the same keys, outside the compiled blocks.
        k_pos_BS: of all keys that the queries may see. length_BT: (B, 1 or T) tokens of the text that each query stands
        in: its document, or its row without padding (None = all of the row)."""
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
    """Pairs of channels turn by p·θ_i, θ_i = theta^(−2i/d), d the rotary width (Su et al. 2021, 2104.09864); a scaling
    changes the θ_i."""

    def __init__(self, spec: specs.Rope, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        width = spec.width(dims.rotary_dim)
        if width % 2 or width == 0:
            raise ConfigError(
                f"`pos.fraction` {spec.fraction:g} of {dims.rotary_dim} channels turns {width} channels, "
                "which do not pair up",
                "choose them so that the rotary width is even",
            )
        self.pairing, self.angles, self.scaling = spec.pairing, Angles(spec.theta, width), Scaling(spec, dims, ops)

    def scale_by(self, scaling: Scaling) -> None:
        self.scaling, self.needs_length = scaling, scaling.needs_length
        self.angles = Angles(self.angles.theta, self.angles.width)  # its table was of other frequencies
        self.angles.frequencies = scaling.frequencies

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_BT: Optional[Tensor] = None) -> PosTables:
        cos, sin = self.angles(q_pos_BT)
        if self.needs_length:
            cos, sin = self.grown(q_pos_BT, length_BT, k_pos_BS.shape[1], cos, sin)
        magnitude = self.scaling.magnitude
        return PosTables(cos=cos[:, :, None], sin=sin[:, :, None], pairing=self.pairing, magnitude=magnitude)

    def grown(
        self, positions_BT: Tensor, length_BT: Optional[Tensor], S: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tables of rows longer than the original length; of the others those that are handed in."""
        if length_BT is None:
            length_BT = torch.full((1, 1), S, device=positions_BT.device)
        longer = self.scaling.longer(shared_row(length_BT))[..., None]
        if longer.device.type == "cpu" and not bool(longer.any()):
            return cos, sin
        frequencies = self.scaling.grown(self.angles.theta, self.angles.width, shared_row(length_BT))
        angles = shared_row(positions_BT)[..., None].double() * frequencies
        return torch.where(longer, angles.cos(), cos), torch.where(longer, angles.sin(), sin)


class Alibi(Position):
    """Scores get −slope_h · (i − j), slopes a geometric series over heads (Press et al. 2021, 2108.12409)."""

    def __init__(self, spec: specs.Alibi, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        self.slope_H: Optional[Tensor] = None  # kept: copied to an accelerator at every step it would stall it

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_BT: Optional[Tensor] = None) -> PosTables:
        if self.slope_H is None or self.slope_H.device != q_pos_BT.device:
            self.slope_H = torch.tensor(alibi_slopes(self.dims.n_heads), dtype=torch.float64, device=q_pos_BT.device)
        return PosTables(slope_H=self.slope_H)


class T5(Position):
    """One learned value per head and bucket of distances, shared by the layers (Raffel et al. 2020, 1910.10683).

    Half of the buckets are the distances 0, 1, 2, …; the others grow logarithmically up to max_distance. Only the past
    has buckets. T5 leaves out 1/√C; here the scores keep it, like everywhere (attn.scale=1 for T5's).
    """

    def __init__(self, spec: specs.T5, dims: Dims, ops: Ops, layer: int | None = None) -> None:
        super().__init__(spec, dims, ops, layer)
        self.weight = nn.Parameter(torch.empty(dims.n_heads, spec.n_buckets))
        self.buckets = t5_buckets(spec.n_buckets, spec.max_distance)
        self.bucket_R: Optional[Tensor] = None

    def init_rules(self) -> dict[str, Rule]:
        """No preference of distances at the start."""
        return {"weight": ZEROS}

    def tables(self, q_pos_BT: Tensor, k_pos_BS: Tensor, length_BT: Optional[Tensor] = None) -> PosTables:
        if self.bucket_R is None or self.bucket_R.device != self.weight.device:
            with torch.inference_mode(False):  # kept, and saved for backward later
                self.bucket_R = torch.tensor(self.buckets, device=self.weight.device)
        return PosTables(bias_HR=self.weight.index_select(1, self.bucket_R))


def t5_buckets(n_buckets: int, max_distance: int) -> list[int]:
    """The bucket of each distance 0 … max_distance; the last one holds from there on."""
    exact, found = n_buckets // 2, list(range(min(n_buckets // 2, max_distance + 1)))
    starts = [exact, *(t5_start(n_buckets, max_distance, k) for k in range(1, n_buckets - exact)), max_distance + 1]
    for k, (start, end) in enumerate(itertools.pairwise(starts)):
        found += [exact + k] * (end - start)
    return found


def t5_start(n_buckets: int, max_distance: int, k: int) -> int:
    """The smallest distance d in the k-th bucket of the logarithmic ones: (d / exact)^n ≥ (max / exact)^k, n of them.
    Where the root is near a whole number, whole numbers decide: rounding would put that distance a bucket too low."""
    exact = n_buckets // 2
    n = n_buckets - exact
    root = exact * (max_distance / exact) ** (k / n)
    near = round(root)
    if abs(root - near) > 1e-9 * root:
        return math.ceil(root)
    return near if near**n * exact**k >= max_distance**k * exact**n else near + 1


class Angles:
    """cos and sin of p·θ_i for i < width/2, float64, at any position p < 2^24.

    With p = a + 256·b + 65536·c, e^(i·p·θ) is the product of three turns, each from a table of 256 rows: they serve
    every length, so nobody has to ask how far the positions reach.
    """

    def __init__(self, theta: float, width: int) -> None:
        self.theta, self.width = theta, width
        self.frequencies: Callable[[float, int, torch.device], Tensor] = plain
        self.table: Optional[Tensor] = None

    def __call__(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(1 or B, T, width/2) each."""
        rows = shared_row(positions_BT)
        if self.table is None or self.table.device != rows.device:
            self.table = self.compute(rows.device)
        digits = (rows % 256, rows // 256 % 256, rows // 65536)
        near, middle, far = (F.embedding(digit, table) for digit, table in zip(digits, self.table, strict=True))
        turn = near * middle * far
        return turn.real, turn.imag

    def compute(self, device: torch.device) -> Tensor:
        """(3, 256, width/2) complex: the turns at 0, step, 2·step, … for each step."""
        place = torch.stack([step * torch.arange(256, dtype=torch.float64, device=device) for step in (1, 256, 65536)])
        angles = place[:, :, None] * self.frequencies(self.theta, self.width, device)
        return torch.complex(angles.cos(), angles.sin())


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(−8/n), 2^(−16/n), … for n a power of two; else those of the next lower one, then every other of the next."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes if power == n_heads else slopes + alibi_slopes(2 * power)[0::2][: n_heads - power]


def n_distances(q_pos_BT: Tensor, k_pos_BS: Tensor) -> int:
    """How many distances from 0 a query may have to a key before it: what a bias of every distance must have. Positions
    may have gaps, and a cache may hold the first and the last keys of a long text alone, so they are looked at (an
    accelerator is waited for); at least the number of keys, which keeps the shape of most tables the same."""
    if q_pos_BT.is_meta or q_pos_BT.numel() == 0:
        return k_pos_BS.shape[1]
    return max(k_pos_BS.shape[1], int(q_pos_BT.max() - k_pos_BS.min()) + 1)


def shared_row(positions_BT: Tensor) -> Tensor:
    """(1, T) when all rows are known to be the same, else as it is. Compares values on the CPU only."""
    if positions_BT.shape[0] == 1:
        return positions_BT
    same = positions_BT.stride(0) == 0
    if not same and positions_BT.device.type == "cpu":
        same = torch.equal(positions_BT, positions_BT[:1].expand_as(positions_BT))
    return positions_BT[:1] if same else positions_BT
