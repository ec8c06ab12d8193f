"""The slow path: something in the overrides is wrong; find each wrong one and say what to do instead.

Choices are looked at one by one, then the values against what the good choices composed, then the relations of what is
left, so that one call tells everything. Runs only after an error: a good command line composes once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmlab.compat import rules
from lmlab.config import catalogue
from lmlab.config.catalogue import PRESET, Entry, entries, keys_named, possible_fields
from lmlab.config.fields import fields, problem, show
from lmlab.config.parse import ALIASES, Override
from lmlab.config.plugins import parts_in
from lmlab.config.tree import GROUPS, Experiment
from lmlab.errors import ConfigError, LmlabError, listed, nearest
from lmlab.registry import OPTIONS, Spec

if TYPE_CHECKING:
    from lmlab.config.load import Composer


def explain(
    overrides: Sequence[Override], composer: Composer, error: Exception | None = None, *, imported: bool = False
) -> list[LmlabError]:
    """All errors of these overrides; `error` is what composing them raised, if it did; imported: as `load` has it."""
    found: list[LmlabError] = []
    choices = [o for o in overrides if o.is_choice]
    good, experiment = _choices(choices, composer, found)
    if experiment is None:
        return found
    values = [o for o in overrides if not o.is_choice and not _of_unknown_part(o, good, choices)]
    fine = [o for o in values if not _add(found, _value(o, experiment))]
    try:
        experiment = _with_values(experiment, good, fine, composer)
    except Exception as again:
        return [*found, _reason(again, "the configuration")]
    from lmlab.config.load import value_errors

    wrong = value_errors(experiment, fine)
    found += wrong
    if not wrong:
        bad = [f"`{o.key}`" for o in values if o not in fine]  # at their defaults now: say nothing of them
        found += [e for e in rules.check(experiment, imported=imported) if not any(key in e.message for key in bad)]
    return found if found or error is None else [_reason(error, "the configuration")]


def _with_values(base: Experiment, good: list[Override], fine: list[Override], composer: Composer) -> Experiment:
    """The choices with the values that are right by themselves; Hydra composes only what refers to something else."""
    if any("${" in o.value for o in fine):
        return composer.compose([*good, *fine])[0]
    experiment = copy.deepcopy(base)
    for override in fine:
        *path, leaf = override.key.split(".")
        node: Any = experiment
        for name in path:
            node = getattr(node, name)
        value, field = override.element(), fields(type(node))[leaf]
        setattr(node, leaf, str(value) if _becomes_word(value, field) else value)
    return experiment


def _of_unknown_part(value: Override, good: list[Override], choices: list[Override]) -> bool:
    """A field of an option that is itself wrong: whether that option has it is not known."""
    group, _, leaf = value.key.partition(".")
    wrong = any(c.key == group for c in choices) and not any(c.key == group for c in good)
    return wrong and not (group in GROUPS and all(leaf in fields(spec) for spec in OPTIONS[group].values()))


def _add(found: list[LmlabError], error: LmlabError | None) -> bool:
    found.extend([error] if error else [])
    return error is not None


def _choices(
    choices: list[Override], composer: Composer, found: list[LmlabError]
) -> tuple[list[Override], Experiment | None]:
    """The choices that compose, and what they compose to. Adds the others' errors to `found`."""
    good = [c for c in choices if not _add(found, _choice(c, composer.user))]
    if all(c.key != PRESET for c in good):  # the same without Hydra
        chosen = {c.key: entries(c.key, composer.user)[str(c.element())] for c in good}
        selected = {g: entries(g)[label] for entry in chosen.values() for g, label in entry.selects.items()}
        parts: dict[str, Any] = {group: entry.make() for group, entry in (selected | chosen).items()}
        return good, dataclasses.replace(catalogue.default_experiment(), **parts)
    try:
        return good, composer.compose(good)[0]
    except Exception as together:
        culprits = [(c, e) for c in good if (e := _alone(c, composer))]
        found += [_reason(e, f"`{c.typed}`") for c, e in culprits] or [_reason(together, "the configuration")]
        rest = [c for c in good if c not in [c for c, _ in culprits]]
    try:
        return rest, composer.compose(rest)[0] if culprits else None
    except Exception:
        return rest, None


def _alone(choice: Override, composer: Composer) -> Exception | None:
    try:
        composer.compose([choice])
    except Exception as error:
        return error
    return None


def _reason(error: Exception, what: str) -> ConfigError:
    """Hydra's and OmegaConf's own words, cut to what the user can act on."""
    if isinstance(error, ConfigError):
        return error
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    noise = ("full_key", "object_type", "reference_type", "In '")
    text = next((line for line in lines if not line.startswith(noise)), "")
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key")), "")
    message = f"{what} can't be composed{f' at `{key}`' if key else ''}: {text or type(root).__name__}"
    return ConfigError(message, "look at the YAML file it comes from; --debug shows the whole error")


# ---------------------------------------------------------------- choices


def _choice(override: Override, user: Path | None) -> ConfigError | None:
    """What is wrong with `group=name` in itself."""
    group, known = override.key, entries(override.key, user)
    try:
        name = override.element()
    except ConfigError as error:
        return error
    if name is None and group == PRESET:
        return None
    if not isinstance(name, (str, bool, int, float)) or name == "":
        shown = show(name) if not isinstance(name, dict) else override.value
        return ConfigError(f"`{group}` is {shown}, which is not the name of an option", _options_hint(group, known))
    if str(name) in known:
        return _file_error(known[str(name)])
    message = f"`{group}={override.value}` is not known; choices: {_cut(group, known)}"
    return ConfigError(message, _plugin_here(group, str(name)) or _near(group, str(name), known))


def _file_error(entry: Entry) -> ConfigError | None:
    """A part file (a user's: the built-in ones are tested) that can't be read, names no part, or has a wrong key."""
    import yaml  # type: ignore[import-untyped]

    if entry.path is None or entry.group == PRESET:
        return None
    where = f"{entry.group}/{entry.path.name}"
    try:
        yaml.safe_load(entry.path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f", line {line + 1}"
        return ConfigError(f"{where}{at} is no YAML: {getattr(error, 'problem', None) or error}", "mend the file")
    if entry.spec is None:
        hint = f"begin it with: defaults: [/spec/{entry.group}/{next(iter(OPTIONS[entry.group]))}@_here_]"
        return ConfigError(f"{where} does not say which part it is", hint)
    for key in entry.values:
        if key not in fields(entry.spec):
            guess = nearest(key, fields(entry.spec))
            hint = f"did you mean {guess}?" if guess else f"it has {listed(fields(entry.spec), 20)}"
            return ConfigError(f"{where}: `{key}` is not a field of {entry.group}={entry.spec.name}", hint)
    return None


def _cut(group: str, known: dict[str, Any]) -> str:
    names = list(known)
    return listed(names) if len(names) <= 8 else f"{listed(names)} `lmlab options {group}`"


def _options_hint(group: str, known: dict[str, Any]) -> str:
    return f"write {group}=NAME; NAME is one of {listed(known)}"


def _near(group: str, name: str, known: dict[str, Any]) -> str:
    if guess := nearest(name, known):
        return f"did you mean {group}={guess}?"
    owners = [g for g in (*GROUPS, PRESET) if g != group and name in entries(g)]
    return f"did you mean {owners[0]}={name}?" if owners else f"`lmlab options {group}` shows them"


def _plugin_here(group: str, name: str) -> str | None:
    """A file of this folder that defines `group=name`: read, never run."""
    for path in sorted(Path().glob("*.py")):
        if (group, name) in parts_in(path):
            return f"{path.name} is here: add plugins=[{path.name}]"
    return None


# ---------------------------------------------------------------- values


def _value(override: Override, experiment: Experiment) -> ConfigError | None:
    """What is wrong with `key=value` under the parts chosen."""
    node: Any = experiment
    path = override.key.split(".")
    for i, name in enumerate(path[:-1]):
        node = getattr(node, name, None) if name in _fields_of(node) else None
        if not dataclasses.is_dataclass(node):
            return _unknown(override, experiment, ".".join(path[: i + 1]))
    field = _fields_of(node).get(path[-1])
    if field is None:
        return _unknown(override, experiment, override.key)
    if field.node is not None:
        return _is_node(override)
    try:
        element = override.element()
    except ConfigError as error:
        return error
    if isinstance(element, str) and "${" in element:
        return None
    element = str(element) if _becomes_word(element, field) else element
    wrong = problem(element, field)
    return ConfigError(f"`{override.key}` {wrong}", _value_hint(override, element, field)) if wrong else None


def _becomes_word(element: Any, field: Any) -> bool:
    """`name=2024` is the word 2024."""
    return field.types == (str,) and not field.choices and isinstance(element, (int, float, bool))


def _fields_of(node: Any) -> dict[str, Any]:
    return fields(type(node)) if dataclasses.is_dataclass(node) else {}


def _value_hint(override: Override, element: Any, field: Any) -> str:
    if field.is_list and not isinstance(element, list) and element not in (None, ""):
        rest = field.default[1:] if isinstance(field.default, list) else []  # as many as there have to be
        return f"write {override.key}=[{','.join([override.value, *map(show, rest)])}]"
    if isinstance(element, str) and field.choices and (guess := nearest(element, field.choices)):
        return f"did you mean {override.key}={guess}?"
    default = "" if field.default in (None, dataclasses.MISSING) else f"the default is {show(field.default)}"
    return (
        "; ".join(filter(None, [field.help, default])) or f"`lmlab options {override.key.partition('.')[0]}` tells more"
    )


def _is_node(override: Override) -> ConfigError:
    key = override.key
    node = catalogue.nodes().get(key)
    names = [f"{key}.{n}" for n in fields(node)] if node else []
    return ConfigError(f"`{key}` is a group of settings, not a value", f"set one of them: {listed(names)}")


def _unknown(override: Override, experiment: Experiment, key: str) -> ConfigError:
    head, _, leaf = override.key.partition(".")
    if head in GROUPS and leaf:
        return _unknown_field(head, leaf, override, getattr(experiment, head))
    if head in catalogue.nodes():
        node = catalogue.nodes()[head]
        guess = nearest(leaf, fields(node))
        hint = f"did you mean {head}.{guess}?" if guess else f"it has {listed(fields(node), 20)}"
        return ConfigError(f"`{override.key}` is not a setting of {head}", hint)
    return ConfigError(f"`{override.key}` is not known", _unknown_hint(override))


def _unknown_hint(override: Override) -> str:
    key, value = override.key, override.value
    head, leaf = key.partition(".")[0], key.rpartition(".")[2]
    if keys := _fitting(leaf, override):
        meant = " or ".join(_meant(k, override) for k in keys[:3])
        return f"did you mean {meant}?"
    top = [*GROUPS, PRESET, *catalogue.nodes(), *(n for n, f in fields(Experiment).items() if f.node is None), *ALIASES]
    guess = nearest(head, top)
    if guess in (*GROUPS, PRESET) and "." not in key and value not in entries(guess):
        guess = None
    if guess:
        return f"did you mean {guess + key[len(head) :]}={value}?"
    leaves = {n for g in GROUPS for s in OPTIONS[g].values() for n in fields(s)}
    leaves |= {n for node in catalogue.nodes().values() for n in fields(node)}
    if (guess := nearest(leaf, leaves)) and (keys := _fitting(guess, override, strict=True)):
        return f"did you mean {keys[0]}={value}?"
    return "`lmlab options` lists the groups and their options"


def _fitting(leaf: str, override: Override, *, strict: bool = False) -> list[str]:
    """Keys that end in `leaf` and take the value; all of them when none does, unless `strict`."""
    keys = keys_named(leaf)
    try:
        element = override.element()
    except ConfigError:
        return keys
    fit = [k for k in keys if any(problem(element, f) is None for f in possible_fields(k))]
    return sorted(fit if strict else fit or keys, key=lambda k: k.startswith("seed."))


def _meant(key: str, override: Override) -> str:
    """The key with the value; with what it takes instead where the value is nothing that it takes."""
    kinds = possible_fields(key)
    try:
        fits = not kinds or any(problem(override.element(), f) is None for f in kinds)
    except ConfigError:
        fits = True
    return f"{key}={override.value}" if fits else f"{key}, which takes {kinds[0].allowed()}"


def _unknown_field(group: str, leaf: str, override: Override, part: Spec) -> ConfigError:
    """A field that this option has not: another option's, a misspelt one, or the option's name."""
    known = fields(type(part))
    message = f"`{group}.{leaf}` is not a field of {group}={part.name}"
    if leaf == "name":
        return ConfigError(f"`{group}.name` can't be set", f"write {group}={override.value}")
    if owners := [n for n, s in OPTIONS[group].items() if leaf in fields(s)]:
        also = f" (also {listed(owners[1:])})" if owners[1:] else ""
        return ConfigError(message, f"use {group}={owners[0]}, which has it{also}")
    if guess := nearest(leaf, known):
        return ConfigError(message, f"did you mean {_meant(f'{group}.{guess}', override)}?")
    everywhere = [k for k in keys_named(leaf) if possible_fields(k)]
    if everywhere:
        fitting = [k for k in _fitting(leaf, override) if possible_fields(k)] or everywhere
        return ConfigError(message, f"did you mean {_meant(fitting[0], override)}?")
    return ConfigError(message, f"it has {listed(known, 20)}" if known else f"{group}={part.name} has no fields")
