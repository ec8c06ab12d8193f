"""experiment=NAME: the file's words before the typed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.errors import ConfigError
from lmlab.sweep.question import expanded, taken


@pytest.fixture(autouse=True)
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "experiments" / "first" / "sweep.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("overrides:\n  - norm=rmsnorm,layernorm\n  - lr=1e-3\nflags:\n  - --seeds 2\n  - --workers=2\n")
    return path


def test_the_files_words_come_in() -> None:
    words = expanded(["sweep", "experiment=first", "model=nano"])
    assert words[:4] == ["sweep", "--seeds", "2", "--workers=2"]
    assert taken(words[4:]) == (["model=nano", "norm=rmsnorm,layernorm", "lr=1e-3"], "first")


def test_a_typed_key_replaces_the_files_also_by_its_alias() -> None:
    words, _ = taken(expanded(["sweep", "experiment=first", "optim.lr=5e-3", "norm=rmsnorm"])[4:])
    assert words == ["optim.lr=5e-3", "norm=rmsnorm"]


def test_typed_flags_stand_after_the_files_so_that_they_hold() -> None:
    words = expanded(["sweep", "--seeds", "5", "experiment=first"])
    assert [i for i, w in enumerate(words) if w == "--seeds"] == [1, 4]


def test_without_the_word_nothing_changes() -> None:
    assert expanded(["sweep", "norm=rmsnorm"]) == ["sweep", "norm=rmsnorm"]
    assert taken(["norm=rmsnorm"]) == (["norm=rmsnorm"], None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("overrides: norm=rmsnorm", "`overrides` of experiments/first/sweep.yaml is not a list of words"),
        ("overrides: [--seeds 2]", "holds --seeds 2"),
        ("flags: [norm=rmsnorm]", "holds norm=rmsnorm"),
        ("overrides: [norm=rmsnorm, 5]", "is not a list of words"),
        ("override: [norm=rmsnorm]", "has override"),
        ("- a", "is not a mapping"),
        ("a: [", "can't be read"),
        ("overrides: [1]", "is not a list of words"),
    ],
)
def test_a_wrong_file_is_told(question: Path, text: str, said: str) -> None:
    question.write_text(text)
    with pytest.raises(ConfigError) as caught:
        expanded(["sweep", "experiment=first"])
    assert said in str(caught.value)


def test_a_number_of_its_own_is_read_as_well(question: Path) -> None:
    question.write_text("flags: [--seeds, 2]\n")
    assert expanded(["sweep", "experiment=first"])[1:3] == ["--seeds", "2"]


def test_typed_seeds_replace_the_files_flag() -> None:
    assert "--seeds" not in expanded(["sweep", "experiment=first", "seed=0,1"])


def test_an_unknown_name_has_a_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        expanded(["sweep", "experiment=frist"])
    assert "did you mean experiment=first?" in str(caught.value)
