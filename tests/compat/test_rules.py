"""The table of what goes with what: every row says so; every combination composes or is refused by a row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lmlab.compat import rules
from lmlab.compat.model import remarks
from lmlab.compat.rules import RULES, check, steps
from lmlab.config.catalogue import PRESET, entries
from lmlab.config.load import load
from lmlab.config.tree import GROUPS, Experiment
from lmlab.errors import ConfigError, LmlabError
from lmlab.registry import Spec

# row -> what its example must say
SAYS = {
    "heads-split-width": ("`model.d_model` is 256, which `model.n_heads` 3 does not divide", "model.n_heads=2 or 4"),
    "kv-heads-split-heads": ("`attn.n_kv_heads` is 3, which does not divide `model.n_heads` 4", "use one of 1, 2, 4"),
    "rotary-width": ("the rotary width is 33 (`pos.fraction` 1 of the head size 33)", "pos.fraction=0.969697"),
    "sinusoidal-width": ("`model.d_model` is 255", "use model.d_model=260"),
    "learned-table": ("`pos.max_len` is 100, shorter than `model.seq_len` 256", "pos.max_len=256 or more, or null"),
    "t5-buckets": ("`pos.max_distance` is 16, but half of `pos.n_buckets` 32 stand for one", "pos.max_distance=64"),
    "norm-none": ("`block=postnorm` says where a norm stands, and `norm=none` is no norm", "use another norm"),
    "embed-scale": (
        "`model.embed_scale` is sqrt_d_model, and `norm=rmsnorm` of `model.embed_norm` true undoes it",
        "use model.embed_scale=none, or model.embed_norm=false",
    ),
    "scaling-needs-rope": ("`rope_scaling=yarn` scales rotations, and `pos=alibi` has none", "use pos=rope"),
    "scaling-acts": (
        "`rope_scaling=ntk` keeps the frequency of the slowest pair",
        "use rope_scaling=pi, or a larger head",
    ),
    "scaling-bounds": ("`rope_scaling.beta_fast` is 1, not above `rope_scaling.beta_slow` 1", "beta_fast=4"),
    "yarn-slow": (
        "`rope_scaling.original_len` is 6, and in as many tokens the fastest pair makes 0.955 rotations, not the "
        "`rope_scaling.beta_slow` 1 below which pairs are divided",
        "use rope_scaling.beta_slow=0.48, or rope_scaling.original_len=13",
    ),
    "yarn-factor": (
        "`rope_scaling.attention_factor` is 1.3, and `rope_scaling.factor` 1 scales nothing",
        "use rope_scaling.attention_factor=null",
    ),
    "nope-layers": (
        "`attn.nope_every_n_layers` is 4, but `pos=learned` gives the layers nothing",
        "use pos=rope, pos=alibi",
    ),
    "window": ("`attn.window` is 1000, and `model.seq_len` is 256: no token", "attn.window=128"),
    "pattern": ("`attn.pattern` SSSL says which layers have a window, and `attn.window` is null", "attn.window=64"),
    "backend": ("`attn.softcap` is 30, which `attn.backend` sdpa can't do", "attn.backend=auto"),
    "kv-heads-once": ("`attn.n_kv_heads` is 1, so that `attn.queries_per_kv` 2 would do", "queries_per_kv=null"),
    "qk-norm-eps": ("`attn.qk_norm_eps` is 1e-05, and `attn.qk_norm` none has no norm", "use attn.qk_norm=head"),
    "left-out": ("`attn.v_proj` none needs shaped attention, `attn.weights` is softmax", "add attn.weights=shaped"),
    "ffn-width": ("`ffn.d_ff` 512 is the width as it stands, so that `ffn.mult` 2 would do nothing", "ffn.mult=null"),
    "routed-layers": (
        "`moe.every_n_layers` 100 and `moe.first_dense_layers` 0 leave no layer of 6 its experts",
        "moe.every_n_layers=1",
    ),
    "one-expert": ("`moe.n_experts` is 1: its weight is always 1", "use moe=none without moe.n_experts"),
    "top-k": ("`moe.top_k` is 9, and `moe.n_experts` is 8", "use moe.top_k=8"),
    "norm-topk": ("`moe.norm_topk` is true with `moe.top_k` 1: the weight is always 1", "moe.norm_topk=false"),
    "all-experts": (
        "`moe.aux_coef` is 1, and every token goes through all `moe.n_experts` 8: their load is even",
        "use moe.balance=none moe.aux_coef=0.01, or moe.top_k=7",
    ),
    "expert-groups": (
        "`moe.n_expert_groups` 3 does not divide `moe.n_experts` 8",
        "use moe.n_expert_groups=2, or moe.n_expert_groups=1 moe.n_limited_groups=null",
    ),
    "dead-routing": ("`moe.overflow` is reroute, and `moe.capacity_factor` is null", "moe.capacity_factor=1.25"),
    "room-for-all": (
        "`moe.capacity_factor` is 8, and with 8 an expert has room for every token",
        "use moe.capacity_factor=null, or moe.capacity_factor=1.25",
    ),
    "unused-width": (
        "`ffn.d_ff` 512 would do nothing: every layer has experts, and `moe.d_expert` 64 is their width",
        "use ffn.d_ff=null, or moe.d_expert=null",
    ),
    "group-of-batch": (
        "`moe.group` is batch, and `train.micro_batch` is auto, which may split a step",
        "use train.micro_batch=16, or moe.group=sequence",
    ),
    "head-bias": ("`model.head_bias` is true and so is `model.tie_embeddings`", "model.tie_embeddings=false"),
    "text-files": ("`data=text` needs `data.files`", "data.files=[book.txt"),
    "text-field": ("`data.field` is body, but .txt files have no fields (a.txt)", "leave data.field out"),
    "splits": ("`data.val_frac` 0.5 and `data.test_frac` 0.5 leave nothing to train on", "less than 1"),
    "hub-repo": ("`data=hf` needs `data.repo`", "data=tinystories"),
    "tokenizer-path": ("`tokenizer=hf` needs `tokenizer.path`", "tokenizer=gpt2"),
    "mix-parts": ("the shares of `data.mix` sum to 0.6, not to 1", "data.mix=[sotu:0.8333,passkey:0.1667]"),
    "task-ids": ("`data=mqar` has ids of its own, which `tokenizer=byte` does not write", "leave tokenizer= out"),
    "betas": ("`optim.betas` has 1 numbers; it takes two", "optim.betas=[0.9,0.95]"),
    "batch-rows": ("`train.batch_tokens` is 1000, which is not a multiple of `model.seq_len` 256", "use 768 or 1024"),
    "micro-batch": ("`train.micro_batch` is 64, but a step has 16 rows", "use at most 16"),
    "residual": (
        "`train.residual_dtype` is fp32, and `block=postnorm` has no sum that goes through the layers",
        "use train.residual_dtype=compute, or block=prenorm",
    ),
    "eval-tokens": ("`train.eval_tokens` is 100, less than one row of `model.seq_len` 256", "at least 256"),
    "warmup": ("`schedule.warmup_steps` is 300, and the run has 300 steps", "fewer than 300"),
    "decay": ("are more than the run's 100 steps", "use at most 80 warm-up steps"),
    "seed-dropout": ("`seed.dropout` is 1, but all dropout is 0", "model.dropout or attn.dropout"),
    "seed-all": ("`seed.all` is 1, but every seed is set by itself", "leave seed= out"),
    "device": ("`device` is gpu; it takes auto, cpu, cuda or cuda:N", "cuda:0"),
    "name": ("`name` is a/b, which can't name a directory", "no slash"),
}


def test_every_row_has_its_own_name_and_is_tested() -> None:
    assert [rule.id for rule in RULES] == list(SAYS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_example_of_a_row_is_refused_by_that_row(rule: rules.Rule) -> None:
    with pytest.raises(LmlabError) as caught:
        load(rule.example.split())
    assert isinstance(caught.value, ConfigError), f"one error and no other: {caught.value}"
    message, hint = SAYS[rule.id]
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert rule.why


# further ways to break a row: words, what the message and the hint must say
MORE = [
    (
        "moe=topk moe.first_dense_layers=6",
        "`moe.every_n_layers` 1 and `moe.first_dense_layers` 6 leave no layer of 6",
        "moe.first_dense_layers=0",
    ),
    ("moe=topk moe.n_experts=1", "`moe.n_experts` is 1: its weight is always 1", "moe=none"),
    ("moe=expert_choice moe.n_experts=1", "`moe.n_experts` is 1: its weight is always 1", "moe=none"),
    (
        "moe=topk moe.n_experts=1 moe.top_k=1 moe.norm_topk=false moe.score=sigmoid moe.balance=aux_free",
        "`moe.balance` is aux_free, and every token",
        "use moe.balance=none",
    ),
    ("moe=topk moe.top_k=8 moe.balance=aux_free", "`moe.balance` is aux_free, and every token", "moe.balance=none"),
    (
        "moe=topk moe.top_k=8 moe.overflow=reroute moe.capacity_factor=0.5",
        "`moe.overflow` is reroute, and every token goes through all `moe.n_experts` 8",
        "moe.overflow=drop, or moe.top_k=7",
    ),
    ("moe=topk moe.top_k=8 moe.norm_topk=false", "their weights add up to 1 already", "moe.norm_topk=true"),
    (
        "moe=topk moe.first_dense_layers=1 moe.every_n_layers=2",
        "`moe.every_n_layers` 2 and `moe.first_dense_layers` 1 leave the layers their experts that the first alone",
        "moe.first_dense_layers=0",
    ),
    (
        "moe=topk moe.capacity_factor=100 moe.priority=probability",
        "`moe.capacity_factor` is 100, and with 4 an expert has room for every token",
        "moe.capacity_factor=null moe.priority=position, or moe.capacity_factor=1.25",
    ),
    ("moe=expert_choice moe.capacity_factor=9", "with 8 an expert takes every token", "moe.capacity_factor=8"),
    (
        "moe=topk moe.n_expert_groups=8 moe.n_limited_groups=2",
        "`moe.n_expert_groups` is 8, as many as `moe.n_experts`",
        "moe.n_expert_groups=4",
    ),
    (
        "moe=topk moe.top_k=8 moe.n_expert_groups=4 moe.n_limited_groups=1",
        "`moe.top_k` is 8, and 1 groups of 2 experts are what a token may use",
        "moe.n_expert_groups=1 moe.n_limited_groups=null",
    ),
    ("moe=topk moe.n_expert_groups=4", "`moe.n_limited_groups` is null: a token may use", "moe.n_limited_groups=2"),
    (
        "moe=topk moe.n_expert_groups=4 moe.n_limited_groups=4",
        "`moe.n_limited_groups` is 4, and `moe.n_expert_groups` is 4: no group would be left out",
        "moe.n_limited_groups=3, or moe.n_expert_groups=1 moe.n_limited_groups=null",
    ),
    (
        "moe=topk moe.n_limited_groups=1",
        "`moe.n_limited_groups` is 1, and `moe.n_expert_groups` is 1",
        "moe.n_limited_groups=null",
    ),
    (
        "moe=topk moe.top_k=4 moe.n_expert_groups=4 moe.n_limited_groups=1",
        "`moe.top_k` is 4, and 1 groups of 2 experts are what a token may use",
        "moe.n_limited_groups=2",
    ),
    ("moe=topk moe.balance=none moe.aux_coef=0.1", "`moe.aux_coef` is 0.1, and `moe.balance` is none", "balance=aux"),
    ("moe=topk moe.bias_step=0.1", "`moe.bias_step` is 0.1, and `moe.balance` is aux", "moe.balance=aux_free"),
    ("moe=topk moe.priority=probability", "`moe.priority` is probability", "moe.capacity_factor=1.25"),
    ("moe=switch moe.capacity_factor=null moe.overflow=reroute", "`moe.overflow` is reroute", "capacity_factor=1.25"),
    (
        "moe=expert_choice moe.group=batch train.micro_batch=4",
        "`moe.group` is batch, and `train.micro_batch` is 4 of 16 rows",
        "train.micro_batch=16",
    ),
    ("attn=mla model.n_heads=3", "which `model.n_heads` 3 does not divide", "attn.nope_dim=84 attn.rope_dim=84"),
    ("attn=mla attn.rope_dim=5", "the rotary width is 5 (`pos.fraction` 1 of `attn.rope_dim` 5)", "(attn.rope_dim)"),
    ("norm=none block=sandwich", "`block=sandwich` says where a norm stands", "block=prenorm"),
    ("norm=none block=parallel block.n_norms=2", "`block.n_norms` 2 says where a norm stands", "another norm"),
    ("norm=none model.embed_norm=true", "`model.embed_norm` true says where a norm stands", "model.embed_norm"),
    ("rope_scaling=pi pos=none", "`rope_scaling=pi` scales rotations, and `pos=none` has none", "rope_scaling=none"),
    ("rope_scaling=dynamic_ntk attn.head_dim=8 pos.fraction=0.25", "slowest pair of rotary width 2", "pos.fraction"),
    (
        "rope_scaling=llama3 rope_scaling.low_freq_factor=5",
        "`rope_scaling.high_freq_factor` is 4, not above `rope_scaling.low_freq_factor` 5",
        "high_freq_factor=20",
    ),
    ("rope_scaling=llama3 rope_scaling.factor=8 attn.head_dim=2", "slowest pair of rotary width 2", "larger head size"),
    ("rope_scaling=llama3 pos.theta=2", "no rotation would change", "use rope_scaling=pi, or a larger pos.theta"),
    (
        "rope_scaling=yarn rope_scaling.attention_factor=1 pos.theta=2 rope_scaling.original_len=1000000",
        "`rope_scaling=yarn` keeps the frequency of the slowest pair of rotary width 64, and so of all",
        "a smaller original_len",
    ),
    ("rope_scaling=yarn rope_scaling.beta_slow=41 rope_scaling.beta_fast=50", "`model.seq_len` is 256", "beta_slow=20"),
    ("preset=gemma model.embed_norm=true", "undoes it", "model.embed_norm=false"),
    ("norm=layernorm model.embed_scale=sqrt_d_model model.embed_norm=true", "`norm=layernorm` of", "embed_scale=none"),
    ("norm=batchnorm model.embed_scale=sqrt_d_model model.embed_norm=true", "`norm=batchnorm` of", "embed_scale=none"),
    ("attn.nope_every_n_layers=1", "no layer would have positions", "use pos=none"),
    ("attn.nope_every_n_layers=7", "no layer would go without positions", "a number up to 6"),
    ("attn.window=256", "`attn.window` is 256, and `model.seq_len` is 256", "below 256"),
    ("attn.window=8 attn.pattern=SS", "has no L: null says the same", "attn.pattern=null"),
    ("pos=t5 attn.window=8 pos.max_distance=64", "no key is farther than 7", "pos.n_buckets=7"),
    ("attn.head_dim=2 pos.theta=500", "`pos.theta` is 500, and a single pair turns", "leave pos.theta out"),
    ("norm=none block=deepnorm", "multiplies the residual by alpha at every layer", "block=prenorm"),
    ("attn.window=1", "`attn.window` is 1: a token would see itself alone", "attn.window=2"),
    ("attn.window=8 attn.pattern=SXL", "its letters are S (window) and L (full)", "like SSSL"),
    ("attn.window=8 attn.pattern=LL", "has no S: `attn.window` would do nothing", "attn.window=null"),
    ("attn.window=8 attn.pattern=SSSSSSL", "has 7 letters, and `model.n_layers` is 6", "at most 6 letters"),
    ("attn.backend=tiled attn.dropout=0.1", "`attn.dropout` is 0.1, which `attn.backend` tiled can't do", "auto"),
    ("attn.backend=flex device=cpu", "flex, which has no backward on the CPU", "attn.backend=tiled"),
    (
        "attn.weights=shaped attn.o_proj=none attn.bias_o=true",
        "a projection that `attn.o_proj` none leaves out",
        "false",
    ),
    ("attn.weights=shaped attn.o_proj=none attn.head_dim=32", "128 channels of heads, `model.d_model` 256", "null"),
    ("attn=gqa attn.weights=shaped attn.v_proj=none", "`attn=gqa` has 2 for 4 heads", "use attn=mha"),
]


@pytest.mark.parametrize(("line", "message", "hint"), MORE, ids=lambda text: text[:40])
def test_each_way_to_break_a_row_is_told_alone(line: str, message: str, hint: str) -> None:
    with pytest.raises(LmlabError) as caught:
        load(line.split())
    assert isinstance(caught.value, ConfigError), f"one error and no other: {caught.value}"
    assert message in caught.value.message
    assert hint in caught.value.hint


FINE = [
    "attn.head_dim=48",
    "model.n_heads=3 attn.head_dim=64",
    "attn=gqa model.n_heads=3 attn.head_dim=64",
    "attn=mqa model.n_heads=7 attn.head_dim=32",
    "pos.fraction=0.5 attn.head_dim=20",
    "pos=alibi attn.head_dim=33",
    "pos=learned pos.max_len=256",
    "attn.window=255",
    "attn.window=255 attn.pattern=SSSL",
    "pos=t5 pos.max_distance=64 attn.window=8 attn.pattern=SL",
    "attn.nope_every_n_layers=4",
    "attn=mla model.n_heads=3 attn.nope_dim=8 attn.rope_dim=8 attn.v_dim=8",
    "attn=mla pos=alibi attn.rope_dim=5",
    "norm=none block=parallel",
    "norm=none block=simplified attn.weights=shaped attn.v_proj=none attn.o_proj=none",
    "rope_scaling=yarn rope_scaling.factor=1",
    "rope_scaling=pi attn.head_dim=2",
    "rope_scaling=yarn rope_scaling.original_len=7",
    "rope_scaling=yarn rope_scaling.factor=1 rope_scaling.original_len=6",
    "rope_scaling=llama3 rope_scaling.factor=1 attn.head_dim=2",
    "rope_scaling=ntk attn.head_dim=4",
    "rope_scaling=llama3 pos.theta=1000 rope_scaling.original_len=4096",
    "norm=dyt model.embed_scale=sqrt_d_model model.embed_norm=true",
    "attn.backend=flex",
    "attn.softcap=30 attn.backend=tiled",
    "ffn.mult=2 ffn.multiple_of=64",
    "ffn.d_ff=513",
    "data=text data.files=[a.jsonl,b.txt] data.field=body",
    "train.max_steps=1",
    "train.micro_batch=3",
    "train.eval_tokens=null",
    "schedule.warmup_steps=299",
    "schedule.warmup_steps=300 train.max_tokens=2e6",
    "schedule.warmup_steps=300 train.max_minutes=1",
    "schedule=wsd schedule.warmup_steps=80 train.max_steps=100",
    "seed.dropout=1 model.dropout=0.1",
    "seed=1 seed.init=2 seed.data=3 attn.dropout=0.1",
    "device=cuda:3",
    "name=gqa-2_x.y",
]


@pytest.mark.parametrize("line", FINE)
def test_what_is_allowed(line: str) -> None:
    load(line.split())


REMARKS = [
    ("", ""),
    ("rope_scaling=pi rope_scaling.factor=1", "rope_scaling=pi with a factor of 1 changes nothing"),
    ("rope_scaling=dynamic_ntk", "changes nothing in rows up to 256 tokens"),
    ("pos=t5 pos.n_buckets=200 model.seq_len=64", "no key of a training row is farther than 63: buckets 100 to 199"),
    ("pos=t5 pos.n_buckets=128 model.seq_len=64", "farther than 63: buckets 64 to 127 of pos=t5"),
    ("pos=t5 pos.n_buckets=127 model.seq_len=64", ""),
    ("pos=t5 attn.window=8", "farther than 7: buckets 16 to 31"),
    ("attn=gqa attn.n_kv_heads=4", "attn=gqa with as many kv heads as heads (4) is attn=mha"),
    ("attn=gqa", ""),
    ("attn=gqa attn.n_kv_heads=1", ""),
]


@pytest.mark.parametrize(("line", "told"), REMARKS)
def test_what_is_remarked_before_training(line: str, told: str) -> None:
    found = remarks(load(line.split()).experiment)
    assert len(found) == (told != "")
    assert all(told in remark for remark in found)


def test_all_rows_are_told_at_once() -> None:
    default = load([]).experiment
    e = dataclasses.replace(
        default,
        device="gpu",
        train=dataclasses.replace(default.train, batch_tokens=1000, eval_tokens=1),
        seed=dataclasses.replace(default.seed, dropout=1),
    )
    assert len(check(e)) == 4


def test_the_message_of_a_default_that_does_not_fit_says_where_it_comes_from() -> None:
    with pytest.raises(ConfigError, match=r"`attn.n_kv_heads` is null, n_heads / 2 = 2, which does not divide"):
        load(["attn=gqa", "model.n_heads=5", "model.d_model=320"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 300),
        (["train.max_steps=10"], 10),
        (["train.max_tokens=8192"], 2),
        (["train.max_tokens=1"], 1),
        (["train.max_steps=10", "train.max_tokens=8192"], 2),
        (["train.max_flops=1e12"], None),
        (["train.max_minutes=1", "train.max_steps=10"], None),
    ],
)
def test_steps_that_the_keys_tell(words: list[str], expected: int | None) -> None:
    assert steps(load(words).experiment) == expected


def test_every_preset_with_every_other_option_composes_or_is_refused_by_a_row() -> None:
    """Each is composed once; the product is put together from the parts."""
    presets = {name: load([f"{PRESET}={name}"]).experiment for name in entries(PRESET)} | {"": load([]).experiment}
    refused: dict[str, set[str]] = {}
    for what, e in _all(presets).items():
        rows = {rule.id: ConfigError(*wrong).message for rule in RULES if (wrong := rule.find(e))}
        assert {error.message for error in check(e)} == set(rows.values()), what
        for row in rows:
            refused.setdefault(row, set()).add(what)
    scaled = [name for name in entries("rope_scaling") if name != "none"]
    own_ids = [f"data={task}" for task in ("mqar", "induction", "copy", "selective_copy", "needle")]
    unturned = ("gpt2", "nanogpt", "vanilla", "bloom")
    assert refused == {
        "mix-parts": {f"{preset} data=mix" for preset in presets},
        # a part put in alone; `data=copy` typed brings its tokenizer
        "task-ids": {f"{preset} {word}" for preset in presets for word in (*own_ids, "tokenizer=ids")},
        "text-files": {f"{preset} data=text" for preset in presets},
        "hub-repo": {f"{preset} data=hf" for preset in presets},
        "tokenizer-path": {f"{preset} tokenizer=hf" for preset in presets},
        "scaling-needs-rope": {f"{p} rope_scaling={s}" for p in unturned for s in scaled},
        "norm-none": {f"{preset} norm=none" for preset in ("vanilla", "bloom", "neox", "olmo2")},
    }


def _all(presets: dict[str, Experiment]) -> dict[str, Experiment]:
    parts = [(group, entry.label, entry.make()) for group in GROUPS for entry in entries(group).values()]
    return {
        f"{preset} {group}={label}": dataclasses.replace(e, **{group: part})
        for preset, e in presets.items()
        for group, label, part in parts
    }


def test_the_product_put_together_is_what_is_composed() -> None:
    for words in (["preset=llama", "attn=gqa"], ["preset=gpt2", "model=tiny"], ["preset=nanogpt", "ffn=swiglu"]):
        ((group, label),) = [w.split("=") for w in words[1:]]
        together = dataclasses.replace(load(words[:1]).experiment, **{group: entries(group)[label].make()})
        assert load(words).experiment == together


class Bare(Spec):
    """A part that lacks everything."""


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("attn", "is no AttnSpec"),
        ("ffn", "is no FfnSpec"),
        ("block", "is no BlockSpec"),
        ("norm", "does not say what builds it"),
        ("data", "has no packing"),
        ("schedule", "has no warmup_steps"),
    ],
)
def test_a_part_that_lacks_what_its_group_needs(group: str, message: str) -> None:
    errors = check(dataclasses.replace(load([]).experiment, **{group: Bare()}))
    assert any(message in e.message and e.hint for e in errors)


def test_compat_is_torch_free() -> None:
    text = Path(rules.__file__).read_text()
    assert "import torch" not in text


def test_query_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ConfigError) as caught:
        load(["attn=gqa", "attn.queries_per_kv=3"])
    assert caught.value.message == "`attn.queries_per_kv` is 3, which does not divide `model.n_heads` 4"
    assert caught.value.hint == "use one of 1, 2, 4"
