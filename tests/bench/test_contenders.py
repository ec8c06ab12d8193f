"""What is compared is the same: parameters, batches, loss; the net by hand computes what the composed one does."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.bench import by_hand, libraries, peers
from lmlab.bench.breakdown import REST
from lmlab.bench.contender import Setting, ours, replaced, theirs, trainer
from lmlab.bench.train import written

TINY = ("model=nano", "model.n_layers=2", "model.d_model=64", "model.seq_len=32", "train.batch_tokens=128")
FP32 = ("train.precision=fp32", "device=cpu")


@pytest.fixture
def words() -> list[str]:
    return [*TINY, *FP32]


@pytest.mark.parametrize("attn", ["mha", "gqa"])
def test_by_hand_is_the_composed_net(words: list[str], attn: str) -> None:
    """The same losses for some steps, bit by bit in fp32 on the CPU."""
    composed_words = [*words, f"attn={attn}"]
    setting = Setting.of(composed_words)
    assert by_hand.same_net(setting.exp)
    composed, plain = ours(setting, trainer(setting)), written(composed_words)
    assert [float(composed.step(k)) for k in range(3)] == [float(plain.step(k)) for k in range(3)]


OTHERS = ("norm=layernorm", "pos=alibi", "attn.window=8", "ffn=gelu", "attn.qk_norm=head", "model.z_loss=1e-4")
OTHERS += ("norm.offset=1", "model.embed_norm=true", "ffn.bias=true", "attn.weights=shaped", "pos.fraction=0.5")
OTHERS += (
    "pos.pairing=interleaved",
    "attn.bias_o=true",
    "model.embed_scale=sqrt_d_model",
    "attn.nope_every_n_layers=2",
)
OTHERS += ("data.packing=documents", "model.dropout=0.1", "block=parallel", "model.tie_embeddings=false")


@pytest.mark.parametrize("other", OTHERS)
def test_by_hand_is_not_set_beside_other_nets(words: list[str], other: str) -> None:
    assert not by_hand.same_net(Setting.of([*words, other]).exp)


@pytest.mark.parametrize(("row", "peer"), [(row, peer) for row, all_of in peers.PEERS.items() for peer in all_of])
def test_peers_have_our_size_and_learn(words: list[str], row: str, peer: str) -> None:
    if importlib.util.find_spec(libraries.PACKAGES[peer]) is None:
        pytest.skip(f"{peer} is not installed")
    setting = Setting.of(peers.words_of(row, [*words, "compile=false"]))
    own = trainer(setting)
    torch.manual_seed(0)
    contender = theirs(setting, libraries.BY_NAME[peer](setting.shape))
    n_parameters = sum(p.numel() for p in own.master.parameters())
    assert contender.n_parameters == pytest.approx(n_parameters, rel=0.01)
    assert contender.tokens == setting.exp.train.batch_tokens
    losses = [float(contender.step(k)) for k in range(8)]
    assert losses[0] == pytest.approx(math.log(setting.vocab_size), abs=0.6)
    assert losses[-1] < losses[0] - 0.1


def test_transformers_computes_what_we_do(words: list[str]) -> None:
    """With our weights its loss is ours: the row compares two implementations of one net."""
    pytest.importorskip("transformers")
    setting = Setting.of(peers.words_of("llama", [*words, "compile=false"]))
    made = trainer(setting)
    batch = made.batches.batch(0)
    out: Any = made.master(batch.tokens_BT, batch.positions_BT, targets_BT=batch.targets_BT)
    peer: Any = libraries.transformers_llama(setting.shape)
    w = made.master.state_dict()
    named = {"model.embed_tokens.weight": w["embed.weight"], "model.norm.weight": w["norm.weight"]}
    parts = {"self_attn.": "attn.", "mlp.": "ffn.", "input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
    for i in range(setting.exp.model.n_layers):
        for key in [k for k in peer.net.state_dict() if k.startswith(f"model.layers.{i}.")]:
            mine = key.removeprefix("model.layers.").replace("_proj", "")
            for theirs_, ours_ in parts.items():
                mine = mine.replace(theirs_, ours_)
            named[key] = w[f"blocks.{mine}"]
    peer.net.load_state_dict(named, strict=False)
    peer.net.tie_weights()
    own_scale = made.master.logit_scale
    logits = peer.net(batch.tokens_BT).logits * own_scale
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(out.loss.detach()), rel=1e-5)


def test_a_breakdown_adds_up(words: list[str]) -> None:
    setting = Setting.of(words)
    made = trainer(setting)
    contender = ours(setting, made)
    before = made.stepper.twin.collect, torch.Tensor.backward
    pieces = contender.breakdown(0, 2)
    assert set(pieces) >= {"loader", "forward", "backward", "optimizer", "clipping", REST}
    assert all(s > 0 for label, s in pieces.items() if label != "weights to the twin")
    assert pieces["backward"] > pieces["loader"]
    assert (made.stepper.twin.collect, torch.Tensor.backward) == before


def test_typed_words_replace_those_of_the_shape() -> None:
    assert replaced(["model=tiny", "compile=false"], ["model=nano"]) == ["compile=false", "model=nano"]


def test_bench_writes_beside_the_runs_and_is_none(tmp_path: Path) -> None:
    from lmlab.runs.find import list_runs

    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "config.yaml").write_text("{}")
    assert list_runs(tmp_path) == []


def test_compile_and_heads_may_be_set_where_a_row_has_them() -> None:
    words = peers.words_of("nanogpt", ["compile=false", "attn.n_kv_heads=1", "model.n_layers=3"])
    assert "model.n_layers=3" in words
    assert not [w for w in words if w.startswith(("compile", "attn.n_kv"))]
    assert "attn.n_kv_heads=1" in peers.words_of("llama", ["attn.n_kv_heads=1"])
    lines = [job.words for job in peers.jobs(["compile=false"], ["llama"], peers.asked_modes(["compile=false"]))]
    assert all(line.count("compile=false") == 1 for line in lines)
    assert peers.asked_modes([]) == (False, True)
