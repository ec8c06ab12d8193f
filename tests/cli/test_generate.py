"""`lmlab generate` as a user calls it: one run of a few steps, then prompts, files, wrong input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import DataError, LmlabError
from lmlab.runs.rundir import RunDir
from tests.cli.conftest import few_documents, run_here
from tests.generate.test_text import llama, sentencepiece_like


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of few steps in bytes."""
    folder = tmp_path_factory.mktemp("generate")
    words = "tokenizer=byte model=nano model.n_layers=2 model.seq_len=64 train.batch_tokens=256 train.max_steps=3"
    words += f" train.eval_tokens=256 paths.runs={folder} wandb.mode=disabled"
    path: Path = run_here([*words.split(), *few_documents(folder / "data")]).path
    return path


@pytest.fixture(scope="module")
def sentencepiece_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer that spells as Llama's, bytes among its ids."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    text, end = sentencepiece_like(llama).as_hf()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}), encoding="utf-8")
    words = f"tokenizer=hf tokenizer.path={folder} model=nano model.n_layers=1 model.seq_len=64 train.batch_tokens=256"
    words += f" train.max_steps=1 train.eval_tokens=256 paths.runs={folder / 'runs'} wandb.mode=disabled"
    path: Path = run_here([*words.split(), *few_documents(folder / "data")]).path
    return path


def call(*words: str) -> Any:
    return CliRunner().invoke(make_app(), ["generate", *words])


def texts(*words: str) -> list[dict[str, Any]]:
    done = call(*words, "--json")
    assert done.exception is None, done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_prompt_is_streamed_and_costs_are_told(run):
    done = call(str(run), "--prompt", "Fellow citizens", "--max-new", "9")
    assert done.exit_code == 0
    assert done.stdout.startswith("Fellow citizens")
    (own,) = texts(str(run), "--prompt", "Fellow citizens", "--max-new", "9")
    assert done.stdout == f"Fellow citizens{own['text']}\n"
    assert "prefill 16 tokens" in done.stderr
    assert "decode 8 tokens" in done.stderr
    assert own["cache_bytes"] == 2 * 2 * 128 * 4 * (16 + 9)


@pytest.mark.parametrize("seed", range(4))
def test_spaces_and_bytes_of_sentencepiece(sentencepiece_run, seed):
    words = [str(sentencepiece_run), "--prompt", "Fellow", "--seed", str(seed), "--max-new", "40"]
    tokenizer = Tokenizer.load(RunDir(sentencepiece_run).tokenizer_path)
    (own,) = texts(*words)
    assert call(*words).stdout == f"Fellow{own['text']}\n"
    made = generated_ids(sentencepiece_run, "Fellow", seed, 40)
    assert own["text"] == tokenizer.decode([*tokenizer.encode("Fellow"), *made]).removeprefix("Fellow")
    assert any(tokenizer.decode([i]) == "\ufffd" for i in made)


def test_lone_surrogates_of_an_imported_run(sentencepiece_run, tmp_path):
    run = RunDir(Path(shutil.copytree(sentencepiece_run, tmp_path / sentencepiece_run.name)))
    run.update_manifest(state="imported")
    assert call(str(run.path), "--prompt", "Fellow", "--max-new", "2").exit_code == 0
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "\\ud800"}\n')
    for words in (["--prompt", "a\udcff"], ["--prompts", str(tmp_path / "p.jsonl")]):
        error = call(str(run.path), *words).exception
        assert isinstance(error, DataError), error
        assert "is the lone surrogate" in error.message


def generated_ids(path: Path, prompt: str, seed: int, n: int) -> list[int]:
    """The same by the parts."""
    from lmlab.cli.open_run import open_run
    from lmlab.cli.progress import Screen
    from lmlab.generate.decode import generate
    from lmlab.generate.sample import unwritable
    from lmlab.generate.sampling import Sampling
    from lmlab.runs.find import resolve

    opened = open_run(resolve(str(path), path.parent), [], None, Screen(), cpu_precision="fp32")
    model, tokenizer = opened.model(), opened.tokenizer
    start = [tokenizer.eot, *tokenizer.encode(prompt)]
    how = {"end": tokenizer.eot, "forbidden_V": unwritable(model, tokenizer)}
    return generate(model, [start], max_new=n, sampling=Sampling(0.8, seed=seed), **how).tokens[0]


def test_a_file_of_prompts_is_each_alone(run, tmp_path):
    prompts = ["Fellow citizens", "We", "The state of the Union is", "日本", "a", "I thank", "0123456789", "On"]
    (tmp_path / "p.txt").write_text("\n\n".join(prompts), encoding="utf-8")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts), encoding="utf-8")
    together = texts(str(run), "--prompts", str(tmp_path / "p.txt"), "--max-new", "20")
    assert [t["prompt"] for t in together] == prompts
    again = texts(str(run), "--prompts", str(tmp_path / "p.jsonl"), "--max-new", "20")
    assert [t["text"] for t in together] == [t["text"] for t in again]
    for prompt, found in zip(prompts, together, strict=True):
        assert texts(str(run), "--prompt", prompt, "--max-new", "20")[0]["text"] == found["text"]
    plain = call(str(run), "--prompts", str(tmp_path / "p.txt"), "--max-new", "20")
    assert plain.stdout.startswith(f"[1] Fellow citizens{together[0]['text']}\n")


def test_seeds_samples_and_caches(run):
    first, other = (texts(str(run), "--prompt", "We", "--seed", s)[0]["text"] for s in "01")
    assert first != other
    many = texts(str(run), "--prompt", "We", "--samples", "3")
    assert [m["sample"] for m in many] == [0, 1, 2]
    assert many[0]["text"] == first
    assert len({m["text"] for m in many}) == 3
    assert texts(str(run), "--prompt", "We", "--cache", "none")[0]["text"] == first
    assert texts(str(run), "--prompt", "We", "--cache", "window:8")[0]["cache_bytes"] == 2 * 2 * 128 * 4 * 8
    assert texts(str(run), "--prompt", "We", "--cache", "int8", "--temperature", "0")[0]["tokens"] == 128
    assert texts(str(run), "--prompt", "", "--max-new", "3")[0]["tokens"] == 3


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ([], "neither --prompt nor --prompts is given", "give one of them"),
        (["--prompt", "a", "--prompts", "f"], "--prompt and --prompts are both given", "give one of them"),
        (["--prompts", "absent.txt"], "`--prompts` absent.txt can't be read: No such file", "a prompt a line"),
        (["--prompt", "a\udcff"], "character 1 of a text is the lone surrogate '\\udcff'", "valid Unicode"),
        (["--prompt", "a", "--temperature", "-1"], "`--temperature` is -1", "0 (greedy) or more"),
        (["--prompt", "a", "--temperature", "nan"], "`--temperature` is nan", "0 (greedy) or more"),
        (["--prompt", "a", "--top-p", "0"], "`--top-p` is 0", "more than 0 and at most 1"),
        (["--prompt", "a", "--temperature", "0", "--top-k", "3"], "`--top-k` has nothing to act on", "leave --top-k"),
        (["--prompt", "a", "--temperature", "0", "--samples", "3"], "`--samples` is 3", "leave --samples out"),
        (["--prompt", "a", "--temperature", "0", "--seed", "5"], "`--seed` has nothing to act on", "leave --seed"),
        (["--prompt", "a", "--temperature", "0", "--seed", "0"], "`--seed` has nothing to act on", "leave --seed"),
        (["--prompt", "a", "--cache", "window:9999"], "`--cache` is window:9999, which drops nothing", "smaller"),
        (["--prompt", "a", "--max-new", "9", "--cache", "window:10"], "give it at most 10 tokens", "smaller"),
        (["--prompt", "a", "--max-new", "9", "--cache", "sink:4+6"], "`--cache` is sink:4+6, which drops", "smaller"),
        (["--prompt", "a", "--cache", "windw:3"], "`--cache` is windw:3", "window:N"),
        (["--prompt", "a", "--cache", "window:0"], "`--cache` is window:0", "window:1 or more"),
        (["--prompt", "a", "--cache", "sink:0+8"], "no token is a sink", "write window:8"),
        (["--prompt", "a", "--max-new", "9000000"], "the cache of 1 × 9,000,002 tokens takes", "window:N"),
        (["--prompt", "a", "compile=true"], "`compile` can't be changed at generation", "set: kernels, device"),
        (["--prompt", "a", "norm=layernorm"], "`norm` can't be changed at generation", "keys that may be set"),
        (["--prompt", "a", "other"], "two runs are named", "name one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_told(run, monkeypatch, words, message, hint):
    monkeypatch.setattr("lmlab.train.memory.free_bytes", lambda device: 2**30)
    error = call(str(run), *words).exception
    assert isinstance(error, LmlabError), error
    assert message in error.message
    assert hint in error.hint


def test_a_window_that_drops_one_token_acts(run):
    seen = [texts(str(run), "--prompt", "a", "--max-new", "9", *c)[0] for c in ([], ["--cache", "window:9"])]
    assert seen[1]["cache_bytes"] == seen[0]["cache_bytes"] * 9 // 11
    assert texts(str(run), "--prompt", "a", "--max-new", "9", "--cache", "sink:4+5")[0]["cache"] == "sink:4+5"


def test_a_window_wider_than_the_models_own_is_refused(tmp_path):
    words = "attn.window=4 tokenizer=byte model=nano model.n_layers=1 model.seq_len=16 wandb.mode=disabled"
    sizes = ["train.batch_tokens=64", "train.max_steps=1", "train.eval_tokens=64", f"paths.runs={tmp_path}"]
    path = run_here([*words.split(), *sizes, *few_documents(tmp_path / "data")]).path
    error = call(str(path), "--prompt", "abc", "--cache", "window:6").exception
    assert error.message == "`--cache` is window:6: no layer keeps more than its window of 4"
    assert call(str(path), "--prompt", "abc", "--cache", "window:3").exit_code == 0


def test_what_is_not_causal_is_refused(run, monkeypatch):
    from lmlab.model.block import PreNorm

    monkeypatch.setattr(PreNorm, "noncausal", "it looks ahead", raising=False)
    error = call(str(run), "--prompt", "a").exception
    assert error.message == "this model is not causal: it looks ahead"
    assert "--allow-noncausal" in error.hint
    assert call(str(run), "--prompt", "a", "--allow-noncausal").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json", "--samples", "999"]], ids=["streamed", "json"])
def test_a_reader_that_leaves_ends_it_quietly(run, more):
    line = [sys.executable, "-m", "lmlab", "generate", str(run), "--prompt", "Fellow citizens", *more]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as made:
        assert len(made.stdout.read(5)) == 5
        made.stdout.close()
        assert (made.wait(), b"rror" in made.stderr.read()) == (141, False)


def test_learned_positions_end_where_their_table_ends(tmp_path):
    words = "pos=learned tokenizer=byte model=nano model.n_layers=1 model.seq_len=16 wandb.mode=disabled"
    sizes = ["train.batch_tokens=64", "train.max_steps=1", "train.eval_tokens=64", f"paths.runs={tmp_path}"]
    sizes += few_documents(tmp_path / "data")
    path = run_here([*words.split(), *sizes]).path
    error = call(str(path), "--prompt", "abc", "--max-new", "20").exception
    assert error.message == "prompt and --max-new are 24 tokens, `pos=learned` has 16 positions"
    assert error.hint == "use --max-new 12"
    assert call(str(path), "--prompt", "abc", "--max-new", "12").exit_code == 0
    assert call(str(path), "--prompt", "abc" * 20, "--max-new", "1").exception.hint == "use a shorter prompt"
