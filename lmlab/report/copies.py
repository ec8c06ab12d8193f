"""One run counts once: copies of it, and older results of the same configuration, seeds, code and data, are set apart.

They stay in the table of runs, in no arm, and a note says which run stands for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lmlab.report.axes import canonical
from lmlab.report.model import Run
from lmlab.runs.layout import parse_name


def apart(runs: Sequence[Run], first: Collection[str] = ()) -> tuple[list[Run], list[Run], list[str]]:
    """(the runs that count, those set apart, notes). Of copies the one that a sweep lists (whose resolved path is in
    `first`) goes before others, and those set aside come last."""
    kept: dict[str, Run] = {}
    gone: dict[int, str] = {}
    ranked = sorted(runs, key=lambda run: (parse_name(run.name).old is not None, _path(run) not in first))
    for run in ranked:
        if run.state != "finished" or not run.config:
            continue
        other = kept.setdefault(_result(run), run)
        if other is not run:
            same = run.name == other.name
            gone[id(run)] = f"{'another directory' if same else run.name} is a copy of {other.name}: counted once"
    for run, newest in _superseded([run for run in ranked if id(run) not in gone]):
        which = "another directory of that name" if run.name == newest.name else newest.name
        gone[id(run)] = f"{run.name} is an older result of what {which} is: the figures are those of the latter"
    for run in runs:
        if id(run) in gone:
            run.problems.append(gone[id(run)])
    left = [run for run in runs if id(run) in gone]
    return [run for run in runs if id(run) not in gone], left, [gone[id(run)] for run in left]


def _superseded(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """(a run, the one that ended last of those of the same configuration, seeds, code and data)."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if run.state == "finished" and run.config:
            alike.setdefault(_asked(run), []).append(run)
    newest = {key: max(group, key=_ended) for key, group in alike.items()}
    return [(run, newest[key]) for key, group in alike.items() for run in group if run is not newest[key]]


def _asked(run: Run) -> str:
    made_by = [run.manifest.get(key) for key in ("code_hash", "fingerprint")]
    return canonical([run.config, run.seeds, made_by, run.plugins])


def _result(run: Run) -> str:
    """What tells a copy: the weights' hash, else every figure."""
    return canonical([_asked(run), run.result.get("content_hash") or run.result])


def _ended(run: Run) -> tuple[str, str]:
    return str(run.manifest.get("ended") or ""), str(run.manifest.get("started") or "")


def _path(run: Run) -> str:
    return str(run.path.resolve()) if run.path is not None else ""
