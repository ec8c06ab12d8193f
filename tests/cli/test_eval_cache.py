"""`lmlab eval --cache`: figures of each kind from one checkpoint; kinds that would drop nothing are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from tests.cli.conftest import few_documents, run_here

SMALL = "tokenizer=byte model=nano model.n_layers=2 model.seq_len=32 train.batch_tokens=128"
SMALL += " wandb.mode=disabled train.eval_tokens=128 train.precision=fp32"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that has learned a little, so that what it sees matters."""
    folder = tmp_path_factory.mktemp("cached")
    words = [*SMALL.split(), *few_documents(folder / "data"), f"paths.runs={folder}", "train.max_steps=40"]
    path: Path = run_here(words).path
    return path


def call(*words: str) -> Any:
    return CliRunner().invoke(make_app(), ["eval", *words])


def test_each_kind_has_its_cost(run):
    done = call(str(run), "--cache", "full,int8,window:4,sink:2+4", "--json")
    assert done.exception is None, done.exception
    report = json.loads(done.stdout)
    full, int8, window, sink = report["caches"]
    assert [c["cache"] for c in report["caches"]] == ["full", "int8", "window:4", "sink:2+4"]
    assert full["loss"] == pytest.approx(report["loss"], rel=1e-6)
    assert int8["loss"] == pytest.approx(report["loss"], rel=1e-2)
    assert int8["loss"] != report["loss"]
    assert window["loss"] > report["loss"] + 1e-4
    assert sink["loss"] != window["loss"]
    per_token = 2 * 128 * 2  # keys and values of two layers
    sizes = [per_token * 4 * 32, 2 * 2 * 4 * (32 + 2) * 32, per_token * 4 * 4, per_token * 4 * 6]
    assert [c["bytes_per_row"] for c in report["caches"]] == sizes
    assert all(c["decode_tokens_per_s"] > 0 for c in report["caches"])
    newest = max((run / "eval").iterdir(), key=lambda p: p.name)
    assert json.loads(newest.read_text())["caches"] == report["caches"]
    table = call(str(run), "--cache", "full").stdout.splitlines()
    assert table[1].split()[:3] == ["cache", "bits/byte", "Δ"]
    assert table[2].split()[0] == "full"


def test_a_window_of_its_own_is_what_a_cache_of_it_gives(run):
    """The loss by a cache of window 4 is that of the same weights with windows of 4 in every layer."""
    import torch

    import lmlab
    from lmlab.eval.loss import evaluate
    from lmlab.model.cache import CacheKind
    from tests.composed import rows

    model, tokenizer, _ = lmlab.load(run)
    from lmlab.data.batches import Batch

    tokens, positions = rows(2, 32, vocab=256)
    batch = Batch(tokens, tokens.roll(-1, 1), positions, None, torch.ones(2, 32))
    sizes = torch.from_numpy(tokenizer.token_bytes)
    by_cache = evaluate(model, [batch], sizes, kind=CacheKind(window=4))[0].nats
    for block in model.blocks:
        block.attn.window = 4
    assert by_cache == pytest.approx(evaluate(model, [batch], sizes)[0].nats, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--cache", "fll,window:0"], ["`--cache` is fll", "`--cache` is window:0"]),
        (["--cache", "window:32"], ["window:32, which drops nothing: rows of 32 tokens are evaluated"]),
        (["--cache", "sink:16+16"], ["sink:16+16, which drops nothing"]),
        (["--cache", "full,full"], ["names a kind twice"]),
        (["--cache", ""], ["`--cache` is "]),
        (["--cache", "full", "data.packing=documents"], ["a cached row has no documents"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_kinds_are_told_all_at_once(run, words, messages):
    told = str(call(str(run), *words).exception)
    for message in messages:
        assert message in told


def test_a_window_wider_than_every_layers_own_is_refused(tmp_path):
    words = [*SMALL.split(), *few_documents(tmp_path / "data"), "attn.window=8", "train.max_steps=1"]
    path = run_here([*words, f"paths.runs={tmp_path}"]).path
    assert "no layer keeps more than its window of 8" in str(call(str(path), "--cache", "window:8").exception)
    assert call(str(path), "--cache", "window:4").exit_code == 0
