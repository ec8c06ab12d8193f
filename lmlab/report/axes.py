"""What differs between configurations, and only that: the axes of a report, and how arms are named by them.

A part brings fields of its own (rope's theta, the eps of a norm); they are no difference besides the part itself. So a
field of a part is an axis where it differs between arms that have the same part, or where a user typed it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lmlab.report.model import Run

Config = dict[str, Any]


def canonical(value: Any) -> str:
    """Equal text for equal values; 1 and true are not equal."""
    return json.dumps(value, sort_keys=True, default=str)


def shown(value: Any) -> str:
    """A value as a user would type it: null, true, 0.001, [a,b]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(shown(v) for v in value) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def differing(configs: Sequence[Config], typed: frozenset[str] = frozenset()) -> list[str]:
    """Keys that differ, in the configurations' order. `typed`: keys that some user set, which count as they stand."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if _differs(key, configs, typed)]


def _differs(key: str, configs: Sequence[Config], typed: frozenset[str]) -> bool:
    group = key.partition(".")[0]
    have = [config for config in configs if key in config]
    is_field = group != key and any(group in config for config in have)
    if not is_field or key in typed:
        return _several(key, have)
    by_part: dict[str, list[Config]] = {}
    for config in have:
        by_part.setdefault(canonical(config.get(group)), []).append(config)
    return any(_several(key, same) for same in by_part.values())


def _several(key: str, configs: Sequence[Config]) -> bool:
    return len({canonical(config[key]) for config in configs}) > 1


# ---------------------------------------------------------------- what users typed


def typed_words(run: Run) -> dict[str, str]:
    """{key: value} of what differs from the default composition (of a planned run: of its overrides), as words."""
    words = run.manifest.get("changes")
    if not isinstance(words, list):
        words = run.manifest.get("overrides")
    pairs = [str(word).lstrip("+~").partition("=") for word in words or [] if "=" in str(word)]
    return {key: value for key, _, value in pairs}


def typed_keys(runs: Sequence[Run]) -> frozenset[str]:
    return frozenset(key for run in runs for key in typed_words(run))


# ---------------------------------------------------------------- named parts


def labelled(axes: Sequence[str], arms: Sequence[Sequence[Run]]) -> tuple[list[str], list[dict[str, Any]]]:
    """(axes, each arm's values), where a named part file stands for its fields: `model=nano`, not four sizes.

    Only where the names tell exactly what the fields tell: one name for one set of values, and no field set besides. A
    single field that differs stays beside the name, which would hide it.
    """
    kept, named = list(axes), {}
    for group in dict.fromkeys(axis.partition(".")[0] for axis in axes):
        if not any(group in _choices(run) for runs in arms for run in runs):
            continue  # no part, but a plain key
        own = [axis for axis in axes if axis.partition(".")[0] == group]
        labels = [_label(group, runs) for runs in arms]
        if own == [group] and not _renamed(group, labels, arms):
            continue
        if None not in labels and _same_partition(labels, [_values(runs, own) for runs in arms]):
            named[group] = labels
            fields = [axis for axis in own if axis != group]
            shown_too = fields if len(fields) == 1 else []
            at = kept.index(own[0])
            kept = [axis for axis in kept if axis not in own]
            kept[at:at] = [group, *shown_too]
    values = [{a: named[a][i] if a in named else runs[0].config.get(a) for a in kept} for i, runs in enumerate(arms)]
    return kept, values


def _renamed(group: str, labels: Sequence[str | None], arms: Sequence[Sequence[Run]]) -> bool:
    """Whether some arm's part goes by another name than its class: attn=llama is made of gqa."""
    return any(label != runs[0].config.get(group) for label, runs in zip(labels, arms, strict=True))


def _label(group: str, runs: Sequence[Run]) -> str | None:
    """The name of the part in an arm; None when it is not known, or a field of the part was set besides."""
    for run in runs:
        words = typed_words(run)
        if any(key.startswith(f"{group}.") for key in words):
            return None
        label = words.get(group) or _choices(run).get(group)
        if label:
            return str(label)
    return None


def _choices(run: Run) -> dict[str, Any]:
    """{group: option} as the run was composed."""
    found = run.manifest.get("choices")
    return found if isinstance(found, dict) else {}


def _values(runs: Sequence[Run], axes: Sequence[str]) -> str:
    return canonical([runs[0].config.get(axis) for axis in axes])


def _same_partition(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(set(a)) == len(set(b)) == len(set(zip(a, b, strict=True)))
