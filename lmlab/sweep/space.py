"""Words of `lmlab sweep` → what every member shares, and the axes along which members differ.

Lists, ranges, choices and globs are written as Hydra writes them and expanded by Hydra's own parser. Every single value
then goes through `config.parse`, as if it had been typed for one run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmlab.config import catalogue, parse
from lmlab.config.catalogue import PRESET, possible_fields
from lmlab.config.parse import ALIASES, Override
from lmlab.config.tree import GROUPS
from lmlab.errors import ConfigError, LmlabError, listed, raise_all

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
HYDRA = (LAUNCHER + "=", SWEEPER + "=", "hydra.launcher.", "hydra.sweeper.")
SEED = "seed.all"
OF_THE_SWEEP = ("plugins", "paths.runs", "paths.cache", "name")  # one value for all members
ONE_VALUE = "give it one value"


@dataclass
class Space:
    """`fixed`: words of every member; `axes`: key → values; `hydra`: words for launcher and sweeper; `drawn`: words
    whose values only a sweeper can choose, such as interval(1e-4,1e-2)."""

    fixed: list[Override] = field(default_factory=list)
    axes: dict[str, list[Override]] = field(default_factory=dict)
    hydra: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)

    def all_words(self) -> list[Override]:
        """Every word of any member."""
        return [*self.fixed, *itertools.chain.from_iterable(self.axes.values())]

    def points(self) -> list[list[Override]]:
        """The grid: the first axis varies slowest, as in Hydra."""
        return [[*self.fixed, *point] for point in itertools.product(*self.axes.values())]

    def label(self, point: Sequence[Override]) -> str:
        """`norm=rmsnorm pos=rope`: what sets this point's arm apart; its seeds do not."""
        return " ".join(o.typed for o in point if len(self.axes.get(o.key, ())) > 1 and not is_seed(o.key))

    def seeds(self, point: Sequence[Override]) -> str:
        """`seed=1 seed.init=2`: the point's seeds, as far as they differ between members."""
        varied = [o.typed for o in point if len(self.axes.get(o.key, ())) > 1 and is_seed(o.key) and o.key != SEED]
        all_ = next((o.value for o in point if o.key == SEED), "0")
        return " ".join([f"seed={all_}", *varied])

    def of_one_seed(self) -> Space:
        """The same arms, each once."""
        axes = {key: values[:1] if is_seed(key) else values for key, values in self.axes.items()}
        return replace(self, axes=axes)

    def chosen(self, name: str) -> str | None:
        """The launcher or sweeper that was typed."""
        return next((w.partition("=")[2] for w in self.hydra if w.startswith(name + "=")), None)


def read(words: Sequence[str], *, seeds: int | None = None, user: Path | None = None) -> Space:
    """The space that the words span; `seeds` adds the axis seed=0…seeds-1. Raises ConfigError, or Errors with all."""
    space, errors = Space(), []
    plain = [w for w in words if not w.startswith(HYDRA)]
    space.hydra = [w for w in words if w.startswith(HYDRA)]
    for word in plain:
        try:
            _add(space, word, user)
        except LmlabError as error:
            errors.append(error)
    errors += _given_twice(plain)
    if seeds is not None:
        typed = next((w for w in plain if _key(w) == SEED), None)
        if typed is not None:
            errors.append(ConfigError(f"--seeds {seeds} and {typed} both set the seeds", "leave one out"))
        space.axes[SEED] = [Override(f"seed={n}", SEED, str(n)) for n in range(seeds)]
    if space.drawn and space.chosen(SWEEPER) is None:
        hint = "install lmlab[sweepers] and add hydra/sweeper=optuna, or list the values: key=a,b,c"
        errors += [ConfigError(f"`{word}` needs a sweeper that draws values", hint) for word in space.drawn]
    raise_all(errors)
    return space


def is_seed(key: str) -> bool:
    """Whether the key makes another draw of the same experiment: seed.all, seed.init, seed.data, seed.dropout."""
    return key.partition(".")[0] == "seed"


def _key(word: str) -> str:
    key = word.partition("=")[0]
    return ALIASES.get(key, key)


def _given_twice(words: Sequence[str]) -> list[LmlabError]:
    by_key: dict[str, list[str]] = {}
    for word in words:
        by_key.setdefault(_key(word), []).append(word)
    return [
        ConfigError(f"`{key}` is given twice: {' and '.join(given)}", "leave one out")
        for key, given in by_key.items()
        if len(given) > 1
    ]


def _add(space: Space, word: str, user: Path | None) -> None:
    """Put one word where it belongs."""
    typed, key = word.partition("=")[0], _key(word)
    values = _values(word, user)
    if values is None:
        space.fixed += _read([word])
        return
    if key in OF_THE_SWEEP:
        raise ConfigError(f"`{key}` can't vary within a sweep: {word}", ONE_VALUE)
    found = possible_fields(key)
    if found and not any(f.identity for f in found) and key != "init.run":  # whose weights' hash is
        raise ConfigError(f"`{key}` is no part of what a run is: {word} would be one run several times", ONE_VALUE)
    if not values:
        space.drawn.append(f"{key}={word.partition('=')[2]}")
        return
    overrides = [replace(o, typed=f"{typed}={o.value}") for o in _read([f"{typed}={value}" for value in values])]
    texts = [o.value for o in overrides]
    if twice := sorted({t for t in texts if texts.count(t) > 1}):
        raise ConfigError(f"`{typed}` has {listed(twice)} twice: {word}", "name each value once")
    space.axes[key] = overrides


def _read(words: Sequence[str]) -> list[Override]:
    """One override per word; a key may come more than once."""
    found = []
    for word in words:
        overrides, errors = parse.read([word])
        raise_all(errors)
        found += overrides
    return found


class _Names:
    """What Hydra's glob(…) asks for: the options of a group, the user's and plug-ins' included."""

    def __init__(self, user: Path | None) -> None:
        self.user = user

    def get_group_options(self, group: str, results_filter: Any = None) -> list[str]:
        known = catalogue.labels(group, self.user) if group == PRESET else catalogue.entries(group, self.user)
        return sorted(known) if group in (*GROUPS, PRESET) else []


def _values(word: str, user: Path | None) -> list[str] | None:
    """The values of a word that sweeps; [] when only a sweeper can draw them; None for a single value, and for a word
    that is not to be read as a sweep (the reader of single words then says what is wrong with it)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    typed, equals, value = word.partition("=")
    if not equals or not parse.KEY.match(typed) or not any(sign in value for sign in ",("):
        return None
    reader = OverridesParser.create(config_loader=_Names(user))  # type: ignore[arg-type]
    try:
        override = reader.parse_overrides([f"{_key(word)}={value}"])[0]
        if not override.is_sweep_override():
            return None
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    except HydraException:
        return None
    if override.is_discrete_sweep() and not values:
        hint = f"`lmlab options {typed.partition('.')[0]}` lists what there is"
        hint = "a range goes up, and its end is left out: range(2,5) is 2,3,4" if "range(" in value else hint
        raise ConfigError(f"`{word}` names nothing", hint)
    return values
