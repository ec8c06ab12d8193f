"""What a benchmark found: a table to read, records to keep, and a figure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lmlab.bench.limits import Limits
from lmlab.bench.timing import Spread
from lmlab.errors import RunError
from lmlab.runs.files import to_json

INK, LINE = "#3b6ea5", "#9aa0a6"
WIDE = 8  # from the smallest to the largest ratio: then by doubling


@dataclass(frozen=True)
class Bar:
    """A ratio in the figure; 1 is the line that it is read against."""

    label: str
    ratio: Spread


@dataclass(frozen=True)
class Result:
    """kind: the word after `lmlab bench`. said: what the table shows, a line each."""

    kind: str
    limits: Limits
    facts: dict[str, Any]
    head: tuple[str, ...]
    table: list[tuple[str, ...]]
    records: list[dict[str, Any]]
    said: list[str]
    bars: list[Bar]
    meaning: str  # of a bar's length

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": self.kind,
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "limits": asdict(self.limits),
            **self.facts,
            "rows": self.records,
            "said": self.said,
        }


def save(result: Result, folder: Path) -> list[Path]:
    """`<kind>.json` and `<kind>.svg` in the folder. Raises RunError when it can't be written to."""
    try:
        paths = [folder / f"{result.kind}.json", folder / f"{result.kind}.svg"]
        paths[0].write_text(to_json(result.as_dict()) + "\n")
        if not result.bars:
            return paths[:1]
        draw(result.bars, f"{result.meaning}\n{result.limits.said()}", paths[1])
        return paths
    except OSError as error:
        where = error.filename or folder
        raise RunError(f"can't write {where}: {error.strerror}", "name another folder: --out DIR") from error


def make_folder(folder: Path) -> None:
    """Raises RunError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"can't write to {folder}: {error.strerror}", "name another folder: --out DIR") from error


def draw(bars: Sequence[Bar], title: str, path: Path) -> None:
    """Horizontal bars from 1, the smallest and largest of the rounds as a line through each end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "lmlab", "svg.fonttype": "none", "font.size": 9.0}):
        figure, axes = pyplot.subplots(figsize=(7.0, 0.9 + 0.26 * len(bars)), layout="constrained")
        places = range(len(bars))
        axes.barh(places, [b.ratio.median - 1 for b in bars], left=1, color=INK, height=0.62)
        axes.hlines(places, [b.ratio.low for b in bars], [b.ratio.high for b in bars], color="black", linewidth=1)
        axes.axvline(1, color=LINE, linewidth=1)
        axes.set_yticks(places, [b.label for b in bars])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
        if max(b.ratio.high for b in bars) > WIDE * min(b.ratio.low for b in bars):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
