"""Finding runs: by path, directory, name, or the first characters of the hash."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lmlab.errors import RunError, listed, nearest
from lmlab.runs.layout import CHECKPOINTS, CONFIG, NOT_RUNS, CheckpointRef, list_checkpoints
from lmlab.runs.rundir import RunDir

DONE = ("finished", "imported")  # states of runs that have all the weights they will ever have
_HEX = re.compile(r"^[0-9a-f]{4,8}$")


@dataclass(frozen=True)
class Found:
    """A run, and the checkpoint when the reference named one."""

    run: RunDir
    checkpoint: CheckpointRef | None = None


def list_runs(root: Path, *, set_aside: bool = True) -> list[RunDir]:
    """Every run directory in `root`, by name. An absent root holds none; entries that can't be read are passed over."""
    try:
        entries = [e.name for e in os.scandir(root) if e.name not in NOT_RUNS and _is_dir(e)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"can't list the runs in {root}: {error.strerror}", "give another folder: paths.runs=FOLDER"
        ) from error
    runs = [RunDir(Path(root) / name) for name in sorted(entries)]
    return [run for run in runs if (set_aside or not run.is_set_aside) and _exists(run)]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _exists(run: RunDir) -> bool:
    try:
        return run.exists()
    except OSError:  # a folder of somebody else
        return False


def run_directory(root: Path, hash8: str, name: str) -> Path:
    """Where the run of a configuration lies: the directory that carries its hash, whatever its name; else a new one."""
    known = sorted(p for p in root.glob(f"*-{hash8}") if (p / CONFIG).is_file()) if root.is_dir() else []
    return known[0] if known else root / f"{name}-{hash8}"


def find(ref: str | Path | None, root: Path) -> RunDir:
    """The run that `ref` names (see `resolve`)."""
    return resolve(ref, root).run


def resolve(ref: str | Path | None, root: Path) -> Found:
    """A path (the run, anything inside it, one of its checkpoints, a folder that holds one run), a directory's name, a
    run's name or slug, 4 to 8 characters of its hash; None is the newest finished or imported run in
    `root`.

    Raises RunError: nothing found (with the nearest names), or several (with all of them).
    """
    root = Path(root)
    if ref is None:
        return Found(newest(root, DONE))
    text = str(ref)
    if text and (found := _by_path(Path(text), root)) is not None:
        return found
    runs = list_runs(root)
    current = [run for run in runs if not run.is_set_aside]
    for matches in (
        [run for run in runs if run.name == text],
        [run for run in current if text and (run.slug == text or _own_name(run) == text)],
        [run for run in current if _HEX.match(text) and run.hash.startswith(text)],
    ):
        if len(matches) == 1:
            return Found(matches[0])
        if matches:
            raise _ambiguous(text, matches)
    raise _missing(text, root, runs)


def newest(root: Path, states: Iterable[str]) -> RunDir:
    """The run in `root`, not set aside, in one of `states`, that ended (or began) last. Raises RunError for none."""
    wanted, found = set(states), []
    for run in list_runs(root, set_aside=False):
        try:
            manifest, state = run.manifest(), run.state()
        except RunError:
            continue
        if state in wanted:
            found.append((str(manifest.get("ended") or manifest.get("started") or ""), run.name, run))
    if not found:
        kinds = " or ".join(sorted(wanted))
        raise RunError(f"there is no {kinds} run in {root}", "name a run; `lmlab runs ls` lists them with their states")
    return max(found, key=lambda item: item[:2])[-1]


def _by_path(path: Path, root: Path) -> Found | None:
    """The run at or around an existing path, or None when `path` is no such thing."""
    path = path if path.exists() else root / path
    if not path.exists() or path == root:
        return None
    run = next((RunDir(p) for p in (path, *list(path.absolute().parents)[:3]) if _exists(RunDir(p))), None)
    if run is None:
        inside = list_runs(path, set_aside=False) if path.is_dir() else []
        if len(inside) > 1:
            raise _ambiguous(str(path), inside)
        return Found(inside[0]) if inside else None
    parts = path.absolute().relative_to(run.path.absolute()).parts
    if len(parts) >= 2 and parts[0] == CHECKPOINTS:
        checkpoint = next((c for c in list_checkpoints(run.path) if c.path.name == parts[1]), None)
        return Found(run, checkpoint)
    return Found(run)


def _own_name(run: RunDir) -> str | None:
    """`name=` of the run, wherever its directory was moved to."""
    try:
        return run.config().get("name") if not run.hash else None
    except RunError:
        return None


def _ambiguous(text: str, runs: list[RunDir]) -> RunError:
    return RunError(
        f"{text} could be any of {listed(run.name for run in runs)}", "give the whole name, or more of its hash"
    )


def _missing(text: str, root: Path, runs: list[RunDir]) -> RunError:
    names = [run.name for run in runs if not run.is_set_aside]
    if not names:
        return RunError(
            f"no run {text}: there are no runs in {root}", "`lmlab train` makes one; elsewhere: paths.runs=FOLDER"
        )
    begins = [name for name in names if text and name.startswith(text)]
    if len(begins) != 1 and re.fullmatch(r"[0-9a-f]{1,3}", text):
        return RunError(f"no run {text} in {root}", "of a hash, give at least 4 characters")
    by_slug = {run.slug: run.name for run in runs if not run.is_set_aside}
    guess = begins[0] if len(begins) == 1 else nearest(text, names) or by_slug.get(nearest(text, by_slug) or "")
    hint = f"did you mean {guess}?" if guess else f"the runs there: {listed(names)}"
    return RunError(f"no run {text} in {root}", hint)
