"""Overrides → one checked experiment: Hydra composes, plain dataclasses come out, every error is told at once.

loaded = load(["norm=rmsnorm", "attn=gqa", "model.n_layers=2"])
loaded.experiment.attn.n_kv_heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlab.compat import rules
from lmlab.config import catalogue, parse
from lmlab.config.fields import fields, problem, walk
from lmlab.config.hints import followable
from lmlab.config.parse import Override
from lmlab.config.tree import GROUPS, Experiment
from lmlab.config.untaken import untaken
from lmlab.errors import ConfigError, LmlabError, raise_all
from lmlab.model.spec import Arch
from lmlab.registry import OPTIONS


@dataclass(frozen=True)
class Start:
    """The checkpoint whose weights a run starts from, and the architecture and the tokenizer that they are of."""

    run: Path
    checkpoint: Path
    step: int
    content_hash: str
    arch: Arch
    tokenizer: Path


@dataclass(frozen=True)
class Loaded:
    """An experiment and how it was asked for. `choices`: labels by group, {"model": "tiny", "preset": "llama", …};
    `start`: None when the weights are drawn, or lie in the run already; `notes`: what to say before training."""

    experiment: Experiment
    overrides: list[str]
    choices: dict[str, str]
    plugin_sources: dict[str, str] = field(default_factory=dict)
    start: Start | None = None
    notes: list[str] = field(default_factory=list)

    def used_plugins(self) -> dict[str, str]:
        """The plug-ins whose classes are in the experiment: these, and no others, enter its identity."""
        parts = [getattr(self.experiment, group) for group in GROUPS]
        modules = {cls.__module__ for part in parts for cls in type(part).__mro__}
        modules |= {part.build.partition(":")[0] for part in parts}
        return {name: text for name, text in self.plugin_sources.items() if Path(name).stem in modules}


def load(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    imported: bool = False,
    typed: Sequence[str] | None = None,
) -> Loaded:
    """Compose and check; imported: as a model that others made; typed: which of the words a user can leave out (None =
    all). Raises ConfigError, or Errors with all of them."""
    words, errors = parse.read(overrides)
    sources, plugin_errors = _plugins(words, errors)
    user = catalogue.user_conf(config_dir)
    raise_all(catalogue.clashes(user) if user else [])
    composer = Composer(user)
    problems: list[LmlabError] = [*errors, *plugin_errors]
    if not problems:
        try:
            experiment, choices = composer.compose(words)
        except Exception as error:
            problems = _explain(words, composer, error, imported)
        else:
            problems = [*value_errors(experiment, words)]
            if problems:
                problems = _explain(words, composer, None, imported)
            else:
                problems = [*rules.check(experiment, imported=imported)]
    else:
        problems += [e for e in _explain(words, composer, None, imported) if not plugin_errors or not _about_part(e)]
    own = words if typed is None else parse.read(typed)[0]
    raise_all([followable(problem, own, user) for problem in problems])
    return Loaded(experiment, list(overrides), choices, sources, notes=untaken(words, experiment, user))


def _plugins(words: list[Override], errors: list[ConfigError]) -> tuple[dict[str, str], list[LmlabError]]:
    try:
        return parse.import_plugins(parse.plugin_paths(words))
    except ConfigError as error:
        return {}, [error]


def _about_part(error: LmlabError) -> bool:
    """An unknown option is no news when the plug-in that defines it could not be imported."""
    return "is not known; choices" in error.message


def _explain(words: list[Override], composer: Composer, error: Exception | None, imported: bool) -> list[LmlabError]:
    from lmlab.config.explain import explain

    return explain(words, composer, error, imported=imported)


class Composer:
    """Hydra with lmlab's catalogue and the user's own folder. Composes as often as it is asked."""

    def __init__(self, user: Path | None = None) -> None:
        self.user = user
        register()

    def compose(self, overrides: Sequence[Override]) -> tuple[Experiment, dict[str, str]]:
        """The experiment and the label of each choice. Raises whatever Hydra and OmegaConf raise."""
        from omegaconf import OmegaConf

        config = self.tree(overrides)
        choices = chosen(config.hydra.runtime.choices)
        del config["hydra"]
        experiment = OmegaConf.to_object(config)
        assert isinstance(experiment, Experiment)
        return experiment, choices

    def tree(self, overrides: Sequence[Override]) -> Any:
        """The composed OmegaConf tree, with the node `hydra`."""
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        words = hydra_words(overrides)
        if self.user is not None:
            words.append(f"hydra.searchpath=['file://{self.user}']")
        with initialize_config_dir(str(catalogue.conf_dir()), job_name="lmlab", version_base="1.3"):
            config = compose("config", overrides=words, return_hydra_config=True)
        OmegaConf.set_struct(config, False)
        OmegaConf.set_readonly(config, False)
        return config


def hydra_words(overrides: Sequence[Override]) -> list[str]:
    """The overrides as Hydra takes them. `preset=null` is the default composition, which Hydra has no word for."""
    return [str(o) for o in overrides if (o.key, o.value) != (catalogue.PRESET, "null")]


def chosen(labels: Any) -> dict[str, str]:
    """{"norm": "rmsnorm", "model": "tiny", "preset": "llama", …} of Hydra's `runtime.choices`."""
    return {group: str(labels[group]) for group in (*GROUPS, catalogue.PRESET) if labels.get(group)}


_registered: set[type] = set()


def register() -> None:
    """Copy OPTIONS into Hydra's store: `spec/<group>`, and `<group>` too for parts without a YAML file (plug-ins)."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if Experiment not in _registered:
        store.store(group="spec", name="experiment", node=Experiment)
        _registered.add(Experiment)
    for group, options in OPTIONS.items():
        for name, spec in options.items():
            if spec in _registered:
                continue
            store.store(group=f"spec/{group}", name=name, node=spec)
            if not spec.__module__.startswith("lmlab."):
                store.store(group=group, name=name, node=spec)
            _registered.add(spec)


def value_errors(experiment: Experiment, overrides: Sequence[Override] = ()) -> list[ConfigError]:
    """Every value that its field does not take, by key, wherever it came from."""
    errors = {k: _value_error(k, p) for k, v, f in walk(experiment) if (p := problem(v, f))}
    for override in overrides:
        found = None if override.is_choice else _field(experiment, override.key)
        if found and bool in found.types and (p := problem(override.element(), found)):
            errors[override.key] = _value_error(override.key, p)
    return list(errors.values())


def _field(node: Any, key: str) -> Any:
    *path, leaf = key.split(".")
    for name in path:
        node = getattr(node, name)
    return fields(type(node)).get(leaf)


def _value_error(key: str, text: str) -> ConfigError:
    return ConfigError(f"`{key}` {text}", f"`lmlab options {key.partition('.')[0]}` shows what it takes")
