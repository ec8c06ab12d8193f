"""`lmlab train`, `eval` and `verify` as they are typed: what they print, where, and with which status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlab.cli import run_one, training
from lmlab.cli.app import run
from lmlab.runs import metrics
from lmlab.runs.rundir import RunDir
from tests.cli.conftest import run_here

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """typed(*words) → (exit status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        status = run(list(words))
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


@pytest.fixture
def finished(small: list[str]) -> Path:
    return run_here([*small, "train.log_every_steps=1"]).path


def runs_key(path: Path) -> str:
    return f"paths.runs={path.parent}"


def test_train_prints_the_block_and_the_result(typed: Typed, small: list[str]) -> None:
    status, out, err = typed("train", *small, "norm=layernorm", "--no-tune-malloc")
    assert status == 0
    assert out.startswith("finished  ")
    assert "bits/byte" in out
    for word in ("norm=layernorm", "model.d_model=32", "parameters", "FLOP/token", "free", "attention", "step 20/20"):
        assert word in err, word


def test_train_json_is_one_object(typed: Typed, small: list[str]) -> None:
    status, out, _ = typed("train", *small, "--json", "--no-tune-malloc")
    result = json.loads(out)
    assert (status, result["state"], result["step"]) == (0, "finished", 20)
    assert RunDir.open(result["run"]).manifest()["result"]["val/loss"] == result["val/loss"]


def test_resume_goes_on_and_refuses_what_changes_identity(typed: Typed, small: list[str]) -> None:
    path = run_here(small, stop_at=10).path
    status, _, err = typed("train", "--resume", path.name[-8:], runs_key(path), "lr=1e-4", "attn=gqa")
    assert status == 2
    assert err.count("error:") == err.count("hint:") == 1
    assert "`optim.lr` from 0.003 to 0.0001" in err
    assert "`attn` from mha to gqa" in err
    assert RunDir.open(path).state() == "stopped"
    status, out, err = typed("train", "--resume", "auto", runs_key(path), "train.eval_every_steps=3")
    assert status == 0, err
    assert "from step 10" in err
    assert out.startswith(f"finished  {path}")
    status, _, err = typed("train", "--resume", "auto", runs_key(path))
    assert (status, "there is no" in err) == (2, True)


def test_stop_at_outside_the_run_is_refused(typed: Typed, small: list[str]) -> None:
    status, _, err = typed("train", *small, "--stop-at", "21")
    assert status == 2
    assert "`--stop-at` is 21" in err
    assert "1 to 20" in err


def test_eval_repeats_the_final_figure_of_training(typed: Typed, finished: Path) -> None:
    status, out, err = typed("eval", runs_key(finished), "--json")
    report = json.loads(out)
    last = metrics.read(finished / "metrics.jsonl")[-1]
    assert status == 0
    assert "newest finished run" in err
    assert report["loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert report["bits_per_byte"] == pytest.approx(last["val/bits_per_byte"], rel=1e-6)
    assert (report["own_data"], report["split"], report["step"]) == (True, "val", 20)
    assert len(list((finished / "eval").glob("*.json"))) == 1


def test_eval_of_test_is_counted_each_time(typed: Typed, finished: Path) -> None:
    for n in (2, 3):
        status, out, _ = typed("eval", str(finished), "--split", "test", "--json")
        assert (status, json.loads(out)["test_evaluations"]) == (0, n)
    assert RunDir.open(finished).manifest()["test_evaluations"] == 3


def test_eval_on_other_data_keeps_the_tokenizer(typed: Typed, finished: Path, tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"a wholly other text {i} " * 9, encoding="utf-8")
    data = ["data=text", f"data.files=['{tmp_path}/*.txt']", "data.val_frac=0.4", "data.test_frac=0.2"]
    status, out, err = typed("eval", str(finished), *data, "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["own_data"] is False
    assert report["tokens"] > report["bytes"] > 0  # bytes and one end-of-text a document
    last = metrics.read(finished / "metrics.jsonl")[-1]
    assert report["loss"] > last["val/loss"]


@pytest.mark.parametrize("key", ["norm=layernorm", "model.seq_len=8", "lr=1", "tokenizer=bpe", "train.max_steps=3"])
def test_eval_refuses_keys_of_the_trained_model(typed: Typed, finished: Path, key: str) -> None:
    status, out, err = typed("eval", str(finished), key)
    assert (status, out) == (2, "")
    assert "can't be changed at evaluation" in err


def test_eval_of_a_checkpoint_directory(typed: Typed, small: list[str]) -> None:
    path = run_here([*small, "train.checkpoint_every_steps=10", "train.eval_every_steps=10"]).path
    status, out, _ = typed("eval", str(path / "checkpoints" / "step-00000010"), "--json")
    assert (status, json.loads(out)["step"]) == (0, 10)


def test_verify_finds_a_run_identical(typed: Typed, finished: Path) -> None:
    status, out, _ = typed("verify", finished.name, runs_key(finished))
    assert status == 0, out
    assert out.startswith("identical: ")
    assert "20 steps, 20 rows of metrics" in out
    status, out, _ = typed("verify", str(finished), "--steps", "7", "--json")
    verdict = json.loads(out)
    assert (status, verdict["identical"], verdict["steps"], verdict["rows"]) == (0, True, 7, 7)


def test_verify_names_the_first_step_that_differs(typed: Typed, finished: Path) -> None:
    rows = metrics.read(finished / "metrics.jsonl")
    rows[12]["train/loss"] += 1e-7
    (finished / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = RunDir.open(finished).manifest()
    manifest["versions"]["torch"] = "2.11.0"
    (finished / "manifest.json").write_text(json.dumps(manifest))
    status, out, _ = typed("verify", str(finished))
    assert status == 1
    assert "at step 13: train/loss was" in out
    assert "torch" in out


def test_verify_finds_a_diverged_run_identical(typed: Typed, small: list[str]) -> None:
    more = ["optim.lr=1e30", "optim.clip=null", "train.log_every_steps=1"]
    path = run_here([*small, *more]).path
    status, out, _ = typed("verify", str(path))
    assert (status, out.split(":")[0]) == (0, "identical"), out


@pytest.mark.parametrize(("at", "key"), [(19, "val/loss"), (4, "val/loss"), (9, "tokens"), (19, "test/loss")])
def test_verify_finds_an_edited_figure(typed: Typed, finished: Path, at: int, key: str) -> None:
    rows = metrics.read(finished / "metrics.jsonl")
    rows[at][key] -= 1
    (finished / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = typed("verify", str(finished))
    assert (status, f"at step {at + 1}: {key}" in out) == (1, True), out


def test_verify_refuses_swapped_weights(typed: Typed, small: list[str]) -> None:
    path = run_here([*small, "train.checkpoint_every_steps=10", "train.eval_every_steps=10"]).path
    folder = path / "checkpoints"
    shutil.copy(folder / "step-00000010" / "model.safetensors", folder / "step-00000020" / "model.safetensors")
    status, _, err = typed("verify", str(path))
    assert (status, "model.safetensors" in err) == (2, True)
    status, out, err = typed("eval", str(path), "--json")
    assert (status, json.loads(out)["step"]) == (0, 10)
    assert "is damaged" in err


def test_resume_of_a_renamed_run_goes_on_there_and_of_an_edited_one_is_refused(typed: Typed, small: list[str]) -> None:
    path = run_here(small, stop_at=10).path
    renamed = path.rename(path.with_name("elsewhere"))
    status, out, err = typed("train", "--resume", str(renamed), "--stop-at", "15", "--no-tune-malloc")
    assert (status, out.split()[:2]) == (0, ["stopped", str(renamed)]), err
    text = (renamed / "config.yaml").read_text()
    (renamed / "config.yaml").write_text(text.replace("lr: 0.003", "lr: 0.3"))
    status, _, err = typed("train", "--resume", str(renamed))
    assert (status, "is not what its checkpoints were trained with" in err) == (2, True)


def test_resume_of_a_stale_run_is_refused_and_its_origin_stays_on_record(
    typed: Typed, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_here(small, stop_at=10).path
    began = RunDir.open(path).manifest()["code_hash"]
    for module in (run_one, training):
        monkeypatch.setattr(module, "code_hash", lambda plugins: "0123456789abcdef")
    status, _, err = typed("train", "--resume", str(path))
    assert (status, "made by other code" in err) == (2, True)
    status, _, err = typed("train", "--resume", str(path), "--reuse-stale", "--no-tune-malloc")
    manifest = RunDir.open(path).manifest()
    assert (status, manifest["state"], manifest["code_hash"]) == (0, "finished", began), err
    assert [s["code_hash"] for s in manifest["sessions"]] == [began, "0123456789abcdef"]
    assert "since step 10: code_hash" in err


def test_a_name_that_is_not_used_is_said(typed: Typed, finished: Path, small: list[str]) -> None:
    status, _, err = typed("train", *small, "train.log_every_steps=1", "name=other")
    assert status == 0
    assert f"name=other is not used: this experiment is {finished}" in err


def test_a_run_without_steps_can_not_be_verified_or_evaluated(typed: Typed, finished: Path) -> None:
    bare = finished.with_name("bare-00000000")
    RunDir.create(bare, RunDir.open(finished).config())
    for command in ("verify", "eval"):
        status, _, err = typed(command, str(bare))
        assert status == 2
        assert err.startswith("error: ")


@pytest.mark.parametrize("command", ["verify", "eval"])
def test_other_data_is_refused_not_called_a_difference(typed: Typed, finished: Path, command: str) -> None:
    RunDir.open(finished).update_manifest(fingerprint="0" * 24)
    status, _, err = typed(command, str(finished))
    assert (status, "is not what it was trained on" in err) == (2, True)


def test_eval_of_own_data_prepares_nothing_anew(typed: Typed, finished: Path, cache_dir: Path) -> None:
    before = sorted(p.name for p in (cache_dir / "data").iterdir())
    assert typed("eval", str(finished))[0] == 0
    assert sorted(p.name for p in (cache_dir / "data").iterdir()) == before


@pytest.mark.parametrize("word", ["seed=99999999999999999999", "seed.init=9223372036854775808", "model.d_model=1e30"])
def test_absurd_sizes_are_refused_at_once(typed: Typed, word: str) -> None:
    status, _, err = typed("train", "--dry-run", word)
    assert (status, err.count("error:"), err.count("hint:")) == (2, 1, 1)


def test_a_group_of_commands_alone_prints_its_help(typed: Typed) -> None:
    status, out, err = typed("runs")
    assert status == 2
    assert "diff" in out + err
    assert "error" not in err
