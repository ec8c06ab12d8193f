"""What do logging, evaluations and checkpoints cost a training, and does its memory stay flat?

    python experiments/bookkeeping/run.py price [key=value ...]     # 300 steps with all of it and without, in turns
    python experiments/bookkeeping/run.py memory [key=value ...]    # 2,000 steps, resident memory every 100

price: the same loop with what `lmlab train` surrounds it with (rows of metrics, W&B offline, checkpoints, evaluations)
and with nothing. Evaluating takes the time that it takes and is told apart; the rest is bookkeeping.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as lmlab's command line sets it
os.environ.setdefault("WANDB_MODE", "offline")

from lmlab.bench.contender import replaced
from lmlab.cli import plan as planning
from lmlab.cli.progress import Screen
from lmlab.cli.training import Recorder, build_trainer, schedule_of
from lmlab.config.identity import config_hash, to_dict
from lmlab.config.load import load
from lmlab.data.prepare import cache_dir, prepare
from lmlab.runs import wandb_mirror
from lmlab.runs.metrics import Metrics
from lmlab.runs.rundir import RunDir
from lmlab.train.device import tune_malloc
from lmlab.train.loop import Intervals, Loop, State
from lmlab.train.stop import StopSignal

BASE = ["model=nano", "train.batch_tokens=1024", "train.eval_tokens=8192"]
STEPS, PAIRS, EVERY = 300, 3, 75
LONG, LOOK = 2000, 100


class Nobody:
    """Surroundings that do nothing."""

    def stepped(self, state: State, loss: float | None) -> None: ...
    def evaluate(self, state: State, *, final: bool) -> dict[str, Any]:
        return {"val/loss": 0.0}

    def record(self, row: dict[str, Any]) -> None: ...
    def save(self, state: State) -> None: ...


class Timed:
    """The surroundings, and what each call of them took."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.spent = inner, defaultdict[str, float](float)

    def __getattr__(self, name: str) -> Any:
        called = getattr(self.inner, name)

        def timed(*args: Any, **how: Any) -> Any:
            begun = time.perf_counter()
            found = called(*args, **how)
            self.spent[name] += time.perf_counter() - begun
            return found

        return timed


class Stepping:
    """The stepper, and what each step took."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds = inner, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **how: Any) -> Any:
        begun = time.perf_counter()
        found = self.inner(*args, **how)
        self.seconds.append(time.perf_counter() - begun)
        return found


def loop_of(words: list[str], steps: int) -> tuple[Loop, Any, list[float]]:
    """A loop without surroundings, its plan, and the seconds of its steps as they come."""
    exp = load(replaced(BASE, [*words, f"train.max_steps={steps}"])).experiment
    plan = planning.make(exp, prepare(exp.data, exp.tokenizer, cache_dir(exp.paths.cache)))
    trainer = build_trainer(plan)
    every = Intervals(exp.train.log_every_steps, EVERY, EVERY)
    loop = Loop(trainer.stepper, trainer.batches, schedule_of(plan), steps, every, 1.0, Nobody())
    loop.stepper = stepping = Stepping(trainer.stepper)  # type: ignore[assignment]
    return loop, (plan, trainer), stepping.seconds


def with_everything(words: list[str], folder: Path) -> tuple[list[float], dict[str, float], float]:
    """(seconds of each step, of each kind of call, of all)."""
    loop, (plan, trainer), times = loop_of(words, STEPS)
    run = RunDir.create(folder, to_dict(plan.exp))
    screen = Screen()
    with run.claim(), Metrics(run.metrics_path) as rows:
        run.update_manifest(resolved=plan.resolved())
        mirror = wandb_mirror.start(
            vars(plan.exp.wandb), run_path=run.path, run_id=config_hash(plan.exp), name=folder.name,
            config=to_dict(plan.exp), group=None, tags=[], cache=cache_dir(plan.exp.paths.cache), note=screen.note,
        )  # fmt: skip
        loop.watcher = watcher = Timed(Recorder(run, plan, trainer, rows, mirror, screen, 1e12))
        begun = time.perf_counter()
        with StopSignal() as stop, screen.training(STEPS, 0, None):
            loop.run(State(), stop)
        took = time.perf_counter() - begun
        mirror.finish({}, 0)
    return times, dict(watcher.spent), took


def alone(words: list[str]) -> list[float]:
    loop, _, times = loop_of(words, STEPS)
    with StopSignal() as stop:
        loop.run(State(), stop)
    return times


def price(words: list[str]) -> None:
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as root:
        for n in range(PAIRS):
            plain = alone(words)
            times, spent, took = with_everything(words, Path(root) / f"run-{n}")
            ratios.append(statistics.median(times) / statistics.median(plain))
            kept = sum(seconds for name, seconds in spent.items() if name != "evaluate")
            shares.append(kept / (took - spent["evaluate"]))
            parts = ", ".join(f"{name} {1000 * s / STEPS:.2f}" for name, s in sorted(spent.items()))
            print(f"pair {n + 1}: a step {ratios[-1]:.3f} × that of the bare loop; ms a step: {parts}", flush=True)
    print(f"a step beside everything: {statistics.median(ratios):.3f} × ({min(ratios):.3f}–{max(ratios):.3f})")
    print(f"bookkeeping without evaluations: {max(shares):.2%} of the time at most")


def memory(words: list[str]) -> None:
    loop, _, _ = loop_of(words, LONG)
    seen: list[float] = []

    class Watching(Nobody):
        def stepped(self, state: State, loss: float | None) -> None:
            if state.step % LOOK == 0:
                status = Path("/proc/self/status").read_text()
                resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
                seen.append(int(resident.split()[1]) / 1024)
                print(f"step {state.step}: {seen[-1]:.0f} MiB", flush=True)

    loop.watcher = Watching()
    with StopSignal() as stop:
        loop.run(State(), stop)
    print(f"from step {LOOK} to {LONG}: {seen[-1] - seen[0]:+.1f} MiB, at most {max(seen) - seen[0]:+.1f}")


if __name__ == "__main__":
    tune_malloc()
    {"price": price, "memory": memory}[sys.argv[1]](sys.argv[2:])
