from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmlab.runs import wandb_file, wandb_mirror
from lmlab.runs.claim import is_claimed
from lmlab.runs.metrics import Metrics
from lmlab.runs.metrics import scan as metrics_scan
from lmlab.runs.wandb_mirror import Mirror
from lmlab.runs.wandb_run import Mark, own_service, short_tags
from tests.runs.wandb_file import Offline, offline_files
from tests.runs.wandb_file import read as read_now

CONFIG = {"version": 1, "norm": {"name": "rmsnorm", "eps": 1e-06}, "optim": {"betas": [0.9, 0.95]}, "name": None}
SPEC: dict[str, Any] = {"mode": "offline", "project": "proj", "entity": None, "group": None, "tags": [], "notes": "why"}
ROWS = [{"step": s, "train/loss": 1 / s, "val/loss": None, "probe/0/rms": 0.5 + s} for s in range(1, 8)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_mirror, "_said", set())


def start(run: Path, said: list[str] | None = None, **spec: Any) -> Mirror:
    note = None if said is None else said.append
    extra = {"group": "sweep-1", "tags": ["a b", "c"], "note": note}
    return wandb_mirror.start(SPEC | spec, run_path=run, run_id="0123abcd", name="the-run", config=CONFIG, **extra)


def read(path: Path) -> Offline:
    """The file once W&B's service has written all of it, which it does a moment after `finish` returned."""
    deadline = time.monotonic() + 10
    while (found := read_now(path)).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def logged(row: dict[str, Any]) -> dict[str, Any]:
    """A history row without what W&B adds."""
    return {key: value for key, value in row.items() if not key.startswith("_")}


def test_offline_file_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    run = tmp_path / "run"
    mirror = start(run)
    for row in ROWS:
        mirror.log(row)
    mirror.finish({"val/loss": 1.25, "test/bits_per_byte": float("nan"), "path": run}, 3)
    found = read(offline_files(run)[0])
    assert found.config == CONFIG
    assert [logged(row) for row in found.rows] == ROWS
    assert [row["_step"] for row in found.rows] == [row["step"] for row in ROWS]
    assert found.step_metric["*"] == "step"
    assert found.summary["val/loss"] == 1.25
    assert found.summary["test/bits_per_byte"] is None
    assert found.exit_code == 3
    assert (found.name, found.group, found.project, found.notes, found.tags) == (
        "the-run", "sweep-1", "proj", "why", ["a b", "c"],
    )  # fmt: skip
    assert found.id.startswith("0123abcd-")
    assert list((tmp_path / "cwd").iterdir()) == []
    assert [p.name for p in run.iterdir()] == ["wandb"]


def test_resumed_run_sends_what_was_missed_and_nothing_twice(tmp_path: Path) -> None:
    """Rows 1–4 in the first life; the file then holds 1–3 and 5 (never mirrored); the second life logs 4, 5, 6, 7."""
    mirror = start(tmp_path)
    for row in ROWS[:4]:
        mirror.log(row)
    mirror.finish({}, 130)
    with Metrics(tmp_path / "metrics.jsonl") as rows:
        for row in (*ROWS[:3], ROWS[4]):
            rows.append(row)
    mirror = start(tmp_path)
    for row in ROWS[3:]:
        mirror.log(row)
    mirror.finish({}, 0)
    first, second = (read(path) for path in offline_files(tmp_path))
    assert first.id == second.id
    assert [row["step"] for row in first.rows + second.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert (first.exit_code, second.exit_code) == (130, 0)


def test_run_set_aside_and_trained_anew_has_another_id(tmp_path: Path) -> None:
    for name in ("a", "b"):
        start(tmp_path / name).finish({}, 0)
    ids = {read(offline_files(tmp_path / name)[0]).id for name in ("a", "b")}
    assert len(ids) == 2


def test_starting_and_logging_take_no_time(tmp_path: Path) -> None:
    started = time.perf_counter()
    mirror = start(tmp_path)
    for step in range(1000):
        mirror.log({"step": step})
    assert time.perf_counter() - started < 0.5
    mirror.finish({}, 0)


KILLED = """
import json, sys, time
from pathlib import Path
from lmlab.runs import wandb_mirror
from lmlab.runs.rundir import RunDir
run = RunDir(sys.argv[1])
with run.claim():
    mirror = wandb_mirror.start({"mode": "offline"}, run_path=run.path, run_id="0123abcd", name="n", config={})
    for step in (1, 2, 3, 4): mirror.log({"step": step})
    mark = run.path / "wandb" / "mirror.json"
    while not (mark.exists() and json.loads(mark.read_text())["step"] == 4): time.sleep(0.02)
    time.sleep(1.5)  # W&B writes every second; what it has not written dies with the process
    print("ready", flush=True)
    time.sleep(60)
"""


def test_killed_run_leaves_no_process_that_holds_the_claim(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert is_claimed(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not is_claimed(tmp_path)
    assert on_disk(tmp_path) == [1, 2, 3, 4]


FAST = """
import sys, time
from pathlib import Path
from lmlab.runs import wandb_mirror
from lmlab.runs.metrics import Metrics
run, last = Path(sys.argv[1]), int(sys.argv[2])
with Metrics(run / "metrics.jsonl") as rows:
    mirror = wandb_mirror.start({"mode": "offline"}, run_path=run, run_id="0123abcd", name="n", config={})
    for step in range((rows.last_step or 0) + 1, last + 1):
        rows.append({"step": step, "train/loss": 1 / step})
        mirror.log({"step": step, "train/loss": 1 / step})
        time.sleep(0.002)
mirror.finish({}, 0)
"""


def on_disk(run: Path) -> list[int]:
    return [row["step"] for path in offline_files(run) for row in read_now(path).rows]


def children_of(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = (map(int, line.split()) for line in listing.splitlines())
    return [child for child, parent in pairs if parent == pid]


@pytest.mark.parametrize("with_its_service", [False, True], ids=["killed", "killed_with_its_service"])
def test_killed_and_resumed_run_has_every_step_once(tmp_path: Path, with_its_service: bool) -> None:
    """Killed in full writing, once the file holds rows and others are on their way to it."""
    command = [sys.executable, "-c", FAST, str(tmp_path)]
    process = subprocess.Popen([*command, "100000"])
    while not (offline_files(tmp_path) and on_disk(tmp_path)):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.7)
    victims = [process.pid, *(children_of(process.pid) if with_its_service else [])]
    assert len(victims) == 1 + with_its_service
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    process.wait()
    logged_before = metrics_scan(tmp_path / "metrics.jsonl").rows[-1]["step"]
    assert len(on_disk(tmp_path)) < logged_before, "the file held every row: the kill proved nothing"
    subprocess.run([*command, str(logged_before + 50)], check=True)
    read(offline_files(tmp_path)[-1])
    assert len(offline_files(tmp_path)) == 2
    assert on_disk(tmp_path) == list(range(1, logged_before + 51))


def test_run_begun_before_another_has_ended_keeps_its_own_rows(tmp_path: Path) -> None:
    """As when one was left behind as too slow: W&B's own default gives the second the first's run."""
    first = start(tmp_path / "a")
    first.log(ROWS[0])
    wait_for_mark(tmp_path / "a", 1)
    second = start(tmp_path / "b")
    second.log(ROWS[1])
    second.finish({}, 0)
    first.log(ROWS[2])
    first.finish({}, 0)
    for name in ("a", "b"):
        read(offline_files(tmp_path / name)[0])
    assert (on_disk(tmp_path / "a"), on_disk(tmp_path / "b")) == ([1, 3], [2])


def wait_for_mark(run: Path, step: int) -> None:
    deadline = time.monotonic() + 10
    while Mark.of(run, "0123abcd").step < step and time.monotonic() < deadline:
        time.sleep(0.02)


def test_service_of_a_parent_process_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, kept in ((os.getpid(), True), (os.getppid(), False)):
        monkeypatch.setenv("WANDB_SERVICE", f"3-{pid}-unix-/tmp/socket")
        own_service()
        assert ("WANDB_SERVICE" in os.environ) == kept


def test_segment_that_was_cleaned_away_is_not_sent_again(tmp_path: Path) -> None:
    mirror = start(tmp_path)
    for row in ROWS[:4]:
        mirror.log(row)
    mirror.finish({}, 130)
    read(offline_files(tmp_path)[0])
    shutil.rmtree(offline_files(tmp_path)[0].parent)
    mirror = start(tmp_path)
    for row in ROWS:
        mirror.log(row)
    mirror.finish({}, 0)
    read(offline_files(tmp_path)[0])
    assert on_disk(tmp_path) == [5, 6, 7]


@pytest.mark.parametrize("cut", [1, 30, 200], ids=str)
def test_torn_end_of_the_file_is_passed_over(tmp_path: Path, cut: int) -> None:
    mirror = start(tmp_path)
    for row in ROWS:
        mirror.log(row)
    mirror.finish({}, 0)
    read(path := offline_files(tmp_path)[0])
    whole = path.read_bytes()
    assert wandb_file.steps(path) == ([1, 2, 3, 4, 5, 6, 7], True)
    path.write_bytes(whole[:-cut])
    found, ended = wandb_file.steps(path)
    assert found == list(range(1, len(found) + 1))
    assert not ended
    damaged = bytearray(whole)
    damaged[whole.index(b"probe/0/rms") + 3] ^= 1
    path.write_bytes(damaged)
    assert wandb_file.steps(path) == ([], False)
    path.write_bytes(b"")
    assert wandb_file.steps(path) == ([], False)


def test_sweep_members_share_group_and_step_metric_and_keep_their_tags(tmp_path: Path) -> None:
    """What W&B refuses (empty tags, more than 64 characters) is left out or shortened, and the ends tell them apart."""
    long = "attn.pattern=[" + ",".join("SSSL" * 6) + "]" + "x" * 40
    members = {
        "a": (["norm=rmsnorm", "attn.pattern=[S,S,L]", ""], ["norm=rmsnorm", "attn.pattern=[S,S,L]"]),
        "b": (["norm=layernorm", "norm=layernorm", "  ", "é" * 64], ["norm=layernorm", "é" * 64]),
    }
    for name, (tags, _) in members.items():
        mirror = wandb_mirror.start(
            SPEC, run_path=tmp_path / name, run_id="0123abcd", name=name, config=CONFIG, group="sweep-1", tags=tags
        )
        mirror.log(ROWS[0])
        mirror.finish({}, 0)
    for name, (_, expected) in members.items():
        found = read(offline_files(tmp_path / name)[0])
        assert (found.name, found.group, found.tags) == (name, "sweep-1", expected)
        assert found.step_metric == {"step": "", "*": "step"}
    first, second = short_tags([long + "1", long + "2"])
    assert len(first) == len(second) == 64
    assert first != second
    assert first[:56] == second[:56] == long[:56]


# ---------------------------------------------------------------- what can go wrong


def test_without_wandb_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    for name in ("a", "b"):
        mirror = start(tmp_path / name, said)
        mirror.log(ROWS[0])
        mirror.finish({}, 0)
    assert said == ["W&B is not installed: nothing is mirrored (wandb.mode=disabled says so for good)"]


def test_without_a_key_auto_is_offline_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    said: list[str] = []
    for name in ("a", "b"):
        mirror = start(tmp_path / name, said, mode="auto")
        mirror.log(ROWS[0])
        mirror.finish({}, 0)
        assert len(read(offline_files(tmp_path / name)[0]).rows) == 1
    assert len(said) == 1
    assert said[0].startswith("W&B: no key, so offline")


@pytest.mark.parametrize(
    ("mode", "environment", "becomes"),
    [
        ("auto", None, "auto"),
        ("auto", "disabled", "disabled"),
        ("auto", "offline", "offline"),
        ("auto", "dryrun", "offline"),
        ("auto", "online", "online"),
        ("disabled", "online", "disabled"),
        ("offline", "online", "offline"),
        ("online", "disabled", "online"),
    ],
)
def test_mode(monkeypatch: pytest.MonkeyPatch, mode: str, environment: str | None, becomes: str) -> None:
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    monkeypatch.delenv("WANDB_MODE") if environment is None else monkeypatch.setenv("WANDB_MODE", environment)
    assert wandb_mirror.resolve_mode(mode) == becomes


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    mirror = start(tmp_path / "run", mode="disabled")
    mirror.log(ROWS[0])
    mirror.finish({}, 0)
    assert list(tmp_path.iterdir()) == []


NO_NETWORK = """
import sys
from pathlib import Path
from lmlab.runs import wandb_mirror, wandb_run
wandb_run.QUIET["init_timeout"] = 1
mirror = wandb_mirror.start({"mode": "online"}, run_path=Path(sys.argv[1]), run_id="0123abcd", name="n", config={})
for step in (1, 2, 3): mirror.log({"step": step})
mirror.finish({"val/loss": 2.0}, 0)
"""


def test_no_network_goes_on_offline(tmp_path: Path) -> None:
    """In a process of its own: W&B reads where its server is only once."""
    environment = os.environ | {
        "WANDB_API_KEY": "0" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "HOME": str(tmp_path),
    }
    run = tmp_path / "run"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, str(run)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "offline, later: lmlab runs upload" in done.stderr
    found = read(offline_files(run)[-1])
    assert [row["step"] for row in found.rows] == [1, 2, 3]
    assert found.exit_code == 0


def test_failing_mirror_never_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Mirror, "_send", broken)
    said: list[str] = []
    mirror = start(tmp_path, said)
    mirror.log(ROWS[0])
    mirror.finish({}, 0)
    mirror.finish({}, 0)
    assert said == ["W&B mirrors nothing more: no space (the run goes on)"]
    (tmp_path / "file").write_text("")
    start(tmp_path / "file", said).finish({}, 0)


def test_slow_mirror_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "_init", lambda self: time.sleep(5))
    monkeypatch.setitem(wandb_mirror.FINISH_TIMEOUT_S, "offline", 0.05)
    said: list[str] = []
    started = time.perf_counter()
    start(tmp_path, said).finish({}, 0)
    assert time.perf_counter() - started < 1
    assert "was left behind" in said[0]
