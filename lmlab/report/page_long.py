"""The page's section on long contexts: what stands out, perplexity and scores against length, ratios beside published
ones, answers by length and depth, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from lmlab.report import palette
from lmlab.report.long_lines import RATIO
from lmlab.report.long_panels import look_of, panels
from lmlab.report.long_svg import ROW, Looks, draw, draw_map, swatch
from lmlab.report.long_tables import TITLES, filled
from lmlab.report.model import DepthMap, LongContext, LongLine, Report, Table
from lmlab.report.page_why import remarks
from lmlab.report.palette import BANDS
from lmlab.report.published import TAG

FIXED_HIGH = 80  # pixels of a map besides its rows


def css() -> str:
    """`.h3{--heat:…;--on:…}` of each step of a share, light and dark."""
    light, dark = (
        "".join(f".h{i}{{--heat:{ground};--on:{text}}}" for i, (ground, text) in enumerate(palette.heat_colours(stops)))
        for stops in (palette.HEAT_LIGHT, palette.HEAT_DARK)
    )
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"


def section(report: Report, table: Callable[[Table], str]) -> str:
    """table: a table as HTML. "" where no run was evaluated so."""
    found = report.long_context
    if found is None:
        return ""
    looks = look_of(report, found)
    scores = "".join(_titled(one, table) for one in found.tables if one.name == "long_scores")
    others = "".join(_folded(one, table) for one in found.tables if one.name != "long_scores")
    return (
        "<section class=long-context aria-labelledby=long-context>"
        "<h2 id=long-context>Long contexts: beyond the trained length</h2>"
        f"{remarks(found.findings, found.notes)}{scores}{_drawings(found, looks)}{_maps(found)}{others}</section>"
    )


def _titled(one: Table, table: Callable[[Table], str]) -> str:
    return f"<h3>{TITLES[one.name]}</h3>{table(filled(one))}"


def _folded(one: Table, table: Callable[[Table], str]) -> str:
    return f"<details class=fold><summary>{TITLES[one.name]}</summary>{table(filled(one))}</details>"


# ---------------------------------------------------------------- lines


def _drawings(found: LongContext, looks: Looks) -> str:
    all_of = list(panels(found))
    if not all_of:
        return ""
    bands = any(line.n > 1 for line in found.lines) and len({(a, s) for a, s in looks if a is not None}) <= BANDS
    words = "Lines: the mean over seeds" + ("; bands: the lowest and the highest seed." if bands else ".")
    warned = f" <span class=unlike>{escape(found.unlike)}</span>" if found.unlike else ""
    own = [line for line in found.lines if line.arm is not None]
    drawn = []
    for panel in all_of:
        head = f"<p><b>{escape(panel.title)}</b>{_of(panel.lines)}</p>"
        body = f"<div class=frame>{draw(panel, looks)}</div>"
        theirs = [line for line in panel.lines if line.arm is None]
        kind = " class=wide" if theirs else ""
        drawn.append(f"<div{kind}>{head}{body}{_key(theirs, looks) + _sources(theirs) if theirs else ''}</div>")
    return f"<p class=faint>{words}{warned}</p>{_key(own, looks)}<div class=longs>{''.join(drawn)}</div>"


def _of(lines: Sequence[LongLine]) -> str:
    if lines[0].figure != RATIO:
        return ""
    return f" <span class=faint>Windows that do not overlap. Thin, dotted, with open marks: {TAG}.</span>"


def _key(lines: Sequence[LongLine], looks: Looks) -> str:
    """A legend; nothing for one line without a name."""
    names = {(line.arm, line.scaling): line.name if line.arm is not None else line.scaling for line in lines}
    if not any(names.values()):
        return ""
    items = "".join(f"<li>{swatch(looks[key])}<span>{escape(name)}</span>" for key, name in names.items())
    return f"<ul class=keys aria-label=lines>{items}</ul>"


def _sources(lines: Sequence[LongLine]) -> str:
    told: dict[str, list[str]] = {}
    for line in lines:
        told.setdefault(line.source, []).append(line.name)
    items = "".join(f"<li>{escape(', '.join(names))}: {escape(source)}" for source, names in told.items())
    return f"<details class=key><summary>Sources, {TAG}</summary><ul>{items}</ul></details>"


# ---------------------------------------------------------------- length × depth


def _maps(found: LongContext) -> str:
    parts = []
    for what in dict.fromkeys(one.what for one in found.maps):
        drawn = "".join(_map(one) for one in found.maps if one.what == what)
        parts.append(f"<h3>{escape(what)} by length and depth</h3><div class=maps>{drawn}</div>")
    if not parts:
        return ""
    steps = "".join(f'<i class="h{i}">{i / (palette.N_HEAT - 1):g}</i>' for i in range(0, palette.N_HEAT, 2))
    key = f"<p class='faint heatkey'>Right answers of all, all seeds; share: <span>{steps}</span></p>"
    return f"{parts[0].partition('<div')[0]}{key}<div{parts[0].partition('<div')[2]}{''.join(parts[1:])}"


def _map(one: DepthMap) -> str:
    head = f"<p><b>{escape(one.name or one.what)}</b> <span class=faint>trained at {one.trained:,}</span></p>"
    high = ROW * len(one.depths) + FIXED_HIGH
    return f'<div>{head}<div class=frame style="height:{high}px">{draw_map(one)}</div></div>'
