"""`lmlab runs upload`: bring runs on W&B up to what their metrics.jsonl holds. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Optional

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from lmlab.runs.rundir import RunDir

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout")]
Words = Annotated[
    Optional[list[str]],
    typer.Argument(metavar="[RUN|SWEEP …] [paths.runs=FOLDER]", help="path, name or hash; none: every mirrored run"),
]
KEY = "paths.runs="


class Wanted(NamedTuple):
    """A run to upload, and the group and tags that its sweep gives it."""

    run: RunDir
    group: str | None = None
    tags: tuple[str, ...] = ()


def upload(words: Words = None, as_json: Json = False) -> None:
    """Send runs to Weights & Biases, as group when they are a sweep's. What it has already is not sent again."""
    from dataclasses import asdict

    from lmlab.cli.progress import say
    from lmlab.errors import LmlabError, RunError, raise_all
    from lmlab.opened import runs_root
    from lmlab.runs.files import to_json
    from lmlab.runs.wandb_upload import ready
    from lmlab.runs.wandb_upload import upload as upload_run

    root = runs_root(words or [])
    if not root.is_dir():
        raise RunError(f"there is no folder {root}", "name the folder of the runs: paths.runs=FOLDER")
    runs = wanted([word for word in words or [] if not word.startswith(KEY)], root)
    if not runs:
        return _note(f"no run in {root} was mirrored to W&B: name the runs to upload")
    wandb = ready()
    done, errors = [], []
    for run, group, tags in runs:
        try:
            done.append(upload_run(run, wandb, group=group, tags=tags))
        except LmlabError as error:
            errors.append(error)
            continue
        if not as_json:
            say(_line(done[-1].run, done[-1].rows, done[-1].url))
    if as_json:
        say(to_json([asdict(one) for one in done]))
    raise_all(errors)


def _line(name: str, rows: int, url: str | None) -> str:
    what = f"{rows} row{'s' if rows != 1 else ''} sent" if rows else "nothing to send"
    return "  ".join(filter(None, (name, what, url)))


def _note(text: str) -> None:
    from lmlab.cli.progress import Screen

    Screen().note(text)


def wanted(refs: Sequence[str], root: Path) -> list[Wanted]:
    """The runs that `refs` name, each once; without refs every run that was mirrored, those set aside left out."""
    from lmlab.runs.find import find, list_runs
    from lmlab.runs.wandb_upload import was_mirrored

    if not refs:
        return [Wanted(run) for run in list_runs(root, set_aside=False) if was_mirrored(run)]
    found: dict[str, Wanted] = {}
    for ref in refs:
        folder = sweep_folder(ref, root)
        for one in members(folder) if folder else [Wanted(find(ref, root))]:
            found.setdefault(str(one.run.path.absolute()), one)
    return list(found.values())


def sweep_folder(ref: str, root: Path) -> Path | None:
    """The sweep's directory when `ref` is its path, name, slug or the start of its hash."""
    from pathlib import Path

    from lmlab.report.plans import sweep_at, sweep_named

    return sweep_at(Path(ref)) or sweep_named(ref, root)


def members(folder: Path) -> Iterator[Wanted]:
    """The runs of a sweep that exist; one renamed is found by its hash."""
    from lmlab.report.plans import read_sweep
    from lmlab.runs.rundir import RunDir

    sweep = read_sweep(folder)
    for one in sweep.members:
        if one.path is not None:
            label = sweep.arms.get(one.arm, {}).get("label", "")
            yield Wanted(RunDir(one.path), sweep.name, tuple(label.split()))
