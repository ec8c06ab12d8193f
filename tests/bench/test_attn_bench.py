"""`lmlab bench attn`: pairs and FLOPs, that backends are asked the same, refusals, and what is said of auto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.bench import attn
from lmlab.bench.attn import MASKS, Heads
from lmlab.cli.app import run
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto

CPU = torch.device("cpu")
HEADS = Heads(H=4, K=2, C=8, tokens=96, dtype=torch.float32, device=CPU)
TYPED = ["model.d_model=32", "train.precision=fp32", "device=cpu", "train.batch_tokens=128", "model.seq_len=32"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlab.bench.attn.LEAST_S", 1e-4)
    monkeypatch.setattr("lmlab.bench.limits.COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("lmlab.bench.limits.matmul_size", lambda device, dtype: 64)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("T", [1, 3, 32])
def test_pairs_are_those_that_see_each_other(mask: str, T: int) -> None:
    scores, B = HEADS.scores(mask, T), HEADS.rows(T)
    seen = scores.seen(range(T), range(T), T, T, CPU)
    assert seen is not None
    assert attn.pairs(scores, B, T) == int(seen.expand(B, 1, T, T).sum())


def test_flops() -> None:
    """4 tokens have 10 pairs; with 2 heads of 3 channels a pair takes 2·2·2·3 forward and twice that backward."""
    heads = Heads(H=2, K=1, C=3, tokens=8, dtype=torch.float32, device=CPU)
    assert heads.flops(heads.scores("causal", 4), 4) == 2 * 10 * 24 * 3


def test_masks_hide_and_bend_as_they_say() -> None:
    assert HEADS.scores("window", 32).window == 8
    assert HEADS.scores("softcap", 32).softcap == 30
    assert HEADS.scores("alibi", 32).biased
    documents = HEADS.scores("documents", 32).documents
    assert documents is not None
    assert 1 < len(documents[0].unique()) < 12


@pytest.mark.parametrize("mask", MASKS)
def test_backends_are_asked_the_same(mask: str) -> None:
    """Gradients agree, so what is timed is one function."""
    ops, qkv = resolve(Auto(), CPU, torch.float32), HEADS.tensors(32)
    scores, found = HEADS.scores(mask, 32), {}
    for backend in ("dense", "tiled") if mask == "softcap" else ("dense", "sdpa", "tiled"):
        torch.manual_seed(0)  # of the gradient that arrives
        found[backend] = attn.attending(ops, backend, scores, qkv)[0]()
    for other in found.values():
        torch.testing.assert_close(other, found["dense"], rtol=1e-4, atol=1e-5)


def test_squares_are_counted() -> None:
    causal, alibi = HEADS.scores("causal", 32), HEADS.scores("alibi", 32)
    squares = {name: attn.held_bytes(name, causal, HEADS, 32) for name in ("dense", "sdpa", "tiled")}
    assert squares["sdpa"] == squares["tiled"] == 0
    assert squares["dense"] > 3 * 4 * 32 * 32 * 4 * 4  # scores, probabilities and their gradients of 3 rows of 4 heads
    assert attn.held_bytes("sdpa", alibi, HEADS, 32) == 2 * 4 * 32 * 32 * 4


def record(mask: str, backend: str, auto: bool, median: float, high: float) -> dict[str, Any]:
    over = {"median": median, "low": median, "high": high}
    return {"mask": mask, "T": 8, "backend": backend, "auto": auto, "auto_over": over}


@pytest.mark.parametrize(
    ("median", "high", "said"),
    [
        (0.5, 0.9, "causal T=8: dense has 0.50 (0.50–0.90) of the speed of sdpa"),
        (0.5, 1.1, "nowhere in every round"),  # a round says otherwise
        (0.98, 0.99, "nowhere in every round"),  # less than 3 %
    ],
)
def test_what_is_said_of_auto(median: float, high: float, said: str) -> None:
    told = attn.slower([record("causal", "dense", True, 1, 1), record("causal", "sdpa", False, median, high)])
    assert told == [f"auto loses more than 3% to the best backend: {said}"]


@pytest.mark.usefixtures("small")
def test_as_it_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlab.bench.attn.MASKS", {name: MASKS[name] for name in ("causal", "softcap")})
    assert run(["bench", "attn", *TYPED, "attn.n_kv_heads=2", "--rounds", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "attn.json").read_text())
    assert found["heads"].startswith("H=4 K=2 C=8, 128 tokens a step, float32")
    rows = {(one["mask"], one["backend"]): one for one in found["rows"]}
    assert set(rows) == {(mask, name) for mask in ("causal", "softcap") for name in ("dense", "sdpa", "tiled", "flex")}
    assert [name for (_, name), one in rows.items() if one.get("auto")] == ["sdpa", "dense"]
    assert rows["softcap", "sdpa"]["refused"] == "`attn.softcap` is 30, which `attn.backend` sdpa can't do"
    assert "no backward on the CPU" in rows["causal", "flex"]["refused"]
    assert rows["causal", "tiled"]["rows"] == 4
    assert rows["causal", "tiled"]["pairs"] == 4 * 32 * 33 // 2
    assert rows["causal", "dense"]["share"]["low"] > 0
    assert "auto: plain causal mask" in out
    assert (tmp_path / "attn.svg").exists()


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmlab.bench.attn.MASKS", {"softcap": MASKS["softcap"]})
    monkeypatch.setattr("lmlab.bench.attn.free_bytes", lambda device: 1000)
    assert run(["bench", "attn", *TYPED, "--rounds", "3", "--out", str(tmp_path), "--json"]) == 0
    rows = {one["backend"]: one for one in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["dense"]["refused"] == "needs about 328 KiB, 1 KiB may be used"
    assert rows["dense"]["auto"]
    assert "share" in rows["tiled"]
    assert "auto_over" not in rows["tiled"]  # nothing to set it beside


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["kernels", "norm=layernorm"], "`norm` can't be changed at `lmlab bench kernels`, which measures every part"),
        (["kernels", "kernels=reference"], "`kernels` can't be changed at `lmlab bench kernels`"),
        (["attn", "attn.window=8"], "`attn.window` can't be changed at `lmlab bench attn`"),
        (["attn", "attn.backend=dense"], "`attn.backend` can't be changed at `lmlab bench attn`"),
        (["attn", "attn.n_kv_heads=3"], "`attn.n_kv_heads` is 3"),
        (["kernels", "tokenizer.vocab_size=3"], "`tokenizer.vocab_size`"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    assert run(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert len(told.strip().splitlines()) == 2
