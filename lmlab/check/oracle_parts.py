"""The oracle's formulas: norms, ffn, positions (added vectors, rotary frequencies, rotation, biases of scores).

As in oracle.py: plain float64 formulas that share nothing with the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import Tensor

Config = Mapping[str, Any]
RMS_EPS = 1e-6  # of the norms inside attention


class NoOracle(Exception):
    """A part whose formula is not written here, such as a plug-in's."""

    def __init__(self, group: str, name: str) -> None:
        super().__init__(f"{group}={name}")
        self.part = f"{group}={name}"


def capped(x: Tensor, cap: Optional[float]) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def norm(spec: Config, w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    name = spec["name"]
    if name == "none":
        return x
    if name not in ("layernorm", "rmsnorm", "batchnorm", "dyt"):
        raise NoOracle("norm", name)
    weight, bias = w[f"{at}.weight"], w.get(f"{at}.bias", torch.zeros(()).double())
    if name == "rmsnorm":
        return rms(x, weight + spec.get("offset", 0), spec["eps"])
    if name == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + spec["eps"]).sqrt() * weight + bias
    if name == "batchnorm":
        spread = (w[f"{at}.running_var"] + spec["eps"]).sqrt()
        return (x - w[f"{at}.running_mean"]) / spread * weight + bias
    return torch.tanh(w[f"{at}.alpha"] * x) * weight + bias


def rms(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    return x @ w[f"{at}.weight"].T + w.get(f"{at}.bias", torch.zeros(()).double())


def activated(name: str, x: Tensor, spec: Config) -> Tensor:
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    exact = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    by_name = {
        "relu": x.clamp_min(0),
        "relu2": x.clamp_min(0) ** 2,
        "gelu": exact,
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(cubic)),
        "silu": x / (1 + torch.exp(-spec.get("beta", 1.0) * x)),
        "glu": 1 / (1 + torch.exp(-x)),
        "bilinear": x,
        "reglu": x.clamp_min(0),
        "geglu": 0.5 * x * (1 + torch.tanh(cubic)) if spec.get("approximate") == "tanh" else exact,
        "swiglu": x / (1 + torch.exp(-x)),
    }
    if name not in by_name:
        raise NoOracle("ffn", name)
    return by_name[name]


def feed_forward(spec: Config, w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gated = spec["name"] in ("glu", "bilinear", "reglu", "geglu", "swiglu")
    act = activated(spec["name"], linear(w, f"{at}.{'gate' if gated else 'up'}", x), spec)
    return linear(w, f"{at}.down", act * linear(w, f"{at}.up", x) if gated else act)


# ---------------------------------------------------------------- positions


def added_positions(spec: Config, w: Mapping[str, Tensor], positions: list[int], D: int) -> Tensor:
    name = spec["name"]
    if name == "learned":
        return torch.stack([w["pos.weight"][p] for p in positions])
    if name == "sinusoidal":
        turns = [[p * spec["theta"] ** (-(c - c % 2) / D) for c in range(D)] for p in positions]
        rows = [[math.cos(t) if c % 2 else math.sin(t) for c, t in enumerate(row)] for row in turns]
        return torch.tensor(rows, dtype=torch.float64)
    if name not in ("none", "rope", "alibi", "t5"):
        raise NoOracle("pos", name)
    return torch.zeros(len(positions), D, dtype=torch.float64)


def frequencies(theta: float, d: int, scaling: Config, seq_len: int, n: int) -> tuple[list[float], float]:
    """(θ_i for i < d/2 after the scaling, YaRN's factor). n: tokens of the row or document."""
    name, s = scaling["name"], scaling.get("factor", 1.0)
    L = scaling.get("original_len") or seq_len
    if s <= 1:
        name = "none" if name in ("pi", "ntk", "dynamic_ntk", "yarn", "llama3") else name
    if name == "dynamic_ntk":
        length = max(n, L)
        theta *= (s * length / L - (s - 1)) ** (d / (d - 2)) if d > 2 else 1
    if name == "ntk" and d > 2:
        theta *= s ** (d / (d - 2))
    plain = [theta ** (-2 * i / d) for i in range(d // 2)]
    if name in ("none", "ntk", "dynamic_ntk"):
        return plain, 1.0
    if name == "pi":
        return [f / s for f in plain], 1.0
    if name == "yarn":
        low, high = yarn_bounds(theta, d, L, scaling["beta_fast"], scaling["beta_slow"])
        kept = [1.0 if i <= low else 0.0 if i >= high else (high - i) / (high - low) for i in range(d // 2)]
        own = scaling.get("attention_factor")
        factor = own if own is not None else 0.1 * math.log(s) + 1
        return [f * k + f / s * (1 - k) for f, k in zip(plain, kept, strict=True)], factor
    if name == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = [L * f / (2 * math.pi) for f in plain]
        kept = [0.0 if t < low else 1.0 if t > high else (t - low) / (high - low) for t in turns]
        return [f * k + f / s * (1 - k) for f, k in zip(plain, kept, strict=True)], 1.0
    raise NoOracle("rope_scaling", name)


def yarn_bounds(theta: float, d: int, L: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """Pair indices: up to the first kept, from the second on divided."""

    def pair(rotations: float) -> float:
        return d * math.log(L / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), d - 1)


def rotated(x: Tensor, angles: Tensor, pairing: str, factor: float) -> Tensor:
    """One head's (T, C): the first channels turned in pairs by the angles (T, pairs), the rest as they are."""
    out, pairs = x.clone(), angles.shape[1]
    for i in range(pairs):
        a, b = (i, i + pairs) if pairing == "half" else (2 * i, 2 * i + 1)
        c, s = factor * torch.cos(angles[:, i]), factor * torch.sin(angles[:, i])
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, b] * c + x[:, a] * s
    return out


def slopes(n: int) -> list[float]:
    """ALiBi: 2^(−8h/n) for a power of two, else those of the next lower one and every other of the next higher."""
    lower = 2 ** int(math.log2(n))
    first = [2.0 ** (-8 * (h + 1) / lower) for h in range(lower)]
    return first + [2.0 ** (-8 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)][: n - lower]


def bucket(distance: int, n_buckets: int, max_distance: int) -> int:
    """T5: half of the buckets one by one, the rest by the logarithm up to max_distance; in whole numbers, the k-th of n
    logarithmic ones begins where (distance / half)^n ≥ (max_distance / half)^k."""
    half = n_buckets // 2
    if distance < half:
        return max(distance, 0)
    n = n_buckets - half
    low, high = 0, n - 1  # the largest k whose bucket has begun
    while low < high:
        k = (low + high + 1) // 2
        begun = distance**n * half**k >= max_distance**k * half**n
        low, high = (k, high) if begun else (low, k - 1)
    return half + low


def score_bias(spec: Config, w: Mapping[str, Tensor], h: int, H: int, distance: int) -> float:
    if spec["name"] == "alibi":
        return -slopes(H)[h] * distance
    if spec["name"] == "t5":
        return float(w["pos.weight"][h, bucket(distance, spec["n_buckets"], spec["max_distance"])])
    return 0.0
