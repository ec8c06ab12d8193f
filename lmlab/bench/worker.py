"""A contender in a process of its own: its allocator, its memory, its compiled code; the parent says when it may run.

Workers wait at a pipe while others run, so that turns are taken on the whole machine.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lmlab.errors import EXIT_FAILED, LmlabError


@dataclass(frozen=True)
class Job:
    """make: a function of `words`, found by name in a child process, that makes a Contender. labels: what is said of
    it. malloc: lmlab's setting of the allocator."""

    name: str
    make: Callable[..., Any]
    words: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    malloc: bool = True

    def said(self) -> str:
        """`transformers, llama, compiled, its own allocator`."""
        labels = [k if v is True else v for k, v in self.labels.items() if v is not False]
        return ", ".join([self.name, *labels, "lmlab's allocator setting" if self.malloc else "its own allocator"])


@dataclass(frozen=True)
class Ready:
    """What is known after the first step, which compiles where anything is compiled."""

    n_parameters: int
    tokens: int
    first_step_s: float
    first_loss: float


class Failed(LmlabError):
    """A contender that could not go on."""

    exit_code = EXIT_FAILED


class Worker:
    """A running job. `ready` waits for its first step; raises Failed when that fails, and what refused it."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.job = job
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()
        self.ready: Ready = self._answer()
        self.done = 1

    def seconds(self, steps: int) -> float:
        """Of the next `steps` steps."""
        took, self.loss = self._ask("run", self.done, steps)
        self.done += steps
        return float(took)

    def breakdown(self, steps: int) -> dict[str, float]:
        """Seconds of a step by what they went into."""
        parts = self._ask("breakdown", self.done, steps)
        self.done += steps
        return dict(parts)

    def peak_bytes(self) -> int:
        """The most memory that building and training took, above what the imports had taken."""
        return int(self._ask("peak"))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
        except OSError:  # it ended while it waited for its turn
            raise self._ended() from None
        return self._answer()

    def _ended(self) -> LmlabError:
        self._process.join()
        why = f"`{self.job.name}` ended with status {self._process.exitcode}"
        return Failed(why, "see what it printed; a smaller model= takes less memory")

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if kind == "refused":
            raise value
        if kind == "error":
            raise Failed(
                f"`{self.job.name}` failed: {value}",
                "`pip install .[bench]` brings the versions that it was written for",
            )
        return value


def _serve(pipe: Connection, job: Job) -> None:
    """The child: build, step once, then do as it is told until the pipe is closed. What is compiled is compiled anew:
    its time is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and closes the pipe
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    from lmlab.bench.memory import begins, peak
    from lmlab.train.device import tune_malloc

    try:
        if job.malloc:
            tune_malloc()
        before = begins()
        contender = job.make(list(job.words), **job.settings)
        first_step_s, loss = contender.seconds(0, 1)
        pipe.send(("ok", Ready(contender.n_parameters, contender.tokens, first_step_s, loss)))
        taken = functools.partial(peak, contender.device, before)
        gc.collect()
        gc.freeze()
        gc.disable()
        while True:
            what, *given = pipe.recv()
            ask = {"run": contender.seconds, "breakdown": contender.breakdown, "peak": taken}[what]
            pipe.send(("ok", ask(*given)))
    except (EOFError, BrokenPipeError):
        pass
    except LmlabError as error:
        with suppress(BrokenPipeError):
            pipe.send(("refused", error))
    except Exception as error:
        with suppress(BrokenPipeError):
            pipe.send(("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.shutdown_compile_workers()
    os._exit(0)  # what is still alive needs no destructors, and libraries complain in theirs
