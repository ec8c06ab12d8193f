"""What lies where in a run's directory, and how its name is read.

runs/<name or slug>-<hash8>[.old-<n>]/
  .claim  config.yaml  manifest.json  metrics.jsonl  log.txt
  checkpoints/step-00000100/  tokenizer/  plugins/  eval/  wandb/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lmlab.errors import RunError
from lmlab.runs.files import sync_dir

CONFIG, MANIFEST, METRICS, LOG = "config.yaml", "manifest.json", "metrics.jsonl", "log.txt"
CHECKPOINTS, TOKENIZER, EVAL, PLUGINS = "checkpoints", "tokenizer", "eval", "plugins"
SWEEPS, REPORTS, BENCH = "sweeps", "reports", "bench"
NOT_RUNS = (SWEEPS, REPORTS, BENCH)  # folders that lie beside the runs
SWEEP_PLAN, SWEEP_LEDGER = "sweep.json", "ledger.jsonl"  # in runs/sweeps/<name>/
ASIDE = ".old-"  # a checkpoint of the same step that was being replaced when its writer was killed
_STEP = re.compile(rf"^({re.escape(ASIDE)})?step-(\d{{8,}})$")
_NAME = re.compile(r"^(?P<slug>.*?)-?(?P<hash>[0-9a-f]{8})(?:\.old-(?P<old>\d+))?$")


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint by its place, unread."""

    step: int
    path: Path


@dataclass(frozen=True)
class Name:
    """A directory's name taken apart; hash is "" for a renamed directory, old is None unless it was set aside."""

    slug: str
    hash: str
    old: int | None


def parse_name(name: str) -> Name:
    match = _NAME.match(name)
    if match is None:
        slug, mark, number = name.partition(".old-")
        return Name(slug, "", int(number) if mark and number.isdecimal() else None)
    return Name(match["slug"], match["hash"], int(match["old"]) if match["old"] else None)


def now() -> str:
    """This moment, UTC, sortable as text."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def checkpoint_path(run_path: Path, step: int) -> Path:
    return Path(run_path) / CHECKPOINTS / f"step-{step:08d}"


def list_checkpoints(run_path: Path) -> list[CheckpointRef]:
    """By step, unread and unverified; half-written ones have other names and are not seen.

    Changes nothing: one that was moved aside and not replaced is found where it lies.
    """
    folder = Path(run_path) / CHECKPOINTS
    try:
        names = set(os.listdir(folder))
    except OSError:
        return []
    here = {name: m for name in names if (m := _STEP.match(name)) and not (m[1] and name.removeprefix(ASIDE) in names)}
    return sorted((CheckpointRef(int(m[2]), folder / name) for name, m in here.items()), key=lambda ref: ref.step)


def rename_to_free(path: Path) -> Path:
    """Rename to `<path>.old-<n>`, n the first free number.

    Two processes never get one number: a rename does not replace a directory that holds files.
    """
    number = 1
    while True:
        target = path.with_name(f"{path.name}.old-{number}")
        try:
            if not target.exists():
                os.rename(path, target)
                sync_dir(path.parent)
                return target
        except OSError as error:
            if not target.exists():
                problem = f"could not rename {path} to {target.name}: {error.strerror}"
                raise RunError(problem, "see who owns the folder") from error
        number += 1
