"""A report for programs: CSV of its tables, JSON of all of it. Numbers as they are, missing ones empty or null."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from lmlab.report.model import BPB, Arm, Delta, Report, Run, Table
from lmlab.runs.files import to_json

SPREAD = {"val_bits_per_byte": BPB, "test_bits_per_byte": "test/bits_per_byte", "tokens_per_s": "tokens_per_s"}
SPREAD |= {"best_val_bits_per_byte": "best/val/bits_per_byte"}
BESIDE = ("active_parameters", "noncausal")  # facts that stand in the table beside other figures


def arms_csv(report: Report) -> str:
    """The arms: the table's values, the state in words, then what is behind them: spreads, numbers of seeds and runs,
    and why there is no difference to the baseline."""
    table = _table(report, "arms")
    means = [column.key for column in table.columns if column.key in SPREAD]
    head = ["arm", "baseline", *(column.key for column in table.columns if column.key != "arm")]
    head += [f"{key}_{what}" for key in means for what in ("sd", "n")] + [
        "delta_sd",
        "delta_n",
        "delta_paired",
        "delta_why",
    ]
    head += ["n_finished", "n_runs", *BESIDE]
    rows = []
    for arm, row in zip(report.arms, table.rows, strict=True):
        pairs = [(cell, column.key) for cell, column in zip(row, table.columns, strict=True) if column.key != "arm"]
        cells = [cell.text if key == "state" else cell.value for cell, key in pairs]
        stats = [arm.stats.get(SPREAD[key]) for key in means]
        spread = [value for stat in stats for value in ((stat.sd, stat.n) if stat else (None, 0))]
        runs = [arm.states.get("finished", 0), len(arm.runs)]
        rows.append(
            [arm.label, arm.is_baseline, *cells, *spread, *_behind(arm.delta), *runs, *map(arm.facts.get, BESIDE)]
        )
    return _csv([head, *rows])


def _behind(delta: Delta | None) -> list[Any]:
    """sd, n, paired, why."""
    if delta is None or delta.mean is None:
        return [None, 0, None, delta.why if delta is not None else None]
    return [delta.sd, delta.n, delta.paired, None]


def runs_csv(report: Report) -> str:
    table = _table(report, "runs")
    return _csv([[c.key for c in table.columns], *([cell.value for cell in row] for row in table.rows)])


def _table(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def _csv(rows: list[list[Any]]) -> str:
    """RFC 4180 with plain newlines. A word that a spreadsheet would run as a formula gets a quote in front."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[_safe(value) for value in row] for row in rows])
    return text.getvalue()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def as_json(report: Report) -> str:
    """All of the report but where its runs lie, so that a bundle gives the same one elsewhere."""
    body = {
        "version": 1,
        "title": report.title,
        "source": report.source,
        "made": report.made,
        "axes": report.axes,
        "common": report.common,
        "baseline": report.baseline,
        "arms": [_arm(arm) for arm in report.arms],
        "runs": [_run(run, i) for i, arm in enumerate(report.arms) for run in arm.runs],
        "confounds": report.confounds,
        "notes": report.notes,
        "curves": [asdict(curve) for curve in report.curves],
        "why": asdict(report.why) if report.why is not None else None,
        "routing": asdict(report.routing) if report.routing is not None else None,
        "long_context": asdict(report.long_context) if report.long_context is not None else None,
    }
    return to_json(body, indent=1) + "\n"


def _arm(arm: Arm) -> dict[str, Any]:
    stats = {metric: asdict(stat) for metric, stat in arm.stats.items()}
    own = {"label": arm.label, "values": arm.values, "is_baseline": arm.is_baseline, "states": arm.states}
    delta = asdict(arm.delta) if arm.delta is not None else None
    return own | {"runs": [run.name for run in arm.runs], "stats": stats, "delta": delta, "facts": arm.facts}


def _run(run: Run, arm: int) -> dict[str, Any]:
    own = {"run": run.name, "arm": arm, "state": run.state, "seeds": run.seeds, "config": run.config}
    return own | {"result": run.result, "error": run.error, "problems": run.problems}
