"""Optimizers, and their state by parameter name.

Groups: parameters of two or more dimensions (matrices, embeddings, the head) decay; all others don't, nor do
biases, which of experts are stacked; each parameter stands in exactly one group, a tied embedding once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.errors import RunError
from lmlab.train.spec import AdamW, OptimSpec


def groups(named: Sequence[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Those that decay and those that don't, without empty ones."""
    decays = [p.ndim >= 2 and not name.endswith(".bias") for name, p in named]
    found = [
        {"params": [p for (_, p), d in zip(named, decays, strict=True) if d], "weight_decay": weight_decay},
        {"params": [p for (_, p), d in zip(named, decays, strict=True) if not d], "weight_decay": 0.0},
    ]
    return [g for g in found if g["params"]]


def adamw_of(
    param_groups: list[dict[str, Any]], lr: float, betas: Sequence[float], eps: float
) -> torch.optim.Optimizer:
    """torch's AdamW over the fp32 masters, fused: one pass, and told of overflow it stays as it is."""
    return torch.optim.AdamW(param_groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)


def adamw(spec: AdamW, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2017, 1711.05101)."""
    return adamw_of(groups(list(model.named_parameters()), spec.weight_decay), spec.lr, spec.betas, spec.eps)


def state_bytes(spec: OptimSpec, model: nn.Module) -> int:
    """Bytes of the moments the optimizer keeps between steps."""
    return sum(4 * p.numel() * spec.moments(name, p.ndim) for name, p in model.named_parameters())


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """{parameter name: its state tensors}, {} for an optimizer without any: independent of the order of groups."""
    return {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}


def load_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Put saved state back. Raises RunError when a parameter's state is missing, unexpected or of another shape."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())
        raise RunError(
            f"the optimizer state of the checkpoint does not fit the model: {odd[0]} is on one side only",
            "go on from another checkpoint, or start again with --force",
        )
    usual = _usual(optimizer, parameters, state)
    for name, p in parameters.items():
        if missing := usual[name] - state[name].keys():
            lacks = f"optimizer state of {name} lacks `{sorted(missing)[0]}`"
            raise RunError(lacks, "go on from another checkpoint, or start again with --force")
        for key, value in state[name].items():
            if value.ndim and value.shape != p.shape:
                shapes = f"{tuple(value.shape)}, the parameter {tuple(p.shape)}"
                raise RunError(f"optimizer state `{key}` of {name} has shape {shapes}", "start again with --force")
        if state[name]:
            optimizer.state[p] = {key: value.to(p.device).clone() for key, value in state[name].items()}


def _usual(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], state: dict[str, dict[str, Any]]
) -> dict[str, set[str]]:
    """{parameter name: what is saved of any that is moved the same way}: groups with equal settings but for decay."""
    ways = {id(p): frozenset(g.keys()) for g in optimizer.param_groups for p in g["params"]}
    keys: dict[frozenset[str], set[str]] = {}
    for name, p in parameters.items():
        keys.setdefault(ways[id(p)], set()).update(state[name])
    return {name: keys[ways[id(p)]] for name, p in parameters.items()}
