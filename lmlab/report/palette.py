"""How an arm's line looks, the same on the page and in the figures: a colour-blind-safe colour, then a dash pattern.

The colours are those of Okabe and Ito (2008) without yellow, which white paper swallows, blue, purple and sky blue a
little darker on light ground, orange lighter on dark ground; a test holds that they stay apart under colour blindness.
The baseline has the colour of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
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


# ---------------------------------------------------------------- shares from 0 to 1

# One hue whose lightness goes one way, so that neither a grey print nor colour blindness takes its order away.
HEAT_LIGHT = ((0xF3, 0xF7, 0xFB), (0x6F, 0xB1, 0xDC), (0x08, 0x36, 0x66))
HEAT_DARK = ((0x22, 0x26, 0x2C), (0x2F, 0x6F, 0xA8), (0xCF, 0xE8, 0xFB))
N_HEAT = 11  # steps: 0, 0.1 … 1


def heat(share: float) -> int:
    """The step of a share, 0 to 10."""
    return min(N_HEAT - 1, max(0, round((N_HEAT - 1) * share)))


def heat_colours(stops: tuple[tuple[int, int, int], ...]) -> list[tuple[str, str]]:
    """(ground, text) of each step: the ground between its neighbouring stops, the text black or white."""
    found = []
    for step in range(N_HEAT):
        at = step / (N_HEAT - 1) * (len(stops) - 1)
        i = min(int(at), len(stops) - 2)
        ground = [round(a + (b - a) * (at - i)) for a, b in zip(stops[i], stops[i + 1], strict=True)]
        light = luminance(ground)
        text = "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"
        found.append(("#" + "".join(f"{value:02x}" for value in ground), text))
    return found


def luminance(rgb: Sequence[int]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2): 0 black, 1 white."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (value / 255 for value in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
