"""When two architectures are one function, and what differs when they are not; words and what they compose."""

from __future__ import annotations

import pytest

from lmlab.config.load import load
from lmlab.config.meaning import differences, meaning
from lmlab.interop.families import arch_of, typed
from lmlab.interop.family import Words


def composed(line: str):
    return load(line.split()).experiment.arch


SAME = [
    ("attn=gqa attn.n_kv_heads=4", "attn=mha"),
    ("attn=gqa attn.n_kv_heads=1", "attn=mqa"),
    ("attn.head_dim=64", ""),
    ("ffn.d_ff=688", ""),
    ("ffn.mult=4 ffn.multiple_of=8", ""),
    ("model.seq_len=512 model.dropout=0.1 attn.dropout=0.1 attn.backend=dense", "attn.backend=dense"),
    ("pos.pairing=interleaved", ""),
    ("pos=learned pos.max_len=256", "pos=learned"),
    ("rope_scaling=yarn rope_scaling.original_len=256", "rope_scaling=yarn"),
    ("attn.window=8 attn.pattern=SL", "attn.window=8 attn.pattern=SLSLSL"),
    ("attn=mla attn.form=absorbed", "attn=mla attn.kv_rank=64"),
    ("model.logit_scale=1", ""),
    ("attn=gqa attn.queries_per_kv=4", "attn=gqa attn.n_kv_heads=1"),
    ("moe=topk moe.d_expert=64", "moe=topk ffn.d_ff=64"),
    ("moe=topk moe.every_n_layers=6", "moe=topk moe.first_dense_layers=5"),
    ("moe=topk moe.balance=none moe.z_coef=1 moe.jitter=0.1", "moe=topk moe.aux_coef=1"),
    ("moe=topk moe.balance=aux_free moe.bias_step=0.1", "moe=topk moe.balance=aux_free"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_two_ways_of_writing_one_function(a, b):
    assert differences(composed(a), composed(b)) == []


OTHER = {
    "norm.eps=1e-5": [("norm.eps", 1e-6, 1e-5)],
    "norm=dyt": [("norm", "rmsnorm", "dyt")],
    "attn=gqa": [("attn.n_kv_heads", 4, 2)],
    "attn.window=8 attn.pattern=SL": [("attn.window", None, 8)],
    "attn=mla": [("attn", "mha", "mla")],
    "pos.fraction=0.5": [("pos.fraction", 1.0, 0.5)],
    "model.head_bias=true model.tie_embeddings=false": [
        ("model.tie_embeddings", True, False),
        ("model.head_bias", False, True),
    ],
    "attn.qk_norm=head attn.qk_norm_eps=1e-5": [("attn.qk_norm", "none", "head"), ("attn.qk_norm_eps", 1e-6, 1e-5)],
    "moe=topk": [("moe", "none", "topk")],
    "rope_scaling=pi": [("rope_scaling", "none", "pi")],
    "model.embed_norm=true": [("model.embed_norm", False, True), ("model.logit_scale", 1.0, 1 / 16)],
}


@pytest.mark.parametrize("line", OTHER)
def test_what_differs_is_named(line):
    assert differences(composed(""), composed(line)) == OTHER[line]


def test_every_field_of_a_part_is_looked_at():
    """A field that comes later is compared, unless it is said to be free."""
    keys = meaning(composed("attn=mha"))
    assert {"attn.softcap", "attn.scale", "attn.nope_every_n_layers", "attn.weights", "attn.v_proj"} <= keys.keys()
    assert {"model.embed_scale", "model.logit_softcap", "norm.offset", "block", "pos.theta"} <= keys.keys()


def test_words_compose_what_they_say():
    words: Words = {"norm": "rmsnorm", "norm.eps": 1e-05, "block": "parallel", "block.n_norms": 2, "pos": "rope"}
    words |= {"pos.theta": 5e5, "rope_scaling": "yarn", "rope_scaling.original_len": 64, "attn": "gqa"}
    words |= {"attn.window": 8, "attn.pattern": "SL", "ffn": "geglu", "ffn.approximate": "tanh", "ffn.d_ff": 96}
    words |= {"model.n_layers": 2, "model.d_model": 64, "model.n_heads": 4, "model.seq_len": 64}
    found = load(typed(words)).experiment.arch
    assert found == arch_of(words)
    assert found.norm.eps == 1e-05
    assert found.attn.pattern == "SL"
