"""One line about each run, read from the small files and the end of metrics.jsonl only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.runs import metrics
from lmlab.runs.find import list_runs
from lmlab.runs.noncausal import recorded
from lmlab.runs.rundir import RunDir

BPB, LOSS, RATE = "val/bits_per_byte", "val/loss", "train/tokens_per_s"


@dataclass
class RunSummary:
    """What `lmlab runs ls` and `lmlab.results` say of a run. `problem` is set when one of its files can't be read."""

    name: str
    hash: str
    path: str
    state: str
    set_aside: bool
    stale: bool | None = None
    changes: list[str] = field(default_factory=list)
    step: int | None = None
    steps: int | None = None
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    noncausal: str | None = None  # why tokens see later ones, so that its losses compare with no causal run's
    tokens_per_s: float | None = None
    started: str | None = None
    ended: str | None = None
    code_hash: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: RunDir) -> RunSummary:
    """Reads the manifest; of the metrics only the end, and only what the manifest's result does not say."""
    line = RunSummary(run.name, run.hash, str(run.path), "unreadable", run.is_set_aside)
    try:
        manifest = run.manifest()
        line.state = run.state()
    except RunError as error:
        line.problem = error.message
        manifest = {}
    changes = manifest.get("changes")
    line.changes = [str(change) for change in changes] if isinstance(changes, list) else []
    line.result = _dict(manifest.get("result"))
    line.steps = _dict(manifest.get("resolved")).get("steps")
    line.started, line.ended = manifest.get("started"), manifest.get("ended")
    line.noncausal = recorded(manifest)
    line.code_hash = manifest.get("code_hash")
    known = {key.replace("train/", ""): value for key, value in line.result.items()}
    if not {"step", LOSS, "tokens_per_s"} <= known.keys() or line.state in ("running", "interrupted"):
        known |= last_values(run.metrics_path, ("step", LOSS, BPB, RATE))
    line.step, line.val_loss, line.val_bits_per_byte = known.get("step"), known.get(LOSS), known.get(BPB)
    line.tokens_per_s = known.get("tokens_per_s")
    return line


def last_values(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """The last value of each key within the end of the file, under its name without `train/`."""
    try:
        rows = metrics.tail(path)
    except OSError:
        return {}
    found = {key: next((row[key] for row in reversed(rows) if row.get(key) is not None), None) for key in keys}
    return {key.replace("train/", ""): value for key, value in found.items() if value is not None}


def summaries(root: Path) -> Iterator[RunSummary]:
    """Every run in `root`, those set aside included, newest first."""
    lines = [summarise(run) for run in list_runs(root)]
    yield from sorted(lines, key=lambda line: (line.started or "", line.name), reverse=True)


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"norm": {"name": "rmsnorm", "eps": 1e-6}} → {"norm": "rmsnorm", "norm.eps": 1e-6}; keys as users type them."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        dotted = f"{prefix}{key}"
        if isinstance(item, dict):
            if "name" in item and not prefix:
                flat[dotted] = item["name"]
                item = {k: v for k, v in item.items() if k != "name"}
            flat |= flatten(item, f"{dotted}.")
        else:
            flat[dotted] = item
    return flat


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (value in a, value in b)} for the keys of two flat dicts whose values differ; absent is None."""
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
