"""Figures for papers of the section on long contexts: its panels, and of each score a map by length and depth for every
line, in the colours, dashes and marks of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lmlab.report.long_panels import GREY, Look, Panel, file_name, look_of, panels, said_of
from lmlab.report.model import DepthMap, LongLine, Report
from lmlab.report.palette import BANDS, HEAT_LIGHT, LIGHT, heat, heat_colours
from lmlab.report.published import TAG

SOFT = "#5d5f66"
MARKS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "plus": "P"}
WIDTH, HEIGHT, NAME = 6.4, 3.8, 0.22  # inches
BESIDE_MAPS, CELL, ROW = 3, 0.44, 0.24  # maps in a row; inches of a cell


def long_figures(report: Report) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name of the file, what makes its matplotlib figure under the settings in force)."""
    found = report.long_context
    if found is None:
        return
    looks = look_of(report, found)
    for panel in panels(found):
        yield panel.name, partial(_panel, panel, looks)
    for what in dict.fromkeys(one.what for one in found.maps):
        maps = [one for one in found.maps if one.what == what]
        yield file_name(f"depth-{what}"), partial(_maps, maps)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def _panel(panel: Panel, looks: dict[tuple[int | None, str], Look]) -> Any:
    figure = _figure(WIDTH, max(HEIGHT, NAME * len(panel.lines)))
    axes = figure.add_subplot()
    for scale, which in ((panel.x, "x"), (panel.y, "y")):
        getattr(axes, f"set_{which}scale")("log" if scale.log else "linear")
        getattr(axes, f"set_{which}lim")(scale.low, scale.high)
        getattr(axes, f"set_{which}ticks")([v for v, _ in scale.ticks], [text for _, text in scale.ticks])
        getattr(axes, f"set_{which}ticks")([], minor=True)
    bands = sum(line.arm is not None for line in panel.lines) <= BANDS
    for line in panel.lines:
        _line(axes, line, looks[line.arm, line.scaling], bands)
    _rules(axes, panel)
    axes.set(xlabel=panel.x_title, ylabel=panel.y_title)
    _sources(axes, panel)
    axes.set_title(panel.title, fontsize=9, loc="left")
    if any(said_of(line) for line in panel.lines):
        axes.legend(loc="center left", bbox_to_anchor=(1.04, 0.5), fontsize=8, handlelength=3.2)
    return figure


def _line(axes: Any, line: LongLine, look: Look, bands: bool) -> None:
    colour = SOFT if look.colour == GREY else LIGHT[look.colour]
    mark = MARKS[look.mark] if len(line.x) <= 16 else ""
    name = said_of(line)
    axes.plot(
        line.x,
        line.mean,
        color=colour,
        label=f"\u200b{name}" if name.startswith("_") else name,
        linewidth=0.75 * look.width,
        linestyle=(0, look.dash) if look.dash else "-",
        marker=mark,
        markersize=4,
        markerfacecolor="white" if look.open else colour,
        markeredgewidth=0.8,
        zorder=2 if line.arm is None else 3,
    )
    if bands and line.n > 1:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)


def _sources(axes: Any, panel: Panel) -> None:
    """Below the plot who published what is drawn beside ours."""
    theirs = list(dict.fromkeys(line.source for line in panel.lines if line.arm is None))
    if theirs:
        words = "\n".join([f"Dotted: {TAG}.", *theirs])
        spot = {"xycoords": "axes fraction", "xytext": (0, -34), "textcoords": "offset points", "va": "top"}
        axes.annotate(words, (0.0, 0.0), fontsize=6.5, color=SOFT, **spot)


def _rules(axes: Any, panel: Panel) -> None:
    for i, (value, words) in enumerate(panel.rules):
        axes.axvline(value, color="#1d1d1f", linewidth=0.8)
        right = panel.x.at(value) > 0.6
        spot = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "fontsize": 7.5}
        side = {"xytext": (-4 if right else 4, -2 - 9 * i), "ha": "right" if right else "left"}
        axes.annotate(words, (value, 1.0), **spot, **side)
    for value, words in panel.levels:
        axes.axhline(value, color=SOFT, linewidth=0.8, linestyle=(0, (3, 3)))
        axes.annotate(
            words, (1.0, value), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
            ha="right", fontsize=7.5, color=SOFT,
        )  # fmt: skip


# ---------------------------------------------------------------- length × depth


def _maps(maps: Sequence[DepthMap]) -> Any:
    """Side by side, `BESIDE_MAPS` in a row."""
    columns = min(BESIDE_MAPS, len(maps))
    rows = math.ceil(len(maps) / columns)
    wide = max(len(one.lengths) for one in maps) * CELL + 0.9
    high = max(len(one.depths) for one in maps) * ROW + 1.0
    figure = _figure(columns * wide, rows * high)
    grid = figure.subplots(rows, columns, squeeze=False)
    for i, axes in enumerate(grid.flat):
        if i < len(maps):
            _map(axes, maps[i])
        else:
            axes.axis("off")
    figure.tight_layout()
    return figure


def _map(axes: Any, found: DepthMap) -> None:
    from matplotlib.patches import Rectangle

    colours = heat_colours(HEAT_LIGHT)
    for row in range(len(found.depths)):
        for column in range(len(found.lengths)):
            n, correct = found.n[row][column], found.correct[row][column]
            ground, text = colours[heat(correct / n)] if n else ("none", SOFT)
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=ground, edgecolor="white", linewidth=0.8))
            said = f"{correct}/{n}" if n else "–"
            axes.text(column + 0.5, row + 0.5, said, ha="center", va="center", fontsize=6.5, color=text)
    if inside := sum(length <= found.trained for length in found.lengths):
        axes.plot([inside, inside], [0, len(found.depths)], color="#1d1d1f", linewidth=1.2, clip_on=False)
    axes.set(xlim=(0, len(found.lengths)), ylim=(len(found.depths), 0))
    axes.set_xticks([i + 0.5 for i in range(len(found.lengths))], [f"{n:,}" for n in found.lengths], fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(len(found.depths))], [f"{d:g}" for d in found.depths], fontsize=7)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length (tokens)", fontsize=8)
    axes.set_ylabel("depth (0: beginning)", fontsize=8)
    axes.set_title(" · ".join(word for word in (found.what, found.name) if word), fontsize=8, loc="left")
