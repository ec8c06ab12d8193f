"""Perplexity against length as papers give it, from published.json: other data and scale, so only ratios stand beside
ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from lmlab.report.model import LongLine

TAG = "published, other data and scale"
FILE = Path(__file__).with_name("published.json")


def published(like: Callable[[str], tuple[int, str] | None]) -> Iterator[LongLine]:
    """The ratio to the trained length against length / trained length. like(`pos=alibi`): the
    line of ours that is so, by arm and scaling."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    for curve in content["curves"]:
        source = content["sources"][curve["source"]]
        base, first = curve["perplexity"][0], curve["length"][0]
        x = [length / first for length in curve["length"]]
        y = [value / base for value in curve["perplexity"]]
        name = curve["name"] + (f" ({curve['beyond']})" if curve.get("beyond") else "")
        beside = like(curve["like"]) if curve["like"] else None
        said = f"{source['cite']}: {source['of']}"
        yield LongLine("ratio", None, curve["name"], name, x, y, y, y, 1, first, source=said, like=beside)
