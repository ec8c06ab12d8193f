"""The two tables of a report as cells: arms, then runs. What is missing is a dash, never an average over nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmlab.report.axes import shown
from lmlab.report.facts import noncausal
from lmlab.report.model import BPB, Arm, Cell, Column, Delta, Run, Stat, Table
from lmlab.runs.noncausal import labelled

MISSING = Cell("–")
ANSWERS = "val/token_accuracy"
BEST, TEST = "best/val/bits_per_byte", "test/bits_per_byte"
BAD = ("diverged", "failed", "unreadable", "missing")
FIGURES = (
    Column("val_bits_per_byte", "val bits/byte", True, "Last checkpoint on all of val: mean ± sd over finished runs."),
    Column("val_token_accuracy", "answers right", True, "Of a task's answers in val: mean ± sd over finished runs."),
    Column("delta", "Δ baseline", True, "Of val bits/byte: below zero is better; coloured where larger than its ±."),
    Column("best_val_bits_per_byte", "best on val", True, "The checkpoint that was best on val, on all of val."),
    Column("state", "state", False, "Finished of all runs, and the others by state."),
    Column("seeds", "seeds", False, "Seeds of the finished runs."),
    Column("parameters", "parameters", True, "Numbers that are trained; active: of experts, those a token meets."),
    Column("tokens", "tokens", True, "Tokens trained on, mean over finished runs."),
    Column("test_bits_per_byte", "test bits/byte", True, "Last checkpoint on all of test."),
    Column("tokens_per_s", "tok/s", True, "Training speed, mean over finished runs."),
    Column("peak_memory_bytes", "peak memory", True, "The largest of the arm's runs."),
)
RUN_COLUMNS = (
    Column("run", "run", False, "The run's directory."),
    Column("arm", "arm", False, "What the run is, by what differs in this report."),
    Column("seed", "seed", False, "seed.all, or init/data/dropout when they differ."),
    Column("state", "state", False, "How it ended; of what did not finish, the steps done."),
    Column("val_bits_per_byte", "val bits/byte", True, "Last checkpoint on all of val."),
    Column("best_val_bits_per_byte", "best on val", True, "The checkpoint that was best on val, on all of val."),
    Column("tokens_per_s", "tok/s", True, "Training speed, the median of its intervals."),
    Column("elapsed_s", "time", True, "Seconds of training and evaluating."),
    Column("problem", "problem", False, "Why it failed; damaged or non-finite lines."),
)


def make_tables(axes: Sequence[str], arms: Sequence[Arm], unplaced: Sequence[Run]) -> list[Table]:
    """Arms, then runs; `unplaced` are runs whose configuration can't be read."""
    return [arms_table(axes, arms), runs_table(arms, unplaced)]


# ---------------------------------------------------------------- arms


def arms_table(axes: Sequence[str], arms: Sequence[Arm]) -> Table:
    """A row per arm: what it is, what it costs, how good it is. Best-on-val only where it differs."""
    named = [Column(axis, axis, _is_numeric(axis, arms), "Differs between the arms.") for axis in axes]
    named = named or [Column("arm", "arm", False, "What differs from the default.")]
    left_out = {"delta"} if len(arms) < 2 else set()
    left_out |= set() if _best_differs(arms) else {"best_val_bits_per_byte"}
    left_out |= set() if any(ANSWERS in arm.stats for arm in arms) else {"val_token_accuracy"}
    figures = [column for column in FIGURES if column.key not in left_out]
    rows = [[*_names(axes, arm), *(CELLS[column.key](arm) for column in figures)] for arm in arms]
    return Table("arms", (*named, *figures), rows)


def _is_numeric(axis: str, arms: Sequence[Arm]) -> bool:
    values = [arm.values.get(axis) for arm in arms]
    return all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in values)


def _best_differs(arms: Sequence[Arm]) -> bool:
    return any(BEST in arm.stats and BPB in arm.stats and arm.stats[BEST].mean < arm.stats[BPB].mean for arm in arms)


def _names(axes: Sequence[str], arm: Arm) -> list[Cell]:
    mark = "baseline" if arm.is_baseline else ""
    if not axes:
        return [Cell(arm.label, arm.label, mark)]
    return [_value(arm.values.get(axis), axis in arm.config or arm.values.get(axis) is not None, mark) for axis in axes]


def _value(value: Any, there: bool, mark: str) -> Cell:
    if not there:
        return Cell("–", None, mark)
    plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return Cell(shown(value), value if plain else shown(value), mark)


def _of_loss(cell: Callable[[Arm], Cell]) -> Callable[[Arm], Cell]:
    """A figure of a loss, labelled where tokens saw later ones."""

    def told(arm: Arm) -> Cell:
        return unlike(cell(arm), arm.facts.get("noncausal"))

    return told


def unlike(cell: Cell, why: str | None) -> Cell:
    """`1.2 ± 0.1 (not causal)`; a cell without a figure, and any of a causal model, as it is."""
    return cell if not why or cell.value is None else Cell(labelled(cell.text, why), cell.value, "warn")


def _stat(metric: str, form: Callable[[float], str], spread: Callable[[float], str]) -> Callable[[Arm], Cell]:
    def cell(arm: Arm) -> Cell:
        stat = arm.stats.get(metric)
        return MISSING if stat is None else Cell(with_spread(stat, form, spread), stat.mean)

    return cell


def with_spread(stat: Stat, form: Callable[[float], str], spread: Callable[[float], str]) -> str:
    """`1.6618 ± 0.0021`; without a spread the mean alone."""
    return form(stat.mean) + (f" ± {spread(stat.sd)}" if stat.sd is not None else "")


def _fact(key: str, form: Callable[[float], str]) -> Callable[[Arm], Cell]:
    def cell(arm: Arm) -> Cell:
        value = arm.facts.get(key)
        return MISSING if value is None else Cell(form(value), _whole(value))

    return cell


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def parameters_cell(arm: Arm) -> Cell:
    """`1,000`; `1,000 (250 active)` where a token meets only some of them."""
    cell, n, active = _fact("parameters", whole)(arm), arm.facts.get("parameters"), arm.facts.get("active_parameters")
    if n is None or active is None or active >= n:
        return cell
    return Cell(f"{cell.text} ({whole(active)} active)", cell.value)


def delta_cell(arm: Arm) -> Cell:
    if arm.is_baseline:
        return Cell("baseline", None, "baseline")
    return MISSING if arm.delta is None else Cell(delta_text(arm.delta, _seeds(arm)), arm.delta.mean, side(arm.delta))


def _seeds(arm: Arm) -> int:
    return arm.stats[BPB].n if BPB in arm.stats else 0


def side(delta: Delta) -> str:
    """The mark of a difference that is larger than its own spread over seeds; none of what may be noise."""
    if delta.mean is None or delta.sd is None or delta.n < 2 or abs(delta.mean) <= delta.sd:
        return ""
    return "" if not float(f"{delta.mean:.4f}") else "lower" if delta.mean < 0 else "higher"


def delta_text(delta: Delta, seeds: int = 0) -> str:
    """`−0.0123 ± 0.0030`, with `(2 of 3 seeds)` where the arm has more; or why there is none, unless the state does."""
    if delta.mean is None:
        return "–" if "finished" in delta.why else f"– ({delta.why})"
    text = signed(delta.mean) + (f" ± {delta.sd:.4f}" if delta.sd is not None else "")
    return text + (f" ({delta.n} of {seeds} seeds)" if delta.paired and delta.n < seeds else "")


def signed(value: float) -> str:
    """+0.0123, −0.0123 with a true minus; what rounds to nothing has no sign."""
    text = f"{abs(value):.4f}"
    return text if not float(text) else ("+" if value > 0 else "−") + text


def state_cell(arm: Arm) -> Cell:
    """`2/2`, `1/2 · 1 diverged`."""
    states, n = arm.states, len(arm.runs)
    done = states.get("finished", 0)
    others = [f"{count} {state}" for state, count in sorted(states.items()) if state != "finished"]
    mark = "bad" if any(state in BAD for state in states) else "warn" if others else ""
    return Cell(" · ".join([f"{done}/{n}", *others]), done, mark)


def seeds_cell(arm: Arm) -> Cell:
    seeds = [seed_text(run) for run in arm.runs if run.state == "finished"]
    text = ", ".join(seeds)
    return Cell(text, text) if seeds else MISSING


def seed_text(run: Run) -> str:
    """`3`; `3/3/5` (init/data/dropout) when they are not all the same; – when it is not known."""
    own = [run.seeds.get(name) for name in ("init", "data", "dropout")]
    if None in own:
        return "–"
    return str(own[0]) if len(set(own)) == 1 else "/".join(map(str, own))


def bits(value: float) -> str:
    return f"{value:.4f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def memory(value: float) -> str:
    """710 MiB, 1.8 GiB."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """45 s, 2 min 10 s, 3 h 05 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60:02d} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60:02d} min"


CELLS: dict[str, Callable[[Arm], Cell]] = {
    "parameters": parameters_cell,
    "tokens": _fact("tokens", whole),
    "val_bits_per_byte": _of_loss(_stat(BPB, bits, bits)),
    "val_token_accuracy": _of_loss(_stat(ANSWERS, bits, bits)),
    "delta": _of_loss(delta_cell),
    "best_val_bits_per_byte": _of_loss(_stat(BEST, bits, bits)),
    "test_bits_per_byte": _of_loss(_stat(TEST, bits, bits)),
    "tokens_per_s": _stat("tokens_per_s", whole, whole),
    "peak_memory_bytes": _fact("peak_memory_bytes", memory),
    "state": state_cell,
    "seeds": seeds_cell,
}


# ---------------------------------------------------------------- runs


def runs_table(arms: Sequence[Arm], unplaced: Sequence[Run]) -> Table:
    """A row per run, by arm and seed; then those that are in no arm."""
    rows = [_run_row(run, arm.label, arm.is_baseline) for arm in arms for run in arm.runs]
    return Table("runs", RUN_COLUMNS, rows + [_run_row(run, "–", False) for run in unplaced])


def _run_row(run: Run, label: str, is_baseline: bool) -> list[Cell]:
    problem = "; ".join([*([run.error] if run.error else []), *run.problems])
    mark = "bad" if run.state in BAD else "" if run.state == "finished" else "warn"
    return [
        Cell(run.name, run.name, "baseline" if is_baseline else ""),
        Cell(label, label),
        Cell(seed_text(run), run.seeds.get("all")),
        Cell(run.state + _progress(run), run.state, mark),
        unlike(_figure(run, BPB, bits), noncausal(run)),
        unlike(_figure(run, BEST, bits), noncausal(run)),
        _figure(run, "tokens_per_s", whole),
        _figure(run, "elapsed_s", duration),
        Cell(problem, problem, "warn") if problem else MISSING,
    ]


def _progress(run: Run) -> str:
    """` 40/120`: how far a run came that did not finish."""
    steps, total = run.rows.get("step"), (run.manifest.get("resolved") or {}).get("steps")
    if run.state == "finished" or steps is None or not len(steps):
        return ""
    return f" {steps[-1]:,.0f}/{total:,}" if isinstance(total, int) else f" {steps[-1]:,.0f}"


def _figure(run: Run, metric: str, form: Callable[[float], str]) -> Cell:
    value = run.result.get(metric)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        return MISSING
    return Cell(form(value), value)
