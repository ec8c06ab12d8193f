"""Reads back the file that W&B writes beside a run: a LevelDB log (blocks of 32 KiB, records whole or in parts, each
with its checksum) of protobuf records. A kill or a power cut tears its end; reading stops there.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MAGIC, BLOCK, HEADER = b":W&B", 32768, 7
FULL, LAST = 1, 4
QUIET_S, PATIENCE_S = 1.5, 15.0  # its writer writes every second


def records(path: Path) -> Iterator[bytes]:
    """Every record that stands whole in the file, up to the first that does not."""
    data = Path(path).read_bytes()
    position, parts = HEADER, b""  # the file's own header is as long as a record's
    while data[:4] == MAGIC and position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        content = data[position + HEADER : position + HEADER + length]
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum or len(content) < length:
            return
        parts += content
        position += HEADER + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def steps(path: Path) -> tuple[list[int], bool]:
    """The `step` of every row in the file, and whether the file was brought to its end."""
    from wandb.proto import wandb_internal_pb2 as pb

    found, ended = [], False
    for raw in records(path):
        record = pb.Record.FromString(raw)
        ended |= record.HasField("exit")
        found += [_value(item) for item in record.history.item if (item.key or "/".join(item.nested_key)) == "step"]
    return found, ended


def _value(item: Any) -> int:
    return int(json.loads(item.value_json))


def settled_steps(path: Path) -> list[int]:
    """The same steps, once nobody writes the file any more: W&B's process outlives a killed run for a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found, ended = steps(path)
        if ended or time.time() - path.stat().st_mtime >= QUIET_S or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def mark_synced(folder: Path, run_id: str) -> None:
    """Tell `wandb sync` to pass over the run's offline files, because W&B has what is in them."""
    for file in folder.glob(f"offline-run-*/run-{run_id}.wandb"):
        with suppress(OSError):
            file.with_name(file.name + ".synced").touch()
