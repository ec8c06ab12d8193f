"""What a user may set: the typed fields of a dataclass and what is wrong with a value. Torch- and Hydra-free.

Help, completion, `load`, checkpoints and tests all read fields through here, so that they agree on types and bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

WORDS = {int: "a whole number", float: "a number", str: "a word"}


@dataclass(frozen=True)
class Field:
    """One field: its name, the types it takes (of the elements, when `is_list`), and what `setting` declared."""

    name: str
    types: tuple[type, ...]
    optional: bool
    is_list: bool
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    probe: Any = None
    identity: bool = True
    since: int = 1

    @property
    def node(self) -> type | None:
        """The dataclass this field holds, when it is a node or a part and not a value."""
        return self.types[0] if len(self.types) == 1 and dataclasses.is_dataclass(self.types[0]) else None

    def allowed(self) -> str:
        """`a whole number ≥ 1, or null`: what the field takes, in words."""
        words = [*self.choices, *(("true", "false") if bool in self.types else ())]
        for kind in (int, float, str):
            if kind in self.types and not (kind is str and self.choices):
                words.append(WORDS[kind] + (self.range() if kind in (int, float) else ""))
        if self.is_list:
            words = ["a list like [a,b], each " + (f"one of {', '.join(words)}" if self.choices else words[0])]
        return either([*words, "null"] if self.optional else words)

    def range(self) -> str:
        """` ≥ 0 and < 1`, or nothing."""
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        return "".join(f"{' and' if i else ''} {signs[k]} {v:g}" for i, (k, v) in enumerate(self.bounds))


def fields(cls: Any) -> dict[str, Field]:
    """The fields of a dataclass by name, in order."""
    return _fields(cls)


@functools.cache
def _fields(cls: Any) -> dict[str, Field]:
    hints = get_type_hints(cls)
    return {f.name: _field(f, hints[f.name]) for f in dataclasses.fields(cls)}


def _field(f: dataclasses.Field[Any], hint: Any) -> Field:
    args = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [a for a in args if a is not type(None)]
    is_list = any(get_origin(a) is list or a is list for a in kinds)
    if is_list:
        kinds = [e for a in kinds for e in (get_args(a) or (str,))]
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    meta = f.metadata
    return Field(
        f.name,
        tuple(kinds),
        type(None) in args,
        is_list,
        default,
        help=meta.get("help", ""),
        choices=tuple(meta.get("choices", ())),
        bounds=tuple(meta.get("bounds", {}).items()),
        probe=meta.get("probe"),
        identity=meta.get("identity", True),
        since=meta.get("since", 1),
    )


def problem(value: Any, field: Field) -> str | None:
    """What is wrong with a value of this field, or None: "is 0, which is not a whole number ≥ 1"."""
    if value is None:
        return None if field.optional else f"is null; it takes {field.allowed()}"
    if field.is_list != isinstance(value, list):
        return f"is {show(value)}, which is not {field.allowed()}"
    for element in value if field.is_list else [value]:
        if not _fits(element, field):
            return f"is {show(value)}, which is not {field.allowed()}"
    return None


def _fits(value: Any, field: Field) -> bool:
    if isinstance(value, bool):
        return bool in field.types
    if isinstance(value, (int, float)) and (int in field.types or float in field.types):
        if float not in field.types and not isinstance(value, int):
            return False
        return math.isfinite(value) and all(_within(value, k, v) for k, v in field.bounds)
    if isinstance(value, str) and str in field.types:
        return value != "" and (not field.choices or value in field.choices)
    return False


def _within(value: float, bound: str, limit: float) -> bool:
    return {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[bound]


def show(value: Any) -> str:
    """A value as a user would type it: null, true, 0.001, [a,b]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(show(v) for v in value) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value) if str(value) else "empty"


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field]]:
    """Every (dotted key, value, field) of a tree of dataclasses, outermost first; parts and nodes are entered."""
    for name, field in fields(type(node)).items():
        value, key = getattr(node, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.")
        else:
            yield key, value, field


def either(words: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
