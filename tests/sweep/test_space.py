"""Words of a sweep. The oracle for what Hydra's syntax means is Hydra's own BasicSweeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.errors import ConfigError, LmlabError
from lmlab.sweep.space import read


def grid(words: list[str]) -> list[list[str]]:
    """The members' words, sorted within a member."""
    return [sorted(str(o) for o in point) for point in read(words).points()]


@pytest.mark.parametrize(
    "words",
    [
        ["norm=rmsnorm,layernorm", "pos=rope,alibi", "model=nano"],
        ["model.n_layers=range(1,4)", "norm=rmsnorm,layernorm"],
        ["model.n_layers=range(2,9,3)"],
        ["optim.lr=choice(0.001,0.003)", "attn=mha"],
        ["optim.betas=[0.9,0.95],[0.9,0.99]"],
        ["schedule=glob(*)"],
        ["schedule=glob(*,exclude=co*)"],
        ["model.n_layers=sort(3,1,2)"],
    ],
    ids=lambda words: " ".join(words),
)
def test_the_grid_is_that_of_hydras_own_sweeper(words: list[str]) -> None:
    from hydra import initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from lmlab.config.catalogue import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
        (batch,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    theirs = [sorted(member) for member in batch]
    ours = grid(words)
    assert len(ours) > 1 or len(words) == 1
    assert ours == theirs


def test_one_run_is_a_sweep_of_one() -> None:
    assert grid(["norm=rmsnorm"]) == [["norm=rmsnorm"]]


def test_the_first_axis_varies_slowest_and_seeds_fastest() -> None:
    points = read(["norm=rmsnorm,layernorm", "pos=rope,alibi"], seeds=2).points()
    told = [" ".join(o.typed for o in point) for point in points]
    assert told[:3] == [
        "norm=rmsnorm pos=rope seed=0", "norm=rmsnorm pos=rope seed=1", "norm=rmsnorm pos=alibi seed=0"
    ]  # fmt: skip
    assert len(told) == 8


def test_aliases_and_whole_numbers_are_read_as_for_one_run() -> None:
    space = read(["lr=1e-3,3e-3", "train.max_steps=1e2,2e2", "seed=3,4"])
    assert [o.value for o in space.axes["train.max_steps"]] == ["100", "200"]
    assert set(space.axes) == {"optim.lr", "train.max_steps", "seed.all"}
    assert [o.typed for o in space.axes["train.max_steps"]] == ["train.max_steps=100", "train.max_steps=200"]


def test_lists_are_single_values() -> None:
    space = read(["optim.betas=[0.9,0.95]", "wandb.tags=[a,b]"])
    assert not space.axes
    assert [o.key for o in space.fixed] == ["optim.betas", "wandb.tags"]


def test_the_label_leaves_seeds_and_single_values_out() -> None:
    space = read(["norm=rmsnorm,layernorm", "pos=rope", "seed=0,1"])
    assert [space.label(p) for p in space.points()] == ["norm=rmsnorm"] * 2 + ["norm=layernorm"] * 2
    parts = read(["norm=rmsnorm,layernorm", "seed.init=1,2"], seeds=2)
    assert [parts.label(p) for p in parts.points()] == ["norm=rmsnorm"] * 4 + ["norm=layernorm"] * 4
    assert [parts.seeds(p) for p in parts.points()][:3] == [
        "seed=0 seed.init=1", "seed=1 seed.init=1", "seed=0 seed.init=2"
    ]  # fmt: skip


def test_hydras_words_are_kept_apart() -> None:
    space = read(["norm=rmsnorm,layernorm", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
    assert space.hydra == ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert space.chosen("hydra/launcher") == "joblib"


def test_glob_finds_options_of_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm" / "rmsnorm_wide.yaml").write_text("# wide\ndefaults: [/spec/norm/rmsnorm@_here_]\neps: 1e-3\n")
    space = read(["norm=glob(rms*)"], user=tmp_path)
    assert [o.value for o in space.axes["norm"]] == ["rmsnorm", "rmsnorm_wide"]


@pytest.mark.parametrize(
    ("words", "seeds", "said"),
    [
        (["norm=rmsnorm,rmsnorm"], None, "`norm` has rmsnorm twice"),
        (["norm=rmsnorm,layernorm", "norm=rmsnorm"], None, "`norm` is given twice"),
        (["lr=1e-3", "optim.lr=1e-3,2e-3"], None, "`optim.lr` is given twice"),
        (["seed=0,1"], 2, "--seeds 2 and seed=0,1 both set the seeds"),
        (["lr=interval(1e-4,1e-2)"], None, "needs a sweeper that draws values"),
        (["wandb.mode=offline,disabled"], None, "`wandb.mode` is no part of what a run is"),
        (["train.eval_every_steps=5,10"], None, "`train.eval_every_steps` is no part of what a run is"),
        (["name=a,b"], None, "`name` can't vary within a sweep"),
        (["plugins=[a.py],[b.py]"], None, "`plugins` can't vary within a sweep"),
        (["model.n_layers=range(5,2)"], None, "a range goes up, and its end is left out"),
        (["norm=glob(zzz*)"], None, "`norm=glob(zzz*)` names nothing"),
        (["hydra.run.dir=x"], None, "`hydra.run.dir` is not a key of an experiment"),
        (["+norm=rmsnorm,layernorm"], None, "keys are set, not added"),
        (["rmsnorm"], None, "`rmsnorm` is not key=value"),
    ],
)
def test_wrong_words_are_refused_in_two_lines(words: list[str], seeds: int | None, said: str) -> None:
    with pytest.raises(LmlabError) as caught:
        read(words, seeds=seeds)
    assert said in str(caught.value)
    assert "hint: " in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(LmlabError) as caught:
        read(["norm=rmsnorm,rmsnorm", "name=a,b", "lr=interval(0,1)"])
    assert str(caught.value).count("error: ") == 3
    assert not isinstance(caught.value, ConfigError)
