"""From runs to a Report, in one function: arms, figures, differences, confounds, curves, notes, tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from lmlab.errors import EXIT_FAILED, RunError
from lmlab.report.arms import delta, make_arms
from lmlab.report.axes import canonical, typed_words
from lmlab.report.baseline import find_baseline
from lmlab.report.checked import HashOf
from lmlab.report.collect import Outside, collect, unknown
from lmlab.report.confounds import confounds, held_in_delta
from lmlab.report.copies import apart
from lmlab.report.curves import curves
from lmlab.report.labels import NOT_SAID
from lmlab.report.long_context import long_context
from lmlab.report.model import Arm, Report, Run
from lmlab.report.notes import notes
from lmlab.report.routing import routing
from lmlab.report.sources import Selection
from lmlab.report.tables import make_tables
from lmlab.report.why import why


def build(selection: Selection, outside: Outside, *, baseline: str | None = None, hash_of: HashOf = unknown) -> Report:
    """The report of a selection. hash_of: see `collect`. Raises RunError: nothing can be read, no such baseline."""
    members = {str(m.path.resolve()) for sweep in selection.sweeps for m in sweep.members if m.path is not None}
    runs, copies, counted_once = apart(collect(selection, outside, hash_of), members)
    unplaced = sorted((run for run in runs if not run.config), key=lambda run: run.name)
    axes, arms = make_arms(runs, selection.sweeps)
    if not arms:
        raise _nothing(selection, unplaced)
    chosen, by = find_baseline(arms, baseline, selection)
    selection.chosen = by in ("typed", "bundle")
    arms[chosen].is_baseline = True
    for arm in arms:
        arm.delta = None if arm.is_baseline else delta(arm, arms[chosen])
    drawn, left_out = curves(arms)
    said = [*selection.notes, *counted_once, *notes(arms, chosen, by, unplaced), *held_in_delta(arms, chosen)]
    return Report(
        title=selection.title,
        source=selection.source,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        axes=axes,
        arms=arms,
        baseline=chosen,
        tables=make_tables(axes, arms, [*copies, *unplaced]),
        confounds=confounds(arms, chosen),
        notes=[*said, *left_out],
        curves=drawn,
        common=common(axes, arms),
        why=why(arms),
        routing=routing(arms),
        long_context=long_context(arms),
    )


def _nothing(selection: Selection, unplaced: Sequence[Run]) -> RunError:
    """There is no arm: nothing was listed, or no run has a configuration, which is no fault of the command's words."""
    if not unplaced:
        return RunError(f"{selection.title} lists no runs", "name other runs; `lmlab runs ls` lists them")
    problem = next((problem for run in unplaced for problem in run.problems), "no run has a configuration")
    many = f"none of {len(unplaced)} runs can" if len(unplaced) > 1 else f"{unplaced[0].name} can't"
    error = RunError(f"{many} be read: {problem}", "`lmlab runs ls` lists runs and problems")
    error.exit_code = EXIT_FAILED
    return error


def common(axes: Sequence[str], arms: Sequence[Arm]) -> dict[str, Any]:
    """What every arm has that is not the default, as typed; without what differs and what is no part of a run."""
    words = [typed_words(run) for arm in arms for run in arm.runs if run.manifest]
    shared = words[0].items() if words else []
    differ = [axis for axis in axes if len({canonical(arm.config.get(axis)) for arm in arms}) > 1]
    return {
        key: value
        for key, value in shared
        if key not in differ and key.partition(".")[0] not in NOT_SAID and all(w.get(key) == value for w in words)
    }
