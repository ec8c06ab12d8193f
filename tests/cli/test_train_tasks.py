"""Runs on tasks and mixtures, from the outside: resume, verify, eval, generate, sweeps and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from lmlab.runs import metrics
from lmlab.runs.rundir import RunDir
from tests.cli.conftest import run_here

SIZE = (
    "model=nano model.n_layers=1 model.d_model=32 model.n_heads=2 train.batch_tokens=512 train.max_steps=12 "
    "train.eval_every_steps=4 train.precision=fp32 train.log_every_steps=1 wandb.mode=disabled"
).split()
MQAR = [*SIZE, "data=mqar", "data.vocab_size=16", "data.n_pairs=2", "data.n_eval=20", "model.seq_len=16"]


def mix(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"Document {n} says that {n} and {n + 1} make {2 * n + 1}. " * 40)
    settings = f'data.settings=["text.files:{folder}/*.txt",passkey.digits:2,passkey.n_eval:8]'
    words = ["data=mix", "data.mix=[text:0.5,passkey:0.5]", settings, "tokenizer=byte", "model.seq_len=128"]
    return [*SIZE, *words, "model.dropout=0.1", "train.eval_tokens=512", "train.micro_batch=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{"mqar", "mix"}: the words and a finished run of each. To be looked at only."""
    folder = tmp_path_factory.mktemp("tasks")
    found = {}
    for name, words in (("mqar", MQAR), ("mix", mix(folder / "texts"))):
        found[name] = words, run_here([*words, f"paths.runs={folder}"])
    return found


def call(*words: str) -> Any:
    return CliRunner().invoke(make_app(), list(words))


def rows_of(path: Path) -> list[dict[str, Any]]:
    skipped = ("elapsed_s", "train/tokens_per_s")
    return [{k: v for k, v in row.items() if k not in skipped} for row in metrics.read(path / "metrics.jsonl")]


@pytest.mark.parametrize("name", ["mqar", "mix"])
def test_resumed_is_straight_through_bit_for_bit(runs: dict[str, Any], name: str, tmp_path: Path) -> None:
    words, whole = runs[name]
    first = run_here([*words, f"paths.runs={tmp_path}"], stop_at=6)
    assert first.state == "stopped"
    again = run_here([*words, f"paths.runs={tmp_path}"])
    assert "from step 6" in again.said
    assert rows_of(again.path) == rows_of(whole.path)
    assert again.figures["content_hash"] == whole.figures["content_hash"]


@pytest.mark.parametrize("name", ["mqar", "mix"])
def test_verify_passes(runs: dict[str, Any], name: str) -> None:
    done = call("verify", str(runs[name][1].path), "--json")
    verdict = json.loads(done.stdout)
    assert verdict["identical"], verdict
    assert verdict["steps"] == 12


def test_what_a_task_logs(runs: dict[str, Any]) -> None:
    path = runs["mqar"][1].path
    rows = metrics.read(path / "metrics.jsonl")
    looks = [row for row in rows if "val/loss" in row]
    assert [row["step"] for row in looks] == [4, 8, 12]
    assert all(0 <= row["val/exact"] <= row["val/token_accuracy"] <= 1 for row in looks)
    assert {"test/loss", "test/token_accuracy", "test/exact", "best/val/loss"} <= set(rows[-1])
    assert rows[-1]["val/tokens"] == 40
    assert not any("bits_per_byte" in key for row in rows for key in row)
    manifest = RunDir.open(path).manifest()
    assert manifest["data"]["task"] == "mqar"
    assert manifest["fingerprint"] == manifest["data"]["fingerprint"]
    assert manifest["result"]["val/exact"] == rows[-1]["val/exact"]


def test_what_a_mixture_logs(runs: dict[str, Any]) -> None:
    rows = metrics.read(runs["mix"][1].path / "metrics.jsonl")
    assert {"val/passkey/token_accuracy", "test/passkey/exact", "val/bits_per_byte"} <= set(rows[-1])
    assert "val/token_accuracy" not in rows[-1]


def test_the_plan_says_what_there_is(runs: dict[str, Any]) -> None:
    said = runs["mqar"][1].said
    assert "mqar · drawn anew for every step, 2 answers in 16 tokens · ids 16" in said
    assert "epochs" not in said
    assert "0.5 text (" in runs["mix"][1].said


def test_eval_tells_counts_intervals_and_chance(runs: dict[str, Any]) -> None:
    done = call("eval", str(runs["mqar"][1].path), "--json")
    report = json.loads(done.stdout)
    (task,) = report["tasks"]
    last = metrics.read(runs["mqar"][1].path / "metrics.jsonl")[-1]
    assert (task["n"], task["token_n"]) == (20, 40)
    assert (task["exact"], task["token_accuracy"]) == (last["val/exact"], last["val/token_accuracy"])
    assert report["loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert report["bits_per_byte"] is None
    assert task["token_low"] <= task["token_accuracy"] <= task["token_high"]
    assert task["chance_token"] == pytest.approx(1 / 8)
    text = call("eval", str(runs["mqar"][1].path)).stdout
    assert "mqar: exact" in text
    assert "of 40 (" in text
    assert "chance 0.12" in text
    mixed = json.loads(call("eval", str(runs["mix"][1].path), "--json").stdout)
    assert [t["task"] for t in mixed["tasks"]] == ["passkey"]
    assert mixed["bits_per_byte"] is not None


def test_eval_on_more_pairs_and_looks_inside(runs: dict[str, Any]) -> None:
    path = str(runs["mqar"][1].path)
    more = json.loads(call("eval", path, "data.n_pairs=3", "--probe", "--cache", "full,window:4", "--json").stdout)
    assert more["tasks"][0]["token_n"] == 60
    assert not more["own_data"]
    wrong = call("eval", path, "data.vocab_size=64")
    assert "`data=mqar` has 64 ids of its own, and the run's vocabulary has 16 (ids)" in str(wrong.exception)


def test_eval_of_a_text_run_on_a_task_in_text_spells_it_as_the_run_does(runs: dict[str, Any]) -> None:
    path = str(runs["mix"][1].path)
    done = call("eval", path, "data=passkey", "data.digits=2", "data.n_eval=8", "--json")
    assert done.exception is None, done.exception
    (mine,), (theirs,) = json.loads(done.stdout)["tasks"], json.loads(call("eval", path, "--json").stdout)["tasks"]
    assert mine == theirs
    assert "`tokenizer=byte` does not write" in str(call("eval", path, "data=mqar").exception)


def test_a_run_on_longer_rows_of_the_task_from_its_weights(runs: dict[str, Any], tmp_path: Path) -> None:
    path = runs["mqar"][1].path
    words = [
        "model.seq_len=32",
        "rope_scaling=pi",
        "rope_scaling.factor=2",
        "train.max_steps=2",
        f"paths.runs={tmp_path}",
    ]
    done = call("train", "--from", str(path), *words)
    assert done.exception is None, done.exception
    (made,) = (RunDir.open(p) for p in tmp_path.iterdir())
    assert made.manifest()["data"]["splits"]["val"]["tokens"] == 20 * 32
    assert made.manifest()["data"]["tokenizer"]["vocab_size"] == 16


def test_generate_writes_ids(runs: dict[str, Any]) -> None:
    path = str(runs["mqar"][1].path)
    done = call("generate", path, "--prompt", "3 12 5 9 3", "--max-new", "2", "--temperature", "0", "--json")
    assert done.exception is None, done.exception
    words = json.loads(done.stdout)["text"].split()
    assert len(words) == 2
    assert all(0 <= int(word) < 16 for word in words)
    assert "'hello' is not an id" in str(call("generate", path, "--prompt", "hello").exception)
    assert "a prompt is empty" in str(call("generate", path, "--prompt", "").exception)


def test_prepare_says_that_there_is_nothing_to_prepare() -> None:
    assert "`data=mqar` has nothing to prepare" in str(call("data", "prepare", "data=mqar").exception)


def test_too_short_a_row_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = [w for w in MQAR if not w.startswith("data.n_pairs")]
    done = call("train", *words, "data.n_pairs=5", f"paths.runs={tmp_path}")
    assert "needs 20 tokens, rows have 16" in str(done.exception)
    assert not list(tmp_path.iterdir())
