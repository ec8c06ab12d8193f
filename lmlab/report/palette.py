"""How an arm's line looks, the same on the page and in the figures: a colour-blind-safe colour, then a dash pattern.

The colours are those of Okabe and Ito (2008) without yellow, which white paper swallows, blue, purple and sky blue a
little darker on light ground, orange lighter on dark ground; a test holds that they stay apart under colour blindness.
The baseline has the colour of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = ("#1a1a1a", "#0067a8", "#d55e00", "#009e73", "#bf6098", "#e69f00", "#48aae2")
DARK = ("#f2f2f2", "#4c9be8", "#f57136", "#27c498", "#e08bc4", "#f5c84c", "#93d4fa")
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (1.5, 2.5), (9, 3, 2, 3), (12, 4))
BANDS = 8  # arms; above it seed bands would lie over each other, and are left out
MANY = 24  # arms; above it lines are thin


@dataclass(frozen=True)
class Stroke:
    """`colour` is an index into LIGHT and DARK; `dash` alternates line and gap, in pixels, and is empty for solid."""

    colour: int
    dash: tuple[float, ...]
    width: float


def strokes(n_arms: int, baseline: int | None) -> list[Stroke]:
    """A look for every arm: colours first, then each dash pattern in all colours; colour 0 is the baseline's alone."""
    thin, wide = (1.0, 1.8) if n_arms > MANY else (1.8, 2.4)
    n_colours = len(LIGHT) - 1
    looks, others = [], 0
    for arm in range(n_arms):
        if arm == baseline:
            looks.append(Stroke(0, (), wide))
            continue
        looks.append(Stroke(1 + others % n_colours, DASHES[others // n_colours % len(DASHES)], thin))
        others += 1
    return looks
