"""Experts from the outside: what is printed before and after training, `lmlab eval`, the sweep's table."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from lmlab.cli.progress import Screen
from lmlab.cli.verify import replay
from lmlab.runs import metrics
from lmlab.runs.routing_names import FIGURES, LOAD, STABILITY, bars, name, parse
from lmlab.runs.rundir import RunDir
from tests.cli.conftest import few_documents, run_here

SMALL = "tokenizer=byte model=nano model.n_layers=2 model.d_model=32 model.n_heads=4 model.seq_len=16 "
SMALL += "train.batch_tokens=128 train.max_steps=12 train.eval_every_steps=4 train.log_every_steps=2 "
SMALL += "train.precision=fp32 train.eval_tokens=256 wandb.mode=disabled"
TOPK = ["moe=topk", "moe.n_experts=4", "moe.first_dense_layers=1"]


def words(folder: Path, *more: str) -> list[str]:
    typed = {word.partition("=")[0] for word in more}
    kept = [word for word in SMALL.split() if word.partition("=")[0] not in typed]
    return [*kept, *few_documents(folder / "data"), f"paths.runs={folder}/runs", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def topk(folder: Path) -> Any:
    """A finished run with experts in its second layer."""
    return run_here(words(folder, *TOPK))


@pytest.fixture(scope="module")
def tight(folder: Path) -> Any:
    """A finished run whose experts have little room."""
    return run_here(words(folder, "moe=topk", "moe.n_experts=4", "moe.capacity_factor=0.5"))


def call(*typed: str) -> Any:
    return CliRunner().invoke(make_app(), typed)


# ---------------------------------------------------------------- training


def test_rows_of_training_and_of_val_have_the_figures_of_layers_with_experts(topk):
    rows = metrics.read(topk.path / "metrics.jsonl")
    step = {parse(key) for key in rows[1] if parse(key)}
    assert step == {("", 1, figure) for figure in FIGURES if figure != STABILITY}
    looked = [row for row in rows if "val/loss" in row]
    every = {("val", 1, figure) for figure in (*FIGURES, LOAD)}
    found = [{where for key in row if (where := parse(key)) and where[0]} for row in looked]
    assert found == [every - {("val", 1, STABILITY)}, every, every]  # nothing is kept before the first
    for row in looked:
        load = row[name(1, LOAD, "val")]
        assert sum(load) == 2 * row["val/tokens"]
        assert row[name(1, "load_max", "val")] == pytest.approx(max(load) / (sum(load) / 4))
    assert 0 < looked[-1][name(1, STABILITY, "val")] <= 1


def test_results_hold_no_routing(topk):
    assert not [key for key in topk.figures if parse(key)]
    assert not [key for key in RunDir.open(topk.path).manifest()["result"] if parse(key)]


def test_the_block_before_training_tells_active_parameters_and_dispatch(topk, tight):
    manifest = RunDir.open(topk.path).manifest()
    n, active = manifest["parameters"], manifest["active_parameters"]
    expert = 3 * 32 * 88  # gate, up and down of one expert
    assert n - active == 2 * expert
    assert re.search(r"model +\S+ parameters, \S+ active \(", topk.said)
    # one layer: 2 experts · 32 wide · 4 bytes, there and back
    assert "4 in 1 of 2 layers, 2 a token · dispatch 512 bytes/token" in topk.said
    assert "4 in 2 of 2 layers, 1 a token · dispatch 1,024 bytes/token" in tight.said


def test_without_experts_there_is_one_number_of_parameters(folder):
    done = run_here(words(folder, "train.max_steps=1"))
    manifest = RunDir.open(done.path).manifest()
    assert manifest["active_parameters"] == manifest["parameters"]
    assert manifest["noncausal"] is None
    assert " active" not in done.said
    assert "experts" not in done.said.split("kernels")[0]
    assert not [key for row in metrics.read(done.path / "metrics.jsonl") for key in row if parse(key)]


def test_flops_are_those_of_active_parameters(topk, folder):
    dense = RunDir.open(run_here(words(folder, "train.max_steps=1")).path).manifest()
    routed = RunDir.open(topk.path).manifest()
    more = routed["flops_per_token"] - dense["flops_per_token"]
    # one more expert in one layer, and the router
    assert more == 6 * (3 * 32 * 88 + 4 * 32)


def test_looking_at_stability_leaves_the_run_as_it_is(folder, topk, tmp_path):
    """The same run that never evaluates in between, and the same that was stopped: equal weights, equal figures."""
    quiet = run_here(words(tmp_path, *TOPK, "train.eval_every_steps=12"))
    assert quiet.figures["content_hash"] == topk.figures["content_hash"]
    again = tmp_path / "again"
    run_here(words(again, *TOPK), stop_at=6)
    resumed = run_here(words(again, *TOPK))
    assert resumed.figures["content_hash"] == topk.figures["content_hash"]
    last, then = (metrics.read(one.path / "metrics.jsonl")[-1] for one in (resumed, topk))
    assert {key: last[key] for key in last if parse(key)} == {key: then[key] for key in then if parse(key)}


def test_a_run_with_experts_verifies(topk):
    screen = Screen(Console(file=io.StringIO()))
    assert replay(RunDir.open(topk.path), None, screen).first_difference is None


# ---------------------------------------------------------------- lmlab eval


def test_eval_prints_a_row_per_layer_and_records_the_same(topk):
    done = call("eval", str(topk.path))
    assert done.exception is None, done.exception
    lines = done.stdout.splitlines()
    recorded = json.loads(max((topk.path / "eval").iterdir(), key=lambda p: p.stat().st_mtime_ns).read_text())
    assert lines[1].split() == ["layer", *FIGURES]
    assert lines[2].split() == ["1", *(f"{recorded[name(1, figure, 'val')]:.4g}" for figure in FIGURES)]
    load = recorded[name(1, LOAD, "val")]
    assert lines[3].startswith(
        f"load of layer 1  {bars(load)}  {min(load):,} to {max(load):,} choices an expert, 4 experts"
    )
    assert lines[4] == f"of {recorded['tokens']:,} tokens; stability against step 8 on the first {recorded['tokens']:,}"
    # as the run's own last evaluation, of the same tokens
    row = metrics.read(topk.path / "metrics.jsonl")[-1]
    for key, value in row.items():
        if parse(key) and parse(key)[0]:
            assert recorded[key] == pytest.approx(value), key
    assert recorded["noncausal"] is None


def test_eval_of_test_names_its_figures_after_it(topk):
    report = json.loads(call("eval", str(topk.path), "--split", "test", "--json").stdout)
    assert {parse(key)[0] for key in report if parse(key)} == {"test"}


def test_stability_has_a_reason_where_there_is_none(topk, folder):
    first = RunDir.open(topk.path).checkpoints()[0]
    done = call("eval", str(first.path))
    assert done.exception is None, done.exception
    assert f"stability n/a: the run keeps no checkpoint before step {first.step}" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("1 "))
    assert row.split()[-1] == "–"


def test_probes_of_experts_have_figures(topk):
    done = call("eval", str(topk.path), "--probe", "--json")
    report = json.loads(done.stdout)
    assert {"probe/0/ffn_zero_frac", "probe/1/ffn_zero_frac", "probe/1/ffn_dead_frac"} < report.keys()


def test_training_with_probes_works(folder):
    done = run_here(words(folder, "moe=switch", "ffn=relu", "train.probe_every_steps=4", "train.max_steps=4"))
    last = metrics.read(done.path / "metrics.jsonl")[-1]
    assert 0 < last["probe/0/ffn_zero_frac"] < 1


def test_with_capacity_the_difference_of_decoding_is_printed_with_its_reason(tight):
    done = call("eval", str(tight.path), "--cache", "full")
    assert done.exception is None, done.exception
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("decoding is not the whole row: ")]
    recorded = json.loads(max((tight.path / "eval").iterdir(), key=lambda p: p.stat().st_mtime_ns).read_text())
    told = recorded["decoded"]
    whole, alone = told["whole"]["bits_per_byte"], told["token_by_token"]["bits_per_byte"]
    assert abs(alone - whole) > 1e-5
    assert f"{alone:.4f} bits/byte token by token, {whole:.4f} whole ({alone - whole:+.4f})" in line
    assert line.endswith("moe.capacity_factor=0.5: what an expert has room for depends on how many tokens the row has")


def test_whole_rows_by_a_cache_are_the_loss_without_one_also_with_capacity(tight):
    """Val ends within a row, whose rest takes no room; and what a window costs is not all that decoding costs."""
    report = json.loads(call("eval", str(tight.path), "--cache", "full,window:8", "--json").stdout)
    assert report["tokens"] % 16
    full, window = report["caches"]
    assert full["loss"] == pytest.approx(report["loss"], rel=1e-6)
    assert abs(window["loss"] - report["loss"]) > 1e-4
    alone = json.loads(call("eval", str(tight.path), "--cache", "window:8", "--json").stdout)
    assert alone["decoded"] == report["decoded"]
    said = call("eval", str(tight.path), "--cache", "window:8").stdout.splitlines()
    assert said[-2].startswith("decoding is not the whole row: ")
    assert said[-1].startswith("of rows of 16 tokens, fed whole; decode: one row, ")


def test_without_capacity_nothing_is_said_of_decoding(topk):
    done = call("eval", str(topk.path), "--cache", "full", "--json")
    report = json.loads(done.stdout)
    assert "decoded" not in report
    assert report["caches"][0]["loss"] == pytest.approx(report["loss"], rel=1e-6)


# ---------------------------------------------------------------- sweep


def test_the_sweeps_plan_has_active_parameters(folder):
    typed = words(folder, "moe=none,topk")
    done = call("sweep", *typed, "--dry-run")
    assert done.exception is None, done.exception
    none, topk = (
        next(line for line in done.stdout.splitlines() if line.startswith(f"moe={x}")) for x in ("none", "topk")
    )
    assert "active" not in none
    assert re.search(r"k, \S+ active \(\+", topk)
