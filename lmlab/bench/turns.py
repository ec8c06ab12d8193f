"""Contenders in processes of their own, taking turns to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmlab.bench.timing import Spread
from lmlab.bench.worker import Job, Ready, Worker

LEAST_S = 0.7  # of a turn


@dataclass
class Measured:
    """A contender's turns, in tokens a second."""

    job: Job
    worker: Worker
    rates: list[float] = field(default_factory=list)
    steps: int = 1  # of a turn

    @property
    def labels(self) -> dict[str, Any]:
        return self.job.labels

    @property
    def ready(self) -> Ready:
        return self.worker.ready

    @property
    def rate(self) -> Spread:
        return Spread.of(self.rates)

    def warm_up(self) -> None:
        """And see how many steps make a turn."""
        self.worker.seconds(2)
        self.steps = max(1, round(LEAST_S / (self.worker.seconds(2) / 2)))

    def turn(self) -> None:
        self.rates.append(self.steps * self.ready.tokens / self.worker.seconds(self.steps))


@contextmanager
def taken_in_turns(jobs: Iterable[Job], rounds: int, said: Callable[[str], None]) -> Iterator[list[Measured]]:
    """Start every job, one after the other, and let them take their turns; they live as long as the context."""
    with ExitStack() as open_workers:
        found = []
        for job in jobs:
            said(f"building {job.said()}")
            worker = Worker(job)
            open_workers.callback(worker.close)
            found.append(Measured(job, worker))
        for one in found:
            one.warm_up()
        for turn in range(rounds):
            said(f"round {turn + 1} of {rounds}")
            for one in found if turn % 2 == 0 else found[::-1]:
                one.turn()
        yield found
