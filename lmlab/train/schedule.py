"""Learning-rate schedules: pure functions of (spec, peak, steps, step). Steps count from 0.

Warm-up is linear and reaches the peak at its last step: with 10 steps and a peak of 1e-3, steps 0…9 get 1e-4 … 1e-3.
The decays start from there and reach `min_lr_frac · peak` exactly at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lmlab.train.spec import WSD, Constant, Cosine, Linear, ScheduleSpec, warmup_steps

Schedule = Callable[[int], float]


def _warmed(spec: ScheduleSpec, peak: float, steps: int, decay: Callable[[float], float]) -> Schedule:
    """Warm-up, then peak · decay(progress), progress 0 at the end of the warm-up and 1 at the last step."""
    warmup = warmup_steps(spec.warmup_steps, steps)
    start = max(warmup - 1, 0)

    def lr(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        return peak * decay((step - start) / max(1, steps - 1 - start))

    return lr


def cosine(spec: Cosine, peak: float, steps: int) -> Schedule:
    """Half a cosine from the peak to the minimum (Loshchilov & Hutter 2016, arXiv 1608.03983, without restarts)."""
    low = spec.min_lr_frac
    return _warmed(spec, peak, steps, lambda p: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * p)))


def linear(spec: Linear, peak: float, steps: int) -> Schedule:
    """A straight line from the peak to the minimum."""
    low = spec.min_lr_frac
    return _warmed(spec, peak, steps, lambda p: low + (1 - low) * (1 - p))


def wsd(spec: WSD, peak: float, steps: int) -> Schedule:
    """Warm up, stay, then a line down over the last `decay_frac` of the steps (Hu et al. 2024, arXiv 2404.06395)."""
    low = spec.min_lr_frac
    decay_steps = max(1, round(spec.decay_frac * steps))
    warmup = warmup_steps(spec.warmup_steps, steps)

    def lr(step: int) -> float:
        warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
        left = min(1.0, (steps - 1 - step) / decay_steps)
        return peak * min(warm, low + (1 - low) * left)

    return lr


def constant(spec: Constant, peak: float, steps: int) -> Schedule:
    """The peak, after the warm-up."""
    return _warmed(spec, peak, steps, lambda p: 1.0)
