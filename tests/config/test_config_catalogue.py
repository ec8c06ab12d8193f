"""conf/, the specs and what they build are kept in step: every option, every part file, every preset."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from lmlab.config import catalogue
from lmlab.config.catalogue import PRESET, conf_dir, entries
from lmlab.config.fields import fields, problem
from lmlab.config.load import load
from lmlab.config.tree import GROUPS, Experiment
from lmlab.registry import OPTIONS

FILES = sorted(p.relative_to(conf_dir()).as_posix() for p in conf_dir().rglob("*.yaml"))
PARTS = [f for f in FILES if "/" in f and not f.startswith(f"{PRESET}/")]
LMLAB = {(g, n): s for g, o in OPTIONS.items() for n, s in o.items() if s.__module__.startswith("lmlab.")}


def test_every_group_has_a_folder_and_no_other_is_there() -> None:
    folders = {p.name for p in conf_dir().iterdir() if p.is_dir()}
    assert folders == {*GROUPS, PRESET}
    assert {group for group, _ in LMLAB} == set(GROUPS)


@pytest.mark.parametrize(("group", "name"), LMLAB, ids=lambda x: x)
def test_every_option_has_a_file_and_something_that_builds_it(group: str, name: str) -> None:
    spec = LMLAB[group, name]
    files = [e for e in entries(group).values() if e.spec is spec]
    assert files, f"conf/{group}/{name}.yaml is missing"
    assert group == "model" or any(e.label == name and not e.values for e in files), "its own file states no values"
    if spec.build:
        module, _, attribute = spec.build.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    else:
        nothing = name == "none" and group in ("rope_scaling", "moe")
        assert nothing or group in ("model", "kernels"), "what is built says by what"


@pytest.mark.parametrize("file", PARTS)
def test_every_part_file_has_help_a_spec_and_fields_of_it(file: str) -> None:
    group, name = file.removesuffix(".yaml").split("/")
    entry = entries(group)[name]
    assert entry.help
    assert entry.spec is not None
    assert set(entry.values) <= set(fields(entry.spec))


NEEDED = {
    "data=mix": ["data.mix=[sotu:0.9,passkey:0.1]"],
    "data=text": ["data.files=[a.txt]"],
    "data=hf": ["data.repo=a/b"],
    "tokenizer=hf": ["tokenizer.path=x"],
}


@pytest.mark.parametrize(
    "nth", range(sum(max(len(entries(group)) for group in groups) for groups in (GROUPS, ("rope_scaling",))))
)
def test_every_part_file_composes_to_what_it_says(nth: int) -> None:
    """The nth of every group together: each is composed at least once."""
    chosen = {group: list(entries(group).values())[nth % len(entries(group))] for group in GROUPS}
    if nth >= len(
        entries("rope_scaling")
    ):  # each was taken once; they need pos=rope, and not every norm fits each block
        chosen["rope_scaling"] = entries("rope_scaling")["none"]
    else:
        chosen["pos"] = entries("pos")["rope"]
    if chosen["norm"].label == "none":
        chosen["block"] = entries("block")["prenorm"]
    if chosen["tokenizer"].label == "ids":  # nothing but a task is written with them
        chosen["data"] = entries("data")["mqar"]
    chosen |= {group: entries(group)[label] for group, label in chosen["data"].selects.items()}
    words = [f"{group}={entry.label}" for group, entry in chosen.items()]
    words += [need for word in words for need in NEEDED.get(word, ())] + ["train.batch_tokens=65536"]
    experiment = load(words).experiment
    for group, entry in chosen.items():
        part = getattr(experiment, group)
        assert type(part) is entry.spec
        assert all(getattr(part, key) == getattr(entry.make(), key) for key in entry.values), f"{group}={entry.label}"


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith(f"{PRESET}/")])
def test_a_preset_only_selects_parts(file: str) -> None:
    text = (conf_dir() / file).read_text()
    assert text.startswith("# @package _global_\n# ")
    body = yaml.safe_load(text)
    assert list(body) == ["defaults"]
    for row in body["defaults"]:
        ((key, name),) = row.items()
        group = key.removeprefix("override /")
        assert key.startswith("override /")
        assert name in entries(group), f"{group}={name}"


def test_the_default_without_hydra_is_the_one_hydra_composes() -> None:
    assert catalogue.default_experiment() == load([]).experiment


def test_the_plainest_values_are_the_defaults_of_the_spec() -> None:
    """tiny, sotu, adamw …: conf/ states only differences, so the default part is the spec as it stands."""
    for group, label in catalogue.defaults().items():
        assert entries(group)[label].make() == entries(group)[label].spec()  # type: ignore[misc]


SIZES = {"nano": (4, 128, 4, 128), "tiny": (6, 256, 4, 256), "small": (12, 768, 12, 1024)}
SIZES |= {"medium": (24, 1024, 16, 1024), "large": (24, 2048, 16, 2048)}


@pytest.mark.parametrize(("name", "sizes"), SIZES.items(), ids=list(SIZES))
def test_model_sizes(name: str, sizes: tuple[int, ...]) -> None:
    m = entries("model")[name].make()
    assert (m.n_layers, m.d_model, m.n_heads, m.seq_len) == sizes  # type: ignore[attr-defined]


NODES = [*LMLAB.values(), *catalogue.nodes().values(), Experiment]


@pytest.mark.parametrize("cls", NODES, ids=lambda cls: cls.__name__)
def test_every_field_has_help_and_a_legal_default_and_probe(cls: type) -> None:
    for name, field in fields(cls).items():
        if cls is Experiment and name in GROUPS:
            continue
        assert field.help, f"{cls.__name__}.{name} has no help"
        if field.node is None:
            assert problem(field.default, field) is None, f"{cls.__name__}.{name}"
            if field.probe is not None:
                assert problem(field.probe, field) is None, f"the probe of {cls.__name__}.{name}"
                assert field.probe != field.default


def test_the_catalogue_is_found_in_a_wheel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lmlab"
    (package / "conf").mkdir(parents=True)
    (package / "conf" / "config.yaml").touch()
    monkeypatch.setattr(catalogue, "__file__", str(package / "config" / "catalogue.py"))
    assert conf_dir() == package / "conf"
