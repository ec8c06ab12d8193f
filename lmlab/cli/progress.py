"""What a person sees while a run trains: one block before, live progress (or plain lines), one result after.

Everything goes to stderr; stdout carries data only. Not a terminal → one plain line per interval.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from lmlab.runs.noncausal import labelled


def count(n: float) -> str:
    """5.77M, 1.2k, 300."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if n >= size:
            return f"{n / min(size, 10 ** (3 * math.floor(math.log10(size) / 3))):.3g}{unit}"
    return f"{n:,.0f}"


def active_of(n: int, active: int) -> str:
    """`, 4.51M active` of parameters of which one token meets only some; "" where it meets them all."""
    return f", {count(active)} active" if active < n else ""


def duration(seconds: float) -> str:
    """45 s, 2 min 10 s, 3 h 05 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60:02d} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60:02d} min"


class _Console(Console):
    """Falls silent when its reader is gone (`| head`): what a run says is no reason to end it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Screen:
    """One run's output. `live` tells whether stderr is a terminal that can be redrawn."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or _Console(stderr=True, highlight=False)
        self.live = self.console.is_terminal
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._latest: dict[str, Any] = {}
        self.noncausal: str | None = None
        self.log: Callable[[str], None] | None = None

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)
        if self.log is not None:
            self.log(text.plain)

    def note(self, text: str) -> None:
        self._print(Text(text))

    def warn(self, text: str) -> None:
        self._print(Text("warning: ", style="yellow") + Text(text))

    def block(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """The block before training: a title and label–value rows."""
        self._print(Text(title, style="bold"))
        for label, value in rows:
            self._print(Text(f"  {label:<10} ", style="cyan") + Text(value))

    @contextmanager
    def preparing(self) -> Iterator[Any]:
        """A callback for `prepare(progress=…)`: (what is done, share between 0 and 1 or None)."""
        if not self.live:
            seen: set[str] = set()

            def plain(text: str, share: float | None = None) -> None:
                if text not in seen:
                    seen.add(text)
                    self.note(text)

            yield plain
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=30))
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda text, share=None: bar.update(task, description=text, total=share and 1.0, completed=share or 0)

    @contextmanager
    def training(self, steps: int, done: int, noncausal: str | None = None) -> Iterator[None]:
        """Live progress around the loop. noncausal: why tokens see later ones, in which case losses are labelled."""
        self.steps, self.done_at_start, self.noncausal = steps, done, noncausal
        if not self.live:
            yield
            return
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self.console, transient=True) as bar:
            self._bar, self._task = bar, bar.add_task("", total=steps, completed=done)
            try:
                yield
            finally:
                self._bar = None

    def stepped(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self._latest["train/loss"] = loss
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=self._line(step, self._latest))

    def row(self, row: dict[str, Any], extra: dict[str, Any]) -> None:
        """A row of metrics (with MFU and ETA in `extra`): kept for the bar, or printed as one plain line."""
        self._latest |= row | extra
        if not self.live or "val/loss" in row:
            self._print(Text(self._line(row["step"], row | extra)))

    def sample(self, text: str) -> None:
        text = "".join(c if c.isprintable() else "·" for c in text)
        self._print(Text(f"    “{text}”", style="dim italic"))

    def _line(self, step: int, row: dict[str, Any]) -> str:
        losses = {"train/loss": "loss {:.4f}", "val/loss": "val {:.4f}", "val/bits_per_byte": "{:.4f} bits/byte"}
        parts = [form.format(row[key]) for key, form in losses.items() if row.get(key) is not None]
        if parts:
            parts[-1] = labelled(parts[-1], self.noncausal)
        parts.insert(0, f"step {step}/{self.steps}")
        if row.get("train/tokens_per_s"):
            parts.append(f"{row['train/tokens_per_s']:,.0f} tok/s")
        if row.get("mfu"):
            parts.append(f"MFU {row['mfu']:.0%}")
        if row.get("eta_s"):
            parts.append(f"ETA {duration(row['eta_s'])}")
        return " · ".join(parts)


def say(text: str) -> None:
    """A line of data to stdout."""
    print(text, file=sys.stdout, flush=True)
