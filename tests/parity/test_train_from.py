"""Training on models of others: an imported folder is the start of a run of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from lmlab.cli import app
from lmlab.runs.checkpoint import load
from lmlab.runs.rundir import RunDir
from tests.composed import rows
from tests.parity.folders import CASES, MOST, ROWS, logits, model_of, ours, saved

pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
pytestmark = pytest.mark.slow
DATA = "data=text data.files=[data.txt] model.seq_len=32 train.batch_tokens=128"
TRAIN = "train.max_steps=3 train.checkpoint_every_steps=1 train.precision=fp32 wandb.mode=disabled"


@pytest.fixture
def lmlab(tmp_path, monkeypatch, capsys):
    """lmlab(words) → stdout, run in a folder with data.txt."""
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("Fellow citizens, the union is strong.\n" * 200)

    def call(line: str) -> str:
        assert app.run(line.split()) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def imported(lmlab, case: str) -> RunDir:
    saved(Path("theirs"), model_of(*CASES[case])[1])
    return RunDir(json.loads(lmlab(f"import theirs {DATA} --json"))["run"])


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_run_goes_on_where_the_folder_ended(lmlab, case):
    """Its weights, its padded vocabulary and its tokenizer; nothing of folder and import is needed afterwards."""
    source = imported(lmlab, case)
    told = json.loads(lmlab(f"train --from {source.name} {TRAIN} --json"))
    run = RunDir(told["run"])
    zero, theirs = load(run.checkpoints()[0].path), load(source.checkpoints()[0].path)
    assert zero.content_hash == theirs.content_hash == run.config()["init"]["source"]
    assert len(zero.model["embed.weight"]) == ROWS
    assert run.manifest()["tokenizer_hash"] == source.manifest()["tokenizer_hash"]
    assert run.manifest()["lineage"]["lineage"]["imported"]["family"] == case
    assert told["val/loss"] < 10
    whole = told["content_hash"]
    shutil.rmtree("theirs")
    shutil.move(run.path, "put-away")
    stopped = json.loads(lmlab(f"train --from {source.name} {TRAIN} --stop-at 1 --json"))
    assert stopped["state"] == "stopped"
    shutil.rmtree(source.path)
    again = json.loads(lmlab(f"train --resume {run.name} --json"))
    assert again["content_hash"] == whole
    assert "identical" in lmlab(f"verify {run.name}")
    assert json.loads(lmlab(f"eval {run.name} --json"))["loss"] == pytest.approx(told["val/loss"], rel=1e-6)
    assert ours(run).dims.vocab_size == ROWS


def test_changed_on_the_way(lmlab):
    """The first model computes what the folder's does where that must hold, and longer rows know the trained length."""
    source = imported(lmlab, "llama")
    longer = "model.seq_len=128 rope_scaling=yarn rope_scaling.factor=4"
    run = RunDir(json.loads(lmlab(f"train --from {source.name} {TRAIN} {longer} --json"))["run"])
    assert run.config()["rope_scaling"]["original_len"] == MOST
    plain = RunDir(json.loads(lmlab(f"train --from {source.name} {TRAIN} model.seq_len=16 --json"))["run"])
    for later in plain.checkpoints()[1:]:
        shutil.rmtree(later.path)
    tokens, _ = rows(2, 16, vocab=ROWS)
    assert torch.equal(logits(ours(plain), tokens), logits(ours(source), tokens))


def test_a_learned_table_grows(lmlab):
    source = imported(lmlab, "gpt2")
    more = "model.seq_len=128 pos.max_len=128 init.resize=extend"
    run = RunDir(json.loads(lmlab(f"train --from {source.name} {TRAIN} {more} --json"))["run"])
    zero, theirs = load(run.checkpoints()[0].path), load(source.checkpoints()[0].path)
    assert torch.equal(zero.model["pos.weight"][:MOST], theirs.model["pos.weight"])
    assert zero.model["pos.weight"].shape == (128, theirs.model["pos.weight"].shape[1])
    assert run.manifest()["lineage"]["changed"] == [
        {"name": "pos.weight", "how": "resized", "note": "64×64 → 128×64, 64 rows drawn"}
    ]
