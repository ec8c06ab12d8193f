"""The drawings of the section on long contexts as values: which lines, what part of the plane, which ticks and rules,
and how each line looks. The page and the figures draw what stands here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmlab.report.curve_svg import nice_ticks
from lmlab.report.long_lines import OF_LOSS, POSITION, RATIO, SCORE
from lmlab.report.long_series import OWN
from lmlab.report.model import LongContext, LongLine, Report
from lmlab.report.palette import DASHES, LIGHT, strokes
from lmlab.report.why import number as short

MARKS = ("circle", "square", "triangle", "diamond", "down", "plus")
GREY = -1  # the colour of a published line that is beside none of ours
DOTTED = ((2.0, 3.0), (1.0, 2.0, 1.0, 5.0))  # of published lines
HEADROOM = 0.14  # above the lines, for the words at a rule
MOST_TICKS = 7
WORDS = {
    "sliding_perplexity": ("Perplexity, sliding windows", "perplexity (log scale)"),
    "perplexity": ("Perplexity, windows that do not overlap", "perplexity (log scale)"),
    POSITION: ("Loss by position in the longest window", "nats per token"),
    RATIO: ("Perplexity over that at the trained length", "ratio of perplexities (log scale)"),
}


@dataclass(frozen=True)
class Look:
    """colour: an index into the palette, or GREY; `open` marks are of published lines."""

    colour: int
    dash: tuple[float, ...]
    width: float
    mark: str
    open: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; ticks are (value, text)."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Panel:
    """One drawing. rules: vertical lines with words; levels: horizontal ones."""

    name: str
    title: str
    x_title: str
    y_title: str
    x: Scale
    y: Scale
    rules: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    lines: list[LongLine]


def panels(found: LongContext) -> Iterator[Panel]:
    """In the order in which they are shown; of scores one for each."""
    for figure in dict.fromkeys([*OF_LOSS, POSITION, *(line.figure for line in found.lines)]):
        lines = [line for line in found.lines if line.figure == figure]
        if lines and any(math.isfinite(value) for line in lines for value in line.mean):
            yield _panel(figure, lines)


def _panel(figure: str, lines: list[LongLine]) -> Panel:
    title, y_title = WORDS.get(figure, (f"Score: {figure.removeprefix(SCORE)}", "share right"))
    xs = sorted({x for line in lines for x in line.x})
    ratio, position = figure == RATIO, figure == POSITION
    trained = sorted({line.trained for line in lines if line.trained is not None and line.arm is not None})
    rules = [(1.0, "trained length")] if ratio else [(float(n), f"trained at {n:,}") for n in trained]
    rules = [(x, words) for x, words in rules if xs[0] <= x <= xs[-1]]
    chances = sorted({line.chance for line in lines if line.chance is not None})
    levels = [(1.0, "")] if ratio else [(chance, f"chance {short(chance)}") for chance in chances]
    if position:
        title += f", {lines[0].length:,} tokens"
    x_title = "length / trained length" if ratio else "position (tokens)" if position else "length (tokens)"
    y = _y_scale(lines, log=y_title.endswith("(log scale)"), score=figure.startswith(SCORE))
    return Panel(
        file_name(figure), title, x_title, y_title, _x_scale(xs, rounded=ratio or position), y, rules, levels, lines
    )


def file_name(what: str) -> str:
    """`long-score-needle`; whatever a task is called in a file, it leads to no other folder."""
    return "long-" + re.sub(r"[^A-Za-z0-9]+", "-", what).strip("-")


def _x_scale(xs: Sequence[float], *, rounded: bool) -> Scale:
    """log₂, a tick at each length measured; at powers of two where `rounded`, or where there are many."""
    low, high = xs[0], xs[-1]
    low, high = (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
    values = list(xs)
    if rounded or len(xs) > MOST_TICKS:
        values = [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    every = -(-len(values) // MOST_TICKS) or 1
    return Scale(low, high, True, [(v, _tick(v)) for v in values[::every]])


def _y_scale(lines: Sequence[LongLine], *, log: bool, score: bool) -> Scale:
    values = [v for line in lines for row in (line.low, line.mean, line.high) for v in row if math.isfinite(v)]
    low, high = (0.0, 1.0) if score else (min(values), max(values))
    if log:
        low, high = max(low, 1e-12), max(high, 1e-12)
        span = max(math.log(high / low), 0.1)
        ticks = _log_ticks(low / math.exp(0.06 * span), high)
        return Scale(low / math.exp(0.06 * span), high * math.exp(HEADROOM * span), True, ticks)
    span = (high - low) or abs(high) or 1.0
    ticks = [(v, _tick(v)) for v in nice_ticks(low - 0.06 * span * (not score), high)]
    return Scale(low - (0.0 if score else 0.06 * span), high + HEADROOM * span, False, ticks)


def _tick(value: float) -> str:
    """0.5, 20, 4 096, 1e6."""
    return f"{value:,g}".replace(",", "\u202f") if value < 1e6 else f"{value:.0e}".replace("e+0", "e")


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten, with 2 and 5 where there are few, even steps where not even these are."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        values = [k * 10.0**power for power in decades for k in steps if low <= k * 10.0**power <= high]
        if len(values) >= 4:
            every = -(-len(values) // MOST_TICKS)
            return [(v, _tick(v)) for v in values[::every]]
    return [(v, _tick(v)) for v in nice_ticks(low, high)]


# ---------------------------------------------------------------- looks


def look_of(report: Report, found: LongContext) -> dict[tuple[int | None, str], Look]:
    """The look of each line by (arm, scaling); of published ones by (None, name).

    An arm's first line has its colour of the other curves, each further scaling the colour that fewest have; dash and
    mark are the scaling's. A published line has the colour of what it is set beside.
    """
    own = dict.fromkeys((line.arm, line.scaling) for line in found.lines if line.arm is not None)
    both = any((arm, OWN) in own and (arm, "none") in own for arm, _ in own)
    kinds = list(dict.fromkeys(_kind(scaling, both) for _, scaling in own))
    of_arms = strokes(len(report.arms), report.baseline)
    firsts = dict(reversed(own))
    colours = {(arm, scaling): of_arms[arm or 0].colour for arm, scaling in firsts.items()}
    for key in own:
        if key not in colours:
            taken = Counter(colours.values())
            colours[key] = min(range(1, len(LIGHT)), key=lambda colour: taken[colour])
    looks: dict[tuple[int | None, str], Look] = {}
    for arm, scaling in own:
        i, stroke = kinds.index(_kind(scaling, both)), of_arms[arm or 0]
        dash = stroke.dash or DASHES[i % len(DASHES)]
        looks[arm, scaling] = Look(colours[arm, scaling], dash, stroke.width, MARKS[i % len(MARKS)])
    theirs = [line for line in found.lines if line.arm is None]
    for i, line in enumerate(theirs):
        beside = looks.get(line.like) if line.like is not None else None
        colour = beside.colour if beside is not None else GREY
        dash = DOTTED[i // len(MARKS) % len(DOTTED)]
        looks[None, line.scaling] = Look(colour, dash, 1.2, MARKS[i % len(MARKS)], open=True)
    return looks


def _kind(scaling: str, both: bool) -> str:
    """What dash and mark stand for: as trained and without a scaling look alike, but where an arm has both."""
    return OWN if scaling == "none" and not both else scaling


def said_of(line: LongLine) -> str:
    """What a legend says of a line."""
    return line.name if line.arm is not None else f"{line.scaling}, published"
