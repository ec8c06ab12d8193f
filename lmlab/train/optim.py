"""Optimizers, and their state by parameter name.

Groups: parameters of two or more dimensions (matrices, embeddings, the head) decay; all others don't, nor do
biases, which of experts are stacked; each parameter stands in exactly one group, a tied embedding once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lmlab.errors import RunError
from lmlab.train.spec import AdamW


def adamw(spec: AdamW, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101), fused, over the fp32 masters."""
    decays = {name: p.ndim >= 2 and not name.endswith(".bias") for name, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in model.named_parameters() if decays[n]], "weight_decay": spec.weight_decay},
        {"params": [p for n, p in model.named_parameters() if not decays[n]], "weight_decay": 0.0},
    ]
    betas = (spec.betas[0], spec.betas[1])
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=spec.lr, betas=betas, eps=spec.eps, fused=True)


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
    usual = {key for kept in state.values() for key in kept}
    for name, p in parameters.items():
        if missing := usual - state[name].keys():
            lacks = f"optimizer state of {name} lacks `{sorted(missing)[0]}`"
            raise RunError(lacks, "go on from another checkpoint, or start again with --force")
        for key, value in state[name].items():
            if value.ndim and value.shape != p.shape:
                shapes = f"{tuple(value.shape)}, the parameter {tuple(p.shape)}"
                raise RunError(f"optimizer state `{key}` of {name} has shape {shapes}", "start again with --force")
        if state[name]:
            optimizer.state[p] = {key: value.to(p.device).clone() for key, value in state[name].items()}
