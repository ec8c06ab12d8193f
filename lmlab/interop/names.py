"""How tensors of two conventions answer to each other: names, packing, transposition; one table for both directions.

A row says which of their modules holds which of ours, and how: `Row("h.{}.attn.c_attn", ("blocks.{}.attn.q", …), …)`.
`{}` is the layer. Weight and bias of a module follow the same row. What a layout does to a weight (out, in) it does to
a bias (out,) as well. `{expert}` in theirs makes a row of stacks: one module of theirs per slice of the one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = (("weight", "weight"), ("bias", "bias"))  # (theirs, ours)
EXPERT = "{expert}"


@dataclass(frozen=True)
class Layout:
    """split: one of theirs → ours; join: ours → one of theirs. Each undoes the other."""

    split: Callable[[Tensor], list[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


def turned(w: Tensor) -> Tensor:
    """(in, out) ↔ (out, in), as GPT-2's Conv1D has it; a bias is as it was."""
    return w.movedim(-1, 0)


SAME = Layout(lambda w: [w], lambda ws: ws[0])
TURNED = Layout(lambda w: [turned(w)], lambda ws: turned(ws[0]))
THIRDS_TURNED = Layout(lambda w: list(turned(w).tensor_split(3, 0)), lambda ws: turned(torch.cat(list(ws), 0)))


def by_head(heads: int) -> Layout:
    """q, k, v packed as rows (head, 3, channel): GPT-NeoX, BLOOM."""

    def split(w: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in w.unflatten(0, (heads, 3, -1)).unbind(1)]

    def join(ws: Sequence[Tensor]) -> Tensor:
        return torch.stack([w.unflatten(0, (heads, -1)) for w in ws], 1).flatten(0, 2)

    return Layout(split, join)


def keys_then_values(heads: int, of_key: int, of_value: int) -> Layout:
    """Rows (head, channels of the key, then of the value): DeepSeek's kv_b_proj."""

    def split(w: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in w.unflatten(0, (heads, -1)).split((of_key, of_value), 1)]

    def join(ws: Sequence[Tensor]) -> Tensor:
        return torch.cat([w.unflatten(0, (heads, -1)) for w in ws], 1).flatten(0, 1)

    return Layout(split, join)


@dataclass(frozen=True)
class Row:
    """One of their modules and those of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = SAME
    kinds: tuple[tuple[str, str], ...] = KINDS


@dataclass(frozen=True)
class Pair:
    """Tensors that hold the same numbers, by full names: one of theirs with some of ours in it; or, stacked, some of
    theirs as the slices of one of ours."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    layout: Layout
    stacked: bool = False

    def to_ours(self, theirs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(theirs))] if self.stacked else self.layout.split(theirs[0])

    def to_theirs(self, ours: Sequence[Tensor]) -> list[Tensor]:
        return list(ours[0].unbind(0)) if self.stacked else [self.layout.join(ours)]


def rows(prefix: str, names: Mapping[str, str], own: str = "") -> list[Row]:
    """{ours: theirs} with `prefix` before theirs and `own` before ours."""
    return [Row(prefix + theirs, (own + ours,)) for ours, theirs in names.items()]


def pairs(table: Sequence[Row], shapes: Mapping[str, Any], n_layers: int) -> list[Pair]:
    """The table for the tensors that there are. Every one of ours stands in exactly one pair."""
    found = [pair for row in table for pair in _of_row(row, shapes, n_layers)]
    named = [name for pair in found for name in pair.ours]
    assert sorted(named) == sorted(shapes), f"the name table misses or repeats {set(named) ^ set(shapes)}"
    return found


def _of_row(row: Row, shapes: Mapping[str, Any], n_layers: int) -> Iterator[Pair]:
    stacked = EXPERT in row.theirs
    layers: Sequence[int | str] = range(n_layers) if "{}" in row.theirs else ("",)
    for layer in layers:
        for theirs, kind in row.kinds:
            ours = tuple(f"{name.format(layer)}.{kind}" for name in row.ours)
            if all(name in shapes for name in ours):
                experts = range(shapes[ours[0]][0]) if stacked else ("",)
                names = tuple(f"{row.theirs.format(layer, expert=expert)}.{theirs}" for expert in experts)
                yield Pair(names, ours, row.layout, stacked)
