"""Composed members: equal to what one run would compose, and refused together with their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.config.identity import config_hash, to_dict
from lmlab.config.load import load
from lmlab.errors import LmlabError
from lmlab.sweep.members import arm_config, compose
from lmlab.sweep.space import read


@pytest.mark.parametrize(
    "words",
    [
        ["norm=rmsnorm,layernorm", "lr=1e-3,1,3e-3", "train.max_steps=20"],
        ["preset=gpt2,llama", "model=nano,tiny", "model.n_layers=2,3"],
        ["attn=gqa", "attn.n_kv_heads=1,2", "optim.betas=[0.9,0.95],[0.8,0.9]", "compile=true,false"],
        ["train.micro_batch=auto,4", "attn.window=null,16"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_member_is_what_one_run_of_its_words_composes(words: list[str]) -> None:
    members, notes = compose(read(words))
    assert notes == []
    assert len({m.hash for m in members}) == len(members) > 1
    for member in members:
        alone = load(member.words)
        assert to_dict(member.loaded.experiment) == to_dict(alone.experiment)
        assert member.loaded.choices == alone.choices
        assert member.hash == config_hash(alone.experiment)


def test_seeds_share_an_arm_and_nothing_else_does() -> None:
    members, _ = compose(read(["norm=rmsnorm,layernorm", "lr=1e-3,2e-3"], seeds=3))
    assert len(members) == 12
    assert len({m.arm for m in members}) == 4
    assert [m.seed for m in members[:3]] == [0, 1, 2]
    assert len({m.arm for m in members[:3]}) == 1
    assert members[1].name == "norm=rmsnorm lr=0.001 seed=1"
    assert arm_config(members[0].loaded.experiment) == arm_config(members[2].loaded.experiment)


def test_a_field_that_some_members_lack_names_them_and_a_part_file() -> None:
    with pytest.raises(LmlabError) as caught:
        compose(read(["attn=mha,gqa", "attn.n_kv_heads=2"]))
    text = str(caught.value)
    assert "`attn.n_kv_heads` is not a field of attn=mha (of the sweep's members: attn=mha)" in text
    assert "conf/attn/NAME.yaml" in text
    assert "defaults: [gqa]" in text
    assert caught.value.exit_code == 2


def test_the_part_file_of_that_hint_works(tmp_path: Path) -> None:
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "gqa1.yaml").write_text("defaults: [gqa]\nn_kv_heads: 1\n")
    space = read(["attn=mha,gqa1"], user=tmp_path)
    members, _ = compose(space, config_dir=str(tmp_path))
    assert [getattr(m.loaded.experiment.attn, "n_kv_heads", None) for m in members] == [None, 1]


def test_an_unknown_option_names_its_members_only() -> None:
    with pytest.raises(LmlabError) as caught:
        compose(read(["norm=rmsnorm,rmsnrm", "pos=rope,alibi"]))
    text = str(caught.value)
    assert text.count("error: ") == 1
    assert "(of the sweep's members: norm=rmsnrm pos=rope, norm=rmsnrm pos=alibi)" in text


def test_an_error_of_all_members_is_told_once_without_names() -> None:
    with pytest.raises(LmlabError) as caught:
        compose(read(["norm=rmsnorm,layernorm", "model.n_layer=3"]))
    assert str(caught.value).count("error: ") == 1
    assert "members" not in str(caught.value)


def test_a_relation_between_parts_is_refused_for_the_members_that_break_it() -> None:
    with pytest.raises(LmlabError) as caught:
        compose(read(["attn=gqa", "attn.n_kv_heads=2,3"]))
    assert "attn.n_kv_heads=3" in str(caught.value)


def test_a_member_that_is_another_one_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm" / "same.yaml").write_text("defaults: [rmsnorm]\n")
    space = read(["norm=rmsnorm,same"], user=tmp_path)
    members, notes = compose(space, config_dir=str(tmp_path))
    assert len(members) == 1
    assert notes == ["norm=same seed=0 is the same run as norm=rmsnorm seed=0: trained once"]
