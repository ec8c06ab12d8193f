"""From runs to a Report, in one function: arms, figures, differences, confounds, curves, notes, tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from lmlab.errors import RunError
from lmlab.report.arms import NOT_SAID, delta, find_baseline, finished, make_arms
from lmlab.report.axes import typed_words
from lmlab.report.collect import Outside, collect
from lmlab.report.confounds import NAMES_PER_LINE, confounds
from lmlab.report.curves import curves
from lmlab.report.model import Arm, Report, Run
from lmlab.report.sources import Selection
from lmlab.report.tables import make_tables

NOTES_OF_RUNS = 12


def build(selection: Selection, outside: Outside, *, baseline: str | None = None) -> Report:
    """The report of a selection. Raises RunError: nothing can be read, no such baseline."""
    runs = collect(selection, outside)
    unplaced = sorted((run for run in runs if not run.config), key=lambda run: run.name)
    axes, arms = make_arms(runs, selection.sweeps)
    if not runs:
        raise RunError(f"{selection.title} lists no runs", "name other runs; `lmlab runs ls` lists them")
    if not arms:
        problem = next((problem for run in unplaced for problem in run.problems), "no run has a configuration")
        raise RunError(f"none of {len(runs)} runs can be read: {problem}", "`lmlab runs ls` lists runs and problems")
    chosen = find_baseline(arms, baseline or selection.baseline, selection.sweeps)
    arms[chosen].is_baseline = True
    for arm in arms:
        arm.delta = None if arm.is_baseline else delta(arm, arms[chosen])
    drawn, left_out = curves(arms)
    return Report(
        title=selection.title,
        source=selection.source,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        axes=axes,
        arms=arms,
        baseline=chosen,
        tables=make_tables(axes, arms, unplaced),
        confounds=confounds(arms, chosen),
        notes=[*selection.notes, *_notes(arms, unplaced), *left_out],
        curves=drawn,
        common=common(axes, arms),
    )


def common(axes: Sequence[str], arms: Sequence[Arm]) -> dict[str, Any]:
    """What every arm has that is not the default, as typed; without what differs and what is no part of a run."""
    words = [typed_words(run) for arm in arms for run in arm.runs if run.manifest]
    shared = words[0].items() if words else []
    return {
        key: value
        for key, value in shared
        if key not in axes and key.partition(".")[0] not in NOT_SAID and all(w.get(key) == value for w in words)
    }


def _notes(arms: Sequence[Arm], unplaced: Sequence[Run]) -> Iterator[str]:
    """What ± means, where no spread is known, what was left out or passed over."""
    if any(stat.sd is not None for arm in arms for stat in arm.stats.values()):
        yield "± is the sample standard deviation over finished runs; of Δ, over the seeds both arms have"
    if any(arm.delta and arm.delta.mean is not None and not arm.delta.paired for arm in arms):
        labels = [arm.label for arm in arms if arm.delta and arm.delta.mean is not None and not arm.delta.paired]
        yield f"Δ of the means, as no seed is in both arms (± is √(sd² + sd²)): {_listed(labels)}"
    single = [arm.label for arm in arms if len(finished(arm.runs)) == 1]
    if single:
        yield f"one finished seed, so no spread is known: {_listed(single)}"
    troubled = [run for arm in arms for run in arm.runs if run.problems]
    lines = [f"{run.name} is left out: {'; '.join(run.problems)}" for run in unplaced]
    lines += [f"{run.name}: {'; '.join(run.problems)}; passed over" for run in troubled]
    yield from lines[:NOTES_OF_RUNS]
    if len(lines) > NOTES_OF_RUNS:
        yield f"… and {len(lines) - NOTES_OF_RUNS} more runs with problems, in the table of runs"


def _listed(labels: Sequence[str]) -> str:
    more = len(labels) - NAMES_PER_LINE
    return ", ".join(labels[:NAMES_PER_LINE]) + (f", … and {more} more" if more > 0 else "")
