"""A row of `lmlab check`: what was asked, how it came out, and the figure; and how far apart two results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lmlab.errors import in_one_line

EXACT = 1e-10  # two routes to one result in float64: max |a − b| over max(1, max |b|)


@dataclass(frozen=True)
class Row:
    """state: pass, fail, known (a declared failure, with the edit that proves it) or n/a (with the reason)."""

    name: str
    state: str
    figure: str = ""
    reason: str = ""


def judged(name: str, off: float, *, tol: float = EXACT, what: str = "off by at most") -> Row:
    """A row from the distance of two results."""
    state = "pass" if off <= tol else "fail"  # also for nan
    return Row(name, state, f"{what} {off:.2g}", "" if state == "pass" else f"allowed {tol:g}")


def not_asked(name: str, reason: str) -> Row:
    return Row(name, "n/a", reason=reason)


def distance(a: Tensor, b: Tensor) -> float:
    """max |a − b| over max(1, max |b|)."""
    assert a.shape == b.shape, f"{tuple(a.shape)} is compared with {tuple(b.shape)}"
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1))


def gradient_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest ‖a − b‖ / ‖b‖ and its tensor. What is small against the whole gradient is measured against that: of
    a gradient that is 0 in theory only rounding is left."""
    assert a.keys() == b.keys(), f"gradients of other tensors: {sorted(a.keys() ^ b.keys())}"
    whole = sum(float(g.double().square().sum()) for g in b.values()) ** 0.5
    off = {
        name: float((a[name].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-3 * whole, 1e-30)
        for name, g in b.items()
    }
    worst = max(off, key=lambda name: off[name])
    return off[worst], worst


def known(row: Row, declared: Mapping[str, str]) -> Row:
    """A failure that a part declares (`known_failures`) is told as known. A key covers the rows that begin with it."""
    if row.state != "fail":
        return row
    reason = next((text for key, text in declared.items() if row.name.startswith(key)), None)
    return row if reason is None else Row(row.name, "known", row.figure, reason)


def attempted(name: str, ask: Callable[[], Row]) -> Row:
    """The row, or a failed one that says what was raised."""
    try:
        return ask()
    except Exception as error:
        return Row(name, "fail", in_one_line(error), "the model raised")
