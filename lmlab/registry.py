"""The catalogue: which options each group has, and the dataclass that describes each of them. Torch-free.

A part is one `Spec` subclass under `@option(group, name, build="module:Class")`. Its fields are what a user may set,
each made by `setting(default, help, ...)`, which carries the help text, the bounds, and whether the field enters a
run's identity. Everything else (Hydra's schema, completion, `lmlab options`, checkpoints) reads this table.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lmlab.errors import ConfigError, listed, nearest

T = TypeVar("T")


@dataclass
class Spec:
    """Base of every option: what `group=name` selects. `build` names the class that makes it ("module:Class")."""

    of_group: ClassVar[str] = ""
    name: ClassVar[str] = ""
    build: ClassVar[str] = ""


OPTIONS: dict[str, dict[str, type[Spec]]] = {}


def option(group: str, name: str, *, build: str = "") -> Callable[[type[T]], type[T]]:
    """Register the decorated `Spec` subclass as `group=name`; makes it a dataclass.

    `build` is "module:Class" of what it builds (imported only when built); "" for specs that are plain settings.
    Raises ConfigError when another module already owns the name.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = dataclass(cls)
        known = OPTIONS.setdefault(group, {}).get(name)
        if known is not None and (known.__module__, known.__qualname__) != (made.__module__, made.__qualname__):
            raise ConfigError(
                f"`{group}={name}` is already defined by {known.__module__}", "give the part another name"
            )
        made.of_group, made.name, made.build = group, name, build
        OPTIONS[group][name] = made
        return made

    return decorate


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    probe: Any = None,
    identity: bool = True,
    since: int = 1,
) -> Any:
    """A dataclass field that a user may set.

    choices: the words allowed (with a type of str). ge, gt, le, lt: bounds of a number (of each element of a list).
    probe: another legal value under the default composition, which must change what the program does.
    identity: False keeps the field out of a run's hash (intervals, names, folders).
    since: the version of the configuration format that brought the field; left out of the hash while at its default.
    """
    bounds = {k: v for k, v in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if v is not None}
    metadata = dict(help=help, choices=tuple(choices), bounds=bounds, probe=probe, identity=identity, since=since)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    if dataclasses.is_dataclass(default) and isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def lookup(group: str, name: str) -> type[Spec]:
    """The spec class of `group=name`. Raises ConfigError, naming the choices, when there is none."""
    options = OPTIONS.get(group, {})
    if name not in options:
        guess = nearest(name, options)
        hint = f"did you mean {group}={guess}?" if guess else f"use one of {listed(options)}"
        raise ConfigError(f"`{group}={name}` is not known; choices: {listed(options)}", hint)
    return options[name]


def make(spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """Build the part that `spec` describes: `Class(spec, *args, **kwargs)`."""
    return builder(spec)(spec, *args, **kwargs)


def builder(spec: Spec) -> Any:
    """The class that builds the part."""
    module, _, attribute = spec.build.partition(":")
    return getattr(importlib.import_module(module), attribute)
