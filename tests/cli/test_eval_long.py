"""`lmlab eval --long-context`: what is recorded and printed, what is left out, and what is refused with its remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from tests.cli.conftest import few_documents, run_here

SMALL = "tokenizer=byte model=nano model.n_layers=2 model.seq_len=32 train.batch_tokens=128 train.max_steps=30"
SMALL += " wandb.mode=disabled train.eval_tokens=128 train.precision=fp32"


@pytest.fixture(scope="module", autouse=True)
def less(request: pytest.FixtureRequest) -> Any:
    """Less of everything, so that the tests are quick."""
    patch = pytest.MonkeyPatch()
    patch.setattr("lmlab.eval.long.windows.WANTED_TOKENS", 1024)
    patch.setattr("lmlab.eval.long.recall.SPENT_TOKENS", 1024)
    patch.setattr("lmlab.eval.long.recall.COPIES_TOKENS", 1024)
    patch.setattr("lmlab.eval.long.suite.TASK_TOKENS", 1024)
    yield
    patch.undo()


def trained(folder: Path, *words: str) -> Path:
    made = run_here([*SMALL.split(), *few_documents(folder / "data"), f"paths.runs={folder}", *words])
    path: Path = made.path
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("rope"))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("learned"), "pos=learned")


def call(*words: str) -> Any:
    return CliRunner().invoke(make_app(), ["eval", *words])


def told(done: Any) -> dict[str, Any]:
    assert done.exception is None, done.exception
    found: dict[str, Any] = json.loads(done.stdout)["long_context"]
    return found


def test_every_scaling_at_every_length(run: Path) -> None:
    long = told(call(str(run), "--long-context", "--lengths", "16,32,64,128", "--json"))
    assert (long["trained_length"], long["original_length"], long["lengths"]) == (32, 32, [16, 32, 64, 128])
    names = ["none", "pi", "ntk", "dynamic_ntk", "yarn"]
    assert [(c["scaling"], c["length"]) for c in long["cells"]] == [(n, t) for n in names for t in (16, 32, 64, 128)]
    at = {(c["scaling"], c["length"]): c for c in long["cells"]}
    assert [at["pi", t]["factor"] for t in (16, 32, 64, 128)] == [1, 1, 2, 4]
    for name in names[1:]:
        for length in (16, 32):
            same = {k: v for k, v in at[name, length].items() if k not in ("scaling", "factor")}
            assert same == {k: v for k, v in at["none", length].items() if k not in ("scaling", "factor")}
        assert at[name, 128]["loss"] != at["none", 128]["loss"]
    for cell in long["cells"]:
        assert sum(b["tokens"] for b in cell["buckets"]) == long["tokens"]
        assert sum(b["nats"] for b in cell["buckets"]) == pytest.approx(cell["loss"] * long["tokens"])
        assert cell["perplexity"] == pytest.approx(math.exp(cell["loss"]))
        assert cell["context_gain"] == pytest.approx(
            at[cell["scaling"], 16]["sliding_loss"] - cell["sliding_loss"], abs=1e-9
        )
    newest = max((run / "eval").glob("*-long-context.json"), key=lambda p: p.name)
    assert json.loads(newest.read_text())["long_context"] == long
    assert newest.with_suffix(".svg").read_text().startswith("<?xml")
    for one in long["memory"]:
        assert one["kv_bytes"] == one["kv_bytes_measured"] == 2 * 2 * 128 * 4 * one["length"]


def test_the_loss_at_the_trained_length_is_eval_s(run: Path) -> None:
    """On a token set that is the beginning of the split, the same windows as a plain evaluation's first ones."""
    import numpy as np
    import torch

    import lmlab
    from lmlab.eval.long.text import text_loss
    from lmlab.eval.long.windows import STREAM, TokenSet, Unit

    model, _tokenizer, _config = lmlab.load(run)
    plain = json.loads(call(str(run), "--json").stdout)
    from lmlab.data.tokens import TokenFile
    from lmlab.opened import experiment_of, prepared
    from lmlab.runs.rundir import RunDir

    exp = experiment_of(RunDir(run))
    val: TokenFile = prepared(exp, None, lambda *_: None).corpora[0].val  # type: ignore[attr-defined]
    whole = TokenSet(STREAM, [Unit(0, np.asarray(val.tokens, dtype=np.int64))])
    with torch.no_grad():
        loss = text_loss(model, whole, [np.zeros(val.n_tokens - 1, dtype=bool)], length=32, stride=32, trained=32)
    assert loss.apart.tokens == plain["tokens"]
    assert loss.apart.mean == pytest.approx(plain["loss"], rel=1e-5)


def test_typed_factors_are_rows_of_their_own(run: Path) -> None:
    words = ["--lengths", "16,64", "--rope-scaling", "none,pi", "--factors", "2,4"]
    long = told(call(str(run), "--long-context", *words, "--json"))
    assert [(c["scaling"], c["factor"], c["length"]) for c in long["cells"]] == [
        *(("none", None, length) for length in (16, 32, 64)),
        *(("pi", factor, length) for length in (16, 32, 64) for factor in (2, 4)),
    ], "the trained length stands beside longer ones"
    losses = [c["loss"] for c in long["cells"]]
    assert len(set(losses)) == len(losses), "a factor acts below the trained length, too"
    shown = call(str(run), "--long-context", *words).stdout
    assert "pi 2" in shown
    assert "pi 4" in shown


def test_learned_positions_past_the_table_are_not_available(learned: Path) -> None:
    long = told(call(str(learned), "--long-context", "--lengths", "32,64", "--json"))
    short, far = long["cells"]
    assert short["scaling"] == "none"
    assert short["not_available"] is None
    assert "`pos=learned` has 32 positions" in far["not_available"]
    assert "loss" not in far
    assert long["memory"][1]["not_available"]
    shown = call(str(learned), "--long-context", "--lengths", "32,64").stdout
    assert "n/a" in shown
    assert "not available at 64 tokens: `pos=learned` has 32 positions" in shown


def test_defaults_that_the_text_can_t_serve_are_left_out(run: Path) -> None:
    done = call(str(run), "--long-context", "--rope-scaling", "none", "--json")
    long = told(done)
    missing = [one["length"] for one in long["left_out"]]
    assert long["lengths"] + missing == [16, 32, 64, 128, 256, 512]
    assert all("the split has" in one["why"] for one in long["left_out"])
    assert bool(missing) == ("left out:" in done.stderr)


def test_too_long_for_memory_is_left_out_or_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlab.eval.long.memory.window_bytes", lambda model, length, kept: 2**50 * (length > 32))
    long = told(call(str(run), "--long-context", "--rope-scaling", "none", "--json"))
    assert long["lengths"] == [16, 32]
    assert "a window needs about" in long["left_out"][0]["why"]
    done = call(str(run), "--long-context", "--lengths", "32,64")
    assert "`--lengths` 64: a window needs about" in str(done.exception)
    assert "shorter --lengths" in str(done.exception)


def test_a_tuned_run_is_shown_as_it_was_trained(run: Path, tmp_path: Path) -> None:
    words = "rope_scaling=pi rope_scaling.factor=2 model.seq_len=64 train.max_steps=2 wandb.mode=disabled".split()
    tuned = run_here([f"init.run={run}", *words, f"paths.runs={tmp_path}"]).path
    long = told(call(str(tuned), "--long-context", "--lengths", "32,64", "--json"))
    assert (long["trained_length"], long["original_length"], long["trained_scaling"]) == (64, 32, "pi 2")
    same = [c["loss"] for c in long["cells"] if c["scaling"] in ("own", "pi") and c["length"] == 64]
    assert same[0] == same[1], "by pi 2 it was trained at 64"
    assert long["scalings"] == ["own", "none", "pi", "ntk", "dynamic_ntk", "yarn"]


def test_tasks_in_text_can_be_asked(run: Path) -> None:
    words = ["--lengths", "64,300", "--rope-scaling", "none", "--tasks", "passkey"]
    done = call(str(run), "--long-context", *words, "--json")
    if isinstance(done.exception, Exception) and "the split has" in str(done.exception):
        pytest.skip("the fixture's text is shorter")
    long = told(done)
    assert [(c["task"], c["length"]) for c in long["tasks"]] == [("passkey", 32), ("passkey", 64), ("passkey", 300)]
    for cell in long["tasks"]:
        assert cell["not_available"] or 0 <= cell["exact_low"] <= cell["exact"] <= cell["exact_high"] <= 1


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--lengths 64", "`--lengths` acts on --long-context", "give --long-context"),
        ("--rope-scaling pi", "`--rope-scaling` acts on --long-context", "give --long-context"),
        ("--factors 2", "`--factors` acts on --long-context", "give --long-context"),
        ("--long-context --lengths 0", "`--lengths` 0: not a number of tokens", "--lengths 128,256,1024"),
        ("--long-context --lengths 64,", "`--lengths` 64,: not a number", "commas"),
        ("--long-context --lengths 64,64", "names a length twice", "once"),
        ("--long-context --lengths 1e3", "`--lengths` 1e3: not a number", "whole numbers"),
        ("--long-context --lengths 999999999", "`--lengths` 999999999: the split has", "--lengths of at most"),
        ("--long-context --rope-scaling xpos", "`--rope-scaling` xpos is none of the scalings", "none, pi, ntk"),
        ("--long-context --rope-scaling pi,pi", "names a scaling twice", "once"),
        ("--long-context --factors 0.5", "`--factors` 0.5: a factor is at least 1", "1 = not scaled"),
        ("--long-context --factors two", "`--factors` two is no number", "--factors 2,4"),
        ("--long-context --rope-scaling none --factors 2", "`--factors` acts on scalings", "--rope-scaling pi"),
        ("--long-context --cache full", "`--cache` and `--long-context` are two evaluations", "one after the other"),
        ("--long-context --probe", "`--probe` and `--long-context` are two evaluations", "one after the other"),
        ("--long-context --limit 3", "`--limit` and `--long-context`", "one after the other"),
        ("--long-context --tasks lm_eval:piqa", "lm_eval:piqa and `--long-context`", "one after the other"),
        ("--long-context --tasks hellaswag", "`--tasks` hellaswag is no task", "choose from"),
        ("--long-context --tasks mqar", "`--tasks` mqar has ids of its own", "data=mqar"),
        ("--long-context pos=alibi", "`pos` can't be changed at evaluation", "keys that may be set"),
        ("--long-context rope_scaling=pi", "`rope_scaling` can't be changed at evaluation", "keys that may be set"),
    ],
)
def test_what_can_t_be_is_refused(run: Path, words: str, message: str, hint: str) -> None:
    done = call(str(run), *words.split())
    assert message in str(done.exception)
    assert hint in str(done.exception)
    assert done.exception.exit_code == 2  # type: ignore[union-attr]


def test_scalings_of_a_model_without_rotations_are_refused(learned: Path) -> None:
    done = call(str(learned), "--long-context", "--rope-scaling", "pi")
    assert "`pos=learned` has no rotations to scale" in str(done.exception)
    assert "leave --rope-scaling out" in str(done.exception)


def test_a_score_that_was_not_asked_at_the_trained_length_is_not_called_chance(run: Path) -> None:
    words = ["--lengths", "32,131", "--rope-scaling", "none", "--tasks", "passkey"]
    long = told(call(str(run), "--long-context", *words, "--json"))
    at = {one["what"]: one for one in long["summary"]}
    assert at["needle"]["above_chance"] is None, "no needle fits into 32 bytes"
    assert at["needle"]["chance"] == pytest.approx(0.1)
    assert at["passkey"]["effective_length"] is None
    shown = call(str(run), "--long-context", *words).stdout
    assert not [line for line in shown.splitlines() if line.startswith(("needle ", "passkey ")) and "at chance" in line]


def test_losses_that_are_not_causal_are_called_so(tmp_path: Path) -> None:
    path = trained(tmp_path, "moe=expert_choice")
    done = call(str(path), "--long-context", "--lengths", "16,32", "--rope-scaling", "none", "--json")
    assert "later" in json.loads(done.stdout)["noncausal"]
    assert "not causal" in call(str(path), "--long-context", "--lengths", "16,32", "--rope-scaling", "none").stdout


def test_a_folder_that_can_t_be_written_is_told_before_anything_is_computed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    kept = run / "eval"
    aside = run / "aside"
    kept.rename(aside)
    try:
        kept.write_text("a file")
        monkeypatch.setattr("lmlab.cli.eval_long.evaluate_long", lambda *_: pytest.fail("it was computed"))
        done = call(str(run), "--long-context")
        assert "eval" in str(done.exception)
        assert hasattr(done.exception, "hint")
    finally:
        kept.unlink()
        shutil.move(aside, kept)
