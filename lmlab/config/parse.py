"""Words of the command line → overrides: aliases, whole numbers, what is refused before Hydra sees it; plug-in import.

Hydra accepts `+k`, `++k`, `~k`, `group@package`, `hydra.*` and a key given twice; each of them can lose a setting
without a word, so none of them is let through.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlab.config.catalogue import PRESET, entries, keys_named, possible_fields
from lmlab.config.tree import GROUPS
from lmlab.errors import ConfigError, listed
from lmlab.registry import OPTIONS, Spec

ALIASES = {"lr": "optim.lr", "seed": "seed.all"}
KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
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
    if re.search(r"[\s=:,;()\"']", override.value) and "[" not in override.value:
        return f"quote the value, and the word for the shell: '{override.key}=\"{override.value}\"'"
    return "write key=value; lists are [a,b], text with signs stands in quotes inside the shell's quotes"


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
        hint = f"write {bare}={value}" if equals and bare else "leave it out: everything has a default"
        raise ConfigError(f"`{word}`: keys are set, not added or removed with {key[0]}", hint)
    if not equals:
        raise ConfigError(f"`{word}` is not key=value", word_hint(word))
    if "@" in key or "/" in key:
        raise ConfigError(
            f"`{key}`: a part can't be put elsewhere", f"write {re.split('[@]', key)[0].strip('/')}={value}"
        )
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(
            f"`{key}` is not a key of an experiment", "lmlab sets Hydra up itself; folders are paths.runs and name="
        )
    if not KEY.match(key):
        raise ConfigError(f"`{word}` is not key=value", "write for example norm=rmsnorm or model.n_layers=4")
    key = ALIASES.get(key, key)
    return Override(word, key, _whole(key, value))


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


# ---------------------------------------------------------------- plug-ins


def plugin_paths(overrides: Sequence[Override]) -> list[str]:
    """The files named by `plugins=[...]`."""
    given = next((o for o in overrides if o.key == "plugins"), None)
    value = given.element() if given else []
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def import_plugins(paths: Sequence[str]) -> tuple[dict[str, str], list[ConfigError]]:
    """Import each file under its own name. Returns its source by file name, and what went wrong."""
    sources: dict[str, str] = {}
    errors: list[ConfigError] = []
    for path in paths:
        try:
            sources[Path(path).name] = _import(Path(path))
        except ConfigError as error:
            errors.append(error)
    return sources, errors


def _import(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"`plugins` names {path}, which is not a file here", "give the path of a .py file")
    path, stem = path.resolve(), path.stem
    if path.suffix != ".py" or not stem.isidentifier():
        raise ConfigError(f"`plugins` names {path.name}, which Python can't import", "name it like my_attn.py")
    loaded = sys.modules.get(stem)
    same = loaded is not None and getattr(loaded, "__file__", None) == str(path)
    if not same:
        _refuse_taken(stem, path)
        _reachable(path.parent)
        before = {id(c) for options in OPTIONS.values() for c in options.values()}
        _run(stem, path)
        _check_parts([c for o in OPTIONS.values() for c in o.values() if id(c) not in before], path)
    return path.read_text(encoding="utf-8")


def _refuse_taken(stem: str, path: Path) -> None:
    try:
        spec = importlib.util.find_spec(stem)
    except (ImportError, ValueError):
        spec = None
    if stem in sys.modules or (spec is not None and spec.origin != str(path)):
        raise ConfigError(f"`plugins` names {path.name}, but Python already has a module {stem}", "rename the file")


def _reachable(folder: Path) -> None:
    """Workers that unpickle its classes must find the module; it comes last so that it hides nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), str(folder)])
    importlib.invalidate_caches()


def _run(stem: str, path: Path) -> None:
    try:
        importlib.import_module(stem)
    except ConfigError:
        raise
    except Exception as error:
        line = _line_in(error, path)
        raise ConfigError(
            f"{path.name}{line} can't be imported: {type(error).__name__}: {error}", "mend the file; --debug shows more"
        ) from error


def _line_in(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno},"
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}," if line else ""


def _check_parts(found: list[type[Spec]], path: Path) -> None:
    if not found:
        raise ConfigError(
            f"{path.name} defines no part", 'put @option("attn", "my_attn", build="my_attn:MyAttn") over its spec'
        )
    for spec in found:
        name = f"{path.name}: {spec.group}={spec.name}"
        if spec.group not in GROUPS:
            raise ConfigError(f"{name} belongs to no group", f"use one of {listed(GROUPS, 20)}")
        if not issubclass(spec, Spec):
            raise ConfigError(
                f"{name} is not a Spec", "derive the class from lmlab.registry.Spec or from its group's spec"
            )
        module, _, attribute = spec.build.partition(":")
        if module == path.stem and not hasattr(sys.modules[module], attribute):
            raise ConfigError(
                f"{name} is built by {spec.build}, which is not in the file", "name the class after the colon"
            )
