"""What `data.mix` and `data.settings` say: the parts of a mixture, each a label of the group `data` with its fields.

A part is one of lmlab's own options, so that the strings of a run's configuration say all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from lmlab.config.catalogue import Entry, entries
from lmlab.config.fields import Field, fields, problem
from lmlab.data.spec import DataSpec, Mix, Part, TaskSpec
from lmlab.errors import ConfigError, listed, nearest

EXAMPLE = "data.mix=[sotu:0.9,passkey:0.1]"
SETTING = "data.settings=[passkey.digits:3]"


def parts(data: DataSpec) -> list[Part]:
    """In their order; none of what is no mixture. Raises ConfigError for the first thing that is wrong with them."""
    if not isinstance(data, Mix):
        return []
    shares = dict(_pairs(data))
    _sums_to_one(shares)
    known = choices()
    found = {label: _spec(label, known) for label in shares}
    given: set[str] = set()
    for word in data.settings:
        key = word.partition(":")[0]
        if key in given and not isinstance(
            getattr(found.get(key.partition(".")[0]), key.partition(".")[2], None), list
        ):
            raise ConfigError(f"`data.settings` sets {key} twice", "leave one out")
        given.add(key)
        _set(found, word)
    made = [Part(label, share, found[label]) for label, share in shares.items()]
    if isinstance(made[0].spec, TaskSpec):
        texts = [p.label for p in made if not isinstance(p.spec, TaskSpec)] or ["sotu"]
        raise ConfigError(
            f"`data.mix` begins with {made[0].label}, a task: val, test and the tokenizer are the first part's",
            f"put a corpus first: data.mix=[{texts[0]}:0.9,…], or train on it alone: data={made[0].label}",
        )
    if alone := [p.label for p in made if isinstance(p.spec, TaskSpec) and not p.spec.text]:
        spelled = [n for n, e in known.items() if isinstance(_made(e), TaskSpec) and e.spec.text]  # type: ignore[union-attr]
        raise ConfigError(
            f"`data.mix` has {listed(alone)}, whose ids are its own: in a text they would stand for other things",
            f"use tasks in text: {listed(spelled)}",
        )
    return made


def choices() -> dict[str, Entry]:
    """What may be a part: lmlab's own corpora and tasks, by label."""
    found = entries("data")
    return {n: e for n, e in found.items() if e.spec and e.spec.__module__.startswith("lmlab.") and e.spec is not Mix}


def _made(entry: Entry) -> Any:
    return entry.make()


def _pairs(data: Mix) -> Iterator[tuple[str, float]]:
    if len(data.mix) < 2:
        raise ConfigError(f"`data=mix` mixes two parts or more, `data.mix` has {len(data.mix)}", f"write {EXAMPLE}")
    seen = set()
    for word in data.mix:
        label, colon, text = word.partition(":")
        share = _number(text)
        if not colon or share is None or not 0 < share < 1:
            raise ConfigError(
                f"`data.mix` has {word}, which is not PART:SHARE, the share between 0 and 1", f"write {EXAMPLE}"
            )
        if label in seen:
            raise ConfigError(f"`data.mix` names {label} twice", "add its shares up")
        seen.add(label)
        yield label, share


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _sums_to_one(shares: dict[str, float]) -> None:
    total = math.fsum(shares.values())
    if abs(total - 1) < 1e-9:
        return
    fits = ",".join(f"{label}:{share / total:.4g}" for label, share in shares.items())
    raise ConfigError(f"the shares of `data.mix` sum to {total:.6g}, not to 1", f"for example data.mix=[{fits}]")


def _spec(label: str, known: dict[str, Entry]) -> DataSpec:
    if label not in known:
        guess = nearest(label, known)
        hint = f"did you mean {guess}?" if guess else "`lmlab options data` shows them"
        raise ConfigError(f"`data.mix` has {label}, which is no corpus or task; choices: {listed(known)}", hint)
    made = _made(known[label])
    assert isinstance(made, DataSpec)
    return made


def _takes_many(found: dict[str, DataSpec], key: str) -> bool:
    """Whether a field is a list, which takes one element a word."""
    label, _, name = key.partition(".")
    return isinstance(getattr(found.get(label), name, None), list)


def _set(found: dict[str, DataSpec], word: str) -> None:
    """`passkey.digits:3` into the part that it names; a list takes one element a word."""
    key, colon, text = word.partition(":")
    label, dot, name = key.partition(".")
    if not (colon and dot):
        raise ConfigError(f"`data.settings` has {word}, which is not PART.FIELD:VALUE", f"write {SETTING}")
    if label not in found:
        raise ConfigError(f"`data.settings` sets {key}, and `data.mix` has {listed(found)}", "leave it out")
    if name == "packing":
        raise ConfigError(
            f"`data.settings` sets {key}, and packing is of the whole mixture", f"write data.packing={text}"
        )
    known = fields(type(found[label]))
    if name not in known:
        raise ConfigError(f"`data.settings` sets {key}: data={label} has no such field", f"it has {listed(known, 20)}")
    field, part = known[name], found[label]
    value = _read(text, field)
    value = [*getattr(part, name), value] if field.is_list else value
    if wrong := problem(value, field):
        raise ConfigError(f"`data.settings`: {key} {wrong}", f"`lmlab options {label}` shows what it takes")
    found[label] = dataclasses.replace(part, **{name: value})  # type: ignore[arg-type]


def _read(text: str, field: Field) -> Any:
    """The text as the field's type where it is one, else as it stands."""
    if text == "null":
        return None
    if bool in field.types and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in field.types:
            try:
                return kind(text)
            except ValueError:
                continue
    return text
