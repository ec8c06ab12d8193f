"""Tables of the section on long contexts. Each longer length stands beside the figure at the trained length; what was
not available says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from lmlab.report.checked import number
from lmlab.report.long_series import COPY, NEEDLE, NEEDLE_CHANCE, Found, Series, average, exp, numbers, reasons
from lmlab.report.model import Arm, Cell, Column, Stat, Table
from lmlab.report.tables import MISSING, whole, with_spread
from lmlab.report.why import number as short
from lmlab.runs.intervals import wilson

NOT = "n/a"
TITLES = {
    "long_short": "Perplexity by length, × that at the trained length",
    "long_scores": "Effective lengths",
    "long_text": "Loss at every length, beside the trained one",
    "long_speed": "Memory and speed",
}
ARM = Column("arm", "arm", False, "What the runs are, by what differs in this report.")
SCALING = Column("scaling", "scaling", False, "own: as it was trained; others were put on the same checkpoint.")
SEEDS = Column("seeds", "seeds", True, "Runs that have the figure.")
WHY = Column("why", "not available", False, "Why a length has no figure.")
SCORES = (
    *(ARM, SCALING),
    Column("what", "score", False, "needle: of 10 candidates; copy: tokens of the second copy; else a task's answers."),
    Column("trained_length", "trained", True, "Tokens of the rows it was trained on."),
    Column(
        "trained_score", "at it", True, "Score at the trained length, mean ± sd over seeds; 95 %: Wilson's interval."
    ),
    Column("n", "n", True, "Answers at the trained length, all seeds together."),
    Column(
        "gain", "gain", True, "Nats at the trained length: a needle over its rivals, a copy over its original (SE)."
    ),
    Column("chance", "chance", True, "Score of guessing."),
    Column("effective_length", "effective", True, "Longest with ≥ 85 % of the score at the trained length."),
    Column("largest_80", "≥ 80 %", True, "Longest with a score of at least 0.8."),
    Column("k_max", "k_max", True, "Longest with a score of at least 0.2."),
    Column("area", "area", True, "Mean score over log₂ length."),
    *(SEEDS, WHY),
)
TEXT = (
    *(ARM, SCALING),
    Column("length", "length", True, "Tokens of a window."),
    Column("times", "× trained", True, "Over the trained length."),
    Column("factor", "factor", True, "Of the scaling."),
    Column("sliding_loss", "sliding", True, "Nats/token, every token with long context: mean ± sd over seeds (SE)."),
    Column("sliding_trained", "at trained", True, "The same at the trained length, or the longest measured below it."),
    Column("sliding_ratio", "ratio", True, "Of sliding perplexities, to that at the trained length."),
    Column("loss", "apart", True, "Nats/token of windows that do not overlap: mean ± sd over seeds (SE)."),
    Column("loss_trained", "at trained", True, "The same at the trained length, or the longest measured below it."),
    Column("loss_ratio", "ratio", True, "Of perplexities apart, to that at the trained length."),
    Column("context_gain", "context gain", True, "Nats/token less than with the shortest windows, same tokens (SE)."),
    Column("key_loss", "key tokens", True, "Loss of tokens that only more than the trained length gives away (SE; n)."),
    Column("n_documents", "documents", True, "What SE is over."),
    *(SEEDS, WHY),
)
SPEED = (
    *(ARM, SCALING),
    Column("length", "length", True, "Tokens of a row."),
    Column("kv_bytes", "cache", True, "Bytes of one row's cache by the formula."),
    Column("kv_bytes_measured", "measured", True, "Bytes that it held."),
    Column("prefill_tokens_per_s", "prefill tok/s", True, "Mean over seeds."),
    Column("decode_tokens_per_s", "decode tok/s", True, "Mean over seeds."),
    SEEDS,
)
OF_SPEED = ("kv_bytes", "kv_bytes_measured", "prefill_tokens_per_s", "decode_tokens_per_s")


def _head(arms: Sequence[Arm], one: Series) -> list[Cell]:
    arm = arms[one.arm]
    return [Cell(arm.label, arm.label, "baseline" if arm.is_baseline else ""), Cell(one.scaling, one.scaling)]


def _figure(found: Stat | None, form: Callable[[float], str], remark: str = "") -> Cell:
    return MISSING if found is None else Cell(with_spread(found, form, form) + remark, found.mean)


def loss(value: float) -> str:
    return f"{value:.4f}"


def size(value: float) -> str:
    """512 B, 96 KiB, 1.8 MiB."""
    power = next(i for i, unit in enumerate((2**10, 2**20, 2**30, math.inf)) if value < unit)
    return f"{value / 2 ** (10 * power):.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


# ---------------------------------------------------------------- scores


def scores_table(arms: Sequence[Arm], all_of: Sequence[Series]) -> Table:
    """A row per arm, scaling and score, score by score, so that arms stand next to each other."""
    whats = dict.fromkeys(what for one in all_of for what in [*one.summary, *one.tasks_missing])
    return Table("long_scores", SCORES, [_scores(arms, one, what) for what in whats for one in _having(all_of, what)])


def _having(all_of: Sequence[Series], what: str) -> list[Series]:
    return [one for one in all_of if what in one.summary or what in one.tasks_missing]


def _scores(arms: Sequence[Arm], one: Series, what: str) -> list[Cell]:
    rows, chance = one.summary.get(what, []), chance_of(one, what)
    correct, n = answers(one, what, one.trained)
    low, high = wilson(correct, n) if n else (0.0, 0.0)
    at = _figure(average(numbers(rows, "trained_score")), lambda v: f"{v:.3f}", f" ({low:.2f}…{high:.2f})" if n else "")
    seeds = [row for row in rows if number(row.get("trained_score")) is not None]
    lengths = [_longest(seeds, key) for key in ("effective_length", "largest_80", "k_max")]
    missing = one.tasks_missing.get(what, {}) or (one.missing if what in (NEEDLE, COPY) else {})
    return [
        *(*_head(arms, one), Cell(what, what), Cell(whole(one.trained), one.trained)),
        at if rows else Cell(NOT),
        Cell(whole(n), n) if n else MISSING,
        _gain(one, what),
        MISSING if chance is None else Cell(short(chance), chance),
        *lengths,
        _figure(average(numbers(rows, "area")), lambda v: f"{v:.3f}"),
        Cell(str(len(seeds)), len(seeds)),
        _why(missing),
    ]


def _gain(one: Series, what: str) -> Cell:
    """Over depths the mean, of which each has as many cases; seeds as everywhere."""
    found = [cell.get(what) for cell in one.cells.get(one.trained, [])]
    parts = [[part] if isinstance(part, dict) else dicts(part) for part in found]
    known = [numbers(part, "gain") for part in parts]
    errors = [numbers(part, "gain_se") for part in parts]
    means = average([sum(gains) / len(gains) for gains in known if gains])
    se = average([math.sqrt(sum(e * e for e in own)) / len(own) for own in errors if own])
    return _figure(means, short, f" (SE {short(se.mean)})" if se is not None else "")


def _longest(rows: Sequence[Found], key: str) -> Cell:
    """Mean ± sd over the seeds that reach it; how many, where not all do; none, where no seed does."""
    reached = average(numbers(rows, key))
    if not rows:
        return MISSING
    if reached is None:
        return Cell("none", None)
    remark = f" ({reached.n} of {len(rows)} seeds)" if reached.n < len(rows) else ""
    alike = reached.sd == 0  # the usual case: the lengths are a grid
    return _figure(Stat(reached.mean, None, reached.n) if alike else reached, whole, remark)


def _why(missing: dict[int, str]) -> Cell:
    """`1,024, 2,048: learned positions end at 512`"""
    if not missing:
        return MISSING
    text = "; ".join(f"{', '.join(map(whole, lengths))}: {why}" for why, lengths in reasons(missing).items())
    return Cell(text, text, "warn")


def answers(one: Series, what: str, length: int) -> tuple[int, int]:
    """(right, all) answers at one length, over depths and seeds."""
    if what in one.tasks:
        found = one.tasks[what].get(length, [])
    elif what == NEEDLE:
        found = [depth for cell in one.cells.get(length, []) for depth in dicts(cell.get("needle"))]
    else:
        copies = [c for cell in one.cells.get(length, []) if isinstance(c := cell.get("copy"), dict)]
        found = [{"correct": c.get("correct"), "n": c.get("tokens")} for c in copies]
    return counted(found)


def counted(found: Sequence[Found]) -> tuple[int, int]:
    known = [(c, n) for one in found if type(c := one.get("correct")) is int and type(n := one.get("n")) is int]
    return sum(c for c, _ in known), sum(n for _, n in known)


def dicts(value: object) -> list[Found]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def chance_of(one: Series, what: str) -> float | None:
    if what == NEEDLE:
        return NEEDLE_CHANCE
    known = [v for found in one.tasks.get(what, {}).values() for v in numbers(found, "chance_exact")]
    return known[0] if known else None


# ---------------------------------------------------------------- text


def text_table(arms: Sequence[Arm], all_of: Sequence[Series]) -> Table:
    """A row per arm, scaling and length."""
    rows = [_text(arms, one, length) for one in all_of for length in one.lengths if _has_text(one, length)]
    return Table("long_text", TEXT, rows)


def _has_text(one: Series, length: int) -> bool:
    return length in one.missing or bool(one.values(length, "loss") or one.values(length, "sliding_loss"))


def _text(arms: Sequence[Arm], one: Series, length: int) -> list[Cell]:
    times, factor = length / one.trained, average(one.values(length, "factor"))
    head = [*_head(arms, one), Cell(whole(length), length), Cell(f"{times:.3g}", times)]
    head.append(_figure(factor and Stat(factor.mean, None, 1), short))
    if length not in one.cells:
        why = _why({length: one.missing[length]})
        return [*head, Cell(NOT), *[MISSING] * 8, Cell("0", 0), Cell(one.missing[length], why.value, "warn")]
    cells = []
    for key in ("sliding_loss", "loss"):
        cells += [_measured(one, length, key), _anchor(one, length, key), _ratio(one, length, key)]
    documents = average(one.values(length, "_documents"))
    n = len(one.cells[length])
    return [
        *(*head, *cells, _measured(one, length, "context_gain"), _key_tokens(one, length)),
        MISSING if documents is None else Cell(whole(documents.mean), int(documents.mean)),
        *(Cell(str(n), n), MISSING),
    ]


def _measured(one: Series, length: int, key: str, more: str = "") -> Cell:
    se = average(one.values(length, f"{key}_se"))
    words = [f"SE {short(se.mean)}" if se is not None else "", more]
    remark = "; ".join(word for word in words if word)
    return _figure(average(one.values(length, key)), loss, f" ({remark})" if remark else "")


def _key_tokens(one: Series, length: int) -> Cell:
    n = average(one.values(length, "key_tokens"))
    if n is not None and not n.mean:
        return Cell("no such tokens")
    return _measured(one, length, "key_loss", f"n {whole(n.mean)}" if n is not None else "")


def _anchor(one: Series, length: int, key: str) -> Cell:
    """The figure at the trained length, beside each longer one."""
    found = average(one.base.values(one.anchor, key)) if length > one.trained else None
    return _figure(found and Stat(found.mean, None, found.n), loss)


def _ratio(one: Series, length: int, key: str) -> Cell:
    return _figure(average(one.ratios(length, key)) if length > one.trained else None, short)


def speed_table(arms: Sequence[Arm], all_of: Sequence[Series]) -> Table:
    """Bytes of the cache and tokens per second, where they were measured."""
    rows = []
    for one in all_of:
        for length, found in sorted(one.cells.items()):
            stats = {key: average(numbers(found, key)) for key in OF_SPEED}
            if any(stats.values()):
                cells = [_figure(stats[k] and Stat(stats[k].mean, None, 1), size) for k in OF_SPEED[:2]]  # type: ignore[union-attr]
                cells += [_figure(stats[key], whole) for key in OF_SPEED[2:]]
                n = len(found)
                rows.append([*_head(arms, one), Cell(whole(length), length), *cells, Cell(str(n), n)])
    return Table("long_speed", SPEED, rows)


# ---------------------------------------------------------------- in short


def short_table(arms: Sequence[Arm], all_of: Sequence[Series]) -> Table:
    """Perplexities with a column per length: `24.9 ×1.03`, the ratio to the trained length, in longer ones."""
    lengths = sorted({length for one in all_of for length in one.lengths if _has_text(one, length)})
    heads = [Column(str(length), whole(length), True, "Tokens of a window.") for length in lengths]
    trained = Column("trained_length", "trained", True, "Tokens of the rows it was trained on.")
    windows = Column("windows", "windows", False, "sliding, or apart: not overlapping.")
    columns = (ARM, SCALING, windows, trained, *heads, Column("n_documents", "documents", True), SEEDS)
    return Table("long_short", columns, list(_short_rows(arms, all_of, lengths)))


def _short_rows(arms: Sequence[Arm], all_of: Sequence[Series], lengths: Sequence[int]) -> Iterator[list[Cell]]:
    for one in all_of:
        documents = [v for length in one.cells for v in one.values(length, "_documents")]
        for words, key in (("sliding", "sliding_loss"), ("apart", "loss")):
            if any(one.values(length, key) for length in one.cells) or (
                key == "loss" and one.missing and not one.cells
            ):
                cells = [_perplexity(one, length, key) for length in lengths]
                n = Cell(whole(documents[0]), int(documents[0])) if documents else MISSING
                tail = [n, Cell(str(one.n_seeds), one.n_seeds)]
                yield [*_head(arms, one), Cell(words, words), Cell(whole(one.trained), one.trained), *cells, *tail]


def _perplexity(one: Series, length: int, key: str) -> Cell:
    if length in one.missing and length not in one.cells:
        return Cell(NOT, None, "warn")
    found = average(one.values(length, key))
    if found is None:
        return MISSING
    value = exp(found.mean)
    ratio = average(one.ratios(length, key)) if length > one.trained else None
    return Cell(short(value) + (f" ×{short(ratio.mean)}" if ratio is not None else ""), value)


def filled(table: Table) -> Table:
    """Without columns that no row fills, for readers."""
    columns = [i for i in range(len(table.columns)) if any(row[i].text != MISSING.text for row in table.rows)]
    rows = [[row[i] for i in columns] for row in table.rows]
    return Table(table.name, tuple(table.columns[i] for i in columns), rows)
