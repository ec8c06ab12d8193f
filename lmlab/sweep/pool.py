"""A pool of slots: each member of a sweep in a process of its own, forked lean from a server that has torch imported.

A process that dies takes nothing with it: its run is interrupted, and is tried again, at most TRIES times. A run that
another sweep holds is left to it and looked at again later. Children end when the pool's process is gone.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from lmlab.errors import TrainingFailed
from lmlab.runs.claim import is_claimed
from lmlab.sweep.slots import Slot

TRIES = 3
TICK_S = 0.5
STOP_S = 120.0  # a child that is asked to stop saves a checkpoint first
ORPHAN_S = 20.0  # less when the pool is gone: a run that hangs must not keep its claim
PRELOAD = ["lmlab.sweep.preload"]


@dataclass(frozen=True)
class Outcome:
    """How one try ended. state: a run's, or `busy` (another process has it), or `killed` (its process died).
    noncausal: why the loss is of tokens that saw later ones."""

    state: str
    path: Path | None = None
    loss: float | None = None
    error: str | None = None
    noncausal: str | None = None


@dataclass
class Job:
    """One member to train: its words, and its directory as soon as it is known."""

    words: list[str]
    name: str
    path: Path | None = None
    tries: int = 0
    outcome: Outcome | None = None
    started: float = 0.0


class Died(TrainingFailed):
    """A process ended without an answer."""


class Observer(Protocol):
    """Hears what the pool does; `open` is asked before a job starts: None to train it, an outcome when it ended."""

    def ended(self, job: Job) -> Outcome | None: ...
    def began(self, job: Job, slot: Slot) -> None: ...
    def held(self, job: Job) -> None: ...
    def done(self, job: Job, *, again: bool = False) -> None: ...
    def tick(self, running: Sequence[Job], waiting: Sequence[Job]) -> None: ...


Work = Callable[[list[str], Slot], Outcome]


@dataclass
class _Process:
    slot: Slot
    job: Job
    process: Any
    pipe: Connection
    outcome: Outcome | None = None


@dataclass
class Pool:
    """Runs jobs over `slots`. `work` must be picklable: it is called in the children."""

    work: Work
    slots: Sequence[Slot]
    observer: Observer
    log_of: Callable[[Job], Path | None] = lambda job: None
    running: list[_Process] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """All jobs to their end. KeyboardInterrupt and SystemExit stop the children first, with checkpoints."""
        self.waiting = list(jobs)
        try:
            while self.waiting or self.running:
                self._start()
                self._listen()
                self.observer.tick([p.job for p in self.running], self.waiting)
        except BaseException:
            self._stop()
            raise
        return list(jobs)

    def _start(self) -> None:
        """Give every free slot the first job that nobody else holds."""
        for job in list(self.waiting):
            free = [s for s in self.slots if all(p.slot != s for p in self.running)]
            if not free:
                return
            if job.path is not None and is_claimed(job.path):
                self.observer.held(job)
                continue
            self.waiting.remove(job)
            job.outcome = self.observer.ended(job)
            if job.outcome is not None:
                self.observer.done(job)
                continue
            self.running.append(self._launch(job, free[0]))
            self.observer.began(job, free[0])

    def _launch(self, job: Job, slot: Slot) -> _Process:
        job.tries, job.started = job.tries + 1, time.monotonic()
        context = server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(self.work, job.words, slot, theirs, self.log_of(job)))
        process.start()
        theirs.close()
        return _Process(slot, job, process, ours)

    def _listen(self) -> None:
        """Wait for news, not longer than a tick, and settle what has ended."""
        watched: list[Any] = [p.pipe for p in self.running if p.outcome is None]
        watched += [p.process.sentinel for p in self.running]
        wait(watched, TICK_S) if watched else time.sleep(TICK_S)
        for one in list(self.running):
            if one.outcome is None and one.pipe.poll():
                with suppress(EOFError, OSError):
                    one.outcome = one.pipe.recv()
            if not one.process.is_alive():
                self.running.remove(one)
                self._settle(one)

    def _settle(self, one: _Process) -> None:
        one.process.join()
        with suppress(EOFError, OSError):
            if one.outcome is None and one.pipe.poll():
                one.outcome = one.pipe.recv()
        one.pipe.close()
        job, code = one.job, one.process.exitcode
        job.outcome = one.outcome or Outcome("killed", job.path, error=_how(code))
        job.path = job.outcome.path or job.path
        if job.outcome.state == "busy":
            job.tries, job.started = job.tries - 1, 0.0
        again = job.outcome.state == "busy" or (job.outcome.state in ("killed", "stopped") and job.tries < TRIES)
        if again:
            self.waiting.append(job)
        self.observer.done(job, again=again)

    def _stop(self) -> None:
        """Ask the children to save and stop, and wait for them; a second signal kills them."""
        for one in self.running:
            with suppress(OSError):
                one.pipe.send("stop")
        try:
            deadline = time.monotonic() + STOP_S
            for one in self.running:
                one.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for one in self.running:
                if one.process.is_alive():
                    one.process.kill()
                    one.process.join()
            self.running.clear()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with status {code} and no result"


_server: Any = None


def server() -> Any:
    """The context whose processes are forked from one clean server, started on the first call."""
    global _server
    if _server is None:
        _server = multiprocessing.get_context("forkserver")
        _server.set_forkserver_preload(PRELOAD)
    return _server


def warm() -> None:
    """Start the server now: it imports torch while this process goes on planning."""
    from multiprocessing import forkserver

    server()
    forkserver.ensure_running()


def call(function: Callable[..., Any], *args: Any, slot: Slot) -> Any:
    """The result of `function(*args)` in a process like a member's, so that this one need not import torch. Raises what
    it raises. `function` and `args` must be picklable."""
    ours, theirs = server().Pipe()
    process = server().Process(target=_answer, args=(theirs, slot, function, args))
    process.start()
    theirs.close()
    try:
        good, value = ours.recv()
    except EOFError:
        process.join()
        raise Died(f"planning the sweep: {_how(process.exitcode)}", "try a smaller model=") from None
    except BaseException:
        process.kill()
        raise
    process.join()
    if not good:
        raise value
    return value


def _answer(pipe: Connection, slot: Slot, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _stand_alone(pipe)
    slot.enter()
    try:
        pipe.send((True, function(*args)))
    except Exception as error:
        pipe.send((False, error))


def _child(work: Work, words: list[str], slot: Slot, pipe: Connection, log: Path | None) -> None:
    _stand_alone(pipe)
    if log is not None:
        _write_to(log)
    faulthandler.enable()
    slot.enter()
    pipe.send(work(words, slot))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if log is not None and log.stat().st_size == 0:
        log.unlink()


def _write_to(log: Path) -> None:
    """stdout and stderr, also of libraries, into a file: the pool's terminal shows the sweep."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)


def _stand_alone(pipe: Connection) -> None:
    """Signals of the terminal and to the pool's group go to the pool, which asks each child once, through its pipe.
    When it asks, or is gone: stop with a checkpoint, and if that does not come to pass, at once."""
    os.setpgrp()
    for number in (signal.SIGTERM, signal.SIGHUP):  # ignored by the server, see preload
        signal.signal(number, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        ready = wait([pipe, *([parent.sentinel] if parent is not None else [])])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_S if pipe in ready and parent is not None and parent.is_alive() else ORPHAN_S)
        os._exit(143)

    threading.Thread(target=watch, name="lmlab-parent", daemon=True).start()
