"""Reads W&B's offline file: a LevelDB log (blocks of 32 KiB, records whole or in parts) of protobuf Records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


@dataclass
class Offline:
    id: str = ""
    name: str = ""
    group: str = ""
    project: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metric: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None


def records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or position + HEADER + length > len(data):  # torn
            break
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # full, last
            yield parts
            parts = b""


def read(path: Path) -> Offline:
    from wandb.proto import wandb_internal_pb2 as pb

    found = Offline()
    for raw in records(path):
        record = pb.Record.FromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.id, found.name, found.group = run.run_id, run.display_name, run.run_group
            found.project, found.notes, found.tags = run.project, run.notes, list(run.tags)
            found.config |= {u.key: json.loads(u.value_json) for u in run.config.update if u.key != "_wandb"}
        elif kind == "history":
            items = record.history.item
            found.rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif kind == "summary":
            found.summary |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
        elif kind == "metric":
            found.step_metric[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def offline_files(run_path: Path) -> list[Path]:
    return sorted(run_path.glob("wandb/offline-run-*/*.wandb"))
