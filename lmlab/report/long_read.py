"""A run's newest evaluation of long contexts, eval/*-long-context.json, as far as it is of its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmlab.report.model import Run
from lmlab.runs.layout import EVAL

PATTERN = "*-long-context.json"
KEY, HASH = "long_context", "content_hash"
LISTS = ("lengths", "left_out", "cells", "tasks", "summary")


def read_long(path: Path, found: Run) -> None:
    """Fill `long_context` of a run from its directory; files that can't be read become its problems.

    The hash of the last checkpoint is that of the manifest, which a finished run has; where none is known the newest
    file counts, and the report says of which step it is. Files are named after the moment they were written.
    """
    last, others = found.result.get(HASH), []
    for file in sorted((path / EVAL).glob(PATTERN), reverse=True):
        body = _body(file, found)
        if body is None:
            continue
        if last is None or body.get(HASH) == last:
            found.long_context = body
            return
        others.append(body)
    if others:
        found.long_other = f"evaluated at step {others[0].get('step', 'unknown')}, which is not the last checkpoint"


def _body(file: Path, found: Run) -> dict[str, Any] | None:
    """The file's content with its lists whole: each a list of objects (of lengths, of numbers)."""
    where = f"{EVAL}/{file.name}"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        found.problems.append(f"{where} can't be read: {error}")
        return None
    inner = body.get(KEY) if isinstance(body, dict) else None
    if not isinstance(inner, dict) or type(inner.get("trained_length")) is not int or inner["trained_length"] < 1:
        found.problems.append(f"{where} holds no {KEY} with a trained_length")
        return None
    for key in LISTS:
        kind = int if key == "lengths" else dict
        values = inner.get(key)
        inner[key] = [v for v in values if isinstance(v, kind)] if isinstance(values, list) else []
    for key in ("cells", "tasks"):
        inner[key] = [one for one in inner[key] if type(one.get("length")) is int and one["length"] > 0]
    return body
