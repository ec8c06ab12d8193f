"""The page's section on routing: what stands out, loads against steps, each layer's load as bars, the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lmlab.report.curve_svg import draw
from lmlab.report.model import Load, Report, Routing
from lmlab.report.page_why import frame, remarks
from lmlab.report.palette import Stroke
from lmlab.report.routing import OVER_TIME, name_over_time

HIGH = 100  # of a picture of bars, in its own units; its width is that of ten for each expert
WIDE = 10


def section(report: Report, looks: Sequence[Stroke], table: str) -> str:
    """`table`: the section's table as HTML. "" where no arm has experts."""
    found = report.routing
    if found is None:
        return ""
    listed = remarks(found.findings, found.notes)
    folded = f"<details class=fold><summary>Each layer, at the last evaluation of val</summary>{table}</details>"
    return (
        "<section class=routing aria-labelledby=routing><h2 id=routing>Routing: where tokens went</h2>"
        f"{listed}{_over_time(found, looks)}{_pictures(report, found, looks)}{folded}</section>"
    )


def _over_time(found: Routing, looks: Sequence[Stroke]) -> str:
    drawn = []
    for figure, words in OVER_TIME.items():
        curves = [curve for curve in found.curves if curve.metric == name_over_time(figure)]
        if shown := frame(curves):
            label = f"{figure} against steps, {len(curves)} line{'' if len(curves) == 1 else 's'}"
            head = f"<b>{figure}</b> <span class=faint>{escape(words)}.</span>"
            drawn.append(f"<div><p>{head}</p><div class=frame>{draw(curves, looks, shown, label=label)}</div></div>")
    if not drawn:
        return ""
    words = "<p class=faint>Of training steps; lines as in the curves above.</p>"
    return f"{words}<div class=depth>{''.join(drawn)}</div>"


def _pictures(report: Report, found: Routing, looks: Sequence[Stroke]) -> str:
    """Arm by arm the loads of its layers."""
    parts = []
    for arm in dict.fromkeys(load.arm for load in found.loads):
        bars = "".join(_picture(load, looks[arm]) for load in found.loads if load.arm == arm)
        parts.append(f"<div><p><b>{escape(report.arms[arm].label)}</b></p><div class=loads>{bars}</div></div>")
    if not parts:
        return ""
    words = (
        "<p class=faint>Load of each layer's experts at the last evaluation of val, from the busiest to the idlest, "
        "mean over seeds; the line is the mean load.</p>"
    )
    return f"{words}<div class=depth>{''.join(parts)}</div>"


def _picture(load: Load, look: Stroke) -> str:
    top = max(*load.over_mean, 1.0)
    heights = [round(HIGH * value / top, 1) for value in load.over_mean]
    bars = "".join(f"M{WIDE * i + 1} {HIGH}v-{h:g}h{WIDE - 2}v{h:g}z" for i, h in enumerate(heights) if h)
    wide, even = WIDE * len(heights), round(HIGH * (1 - 1 / top), 1)
    unused = sum(not value for value in load.over_mean)
    label = f"layer {load.layer}: {len(heights)} experts, the busiest {load.over_mean[0]:.2f} times the mean"
    label += f", {unused} never used" if unused else ""
    return (
        f'<div class=load><svg role="img" aria-label="{escape(label)}" viewBox="0 0 {wide} {HIGH}" '
        f'preserveAspectRatio="none"><title>{escape(label)}</title><path class="bar c{look.colour}" d="{bars}"/>'
        f'<path class=even d="M0 {even:g}h{wide}"/></svg><small>layer {load.layer}</small></div>'
    )
