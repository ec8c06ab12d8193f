"""What the words after `lmlab report` name: runs, sweeps, folders of runs and bundles, in any mixture.

Nothing named is the newest sweep, else every run. A sweep only lists runs: they are looked up in the runs folder, and a
member that nobody began is kept as planned.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmlab.errors import RunError, listed, nearest
from lmlab.report import bundle
from lmlab.runs import find
from lmlab.runs.layout import parse_name
from lmlab.runs.rundir import RunDir

SWEEPS, PLAN, LEDGER = "sweeps", "sweep.json", "ledger.jsonl"
_HEX = re.compile(r"^[0-9a-f]{4,8}$")


@dataclass
class Member:
    """A run that a sweep lists; `path` is its directory, None when nobody began it."""

    run: str
    hash: str
    arm: str
    seed: int | None
    overrides: list[str]
    path: Path | None = None


@dataclass
class Sweep:
    """A sweep's plan as its sweep.json tells it. arms: {id: {"config": {…}}} in the sweep's order."""

    path: Path
    name: str
    used: str  # when it was last started
    baseline: str | None
    arms: dict[str, dict[str, Any]]
    members: list[Member]


@dataclass
class Selection:
    """What a report is made of. `states` are those of runs from a bundle, which nobody can be running any more."""

    title: str = ""
    source: str = ""
    runs: list[RunDir] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    states: dict[Path, str] = field(default_factory=dict)
    baseline: str | None = None  # what a bundle was made with
    notes: list[str] = field(default_factory=list)

    def add(self, runs: Sequence[RunDir]) -> None:
        """These runs too; one that is there already is not taken twice."""
        known = {run.path.resolve() for run in self.runs}
        self.runs += [run for run in runs if run.path.resolve() not in known]

    def add_sweep(self, sweep: Sweep) -> None:
        if all(other.path.resolve() != sweep.path.resolve() for other in self.sweeps):
            self.sweeps.append(sweep)
            self.add([RunDir(member.path) for member in sweep.members if member.path is not None])


@contextmanager
def opened(words: Sequence[str], root: Path) -> Iterator[Selection]:
    """The selection that `words` name; a bundle is unpacked for as long as the block lasts.

    Raises RunError: no such run or sweep, a folder without runs, a file that is no bundle.
    """
    with ExitStack() as stack:
        selection = Selection()
        for word in words:
            _take(word, root, selection, stack)
        if not words:
            _take_newest(root, selection)
        selection.title = selection.title or _title(words, selection)
        selection.source = selection.source or " ".join(words)
        yield selection


def _title(words: Sequence[str], selection: Selection) -> str:
    """A short name for what was named: it also names the folder of the report."""
    names = [sweep.name for sweep in selection.sweeps] if len(selection.sweeps) == len(words) else []
    names = names or [Path(word).resolve().name if Path(word).exists() else word for word in words]
    if len(words) == 1 and not selection.sweeps and len(selection.runs) == 1:
        return selection.runs[0].name
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ---------------------------------------------------------------- one word


def _take(word: str, root: Path, selection: Selection, stack: ExitStack) -> None:
    path = Path(word).expanduser()
    if path.is_file() and path.suffix == ".zip":
        _take_bundle(path, selection, stack)
    elif (sweep := _sweep_at(path) or _sweep_named(word, root)) is not None:
        selection.add_sweep(sweep)
    elif path.is_dir() and not _is_in_run(path):
        runs = find.list_runs(path, set_aside=False)
        if not runs:
            raise RunError(f"there are no runs in {path}", "`lmlab train` makes one; `lmlab runs ls` lists them")
        selection.add(runs)
    elif path.suffix == ".zip":
        raise RunError(f"there is no file {path}", "`lmlab report … --bundle out.zip` writes a bundle")
    else:
        selection.add([_run(word, root)])


def _run(word: str, root: Path) -> RunDir:
    try:
        return find.find(word, root)
    except RunError as error:
        sweeps = [path.name for path in _sweep_folders(root)]
        guess = nearest(word, [*sweeps, *(parse_name(name).slug for name in sweeps)])
        if sweeps and "could be any of" not in error.message:
            more = f"did you mean the sweep {guess}?" if guess else f"sweeps there: {listed(sweeps)}"
            raise RunError(error.message.replace("no run", "no run or sweep", 1), f"{error.hint}; {more}") from error
        raise


def _is_in_run(path: Path) -> bool:
    """Whether the folder is a run, or lies inside one (a checkpoint)."""
    return any(RunDir(place).exists() for place in (path, *list(path.absolute().parents)[:2]))


def _take_newest(root: Path, selection: Selection) -> None:
    plans = []
    for folder in _sweep_folders(root):
        try:
            plans.append(read_sweep(folder))
        except RunError as error:
            selection.notes.append(f"{error.message}; passed over")
    if plans:
        newest = max(plans, key=lambda sweep: (_moment(sweep), sweep.name))
        selection.add_sweep(newest)
        selection.title, selection.source = newest.name, str(newest.path)
        return
    runs = find.list_runs(root, set_aside=False)
    if not runs:
        raise RunError(f"there are no runs in {root}", "`lmlab train` makes one; elsewhere: paths.runs=FOLDER")
    selection.add(runs)
    selection.title, selection.source = "all runs", str(root)


def _moment(sweep: Sweep) -> float:
    """When the sweep was last started: by its plan, else by the file."""
    try:
        made = datetime.fromisoformat(sweep.used)
        return (made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        return (sweep.path / PLAN).stat().st_mtime


# ---------------------------------------------------------------- sweeps


def _sweep_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in Path(root).glob(f"{SWEEPS}/*/{PLAN}"))


def _sweep_at(path: Path) -> Sweep | None:
    folder = path.parent if path.name == PLAN else path
    return read_sweep(folder) if (folder / PLAN).is_file() else None


def _sweep_named(word: str, root: Path) -> Sweep | None:
    """By its directory's name, its slug, or 4 and more characters of its hash. Raises RunError for several."""
    folders = _sweep_folders(root)
    for fits in (
        [f for f in folders if f.name == word],
        [f for f in folders if parse_name(f.name).slug == word],
        [f for f in folders if _HEX.match(word) and parse_name(f.name).hash.startswith(word)],
    ):
        if fits:
            runs = [run for run in find.list_runs(root, set_aside=False) if word in (run.name, run.slug)]
            names = [f"sweep {f.name}" for f in fits] + [f"run {run.name}" for run in runs]
            if len(names) > 1:
                raise RunError(f"{word} could be any of {listed(names)}", "give the whole name, or its path")
            return read_sweep(fits[0])
    return None


def read_sweep(folder: Path) -> Sweep:
    """The plan in `folder`, its members looked up in the runs folder beside. Raises RunError for a damaged plan."""
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        arms = {str(name): {"config": dict(arm["config"])} for name, arm in plan["arms"].items()}
        members = [_member(entry) for entry in plan["members"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise RunError(f"{path} can't be read: {reason}", "the same `lmlab sweep` command writes it anew") from error
    _look_up(members, folder.absolute().parents[1])
    used = str(plan.get("used") or plan.get("created") or "")
    return Sweep(folder, folder.absolute().name, used, plan.get("baseline"), arms, members)


def _member(entry: dict[str, Any]) -> Member:
    seed = entry["seed"] if type(entry.get("seed")) is int else None
    words = [str(word) for word in entry.get("overrides") or []]
    return Member(str(entry["run"]), str(entry.get("hash") or ""), str(entry["arm"]), seed, words)


def _look_up(members: Sequence[Member], root: Path) -> None:
    """Where each member lies: by its directory's name, else by its hash. Runs set aside are nobody's members."""
    there = find.list_runs(root, set_aside=False)
    by_name = {run.name: run.path for run in there}
    by_hash = {run.hash: run.path for run in there if run.hash}
    for member in members:
        member.path = by_name.get(member.run) or by_hash.get(member.hash)


# ---------------------------------------------------------------- bundles


def _take_bundle(path: Path, selection: Selection, stack: ExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmlab-report-")))
    told = bundle.unpack(path, folder)
    for name in told.sweeps:
        selection.add_sweep(read_sweep(folder / name))
    selection.add([RunDir(folder / name) for name in told.runs])
    selection.states |= {(folder / name).resolve(): state for name, state in told.states.items()}
    selection.title, selection.source = selection.title or told.title, selection.source or str(path)
    selection.baseline = selection.baseline or told.baseline
    selection.notes += told.notes
