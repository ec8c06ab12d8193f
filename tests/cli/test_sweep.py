"""`lmlab sweep` from the outside: each run trained once, whoever is killed; failures shown; seeds that extend."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli.app import run as lmlab
from lmlab.runs import metrics
from lmlab.runs.find import list_runs
from lmlab.runs.rundir import RunDir

GRID = ["norm=rmsnorm,layernorm", "pos=rope,alibi"]


@pytest.fixture
def sweep(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """sweep(*words) → (exit status, stdout, stderr) of a small sweep in tmp_path/runs, in this process."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            status = lmlab(["sweep", *only(small, words), *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return (status, *capfd.readouterr())

    return call


def only(small: Sequence[str], words: Sequence[str]) -> list[str]:
    """The small experiment without the keys that `words` set."""
    keys = {w.partition("=")[0] for w in words}
    return [w for w in small if w.partition("=")[0] not in keys]


def start(small: list[str], folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """The same as a process of its own."""
    log = (folder / "said.txt").open("ab")
    command, env = as_process(small, words)
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env, start_new_session=True)


def as_process(small: list[str], words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(command, environment)."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "lmlab", "sweep", *only(small, words), *words]
    return command, {**os.environ, "PYTHONPATH": str(root)}


def states(folder: Path) -> dict[str, str]:
    return {run.name: run.state() for run in list_runs(folder / "runs")}


def plan(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "runs" / "sweeps").glob("*/sweep.json")
    return json.loads(path.read_text())


def trained_once(folder: Path, steps: int) -> None:
    """Every run is finished, with each logged step once, and no part of it was computed by two processes."""
    for run in list_runs(folder / "runs"):
        rows = [row["step"] for row in metrics.read(run.metrics_path)]
        assert run.state() == "finished"
        assert rows == sorted(set(rows))
        assert rows[-1] == steps
        begun = [s["from_step"] for s in run.manifest()["sessions"]]
        assert begun == sorted(begun)
        assert run.manifest()["test_evaluations"] == 1


def test_a_grid_is_trained_listed_and_not_trained_again(sweep: Any, tmp_path: Path) -> None:
    status, said, _ = sweep(*GRID, "--workers", "2", "wandb.mode=offline")
    assert status == 0
    assert "4 finished" in said
    assert set(states(tmp_path).values()) == {"finished"}
    assert {a["label"] for a in plan(tmp_path)["arms"].values()} == {
        f"norm={n} pos={p}" for n in ("rmsnorm", "layernorm") for p in ("rope", "alibi")
    }
    trained_once(tmp_path, 20)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/m*")}
    status, said, told = sweep(*GRID)
    assert (status, {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/m*")}) == (0, times)
    assert told.count("(was there)") == 4
    assert_mirrored(tmp_path)
    assert not [p.name for p in tmp_path.iterdir() if p.name != "runs"]


def assert_mirrored(folder: Path) -> None:
    """The sweep is the group in W&B and what differs are tags."""
    from tests.runs.wandb_file import read

    (sweep,) = (folder / "runs" / "sweeps").iterdir()
    for run in list_runs(folder / "runs"):
        (path,) = run.path.glob("wandb/offline-run-*/*.wandb")
        begun = read(path)
        assert begun.group == sweep.name
        norm, pos = (run.config()[group]["name"] for group in ("norm", "pos"))
        assert begun.tags == [f"norm={norm}", f"pos={pos}"]


@pytest.mark.slow
def test_more_seeds_extend_the_sweep(sweep: Any, tmp_path: Path) -> None:
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=4")[0] == 0
    first = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/metrics.jsonl")}
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=4", "--seeds", "2")[0] == 0
    assert len(states(tmp_path)) == 4
    assert {p: p.stat().st_mtime_ns for p in first} == first
    assert sorted((m["seed"], m["overrides"][-1]) for m in plan(tmp_path)["members"])[2:] == [(1, "seed=1")] * 2


def test_the_dry_run_prints_the_plan_and_writes_no_run(sweep: Any, tmp_path: Path) -> None:
    status, said, _ = sweep(*GRID, "--seeds", "3", "--dry-run")
    assert status == 0
    assert "12 runs, 12 to train: about " in said
    rows = [line for line in said.splitlines() if line.startswith("norm=")]
    assert [re.split(r"  +", row)[:3] for row in rows] == [
        [f"norm={n} pos={p}", "0,1,2", "3 planned"] for n in ("rmsnorm", "layernorm") for p in ("rope", "alibi")
    ]
    assert "33.5k" in rows[0]
    assert "33.6k (+0.5%)" in rows[2]
    assert not (tmp_path / "runs").exists()


FAILING = '''
"""A norm that fails before its first step."""
from dataclasses import dataclass
import torch
from lmlab.model.norm import RMSNorm
from lmlab.model.spec import RMSNorm as RMSNormSpec
from lmlab.registry import option
CALLS = []

@option("norm", "fails", build="fails:Fails")
class FailsSpec(RMSNormSpec):
    pass

class Fails(RMSNorm):
    def forward(self, x):
        if self.training and x.device.type == "cpu" and torch.is_grad_enabled():
            CALLS.append(1)
            if len(CALLS) > 5:
                raise RuntimeError("the norm is unwell")
        return super().forward(x)
'''


@pytest.mark.slow
def test_one_failing_and_one_diverging_run_neither_stop_nor_hide_the_others(sweep: Any, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    words = ["plugins=[fails.py]", "norm=fails,rmsnorm", "optim.lr=1e-3,1e30", "optim.clip=null", "--workers", "2"]
    status, said, _ = sweep(*words)
    assert status == 1
    assert "1 finished" in said
    assert "1 diverged" in said
    assert "2 failed" in said
    failed = [line for line in said.splitlines() if line.startswith("norm=fails")]
    assert len(failed) == 2
    assert all("RuntimeError: the norm is unwell" in line for line in failed)
    log = Path(re.split(r"  +", failed[0])[-1])
    assert "Traceback (most recent call last)" in log.read_text()
    assert "the norm is unwell" in log.read_text()
    before = {name: state for name, state in states(tmp_path).items() if state == "failed"}
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/metrics.jsonl")}
    assert sweep(*words)[0] == 1  # nothing is tried again by itself
    assert {p: p.stat().st_mtime_ns for p in times} == times
    (tmp_path / "fails.py").write_text(FAILING.replace("> 5", "> 10**9"))
    status, said, _ = sweep(*words, "--retry-failed")
    assert "failed" not in said
    assert len(before) == 2


def wait_for(true: Any, within_s: float = 90) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_sweep_and_worker_then_two_sweeps_at_once_train_each_run_once(small: list[str], tmp_path: Path) -> None:
    words = [*GRID, "train.max_steps=200", "train.checkpoint_every_steps=10"]
    first = start(small, tmp_path, *words, "--workers", "2")
    wait_for(lambda: sum(len(run.checkpoints()) > 0 for run in list_runs(tmp_path / "runs")) >= 2)
    worker = next(run.manifest()["pid"] for run in list_runs(tmp_path / "runs") if run.state() == "running")
    os.kill(worker, signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert set(states(tmp_path).values()) != {"finished"}
    both = [start(small, tmp_path, *words) for _ in range(2)]
    assert [one.wait(timeout=240) for one in both] == [0, 0]
    assert len(states(tmp_path)) == 4
    trained_once(tmp_path, 200)
    resumed = [run for run in list_runs(tmp_path / "runs") if len(run.manifest()["sessions"]) > 1]
    assert resumed
    assert all(s["from_step"] > 0 for run in resumed for s in run.manifest()["sessions"][1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_stopped_sweep_saves_and_goes_on(small: list[str], tmp_path: Path, number: int, status: int) -> None:
    words = ["norm=rmsnorm,layernorm", "train.max_steps=100000", "--workers", "2"]
    one = start(small, tmp_path, *words)
    wait_for(lambda: sum(run.metrics_path.exists() for run in list_runs(tmp_path / "runs")) == 2)
    time.sleep(1)
    os.kill(one.pid, number)
    assert one.wait(timeout=60) == status
    assert set(states(tmp_path).values()) == {"stopped"}
    assert all(run.checkpoints() for run in list_runs(tmp_path / "runs"))


@pytest.mark.slow
def test_force_trains_all_anew_and_keeps_the_old(sweep: Any, tmp_path: Path) -> None:
    sweep("norm=rmsnorm,layernorm", "train.max_steps=2")
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=2", "--force")[0] == 0
    names = sorted(states(tmp_path))
    assert len(names) == 4
    assert sum(name.endswith(".old-1") for name in names) == 2


@pytest.mark.slow
def test_stale_runs_are_shown_and_trained_anew(sweep: Any, tmp_path: Path) -> None:
    sweep("norm=rmsnorm,layernorm", "train.max_steps=2")
    run = next(r for r in list_runs(tmp_path / "runs") if "layernorm" in r.name)
    RunDir(run.path).update_manifest(code_hash="other")
    assert "1 stale" in sweep("norm=rmsnorm,layernorm", "train.max_steps=2", "--dry-run")[1]
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=2", "--reuse-stale")[2].count("(was there)") == 2
    told = sweep("norm=rmsnorm,layernorm", "train.max_steps=2")[2]
    assert told.count("(was there)") == 1
    assert (tmp_path / "runs" / f"{run.name}.old-1").is_dir()


@pytest.mark.slow
def test_json_tells_each_members_end(sweep: Any, tmp_path: Path) -> None:
    status, said, _ = sweep("norm=rmsnorm,layernorm", "train.max_steps=2", "--json")
    told = json.loads(said)
    assert status == 0
    assert [(m["member"], m["state"]) for m in told["members"]] == [
        ("norm=rmsnorm seed=0", "finished"), ("norm=layernorm seed=0", "finished")
    ]  # fmt: skip
    assert all(Path(m["run"]).is_dir() for m in told["members"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_hydras_launchers_run_the_same_members(sweep: Any, small: list[str], tmp_path: Path, launcher: str) -> None:
    """In a process of its own: launchers send their workers all options that are known, and those of other tests lie in
    files that workers can't find."""
    words = ("norm=rmsnorm,layernorm", "train.max_steps=2", f"hydra/launcher={launcher}")
    command, env = as_process(small, words)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 finished" in done.stdout
    trained_once(tmp_path, 2)
    assert not [p.name for p in tmp_path.iterdir() if p.name != "runs"]
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=2")[2].count("(was there)") == 2


@pytest.mark.slow
def test_optuna_draws_members_and_finds_the_best(sweep: Any, tmp_path: Path) -> None:
    status, said, _ = sweep(
        "lr=interval(1e-4,1e-2)", "norm=rmsnorm,layernorm", "train.max_steps=4", "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1",
    )  # fmt: skip
    assert status == 0
    assert "3 finished" in said
    losses = {run.config()["optim"]["lr"]: run.manifest()["result"]["val/loss"] for run in list_runs(tmp_path / "runs")}
    (path,) = (tmp_path / "runs" / "sweeps").glob("*/optimization_results.yaml")
    best = float(re.search(r"best_value: (\S+)", path.read_text())[1])  # type: ignore[index]
    assert best == min(losses.values())
    assert len(plan(tmp_path)["members"]) == 3


@pytest.mark.slow
def test_hydras_basic_sweeper_gives_the_same_runs(sweep: Any, tmp_path: Path) -> None:
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=2", "hydra/sweeper=basic")[0] == 0
    assert sweep("norm=rmsnorm,layernorm", "train.max_steps=2")[2].count("(was there)") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attn=mha,gqa", "attn.n_kv_heads=2"], "of the sweep's members: attn=mha"),
        (["norm=rmsnorm,layernorm", "--baseline", "norm=none"], "--baseline norm=none is not an arm of this sweep"),
        (["norm=rmsnorm,layernorm", "hydra/launcher=slow"], "`hydra/launcher=slow` is not known; choices: basic"),
        (["norm=rmsnorm,layernorm", "hydra/launcher=joblib", "--workers", "2"], "--workers 2 is of lmlab's own"),
        (["lr=1e-3", "hydra/sweeper=optuna", "--seeds", "2"], "--seeds 2 multiplies a grid"),
        (["norm=rmsnorm,layernorm", "train.micro_batch=auto,8", "data.files=[nothing.txt]"], "nothing.txt"),
        (["norm=rmsnorm,layernorm", "--gpus", "98,99"], "--gpus names 98, and torch sees no such GPU here"),
        (["norm=rmsnorm,layernorm", "--gpus", "0", "device=cpu"], "--gpus 0 and device=cpu contradict each other"),
        (["experiment=none"], "there is no experiments/none/sweep.yaml"),
        (["norm=rmsnorm,layernorm", "--seeds", "0"], "invalid value for '--seeds'"),
    ],
)
def test_what_can_not_be_swept_is_refused_before_it_starts(sweep: Any, tmp_path: Path, words: Any, said: str) -> None:
    status, out, told = sweep(*words)
    assert status == 2
    assert out == ""
    assert said in told
    assert "Traceback" not in told
    assert not list_runs(tmp_path / "runs")


def test_seeds_that_are_set_apart_make_one_arm(sweep: Any, tmp_path: Path) -> None:
    said = sweep("norm=rmsnorm,layernorm", "seed.init=1,2", "--seeds", "2", "--dry-run")[1]
    rows = [re.split(r"  +", line)[:3] for line in said.splitlines() if line.startswith("norm=")]
    assert rows == [
        [f"norm={n}", "0 init=1, 1 init=1, 0 init=2, 1 init=2", "4 planned"] for n in ("rmsnorm", "layernorm")
    ]


def test_a_plan_as_json_is_nothing_but_json(sweep: Any, tmp_path: Path) -> None:
    status, said, _ = sweep("norm=rmsnorm,layernorm", "--json", "--dry-run")
    told = json.loads(said)
    assert status == 0
    assert [(a["arm"], a["parameters"], a["steps"]) for a in told["arms"]] == [
        ("norm=rmsnorm", 33472, 20), ("norm=layernorm", 33632, 20)
    ]  # fmt: skip
    assert all(m["run"] for m in told["members"])


DYING = FAILING.replace('raise RuntimeError("the norm is unwell")', "__import__('ctypes').string_at(0)")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "joblib"])
def test_a_member_whose_process_dies_has_failed_after_its_tries(small: Any, tmp_path: Path, launcher: str) -> None:
    (tmp_path / "fails.py").write_text(DYING)
    words = ["plugins=[fails.py]", "norm=fails,rmsnorm", f"hydra/launcher={launcher}"]
    assert start(small, tmp_path, *words).wait(timeout=240) == 1
    said = (tmp_path / "said.txt").read_text()
    assert "1 finished" in said
    assert "before any run begins" not in said
    (row,) = [line for line in said.splitlines() if line.startswith("norm=fails") and "log.txt" in line]
    assert "failed" in row
    if launcher == "local":
        assert "its process was killed by SIGSEGV, 3 times" in row
        assert "Segmentation fault" in (tmp_path / re.split(r"  +", row)[-1]).read_text()
        (ledger,) = (tmp_path / "runs").glob("sweeps/*/ledger.jsonl")
        before = ledger.read_text()
        assert start(small, tmp_path, *words).wait(timeout=240) == 1
        assert ledger.read_text() == before  # it is not tried again by itself


@pytest.mark.slow
def test_a_run_with_a_damaged_manifest_is_told_and_force_trains_it_anew(sweep: Any, tmp_path: Path) -> None:
    words = ("norm=rmsnorm,layernorm", "train.max_steps=2")
    sweep(*words)
    run = list_runs(tmp_path / "runs")[0]
    (run.path / "manifest.json").write_text("{")
    status, said, _ = sweep(*words)
    assert status == 1
    assert "manifest.json can't be read" in said
    assert sweep(*words, "--force")[0] == 0
    assert (run.path.parent / f"{run.name}.old-1" / "manifest.json").read_text() == "{"


def test_too_little_memory_for_one_arm_names_it(sweep: Any, tmp_path: Path) -> None:
    status, _, told = sweep("model.d_model=32,262144", "norm=rmsnorm")
    assert status == 2
    assert "model.d_model=262144" in told
    assert "needs about" in told
