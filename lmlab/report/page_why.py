"""The page's section on what probes found: what stands out, each figure against depth in a small drawing, the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lmlab.report.curve_svg import Frame, draw
from lmlab.report.model import Curve, Report, Why
from lmlab.report.palette import Stroke
from lmlab.runs.probe_names import LAYER


def section(report: Report, looks: Sequence[Stroke], table: str) -> str:
    """`table`: the section's table as HTML. "" where no run was probed."""
    why = report.why
    if why is None:
        return ""
    listed = remarks(why.findings, why.notes)
    folded = f"<details class=fold><summary>All figures, at the last step probed</summary>{table}</details>"
    return (
        "<section class=why aria-labelledby=why><h2 id=why>Why: inside the models</h2>"
        f"{listed}{_drawings(why, looks)}{folded}</section>"
    )


def remarks(findings: Sequence[str], notes: Sequence[str]) -> str:
    """What stands out, then what should be known of it, as one list; "" of none."""
    said = "".join(f"<li>{escape(line)}" for line in findings)
    noted = "".join(f"<li class=faint>{escape(line)}" for line in notes)
    return f"<ul>{said}{noted}</ul>" if said or noted else ""


def _drawings(why: Why, looks: Sequence[Stroke]) -> str:
    """One for each figure that has a number in at least two layers."""
    drawn = []
    for figure in LAYER:
        curves = [curve for curve in why.profiles if curve.metric == figure]
        if shown := frame(curves):
            label = f"{figure} against the layer, {len(curves)} line{'' if len(curves) == 1 else 's'}"
            head = f"<b>{escape(figure)}</b> <span class=faint>{escape(LAYER[figure])}</span>"
            drawn.append(f"<div><p>{head}</p><div class=frame>{draw(curves, looks, shown, label=label)}</div></div>")
    if not drawn:
        return ""
    words = "<p class=faint>Against the layer, at the last step probed; lines as in the curves above.</p>"
    return f"{words}<div class=depth>{''.join(drawn)}</div>"


def frame(curves: Sequence[Curve]) -> Frame | None:
    """All layers and all that is finite; None when there is no such point."""
    values = [v for curve in curves for line in (curve.low, curve.mean, curve.high) for v in line if math.isfinite(v)]
    if not values:
        return None
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Frame(0.0, max(curve.x[-1] for curve in curves), low - pad, high + pad)
