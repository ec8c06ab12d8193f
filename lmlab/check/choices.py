"""The values of fields that are chosen like options: words, true or false, the numbers of a short range.

`lmlab check --all` and the covering array of the tests put each of them together with every option of every group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lmlab.check.flags import CONTEXT, changed
from lmlab.config.fields import Field, fields, show
from lmlab.config.tree import Experiment
from lmlab.registry import Spec

FEW = 3  # a range of more numbers is no list of choices
Parts = Mapping[str, Mapping[str, Spec]]  # group → label → the part


@dataclasses.dataclass(frozen=True)
class Choice:
    """A field, one of its values, and the labels of the options that have the field."""

    group: str
    name: str
    value: Any
    holders: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}"

    def __str__(self) -> str:
        return f"{self.key}={show(self.value)}"

    def put(self, experiment: Experiment) -> Experiment:
        """The experiment with the value, and with what it needs beside it."""
        return changed(experiment, {**CONTEXT.get(self.key, {}), self.key: self.value})


def choices(parts: Parts) -> Iterator[Choice]:
    """Every choice of every field of the parts, group by group. Attention's flex is none: it has no CPU."""
    for group, options in parts.items():
        holders: dict[tuple[str, Any], list[str]] = {}
        for label, part in options.items():
            for name, field in fields(type(part)).items():
                for value in values(field):
                    holders.setdefault((name, value), []).append(label)
        for (name, value), labels in holders.items():
            if (group, value) != ("attn", "flex"):
                yield Choice(group, name, value, tuple(labels))


def values(field: Field) -> tuple[Any, ...]:
    """All that a field takes, when they are few."""
    bounds = dict(field.bounds)
    if field.types == (bool,):
        return (False, True)
    if field.types == (int,) and not field.is_list and "ge" in bounds and bounds.get("le", 1e9) - bounds["ge"] < FEW:
        return tuple(range(int(bounds["ge"]), int(bounds["le"]) + 1))
    return field.choices if field.types == (str,) and not field.is_list else ()


def with_options(choice: Choice, base: Experiment, parts: Parts) -> Iterator[tuple[str, str, Experiment]]:
    """(name, group of the option, experiment): the choice in every option that has the field, and beside every option
    of another group that the base has not (a label of "" is a group without options). What the part has anyway is left
    out."""
    for label in choice.holders:
        yield from _differing(choice, label, choice.group, base, parts)
    first = next(
        (x for x in choice.holders if parts[choice.group][x] == getattr(base, choice.group)), choice.holders[0]
    )
    held: dict[str, Any] = {choice.group: parts[choice.group][first]}
    whole = dataclasses.replace(base, **held)
    for group, options in parts.items():
        for label in options:
            if group != choice.group and options[label] != getattr(base, group):
                yield from _differing(choice, label, group, whole, parts)


def _differing(
    choice: Choice, label: str, group: str, base: Experiment, parts: Parts
) -> Iterator[tuple[str, str, Experiment]]:
    """The base with the option and the choice, unless the option's default is the choice."""
    part: dict[str, Any] = {group: parts[group][label]}
    plain = dataclasses.replace(base, **part)
    if getattr(getattr(plain, choice.group), choice.name) != choice.value:
        yield f"{group}={label} {choice}" if label else f"{choice}", group, choice.put(plain)
