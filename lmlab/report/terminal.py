"""A report in the terminal: the arms, the runs that did not go well, what probes found, where tokens went, long
contexts, confounds, notes.

On a terminal columns that do not fit are left out, least important first, and said; a very narrow one gets a block per
arm. Elsewhere columns are aligned and nothing is cut, for grep and awk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lmlab.report.long_tables import TITLES, filled
from lmlab.report.model import Cell, Column, LongContext, Report, Routing, Table, Why
from lmlab.report.routing import load_bars, load_name

GAP = "  "
MAX_RUNS = 20
MAX_BESIDE = 6  # arms that have a column of their own
# Left out first to last when there is no room.
SPARE = (
    *("peak_memory_bytes", "tokens", "seeds", "best_val_bits_per_byte", "test_bits_per_byte", "parameters"),
    *("tokens_per_s",),
)
SPARE_OF_RUNS = ("arm", "seed")
SPARE_OF_WHY = ("lowest_layer", "lowest")
SPARE_OF_ROUTING = ("balance", "load_min", "entropy")
SPARE_OF_LONG = ("why", "gain", "area", "k_max", "chance", "documents", "n_documents", "seeds", "trained_length")
SPARES = {"arms": SPARE, "why": SPARE_OF_WHY, "routing": SPARE_OF_ROUTING}
SPARES |= dict.fromkeys(("long_short", "long_scores"), SPARE_OF_LONG)
FOLDED = {"why": 24, "arm": 24, "run": 28, "problem": 30}  # columns of words may be folded down to so many characters
STYLES = {"bad": "red", "warn": "yellow", "baseline": "bold"}


def show(report: Report, console: Console) -> None:
    """Print the report on `console` (stdout)."""
    runs = _named(report, "runs")
    _line(console, Text(report.title, style="bold"))
    if report.common:
        _line(console, Text("all arms: " + " ".join(f"{k}={v}" for k, v in report.common.items()), style="dim"))
    _line(console, Text(""))
    show_arms(report, console)
    troubled = _troubled(runs)
    if troubled.rows:
        _line(console, Text(""))
        _table(console, Table(runs.name, troubled.columns, troubled.rows[:MAX_RUNS]))
        if (more := len(troubled.rows) - MAX_RUNS) > 0:
            _line(console, Text(f"… and {more} more"))
    if report.why is not None:
        show_why(report.why, console)
    if report.routing is not None:
        show_routing(report, report.routing, console)
    if report.long_context is not None:
        show_long(report.long_context, console)
    for mark, style, lines in (("confound: ", "yellow", report.confounds), ("note: ", "dim", report.notes)):
        if lines:
            _line(console, Text(""))
        for line in lines:
            _line(console, Text.assemble((mark, style), line))


def show_arms(report: Report, console: Console) -> None:
    """The table of arms alone."""
    arms = _named(report, "arms")
    _table(console, arms, by_label(arms, report))


def show_why(why: Why, console: Console) -> None:
    """What probes found inside the models."""
    _line(console, Text(""))
    _line(console, Text("why: inside the models, at the last step probed", style="bold"))
    wide = side_by_side(why.table)
    _table(console, *([wide] if len(wide.columns) <= 1 + MAX_BESIDE else []), why.table)
    for mark, style, lines in (("why: ", "cyan", why.findings), ("note: ", "dim", why.notes)):
        for line in lines:
            _line(console, Text.assemble((mark, style), line))


def show_routing(report: Report, found: Routing, console: Console) -> None:
    """Where tokens went, in arms that have experts."""
    _line(console, Text(""))
    _line(console, Text("routing: where tokens went, at the last evaluation of val", style="bold"))
    if found.table.rows:
        _table(console, found.table)
    for load in found.loads:
        _line(console, Text.assemble(("load: ", "dim"), load_bars(load), " ", load_name(report, load, many=True)))
    for mark, style, lines in (("routing: ", "cyan", found.findings), ("note: ", "dim", found.notes)):
        for line in lines:
            _line(console, Text.assemble((mark, style), line))


def show_long(found: LongContext, console: Console) -> None:
    """Perplexity by length, and effective lengths."""
    title = TITLES[found.short.name]
    _line(console, Text(""))
    _line(console, Text(f"long contexts: {title[0].lower()}{title[1:]}", style="bold"))
    scores = [table for table in found.tables if table.name == "long_scores"]
    for i, table in enumerate(table for table in [found.short, *scores] if table.rows):
        if i:
            _line(console, Text(""))
        _table(console, filled(table))
    for mark, style, lines in (("long: ", "cyan", found.findings), ("note: ", "dim", found.notes)):
        for line in lines:
            _line(console, Text.assemble((mark, style), line))


def side_by_side(table: Table) -> Table:
    """The table of probes with a row per figure and a column per arm: the mean over layers, and the highest."""
    arms = list(dict.fromkeys(row[1].text for row in table.rows))
    rows: dict[str, list[Cell]] = {}
    for figure, _, mean, *_, highest, layer in table.rows:
        text = mean.text if highest.value is None else f"{mean.text} | {highest.text} ({layer.text})"
        rows.setdefault(figure.text, [figure]).append(Cell(text, mean.value))
    heads = [Column("arm", arm, True) for arm in arms]
    return Table(table.name, (Column("figure", "mean | highest (in layer)"), *heads), list(rows.values()))


def _named(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def _line(console: Console, text: Text) -> None:
    """A line of prose: wrapped on a terminal, whole elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


def _troubled(runs: Table) -> Table:
    """Of the runs those that did not finish or have problems, by the columns that say so."""
    at = {column.key: i for i, column in enumerate(runs.columns)}
    rows = [row for row in runs.rows if row[at["state"]].mark or row[at["problem"]].value is not None]
    kept = [at[key] for key in ("run", "arm", "seed", "state", "problem")]
    return Table(runs.name, tuple(runs.columns[i] for i in kept), [[row[i] for i in kept] for row in rows])


# ---------------------------------------------------------------- tables


def _table(console: Console, *forms: Table) -> None:
    """The first of these tables, which say the same, that fits with the least left out."""
    if not console.is_terminal:
        for line in aligned(forms[0]):
            console.print(Text(line), soft_wrap=True)
        return
    found = fitting(forms, console.width)
    if found is None:
        _blocks(console, forms[-1])
        return
    console.print(_rich(found[0]))
    if found[1]:
        console.print(Text(f"not shown, for want of width: {', '.join(found[1])}", style="dim"))


def by_label(arms: Table, report: Report) -> Table:
    """The table of arms with one column for all axes."""
    n = len(_name_columns(arms.columns))
    rows = [
        [Cell(arm.label, arm.label, row[0].mark), *row[n:]] for arm, row in zip(report.arms, arms.rows, strict=True)
    ]
    return Table(arms.name, (Column("arm", "arm"), *arms.columns[n:]), rows)


def aligned(table: Table) -> list[str]:
    """Columns padded to their widest cell, numbers to the right."""
    widths = _widths(table)
    rows = [[column.title for column in table.columns], *([cell.text for cell in row] for row in table.rows)]
    return [
        GAP.join(
            text.rjust(width) if column.numeric else text.ljust(width)
            for text, width, column in zip(row, widths, table.columns, strict=True)
        ).rstrip()
        for row in rows
    ]


def _widths(table: Table) -> list[int]:
    columns = range(len(table.columns))
    return [max(len(table.columns[i].title), *(len(row[i].text) for row in table.rows), 0) for i in columns]


def fitting(forms: Sequence[Table], width: int) -> tuple[Table, list[str]] | None:
    """(a form with as many columns as fit, titles of those left out); None when even the least is too wide."""
    spare = SPARES.get(forms[0].name, SPARE_OF_RUNS)
    gone: list[str] = []
    for key in ("", *spare):
        gone += [column.title for column in forms[0].columns if column.key == key]
        forms = [_without(table, key) for table in forms]
        for table in forms:
            if _least(table) <= width:
                return table, gone
    return None


def _least(table: Table) -> int:
    """How wide the table is at least."""
    widths = [min(w, FOLDED.get(c.key, w)) for w, c in zip(_widths(table), table.columns, strict=True)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _without(table: Table, key: str) -> Table:
    kept = [i for i, column in enumerate(table.columns) if column.key != key]
    return Table(table.name, tuple(table.columns[i] for i in kept), [[row[i] for i in kept] for row in table.rows])


def _rich(table: Table) -> RichTable:
    made = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, len(GAP), 0, 0))
    for column in table.columns:
        side: Literal["left", "right"] = "right" if column.numeric else "left"
        made.add_column(column.title, justify=side, overflow="fold", no_wrap=column.key not in FOLDED)
    for row in table.rows:
        made.add_row(*map(_styled, row))
    return made


def _styled(cell: Cell) -> Text:
    return Text(cell.text, style=STYLES.get(cell.mark, ""))


def _blocks(console: Console, table: Table) -> None:
    """For each row what it is, then its other cells, one a line, further in where it goes on."""
    for row in table.rows:
        console.print(Text(row[0].text, style="bold"))
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            if cell.text != "–":
                first, *others = (Text(f"{column.title}: ") + _styled(cell)).wrap(console, console.width - 2 * len(GAP))
                console.print(Text(GAP) + first, *(Text(2 * GAP) + line for line in others), sep="\n")


def _name_columns(columns: Sequence[Column]) -> list[Column]:
    """Those that say what an arm is: they stand before its figures."""
    keys = [column.key for column in columns]
    return list(columns[: keys.index("val_bits_per_byte")])
