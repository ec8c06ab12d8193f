"""How arms are named, by the values of the axes that do not go without saying, and in which order they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.report.axes import canonical, shown, typed_words
from lmlab.report.model import Run

NOT_SAID = ("seed", "wandb", "paths", "name", "device", "hydra")
FEW = 4  # from so many arms on, what most of them share is left out of labels
Values = Mapping[str, Any]


# ---------------------------------------------------------------- order


def by_values(axes: Sequence[str], values: Sequence[Values], groups: Sequence[Sequence[Run]]) -> list[tuple[Any, ...]]:
    """What arms are sorted by: their values axis by axis: numbers by size, of other values the default first."""
    words = [axis for axis in axes if not all(own.get(axis) is None or _is_number(own[axis]) for own in values)]
    default = {axis: _default(axis, values, groups) for axis in words}
    return [tuple(_rank(own.get(axis), default.get(axis)) for axis in axes) for own in values]


def _default(axis: str, values: Sequence[Values], groups: Sequence[Sequence[Run]]) -> str | None:
    """The option that a run has which does not list the group among its changes from the default composition."""
    for own, group in zip(values, groups, strict=True):
        if any(isinstance(run.manifest.get("changes"), list) and axis not in typed_words(run) for run in group):
            return canonical(own.get(axis))
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rank(value: Any, default: str | None) -> tuple[bool, int, float, str]:
    is_number = _is_number(value)
    kind = 0 if value is None else 1 if is_number else 2
    return (canonical(value) != default, kind, float(value) if is_number else 0.0, shown(value))


# ---------------------------------------------------------------- labels


def labels(axes: Sequence[str], values: Sequence[Values], groups: Sequence[Sequence[Run]]) -> list[str]:
    """`norm=rmsnorm pos=rope` for each arm: only what is not as usual, and each a label of its own."""
    usual = _usual(axes, values)
    return _told_apart([_label(own, group, usual) for own, group in zip(values, groups, strict=True)])


def _usual(axes: Sequence[str], values: Sequence[Values]) -> dict[str, str]:
    """Of each axis the value that goes without saying: of a field what more than half of the arms have, of a part what
    more than two thirds of no few arms have."""
    usual = {}
    for axis in axes:
        counted = Counter(canonical(own.get(axis)) for own in values)
        value, n = counted.most_common(1)[0]
        if ("." in axis and 2 * n > len(values)) or (len(values) >= FEW and 3 * n > 2 * len(values)):
            usual[axis] = value
    return usual


def _label(values: Values, group: Sequence[Run], usual: Mapping[str, str]) -> str:
    """The values that are not as usual; where all are, the parts. Without axes what differs from the default."""
    there = {axis: value for axis, value in values.items() if axis in group[0].config or value is not None}
    said = {axis: value for axis, value in there.items() if canonical(value) != usual.get(axis)}
    said = said or {axis: value for axis, value in there.items() if "." not in axis} or there
    words = [f"{axis}={shown(value)}" for axis, value in said.items()]
    if not values:
        typed = typed_words(group[0])
        words = [f"{key}={value}" for key, value in typed.items() if key.partition(".")[0] not in NOT_SAID]
    return " ".join(words) or "default"


def _told_apart(names: Sequence[str]) -> list[str]:
    """Arms that differ in nothing that makes an axis (fields only one lmlab knows) still get labels of their own."""
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return told
