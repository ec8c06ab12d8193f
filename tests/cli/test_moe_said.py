"""What is said of texts that depend on how they are computed, and beside losses whose tokens saw later ones."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

import lmlab
from lmlab.cli.app import run as lmlab_line
from lmlab.cli.progress import Screen
from lmlab.cli.run_one import result_lines
from lmlab.cli.sweep_screen import SweepScreen, progress_of
from lmlab.runs.rundir import RunDir
from lmlab.sweep.pool import Job
from tests.cli import test_moe
from tests.cli.conftest import run_here
from tests.cli.test_moe import call, words

folder, topk, tight = test_moe.folder, test_moe.topk, test_moe.tight  # fixtures, with runs of their own

LOOKS_AHEAD = {
    "expert_choice": ["moe=expert_choice", "moe.n_experts=4"],
    "probability": ["moe=topk", "moe.n_experts=4", "moe.capacity_factor=1.0", "moe.priority=probability"],
}


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
        *("prefill_tokens_per_s", "decode_tokens_per_s", "decode_path"),
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


LABELLED = r"\d\.\d{4}( bits/byte| nats/token)? \(not causal\)"


@pytest.mark.parametrize("kind", LOOKS_AHEAD)
def test_losses_of_what_sees_later_tokens_are_labelled_wherever_they_stand(kind, folder):
    done = run_here(words(folder, *LOOKS_AHEAD[kind], "seed=3"))
    why = RunDir.open(done.path).manifest()["noncausal"]
    steps = [line for line in done.said.splitlines() if line.startswith("step ")]
    assert len(steps) == 7  # of each logged step, and of step 0
    for line in steps:
        assert re.search(LABELLED, re.findall(r"(?:loss|val) \d[^·]*|[^·]*bits/byte[^·]*", line)[-1]), line
        assert line.count("not causal") == 1, line
    assert re.search(r" · val \d\.\d{4} · \d\.\d{4} bits/byte \(not causal\) · ", steps[-1])
    root = f"paths.runs={folder}/runs"
    (listed,) = [line for line in call("runs", "ls", root).stdout.splitlines() if line.startswith(done.path.name)]
    assert f"  {done.figures['val/bits_per_byte']:.4f} (not causal)  " in listed
    (told,) = [r for r in json.loads(call("runs", "ls", root, "--json").stdout) if r["name"] == done.path.name]
    assert (told["noncausal"], told["val_loss"]) == (why, done.figures["val/loss"])
    frame = lmlab.results(folder / "runs").set_index("run")
    assert frame.loc[done.path.name, "noncausal"] == why


def test_losses_of_what_is_causal_are_not_labelled(folder, topk, tight):
    assert "not causal" not in topk.said + tight.said
    shown = call("runs", "ls", f"paths.runs={folder}/runs").stdout.splitlines()
    for run in (topk, tight):
        (line,) = [line for line in shown if line.startswith(run.path.name)]
        assert "not causal" not in line
    found = json.loads(call("runs", "ls", f"paths.runs={folder}/runs", "--json").stdout)
    assert {r["noncausal"] for r in found if r["name"] == topk.path.name} == {None}


def test_a_difference_of_runs_labels_the_side_that_is_not_causal(folder, topk):
    other = run_here(words(folder, *LOOKS_AHEAD["expert_choice"]))
    shown = call("runs", "diff", topk.path.name, other.path.name, f"paths.runs={folder}/runs").stdout.splitlines()
    (loss,) = [line for line in shown if line.startswith("results") and " val/loss " in line]
    assert re.split("  +", loss)[-2:] == [f"{topk.figures['val/loss']}", f"{other.figures['val/loss']} (not causal)"]
    (step,) = [line for line in shown if " elapsed_s " in line]
    assert "not causal" not in step


@pytest.mark.slow
def test_a_sweep_labels_the_losses_of_its_members(folder, capfd):
    typed = words(folder / "swept", "moe=topk,expert_choice", "moe.n_experts=4", "train.max_steps=2")
    for when in ("trained", "was there"):
        assert lmlab_line(["sweep", *typed]) == 0
        said = capfd.readouterr()
        by_member = {line.split()[1]: line for line in said.err.splitlines() if line.startswith("finished ")}
        assert re.search(r"  val \d\.\d{4} nats/token  ", by_member["moe=topk"]), when
        assert re.search(r"  val \d\.\d{4} nats/token \(not causal\)  ", by_member["moe=expert_choice"]), when
        (arm,) = [line for line in said.out.splitlines() if line.startswith("expert_choice")]
        assert re.search(r"\d\.\d{4} \(not causal\)", arm)


def test_a_running_member_is_labelled_too(folder):
    done = run_here(words(folder, *LOOKS_AHEAD["expert_choice"]))
    assert progress_of(done.path).noncausal == RunDir.open(done.path).manifest()["noncausal"]
    console = Console(file=io.StringIO(), width=200)
    job = Job([], "moe=expert_choice", done.path)
    console.print(SweepScreen(Screen(console), 1, 1, {})._table([job], []))
    assert re.search(r"\d\.\d{4} \(not causal\)", console.file.getvalue())


def test_what_is_causal_generates(topk, tight):
    for run in (topk, tight):
        assert call("generate", str(run.path), "--prompt", "a", "--max-new", "4").exit_code == 0
        assert "noncausal" not in run.figures
