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

from lmlab.data.batches import TrainBatches
from lmlab.train.schedule import Schedule
from lmlab.train.step import Stepper
from lmlab.train.stop import StopSignal


@dataclass
class State:
    """All that a resumed run needs besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_step: int | None = None
    best_loss: float = math.inf


@dataclass
class Intervals:
    log: int
    evaluate: int
    save: int
    stop_at: int | None = None


class Watcher(Protocol):
    """What the loop tells and asks its surroundings."""

    def stepped(self, state: State, loss: float | None) -> None: ...
    def evaluate(self, state: State, *, final: bool) -> dict[str, float]: ...
    def record(self, row: dict[str, Any]) -> None: ...
    def save(self, state: State) -> None: ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection off: a full collection in the middle of a step costs more than the step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class Loop:
    stepper: Stepper
    batches: TrainBatches
    lr: Schedule
    steps: int
    every: Intervals
    flops_per_token: float
    watcher: Watcher
    clock: Callable[[], float] = time.perf_counter

    def run(self, state: State, stop: StopSignal) -> str:
        """Train until `steps`, a stop or divergence. Returns "finished", "stopped" or "diverged"."""
        begun = self.clock() - state.elapsed_s
        busy_s, busy_tokens = 0.0, 0
        with no_collection():
            while state.step < self.steps:
                started = self.clock()
                batch, lr = self.batches.batch(state.step), self.lr(state.step)
                loss, norm = self.stepper(batch, step=state.step, lr=lr)
                state.step += 1
                state.tokens += batch.tokens_BT.numel()
                last = state.step == self.steps
                log_due = last or state.step == 1 or state.step % self.every.log == 0
                known = float(loss) if log_due or loss.device.type == "cpu" else None
                busy_s += self.clock() - started
                busy_tokens += batch.tokens_BT.numel()
                diverged = known is not None and not (math.isfinite(known) and math.isfinite(float(norm)))
                stopping = bool(stop.received) or state.step == self.every.stop_at
                row: dict[str, Any] = {}
                if log_due or diverged:
                    row |= {"train/loss": known, "train/lr": lr, "train/grad_norm": float(norm)}
                    row |= {"train/tokens_per_s": busy_tokens / busy_s, "train/epoch": self.batches.epoch(state.step)}
                    busy_s, busy_tokens = 0.0, 0
                if not diverged and (last or state.step % self.every.evaluate == 0):
                    row |= self.watcher.evaluate(state, final=last)
                state.elapsed_s = self.clock() - begun
                if row:
                    flops = state.tokens * self.flops_per_token
                    self.watcher.record(
                        {"step": state.step, "tokens": state.tokens, "flops": flops, "elapsed_s": state.elapsed_s} | row
                    )
                self.watcher.stepped(state, known)
                if diverged:
                    return "diverged"
                if last or stopping or state.step % self.every.save == 0:
                    self.watcher.save(state)
                if stopping and not last:
                    return "stopped"
        return "finished"


def measured_rate(stepper: Stepper, batches: TrainBatches, repeats: int = 2) -> float:
    """Steps per second, from gradients of batch 0 that are thrown away: nothing about the run changes."""
    batch = batches.batch(0)
    times = []
    for _ in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
        stepper.twin.zero_grads()
        float(stepper.gradients(batch, step=0))
        times.append(time.perf_counter() - started)
    stepper.twin.zero_grads()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1 / min(times[1:])
