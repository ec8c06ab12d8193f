"""`lmlab train --from RUN` and the key `init.run`: what the new run is, where it is from, and that it stands alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lmlab
from lmlab.cli import app
from lmlab.inherit import composed
from lmlab.runs import checkpoint
from lmlab.runs.rundir import RunDir
from lmlab.train.step import Stepper
from tests.cli.conftest import run_here
from tests.cli.test_run import final_state, training_rows
from tests.train.conftest import SMALL

STEPS = ["train.max_steps=3", "train.log_every_steps=1", "train.checkpoint_every_steps=1"]


@pytest.fixture
def words(small: list[str], in_tmp: Path) -> list[str]:
    return [*(w for w in small if not w.startswith("train.max_steps")), *STEPS]


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs of three steps, `first` and `other`."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    more = ["data=text", f"data.files=['{corpus}']", "data.val_frac=0.2", "data.test_frac=0.2", f"paths.runs={root}"]
    own = [w for w in SMALL if not w.startswith("train.max_steps")]
    for name, seed in (("first", 5), ("other", 6)):
        run_here([*own, *more, *STEPS, f"name={name}", f"seed={seed}"])
    return root


def copied(trained: Path, name: str) -> RunDir:
    """Its copy in ./runs."""
    (path,) = trained.glob(f"{name}-*")
    return RunDir(shutil.copytree(path, Path.cwd() / "runs" / path.name))


@pytest.fixture
def first(trained: Path, in_tmp: Path) -> RunDir:
    return copied(trained, "first")


@pytest.fixture
def other(trained: Path, in_tmp: Path) -> RunDir:
    return copied(trained, "other")


def started(run: RunDir, *more: str, **flags: Any) -> Any:
    return run_here([f"init.run={run.name}", "wandb.mode=disabled", *more], **flags)


def hash_at(run: RunDir, step: int) -> str:
    return next(checkpoint.load(ref.path).content_hash for ref in run.checkpoints() if ref.step == step)


def called(line: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    status = app.run(list(line))
    return (status, *capsys.readouterr())


# ---------------------------------------------------------------- what it is


def test_it_starts_from_the_last_weights_bit_for_bit(first: RunDir) -> None:
    result = started(first)
    run = RunDir(result.path)
    assert run.path != first.path
    assert hash_at(run, 0) == hash_at(first, 3) == run.config()["init"]["source"]
    assert checkpoint.load(run.checkpoints()[0].path).state["optimizer"]["norm.weight"] == {}
    assert [ref.step for ref in run.checkpoints()] == [0, 2, 3]  # step 0 stays, keep_last is 2
    assert (result.state, result.figures["step"]) == ("finished", 3)
    assert result.figures["content_hash"] != hash_at(first, 3)


def test_what_it_inherits_and_what_not(first: RunDir, in_tmp: Path) -> None:
    exp = composed([f"init.run={first.name}"]).experiment
    theirs = first.config()
    assert (exp.name, exp.paths.runs, exp.wandb.mode, exp.device) == (None, "runs", "auto", "auto")
    assert exp.init.run == str(first.path.absolute())
    assert (exp.model.d_model, exp.seed.all, exp.train.max_steps) == (32, 5, 3)
    assert exp.data.files == theirs["data"]["files"]  # type: ignore[attr-defined]
    choices = composed([f"init.run={first.name}", "ffn=geglu"]).choices
    assert choices == first.manifest()["choices"] | {"ffn": "geglu"}
    assert choices["model"] == "nano"


def test_the_same_line_is_the_same_run(first: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    once = started(first, "optim.lr=1e-3")
    monkeypatch.setattr(Stepper, "__call__", lambda *a, **k: pytest.fail("trained again"))
    again = started(first, "optim.lr=1e-3", "name=other")
    assert again.path == once.path


@pytest.mark.slow
def test_two_sources_are_two_runs(first: RunDir, other: RunDir) -> None:
    a, b = (composed([f"init.run={run.name}", "seed=1"]).experiment for run in (first, other))
    assert a.init.source != b.init.source
    paths = {run_here([f"init.run={run.name}", "seed=1", "wandb.mode=disabled"]).path for run in (first, other)}
    assert len(paths) == 2


@pytest.mark.parametrize("how", ["path", "hash", "name", "checkpoint"])
def test_how_the_source_is_named(first: RunDir, how: str) -> None:
    named = {"path": str(first.path), "hash": first.hash, "name": "first"}
    named["checkpoint"] = str(first.checkpoints()[0].path)
    start = composed([f"init.run={named[how]}"]).start
    assert start is not None
    assert start.step == (2 if how == "checkpoint" else 3)
    assert start.content_hash == hash_at(first, start.step)


def test_the_first_step_is_that_of_the_source(first: RunDir) -> None:
    """The loss of the first batch is the source's on it: weights, data order and tokenizer are what they are said."""
    run = RunDir(started(first).path)
    model, _, _ = lmlab.load(first.path)
    batches = _batches(run)
    with torch.no_grad():
        batch = batches.batch(0)
        loss = model(batch.tokens_BT, batch.positions_BT, targets_BT=batch.targets_BT, weights_BT=batch.weights_BT).loss
    assert training_rows(run.path)[0]["train/loss"] == pytest.approx(float(loss / batch.weights_BT.sum()), rel=1e-6)


def _batches(run: RunDir) -> Any:
    from lmlab.data.batches import TrainBatches
    from lmlab.data.prepare import cache_dir, prepare
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.opened import experiment_of

    exp, tokenizer = experiment_of(run), Tokenizer.load(run.tokenizer_path)
    train = prepare(exp.data, exp.tokenizer, cache_dir(), trained=tokenizer).train
    return TrainBatches(train, rows=8, seq_len=16, seed=exp.seeds()["data"], packing="stream", start=tokenizer.start)


# ---------------------------------------------------------------- it stands alone


@pytest.mark.slow
def test_resume_verify_and_eval_when_the_source_is_gone(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    changed = ["attn=gqa", "model.seq_len=32", "model.dropout=0.1", "seed=2"]
    whole = started(first, *changed)
    kept = training_rows(whole.path), whole.figures["content_hash"]
    optimizer = final_state(whole.path).state["optimizer"]
    whole.path.rename(whole.path.with_name("put-away"))
    stopped = started(first, *changed, stop_at=1)
    assert stopped.state == "stopped"
    shutil.rmtree(first.path)
    status, _, err = called(["train", "--resume", str(stopped.path)], capsys)
    assert status == 0, err
    run = RunDir(stopped.path)
    assert (training_rows(run.path), run.manifest()["result"]["content_hash"]) == kept
    again = final_state(run.path).state["optimizer"]
    assert all(torch.equal(optimizer[n][k], again[n][k]) for n in optimizer for k in optimizer[n])
    status, out, err = called(["verify", str(run.path)], capsys)
    assert status == 0, out + err
    assert "identical" in out
    status, out, err = called(["eval", str(run.path), "--json"], capsys)
    assert status == 0, err
    assert json.loads(out)["loss"] == pytest.approx(run.manifest()["result"]["val/loss"], rel=1e-6)


def test_verify_sees_other_starting_weights(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(started(first).path)
    zero = checkpoint.load(run.checkpoints()[0].path)
    model = {name: tensor + 1 for name, tensor in zero.model.items()}
    checkpoint.save(run.path.parent / "elsewhere", 0, model, zero.state, config=zero.config, keep_last=1)
    shutil.rmtree(zero.path)
    (run.path.parent / "elsewhere" / "checkpoints" / zero.path.name).rename(zero.path)
    status, out, _ = called(["verify", str(run.path)], capsys)
    assert status == 1
    assert "at step 0: the starting weights' content hash was" in out
    shutil.rmtree(zero.path)
    status, _, err = called(["verify", str(run.path)], capsys)
    assert status == 2
    assert "has lost its checkpoint of step 0" in err


@pytest.mark.slow
def test_killed_before_its_first_step_it_begins_again(first: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmlab.cli import plan as planning

    want = started(first)
    want.path.rename(want.path.with_name("put-away"))
    with monkeypatch.context() as killed:
        killed.setattr(planning, "measure", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            started(first)
    assert started(first).figures["content_hash"] == want.figures["content_hash"]


# ---------------------------------------------------------------- what is told


def test_the_table_is_in_the_log_and_the_manifest(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--from", "first", "attn=gqa", "model.tie_embeddings=false", "attn.bias_o=true"]
    line += ["wandb.mode=disabled"]
    status, _, err = called([*line, "--dry-run"], capsys)
    assert status == 0
    said = "blocks.0-1.attn.k.weight, blocks.0-1.attn.v.weight: 32×32 → 16×32, means of 2 heads"
    for text in ("first-", "step 3 · tensors (parameters):", "4 resized (2,048) · 2 fresh (64)", said):
        assert text in err
    assert "head.weight: of embed.weight" in err
    assert not list(Path("runs").glob("from_*"))
    assert called(line, capsys)[0] == 0
    (path,) = Path("runs").glob("from_*")
    run = RunDir(path)
    assert said in (run.path / "log.txt").read_text()
    lineage = run.manifest()["lineage"]
    assert (lineage["run"], lineage["path"], lineage["step"]) == (first.name, str(first.path.absolute()), 3)
    assert lineage["content_hash"] == hash_at(first, 3)
    assert lineage["resized"] == {"tensors": 4, "parameters": 2048}
    assert {c["name"] for c in lineage["changed"]} == {
        *(f"blocks.{i}.attn.{name}" for i in (0, 1) for name in ("k.weight", "v.weight", "o.bias")),
        "head.weight",
    }
    assert f"run: {first.name}" in called(["runs", "show", run.name], capsys)[1]


@pytest.mark.slow
def test_the_chain_of_sources(first: RunDir) -> None:
    second = RunDir(started(first, "seed=1", "name=second").path)
    third = RunDir(started(second, "rope_scaling=pi", "name=third").path)
    lineage = third.manifest()["lineage"]
    assert lineage["run"] == second.name
    assert lineage["lineage"]["run"] == first.name
    assert lineage["lineage"]["content_hash"] == hash_at(first, 3)
    assert lineage["lineage"]["lineage"] is None
    assert "changed" not in lineage["lineage"]


@pytest.mark.slow
def test_reports_name_other_starting_weights(
    first: RunDir, other: RunDir, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sweep", f"init.run={first.name},{other.name}", "seed=1", "wandb.mode=disabled"]
    status, _, err = called(line, capsys)
    assert status == 0, err
    drawn = run_here([*words, "seed=1"])
    (sweep,) = Path("runs/sweeps").iterdir()
    status, out, err = called(["report", str(sweep), str(drawn.path)], capsys)
    assert status == 0, err
    (text,) = [line for line in (out + err).splitlines() if "starting weights" in line][:1]
    assert first.name in text
    assert other.name in text
    assert "(all that differs)" in text
    runs = {str(p) for p in Path("runs").glob("from_*")}
    assert len(runs) == 2
    status, _, err = called(line, capsys)
    assert status == 0
    assert {str(p) for p in Path("runs").glob("from_*")} == runs


# ---------------------------------------------------------------- data, tokenizer, parts


def test_other_data_is_read_with_the_sources_tokenizer(
    words: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [w for w in words if not w.startswith("tokenizer")]
    source = RunDir(run_here([*own, "tokenizer=bpe", "tokenizer.vocab_size=300", "name=source"]).path)
    Path("more.txt").write_text("\n\n".join(f"quite other words, zebra {i} xylophone {i * 7}" for i in range(900)))
    run = RunDir(started(source, "data=text", "data.files=[more.txt]").path)
    assert run.manifest()["tokenizer_hash"] == source.manifest()["tokenizer_hash"]
    assert run.manifest()["fingerprint"] != source.manifest()["fingerprint"]
    shutil.rmtree(source.path)
    Path("third.txt").write_text("\n\n".join(f"a third text, {i * 3} of them" for i in range(900)))
    third = ["data=text", "data.files=[third.txt]"]
    for command in (["verify", str(run.path)], ["eval", str(run.path)], ["eval", str(run.path), *third]):
        status, _, err = called(command, capsys)
        assert status == 0, err


def test_parts_of_ones_own_come_from_the_sources_copies(words: list[str], in_tmp: Path) -> None:
    from lmlab.cli.new import filled

    Path("from_attn.py").write_text(filled("attn.py.txt", "attn", "from_attn"))
    source = RunDir(run_here([*words, "plugins=[from_attn.py]", "attn=from_attn", "name=source"]).path)
    Path("from_attn.py").unlink()
    run = RunDir(started(source, "seed=9").path)
    shutil.rmtree(source.path)
    assert [path.name for path in run.plugins()] == ["from_attn.py"]
    assert lmlab.load(run.path)[0].dims.d_model == 32


@pytest.mark.slow
def test_parts_of_ones_own_are_known_in_a_fresh_process(words: list[str], in_tmp: Path) -> None:
    from lmlab.cli.new import filled

    Path("fresh_attn.py").write_text(filled("attn.py.txt", "attn", "fresh_attn"))
    source = RunDir(run_here([*words, "plugins=[fresh_attn.py]", "attn=fresh_attn", "name=source"]).path)
    Path("fresh_attn.py").unlink()
    line = [sys.executable, "-m", "lmlab", "train", "--from", source.name, "wandb.mode=disabled", "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = RunDir(Path(json.loads(done.stdout)["run"]))
    assert hash_at(run, 0) == hash_at(source, 3)
    opening = f"from lmlab.opened import *; refuse_edited(RunDir(Path({str(run.path.absolute())!r})))"
    subprocess.run([sys.executable, "-c", opening], check=True)  # in whichever order a caller asks


def test_a_scaling_asks_for_the_length_that_was_trained(first: RunDir) -> None:
    exp = composed([f"init.run={first.name}", "model.seq_len=64", "rope_scaling=yarn"]).experiment
    assert exp.rope_scaling.original_len == 16  # type: ignore[attr-defined]
    typed = ["rope_scaling=yarn", "rope_scaling.original_len=32"]
    exp = composed([f"init.run={first.name}", "model.seq_len=64", *typed]).experiment
    assert exp.rope_scaling.original_len == 32  # type: ignore[attr-defined]


def test_a_part_chosen_anew_keeps_what_both_have(words: list[str]) -> None:
    more = ["ffn.d_ff=48", "attn.window=4", "attn.qk_norm=head", "name=kept"]
    source = RunDir(run_here([*words, *more]).path)
    exp = composed([f"init.run={source.name}", "ffn=geglu", "attn=gqa", "attn.window=8"]).experiment
    assert exp.ffn.d_ff == 48  # type: ignore[attr-defined]
    assert (exp.attn.name, exp.attn.window, exp.attn.qk_norm) == ("gqa", 8, "head")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_unfinished_run_will_do(words: list[str]) -> None:
    source = RunDir(run_here([*words, "name=stopped"], stop_at=2).path)
    run = RunDir(started(source).path)
    assert run.manifest()["lineage"]["step"] == 2


def test_a_damaged_checkpoint_is_passed_over_and_named_ones_are_refused(
    first: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    last = first.checkpoints()[-1].path
    with open(last / "model.safetensors", "ab") as f:
        f.write(b"x")
    status, _, err = called(["train", "--from", "first", "--dry-run"], capsys)
    assert status == 0
    assert "trying the checkpoint before it" in err
    assert "step 2" in err
    status, _, err = called(["train", "--from", str(last), "--dry-run"], capsys)
    assert status == 2
    assert "model.safetensors is damaged" in err


# ---------------------------------------------------------------- refused

REFUSED = {
    "--from first init.run=other": ("`--from first` and `init.run=other` name two runs", "leave one out"),
    "--from first --resume first": ("`--resume first` goes on with a run, and `--from first` starts one", "leave one"),
    "init.run=first --resume auto": ("goes on with a run, and `init.run=first` starts one", "leave one"),
    "--from nowhere": ("no run nowhere in runs", "the runs there: first-"),
    "--from first tokenizer=bpe": ("`tokenizer=bpe`: weights that were trained mean nothing", "leave it out"),
    "--from first preset=llama": ("the run says what the parts are", "leave it out"),
    "--from first seed.init=3": ("`seed.init` is 3, and every weight is the run's", "leave seed.init out"),
    "--from first init.resize=extend": ("`init.resize` is extend, and there is no learned table", "leave init.resize"),
    "--from first model.n_layers=3": ("`model.n_layers` is 3, and that of first-", "leave model.n_layers out"),
    "--from first init.source=abc": ("`init.source` is given as abc; lmlab fills it in", "leave it out"),
    "init.resize=extend": ("`init.resize` is extend, but weights are drawn", "init.run=RUN"),
    "--from first pos=learned": ("`pos=learned` has other weights than `pos=rope` of first-", "leave pos= out"),
}  # fmt: skip


def test_two_lines_each(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for line, (message, hint) in REFUSED.items():
        status, out, err = called(["train", *line.split()], capsys)
        told = [text for text in err.splitlines() if text.startswith(("error: ", "hint: "))]
        assert (status, out, len(told)) == (2, "", 2), (line, err)
        assert message in told[0], line
        assert hint in told[1], line
    for command in ("check", "data prepare"):
        status, _, err = called([*command.split(), "init.run=first"], capsys)
        assert status == 2
        assert f"`lmlab {command}` trains nothing" in err
    status, _, err = called(["sweep", "init.run=first", "seed=0,1", "hydra/launcher=basic"], capsys)
    assert status == 2
    assert "init.run=first is for lmlab's own launcher" in err


@pytest.mark.slow
def test_force_needs_the_source(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--from", "first", "wandb.mode=disabled", "--json"]
    path = json.loads(called(line, capsys)[1])["run"]
    for flags in (["--force"], ["--force", "--reuse-stale"], ["--force", "--dry-run"]):
        status, _, err = called(["train", "--resume", path, *flags], capsys)
        assert status == 2
        assert "give its own command with --force" in err
        assert (Path(path, "checkpoints").is_dir(), RunDir(Path(path)).state()) == (True, "finished")
        assert not list(Path("runs").glob("*.old-*"))
    assert json.loads(called([*line, "--force"], capsys)[1])["run"] == path
    assert Path(f"{path}.old-1").is_dir()


@pytest.mark.slow
def test_a_stale_run_is_not_moved_without_its_source(
    first: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmlab.cli import run_one

    line = ["train", "--from", first.name, "wandb.mode=disabled", "--json"]
    run = RunDir(Path(json.loads(called(line, capsys)[1])["run"]))
    run.update_manifest(code_hash="other")
    first.path.rename(first.path.with_name("put-away"))
    for words in (["--resume", run.name], ["--resume", run.name, "--force"], line[1:3], [*line[1:3], "--force"]):
        assert called(["train", *words], capsys)[0] == 2, words
        assert run.state() == "finished"
    monkeypatch.setattr(run_one, "refuse_stale", lambda *a: None)  # the code changes just after it was compared
    status, _, err = called(["train", "--resume", run.name], capsys)
    assert (status, run.state()) == (2, "finished"), err
    assert "give its own command with --force" in err
    assert [path.name for path in Path("runs").glob("*.old-*")] == []
    assert called(["train", "--resume", run.name, "--reuse-stale"], capsys)[0] == 0
    Path("runs/put-away").rename(first.path)
    assert called(line, capsys)[0] == 0
    assert [path.name for path in Path("runs").glob("*.old-*")] == [f"{run.name}.old-1"]


def test_equal_names_are_no_contradiction(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(["train", "--from", "first", "init.run=first", "--dry-run"], capsys)[0] == 0


def test_a_source_that_is_trained_or_has_no_checkpoint(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with first.claim():
        status, _, err = called(["train", "--from", "first"], capsys)
    assert status == 2
    assert "is being trained by process" in err
    shutil.rmtree(first.path / "checkpoints")
    status, _, err = called(["train", "--from", "first"], capsys)
    assert status == 2
    assert "has no checkpoint to start from" in err


def test_an_edited_source_is_refused(first: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    file = first.path / "config.yaml"
    file.write_text(file.read_text().replace("n_heads: 4", "n_heads: 2"))
    status, _, err = called(["train", "--from", "first"], capsys)
    assert status == 2
    assert "is not what its checkpoints were trained with" in err
