"""What the words after `lmlab report` name: runs, sweeps, folders of runs and bundles, in any mixture.

Nothing named is the newest sweep, else every run. Members of a sweep that have no directory are kept as planned or
missing. What is there and can't be used is named in a note, and is an error only when nothing is left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lmlab.errors import RunError, listed, nearest
from lmlab.report import bundle
from lmlab.report.plans import Sweep, moment, read_sweep, sweep_at, sweep_folders, sweep_named
from lmlab.report.strays import strays
from lmlab.runs import find
from lmlab.runs.layout import parse_name
from lmlab.runs.rundir import RunDir

MAKES_ONE = "`lmlab train` makes one; `lmlab runs ls` lists them"


@dataclass
class Selection:
    """What a report is made of. `states` are those of runs from a bundle, which nobody can be running any more.

    baselines: what the sweeps and bundles compare with, in the order named: (a sweep, the name of its arm), or the
    directory of a run or the label that a bundle was made with. chosen: whether somebody chose this report's.
    """

    title: str = ""
    source: str = ""
    runs: list[RunDir] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    states: dict[Path, str] = field(default_factory=dict)
    baselines: list[tuple[Sweep, str] | Path | str] = field(default_factory=list)
    chosen: bool = False
    notes: list[str] = field(default_factory=list)
    passed: list[RunError] = field(default_factory=list)  # words that name what can't be used

    def add(self, runs: Sequence[RunDir]) -> None:
        """These runs too; one that is there already, by whatever path, is not taken twice."""
        known = {run.path.resolve() for run in self.runs}
        for run in runs:
            if (place := run.path.resolve()) not in known:
                known.add(place)
                self.runs.append(run)

    def add_sweep(self, sweep: Sweep) -> None:
        if any(other.path.resolve() == sweep.path.resolve() for other in self.sweeps):
            return
        self.sweeps.append(sweep)
        self.add([RunDir(member.path) for member in sweep.members if member.path is not None])
        if sweep.baseline is not None:
            self.baselines.append((sweep, sweep.baseline))
        gone = {member.run for member in sweep.members if member.path is None}
        self.note(strays(sweep.path.absolute().parents[1], gone))

    def note(self, lines: Sequence[str]) -> None:
        self.notes += [line for line in lines if line not in self.notes]


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
        if selection.passed and not selection.runs and not selection.sweeps:
            raise selection.passed[0]
        selection.note([f"{error.message}; passed over" for error in selection.passed])
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
    if _is(path, "is_file") and path.suffix == ".zip":
        _take_bundle(path, selection, stack)
    elif (folder := sweep_at(path) or sweep_named(word, root)) is not None:
        selection.add_sweep(read_sweep(folder))
    elif _is(path, "is_dir") and not _is_in_run(path):
        _take_folder(path, selection)
    elif _is(path, "is_file") and not _is_in_run(path.parent):
        selection.passed.append(RunError(f"{path} is no run, sweep, folder or bundle", MAKES_ONE))
    elif path.suffix == ".zip":
        raise RunError(f"there is no file {path}", "`lmlab report … --bundle out.zip` writes a bundle")
    elif path.is_symlink() and not path.exists():
        selection.passed.append(RunError(f"{path} is a link to nothing", MAKES_ONE))
    else:
        selection.add([_run(word, root)])


def _is(path: Path, what: str) -> bool:
    """path.is_file() or path.is_dir(), False also where it can't be told."""
    try:
        return bool(getattr(path, what)())
    except OSError:
        return False


def _take_folder(path: Path, selection: Selection) -> None:
    """Every run in a folder; one that holds none may itself be what is left of a run."""
    itself = strays(path.absolute().parent, {path.absolute().name})
    try:
        runs, odd = find.list_runs(path, set_aside=False), strays(path)
    except RunError as error:
        itself, runs, odd = itself or [error.message], [], []
    selection.add(runs)
    if runs:
        selection.note(odd)
    else:
        said = f"{path.parent / itself[0]}" if itself else f"there are no runs in {path}{_of(odd)}"
        selection.passed.append(RunError(said, MAKES_ONE))


def _of(odd: Sequence[str]) -> str:
    return f": {listed(odd, 4)}" if odd else ""


def _run(word: str, root: Path) -> RunDir:
    try:
        return find.find(word, root)
    except RunError as error:
        if odd := strays(root, {word}):
            raise RunError(f"{root / odd[0]}", MAKES_ONE) from error
        sweeps = [path.name for path in sweep_folders(root)]
        guess = nearest(word, [*sweeps, *(parse_name(name).slug for name in sweeps)])
        if sweeps and "could be any of" not in error.message:
            more = f"did you mean the sweep {guess}?" if guess else f"sweeps there: {listed(sweeps)}"
            raise RunError(error.message.replace("no run", "no run or sweep", 1), f"{error.hint}; {more}") from error
        raise


def _is_in_run(path: Path) -> bool:
    """Whether the folder is a run, or lies inside one (a checkpoint)."""
    try:
        return any(RunDir(place).exists() for place in (path, *list(path.absolute().parents)[:2]))
    except OSError:  # a folder of somebody else
        return False


def _take_newest(root: Path, selection: Selection) -> None:
    """The newest sweep, else all runs. A plan that can't be read is named; as the newest it stands for no other."""
    plans: list[tuple[float, str, Sweep | RunError]] = []
    for folder in sweep_folders(root):
        try:
            sweep = read_sweep(folder)
            plans.append((moment(folder, sweep.used), folder.name, sweep))
        except RunError as error:
            plans.append((moment(folder), folder.name, error))
    newest = max(plans, key=lambda plan: plan[:2])[2] if plans else None
    for *_, plan in plans:
        if isinstance(plan, RunError):
            instead = "it was the newest sweep, so all runs are shown" if plan is newest else "passed over"
            selection.note([f"warning: {plan.message}; {instead}"])
    if isinstance(newest, Sweep):
        selection.add_sweep(newest)
        selection.title, selection.source = newest.name, str(newest.path)
        return
    runs, odd = find.list_runs(root, set_aside=False), strays(root)
    if not runs:
        message = f"there are no runs in {root}"
        raise RunError(message + _of(odd), "`lmlab train` makes one; elsewhere: paths.runs=FOLDER")
    selection.add(runs)
    selection.note(odd)
    selection.title, selection.source = "all runs", str(root)


# ---------------------------------------------------------------- bundles


def _take_bundle(path: Path, selection: Selection, stack: ExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmlab-report-")))
    told = bundle.unpack(path, folder)
    if told.baseline_run:
        selection.baselines.append(folder / told.baseline_run)
    elif told.baseline:
        selection.baselines.append(told.baseline)
    for name in told.sweeps:
        selection.add_sweep(read_sweep(folder / name))
    selection.add([RunDir(folder / name) for name in told.runs])
    selection.states |= {(folder / name).resolve(): state for name, state in told.states.items()}
    selection.title, selection.source = selection.title or told.title, selection.source or str(path)
    selection.note(told.notes)
