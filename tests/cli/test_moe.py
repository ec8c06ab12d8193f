"""Experts from the outside: what is printed before and after training, `lmlab eval`, `generate`, the sweep's table."""

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
from lmlab.cli.run_one import result_lines
from lmlab.cli.verify import replay
from lmlab.runs import metrics
from lmlab.runs.routing_names import FIGURES, LOAD, STABILITY, bars, name, parse
from lmlab.runs.rundir import RunDir
from tests.cli.conftest import few_documents, run_here

SMALL = "tokenizer=byte model=nano model.n_layers=2 model.d_model=32 model.n_heads=4 model.seq_len=16 "
SMALL += "train.batch_tokens=128 train.max_steps=12 train.eval_every_steps=4 train.log_every_steps=2 "
SMALL += "train.precision=fp32 train.eval_tokens=256 wandb.mode=disabled"
TOPK = ["moe=topk", "moe.n_experts=4", "moe.first_dense_layers=1"]
LOOKS_AHEAD = {
    "expert_choice": ["moe=expert_choice", "moe.n_experts=4"],
    "probability": ["moe=topk", "moe.n_experts=4", "moe.capacity_factor=1.0", "moe.priority=probability"],
}


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
    assert line.endswith(
        "moe.capacity_factor=0.5: what an expert has room for depends on how many tokens the row has"
    )


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


# ---------------------------------------------------------------- generate

SHARED = ["moe.group=batch", "train.micro_batch=8"]
ROOM = "moe.capacity_factor=0.5: what an expert has room for depends on how many tokens the row has"


@pytest.mark.parametrize("cache", ["full", "none"])
def test_generating_with_capacity_says_before_the_text_that_another_cache_may_give_another(tight, cache):
    done = call("generate", str(tight.path), "--prompt", "Document", "--max-new", "4", "--cache", cache)
    other = {"full": "--cache none", "none": "a cache"}[cache]
    told = f"decoding is not the whole row: with {other} the text may be another: {ROOM}"
    assert [line for line in done.stderr.splitlines() if "moe." in line] == [told]
    assert done.output.index(told) < done.output.index("Document")  # as they came
    assert "moe." not in done.stdout
    alone = call("generate", str(tight.path), "--prompt", "Document", "--max-new", "4", "--cache", cache, "--json")
    assert told in alone.stderr
    assert json.loads(alone.stdout).keys() == {
        *("run", "sample", "prompt", "text", "tokens", "ended", "cache", "cache_bytes"),
        *("prefill_tokens_per_s", "decode_tokens_per_s"),
    }


def test_the_text_does_differ(tight):
    """What is said is so: of the same weights and the same draws, by a cache and without one."""
    words = ["generate", str(tight.path), "--prompt", "Document 3 says", "--max-new", "200", "--temperature", "2"]
    found = [json.loads(call(*words, "--json", "--cache", kind).stdout)["text"] for kind in ("full", "none")]
    assert found[0] != found[1]


def test_generating_where_rows_share_the_room_names_that_too(folder):
    typed = ["moe=topk", "moe.n_experts=4", "moe.capacity_factor=1.5", *SHARED]
    path = str(run_here(words(folder, *typed, "train.max_steps=1")).path)
    done = call("generate", path, "--prompt", "a", "--max-new", "2", "--allow-noncausal")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("decoding is not the whole row: ")]
    assert "with --cache none the text may be another, and so with other prompts beside it: " in line
    assert "moe.capacity_factor=1.5" in line
    assert "moe.group=batch" in line


def test_generating_without_capacity_says_nothing_of_it(topk, folder):
    shared = run_here(words(folder, "moe=topk", "moe.n_experts=4", *SHARED, "train.max_steps=1"))
    for run in (topk, shared):
        for cache in ("full", "none"):
            done = call("generate", str(run.path), "--prompt", "a", "--max-new", "2", "--cache", cache)
            assert done.exit_code == 0
            assert "moe" not in done.stderr.replace(str(run.path), "")
            assert len(done.stderr.splitlines()) == 1  # what it cost


# ---------------------------------------------------------------- what is not causal


@pytest.mark.parametrize("kind", LOOKS_AHEAD)
def test_what_sees_later_tokens_is_labelled_and_not_generated_with(kind, folder):
    done = run_here(words(folder, *LOOKS_AHEAD[kind]))
    why = RunDir.open(done.path).manifest()["noncausal"]
    assert LOOKS_AHEAD[kind][-1].split("=")[0] in why or LOOKS_AHEAD[kind][0] in why
    assert (
        result_lines(done)[-1]
        == f"  not causal: loss, perplexity and bits/byte are of tokens that see later ones ({why})"
    )
    shown = call("eval", str(done.path)).stdout.splitlines()
    assert shown[1] == f"not causal: loss, perplexity and bits/byte are of tokens that see later ones ({why})"
    assert json.loads(call("eval", str(done.path), "--json").stdout)["noncausal"] == why
    refused = call("generate", str(done.path), "--prompt", "a").exception
    assert refused.message == f"this model is not causal: {why}"
    assert "--allow-noncausal" in refused.hint
    assert call("generate", str(done.path), "--prompt", "a", "--max-new", "4", "--allow-noncausal").exit_code == 0


def test_what_is_causal_generates(topk, tight):
    for run in (topk, tight):
        assert call("generate", str(run.path), "--prompt", "a", "--max-new", "4").exit_code == 0
        assert "noncausal" not in run.figures


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
