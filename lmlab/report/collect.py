"""From run directories to `Run`: configuration, manifest, state, and metrics.jsonl as float columns.

Torch-free and fast: many lines of metrics are read as one JSON array, and one by one only where something is wrong.
What is wrong is named and counted in `Run.problems`; nothing stops the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lmlab.errors import RunError
from lmlab.report.checked import HashOf, check_config, check_figures, check_manifest
from lmlab.report.long_read import read_long
from lmlab.report.model import Run
from lmlab.report.plans import Member, Sweep
from lmlab.report.sources import Selection
from lmlab.runs.layout import CHECKPOINTS, MANIFEST
from lmlab.runs.metrics import Row, Scan, damage
from lmlab.runs.routing_names import LOAD, parse
from lmlab.runs.rundir import RunDir
from lmlab.runs.summary import flatten

SECTIONS = (
    *("resolved", "resolved.kernels", "kernels", "versions", "torch", "cpu", "git", "choices", "result"),
    *("data", "data.tokenizer", "data.splits", "data.splits.val"),
)
SEEDS = ("init", "data", "dropout")
NAN = float("nan")
BLOCK_BYTES = 1 << 18
LISTED = 8  # line numbers named in one problem
Outside = Callable[[str], bool]


def unknown(config: dict[str, Any]) -> str | None:
    """The hash of a configuration where nobody can tell it."""
    return None


def collect(selection: Selection, outside: Outside, hash_of: HashOf = unknown) -> list[Run]:
    """Every run of the selection, then what its sweeps planned and has no directory.

    outside(key): whether a flat key of a configuration is no part of a run's identity; hash_of(config): the hash of a
    configuration as config.yaml holds it, None where it can't be told.
    """
    runs = [read_run(run, outside, selection.states.get(run.path.resolve()), hash_of) for run in selection.runs]
    by_path = {run.path.resolve(): run for run in runs if run.path is not None}
    for sweep in selection.sweeps:
        began = {m.arm: by_path[m.path.resolve()] for m in sweep.members if m.path and m.path.resolve() in by_path}
        runs += [_planned(m, sweep, began.get(m.arm), outside) for m in sweep.members if m.path is None]
    return runs


def read_run(run: RunDir, outside: Outside, state: str | None = None, hash_of: HashOf = unknown) -> Run:
    """One run directory. `state`: what a bundle says of it, in place of asking who holds the directory."""
    found = Run(run.name, run.path, "unreadable", {}, dict.fromkeys(("all", *SEEDS)))
    try:
        config = run.config()
        found.config, found.seeds = split_config(config, outside)
        check_config(found, config, hash_of)
    except RunError as error:
        found.problems.append(_inside(run, error))
    try:
        found.manifest, wrong = whole_sections(run.manifest())
        found.problems += [f"{MANIFEST}: no object in {', '.join(wrong)}"] if wrong else []
        found.state = state or run.state()
    except RunError as error:
        found.problems.append(_inside(run, error))
    check_manifest(run, found)
    found.result = found.manifest.get("result") or {}
    found.error = _first_line(found.manifest.get("error"))
    found.plugins = {path.name: hashlib.blake2b(_bytes(path), digest_size=8).hexdigest() for path in run.plugins()}
    found.rows, found.lists, problems = read_columns(run.metrics_path)
    found.problems += problems
    check_figures(run, found)
    read_long(run.path, found)
    return found


def whole_sections(manifest: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the manifest without sections that are no objects, their keys): whoever edited the file, a report goes on."""
    wrong = []
    for key in SECTIONS:
        *path, last = key.split(".")
        holder: Any = manifest
        for name in path:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and not isinstance(holder.get(last) or {}, dict):
            wrong.append(key)
            del holder[last]
    return manifest, wrong


def _inside(run: RunDir, error: RunError) -> str:
    """The message with paths as they are inside the run: the same wherever it lies."""
    return error.message.replace(f"{run.path}/", "")


def _planned(member: Member, sweep: Sweep, began: Run | None, outside: Outside) -> Run:
    """A member without a directory: nobody began it, or it is gone. Its composition is that of the arm's other runs,
    else what the plan says."""
    plan = sweep.arms.get(member.arm, {}).get("config") or {}
    config, seeds = split_config(plan, outside)
    if member.seed is not None:
        seeds = dict.fromkeys(seeds, member.seed)
    config = began.config if began is not None else config
    found = Run(member.run, None, "planned", config, seeds, {"overrides": member.overrides})
    if member.began:
        found.state, found.problems = "missing", ["it was begun, and there is no such run any more"]
    return found


def split_config(config: dict[str, Any], outside: Outside) -> tuple[dict[str, Any], dict[str, int | None]]:
    """(identity keys, flat and without seeds; the effective seeds: those that are null follow seed.all)."""
    flat = flatten(config)
    every = _whole(flat.get("seed.all"))
    seeds = {"all": every} | {name: _or(_whole(flat.get(f"seed.{name}")), every) for name in SEEDS}
    kept = {k: v for k, v in flat.items() if k != "version" and not k.startswith("seed.") and not outside(k)}
    if "init.source" in kept:
        kept["init.run"] = _weights_from(kept.pop("init.source"), flat.get("init.run"))
    return kept, seeds


def _weights_from(source: Any, place: Any) -> str | None:
    """`NAME 1234abcd` of weights that were taken, by what tells them apart: their content hash. None: drawn."""
    if source is None:
        return None
    path = Path(str(place)) if place else Path("imported")
    run = path.parents[1] if path.parent.name == CHECKPOINTS else path
    return f"{run.name} {str(source)[:8]}"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _or(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _first_line(text: Any) -> str | None:
    """`error: out of memory\\nhint: …` → `out of memory`."""
    return str(text).strip().split("\n")[0].removeprefix("error: ") if text else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# ---------------------------------------------------------------- metrics


def read_columns(path: Path) -> tuple[dict[str, np.ndarray], dict[str, list[float]], list[str]]:
    """({metric: float column, NaN where a row has none}, {metric that is a list: its last}, what is wrong with the
    file). A torn last line is passed over silently: a kill leaves one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, {}, []
    except OSError as error:
        return {}, {}, [f"{path.name} can't be read: {error.strerror}"]
    rows, numbers, damaged = _rows(content)
    lists = _lists(rows)
    columns, bad = _columns(rows)
    return columns, lists, list(_problems(path.name, damaged, bad, numbers, columns.get("step")))


def _rows(content: bytes) -> tuple[list[Row], list[int], list[int]]:
    """(rows, the number of each one's line, numbers of the lines that can't be read)."""
    end = content.rfind(b"\n") + 1
    rows: list[Row] = []
    numbers: list[int] = []
    damaged: list[int] = []
    number = 0
    for block in _blocks(content[:end]):
        for row in _all_at_once(block) or map(_row, block.split(b"\n")[:-1]):
            number += 1
            if row is None:
                damaged.append(number)
            else:
                rows.append(row)
                numbers.append(number)
    if end < len(content) and (row := _row(content[end:])) is not None:  # whole, and only its newline is missing
        rows.append(row)
        numbers.append(number + 1)
    return rows, numbers, damaged


def _blocks(body: bytes) -> Iterator[bytes]:
    """Whole lines, some hundreds of KiB at a time: one damaged line slows down no more than its block."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", min(start + BLOCK_BYTES, len(body)) - 1) + 1
        yield body[start:end]
        start = end


def _all_at_once(body: bytes) -> list[Row] | None:
    """The rows by one call of the parser, or None when any line is not a JSON object with an integer step.

    That every line opens and closes its own brace keeps two halves from being read as one whole.
    """
    n_lines = body.count(b"\n")
    if not n_lines or body[:1] != b"{" or body[-2:] != b"}\n" or body.count(b"}\n{") != n_lines - 1:
        return None
    try:
        rows = json.loads(b"[" + body[:-1].replace(b"\n", b",") + b"]", parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    if len(rows) != n_lines or {type(row) for row in rows} != {dict}:
        return None
    return rows if {type(row.get("step")) for row in rows} == {int} else None


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _no_number(token: str) -> None:
    """NaN and Infinity, which strict JSON has not, count like the null that stands for them."""


def _lists(rows: list[Row]) -> dict[str, list[float]]:
    """The last load of each layer's experts, a list; taken out of the rows, which keep what may be a column."""
    found: dict[str, list[float]] = {}
    for key in [key for key in set().union(*rows) if (where := parse(key)) is not None and where[2] == LOAD]:
        for row in rows:
            if type(row.get(key)) is list and np.isfinite([_number(value) for value in row[key]]).all():
                found[key] = row.pop(key)
    return found


def _columns(rows: list[Row]) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """(columns, {metric: indices of the rows where it is no finite number})."""
    columns, bad = {}, {}
    for key in sorted(set().union(*rows)):
        try:
            values = list(map(itemgetter(key), rows))  # half the time of what follows, which serves sparse columns
        except KeyError:
            values = [row.get(key, NAN) for row in rows]
        plain = {type(value) for value in values} <= {float, int}
        if plain:
            try:
                column = np.array(values, dtype=float)
            except OverflowError:  # a whole number beyond the floats
                plain = False
        if not plain:
            column = np.array([_number(value) for value in values], dtype=float)
        if not plain or np.isinf(column).any():
            lost = ~np.isfinite(column)
            bad[key] = [int(i) for i in np.flatnonzero(lost) if key in rows[i]]
            column[lost] = NAN
        columns[key] = column
    return columns, {key: found for key, found in bad.items() if found}


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else NAN
    except OverflowError:
        return NAN


def _problems(
    name: str, damaged: list[int], bad: dict[str, list[int]], numbers: Sequence[int], steps: np.ndarray | None
) -> Iterator[str]:
    if damaged:
        yield damage(Path(name), Scan(damaged=damaged))
    if bad:
        lines = sorted({numbers[i] for found in bad.values() for i in found})
        more = ", …" if len(lines) > LISTED else ""
        plural = "s" if len(lines) > 1 else ""
        where = f"{', '.join(map(str, lines[:LISTED]))}{more} ({', '.join(bad)})"
        yield f"{name} has {len(lines)} line{plural} with a value that is no finite number: {where}"
    if steps is not None and len(back := np.flatnonzero(np.diff(steps) <= 0)):
        i = int(back[0]) + 1
        yield f"{name} goes back at line {numbers[i]}: step {steps[i]:.0f} after step {steps[i - 1]:.0f}"
