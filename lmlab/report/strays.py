"""What lies in a runs folder, looks like a run and is none: named, so that no run is left out without a word."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from lmlab.runs.layout import CONFIG, MANIFEST, METRICS, NOT_RUNS, parse_name
from lmlab.runs.rundir import RunDir


def strays(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """`X has no config.yaml` for each entry of `folder` (of these `names`) that looks like a run and can't be one."""
    try:
        found = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return []
    wanted = [name for name in found if name not in NOT_RUNS and (names is None or name in names)]
    return [said for name in wanted for said in _said(Path(folder) / name)]


def _said(path: Path) -> Iterator[str]:
    looks_so = bool(parse_name(path.name).hash)
    try:
        there = {entry.name for entry in os.scandir(path)}
        if RunDir(path).exists():
            return
    except FileNotFoundError:
        if path.is_symlink():
            yield f"{path.name} is a link to nothing"
        return
    except NotADirectoryError:
        if looks_so:
            yield f"{path.name} is no directory"
        return
    except OSError as error:
        yield f"{path.name} can't be read: {error.strerror}"
        return
    if CONFIG in there:
        yield from [f"{path.name} has no {MANIFEST}"] if looks_so or METRICS in there else []
    elif there & {MANIFEST, METRICS}:
        yield f"{path.name} has no {CONFIG}"
    elif looks_so:
        yield f"{path.name} has no {CONFIG}" if there else f"{path.name} is empty: it has no {CONFIG}"
