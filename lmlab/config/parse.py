"""Words of the command line → overrides: aliases, whole numbers, what is refused before Hydra sees it.

Hydra accepts `+k`, `++k`, `~k`, `group@package`, `hydra.*` and a key given twice; each of them can lose a setting
without a word, so none of them is let through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.config.catalogue import PRESET, entries, keys_named, possible_fields
from lmlab.config.plugins import import_plugins as import_plugins
from lmlab.config.tree import GROUPS
from lmlab.errors import ConfigError, listed

ALIASES = {"lr": "optim.lr", "seed": "seed.all"}
FILLED_IN = {"init.source": "it is the content hash of the weights that a run starts from"}
KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
ODD = re.compile(r"[^\x00-\x7f]|[~#!&;<>^`]")
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?\Z")


@dataclass(frozen=True)
class Override:
    """`key=value`: as typed, and with the alias written out. `value` is the text after `=`."""

    typed: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def is_choice(self) -> bool:
        """Whether it picks an option of a group, against setting a field."""
        return self.key in GROUPS or self.key == PRESET

    def element(self) -> Any:
        """The value as Hydra reads it (a number, a word, a list, null). Raises ConfigError when it can't be read."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            parsed = OverridesParser.create().parse_override(str(self))
        except HydraException:
            raise ConfigError(f"`{self.typed}` can't be read", f"{_quoting(self)}") from None
        if parsed.is_sweep_override():
            hint = f"give one value; `lmlab sweep {self.typed}` is for several"
            raise ConfigError(f"`{self.key}` is given several values: {self.value}", hint)
        return parsed.value()


def _quoting(override: Override) -> str:
    """The override as Hydra and the shell would take it."""
    value = override.value
    if value.startswith("[") and value.endswith("]"):
        items = [v.strip().strip("\"'") for v in value[1:-1].split(",")]
        quoted = "[" + ",".join(v if re.fullmatch(r"[\w./-]+", v) else f'"{v}"' for v in items) + "]"
    else:
        quoted = '"' + value.strip("\"'") + '"'
    return f"quote what has signs in it: '{override.key}={quoted}'"


def read(words: Sequence[str]) -> tuple[list[Override], list[ConfigError]]:
    """Overrides with aliases written out, and what is wrong with words that are none."""
    overrides: list[Override] = []
    errors: list[ConfigError] = []
    for word in words:
        try:
            overrides.append(_one(word))
        except ConfigError as error:
            errors.append(error)
    seen: dict[str, Override] = {}
    for override in overrides:
        if override.key in seen:
            first = seen[override.key].typed
            errors.append(
                ConfigError(f"`{override.key}` is given twice: {first} and {override.typed}", "leave one out")
            )
        seen.setdefault(override.key, override)
    return list(seen.values()), errors


def _one(word: str) -> Override:
    key, equals, value = word.partition("=")
    if word.startswith("-"):
        raise flag_error(word)
    if key.startswith(("+", "~")):
        bare = key.lstrip("+~")
        known = bare in (*ALIASES, *GROUPS, PRESET, "plugins") or possible_fields(bare)
        meant = bare if known else next(iter(keys_named(bare)), "")
        hint = f"write {meant}={value}" if equals and meant else "leave it out: everything has a default"
        if equals and not meant:
            hint = f"leave it out: no key is called {bare} (`lmlab options` lists them)"
        raise ConfigError(f"`{word}`: keys are set, not added or removed with {key[0]}", hint)
    if not equals:
        raise ConfigError(f"`{word}` is not key=value", word_hint(word))
    if key in ("hydra/launcher", "hydra/sweeper") or key.startswith(("hydra.launcher.", "hydra.sweeper.")):
        raise ConfigError(f"`{key}` is not a key of an experiment", f"`lmlab sweep {word}` takes it")
    if key == "experiment":
        raise ConfigError("`experiment` is not a key of an experiment", f"`lmlab sweep {word}` reads it from its file")
    if "@" in key or "/" in key:
        raise ConfigError(
            f"`{key}`: a part can't be put elsewhere", f"write {re.split('[@]', key)[0].strip('/')}={value}"
        )
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(
            f"`{key}` is not a key of an experiment", "lmlab sets Hydra up itself; folders are paths.runs and name="
        )
    if key in FILLED_IN:
        raise ConfigError(f"`{key}` is given as {value}; lmlab fills it in", f"leave it out: {FILLED_IN[key]}")
    if not KEY.match(key):
        raise ConfigError(f"`{word}` is not key=value", "write for example norm=rmsnorm or model.n_layers=4")
    key = ALIASES.get(key, key)
    return Override(word, key, _whole(key, _plain_text(value)))


def _plain_text(value: str) -> str:
    """Quotes around words with letters and signs that Hydra's grammar has not: é, ~, #. Quoted ones stay."""
    if not ODD.search(value) or re.search(r"['\"{}()$=]", value):
        return value
    if value.startswith("[") and value.endswith("]"):
        return "[" + ",".join(f'"{v.strip()}"' if ODD.search(v) else v for v in value[1:-1].split(",")) + "]"
    return value if "," in value or "[" in value else f'"{value}"'


def _whole(key: str, value: str) -> str:
    """`1e4` and `4096.0` for a whole number → 10000 and 4096; everything else as it stands."""
    possible = possible_fields(key)
    if not NUMBER.match(value) or not possible or not all(int in f.types and float not in f.types for f in possible):
        return value
    number = float(value.replace("_", ""))
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 and re.search(r"[.eE]", value) else value


def flag_error(word: str) -> ConfigError:
    """`--norm=rmsnorm`: flags act on the invocation, key=value on the experiment."""
    bare, equals, value = word.lstrip("-").partition("=")
    bare = bare.replace("-", "_")
    if ALIASES.get(bare) or bare in GROUPS or bare == PRESET or possible_fields(bare):
        return ConfigError(f"`{word}` is not a flag", f"write {bare}={value if equals else '…'}, without dashes")
    if keys := keys_named(bare):
        return ConfigError(f"`{word}` is not a flag", f"write {keys[0]}={value if equals else '…'}, without dashes")
    return ConfigError(
        f"`{word}` is not a flag", "flags act on the invocation (see --help); settings are written key=value"
    )


def word_hint(word: str) -> str:
    """What a bare word was meant as: the name of an option, a key without value."""
    owners = [g for g in (*GROUPS, PRESET) if word in entries(g)]
    if owners:
        return "write " + " or ".join(f"{g}={word}" for g in owners)
    if word in GROUPS or word == PRESET:
        return f"write {word}=NAME; NAME is one of {listed(entries(word))}"
    if word in ALIASES or possible_fields(word):
        return f"write {word}=VALUE"
    if keys := keys_named(word):
        return f"write {keys[0]}=VALUE"
    return "write for example norm=rmsnorm or model.n_layers=4; `lmlab options` lists what there is"


def plugin_paths(overrides: Sequence[Override]) -> list[str]:
    """The files named by `plugins=[...]`."""
    given = next((o for o in overrides if o.key == "plugins"), None)
    value = given.element() if given else []
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
