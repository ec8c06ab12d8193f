"""What `lmlab eval --long-context` prints, and its figure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmlab.report.palette import LIGHT

MARKS = ("o", "s", "^", "D", "v", "P", "X")
Figure = Callable[[dict[str, Any]], "str | None"]


def print_long(report: dict[str, Any]) -> None:
    """A block of rows per figure (a row a scaling, a column a length), losses by position, how far scores hold."""
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table

    long = report["long_context"]
    say(_first_line(report, long))
    lengths, trained = long["lengths"], long["trained_length"]
    head = ["", "rope_scaling", *(f"{n:,}{'*' if n == trained else ''}" for n in lengths)]
    rows = _rows(long["cells"], lengths, FIGURES, long) if long["cells"] else []
    for name in dict.fromkeys(cell["task"] for cell in long["tasks"]):
        own = [cell for cell in long["tasks"] if cell["task"] == name]
        rows += _rows(own, lengths, [(f"{name}{title}", figure) for title, figure in OF_TASKS], long)
    print_table(head, rows)
    marks = ["* the trained length"]
    if long["cells"]:
        marks += ["sliding windows advance by half", f"± standard error over {_units(long)}"]
    say(" · ".join(marks))
    for why, lengths in _missing([*long["cells"], *long["tasks"]]).items():
        say(f"not available at {', '.join(f'{n:,}' for n in lengths)} tokens: {why}")
    print_positions(long)
    print_summary(long)
    print_memory(long)


def _missing(cells: list[dict[str, Any]]) -> dict[str, list[int]]:
    """{why: lengths}; reasons that differ in their numbers alone are one."""
    found: dict[str, tuple[str, list[int]]] = {}
    for cell in cells:
        if why := cell["not_available"]:
            lengths = found.setdefault(re.sub(r"\d[\d,]*", "#", why), (why, []))[1]
            if cell["length"] not in lengths:
                lengths.append(cell["length"])
    return dict(found.values())


def _rows(
    cells: list[dict[str, Any]], lengths: list[int], figures: Sequence[tuple[str, Figure]], long: dict[str, Any]
) -> list[list[str]]:
    rows = []
    for title, figure in figures:
        for n, (name, found) in enumerate(by_scaling(cells, long)):
            rows.append([title if n == 0 else "", name, *(_shown(found.get(length), figure) for length in lengths)])
    return rows


def _first_line(report: dict[str, Any], long: dict[str, Any]) -> str:
    tuned = "" if long["trained_scaling"] == "none" else f", with rope_scaling {long['trained_scaling']}"
    tokens = f", {long['tokens']:,} tokens of {_units(long)}" if long["cells"] else ""
    where = f"{report['data']} {report['split']}{tokens}, {report['precision']}"
    return f"{report['run']}  step {report['step']}  trained at {long['trained_length']:,} tokens{tuned}  {where}"


def _units(long: dict[str, Any]) -> str:
    what = "document" if long["unit"] == "documents" else "stretch of the stream"
    n = long["n_documents"]
    many = what if n == 1 else {"document": "documents"}.get(what, "stretches of the stream")
    return f"{n} {many}"


def by_scaling(cells: list[dict[str, Any]], long: dict[str, Any]) -> list[tuple[str, dict[int, dict[str, Any]]]]:
    """(name, {length: cell}) in order; where factors were typed a scaling has one such row per factor."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        typed = long["factors"] is not None and cell["factor"] is not None
        name = f"{cell['scaling']} {cell['factor']:g}" if typed else cell["scaling"]
        found.setdefault(name, {})[cell["length"]] = cell
    return list(found.items())


def _shown(cell: dict[str, Any] | None, figure: Figure) -> str:
    if cell is None or cell["not_available"]:
        return "n/a"
    return figure(cell) or "–"


def _with_se(value: float | None, se: float | None, form: str) -> str | None:
    if value is None:
        return None
    return format(value, form) + ("" if se is None else f" ±{se:{form.lstrip('+')}}")


def _needle(cell: dict[str, Any]) -> str | None:
    n = sum(one["n"] for one in cell["needle"])
    return f"{sum(one['correct'] for one in cell['needle'])}/{n}" if n else None


def _needle_gain(cell: dict[str, Any]) -> str | None:
    """The mean over depths, each of as many windows."""
    asked = cell["needle"]
    if not asked:
        return None
    errors = [one["gain_se"] for one in asked]
    se = None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(asked)
    return _with_se(sum(one["gain"] for one in asked) / len(asked), se, "+.3f")


FIGURES: tuple[tuple[str, Figure], ...] = (
    ("perplexity, windows apart", lambda c: f"{c['perplexity']:.4g}"),
    ("nats/token, windows apart", lambda c: _with_se(c["loss"], c["loss_se"], ".3f")),
    ("nats/token, sliding", lambda c: _with_se(c["sliding_loss"], c["sliding_loss_se"], ".3f")),
    ("context gain, nats", lambda c: _with_se(c["context_gain"], c["context_gain_se"], "+.3f")),
    ("key tokens, nats", lambda c: _with_se(c["key_loss"], c["key_loss_se"], ".3f")),
    ("row repeated: nats gained", lambda c: c["copy"] and _with_se(c["copy"]["gain"], c["copy"]["gain_se"], "+.3f")),
    ("row repeated: recalled", lambda c: c["copy"] and f"{c['copy']['accuracy']:.1%}"),
    ("needle, of 10 words", _needle),
    ("needle: nats over the ten", _needle_gain),
)


OF_TASKS: tuple[tuple[str, Figure], ...] = (
    (", examples right", lambda c: f"{c['correct']}/{c['n']} ({c['exact_low']:.0%}–{c['exact_high']:.0%})"),
    (", chance", lambda c: f"{c['chance_exact']:.2g}"),
    (", answer tokens right", lambda c: f"{c['token_accuracy']:.1%} ({c['token_low']:.0%}–{c['token_high']:.0%})"),
    (", chance of a token", lambda c: f"{c['chance_token']:.2g}"),
    (", nats per answer token", lambda c: f"{c['loss']:.3f}"),
)


def print_positions(long: dict[str, Any]) -> None:
    """nats/token by position at the longest length that any scaling has."""
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table

    having = [c["length"] for c in long["cells"] if not c["not_available"]]
    if not having:
        return
    last = max(having)
    columns = [
        (name, cells[last]) for name, cells in by_scaling(long["cells"], long) if not cells[last]["not_available"]
    ]
    say(f"nats/token by position in windows of {last:,}")
    rows = []
    for n, bucket in enumerate(columns[0][1]["buckets"]):
        means = [f"{cell['buckets'][n]['nats'] / cell['buckets'][n]['tokens']:.3f}" for _, cell in columns]
        rows.append([f"{bucket['from']:,}–{bucket['to']:,}", f"{bucket['tokens']:,}", *means])
    print_table(["position", "targets", *(name for name, _ in columns)], rows)


def print_summary(long: dict[str, Any]) -> None:
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table

    def length(value: int | None) -> str:
        return "–" if value is None else f"{value:,}"

    rows = []
    for one in long["summary"]:
        factor = "" if one["factor"] is None else f" {one['factor']:g}"
        score = "–" if one["trained_score"] is None else f"{one['trained_score']:.1%}"
        chance = "–" if one["chance"] is None else f"{one['chance']:.2g}"
        effective = "at chance" if one["above_chance"] is False else length(one["effective_length"])
        far = [effective, length(one["largest_80"]), length(one["k_max"])]
        area = "–" if one["area"] is None else f"{one['area']:.3f}"
        rows.append([one["what"], one["scaling"] + factor, score, chance, *far, area])
    if rows:
        say("how far scores hold")
        head = [
            "score",
            "rope_scaling",
            "at trained",
            "chance",
            "≥ 85 % of it",
            "≥ 80 %",
            "≥ 20 %",
            "mean over log₂ length",
        ]
        print_table(head, rows)


def print_memory(long: dict[str, Any]) -> None:
    from lmlab.cli.tables import print_table
    from lmlab.runs.machine import gib

    rows = []
    for one in long["memory"]:
        if one["not_available"]:
            rows.append([f"{one['length']:,}", *["n/a"] * 4])
            continue
        rates = [f"{one[key]:,.0f}" for key in ("prefill_tokens_per_s", "decode_tokens_per_s")]
        rows.append([f"{one['length']:,}", gib(one["kv_bytes"]), gib(one["kv_bytes_measured"]), *rates])
    print_table(["tokens", "cache by formula", "measured", "prefill tokens/s", "decode tokens/s"], rows)


def draw_long(report: dict[str, Any], path: Path) -> None:
    """Perplexity against length, and the loss by position at the longest one, a line per scaling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    long = report["long_context"]
    shown = [*by_scaling(long["cells"], long)] or [
        (f"{task} {name}".strip(), cells)
        for task in dict.fromkeys(cell["task"] for cell in long["tasks"])
        for name, cells in by_scaling([c for c in long["tasks"] if c["task"] == task], long)
    ]
    with matplotlib.rc_context({"svg.hashsalt": "lmlab", "svg.fonttype": "none", "font.size": 9.0}):
        figure, found = pyplot.subplots(1, 2 if long["cells"] else 1, figsize=(9.6, 3.6), layout="constrained")
        left, *right = found if long["cells"] else [found]
        for n, (name, cells) in enumerate(shown):
            had = {length: cell for length, cell in sorted(cells.items()) if not cell["not_available"]}
            if not had:
                continue
            how: dict[str, Any] = {"label": name, "color": LIGHT[n % len(LIGHT)], "marker": MARKS[n % len(MARKS)]}
            how |= {"markersize": 4}
            if not long["cells"]:
                left.plot(list(had), [cell["exact"] for cell in had.values()], **how)
                continue
            left.plot(list(had), [cell["perplexity"] for cell in had.values()], **how)
            buckets = had[max(had)]["buckets"]
            right[0].plot(
                [(b["from"] + b["to"]) / 2 for b in buckets], [b["nats"] / b["tokens"] for b in buckets], **how
            )
        left.set(xlabel="tokens in a row", ylabel="examples right")
        if long["cells"]:
            left.set(xlabel="tokens in a window", ylabel="perplexity, windows apart", yscale="log")
            for formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
                formatter("{x:,.5g}")
            right[0].set(xlabel=f"position in windows of {max(long['lengths']):,}", ylabel="nats/token")
        for axes in (left, *right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.axvline(long["trained_length"], color="#8a8a8a", linewidth=1, linestyle=":")
            axes.grid(color="#e6e6e6", linewidth=0.6)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        left.legend(frameon=False)
        figure.suptitle(f"{Path(report['run']).name}: the dotted line is the trained length", fontsize=9)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
