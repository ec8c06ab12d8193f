"""The training loop, on one screen. What surrounds it (composition, run directory, evaluation) is handed in.

Step k trains on batch k with the learning rate of step k; afterwards `state.step` is k + 1, and rows of metrics and
checkpoints carry that number: steps done. A row is written before the checkpoint of its step, so that what is cut back
on resume is never needed again.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lmlab.data.prefetch import ahead
from lmlab.data.source import Batches
from lmlab.train.schedule import Schedule
from lmlab.train.step import Probe, Stepper
from lmlab.train.stop import StopSignal


@dataclass
class State:
    """All that a resumed run needs besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_step: int | None = None
    best_loss: float = math.inf
    best_tokens: int = 0  # of val, that best_loss was measured on


@dataclass
class Intervals:
    log: int
    evaluate: int
    save: int
    stop_at: int | None = None
    probe: int | None = None


@dataclass(frozen=True)
class Due:
    log: bool
    evaluate: bool
    save: bool
    stop: bool
    last: bool

    @property
    def look(self) -> bool:
        """Whether the loss must be known now; otherwise an accelerator is not waited for."""
        return self.log or self.evaluate or self.save or self.stop


class Watcher(Protocol):
    """What the loop tells and asks its surroundings."""

    def stepped(self, state: State, loss: float | None) -> None: ...
    def evaluate(self, state: State, *, final: bool) -> dict[str, Any]: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def save(self, state: State) -> None: ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection off but after evaluations, and then of what came since: in the middle of a step it costs more
    than the step."""
    kept = gc.get_freeze_count()  # by whoever calls
    gc.collect()
    if not kept:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not kept:
            gc.unfreeze()


@dataclass
class Loop:
    stepper: Stepper
    batches: Batches
    lr: Schedule
    steps: int
    every: Intervals
    flops_per_token: float
    watcher: Watcher
    clock: Callable[[], float] = time.perf_counter
    probe: Probe | None = None

    def run(self, state: State, stop: StopSignal) -> str:
        """Train until `steps`, a stop or divergence. Returns "finished", "stopped" or "diverged"."""
        begun = self.clock() - state.elapsed_s
        busy_s, busy_tokens = 0.0, 0
        with no_collection(), ahead(self.batches, self.stepper.device, self.steps) as batches:
            while state.step < self.steps:
                started = self.clock()
                batch, lr = batches(state.step), self.lr(state.step)
                probe = self.probe if self.probed(state.step + 1) else None
                loss, norm = self.stepper(batch, step=state.step, lr=lr, probe=probe)
                state.step += 1
                state.tokens += batch.tokens_BT.numel()
                due = self.due(state.step, stop)
                known = float(loss) if due.look or loss.device.type == "cpu" else None
                busy_s += self.clock() - started
                busy_tokens += batch.tokens_BT.numel()
                diverged = known is not None and self.stepper.diverged(known, norm)
                row: dict[str, Any] = {}
                if due.log or diverged:
                    row |= {"train/loss": known, "train/lr": lr, "train/grad_norm": float(norm)}
                    row |= {"train/tokens_per_s": busy_tokens / busy_s, "train/epoch": self.batches.epoch(state.step)}
                    row |= self.stepper.figures()
                    busy_s, busy_tokens = 0.0, 0
                if probe is not None:
                    row |= probe.after_update(batch)
                if due.evaluate and not diverged:
                    row |= self.watcher.evaluate(state, final=due.last)
                    diverged = not math.isfinite(row["val/loss"])
                    gc.collect()
                state.elapsed_s = self.clock() - begun
                if row:
                    flops = state.tokens * self.flops_per_token
                    self.watcher.record(
                        {"step": state.step, "tokens": state.tokens, "flops": flops, "elapsed_s": state.elapsed_s} | row
                    )
                self.watcher.stepped(state, known)
                saving = due.save or state.best_step == state.step
                if diverged or (saving and not self.stepper.finite()):
                    return "diverged"
                if saving:
                    self.watcher.save(state)
                if due.stop and not due.last:
                    return "stopped"
        return "finished"

    def probed(self, step: int) -> bool:
        every = self.every.probe
        return every is not None and (step == self.steps or step % every == 0)

    def due(self, step: int, stop: StopSignal) -> Due:
        """What is to be done after `step` steps. The last step does everything; a stop saves."""
        last = step == self.steps
        stopping = bool(stop.received) or step == self.every.stop_at
        return Due(
            log=last or step == 1 or step % self.every.log == 0,
            evaluate=last or step % self.every.evaluate == 0,
            save=last or stopping or step % self.every.save == 0,
            stop=stopping,
            last=last,
        )


def measured_rate(stepper: Stepper, batches: Batches, repeats: int = 2) -> float:
    """Steps per second, from gradients of batch 0 that are thrown away, with buffers put back: the run is as if it
    had not been measured."""
    batch, twin = batches.batch(0), stepper.twin
    buffers = [b.clone() for b in twin.model.buffers()]
    times = []
    for _ in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
        twin.zero_grads()
        float(stepper.gradients(batch, step=0))
        times.append(time.perf_counter() - started)
    twin.zero_grads()
    for buffer, kept in zip(twin.model.buffers(), buffers, strict=True):
        buffer.copy_(kept)
    twin.collect_buffers()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1 / min(times[1:])
