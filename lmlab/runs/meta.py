"""What meta.json says of a checkpoint, and whether its files are what was written. Torch-free: no tensor is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lmlab.errors import RunError
from lmlab.runs.files import to_json
from lmlab.runs.layout import list_checkpoints

T = TypeVar("T")
VERSION = 1
MODEL, STATE, META = "model.safetensors", "state.pt", "meta.json"
REMEDY = "go on from the checkpoint before it: remove this directory, then run the same command again"


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint, checked for version and for every field that loading needs."""
    file = Path(path) / META
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{file} is missing", REMEDY) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error}", REMEDY) from error
    version = meta.get("version") if isinstance(meta, dict) else None
    if version != VERSION:
        raise RunError(
            f"{file} has format version {version}, this lmlab reads {VERSION}", "load it with the lmlab that wrote it"
        )
    if meta.get("checksum") != checksum(meta):
        raise RunError(f"{file} is damaged: its content changed since it was written", REMEDY)
    return meta


def verify_file(path: Path, facts: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise RunError(f"{path} is damaged: {size} bytes where {facts['bytes']} were written", REMEDY)
        if file_hash(path) != facts["blake2b"]:
            raise RunError(f"{path} is damaged: its content changed since it was written", REMEDY)
    except FileNotFoundError:
        raise RunError(f"{path} is missing", REMEDY) from None
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}", REMEDY) from error


def whole(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint whose files have the bytes that were written. Raises RunError naming what is not so."""
    meta = read_meta(path)
    for name, facts in meta["files"].items():
        verify_file(Path(path) / name, facts)
    return meta


def newest(run_path: Path, read: Callable[[Path], T], note: Callable[[str], None] = lambda _: None) -> T | None:
    """What `read` makes of the newest checkpoint that it reads, None when there are none. `note` hears of each damaged
    one passed over. Raises RunError when there are checkpoints and all are damaged."""
    refs = list_checkpoints(run_path)
    for ref in reversed(refs):
        try:
            return read(ref.path)
        except RunError as error:
            problem = error
            note(f"{error.message}; trying the checkpoint before it")
    if refs:
        raise RunError(
            f"every checkpoint of {run_path} is damaged; the oldest: {problem.message}", "train again with --force"
        )
    return None


def file_hash(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def checksum(meta: dict[str, Any]) -> str:
    """Of meta.json itself: of everything in it but the checksum."""
    rest = {k: v for k, v in meta.items() if k != "checksum"}
    return hashlib.blake2b(to_json(rest).encode(), digest_size=16).hexdigest()
