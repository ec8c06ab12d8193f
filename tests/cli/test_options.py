"""`lmlab options`: everything that can be chosen or set is there, for people and as JSON."""

from __future__ import annotations

import json

import pytest

from lmlab.cli import app
from lmlab.config.catalogue import PRESET, entries, nodes
from lmlab.config.fields import fields, show
from lmlab.config.tree import GROUPS, Experiment
from lmlab.registry import OPTIONS


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app.run(["options", *words]) == 0
    text = capsys.readouterr().out
    assert "\033[" not in text, "no colour where no terminal is"
    return text


def test_every_group_option_and_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys).splitlines()
    for group in (*GROUPS, PRESET):
        assert any(line.split()[:1] == [group] for line in lines), group
        for label, entry in entries(group).items():
            assert any(label in line.split()[:2] and entry.help in line for line in lines), f"{group}={label}"
    keys = [f"{n}.{k}" for n, cls in nodes().items() for k in fields(cls)]
    for key in (*keys, *(n for n, f in fields(Experiment).items() if f.node is None)):
        assert any(line.strip().startswith(f"{key}=") for line in lines), key


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_shows_every_field_with_what_it_takes(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, group)
    for spec in (e.spec for e in entries(group).values() if e.spec):
        for name, field in fields(spec).items():
            lines = [ln for ln in text.splitlines() if ln.strip().startswith(f"{group}.{name}={show(field.default)}")]
            assert any(field.help in line and field.allowed() in line for line in lines), name


def test_the_default_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "● rmsnorm" in out(capsys, "norm")


def test_a_field_with_other_defaults_in_other_options_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "norm")
    assert "norm.eps=1e-06" in text
    assert "norm.eps=1e-05" in text
    assert "added to the variance (batchnorm, layernorm, nanogpt only)" in text


def test_what_only_one_option_has_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "attn")
    assert "null = n_heads / queries_per_kv (gqa, mixtral, qwen3 only)" in text
    assert "null = d_model / n_heads (not deepseek, mla)" in text
    assert "only)" not in next(ln for ln in text.splitlines() if "attn.window=" in ln)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("gqa", "attn.n_kv_heads=null"),
        ("norm=layernorm", "norm.bias=true"),
        ("llama", "mha without biases"),
        ("train", "train.max_steps=null"),
        ("seed", "seed.all=0"),
        ("wandb", "wandb.mode=auto"),
        ("paths", "paths.runs=runs"),
        ("compile", "compile=auto"),
        ("device", "device=auto"),
        ("plugins", "plugins=[]"),
        ("lr", "optim.lr=0.003"),
        ("n_layers", "model.n_layers=6"),
        ("train.precision", "auto, fp32, bf16 or fp16"),
        ("preset", "attn=llama ffn=llama model=llama"),
        ("model", "n_layers=4 d_model=128"),
    ],
)
def test_a_word_finds_its_sheet(word: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown in out(capsys, word)


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    everything = json.loads(out(capsys, "--json"))
    assert [g["group"] for g in everything["groups"]] == [*GROUPS, PRESET]
    assert everything["settings"][""][0]["key"] == "compile"
    attn = json.loads(out(capsys, "attn", "--json"))
    assert attn["default"] == "mha"
    assert {o["name"] for o in attn["options"]} >= set(OPTIONS["attn"]) - {"decoder"}
    assert next(f for f in attn["fields"] if f["key"] == "attn.n_kv_heads") == {
        "key": "attn.n_kv_heads",
        "default": None,
        "takes": "a whole number ≥ 1 and ≤ 10000 or null",
        "help": "key/value heads; null = n_heads / queries_per_kv",
        "choices": [],
        "only": ["gqa", "mixtral", "qwen3"],
    }
