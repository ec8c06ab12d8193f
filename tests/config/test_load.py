"""Composing: aliases, numbers, presets, the user's own folder, and what comes out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.errors import ConfigError
from lmlab.model.spec import GQA, MHA


def exp(*words: str) -> Experiment:
    return load(words).experiment


def test_the_default_composition() -> None:
    loaded = load([])
    names = {
        g: getattr(loaded.experiment, g).name for g in ("norm", "block", "pos", "attn", "ffn", "data", "tokenizer")
    }
    assert names == dict(
        norm="rmsnorm", block="prenorm", pos="rope", attn="mha", ffn="swiglu", data="sotu", tokenizer="bpe"
    )
    assert loaded.choices["model"] == "tiny"
    e = loaded.experiment
    assert (e.optim.name, e.optim.lr, e.schedule.name, e.kernels.name) == ("adamw", 3e-3, "cosine", "auto")
    assert (e.compile, e.seed.all, e.train.batch_tokens, e.tokenizer.vocab_size) == ("auto", 0, 4096, 4096)


def test_no_omegaconf_object_comes_out() -> None:
    e = exp("optim.betas=[0.8,0.9]", "wandb.tags=[a b,c]", "plugins=[]")
    assert type(e.optim.betas) is list
    assert type(e.wandb.tags) is list
    assert e.wandb.tags == ["a b", "c"]
    assert type(e.train).__module__ == "lmlab.train.spec"


@pytest.mark.parametrize(
    ("word", "read", "value"),
    [
        ("lr=1e-3", lambda e: e.optim.lr, 1e-3),
        ("lr=1", lambda e: e.optim.lr, 1.0),
        ("seed=3", lambda e: e.seeds(), {"init": 3, "data": 3, "dropout": 3}),
        ("train.max_tokens=1e6", lambda e: e.train.max_tokens, 1_000_000),
        ("train.batch_tokens=8_192", lambda e: e.train.batch_tokens, 8192),
        ("train.max_steps=200.0", lambda e: e.train.max_steps, 200),
        ("train.micro_batch=1e1", lambda e: e.train.micro_batch, 10),
        ("train.micro_batch=auto", lambda e: e.train.micro_batch, "auto"),
        ("train.max_flops=1e12", lambda e: e.train.max_flops, 1e12),
        ("compile=true", lambda e: e.compile, True),
        ("compile=false", lambda e: e.compile, False),
        ("name=2024", lambda e: e.name, "2024"),
        ("name=Übung", lambda e: e.name, "Übung"),
        ("wandb.tags=[~/é x,b]", lambda e: e.wandb.tags, ["~/é x", "b"]),
        ('name="a=b"', lambda e: e.name, "a=b"),
        ("device=cuda:1", lambda e: e.device, "cuda:1"),
        ("optim.clip=null", lambda e: e.optim.clip, None),
        ("train.eval_tokens=null", lambda e: e.train.eval_tokens, None),
    ],
)
def test_values_become_what_their_field_is(word: str, read: object, value: object) -> None:
    got = read(exp(word))  # type: ignore[operator]
    assert got == value
    assert type(got) is type(value)


def test_seed_is_one_key_and_the_others_follow_it() -> None:
    e = exp("seed=3", "seed.data=5")
    assert e.seed.init is None
    assert e.seeds() == {"init": 3, "data": 5, "dropout": 3}


def test_a_preset_is_changed_by_what_is_typed() -> None:
    llama = exp("preset=llama").model
    assert (llama.n_layers, llama.d_model, llama.n_heads, llama.seq_len, llama.tie_embeddings) == (
        32,
        4096,
        32,
        2048,
        False,
    )
    tiny = exp("preset=llama", "model=tiny")
    assert (tiny.model.n_layers, tiny.model.d_model, tiny.model.tie_embeddings) == (6, 256, True)
    assert tiny.ffn.multiple_of == 256
    biased = exp("preset=gpt2", "attn=mha").attn
    assert isinstance(biased, MHA)
    assert not biased.bias_qkv
    assert isinstance(exp("attn=gqa", "preset=llama").attn, GQA), "the order of words does not matter"


def test_llama_has_the_widths_of_the_paper() -> None:
    e = exp("preset=llama")
    assert e.ffn.width(e.model.d_model) == 11008
    assert e.arch.head_dim() == 128


def test_nanogpt_has_its_own_values() -> None:
    e = exp("preset=nanogpt")
    assert (e.norm.name, e.norm.bias, e.ffn.name, e.ffn.bias, e.pos.name) == (
        "layernorm",
        False,
        "gelu",
        False,
        "learned",
    )
    assert (e.optim.lr, e.optim.betas, e.optim.weight_decay, e.optim.clip) == (6e-4, [0.9, 0.95], 0.1, 1.0)
    assert (e.model.n_layers, e.model.d_model, e.attn.bias_qkv, e.attn.bias_o) == (12, 768, False, False)


def test_gpt2_has_biases_everywhere() -> None:
    e = exp("preset=gpt2")
    assert (e.norm.bias, e.attn.bias_qkv, e.attn.bias_o, e.ffn.bias, e.ffn.name) == (
        True,
        True,
        True,
        True,
        "gelu_tanh",
    )
    assert e.ffn.width(e.model.d_model) == 3072


def test_labels_are_kept_by_group() -> None:
    choices = load(["preset=llama", "attn=gqa"]).choices
    assert [choices[g] for g in ("preset", "attn", "ffn", "data")] == ["llama", "gqa", "llama", "sotu"]


def test_overrides_are_kept_as_typed() -> None:
    assert load(["lr=1e-3", "seed=3"]).overrides == ["lr=1e-3", "seed=3"]


def test_loading_twice_and_around_other_compositions_is_the_same() -> None:
    words = [[], ["attn=gqa"], ["preset=gpt2"]]
    first = [exp(*w) for w in words]
    assert [exp(*w) for w in reversed(words)] == first[::-1]
    assert all(a != b for a, b in itertools.combinations(first, 2))


# ---------------------------------------------------------------- the user's own conf/


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_conf_folder_here_adds_parts_and_presets(here: Path) -> None:
    write(here / "conf", "attn/mine.yaml", "# two kv heads\ndefaults:\n  - gqa\nn_kv_heads: 2\n")
    write(here / "conf", "preset/mine.yaml", "# @package _global_\ndefaults:\n  - override /attn: mine\n")
    loaded = load(["preset=mine"])
    assert loaded.choices["attn"] == "mine"
    assert loaded.experiment.attn.n_kv_heads == 2


def test_config_dir_takes_the_place_of_conf(here: Path) -> None:
    write(here / "own dir", "attn/mine.yaml", "defaults: [/spec/attn/mqa@_here_]\n")
    assert load(["attn=mine"], config_dir="own dir").experiment.attn.name == "mqa"
    with pytest.raises(ConfigError, match="which is not a folder"):
        load([], config_dir="nowhere")


def test_a_file_with_a_built_in_name_is_refused(here: Path) -> None:
    write(here / "conf", "norm/rmsnorm.yaml", "defaults: [/spec/norm/layernorm@_here_]\n")
    with pytest.raises(ConfigError, match=r"norm/rmsnorm\.yaml has the name of lmlab's own"):
        load([])


def test_the_same_file_byte_for_byte_is_no_clash(here: Path) -> None:
    from lmlab.config.catalogue import conf_dir

    write(here / "conf", "norm/rmsnorm.yaml", (conf_dir() / "norm/rmsnorm.yaml").read_text())
    assert load([]).experiment.norm.name == "rmsnorm"


BROKEN = {
    "no part": ("n_kv_heads: 2\n", r"attn/mine\.yaml does not say which part it is", "begin it with"),
    "unknown key": ("defaults: [gqa]\nn_kv_head: 2\n", r"`n_kv_head` is not a field of attn=gqa", "n_kv_heads"),
    "no yaml": ("defaults: [gqa\nx: 1\n", r"attn/mine\.yaml, line \d is no YAML", "mend"),
    "bad value": ("defaults: [gqa]\nn_kv_heads: 0\n", r"`attn.n_kv_heads` is 0", "lmlab options attn"),
}


@pytest.mark.parametrize(("text", "message", "hint"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_part_file_is_told(here: Path, text: str, message: str, hint: str) -> None:
    write(here / "conf", "attn/mine.yaml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(["attn=mine"])
    assert hint in caught.value.hint
    load([])  # what is not chosen does no harm


def test_no_preset_can_be_asked_for() -> None:
    """A sweep compares presets with the default: preset=null,llama."""
    assert load(["preset=null"]).experiment == load([]).experiment
    assert "preset" not in load(["preset=null"]).choices
