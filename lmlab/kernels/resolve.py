"""Which implementation computes each operation on a device in a dtype: chosen once, before the model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lmlab.kernels import activation, attention, experts, flex, linear, loss, norm, rope, tiled
from lmlab.kernels import spec as specs
from lmlab.kernels.ops import Ops

REFERENCE: dict[str, Callable[..., Any]] = {
    "embedding": linear.embedding,
    "rms_norm": norm.rms_norm,
    "layer_norm": norm.layer_norm,
    "fan": linear.fan_apart,
    "experts": experts.per_expert,
    "linear_cross_entropy": loss.linear_cross_entropy,
}
FUSED: dict[str, Callable[..., Any]] = {
    "rms_norm": norm.fused_rms_norm,
    "layer_norm": norm.fused_layer_norm,
    "fan": linear.fan_packed,
    "experts": experts.grouped,
    "linear_cross_entropy": loss.chunked_linear_cross_entropy,
}


def resolve(
    kernels: specs.Spec, device: torch.device | str, dtype: torch.dtype, residual_dtype: torch.dtype | None = None
) -> Ops:
    """The operations of `kernels=...`: plain torch for `reference`, the fastest known for `auto`.

    residual_dtype: of the sum that blocks add to, where it is not `dtype`."""
    plain = isinstance(kernels, specs.Reference)
    chosen = REFERENCE if plain else REFERENCE | FUSED
    return Ops(
        **chosen,
        activations=activation.ACTIVATIONS,
        gates=activation.GATES,
        rope={"half": rope.rotate_half if plain else rope.fused_rotate_half, "interleaved": rope.rotate_interleaved},
        render={
            "dense": attention.render_dense,
            "sdpa": attention.render_sdpa,
            "tiled": tiled.render_tiled,
            "flex": flex.render_flex,
        },
        attention={"dense": attention.dense, "sdpa": attention.sdpa, "tiled": tiled.tiled, "flex": flex.flex},
        attention_default="dense" if plain else None,
        names={role: f.__name__ for role, f in chosen.items()},
        device=torch.device(device),
        dtype=dtype,
        residual_dtype=residual_dtype,
    )
