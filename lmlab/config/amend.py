"""A saved experiment with some keys changed: its composition as overrides, the typed ones in place of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lmlab.config import parse
from lmlab.config.catalogue import entries
from lmlab.config.fields import fields
from lmlab.config.identity import config_hash, differs
from lmlab.config.load import Loaded, load
from lmlab.config.tree import Experiment
from lmlab.errors import ConfigError, listed
from lmlab.registry import Spec

# A backslash is itself, but before what it would guard: OmegaConf's `${`, Hydra's quote.
INTERPOLATED = re.compile(r"(\\*)\$\{")
QUOTE = re.compile(r"(\\*)('|\Z)")


def amend(base: Experiment, typed: Sequence[str], *, config_dir: str | None = None) -> Loaded:
    """`base` with the typed overrides; a typed `group=part` replaces the whole part. Raises as `load` does."""
    keys = {o.key for o in parse.read(typed)[0]}
    imported = base.init.source is not None and base.init.run is None
    loaded = load([*overrides_of(base, keys), *typed], config_dir=config_dir, imported=imported, typed=typed)
    loaded.experiment.init.source = base.init.source
    return loaded


def amend_outside_identity(base: Experiment, typed: Sequence[str], *, config_dir: str | None = None) -> Loaded:
    """`amend`, for keys that leave the run what it is (intervals, folders, names). Raises ConfigError for any other."""
    loaded = amend(base, typed, config_dir=config_dir)
    if config_hash(loaded.experiment) != config_hash(base):
        changes = differs(loaded.experiment, base)
        named = listed(f"`{key}` from {old} to {new}" for key, (old, new) in changes.items())
        raise ConfigError(f"resuming can't change {named}", "leave it out, or train another run without --resume")
    return loaded


def overrides_of(experiment: Experiment, without: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Words that compose `experiment` again, without the given keys (a group's name leaves out the whole group) and
    without what lmlab fills in by itself."""
    found: list[str] = []
    for name, field in fields(Experiment).items():
        value = getattr(experiment, name)
        if name in without:
            continue
        if isinstance(value, Spec):
            labels = [label for label, entry in entries(name).items() if entry.spec is type(value)]
            found.append(f"{name}={value.name if value.name in labels or not labels else labels[0]}")
            found += _leaves(value, name, without)
        elif dataclasses.is_dataclass(value):
            found += _leaves(value, name, without)
        elif value != field.default:
            found.append(f"{name}={quoted(value)}")
    return found


def _leaves(node: Any, prefix: str, without: set[str]) -> Iterator[str]:
    for name in fields(type(node)):
        key = f"{prefix}.{name}"
        if key not in without and key not in parse.FILLED_IN:
            yield f"{key}={quoted(getattr(node, name))}"


def quoted(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        plain = INTERPOLATED.sub(r"\1\1\\${", value)
        return "'" + QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), plain) + "'"
    if isinstance(value, list):
        return "[" + ",".join(quoted(v) for v in value) + "]"
    return repr(value)
