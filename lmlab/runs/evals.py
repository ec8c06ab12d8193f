"""eval/*.json of a run: one file per evaluation, never overwritten; evaluations of the test split are counted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from lmlab.runs.files import atomic_write, disk, to_json
from lmlab.runs.layout import EVAL, now
from lmlab.runs.rundir import RunDir


def record(run: RunDir, report: dict[str, Any], *, of: str | None = None) -> Path:
    """Write the report with the moment it was made; `test_evaluations` in it becomes the manifest's count.

    of: what the file is named after, instead of the split and the data."""
    folder = run.path / EVAL
    with disk(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
    stamp = now()
    of = of or f"{report['split']}-{report['data']}"
    name = f"{stamp.replace(':', '').replace('+0000', '')}-{of}.json"
    atomic_write(folder / name, to_json({"when": stamp, **report}, indent=1) + "\n")
    if "test_evaluations" in report:
        run.update_manifest(test_evaluations=report["test_evaluations"])
    return folder / name


def refuse_unwritable(run: RunDir) -> None:
    """Raises RunError where `record` could not write: before an hour is spent on what would be lost."""
    folder = run.path / EVAL
    with disk(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def newest(run: RunDir, of: str, content_hash: str | None = None) -> dict[str, Any] | None:
    """The newest report that `record` named after `of`, of the weights with this hash (None = of any), or None."""
    for path in sorted((run.path / EVAL).glob(f"*-{of}.json"), reverse=True):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content_hash in (None, report.get("content_hash")):
            return report
    return None
