"""A contender in its own process: it answers, its memory is its own, and its failure is told."""

from __future__ import annotations

import mmap
import os
import signal

import pytest
import torch

from lmlab.bench.contender import Contender
from lmlab.bench.turns import taken_in_turns
from lmlab.bench.worker import Job, Worker
from lmlab.errors import ConfigError, LmlabError

MIB = 2**20


def takes(words: list[str], *, mib: int) -> Contender:
    """A step that needs so many MiB for a moment."""

    def step(k: int) -> torch.Tensor:
        with mmap.mmap(-1, mib * MIB) as pages:
            pages.write(b"x" * mib * MIB)
        return torch.tensor(float(k))

    return Contender(step, torch.device("cpu"), 7, 100)


def fails(words: list[str]) -> Contender:
    raise ValueError(f"no step\nof {words}")


def ends(words: list[str]) -> Contender:
    raise SystemExit(3)


def test_turns_and_memory() -> None:
    jobs = [Job("small", takes, (), {"mib": 1}), Job("large", takes, (), {"mib": 200}, malloc=False)]
    heard: list[str] = []
    with taken_in_turns(jobs, 3, heard.append) as found:
        peaks = [one.worker.peak_bytes() for one in found]
        losses = [one.worker.loss for one in found]
    assert [len(one.rates) for one in found] == [3, 3]
    assert peaks[1] - peaks[0] > 150 * MIB
    assert losses == [float(one.worker.done - 1) for one in found]  # of the last step that was taken
    assert heard[:2] == ["building small, lmlab's allocator setting", "building large, its own allocator"]
    assert not any(one.worker._process.is_alive() for one in found)


def test_a_failure_is_told_in_a_line() -> None:
    with pytest.raises(LmlabError, match=r"`bad` failed: ValueError: no step of \['a=1'\]"):
        Worker(Job("bad", fails, ("a=1",)))


def refuses(words: list[str]) -> Contender:
    raise ConfigError("`a` is 1", "use a=2")


def test_a_refusal_of_a_contender_is_told_as_it_is() -> None:
    with pytest.raises(ConfigError) as told:
        Worker(Job("refused", refuses, ("a=1",)))
    assert (told.value.message, told.value.hint) == ("`a` is 1", "use a=2")


def test_a_process_that_ends_is_told() -> None:
    with pytest.raises(LmlabError, match="`gone` ended with status 3"):
        Worker(Job("gone", ends, ()))


def test_one_that_is_killed_while_it_waits_is_told() -> None:
    worker = Worker(Job("killed", takes, (), {"mib": 1}))
    assert worker._process.pid is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.join()
    with pytest.raises(LmlabError, match="`killed` ended with status -9") as told:
        worker.seconds(1)
    assert told.value.exit_code == 1
