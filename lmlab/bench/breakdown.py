"""Where a step's time goes: its pieces timed one by one, an accelerator waited for after each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lmlab.bench.limits import synchronize
from lmlab.train.setup import Trainer

REST = "rest"


def breakdown(made: Trainer, step: Callable[[int], Any], batches: Iterable[int]) -> dict[str, float]:
    """Seconds of a step by piece, and what is left of the whole (`rest`)."""
    twin, device = made.stepper.twin, made.stepper.device
    pieces: list[tuple[Any, str, str]] = [
        (made.batches, "batch", "loader"),
        (twin.model, "forward", "forward"),
        (torch.Tensor, "backward", "backward"),
        (twin, "collect", "gradients to fp32"),
        (twin, "zero_grads", "gradients to fp32"),
        (torch.nn.utils, "get_total_norm", "clipping"),
        (torch.nn.utils, "clip_grads_with_norm_", "clipping"),
        (made.stepper.optimizer, "step", "optimizer"),
        (twin, "refresh", "weights to the twin"),
    ]
    spent: dict[str, float] = defaultdict(float)
    n, whole = 0, 0.0
    with ExitStack() as patches:
        for owner, name, label in pieces:
            patches.enter_context(_timed(owner, name, label, spent, device))
        for k in batches:
            synchronize(device)
            begun = time.perf_counter()
            step(k)
            synchronize(device)
            whole, n = whole + time.perf_counter() - begun, n + 1
    spent[REST] = whole - sum(spent.values())
    return {label: s / n for label, s in spent.items()}


@contextmanager
def _timed(owner: Any, name: str, label: str, spent: dict[str, float], device: torch.device) -> Iterator[None]:
    """Inside, what calls of owner.name take is added to spent[label]."""
    own = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    found = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        synchronize(device)
        begun = time.perf_counter()
        try:
            return found(*args, **kwargs)
        finally:
            synchronize(device)
            spent[label] += time.perf_counter() - begun

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
