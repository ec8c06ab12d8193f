"""What a preset says of a part that was typed in place of the preset's own, and is therefore not taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lmlab.config.catalogue import PRESET, entries
from lmlab.config.fields import fields, show
from lmlab.config.parse import Override
from lmlab.config.tree import Experiment

SIZES = frozenset({"n_layers", "d_model", "n_heads", "seq_len"})


def untaken(words: Sequence[Override], experiment: Experiment, user: Path | None = None) -> list[str]:
    """A line for each group that the preset selects and that was typed: the preset's settings that the typed part could
    have, and has otherwise. Sizes are what one changes a model for, and are left out."""
    typed = {word.key: word.value for word in words}
    preset = entries(PRESET, user).get(typed.get(PRESET, ""))
    if preset is None:
        return []
    lines = []
    for group in (
        group for group in preset.selects if typed.get(group, preset.selects[group]) != preset.selects[group]
    ):
        found = list(_of_part(group, preset.selects[group], typed, experiment, user))
        if found:
            whose = f"{group}={typed[group]} stands in place of the {group} part of preset={preset.label}"
            lines.append(f"{whose}, of which this is not taken; to add it: {' '.join(found)}")
    return lines


def _of_part(group: str, label: str, typed: dict[str, str], experiment: Experiment, user: Path | None) -> Iterator[str]:
    entry, part = entries(group, user).get(label), getattr(experiment, group)
    if entry is None or entry.spec is None:
        return
    theirs = entry.make()
    for name in entry.values:
        if name in SIZES or name not in fields(type(part)) or f"{group}.{name}" in typed:
            continue
        if (value := getattr(theirs, name)) != getattr(part, name):
            yield f"{group}.{name}={show(value)}"
