"""A run's files against each other: config.yaml against the hash in the name, the manifest's figures against the last
row of metrics.jsonl, which is the truth. What does not fit is a problem of the run; the figures shown are the rows'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lmlab.report.model import BPB, LOSS, Run
from lmlab.runs.layout import MANIFEST, METRICS, parse_name
from lmlab.runs.routing_names import parse
from lmlab.runs.rundir import RunDir

HashOf = Callable[[dict[str, Any]], str | None]
SAME = 1e-9
RATE, SPEED = "train/tokens_per_s", "tokens_per_s"
WHOLE = ("step", "tokens")
FINAL = ("val/", "test/", "best/")


def check_config(found: Run, config: dict[str, Any], hash_of: HashOf) -> None:
    """Whether config.yaml is still that of the directory's name, where its hash can be told."""
    named = parse_name(found.name).hash
    own = hash_of(config) if named else None
    if own is not None and own != named:
        found.edited = True
        found.problems.append(f"config.yaml was edited: its hash is {own}, the directory's {named}")


def check_manifest(run: RunDir, found: Run) -> None:
    """A run that has metrics and no manifest, while nobody is at it, has lost it."""
    if found.manifest or any(MANIFEST in problem for problem in found.problems):
        return
    if found.state in ("created", "unreadable") and run.metrics_path.is_file():
        found.state = "unreadable"
        there = (run.path / MANIFEST).is_file()
        found.problems.append(f"{MANIFEST} is {'empty' if there else 'missing'}")


def check_figures(run: RunDir, found: Run) -> None:
    """The figures of a finished run, corrected and completed from the last row of its metrics."""
    if found.state != "finished":
        return
    row = {key: float(column[-1]) for key, column in found.rows.items() if len(column) and np.isfinite(column[-1])}
    if SPEED not in found.result or number(found.result[SPEED]) is None:
        found.result |= _speed(found)
    said = number(found.result.get("step"))
    if "step" not in row:
        unread = any(METRICS in problem for problem in found.problems)
        why = "" if unread else f"{METRICS} {'holds no rows' if run.metrics_path.is_file() else 'is missing'}: "
        found.problems.append(f"{why}the figures are the manifest's")
    elif said is not None and row["step"] < said:
        ends = f"{METRICS} ends at step {row['step']:,.0f} of {said:,.0f}"
        found.problems.append(f"{ends}: the figures are the manifest's")
    else:
        found.problems += list(_taken(found.result, row))
    if (what := _missing(found)) is not None:
        found.problems.append(f"no {what} in {MANIFEST} and none in the last row of {METRICS}")


def _taken(result: dict[str, Any], row: dict[str, float]) -> Iterator[str]:
    """Put the row's figures in place of the result's; each that was another one is named with both values."""
    for key, value in row.items():
        if (key not in WHOLE and not key.startswith(FINAL)) or parse(key) is not None:
            continue
        said = number(result.get(key))
        if said is None or said != value:
            result[key] = int(value) if key in WHOLE else value
        if said is not None and abs(said - value) > SAME * max(abs(said), abs(value)):
            form = "{:,.0f}" if key in WHOLE else "{!r}"
            yield f"{key} is {form.format(said)} in {MANIFEST} and {form.format(value)} in {METRICS}, which counts"
    lost = [key for key in (BPB, LOSS) if key not in row and number(result.get(key)) is not None]
    if lost:
        yield f"no {lost[0]} in the last row of {METRICS}: the figure is the manifest's"


def _missing(found: Run) -> str | None:
    """The figure of val that neither file has. Of a tokenizer that loses bytes there are no bits per byte."""
    if number(found.result.get(BPB)) is not None:
        return None
    tokenizer = (found.manifest.get("data") or {}).get("tokenizer") or {}
    lossy = tokenizer.get("lossless") is False
    return BPB if not lossy else LOSS if number(found.result.get(LOSS)) is None else None


def _speed(found: Run) -> dict[str, float]:
    """The median of the intervals, as a run writes it at its end."""
    rates = found.rows.get(RATE, np.array([]))
    rates = np.sort(rates[np.isfinite(rates) & (rates > 0)])
    return {SPEED: float(rates[len(rates) // 2])} if len(rates) else {}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
