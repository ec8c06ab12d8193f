"""What a person sees of a sweep: the plan, live progress per run, and how each one ended. All of it on stderr.

Progress is read from the runs' own metrics.jsonl, so that the runs of other processes and launchers show as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmlab.cli.progress import Screen, duration
from lmlab.runs.noncausal import labelled, recorded
from lmlab.sweep.pool import Job, Outcome
from lmlab.sweep.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN_EVERY_S = 30.0
BAD = ("failed", "diverged", "killed")
STYLE = {"finished": "green", "failed": "red", "diverged": "red", "killed": "red", "stopped": "yellow"}


@dataclass
class Progress:
    """Where a run stands, from the end of its metrics."""

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    noncausal: str | None = None

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else 0.0


def progress_of(path: Path | None) -> Progress:
    """What the run at `path` has logged so far; nothing for one that has not begun."""
    from lmlab.runs import metrics
    from lmlab.runs.layout import MANIFEST, METRICS

    if path is None:
        return Progress()
    rows: list[dict[str, Any]] = []
    with suppress(OSError):
        rows = metrics.tail(path / METRICS, max_bytes=4096)
    last: dict[str, Any] = next((row for row in reversed(rows) if row.get("train/loss") is not None), {})
    steps, why = None, None
    with suppress(OSError, ValueError, AttributeError):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        steps, why = (manifest.get("resolved") or {}).get("steps"), recorded(manifest)
    return Progress(last.get("step", 0), steps, last.get("train/loss"), last.get("train/tokens_per_s"), why)


@dataclass
class SweepScreen:
    """Hears the pool. `expected_s`: seconds a member will take, by name; `slots`: how many run side by side."""

    screen: Screen
    total: int
    slots: int
    expected_s: dict[str, float]
    states: dict[str, str] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)
    took_s: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    ended_before: Callable[[Job], Outcome | None] = lambda job: None
    _live: Any = None
    _said: float = 0.0

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Live table around the pool's work, when stderr is a terminal."""
        if not self.screen.live:
            yield
            return
        from rich.live import Live

        with Live(console=self.screen.console, refresh_per_second=4, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def ended(self, job: Job) -> Outcome | None:
        return self.ended_before(job)

    def began(self, job: Job, slot: Slot) -> None:
        if not self.screen.live:
            again = f" (try {job.tries})" if job.tries > 1 else ""
            self.screen.note(f"began     {job.name}{again}")

    def held(self, job: Job) -> None:
        """Another process has the run: said once."""
        from lmlab.runs.claim import holder

        if job.path is not None and job.name not in self.waits:
            self.waits.add(job.name)
            self.screen.note(f"waits     {job.name}  held by {holder(job.path)}")

    def done(self, job: Job, *, again: bool = False) -> None:
        """One line per ended member; `busy` is no end."""
        outcome = job.outcome or Outcome("killed")
        if outcome.state == "busy":
            return
        self.states[job.name] = outcome.state
        seconds = time.monotonic() - job.started if job.started else None
        if seconds is not None and outcome.state == "finished":
            self.took_s.append(seconds)
        figure = ""
        if outcome.loss is not None:
            figure = "  " + labelled(f"val {outcome.loss:.4f} nats/token", outcome.noncausal)
        why = f"  {outcome.error}" if outcome.error else ""
        took = f"  {duration(seconds)}" if seconds is not None else "  (was there)"
        more = ", tried again" if again else ""
        from rich.text import Text

        mark = Text(f"{outcome.state:<9} ", style=STYLE.get(outcome.state, ""))
        self.screen.console.print(mark + Text(f"{job.name}{figure}{took}{why}{more}"), soft_wrap=True)

    def tick(self, running: Sequence[Job], waiting: Sequence[Job]) -> None:
        if self._live is not None:
            self._live.update(self._table(running, waiting))
        elif time.monotonic() - self._said > PLAIN_EVERY_S and not self.screen.live:
            if self._said:
                self.screen.note(self._line(running, waiting))
            self._said = time.monotonic()

    def _line(self, running: Sequence[Job], waiting: Sequence[Job]) -> str:
        counts = {s: list(self.states.values()).count(s) for s in dict.fromkeys(self.states.values())}
        parts = [f"{n} {state}" for state, n in counts.items()] + [f"{len(running)} running"]
        elsewhere = len([j for j in waiting if j.outcome is not None and j.outcome.state == "busy"])
        parts += [f"{elsewhere} held by another process"] if elsewhere else []
        left = self.left_s(running, waiting)
        eta = f" · about {duration(left)} left" if left else ""
        return f"{sum(counts.values())}/{self.total}: " + " · ".join(parts) + eta

    def left_s(self, running: Sequence[Job], waiting: Sequence[Job]) -> float:
        """Seconds to the end: what was expected, corrected by what the finished runs really took."""
        mean = sum(self.took_s) / len(self.took_s) if self.took_s else None
        known = [self.expected_s.get(job.name, 0.0) for job in (*running, *waiting)]
        scale = 1.0
        if mean is not None and self.expected_s:
            scale = mean / max(1e-9, sum(self.expected_s.values()) / len(self.expected_s))
        going = sum(self.expected_s.get(j.name, mean or 0.0) * scale * (1 - progress_of(j.path).share) for j in running)
        rest = sum(k * scale if k else (mean or 0.0) for k in known[len(running) :])
        return (going + rest) / max(1, min(self.slots, len(known) or 1))

    def _table(self, running: Sequence[Job], waiting: Sequence[Job]) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=bool(running), header_style="dim")
        for title, right in (("run", 0), ("", 0), ("step", 1), ("loss", 1), ("tok/s", 1), ("time", 1)):
            table.add_column(title, justify="right" if right else "left", no_wrap=title != "run")
        for job in running:
            at = progress_of(job.path)
            table.add_row(
                Text(job.name),
                ProgressBar(total=1.0, completed=at.share, width=20),
                f"{at.step}/{at.steps}" if at.steps else "starting",
                "–" if at.loss is None else labelled(f"{at.loss:.4f}", at.noncausal),
                "–" if not at.tokens_per_s else f"{at.tokens_per_s:,.0f}",
                duration(time.monotonic() - job.started),
            )
        return Group(table, Text(self._line(running, waiting), style="bold"))
