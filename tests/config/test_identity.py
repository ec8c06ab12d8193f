"""What a run is: the dict and back, the hash, the name, the hash of the code."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.config import catalogue, identity
from lmlab.config.fields import fields
from lmlab.config.identity import code_hash, config_hash, differs, from_dict, outside_identity, slug, to_dict
from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.errors import ConfigError
from lmlab.registry import OPTIONS, Spec


@functools.cache
def exp(*words: str) -> Experiment:
    return load(words).experiment


def variants() -> list[tuple[str, ...]]:
    return [
        (),
        ("preset=llama", "model=nano"),
        ("attn=gqa", "attn.n_kv_heads=1", "compile=true"),
        ("data=tinystories",),
    ]


# ---------------------------------------------------------------- dict and back


@pytest.mark.parametrize("words", variants(), ids=" ".join)
def test_dict_and_back_is_the_same_experiment(words: tuple[str, ...]) -> None:
    e = exp(*words)
    as_json = json.loads(json.dumps(to_dict(e)))
    as_yaml = yaml.safe_load(yaml.safe_dump(to_dict(e)))
    assert from_dict(to_dict(e)) == from_dict(as_json) == from_dict(as_yaml) == e
    assert config_hash(from_dict(as_json)) == config_hash(e)


def test_the_dict_is_plain_with_short_names() -> None:
    d = to_dict(exp("norm=layernorm"))
    assert d["version"] == identity.VERSION
    assert d["norm"] == {"name": "layernorm", "eps": 1e-5, "bias": True}
    assert d["seed"] == {"all": 0, "init": None, "data": None, "dropout": None}


def test_it_is_read_back_without_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    e = exp("preset=llama")
    monkeypatch.setattr(catalogue, "conf_dir", lambda: pytest.fail("conf/ was read"))
    assert from_dict(to_dict(e)) == e


def test_every_option_survives() -> None:
    default = exp()
    for group, options in OPTIONS.items():
        for spec in options.values():
            e = dataclasses.replace(default, **{group: spec()})
            assert from_dict(json.loads(json.dumps(to_dict(e)))) == e, f"{group}={spec.name}"


DAMAGED: dict[str, tuple[Any, str]] = {
    "newer version": (lambda d: d.update(version=99), "has version 99; this lmlab reads up to 5"),
    "no version": (lambda d: d.pop("version"), "has no `version`"),
    "unknown root key": (lambda d: d.update(mot={"name": "topk"}), "has `mot`, which this lmlab does not know"),
    "unknown field": (lambda d: d["norm"].update(twist=1), "has `norm.twist`, which this lmlab does not know"),
    "unknown option": (lambda d: d["attn"].update(name="my_attn"), "`attn=my_attn` is not known"),
    "missing part": (lambda d: d.pop("attn"), "has no `attn`"),
    "part is no section": (lambda d: d.update(attn=3), "`attn` of the configuration is 3, not a section"),
    "wrong type": (lambda d: d["model"].update(n_layers="six"), "`model.n_layers` of the configuration is six"),
    "out of bounds": (lambda d: d["model"].update(n_layers=0), "`model.n_layers` of the configuration is 0"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_or_newer_configuration_is_refused(damage: Any, message: str) -> None:
    d = json.loads(json.dumps(to_dict(exp())))
    damage(d)
    with pytest.raises(ConfigError) as caught:
        from_dict(d)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_missing_field_is_at_its_default() -> None:
    d = to_dict(exp("attn.window=8"))
    del d["norm"]["eps"]
    assert from_dict(d) == exp("attn.window=8")


# ---------------------------------------------------------------- hash


def test_the_hash_is_eight_hex_digits_and_steady() -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", config_hash(exp()))
    assert config_hash(exp()) == config_hash(exp("attn=mha", "model.n_layers=6"))


def test_every_identity_field_changes_the_hash_and_no_other_does() -> None:
    """By each field's probe: a legal value that is not the default."""
    default = exp()
    for group in fields(Experiment):
        node = getattr(default, group)
        if not dataclasses.is_dataclass(node):
            continue
        outside = not fields(Experiment)[group].identity
        for name, field in fields(type(node)).items():
            other = field.probe if field.probe is not None else "other" if str in field.types else 7
            other = [other] if field.is_list and not isinstance(other, list) else other
            changed = dataclasses.replace(default, **{group: dataclasses.replace(node, **{name: other})})
            same = config_hash(changed) == config_hash(default)
            assert same == (outside or not field.identity), f"{group}.{name}"


@pytest.mark.parametrize(
    "word", ["name=x", "device=cpu", "wandb.mode=disabled", "paths.runs=elsewhere", "train.keep_last=5"]
)
def test_outside_identity(word: str) -> None:
    assert config_hash(exp(word)) == config_hash(exp())


OUTSIDE = {
    "name": True,
    "wandb.mode": True,
    "paths.runs": True,
    "train.keep_last": True,
    "data.streaming": True,
    "train.batch_tokens": False,
    "optim.lr": False,
    "norm": False,
    "compile": False,
    "seed.all": False,
    "attn.a_plugins_own": False,
    "of_a_newer_lmlab": False,
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_flat_key_is_told_to_be_outside_identity(key: str) -> None:
    assert outside_identity(key) is OUTSIDE[key]


def test_the_option_enters_the_hash_even_without_fields() -> None:
    assert config_hash(exp("block=postnorm")) != config_hash(exp("block=prenorm"))
    assert config_hash(exp("kernels=reference")) != config_hash(exp())


def test_a_label_does_not_enter_the_hash() -> None:
    same = ["model.n_layers=4", "model.d_model=128", "model.seq_len=128"]
    assert config_hash(exp("model=nano")) == config_hash(exp(*same))
    assert config_hash(exp("attn=llama")) == config_hash(exp())


def test_a_younger_field_at_its_default_keeps_old_hashes() -> None:
    from lmlab.registry import setting

    @dataclasses.dataclass
    class Old(Spec):
        eps: float = setting(1e-6, "", gt=0)

    @dataclasses.dataclass
    class New(Old):
        offset: int = setting(0, "", since=2)

    old = dataclasses.replace(exp(), norm=Old())
    assert config_hash(dataclasses.replace(old, norm=New())) == config_hash(old)
    assert config_hash(dataclasses.replace(old, norm=New(offset=1))) != config_hash(old)


def test_a_later_node_at_its_default_keeps_old_hashes() -> None:
    """The hash of the default composition before there was `init`."""
    assert config_hash(exp()) == "721c97e4"
    assert config_hash(exp("init.run=abcd")) == "721c97e4", "where weights were taken from is a place, not an identity"
    assert config_hash(exp("init.resize=extend")) != "721c97e4"


def test_the_weights_a_run_starts_from_are_part_of_what_it_is() -> None:
    from lmlab.config.amend import amend

    base = from_dict(to_dict(exp()))
    base.init.source = "0" * 32
    assert config_hash(base) != config_hash(exp())
    assert differs(base) == {"init.source": (None, "0" * 32)}
    amended = amend(base, ["train.keep_last=5"]).experiment
    assert amended.init.source == "0" * 32
    assert config_hash(amended) == config_hash(base)


# ---------------------------------------------------------------- name


SLUGS = {
    (): "default",
    ("attn=gqa",): "gqa",
    ("attn=gqa", "attn.n_kv_heads=1", "model=nano", "lr=1e-3", "seed=3"): "gqa-n_kv_heads1-nano-lr0.001-seed3",
    ("norm=layernorm", "norm.bias=false"): "nanogpt",
    ("model.tie_embeddings=false",): "no_tie_embeddings",
    ("data.packing=documents",): "packing_documents",
    ("optim.betas=[0.8,0.9]",): "betas0.8+0.9",
    ("data=text", "data.files=[a/b.txt]"): "text-filesa_b.txt",
    ("preset=gpt2",): "layernorm-learned-gpt2-nanogpt",
    ("name=x", "device=cpu"): "default",
}


@pytest.mark.parametrize(("words", "expected"), SLUGS.items(), ids=SLUGS.values())
def test_slug(words: tuple[str, ...], expected: str) -> None:
    assert slug(exp(*words)) == expected


def test_a_slug_is_short_and_safe_in_a_file_name() -> None:
    words = [f"data.files=[{'x' * 90}/é ü.txt]", "data=text", "norm=layernorm", "attn=gqa", "pos=alibi", "ffn=gelu"]
    text = slug(exp(*words))
    assert len(text) <= 60
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", text)


def test_differs_tells_both_values_by_key() -> None:
    assert differs(exp()) == {}
    assert differs(exp("attn=gqa", "attn.n_kv_heads=2", "lr=1e-3", "compile=false", "name=x")) == {
        "attn": ("mha", "gqa"),
        "attn.n_kv_heads": (None, 2),
        "optim.lr": (3e-3, 1e-3),
        "compile": ("auto", False),
    }
    assert differs(exp("seed=1"), exp("seed=2")) == {"seed.all": (2, 1)}


# ---------------------------------------------------------------- code


def test_a_comment_changes_no_code_hash_and_a_number_does() -> None:
    base = code_hash({"a.py": "def f(x):\n    return x + 1\n"})
    assert code_hash({"a.py": '"""Doc."""\n# why\ndef f(x):\n\n    """Doc."""\n    return (x + 1)  # so\n'}) == base
    assert code_hash({"a.py": "def f(x):\n    return x + 2\n"}) != base
    assert code_hash({"a.py": "def f(x):\n    return x - 1\n"}) != base
    assert code_hash({"b.py": "def f(x):\n    return x + 1\n"}) != base
    assert code_hash({}) != base


def test_pinned_code_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imported lmlab once computes with that, whatever is edited meanwhile."""
    (tmp_path / "config").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "norm.py").write_text("EPS = 1\n")
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "config" / "identity.py"))
    before = code_hash({})
    try:
        identity.pin_code()
        (tmp_path / "model" / "norm.py").write_text("EPS = 2\n")
        assert code_hash({}) == before
    finally:
        identity._pinned.clear()
    assert code_hash({}) != before


def test_the_code_hash_reads_the_files_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "lmlab" / "config" / "identity.py"))
    source = tmp_path / "lmlab" / "model" / "part.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    before = code_hash({})
    source.write_text("x = 2\n")
    changed = code_hash({})
    source.write_text("x = 1  # back\n")
    assert before != changed
    assert code_hash({}) == before
    (tmp_path / "lmlab" / "report").mkdir()
    (tmp_path / "lmlab" / "report" / "part.py").write_text("y = 1\n")
    assert code_hash({}) == before, "only model, kernels, train and data train a model"
