"""`lmlab bench` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.cli.app import run

NANO = ["model=nano", "model.n_layers=1", "model.d_model=32", "model.seq_len=16", "train.batch_tokens=32"]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["bench", "peer"], "`peer` is not a benchmark", "use peers"),
        (
            ["bench", "peers", "norm=layernorm"],
            "`norm` can't be changed at `lmlab bench peers`",
            "keys that may be set",
        ),
        (["bench", "peers", "model.dropout=0.1"], "`model.dropout` can't be changed", "keys that may be set"),
        (["bench", "train", "train.max_steps=5"], "`train.max_steps` can't be changed", "keys that may be set"),
        (["bench", "train", "init.run=x"], "`init.run` can't be changed", "keys that may be set"),
        (["bench", "decode", "kernels=reference"], "`kernels` can't be changed", "keys that may be set"),
        (["bench", "decode", "model.seq_len=2", "train.batch_tokens=2"], "half of it is to be read", "use 4 or more"),
        (["bench", "attn", "model.seq_len=1"], "too short a row", "use model.seq_len=4 or more"),
        (["bench", "train", "--out", "/dev/null/x"], "can't write to /dev/null/x", "--out DIR"),
        (["bench", "train", "fast"], "`fast` is no key=value", "lists what is measured"),
        (["bench", "train", "model.n_heads=3"], "model.n_heads", "hint:"),
        (["bench", "peers", "model=neox"], "`model` sets model.tie_embeddings=False", "use sizes alone"),
        (["bench", "peers", "data=passkey", "tokenizer=byte"], "`data=passkey` is no text", "use data=sotu"),
        (["bench", "train", "kernels=triton"], "`kernels` is triton", "use kernels=auto"),
        (["bench", "peers", "kernels=triton"], "`kernels` is triton", "use kernels=auto"),
        (["bench", "decode", "attn.qk_norm=head"], "`attn.qk_norm` is not a field of attn=mla", "hint:"),
        (["bench", "train", "--rounds", "1"], "--rounds", "hint:"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: list[str], error: str, hint: str) -> None:
    assert run(words) == 2
    told = capsys.readouterr().err
    assert error in told
    assert hint in told
    assert len(told.strip().splitlines()) == 2


def test_variants_of_one_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lmlab.bench.limits.COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("lmlab.bench.limits.matmul_size", lambda device, dtype: 64)
    monkeypatch.setattr("lmlab.bench.variants.GROUPS", ("norm",))
    monkeypatch.setattr("lmlab.bench.variants.LEAST_S", 0.01)
    monkeypatch.setattr("lmlab.bench.variants.FIELDS", (("attn.window=8",), ("attn.window=16",)))
    assert run(["bench", "variants", *NANO, "--rounds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in found["rows"]] == [
        "norm=layernorm", "norm=batchnorm", "norm=dyt", "norm=none", "attn.window=8",
    ]  # fmt: skip
    assert found["rows"][0]["flops_per_token_ratio"] == 1
    assert 0 < found["rows"][-1]["flops_per_token_ratio"] < 1  # a window attends to fewer pairs
    assert any("attn.window=16 is not measured" in line for line in found["said"])
    assert json.loads((tmp_path / "runs" / "bench" / "variants.json").read_text()) == found
    assert (tmp_path / "runs" / "bench" / "variants.svg").read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "peers"])
def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = [*NANO, "compile=false", "--rounds", "3", "--out", str(tmp_path)]
    assert run(["bench", kind, *words]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / f"{kind}.json").read_text())
    who = [one["who"] for one in found["rows"]]
    assert who[:2] == (["lmlab", "the same net by hand"] if kind == "train" else ["lmlab", "transformers"])
    assert all(one["peak_bytes"] > 0 and one["tokens_per_s"]["low"] > 0 for one in found["rows"])
    assert "loader:" in out if kind == "train" else "the leanest peer" in out
