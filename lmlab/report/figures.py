"""Figures for papers: val bits/byte against tokens, FLOPs and seconds, and of arms with experts how evenly steps were
spread, and those of long contexts, as SVG and PDF.

Colours, dashes and the part of the plane shown are those of the page. The same report gives the same bytes; the user's
own matplotlib settings neither matter nor change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.report import page_why
from lmlab.report.captions import not_causal, part_of_val, unfinished
from lmlab.report.curve_svg import AXES, METRICS, Frame, axis_ticks, diverged, frame
from lmlab.report.long_figures import long_figures
from lmlab.report.model import BPB, X_AXES, Curve, Report
from lmlab.report.palette import BANDS, LIGHT, Stroke, strokes
from lmlab.report.routing import OVER_TIME, name_over_time

SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "svg.hashsalt": "lmlab",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name is no formula
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
BESIDE = 24  # names of a legend beside the plot
WIDTH, HEIGHT, NAME = 6.4, 3.8, 0.22  # inches: of a figure, and of its height for each name beside the plot


def draw(report: Report, folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write `loss-<axis>.<kind>` for every axis that has curves, then `routing-<figure>.<kind>` and `long-….<kind>`,
    kinds of "svg" and "pdf"; the files, in that order.

    Without curves nothing is written and the list is empty. Raises RunError when the folder can't be written to.
    """
    written: list[Path] = []
    makers = [(name, _maker(report, curves, shown)) for name, curves, shown in _drawings(report)]
    for name, make in [*makers, *long_figures(report)]:
        paths = [folder / f"{name}.{kind}" for kind in kinds]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _save(make, paths)
        except OSError as error:
            where = error.filename or folder
            raise RunError(f"can't write {where}: {error.strerror}", "name another folder: --out DIR") from error
        written += paths
    return written


def _drawings(report: Report) -> Iterator[tuple[str, list[Curve], Frame]]:
    """(name of the file, curves, what part of the plane is shown) of each."""
    for axis in X_AXES:
        curves = [c for c in report.curves if (c.metric, c.x_name) == (BPB, axis) and c.x]
        if (shown := frame(curves, diverged(report))) is not None:
            yield f"loss-{axis}", curves, shown
    routed = [] if report.routing is None else report.routing.curves
    for figure in OVER_TIME:
        curves = [c for c in routed if c.metric == name_over_time(figure)]
        if (shown := page_why.frame(curves)) is not None:
            yield f"routing-{figure}", curves, shown


def _maker(report: Report, curves: Sequence[Curve], shown: Frame) -> Callable[[], Any]:
    return lambda: drawn(report, curves, shown)


def _save(make: Callable[[], Any], paths: Sequence[Path]) -> None:
    """make: the figure, under the settings in force."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = make()
        for path in paths:
            kind = path.suffix[1:]
            figure.savefig(path, format=kind, bbox_inches="tight", metadata=UNDATED.get(kind))


def drawn(report: Report, curves: Sequence[Curve], shown: Frame) -> Any:
    """The matplotlib figure of curves that share metric and axis, under the settings in force."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = _names(report, curves, shown)
    beside = len(names) <= BESIDE
    figure = Figure(figsize=(WIDTH, max(HEIGHT, NAME * len(names)) if beside else HEIGHT))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    looks = strokes(len(report.arms), report.baseline)
    by_arm = {curve.arm: curve for curve in curves}
    for arm, name in names.items():
        _arm(axes, by_arm.get(arm), looks[arm], name, bands=len(looks) <= BANDS)
    _legend(axes, beside)
    _frame(axes, shown, curves[0].x_name, _y_title(report, curves))
    return figure


def _names(report: Report, curves: Sequence[Curve], shown: Frame) -> dict[int, str]:
    """The legend's names, by arm: of those drawn, and of those that have nothing to draw as they did not finish."""
    has_line, names = {curve.arm for curve in curves}, {}
    for i, arm in enumerate(report.arms):
        words = [unfinished(arm), not_causal(arm), "above the frame" if i in shown.cut else ""]
        if i in has_line or words[0]:
            said = ", ".join(word for word in words if word)
            names[i] = _literal(arm.label) + (f" ({said})" if said else "")
    return names


def _arm(axes: Any, curve: Curve | None, look: Stroke, name: str, *, bands: bool) -> None:
    colour, dash = LIGHT[look.colour], (0, look.dash) if look.dash else "-"
    x, mean = (curve.x, curve.mean) if curve is not None else ([], [])
    zorder = 3 if look.colour == 0 else 2
    axes.plot(x, mean, color=colour, label=name, linewidth=look.width * 0.75, linestyle=dash, zorder=zorder)
    if curve is not None and curve.n > 1 and bands:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)


def _legend(axes: Any, beside: bool) -> None:
    """Beside the plot, clear of the last tick's text, or in small type below it where the names would be a wall."""
    if beside:
        axes.legend(loc="center left", bbox_to_anchor=(1.04, 0.5), fontsize=8, handlelength=2.6)
    else:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=5, handlelength=2.6, ncols=3)


def _y_title(report: Report, curves: Sequence[Curve]) -> str:
    figure = curves[0].metric.rpartition("/")[2]
    if curves[0].metric == name_over_time(figure):
        return OVER_TIME[figure].replace(", ", ",\n")
    part = part_of_val(report, curves)
    return METRICS[BPB][1] + (f"\n{part}" if part else "")


def _frame(axes: Any, shown: Frame, name: str, y_title: str) -> None:
    ticks = axis_ticks(name, shown.x0, shown.x1)
    axes.set(xlim=(shown.x0, shown.x1), ylim=(shown.y0, shown.y1))
    axes.set_ylabel(y_title)
    axes.set_xticks(ticks.values, ticks.texts)
    axes.set_xlabel(AXES.get(name, (name, name))[1] + (f" ({ticks.unit})" if ticks.unit else ""))


def _literal(label: str) -> str:
    """A leading underscore would keep a line out of the legend."""
    return f"\u200b{label}" if label.startswith("_") else label
