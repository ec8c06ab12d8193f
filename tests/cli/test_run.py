"""One run from the outside: exact resume, kills, stale code, divergence, stops, and what is written where."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.cli import run_one as run_one_module
from lmlab.errors import EXIT_FAILED, LmlabError, RunError, TrainingFailed
from lmlab.runs import checkpoint, metrics
from lmlab.runs.rundir import RunDir
from lmlab.train import device
from lmlab.train.step import Stepper
from tests.cli.conftest import run_here, start_child
from tests.train.conftest import small_words

NOISY = ["model.dropout=0.1", "attn.dropout=0.1", "train.micro_batch=3", "train.log_every_steps=1"]


def with_runs(overrides: list[str], folder: Path, *more: str) -> list[str]:
    keys = {o.partition("=")[0] for o in more} | {"paths.runs"}
    return [*(o for o in overrides if o.partition("=")[0] not in keys), f"paths.runs={folder}", *more]


def training_rows(path: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock and on when validation was looked at."""
    keys = ("step", "tokens", "flops", "train/loss", "train/lr", "train/grad_norm", "train/epoch")
    return [{k: row[k] for k in keys} for row in metrics.read(path / "metrics.jsonl")]


def routing_rows(path: Path) -> list[dict[str, float]]:
    """What each row says of the routers."""
    rows = metrics.read(path / "metrics.jsonl")
    assert all("moe/0/load_max" in row and "moe/1/balance" in row for row in rows)
    return [{k: v for k, v in row.items() if k.startswith("moe/")} for row in rows]


def final_state(path: Path) -> Any:
    return checkpoint.load(RunDir.open(path).checkpoints()[-1].path)


def same_optimizer(a: Any, b: Any) -> bool:
    left, right = a.state["optimizer"], b.state["optimizer"]
    return left.keys() == right.keys() and all(torch.equal(left[n][k], right[n][k]) for n in left for k in left[n])


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Twenty steps in one go, with dropout, accumulation and evaluation. To be looked at only."""
    folder = tmp_path_factory.mktemp("whole")
    return run_here(with_runs(small_words(corpus, folder), folder, *NOISY, "train.eval_every_steps=5"))


def test_twenty_steps_are_ten_and_resume_and_ten_bit_for_bit(small: list[str], tmp_path: Path, whole: Any) -> None:
    halves = tmp_path / "halves"
    first = run_here(with_runs(small, halves, *NOISY, "train.eval_every_steps=5"), stop_at=10)
    assert (first.state, first.exit_code, first.figures["step"]) == ("stopped", 0, 10)
    again = run_here(with_runs(small, halves, *NOISY, "train.eval_every_steps=4"))
    assert "from step 10" in again.said
    assert again.state == "finished"
    assert training_rows(again.path) == training_rows(whole.path)
    assert again.figures["content_hash"] == whole.figures["content_hash"]
    assert again.figures["val/loss"] == whole.figures["val/loss"]
    assert same_optimizer(final_state(again.path), final_state(whole.path))


def test_a_router_with_jitter_dropout_and_biases_resumes_bit_for_bit(small: list[str], tmp_path: Path) -> None:
    router = ["moe=topk", "moe.balance=aux_free", "moe.bias_step=0.01", "moe.jitter=0.1", "moe.z_coef=0.001"]
    words = [*(w for w in small if not w.startswith("train.max_steps")), *NOISY, *router, "train.max_steps=8"]
    whole = run_here(with_runs(words, tmp_path / "whole"))
    run_here(with_runs(words, tmp_path / "halves"), stop_at=4)
    again = run_here(with_runs(words, tmp_path / "halves"))
    assert training_rows(again.path) == training_rows(whole.path)
    assert routing_rows(again.path) == routing_rows(whole.path)
    assert again.figures["content_hash"] == whole.figures["content_hash"]
    assert final_state(again.path).model["blocks.0.ffn.router.bias"].abs().max() > 0.005


def test_seeds_and_dropout_change_what_is_compared(small: list[str], tmp_path: Path, whole: Any) -> None:
    """The bit-for-bit test can fail: another dropout seed gives other bits."""
    other = run_here(with_runs(small, tmp_path / "other", *NOISY, "seed.dropout=5"))
    assert other.figures["content_hash"] != whole.figures["content_hash"]


@pytest.mark.slow
def test_killed_twenty_times_at_random_moments_ends_the_same(small: list[str], tmp_path: Path, whole: Any) -> None:
    overrides = with_runs(small, tmp_path / "killed", *NOISY, "train.checkpoint_every_steps=2")
    rng, kills = random.Random(0), 0
    while kills < 20:
        child = start_child(overrides)
        child.join(rng.uniform(0.05, 1.0))
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
        else:
            assert child.exitcode == 0
            shutil.rmtree(tmp_path / "killed")  # it came through: begin again, until 20 kills are spent
    done = run_here(overrides)
    steps = [row["step"] for row in metrics.read(done.path / "metrics.jsonl")]
    assert steps == list(range(1, 21))
    assert done.figures["content_hash"] == whole.figures["content_hash"]
    assert training_rows(done.path) == training_rows(whole.path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_the_rename_of_each_checkpoint(small: list[str], tmp_path: Path, whole: Any, moment: str) -> None:
    overrides = with_runs(small, tmp_path / "renames", *NOISY, "train.checkpoint_every_steps=5")
    rename = os.rename

    def deadly(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        published = re.fullmatch(r"step-\d{8}", Path(target).name) is not None
        if published and moment == "before":
            os._exit(99)
        rename(source, target, *args, **kwargs)
        if published:
            os._exit(99)

    def arm() -> None:
        os.rename = deadly  # type: ignore[assignment]

    codes = []
    for _ in range(4):
        child = start_child(overrides, arm)
        child.join()
        codes.append(child.exitcode)
    run = RunDir.open(next((tmp_path / "renames").iterdir()))
    assert codes == [99] * 4
    assert [c.step for c in run.checkpoints()] == (
        [] if moment == "before" else [5, 10, 15, 20]
    )  # killed before pruning
    done = run_here(overrides)
    assert done.figures["content_hash"] == whole.figures["content_hash"]
    assert training_rows(done.path) == training_rows(whole.path)


def test_finished_run_is_reported_not_trained(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_here(small)
    monkeypatch.setattr(Stepper, "__call__", lambda *a, **k: pytest.fail("trained again"))
    again = run_here([*small, "name=another", "train.log_every_steps=3"])  # neither is part of the experiment
    assert again.path == first.path
    assert "\nfinished: " in "\n" + again.said
    assert again.figures["content_hash"] == first.figures["content_hash"]


def test_force_trains_again_and_keeps_the_old_run(small: list[str]) -> None:
    first = run_here(small)
    again = run_here(small, force=True)
    old = RunDir.open(first.path.with_name(first.path.name + ".old-1"))
    assert old.manifest()["result"]["content_hash"] == again.figures["content_hash"]
    assert RunDir.open(first.path).manifest()["started"] > old.manifest()["started"]


@pytest.mark.parametrize("stop_at", [None, 10])
def test_other_code_makes_a_run_stale_and_trains_anew(
    small: list[str], monkeypatch: pytest.MonkeyPatch, stop_at: int | None
) -> None:
    first = run_here(small, stop_at=stop_at)
    monkeypatch.setattr(run_one_module, "code_hash", lambda plugins: "0123456789abcdef")
    reused = run_here(small, reuse_stale=True)
    assert "stale" in reused.said
    assert not first.path.with_name(first.path.name + ".old-1").exists()
    monkeypatch.setattr(run_one_module, "code_hash", lambda plugins: "fedcba9876543210")
    anew = run_here(small)
    assert "stale: " in anew.said
    assert "other code" in anew.said
    assert first.path.with_name(first.path.name + ".old-1").is_dir()
    assert RunDir.open(anew.path).manifest()["code_hash"] == "fedcba9876543210"


@pytest.mark.parametrize("lr", ["1e30", "1e38"])
@pytest.mark.parametrize("every", ["train.eval_every_steps=1", "train.checkpoint_every_steps=1"])
def test_divergence_stops_is_marked_and_is_never_best(small: list[str], lr: str, every: str) -> None:
    result = run_here([*small, f"optim.lr={lr}", "optim.clip=null", every])
    assert (result.state, result.exit_code) == ("diverged", EXIT_FAILED)
    rows = metrics.read(result.path / "metrics.jsonl")
    assert rows[-1]["step"] == result.figures["step"] < 20
    assert all(
        torch.isfinite(t).all()
        for c in RunDir.open(result.path).checkpoints()
        for t in checkpoint.load(c.path).model.values()
    )
    again = run_here([*small, f"optim.lr={lr}", "optim.clip=null"])
    assert (again.state, again.exit_code) == ("diverged", EXIT_FAILED)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_stops_and_the_run_goes_on(
    small: list[str], tmp_path: Path, number: int, code: int, whole: Any
) -> None:
    overrides = with_runs(small, tmp_path / "stopped", *NOISY)

    def slow() -> None:
        step = Stepper.__call__
        Stepper.__call__ = lambda self, batch, **k: (time.sleep(0.05), step(self, batch, **k))[1]  # type: ignore[method-assign]

    child = start_child(overrides, slow)
    wait_for_row(tmp_path / "stopped", 3)
    os.kill(child.pid, number)
    child.join()
    assert child.exitcode == code
    run = RunDir.open(next((tmp_path / "stopped").iterdir()))
    assert run.state() == "stopped"
    assert run.checkpoints()[-1].step == run.manifest()["result"]["step"] < 20
    assert run_here(overrides).figures["content_hash"] == whole.figures["content_hash"]


def test_second_signal_exits_at_once(small: list[str], tmp_path: Path) -> None:
    overrides = with_runs(small, tmp_path / "twice", *NOISY)

    def stuck() -> None:
        step = Stepper.__call__
        Stepper.__call__ = lambda self, batch, **k: (time.sleep(60 if k["step"] == 3 else 0), step(self, batch, **k))[1]  # type: ignore[method-assign]

    child = start_child(overrides, stuck)
    wait_for_row(tmp_path / "twice", 3)
    started = time.monotonic()
    for _ in range(2):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.2)
    child.join(20)
    assert child.exitcode == 130
    assert time.monotonic() - started < 20


def wait_for_row(runs: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [row for path in runs.glob("*/metrics.jsonl") for row in metrics.tail(path)]
        if found and found[-1]["step"] >= step:
            return
        time.sleep(0.02)
    pytest.fail("the run wrote no row")


def test_run_in_use_is_refused_and_untouched(small: list[str]) -> None:
    first = run_here(small, stop_at=5)
    before = (first.path / "metrics.jsonl").read_bytes()
    with RunDir.open(first.path).claim(), pytest.raises(RunError, match="is in use by process"):
        run_here(small)
    assert (first.path / "metrics.jsonl").read_bytes() == before


def test_resume_keeps_the_precision_it_began_with_and_says_what_differs(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [o for o in small if not o.startswith("train.precision")]
    monkeypatch.setattr(device, "bf16_is_native", lambda d: False)
    first = run_here(overrides, stop_at=10)
    monkeypatch.setattr(device, "bf16_is_native", lambda d: True)
    manifest = RunDir.open(first.path).manifest()
    RunDir.open(first.path).update_manifest(versions=manifest["versions"] | {"torch": "2.11.0"})
    done = run_here(overrides)
    after = RunDir.open(first.path).manifest()
    assert after["resolved"]["precision"] == manifest["resolved"]["precision"] == "float32"
    assert "sdpa" in after["kernels"]["attention"]  # dense would be bf16's
    assert "since step 10: versions.torch: 2.11.0 →" in done.said
    assert [s["from_step"] for s in after["sessions"]] == [0, 10]


def test_best_on_val_is_kept_though_nothing_else_saves_there(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepper.__call__

    def spoil(self: Stepper, batch: Any, **k: Any) -> Any:
        found = step(self, batch, **k)
        if k["step"] >= 5:
            with torch.no_grad():
                for p in self.twin.masters:
                    p.mul_(1.35)
            self.twin.refresh()
        return found

    monkeypatch.setattr(Stepper, "__call__", spoil)
    more = ["train.eval_every_steps=5", "train.checkpoint_every_steps=20", "train.eval_tokens=100"]
    done = run_here([*small, *more])
    assert done.figures["best_step"] == 5
    assert [c.step for c in RunDir.open(done.path).checkpoints()] == [5, 20]
    assert done.figures["best/val/loss"] < done.figures["val/loss"]


def test_minutes_count_the_evaluations_that_were_asked_for(small: list[str]) -> None:
    overrides = [o for o in small if not o.startswith("train.max_steps")]
    one = ["train.max_minutes=0.05", "train.eval_tokens=null"]
    often = run_here([*overrides, *one, "train.eval_every_steps=1"], stop_at=1)
    seldom = run_here([*overrides, *one, "train.eval_every_steps=1000000", "seed=1"], stop_at=1)
    steps = [RunDir.open(r.path).manifest()["resolved"]["steps"] for r in (often, seldom)]
    assert steps[0] < steps[1] / 3


PLUGIN = """
import torch
from lmlab.model.norm import RMSNorm
from lmlab.model import spec as specs
from lmlab.registry import option


@option("norm", "running", build="running_norm:Running")
class RunningSpec(specs.RMSNorm):
    pass


class Running(RMSNorm):
    known_failures = {"causality in training": "its running mean has seen the whole batch"}

    def __init__(self, spec, dims, ops, layer=None):
        super().__init__(spec, dims, ops, layer)
        self.register_buffer("mean_square", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.mean_square.lerp_(x.detach().to(self.mean_square.dtype).square().mean(), 0.1)
        return super().forward(x) / self.mean_square.sqrt().to(x.dtype)
"""


def test_buffers_are_as_if_nothing_had_been_measured(small: list[str], tmp_path: Path) -> None:
    """A part with a running average: stopped and resumed = whole, and verify finds it identical."""
    (tmp_path / "running_norm.py").write_text(PLUGIN)
    plug = [f"plugins=[{tmp_path}/running_norm.py]", "norm=running", "train.log_every_steps=1", "train.precision=auto"]
    overrides = [o for o in small if not o.startswith("train.precision")]
    whole = run_here(with_runs(overrides, tmp_path / "w", *plug))
    run_here(with_runs(overrides, tmp_path / "h", *plug), stop_at=7)
    done = run_here(with_runs(overrides, tmp_path / "h", *plug))
    assert training_rows(done.path) == training_rows(whole.path)
    assert done.figures["content_hash"] == whole.figures["content_hash"]
    kept = final_state(whole.path).model["norm.mean_square"]
    assert kept.dtype == torch.float32
    assert kept != 1


def test_out_of_memory_keeps_the_checkpoint_and_names_the_remedy(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.__call__

    def full(self: Stepper, batch: Any, *, step_: Any = step, **k: Any) -> Any:
        if k["step"] == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step_(self, batch, **k)

    monkeypatch.setattr(Stepper, "__call__", full)
    with pytest.raises(TrainingFailed, match="out of memory") as caught:
        run_here([*small, "train.checkpoint_every_steps=5"])
    assert "train.micro_batch" in caught.value.hint
    run = RunDir.open(next(Path(small[-1].partition("=")[2]).iterdir()))
    assert (run.state(), run.checkpoints()[-1].step) == ("failed", 5)
    monkeypatch.undo()
    assert run_here([*small, "train.checkpoint_every_steps=5"]).state == "finished"


def test_damaged_last_checkpoint_falls_back_to_the_one_before(small: list[str], tmp_path: Path, whole: Any) -> None:
    overrides = with_runs(small, tmp_path / "hurt", *NOISY, "train.checkpoint_every_steps=5")
    run = RunDir.open(run_here(overrides, stop_at=12).path)
    weights = run.checkpoints()[-1].path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0xFF
    weights.write_bytes(content)
    done = run_here(overrides)
    assert "is damaged" in done.said
    assert "from step 10" in done.said
    assert done.figures["content_hash"] == whole.figures["content_hash"]
    assert training_rows(done.path) == training_rows(whole.path)


@pytest.mark.slow
def test_minutes_become_a_step_count_that_is_recorded_and_kept(small: list[str]) -> None:
    overrides = [o for o in small if not o.startswith("train.max_steps")] + ["train.max_minutes=0.08"]
    first = run_here(overrides, stop_at=1)
    steps = RunDir.open(first.path).manifest()["resolved"]["steps"]
    done = run_here(overrides)
    assert done.figures["step"] == steps == metrics.read(done.path / "metrics.jsonl")[-1]["step"]


def test_of_several_limits_the_first_reached_ends_the_run(small: list[str]) -> None:
    done = run_here([*small, f"train.max_tokens={128 * 7 + 5}", "train.max_minutes=60"])
    assert (done.figures["step"], done.figures["tokens"]) == (7, 7 * 128)


def test_test_split_is_looked_at_once_and_counted(small: list[str]) -> None:
    done = run_here(small)
    rows = metrics.read(done.path / "metrics.jsonl")
    assert ["test/loss" in row for row in rows] == [False] * (len(rows) - 1) + [True]
    assert RunDir.open(done.path).manifest()["test_evaluations"] == 1


def test_a_run_leaves_nothing_outside_runs_and_cache(
    small: list[str], in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = in_tmp / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    done = run_here([o for o in small if not o.startswith("wandb.mode")] + ["wandb.mode=offline"])
    assert done.state == "finished"
    assert sorted(p.name for p in in_tmp.iterdir()) == ["home", "runs"]
    assert list(home.rglob("*")) == []
    assert (done.path / "wandb").is_dir()


def test_manifest_records_what_auto_became(small: list[str]) -> None:
    done = run_here([*small, "seed=3", "seed.data=9"])
    manifest = json.loads((done.path / "manifest.json").read_text())
    assert manifest["seeds"] == {"init": 3, "data": 9, "dropout": 3}
    assert (
        manifest["resolved"] | {"micro_batch": 8, "steps": 20, "precision": "float32", "device": "cpu"}
        == manifest["resolved"]
    )
    assert manifest["kernels"] == manifest["resolved"]["kernels"]
    assert manifest["kernels"]["attention"] == "sdpa (plain causal mask)"  # fp32 on CPU
    assert {"torch", "python", "numpy"} <= manifest["versions"].keys()
    assert manifest["command"][:2] == ["lmlab", "train"]


def test_dry_run_writes_nothing(small: list[str], tmp_path: Path) -> None:
    planned = run_here(small, dry_run=True)
    assert planned.state == "planned"
    assert "parameters" in planned.said
    assert not (tmp_path / "runs").exists()


def test_what_can_not_run_is_refused_before_anything_is_written(small: list[str], tmp_path: Path) -> None:
    with pytest.raises(LmlabError, match="needs about"):
        run_here([*small, "ffn.d_ff=100000000"])
    with pytest.raises(LmlabError, match="CUDA devices are there"):
        run_here([*small, "device=cuda:7"])
    assert not (tmp_path / "runs").exists()


def test_a_usage_error_leaves_the_state_of_the_run_alone(small: list[str]) -> None:
    first = run_here(small, stop_at=10)
    with pytest.raises(LmlabError, match="`--stop-at` is 5"):
        run_here(small, stop_at=5)
    assert RunDir.open(first.path).state() == "stopped"
