"""The pool with small made-up work: crashes, tries, other holders, stops, and children that outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmlab.errors import ConfigError, TrainingFailed
from lmlab.runs.claim import Claim
from lmlab.sweep import pool
from lmlab.sweep.pool import TRIES, Job, Outcome, Pool
from lmlab.sweep.slots import Slot


class Heard:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.began_, self.done_, self.held_, self.most = [], [], [], 0
        self.at_tick = lambda: None

    def ended(self, job: Job) -> Outcome | None:
        return Outcome("finished", error="was there") if job.name == "made" else None

    def began(self, job: Job, slot: Slot) -> None:
        self.began_.append((job.name, slot.number))

    def held(self, job: Job) -> None:
        self.held_.append(job.name)

    def done(self, job: Job, *, again: bool = False) -> None:
        assert job.outcome is not None
        self.done_.append((job.name, job.outcome.state, again))

    def tick(self, running: Sequence[Job], waiting: Sequence[Job]) -> None:
        self.most = max(self.most, len(running))
        self.at_tick()


def work(words: list[str], slot: Slot) -> Outcome:
    """`loss X`, `die`, `die-once FILE`, `busy-once FILE`, `sleep FILE`."""
    kind, *rest = words
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.endswith("-once") and not Path(rest[0]).exists():
        Path(rest[0]).touch()
        if kind == "busy-once":
            return Outcome("busy")
        os._exit(7)
    if kind == "sleep":
        Path(rest[0]).write_text(str(os.getpid()))
        time.sleep(60)
    print("said", words)
    return Outcome("finished", loss=float(rest[0]) if kind == "loss" else 1.0)


def jobs(*words: str) -> list[Job]:
    return [Job(w.split(), w) for w in words]


def run(made: list[Job], n: int = 2) -> Heard:
    heard = Heard()
    Pool(work, [Slot(i) for i in range(n)], heard).run(made)
    return heard


def test_every_job_comes_back_with_its_outcome() -> None:
    made = jobs("loss 1", "loss 2", "loss 3")
    heard = run(made)
    assert [j.outcome and j.outcome.loss for j in made] == [1.0, 2.0, 3.0]
    assert heard.most <= 2
    assert [name for name, _ in heard.began_] == ["loss 1", "loss 2", "loss 3"]


def test_a_job_whose_process_dies_is_tried_thrice_and_takes_nothing_with_it() -> None:
    made = jobs("die", "loss 2")
    heard = run(made)
    assert made[0].outcome == Outcome("killed", None, None, "its process was killed by SIGKILL")
    assert made[1].outcome is not None
    assert made[1].outcome.loss == 2.0
    assert [d for d in heard.done_ if d[0] == "die"] == [("die", "killed", True)] * (TRIES - 1) + [
        ("die", "killed", False)
    ]


def test_a_second_try_can_succeed(tmp_path: Path) -> None:
    made = jobs(f"die-once {tmp_path}/x")
    run(made, n=1)
    assert made[0].outcome is not None
    assert made[0].outcome.state == "finished"
    assert made[0].tries == 2


def test_being_busy_is_no_try(tmp_path: Path) -> None:
    made = jobs(f"busy-once {tmp_path}/x")
    run(made, n=1)
    assert made[0].outcome is not None
    assert made[0].outcome.state == "finished"
    assert made[0].tries == 1


def test_what_ended_before_is_not_run() -> None:
    made = jobs("made")
    heard = run(made)
    assert heard.began_ == []
    assert made[0].outcome == Outcome("finished", error="was there")


def test_a_job_that_another_process_holds_waits_for_it(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "held")
    made = [Job(["loss", "1"], "held", tmp_path / "held"), *jobs("loss 2")]
    heard = Heard()
    ticks = []

    def release_later() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            claim.release()

    heard.at_tick = release_later
    Pool(work, [Slot(0)], heard).run(made)
    assert [name for name, _ in heard.began_] == ["loss 2", "held"]
    assert len(ticks) >= 3
    assert set(heard.held_) == {"held"}


def test_what_a_child_prints_goes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.txt"
    Pool(work, [Slot(0)], Heard(), lambda job: log).run(jobs("loss 1"))
    assert log.read_text() == "said ['loss', '1']\n"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_stop_ends_the_children(tmp_path: Path, error: type[BaseException]) -> None:
    heard, mark = Heard(), tmp_path / "pid"

    def stop() -> None:
        if mark.exists() and mark.read_text():
            raise error

    heard.at_tick = stop
    with pytest.raises(error):
        Pool(work, [Slot(0)], heard).run(jobs(f"sleep {mark}"))
    assert gone(int(mark.read_text()))


def test_children_end_when_the_pool_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        "from tests.sweep.test_pool import *\n"
        f"if __name__ == '__main__':\n    Pool(work, [Slot(0)], Heard()).run(jobs('sleep {mark}'))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert gone(int(mark.read_text()))


SAVES = """
import os, signal, sys, time
from pathlib import Path
from tests.sweep.test_pool import *

class Saves:
    def __call__(self, words, slot):
        got = []
        signal.signal(signal.SIGTERM, lambda *a: got.append(1))
        Path(words[0]).write_text(str(os.getpid()))
        while not got:
            time.sleep(0.05)
        time.sleep(1.5)  # a checkpoint takes its time
        Path(words[0]).write_text(f"saved after {len(got)}")
        return Outcome("stopped")
"""


@pytest.mark.parametrize("to", ["group", "process"])
def test_a_signal_to_the_whole_group_reaches_a_child_once_and_lets_it_save(tmp_path: Path, to: str) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "saving.py").write_text(SAVES)
    code = (
        "from lmlab.cli.sweep_run import stoppable\nfrom saving import *\n"
        "if __name__ == '__main__':\n    with stoppable():\n"
        f"        Pool(Saves(), [Slot(0)], Heard()).run([Job([{str(mark)!r}], 'x')])\n"
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (os.killpg if to == "group" else os.kill)(parent.pid, signal.SIGTERM)
    assert parent.wait(timeout=30) == 143
    assert mark.read_text() == "saved after 1"


HANGS = """
from tests.sweep.test_pool import *
import lmlab.sweep.pool

class Hangs:
    def __call__(self, words, slot):
        lmlab.sweep.pool.ORPHAN_S = 1.0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return work(words, slot)
"""


def test_a_hung_child_of_a_killed_pool_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ignore SIGTERM for ever: its claim must come free."""
    mark = tmp_path / "pid"
    (tmp_path / "hanging.py").write_text(HANGS)
    run_it = f"Pool(Hangs(), [Slot(0)], Heard()).run(jobs('sleep {mark}'))"
    start = f"from hanging import *\nif __name__ == '__main__':\n    {run_it}\n"
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(tmp_path)])
    parent = subprocess.Popen([sys.executable, "-c", start], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert gone(int(mark.read_text()))


def refuses() -> None:
    raise ConfigError("no", "so")


def dies() -> None:
    os._exit(3)


def test_call_returns_raises_and_tells_of_a_death() -> None:
    assert pool.call(sum, [1, 2], slot=Slot(0)) == 3
    with pytest.raises(ConfigError) as caught:
        pool.call(refuses, slot=Slot(0))
    assert (caught.value.message, caught.value.hint) == ("no", "so")
    with pytest.raises(TrainingFailed, match="status 3"):
        pool.call(dies, slot=Slot(0))
