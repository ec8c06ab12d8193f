"""What a hint names composes: every `key=value` in it is followed, every `without key` left out, and nothing more."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from typing import Any

import pytest

from lmlab.check.flags import changed
from lmlab.compat.rules import RULES
from lmlab.config import parse
from lmlab.config.catalogue import entries
from lmlab.config.fields import fields, problem
from lmlab.config.load import load
from lmlab.config.tree import GROUPS, Experiment
from lmlab.errors import Errors, LmlabError
from tests.compat.test_rules import MORE

WORD = re.compile(r"[a-z_]+(?:\.\w+)?=(?:\[[^\]]*\]|[^\s;:]+)")
LINES = [
    "model.seq_len=2 attn.window=2",
    "model.seq_len=2 attn.window=1",
    "attn.window=300 attn.pattern=SL",
    "attn.pattern=SL attn.window=4 model.n_layers=1",
    "attn.pattern=LS attn.window=4 model.n_layers=1",
    "attn.pattern=SLLLS attn.window=4 model.n_layers=4",
    "attn.pattern=SSSL attn.window=4 model.n_layers=3",
    "attn.pattern=SL model.seq_len=7",
    "attn.pattern=SL model.seq_len=2",
    "attn.pattern=LL",
    "model.d_model=7 model.n_heads=3",
    "model.d_model=7 model.n_heads=3 pos=alibi",
    "model.d_model=10 model.n_heads=3 pos.fraction=0.5",
    "model.d_model=10 model.n_heads=4 attn=gqa",
    "model.d_model=9 model.n_heads=2 attn.weights=shaped attn.v_proj=none",
    "pos=t5 pos.n_buckets=200 pos.max_distance=50 model.seq_len=64",
    "pos=t5 pos.n_buckets=300 model.seq_len=64",
    "pos=t5 pos.n_buckets=300 pos.max_distance=150 attn.window=2",
    "attn.head_dim=3 pos.theta=100",
    "attn.head_dim=3 rope_scaling=ntk",
    "attn.head_dim=3 pos.fraction=0.1",
    "pos=alibi attn.head_dim=33 rope_scaling=yarn",
    "pos=learned attn.head_dim=33 attn.nope_every_n_layers=2",
    "pos=learned attn.nope_every_n_layers=1",
    "attn.nope_every_n_layers=1 rope_scaling=pi",
    "attn.nope_every_n_layers=3 model.n_layers=1",
    "pos=sinusoidal model.d_model=255 model.n_heads=3",
    "norm=none block=sandwich model.embed_norm=true",
    "norm=none block=deepnorm model.embed_norm=true",
    "norm=none block=parallel block.n_norms=2",
    "attn=gqa attn.v_proj=none",
    "attn=mqa attn.v_proj=none attn.o_proj=none attn.bias_o=true attn.head_dim=32",
    "attn.v_proj=none model.n_heads=3 attn.head_dim=32",
    "schedule.warmup_steps=300 train.max_tokens=8192",
    "schedule.warmup_steps=300 train.max_tokens=8192 train.max_steps=20",
    "rope_scaling=yarn rope_scaling.original_len=2",
    "rope_scaling=yarn model.seq_len=4 train.batch_tokens=64",
    "optim.betas=0.9",
    "norm=none block=deepnorm block.beta=0.1",
    "norm=none block=deepnorm block.beta=0.1 block.alpha=2",
    "pos=t5 rope_scaling=yarn rope_scaling.factor=4",
    "pos=t5 pos.n_buckets=8 rope_scaling=llama3 rope_scaling.low_freq_factor=2 rope_scaling.factor=2",
    "pos=learned pos.max_len=300 attn.nope_every_n_layers=2",
    "pos=t5 pos.n_buckets=8 attn.nope_every_n_layers=1",
    "attn=gqa attn.n_kv_heads=2 attn.v_proj=none attn.weights=shaped",
    "attn.head_dim=3 rope_scaling=ntk pos.theta=100",
    "attn.head_dim=33 pos.pairing=interleaved pos.fraction=0.01",
    "rope_scaling=yarn rope_scaling.beta_fast=8 attn.head_dim=2",
    "attn.softcap=30 attn.backend=sdpa attn.dropout=0.1",
]


LEFT_OUT = re.compile(r"\bwithout ([a-z_]+\.\w+(?: and [a-z_]+\.\w+)*)")


def alternatives(hint: str) -> list[list[str]]:
    """Words that are to be followed together; `!key` is one to leave out. A bare number after `or` is another value of
    the key before it."""
    found: list[list[str]] = []
    for part in re.split(r",? or |; |, ", hint.replace("data.files=[book.txt,notes/*.txt]", "data.files=[book.txt]")):
        words = WORD.findall(part)
        words += [f"!{key}" for keys in LEFT_OUT.findall(part) for key in keys.split(" and ")]
        if words:
            found.append(words)
        elif found and re.fullmatch(r"\d+", part):
            found.append([f"{found[-1][-1].partition('=')[0]}={part}"])
    return found


def with_words(line: str, new: list[str]) -> list[str]:
    """The line with words replaced or added, and those left out that are to be."""
    left_out = {word.removeprefix("!") for word in new if word.startswith("!")}
    new = [word for word in new if not word.startswith("!")]
    words = dict(word.split("=", 1) for word in line.split()) | dict(word.split("=", 1) for word in new)
    assert left_out <= set(words), "what is not there can't be left out"
    return [f"{key}={value}" for key, value in words.items() if key not in left_out]


def test_words_of_a_hint() -> None:
    assert alternatives("use model.n_heads=2 or 4, or give the head size: attn.nope_dim=8 attn.v_dim=8") == [
        ["model.n_heads=2"],
        ["model.n_heads=4"],
        ["attn.nope_dim=8", "attn.v_dim=8"],
    ]
    assert alternatives("use another norm, or block=prenorm without block.alpha and block.beta") == [
        ["block=prenorm", "!block.alpha", "!block.beta"]
    ]
    line = "attn=gqa attn.n_kv_heads=2 attn.window=8"
    assert with_words(line, ["attn=mha"]) == ["attn=mha", "attn.n_kv_heads=2", "attn.window=8"]
    assert with_words(line, ["attn=mha", "!attn.n_kv_heads"]) == ["attn=mha", "attn.window=8"]


@pytest.mark.parametrize("line", [*(rule.example for rule in RULES), *(line for line, _, _ in MORE), *LINES])
def test_what_a_hint_names_composes(line: str) -> None:
    with pytest.raises(LmlabError) as caught:
        load(line.split())
    errors = caught.value.errors if isinstance(caught.value, Errors) else [caught.value]
    if len(errors) > 1:
        pytest.skip("several rows are broken: no hint alone mends them")
    for words in alternatives(errors[0].hint):
        load(with_words(line, words))


CHOSEN: dict[str, list[Any]] = {
    "model.d_model": [7, 9, 10, 12, 16, 30, 64, 256],
    "model.n_heads": [1, 2, 3, 4, 6, 8],
    "model.n_layers": [1, 2, 3, 4, 6],
    "model.seq_len": [1, 2, 3, 5, 8, 16, 64, 256],
    "model.embed_norm": [False, True],
    "model.embed_scale": ["none", "sqrt_d_model"],
    "attn.window": [None, 1, 2, 3, 8, 100],
    "attn.pattern": [None, "S", "L", "SL", "LS", "SSSL", "SLLLS"],
    "attn.nope_every_n_layers": [None, 1, 2, 4],
    "attn.head_dim": [None, 1, 2, 3, 4, 8],
    "attn.weights": ["softmax", "shaped"],
    "attn.v_proj": ["linear", "none"],
    "attn.o_proj": ["linear", "none"],
    "attn.bias_o": [False, True],
    "attn.n_kv_heads": [None, 1, 2, 3],
    "attn.rope_dim": [None, 2, 3, 4],
    "attn.backend": ["auto", "sdpa", "tiled"],
    "attn.softcap": [None, 5.0],
    "attn.dropout": [0.0, 0.1],
    "block.n_norms": [1, 2],
    "pos.theta": [10000.0, 2.0, 100.0],
    "pos.fraction": [1.0, 0.5, 0.25, 0.1],
    "pos.max_len": [None, 4, 300],
    "pos.n_buckets": [32, 2, 3, 8, 200, 300],
    "pos.max_distance": [128, 2, 4, 50, 150, 1000],
    "rope_scaling.factor": [1.0, 4.0],
    "rope_scaling.original_len": [None, 2, 6, 8, 4096],
    "rope_scaling.attention_factor": [None, 1.3],
    "rope_scaling.beta_slow": [1.0, 0.1, 40.0],
    "rope_scaling.low_freq_factor": [1.0, 5.0],
    "ffn.d_ff": [None, 16],
    "ffn.mult": [None, 2.0],
    "schedule.warmup_steps": [None, 5, 400],
    "schedule.decay_frac": [0.2, 0.9],
    "train.max_steps": [None, 4, 20],
    "train.max_tokens": [None, 8192],
}


OPTIONS = {
    g: [entry.make() for _, entry in sorted(entries(g).items())]
    for g in ("norm", "block", "pos", "rope_scaling", "attn", "schedule")
}


def drawn(draw: random.Random, base: Experiment) -> Experiment:
    """Random options and a few fields of theirs."""
    parts = {group: draw.choice(options) for group, options in OPTIONS.items()}
    e = dataclasses.replace(base, **{g: part for g, part in parts.items() if draw.random() < 0.6})
    some = draw.sample(sorted(CHOSEN), 12)
    e = changed(e, {key: draw.choice(CHOSEN[key]) for key in some})
    return changed(e, {"train.batch_tokens": 16 * e.model.seq_len, "train.eval_tokens": None})


@functools.cache
def read(word: str) -> tuple[str, Any]:
    """(key, value) as Hydra reads them."""
    (override,), _ = parse.read([word])
    return override.key, override.element()


def follow(e: Experiment, words: list[str]) -> Experiment:
    """As with_words, of an experiment."""
    for word in words:
        key, value = read(word)
        if key in GROUPS:
            old, new = getattr(e, key), entries(key)[str(value)].make()
            kept = {n: getattr(old, n) for n in fields(type(new)) if n in fields(type(old))}
            part: dict[str, Any] = {key: dataclasses.replace(new, **kept)}
            e = dataclasses.replace(e, **part)
        else:
            group, _, name = key.partition(".")
            field = fields(type(getattr(e, group)))[name]
            assert problem(value, field) is None, word
            e = changed(e, {key: value})
    return e


ROUTING: dict[str, list[Any]] = {
    "model.n_layers": [1, 2, 4, 6],
    "moe.n_experts": [1, 2, 3, 4, 6, 8, 12, 16],
    "moe.d_expert": [None, 16],
    "moe.every_n_layers": [1, 2, 3, 9],
    "moe.first_dense_layers": [0, 1, 2, 7],
    "moe.group": ["sequence", "batch"],
    "moe.score": ["softmax", "sigmoid"],
    "moe.capacity_factor": [None, 0.5, 1.0, 1.25, 3.0, 100.0],
    "moe.overflow": ["drop", "reroute"],
    "moe.priority": ["position", "probability"],
    "moe.balance": ["aux", "aux_free", "none"],
    "moe.aux_coef": [0.01, 0.0, 1.0],
    "moe.bias_step": [0.001, 0.1],
    "moe.top_k": [1, 2, 3, 4, 8, 9],
    "moe.norm_topk": [True, False],
    "moe.n_expert_groups": [1, 2, 3, 4, 8],
    "moe.n_limited_groups": [None, 1, 2, 4],
    "ffn.d_ff": [None, 16],
    "train.micro_batch": ["auto", 4, 16],
}


def routed(draw: random.Random, base: Experiment) -> Experiment:
    """A random router with some of its fields."""
    e = dataclasses.replace(base, moe=entries("moe")[draw.choice(["topk", "topk", "switch", "expert_choice"])].make())
    e = changed(e, {key: draw.choice(ROUTING[key]) for key in draw.sample(sorted(ROUTING), 7)})
    if e.moe.name == "expert_choice" and e.moe.capacity_factor is None:
        e = changed(e, {"moe.capacity_factor": 1.0})
    return changed(e, {"train.batch_tokens": 16 * e.model.seq_len, "train.eval_tokens": None})


@pytest.mark.parametrize(("make", "draws", "rows"), [(drawn, 400, 15), (routed, 600, 9)])
def test_following_a_hint_mends_its_row_and_breaks_no_other(make: Any, draws: int, rows: int) -> None:
    """Of random compositions, most of them broken by several rows."""
    draw, base, seen = random.Random(0), load([]).experiment, set()
    for _ in range(draws):
        e = make(draw, base)
        broken = {rule.id: wrong for rule in RULES if (wrong := rule.find(e))}
        for row, (message, hint) in broken.items():
            for words in alternatives(hint):
                seen.add(row)
                mended = follow(e, words)
                after = {rule.id: wrong for rule in RULES if (wrong := rule.find(mended))}
                told = f"{message}; {hint}: after {words} {[after[r] for r in after if r not in broken or r == row]}"
                assert set(after) <= set(broken) - {row}, told
    assert len(seen) >= rows
