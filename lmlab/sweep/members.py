"""Points of a sweep → composed, checked members: which run each of them is, and what sets it apart.

Hydra composes once per distinct set of choices (0.2 s); what a member changes beyond that is set in a copy (3 ms). What
fails for some members stops the sweep before anything starts, with those members named.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlab.compat import rules
from lmlab.config import catalogue, parse
from lmlab.config.identity import config_hash, slug, to_dict
from lmlab.config.load import Composer, Loaded, chosen, value_errors
from lmlab.config.parse import Override
from lmlab.config.tree import Experiment, Seed
from lmlab.errors import ConfigError, Errors, LmlabError, listed, raise_all
from lmlab.inherit import RESIZE, composed, names_run
from lmlab.runs.find import run_directory
from lmlab.sweep.space import Space

NO_FIELD = " is not a field of "


@dataclass
class Member:
    """One run of a sweep. `arm` is its identity without seeds, `label` what sets the arm apart: `norm=rmsnorm`."""

    words: list[str]
    loaded: Loaded
    label: str
    seeds: str  # `seed=1`
    hash: str
    arm: str
    path: Path

    @property
    def seed(self) -> int:
        return self.loaded.experiment.seed.all

    @property
    def name(self) -> str:
        """`norm=rmsnorm pos=rope seed=1`."""
        return " ".join([*([self.label] if self.label else []), self.seeds])


def compose(space: Space, *, config_dir: str | None = None) -> tuple[list[Member], list[str]]:
    """The members of a grid, in order, and a note for each that is the same run as an earlier one (and left out).

    Raises ConfigError, or Errors with everything that is wrong and whose it is.
    """
    words = [o for o in space.fixed if o.key == "plugins"]
    sources, errors = parse.import_plugins(parse.plugin_paths(words))
    raise_all(errors)
    composer = _Copies(config_dir, {key for key, values in space.axes.items() if not values[0].is_choice})
    found, wrong = [], []
    for point in space.points():
        try:
            found.append((point, composer.compose(point, sources)))
        except LmlabError as error:
            wrong.append((space.label(point), error))
    if wrong:
        raise_all(named(wrong, total=len(found) + len(wrong)))
    return _distinct([member(loaded, space.label(point), space.seeds(point)) for point, loaded in found])


def member(loaded: Loaded, label: str, seeds: str = "") -> Member:
    """The member that a composed experiment is."""
    exp = loaded.experiment
    hash8 = config_hash(exp)
    path = run_directory(Path(exp.paths.runs).expanduser(), hash8, exp.name or slug(exp))
    seeds = seeds or f"seed={exp.seed.all}"
    return Member(loaded.overrides, loaded, label, seeds, hash8, arm_id(exp), path)


def arm_id(experiment: Experiment) -> str:
    """8 hex digits of the experiment without its seeds: equal for runs that differ in nothing else."""
    return config_hash(dataclasses.replace(experiment, seed=Seed()))


def arm_config(experiment: Experiment) -> dict[str, Any]:
    """The experiment of an arm as a plain dict, as config.yaml holds it."""
    return to_dict(dataclasses.replace(experiment, seed=Seed()))


def _distinct(members: list[Member]) -> tuple[list[Member], list[str]]:
    first: dict[str, Member] = {}
    notes = []
    for one in members:
        if one.hash in first:
            notes.append(f"{one.name} is the same run as {first[one.hash].name}: trained once")
        first.setdefault(one.hash, one)
    return list(first.values()), notes


class _Copies:
    """Composes each distinct set of choices once and sets the swept fields in copies of it."""

    def __init__(self, config_dir: str | None, swept: set[str]) -> None:
        self.config_dir, self.swept = config_dir, swept
        user = catalogue.user_conf(config_dir)
        raise_all(catalogue.clashes(user) if user else [])
        self.composer = Composer(user)
        self.trees: dict[tuple[str, ...], Any] = {}

    def compose(self, point: Sequence[Override], sources: dict[str, str]) -> Loaded:
        """Raises what `inherit.composed` raises for these words."""
        if names_run(point) or any(o.key == RESIZE for o in point):
            return self._slow(point)
        try:
            experiment, choices = self._fast(point)
        except Exception:
            return self._slow(point)
        if value_errors(experiment, point) or [*rules.check(experiment)]:
            return self._slow(point)
        return Loaded(experiment, [o.typed for o in point], choices, sources)

    def _fast(self, point: Sequence[Override]) -> tuple[Experiment, dict[str, str]]:
        from omegaconf import OmegaConf

        shared = [o for o in point if o.key not in self.swept]
        key = tuple(str(o) for o in shared)
        if key not in self.trees:
            config = self.composer.tree(shared)
            choices = chosen(config.hydra.runtime.choices)
            del config["hydra"]
            self.trees[key] = (config, choices)
        config, choices = self.trees[key]
        config = copy.deepcopy(config)
        for override in point:
            if override.key in self.swept:
                OmegaConf.update(config, override.key, override.element(), merge=False)
        experiment = OmegaConf.to_object(config)
        assert isinstance(experiment, Experiment)
        return experiment, dict(choices)

    def _slow(self, point: Sequence[Override]) -> Loaded:
        return composed([o.typed for o in point], config_dir=self.config_dir)


def named(wrong: Sequence[tuple[str, LmlabError]], *, total: int) -> list[LmlabError]:
    """Each distinct error once, with the members it stops. `wrong`: (label, error) per member."""
    by_text: dict[tuple[str, str], list[str]] = {}
    for label, error in wrong:
        for one in error.errors if isinstance(error, Errors) else [error]:
            labels = by_text.setdefault((one.message, one.hint), [])
            labels += [label] if label not in labels else []
    found: list[LmlabError] = []
    for (message, hint), labels in by_text.items():
        some = len(wrong) < total and any(labels)
        if some and NO_FIELD in message:
            hint = _part_file(message, hint)
        found.append(ConfigError(f"{message} (of the sweep's members: {listed(labels, 4)})" if some else message, hint))
    return found


def _part_file(message: str, hint: str) -> str:
    """`attn.n_kv_heads` is not a field of attn=mha → how to give the field to the members that have it."""
    key = message.split("`")[1]
    group, _, leaf = key.partition(".")
    option = hint.partition(f"{group}=")[2].split(",")[0].split(" ")[0] or "OPTION"
    return (
        f"put the value into a part file, conf/{group}/NAME.yaml with the lines `defaults: [{option}]` and "
        f"`{leaf}: VALUE`, and sweep {group}=…,NAME"
    )
