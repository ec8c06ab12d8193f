"""The ONE table of initial values, and the draws. A parameter's value is scale · z(seed, name, shape).

z comes from the CPU generator seeded by blake2b of (seed, canonical name, shape), so that tensors of equal name and
shape are equal in every variant, whatever else the variant has.
"""

from __future__ import annotations

import hashlib
import math
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

STD = 0.02


class Rule(NamedTuple):
    """value = mean + std · z."""

    mean: float
    std: float


ZEROS, ONES = Rule(0.0, 0.0), Rule(1.0, 0.0)


def xavier(shape: torch.Size, gain: float) -> Rule:
    """Normal with std = gain · √(2 / (fan_in + fan_out)) (Glorot & Bengio 2010), for matrices (…, fan_out, fan_in)."""
    return Rule(0.0, gain * math.sqrt(2 / (shape[-2] + shape[-1])))


def rules(n_layers: int, d_model: int) -> list[tuple[str, Rule]]:
    """Pattern of the name → rule; the first that fits holds. Norm weights are vectors: 1 by the general rule."""
    residual = Rule(0.0, STD / math.sqrt(2 * n_layers))
    return [
        ("*.bias", ZEROS),
        ("blocks.*.attn.o.weight", residual),
        ("blocks.*.ffn.*down.weight", residual),
        ("head.weight", Rule(0.0, min(STD, 0.5 / math.sqrt(d_model)))),
    ]


def table(model: nn.Module) -> dict[str, Rule]:
    """Every parameter's rule. What no pattern names: matrices 0.02 normal, vectors 1 (a scale).

    A part may say otherwise for the parameters in it: `init_rules() -> {name within the part: Rule}`; an inner part's
    rules come before those of the part around it.
    """
    dims = model.dims
    patterns = rules(dims.n_layers, dims.d_model)  # type: ignore[union-attr, arg-type]
    own: dict[str, Rule] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "init_rules"):
            own |= {f"{prefix}.{name}": rule for name, rule in module.init_rules().items()}
    found = {}
    for name, parameter in model.named_parameters():
        general = Rule(0.0, STD) if parameter.ndim >= 2 else ONES
        named = next((rule for pattern, rule in patterns if fnmatchcase(name, pattern)), general)
        found[name] = own.get(name, named)
    return found


@torch.no_grad()
def draw_(model: nn.Module, seed: int) -> None:
    """Give every parameter its initial value, in place."""
    parameters = dict(model.named_parameters())
    for name, rule in table(model).items():
        p = parameters[name]
        if rule.std == 0:
            p.fill_(rule.mean)
        else:
            p.copy_(z(seed, name, tuple(p.shape)).mul_(rule.std).add_(rule.mean))


def z(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal fp32 of `shape`: a pure function of its arguments, the same on every device."""
    digest = hashlib.blake2b(repr((seed, name, tuple(shape))).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
