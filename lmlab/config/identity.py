"""An experiment as a plain dict and back, its hash, its name, and the hash of the code that runs it.

What was asked for is hashed (`micro_batch=auto` stays auto, null stays null). A field that came later (`since`) is left
out while it is at its default, so that old hashes hold; fields with `identity=False` are never in.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmlab.config.catalogue import default_experiment, defaults, entries
from lmlab.config.fields import Field, fields, problem
from lmlab.config.tree import GROUPS, LATER_GROUPS, Experiment
from lmlab.errors import ConfigError, listed
from lmlab.registry import OPTIONS, Spec, lookup

VERSION = 5  # of the configuration format
HASHED_VERSION = 1  # what hashes begin with: they outlive the format
CODE = ("model", "kernels", "train", "data", "eval/loss.py")
SLUG_CHARS = 60
SOURCE = "init.source"

# ---------------------------------------------------------------- dict and back


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Everything, as plain values under short names: {"version": 1, "norm": {"name": "rmsnorm", "eps": 1e-6}, …}."""
    return {"version": VERSION, **_plain(experiment)}


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return {"name": value.name, **{n: _plain(getattr(value, n)) for n in fields(type(value))}}
    if dataclasses.is_dataclass(value):
        return {n: _plain(getattr(value, n)) for n in fields(type(value))}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def from_dict(config: Mapping[str, Any]) -> Experiment:
    """The experiment `to_dict` wrote. Parts are found through OPTIONS: import their plug-ins first.

    Raises ConfigError for a newer version, and for parts, fields or values that this lmlab does not know.
    """
    version = config.get("version")
    if not isinstance(version, int):
        raise ConfigError("the configuration has no `version`", "it was not written by lmlab, or it is damaged")
    if version > VERSION:
        raise ConfigError(f"the configuration has version {version}; this lmlab reads up to {VERSION}", "update lmlab")
    body = {k: v for k, v in config.items() if k != "version"}
    return _node(Experiment, {**_later_parts(), **body}, "")


@functools.cache
def _later_parts() -> dict[str, Any]:
    """The default part of each group that came after the first version, as a plain value."""
    return {name: _plain(entries(name)[defaults()[name]].make()) for name in LATER_GROUPS}


def _node(cls: type, body: Mapping[str, Any], prefix: str) -> Any:
    known = fields(cls)
    if unknown := [k for k in body if k not in known and not (issubclass(cls, Spec) and k == "name")]:
        keys = listed(f"`{prefix}{k}`" for k in unknown)
        raise ConfigError(
            f"the configuration has {keys}, which this lmlab does not know", "it was written by a newer lmlab"
        )
    missing = [n for n, f in known.items() if n not in body and f.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(
            f"the configuration has no {listed(f'`{prefix}{n}`' for n in missing)}", "the file is damaged"
        )
    return cls(**{n: _value(known[n], v, f"{prefix}{n}") for n, v in body.items() if n in known})


def _value(field: Field, value: Any, key: str) -> Any:
    if field.node is not None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"`{key}` of the configuration is {value}, not a section", "the file is damaged")
        if issubclass(field.node, Spec):
            return _node(_spec(key.rpartition(".")[2], value), value, f"{key}.")
        return _node(field.node, value, f"{key}.")
    if float in field.types and isinstance(value, int) and not isinstance(value, bool) and int not in field.types:
        value = float(value)
    if float in field.types and isinstance(value, list):
        value = [float(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in value]
    if wrong := problem(value, field):
        raise ConfigError(f"`{key}` of the configuration {wrong}", "the file is damaged, or made by another lmlab")
    return list(value) if isinstance(value, list) else value


def _spec(group: str, value: Mapping[str, Any]) -> type[Spec]:
    try:
        return lookup(group, str(value.get("name")))
    except ConfigError as error:
        raise ConfigError(error.message, "if it is a plug-in of yours, import it: plugins=[FILE.py]") from None


# ---------------------------------------------------------------- hashes


def config_hash(experiment: Experiment) -> str:
    """8 hex digits of what identifies the experiment: known before any data is read."""
    text = json.dumps({"version": HASHED_VERSION, **_identity(experiment)}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _identity(node: Any) -> dict[str, Any]:
    """`to_dict` without what does not identify a run."""
    kept: dict[str, Any] = {"name": node.name} if isinstance(node, Spec) else {}
    for name, field in fields(type(node)).items():
        value = getattr(node, name)
        if not field.identity or (field.since > 1 and value == field.default):
            continue
        if isinstance(node, Experiment) and name in _later_parts() and _plain(value) == _later_parts()[name]:
            continue
        own = _identity(value) if dataclasses.is_dataclass(value) else value
        if field.since == 1 or own != {}:  # a later node of which nothing identifies a run is left out as well
            kept[name] = own
    return kept


def outside_identity(key: str) -> bool:
    """Whether a flat key of a configuration (`wandb.mode`, `train.keep_last`, `data.streaming`) is no part of a run's
    identity. A key that is not known here, as of a plug-in's part, is a part of it."""
    group, _, name = key.partition(".")
    field = fields(Experiment).get(group)
    if field is None or not field.identity or field.node is None or not name:
        return field is not None and not field.identity
    classes = list(OPTIONS.get(group, {}).values()) if issubclass(field.node, Spec) else [field.node]
    known = [found for cls in classes if (found := fields(cls).get(name)) is not None]
    return bool(known) and not any(found.identity for found in known)


def code_hash(plugin_sources: Mapping[str, str]) -> str:
    """16 hex digits of the code that trains: lmlab's model, kernels, train and data, and the plug-ins given.

    Of the syntax, so that comments, docstrings and layout change nothing. Give only plug-ins in use
    (`Loaded.used_plugins()`).
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, text in [*(_pinned or _sources()), *sorted(plugin_sources.items())]:
        digest.update(f"{name}:{_syntax_digest(text)}\n".encode())
    return digest.hexdigest()


_pinned: list[tuple[str, str]] = []


def pin_code() -> None:
    """From now on `code_hash` is of lmlab's files as they are at this moment, in this process and its forks: those it
    has imported, whatever is edited while it lives."""
    _pinned[:] = _sources()


def _sources() -> Iterator[tuple[str, str]]:
    package = Path(__file__).resolve().parents[1]
    for folder in CODE:
        whole = package / folder
        for path in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole] * whole.is_file():
            yield path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=256)
def _syntax_digest(source: str) -> str:
    return hashlib.blake2b("\0".join(_syntax(ast.parse(source))).encode(), digest_size=8).hexdigest()


def _syntax(node: Any) -> Iterator[str]:
    """The tree as text, without docstrings; empty fields are left out, which Python's versions differ in."""
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list) and _is_docstring(node, value):
                value = value[1:]
            if value not in (None, []):
                yield name
                yield from _syntax(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            yield from _syntax(item)
    else:
        yield repr(node)


def _is_docstring(node: ast.AST, body: list[Any]) -> bool:
    owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    first = body[0] if body else None
    return (
        owner
        and isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


# ---------------------------------------------------------------- what differs, in words


def differs(experiment: Experiment, base: Experiment | None = None) -> dict[str, tuple[Any, Any]]:
    """What identifies this experiment and is not so in `base` (None = the default composition), by dotted key, as
    (base's, this one's): {"attn": ("mha", "gqa"), "attn.n_kv_heads": (None, 2)}."""
    default, found = base or default_experiment(), {}
    for name, field in fields(Experiment).items():
        mine, other = getattr(experiment, name), getattr(default, name)
        if not field.identity:
            continue
        if isinstance(mine, Spec) and type(mine) is not type(other):
            found[name] = (other.name, mine.name)
            other = type(mine)()
        found |= _changed(mine, other, name)
    return found


def _changed(mine: Any, other: Any, key: str) -> dict[str, tuple[Any, Any]]:
    """Identity fields that differ between two nodes of one type, by dotted key."""
    if not dataclasses.is_dataclass(mine):
        return {key: (other, mine)} if mine != other else {}
    found: dict[str, tuple[Any, Any]] = {}
    for name, field in fields(type(mine)).items():
        if field.identity:
            found |= _changed(getattr(mine, name), getattr(other, name), f"{key}.{name}")
    return found


def changes(experiment: Experiment) -> list[str]:
    """What differs from the default, as words that could be typed: ["attn=gqa", "model=nano", "optim.lr=0.001"]."""
    words: list[str] = []
    for key, value in _differences(experiment):
        if key == SOURCE and experiment.init.run is not None:
            key, value = "init.run", run_name(experiment.init.run)
        text = f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
        words.append(f"{key}={text.lower() if isinstance(value, bool) else text}")
    return words


def run_name(place: str) -> str:
    """What a user would type for `init.run`: the name of a run; of one of its checkpoints the whole path."""
    path = Path(place)
    return place if path.parent.name == "checkpoints" else path.name


def slug(experiment: Experiment) -> str:
    """What differs from the default, safe in a file name: `gqa-nano-lr0.001`; `default` when nothing does. First of all
    the weights it starts from, when they are another run's: `from_0d02b6e3-…`."""
    found = sorted(_differences(experiment), key=lambda pair: pair[0] != SOURCE)
    words = [_safe(v) if key in GROUPS else _word(key, v) for key, v in found]
    text = "-".join(dict.fromkeys(words))
    if len(text) > SLUG_CHARS:
        text = text[: SLUG_CHARS - 1].rpartition("-")[0] or text[:SLUG_CHARS]
    return text or "default"


def _differences(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    """(group, label) of each part that is not the default one, (dotted key, value) of what differs from its label."""
    for name, field in fields(Experiment).items():
        mine = getattr(experiment, name)
        if isinstance(mine, Spec):
            label, changed = _nearest(name, mine)
            if label != defaults()[name]:
                yield name, label
        elif field.identity:
            changed = _changed(mine, field.node() if field.node else field.default, name)
        else:
            continue
        yield from ((key, value) for key, (_, value) in changed.items())


def _nearest(group: str, part: Spec) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The catalogue entry nearest to `part` (the default one when equally near), and what differs from it."""
    default = defaults()[group]
    near = [(len(c), e.label != default, e.label != part.name, e.label, c) for e, c in _candidates(group, part)]
    if not near:
        return part.name, _changed(part, type(part)(), group)
    *_, label, changed = min(near, key=lambda row: row[:4])
    return label, changed


def _candidates(group: str, part: Spec) -> Iterator[tuple[Any, dict[str, tuple[Any, Any]]]]:
    for entry in entries(group).values():
        if entry.spec is type(part):
            yield entry, _changed(part, entry.make(), group)


def _word(key: str, value: Any) -> str:
    if key == SOURCE:
        return _safe(f"from_{str(value)[:8]}")
    leaf = "seed" if key == "seed.all" else key.replace("seed.", "seed_").rpartition(".")[2]
    if isinstance(value, bool):
        return leaf if value else f"no_{leaf}"
    if isinstance(value, list):
        return _safe(leaf + "+".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value))
    return _safe(
        f"{leaf}{value:g}" if isinstance(value, float) else f"{leaf}{'_' if isinstance(value, str) else ''}{value}"
    )


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", text).strip("_.") or "x"
