"""A report's runs in one file: `--bundle out.zip` here, `lmlab report out.zip` anywhere.

    bundle.json  runs/<name>/{config.yaml,manifest.json,metrics.jsonl,log.txt,eval/*.json,plugins/*.py}
    runs/sweeps/<name>/{sweep.json,ledger.jsonl}

Never checkpoints, tokenizers or W&B files. Unpacking takes these files and nothing else, and only inside its folder.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lmlab.errors import RunError
from lmlab.runs.layout import CONFIG, EVAL, LOG, MANIFEST, METRICS, PLUGINS, SWEEP_LEDGER, SWEEP_PLAN

if TYPE_CHECKING:
    from lmlab.report.model import Report
    from lmlab.report.sources import Selection

TABLE, VERSION = "bundle.json", 1
LEVEL = 1  # metrics compress well at any; higher ones take several times as long
FILES = (CONFIG, MANIFEST, METRICS, LOG)
PLANS = (SWEEP_PLAN, SWEEP_LEDGER)
FOLDERS = ((EVAL, "*.json"), (PLUGINS, "*.py"))
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, UnicodeDecodeError),
    *(OSError, EOFError, NotImplementedError, RuntimeError),
)
_TAKEN = re.compile(
    r"runs(-\d+)?/([^/]+/(config\.yaml|manifest\.json|metrics\.jsonl|log\.txt|eval/[^/]+\.json|plugins/[^/]+\.py)"
    r"|sweeps/[^/]+/(sweep\.json|ledger\.jsonl))"
)


@dataclass
class Contents:
    """bundle.json: what the report was of. Paths are those inside the bundle."""

    title: str
    runs: list[str] = field(default_factory=list)
    sweeps: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    baseline: str | None = None  # the label of its arm, where somebody chose it
    baseline_run: str | None = None  # a run of that arm: labels are others among other runs
    notes: list[str] = field(default_factory=list)
    version: int = VERSION


# ---------------------------------------------------------------- writing


def pack(target: Path, selection: Selection, report: Report) -> Path:
    """Write the bundle, beside and renamed, so that no half of one is left. Raises RunError when it can't."""
    states = {run.path: run.state for arm in report.arms for run in arm.runs}
    base = report.arms[report.baseline] if selection.chosen and report.baseline is not None else None
    contents = Contents(selection.title, baseline=base.label if base else None, notes=list(selection.notes))
    theirs = {run.path for run in base.runs} if base else set()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(
            temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL, strict_timestamps=False
        ) as archive:
            for run in selection.runs:
                name = _free(run.name, contents.runs)
                contents.runs.append(name)
                contents.states |= {name: states[run.path]} if run.path in states else {}
                contents.baseline_run = contents.baseline_run or (name if run.path in theirs else None)
                _add(archive, name, _files(run.path))
            for sweep in selection.sweeps:
                name = f"runs/sweeps/{sweep.name}"
                contents.sweeps.append(name)
                _add(archive, name, [sweep.path / file for file in PLANS if (sweep.path / file).is_file()])
            archive.writestr(TABLE, json.dumps(asdict(contents), indent=1))
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"can't write {target}: {reason}", "give another file to --bundle") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def _free(run_name: str, taken: list[str]) -> str:
    """`runs/<name>`; a second run of the same name, from another folder, lies in `runs-2/`."""
    name, number = f"runs/{run_name}", 2
    while name in taken:
        name, number = f"runs-{number}/{run_name}", number + 1
    return name


def _files(folder: Path) -> Iterator[Path]:
    yield from (folder / name for name in FILES if (folder / name).is_file())
    for name, pattern in FOLDERS:
        yield from sorted((folder / name).glob(pattern))


def _add(archive: zipfile.ZipFile, name: str, files: Iterator[Path] | list[Path]) -> None:
    for path in files:
        inner = path.name if path.parent.name not in (EVAL, PLUGINS) else f"{path.parent.name}/{path.name}"
        archive.write(path, f"{name}/{inner}")


# ---------------------------------------------------------------- reading


def unpack(path: Path, folder: Path) -> Contents:
    """Unpack into `folder`. Raises RunError: no bundle, a damaged one, one with paths that lead outside."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _refuse_escapes(path, names)
            if TABLE not in names:
                raise RunError(f"{path} is not a bundle: it has no {TABLE}", "`lmlab report … --bundle` writes one")
            contents = _contents(path, archive.read(TABLE))
            _refuse_too_large(path, archive, folder)
            for name in names:
                if _TAKEN.fullmatch(name):
                    archive.extract(name, folder)
    except DAMAGED as error:
        raise RunError(f"{path} can't be read: {error}", "it is damaged: make the bundle again") from error
    return contents


def _contents(path: Path, text: bytes) -> Contents:
    try:
        found = Contents(**json.loads(text))
        found.runs, found.sweeps, found.states = list(found.runs), list(found.sweeps), dict(found.states)
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}: {TABLE} can't be read: {error}", "it is damaged, or a newer lmlab made it") from error
    if found.version > VERSION:
        raise RunError(f"{path} has version {found.version}; this lmlab reads up to {VERSION}", "update lmlab")
    _refuse_escapes(path, [*found.runs, *found.sweeps, *found.states, str(found.baseline_run or "")])
    return found


def _refuse_escapes(path: Path, names: list[str]) -> None:
    for name in names:
        pure = PurePosixPath(name.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts or re.match(r"[A-Za-z]:", name):
            raise RunError(f"{path} holds the path {name}, which leads outside", "this is no bundle of lmlab report")


def _refuse_too_large(path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    needed, free = sum(info.file_size for info in archive.infolist()), shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(f"{path} unpacks to {needed:,} bytes, {free:,} are free in {folder.parent}", "set $TMPDIR")
