"""The table of what goes with what: every row says so; every combination composes or is refused by a row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lmlab import compat
from lmlab.compat import RULES, check, steps
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
    "sinusoidal-width": ("`model.d_model` is 255", "use model.d_model=256"),
    "learned-table": ("`pos.max_len` is 100, shorter than `model.seq_len` 256", "pos.max_len=256 or more, or null"),
    "window": ("`attn.window` is 1000, longer than `model.seq_len` 256", "attn.window=128"),
    "ffn-width": ("`ffn.d_ff` 512 is the width as it stands, so that `ffn.mult` 2 would do nothing", "ffn.mult=null"),
    "text-files": ("`data=text` needs `data.files`", "data.files=[book.txt"),
    "text-field": ("`data.field` is body, but .txt files have no fields (a.txt)", "leave data.field out"),
    "splits": ("`data.val_frac` 0.5 and `data.test_frac` 0.5 leave nothing to train on", "less than 1"),
    "hub-repo": ("`data=hf` needs `data.repo`", "data=tinystories"),
    "tokenizer-path": ("`tokenizer=hf` needs `tokenizer.path`", "tokenizer=gpt2"),
    "betas": ("`optim.betas` has 1 numbers; it takes two", "optim.betas=[0.9,0.95]"),
    "batch-rows": ("`train.batch_tokens` is 1000, which is not a multiple of `model.seq_len` 256", "use 768 or 1024"),
    "micro-batch": ("`train.micro_batch` is 64, but a step has 16 rows", "use at most 16"),
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
def test_the_example_of_a_row_is_refused_by_that_row(rule: compat.Rule) -> None:
    with pytest.raises(LmlabError) as caught:
        load(rule.example.split())
    assert isinstance(caught.value, ConfigError), f"one error and no other: {caught.value}"
    message, hint = SAYS[rule.id]
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert rule.why


FINE = [
    "attn.head_dim=48",
    "model.n_heads=3 attn.head_dim=64",
    "attn=gqa model.n_heads=3 attn.head_dim=64",
    "attn=mqa model.n_heads=7 attn.head_dim=32",
    "pos.fraction=0.5 attn.head_dim=20",
    "pos=alibi attn.head_dim=33",
    "pos=learned pos.max_len=256",
    "attn.window=256",
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
    refused = set()
    for what, e in _all(presets).items():
        by_row = {ConfigError(*wrong).message for rule in RULES if (wrong := rule.find(e))}
        assert {error.message for error in check(e)} == by_row, what
        refused |= {what.partition(" ")[2]} if by_row else set()
    assert refused == {"data=text", "data=hf", "tokenizer=hf"}  # these need a file, a repository, a path


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
    text = Path(compat.__file__).read_text()
    assert "import torch" not in text
