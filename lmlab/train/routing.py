"""What routers did in one step, or on the tokens of an evaluation: the stats of its batches added up, and their figures
per layer, by the names of lmlab/runs/routing_names.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from lmlab.runs.routing_names import LOAD, name


class Routing:
    """Sums per layer; nothing is asked of the device before `figures`."""

    def __init__(self) -> None:
        self.layers: list[Optional[dict[str, Tensor]]] = []

    def add(self, stats: Sequence[Any]) -> None:
        """One forward's stats, one entry per layer (None: no router)."""
        found = [None if s is None else sums(s) for s in stats]
        if not self.layers:
            self.layers = found
            return
        for total, more in zip(self.layers, found, strict=True):
            if total is not None and more is not None:
                for name, value in more.items():
                    total[name] = total[name] + value

    def loads(self) -> list[Optional[Tensor]]:
        """Per layer how its choices fell on the experts, before any was dropped."""
        return [None if layer is None else layer["load_E"] for layer in self.layers]

    def figures(self, split: str = "") -> dict[str, float]:
        """{"moe/<layer>/<figure>": …}: load_max and load_min over the mean load, the share of experts without a token,
        the share of choices dropped, the mean entropy of the scores in nats, the balance and z-loss without factors."""
        found: dict[str, float] = {}
        for layer, total in enumerate(self.layers):
            if total is not None:
                found |= {name(layer, figure, split): value for figure, value in figures(total).items()}
        return found

    def evaluated(self, split: str) -> dict[str, Any]:
        """The figures of a split, and the choices that fell on each expert as a list."""
        loads = enumerate(self.loads())
        return self.figures(split) | {name(i, LOAD, split): load.tolist() for i, load in loads if load is not None}


def sums(stats: Any) -> dict[str, Tensor]:
    groups = torch.ones((), dtype=torch.float32, device=stats.z_G.device) * len(stats.z_G)
    return {
        "load_E": stats.load_E.detach(),
        "dropped": stats.dropped.detach(),
        "asked": stats.asked.detach(),
        "entropy": stats.entropy.detach(),
        "tokens": stats.tokens.detach(),
        "balance": stats.balance_G.detach().sum(),
        "z": stats.z_G.detach().sum(),
        "groups": groups,
    }


def figures(total: dict[str, Tensor]) -> dict[str, float]:
    load_E = total["load_E"].double().cpu()
    mean = max(float(load_E.mean()), 1e-9)
    plain = {name: float(value) for name, value in total.items() if name != "load_E"}
    return {
        "load_max": float(load_E.max()) / mean,
        "load_min": float(load_E.min()) / mean,
        "unused_frac": float((load_E == 0).double().mean()),
        "dropped_frac": plain["dropped"] / max(plain["asked"], 1),
        "entropy": plain["entropy"] / max(plain["tokens"], 1),
        "balance": plain["balance"] / plain["groups"],
        "z": plain["z"] / plain["groups"],
    }
