"""The quick rows before a training, asked once per composition and code: the verdict is kept under the cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmlab.check.all_rows import IMPLIED, QUICK, asked, failed
from lmlab.check.composed import as_dict
from lmlab.check.rows import Row
from lmlab.config.identity import code_hash
from lmlab.config.tree import Experiment
from lmlab.errors import LmlabError
from lmlab.kernels.resolve import on_cpu
from lmlab.runs.files import atomic_write

FOLDER = "checks"


def quick(experiment: Experiment) -> list[Row]:
    """Oracle, causality, packed = alone, cached = full, gradients; about a second. In evaluation the oracle answers for
    parts that it knows."""
    return asked(experiment, QUICK, IMPLIED)


def verdict(experiment: Experiment, cache: Path, plugin_sources: Mapping[str, str]) -> list[Row]:
    """`quick`, or what it said before of the same parts and code. A verdict with a failed row is not kept."""
    path = cache / FOLDER / f"{key(experiment, plugin_sources)}.json"
    with suppress(OSError, ValueError, TypeError):
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    rows = quick(experiment)
    if not failed(rows):
        with suppress(OSError, LmlabError):  # a cache that can't be written is no reason not to train
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps([vars(row) for row in rows]))
    return rows


def ensure(experiment: Experiment, cache: Path, plugin_sources: Mapping[str, str]) -> list[Row]:
    """The known failures of the composition. Raises LmlabError (exit 2) when a row fails."""
    rows = verdict(experiment, cache, plugin_sources)
    if wrong := failed(rows):
        told = "; ".join(f"{row.name}: {row.figure} ({row.reason})" for row in wrong)
        raise LmlabError(f"this model fails its check, so it is not trained: {told}", "`lmlab check` shows every row")
    return [row for row in rows if row.state == "known"]


def key(experiment: Experiment, plugin_sources: Mapping[str, str]) -> str:
    """16 hex digits of the parts, of the code that computes them and of the code that asks."""
    own = {f"check/{path.name}": path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    code = code_hash({**own, **plugin_sources})
    text = json.dumps([as_dict(experiment.arch), on_cpu(experiment.kernels).name, code], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
