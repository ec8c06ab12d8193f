"""Rotations for longer rows than were trained: each scaling turns (theta, rotary width) into frequencies per pair.

`frequencies(theta, width) -> (width/2,)` float64 in radians per token, `magnitude` is a factor on cos and sin, and a
scaling that depends on the length has `grown(...)` besides. At factor 1 each is plain RoPE to the last bit.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from lmlab.kernels.ops import Ops
from lmlab.model import spec as specs
from lmlab.model.dims import Dims


def plain(theta: float, width: int, device: torch.device) -> Tensor:
    """θ_i = theta^(−2i/d) (Su et al. 2021, 2104.09864)."""
    even = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return theta ** (-even / width)


class Scaling:
    """Base and `rope_scaling=none`: the plain frequencies."""

    magnitude = 1.0
    needs_length = False  # True: it also has `longer` and `grown`

    def __init__(self, spec: specs.Spec, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        """Made like every part."""

    def frequencies(self, theta: float, width: int, device: torch.device) -> Tensor:
        """(width/2,) float64."""
        return plain(theta, width, device)

    def longer(self, length_BT: Tensor) -> Tensor:
        """Which rows are turned otherwise than by `frequencies`."""
        return torch.zeros_like(length_BT, dtype=torch.bool)

    def grown(self, theta: float, width: int, length_BT: Tensor) -> Tensor:
        """(…, width/2) float64: the frequencies of tokens in rows of these lengths; used where a row is `longer`."""
        raise AssertionError("asked only where a row is longer")


class PI(Scaling):
    """Position interpolation: m → m/s (Chen et al. 2023, 2306.15595)."""

    def __init__(self, spec: specs.PI, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        self.factor = spec.factor

    def frequencies(self, theta: float, width: int, device: torch.device) -> Tensor:
        return plain(theta, width, device) / self.factor


class NTK(Scaling):
    """base' = base · s^(d/(d−2)): the fastest pair is kept, the slowest is divided by s (bloc97 2023)."""

    def __init__(self, spec: specs.NTK, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        self.factor = spec.factor

    def frequencies(self, theta: float, width: int, device: torch.device) -> Tensor:
        return plain(grown_base(theta, width, self.factor), width, device)


def grown_base(theta: float, width: int, growth: float) -> float:
    """base · growth^(d/(d−2)). A single pair (d = 2) never slows down: it is the fastest one too."""
    return theta * growth ** (width / (width - 2)) if width > 2 else theta


class DynamicNTK(Scaling):
    """NTK with growth s·n/L − (s−1), n = max(length, L): rows up to the original length L are plain (emozilla 2023).
    So are all rows at s = 1, where the formula would still grow by n/L.

    The length is an input, fixed for a row: the same token in a longer row is turned otherwise.
    """

    needs_length = True

    def __init__(self, spec: specs.DynamicNTK, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        self.factor, self.original = spec.factor, spec.original(dims.seq_len)

    def longer(self, length_BT: Tensor) -> Tensor:
        return length_BT > (self.original if self.factor > 1 else math.inf)

    def grown(self, theta: float, width: int, length_BT: Tensor) -> Tensor:
        growth = self.factor * length_BT.clamp_min(self.original).double() / self.original - (self.factor - 1)
        base = theta * growth ** (width / (width - 2)) if width > 2 else torch.full_like(growth, theta)
        even = torch.arange(0, width, 2, dtype=torch.float64, device=length_BT.device)
        return base[..., None] ** (-even / width)


class YaRN(Scaling):
    """Fast pairs are kept, slow ones divided by s, a linear ramp over the pair's index between, and cos and sin grow by
    0.1·ln s + 1 (Peng et al. 2023, 2309.00071). The ramp's ends are counted on the original length."""

    def __init__(self, spec: specs.YaRN, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        self.spec, self.factor, self.original = spec, spec.factor, spec.original(dims.seq_len)
        own = 0.1 * math.log(self.factor) + 1 if spec.attention_factor is None else spec.attention_factor
        self.magnitude = own if self.factor > 1 else 1.0

    def frequencies(self, theta: float, width: int, device: torch.device) -> Tensor:
        kept = plain(theta, width, device)
        if self.factor == 1:
            return kept
        low, high = self.bounds(theta, width)
        index = torch.arange(width // 2, dtype=torch.float64, device=device)
        slowed = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return kept / self.factor * slowed + kept * (1 - slowed)

    def bounds(self, theta: float, width: int) -> tuple[int, int]:
        """Pair indices where the ramp begins and ends."""
        return self.spec.bounds(theta, width, self.original)


class Llama3(Scaling):
    """By wavelength: shorter than L/high are kept, longer than L/low divided by s, between them a blend linear in
    L / wavelength (Llama 3.1 2024, 2407.21783)."""

    def __init__(self, spec: specs.Llama3, dims: Dims, ops: Ops, layer: Optional[int] = None) -> None:
        self.factor, self.original = spec.factor, spec.original(dims.seq_len)
        self.low, self.high = spec.low_freq_factor, spec.high_freq_factor

    def frequencies(self, theta: float, width: int, device: torch.device) -> Tensor:
        kept = plain(theta, width, device)
        if self.factor == 1:
            return kept
        rotations = self.original * kept / (2 * math.pi)  # over the original length
        share = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept / self.factor * (1 - share) + kept * share
