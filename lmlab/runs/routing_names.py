"""What is measured of routing, by name: `moe/<layer>/<figure>` of a training step, `val/moe/<layer>/<figure>` of val.

Layers are counted from 0; those without experts have none. Writers (lmlab/train/routing.py, lmlab/eval/routing.py) and
readers (lmlab/report/routing.py, lmlab/cli/eval_routing.py) take the names from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PART = "moe"
LOAD = "load"  # a list: how many choices fell on each expert, before any was dropped
STABILITY = "stability"
BARS = "▁▂▃▄▅▆▇█"
STABLE_TOKENS = 8192  # of a split, its first: what stability is taken over, at most
FIGURES = {
    "load_max": "Choices of the busiest expert over the mean: 1 is even, the number of experts is a collapse onto one.",
    "load_min": "Choices of the idlest expert over the mean.",
    "unused_frac": "Share of experts that nobody chose.",
    "dropped_frac": "Share of choices that found no room; of expert choice, of tokens that no expert chose.",
    "entropy": "Entropy of the router's scores in nats, mean over tokens; ln E is uniform.",
    "balance": "E·Σ f·P, the balance loss without its factor: 1 is even. No part of the loss that is shown.",
    "z": "Mean (log Σ e^logit)², the z-loss without its factor. No part of the loss that is shown.",
    STABILITY: f"Share of choices that the checkpoint kept before made too, on the first {STABLE_TOKENS:,} tokens.",
}


def name(layer: int, figure: str, split: str = "") -> str:
    """`moe/3/load_max`; with a split `val/moe/3/load_max`."""
    return "/".join([*([split] if split else []), PART, str(layer), figure])


def parse(metric: str) -> tuple[str, int, str] | None:
    """(split or "", layer, figure) of a name of routing; None of any other."""
    words = metric.split("/")
    if len(words) not in (3, 4) or words[-3] != PART or not words[-2].isdecimal():
        return None
    return "".join(words[:-3]), int(words[-2]), words[-1]


def bars(loads: Sequence[float], width: int = 64) -> str:
    """The loads as a line of small bars against the largest, · where nothing came; of more than `width` experts the
    mean of neighbours."""
    n = max(1, -(-len(loads) // width))
    means = [sum(part) / len(part) for i in range(0, len(loads), n) if (part := loads[i : i + n])]
    top = max(means, default=0)
    return "".join("·" if not value else BARS[min(7, math.ceil(8 * value / top) - 1)] for value in means)
