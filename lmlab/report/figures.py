"""Figures for papers: val bits/byte against tokens, FLOPs and seconds, as SVG and PDF.

Colours, dashes and the part of the plane shown are those of the page. The same report gives the same bytes; the user's
own matplotlib settings neither matter nor change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.report.curve_svg import AXES, METRICS, Frame, axis_ticks, diverged, frame
from lmlab.report.model import BPB, X_AXES, Curve, Report
from lmlab.report.palette import LIGHT, MANY, Stroke, strokes

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


def draw(report: Report, folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write `loss-<axis>.<kind>` for every axis that has curves, kinds of "svg" and "pdf"; the files, in that order.

    Without curves nothing is written and the list is empty. Raises RunError when the folder can't be written to.
    """
    written: list[Path] = []
    looks = strokes(len(report.arms), report.baseline)
    for axis in X_AXES:
        curves = [c for c in report.curves if (c.metric, c.x_name) == (BPB, axis) and c.x]
        shown = frame(curves, diverged(report))
        if shown is None:
            continue
        paths = [folder / f"loss-{axis}.{kind}" for kind in kinds]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _save(curves, shown, [arm.label for arm in report.arms], looks, paths)
        except OSError as error:
            where = error.filename or folder
            raise RunError(f"can't write {where}: {error.strerror}", "name another folder: --out DIR") from error
        written += paths
    return written


def _save(
    curves: Sequence[Curve], shown: Frame, labels: Sequence[str], looks: Sequence[Stroke], paths: Sequence[Path]
) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(6.4, 3.8))
        FigureCanvasAgg(figure)
        _fill(figure, curves, labels, looks)
        _frame(figure.axes[0], shown, curves[0].x_name)
        for path in paths:
            kind = path.suffix[1:]
            figure.savefig(path, format=kind, bbox_inches="tight", metadata=UNDATED.get(kind))


def _fill(figure: Any, curves: Sequence[Curve], labels: Sequence[str], looks: Sequence[Stroke]) -> None:
    axes = figure.add_subplot()
    for curve in curves:
        look = looks[curve.arm]
        colour, dash = LIGHT[look.colour], (0, look.dash) if look.dash else "-"
        style = {"linewidth": look.width * 0.75, "linestyle": dash, "zorder": 3 if look.colour == 0 else 2}
        axes.plot(curve.x, curve.mean, color=colour, label=_literal(labels[curve.arm]), **style)
        if curve.n > 1 and len(looks) <= MANY:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    _legend(axes, len(curves))


def _legend(axes: Any, n_names: int) -> None:
    """Beside the plot, or in small type below it where the names would be a wall."""
    if n_names <= BESIDE:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, handlelength=2.6)
    else:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=5, handlelength=2.6, ncols=3)


def _frame(axes: Any, shown: Frame, name: str) -> None:
    ticks = axis_ticks(name, shown.x0, shown.x1)
    axes.set(xlim=(shown.x0, shown.x1), ylim=(shown.y0, shown.y1), ylabel=METRICS[BPB][1])
    axes.set_xticks(ticks.values, ticks.texts)
    axes.set_xlabel(AXES[name][1] + (f" ({ticks.unit})" if ticks.unit else ""))


def _literal(label: str) -> str:
    """A leading underscore would keep a line out of the legend."""
    return f"\u200b{label}" if label.startswith("_") else label
