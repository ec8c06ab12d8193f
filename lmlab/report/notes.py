"""What a reader must know beside the tables: what ± means, what figures are of, what was left out or passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmlab.report.arms import figure, finished
from lmlab.report.axes import differing, shown
from lmlab.report.comparison import NAMES_PER_LINE, named
from lmlab.report.model import BPB, LOSS, Arm, Run

NOTES_OF_RUNS = 12
PASSED_OVER = ("damaged line", "no finite number")


def notes(arms: Sequence[Arm], baseline: int, chosen_by: str, unplaced: Sequence[Run]) -> Iterator[str]:
    """All of them. chosen_by: who chose the baseline, "" for nobody; unplaced: runs without a configuration."""
    yield from _baseline(arms, baseline, chosen_by)
    yield from _figures(arms)
    yield from _noncausal(arms)
    yield from _known_failures(arms)
    yield from _parts(arms)
    yield from _runs(arms, unplaced)


def _baseline(arms: Sequence[Arm], baseline: int, chosen_by: str) -> Iterator[str]:
    base = arms[baseline]
    if not chosen_by and len(arms) > 1:
        why = "of those that finished the nearest to the default" if finished(base.runs) else "the first arm"
        yield f"the baseline is {base.label}, {why}: nobody chose one (--baseline KEY=VALUE does)"
    if not finished(base.runs) and any(finished(arm.runs) for arm in arms):
        yield f"no Δ: the baseline {base.label} has no finished run (--baseline KEY=VALUE takes another)"


def _figures(arms: Sequence[Arm]) -> Iterator[str]:
    """What ± means, where no spread is known, which means are over fewer runs than finished."""
    if any(stat.sd is not None for arm in arms for stat in arm.stats.values()):
        yield "± is the sample standard deviation over finished runs; of Δ, over the seeds both arms have"
    apart = [arm.label for arm in arms if arm.delta and arm.delta.mean is not None and not arm.delta.paired]
    if apart:
        yield f"Δ of the means, as no seed is in both arms (± is √(sd² + sd²)): {named(apart)}"
    single = [arm.label for arm in arms if len(finished(arm.runs)) == 1]
    if single:
        yield f"one finished seed, so no spread is known: {named(single)}"
    for arm in arms:
        done = finished(arm.runs)
        n = sum(figure(run, BPB) is not None for run in done)
        if 0 < n < len(done) or (not n and any(figure(run, LOSS) is None for run in done)):
            of = f"{n} of its {len(done)} finished runs" if len(done) > 1 else "no finished run"
            yield f"val bits/byte of {arm.label} is over {of}"


def _noncausal(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        if why := arm.facts.get("noncausal"):
            said = "its losses are of tokens that see later ones, and no causal arm's compare"
            yield f"{arm.label} is not causal: {said} ({why})"


def _known_failures(arms: Sequence[Arm]) -> Iterator[str]:
    """What a part of an arm declares to be wrong with itself."""
    for arm in arms:
        known: dict[str, str] = {}
        for run in arm.runs:
            found = run.manifest.get("known_failures")
            known |= found if isinstance(found, dict) else {}
        yield from (f"{arm.label} has a known failure, {what}: {why}" for what, why in known.items())


def _parts(arms: Sequence[Arm]) -> Iterator[str]:
    """The fields that a named part stands for, where no axis shows them: `model: nano is …; tiny is …`."""
    keys = differing([arm.config for arm in arms])
    for axis in (axis for axis in arms[0].values if "." not in axis):
        hidden = [key for key in keys if key.startswith(f"{axis}.") and key not in arms[0].values]
        if not hidden or all(arm.values[axis] == arm.config.get(axis) for arm in arms):
            continue
        fields = {
            shown(arm.values[axis]): " ".join(f"{key}={shown(arm.config[key])}" for key in hidden if key in arm.config)
            for arm in arms
        }
        options = [f"{name} is {words}" for name, words in fields.items() if words]
        more = f"; … and {len(options) - NAMES_PER_LINE} more" if len(options) > NAMES_PER_LINE else ""
        yield f"{axis}: {'; '.join(options[:NAMES_PER_LINE])}{more}"


def _runs(arms: Sequence[Arm], unplaced: Sequence[Run]) -> Iterator[str]:
    troubled = [run for arm in arms for run in arm.runs if run.problems]
    lines = [f"{run.name} is left out: {'; '.join(run.problems)}" for run in unplaced]
    lines += [f"{run.name}: {_problems(run)}" for run in troubled]
    yield from lines[:NOTES_OF_RUNS]
    if len(lines) > NOTES_OF_RUNS:
        yield f"… and {len(lines) - NOTES_OF_RUNS} more runs with problems, in the table of runs"


def _problems(run: Run) -> str:
    skipped = any(words in problem for problem in run.problems for words in PASSED_OVER)
    return "; ".join(run.problems) + ("; passed over" if skipped and len(run.problems) == 1 else "")
