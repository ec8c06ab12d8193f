"""Why arms differ: what probes found inside their models at the last step probed, layer by layer, and what of it is
out of the ordinary. Where no run has a probe there is nothing to say; where some arms have none, that is said.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmlab.report.comparison import named
from lmlab.report.curves import drawn
from lmlab.report.model import Arm, Cell, Column, Curve, Run, Table, Why
from lmlab.report.tables import MISSING
from lmlab.runs.probe_names import ELSEWHERE, LAYER, parse

COLUMNS = (
    Column("figure", "figure", False, "What is measured, at the last step probed: mean over seeds."),
    Column("arm", "arm", False, "What the runs are, by what differs in this report."),
    Column("mean", "mean", True, "Over layers."),
    Column("lowest", "lowest", True, "Of all layers."),
    Column("lowest_layer", "in layer", True, "Layers are counted from 0."),
    Column("highest", "highest", True, "Of all layers."),
    Column("highest_layer", "in layer", True, "Layers are counted from 0."),
)
Values = dict[tuple[int | str, str], float]  # (place, figure) → value


@dataclass(frozen=True)
class Probed:
    """The last probe of an arm. layers: {figure: a value per layer, NaN where there is none}."""

    arm: int
    steps: list[int]  # of each run
    layers: dict[str, list[float]]
    seeds: dict[str, list[list[float]]]  # the same by run
    elsewhere: dict[str, float]


def why(arms: Sequence[Arm]) -> Why | None:
    """The section, or None when no run of any arm was probed."""
    found = [probed for i, arm in enumerate(arms) if (probed := probe_of(i, arm)) is not None]
    if not found:
        return None
    said = [f"{_label(arms, probed)}{line}" for probed in found for line in findings(probed)]
    return Why(_table(arms, found), said, list(_notes(arms, found)), list(_profiles(found)))


def _label(arms: Sequence[Arm], probed: Probed) -> str:
    return f"{arms[probed.arm].label}: " if len(arms) > 1 else ""


# ---------------------------------------------------------------- reading


def probe_of(index: int, arm: Arm) -> Probed | None:
    """The last probe of the arm's finished runs (while there is none, of those that got somewhere), mean over seeds."""
    last = [found for run in drawn(arm) if (found := last_probe(run)) is not None]
    if not last:
        return None
    n_layers = 1 + max((place for _, values in last for place, _ in values if isinstance(place, int)), default=-1)
    figures = [figure for figure in LAYER if any(figure == known for _, values in last for _, known in values)]
    seeds = {
        figure: [[values.get((layer, figure), math.nan) for layer in range(n_layers)] for _, values in last]
        for figure in figures
    }
    seeds = {figure: lines for figure, lines in seeds.items() if any(not math.isnan(v) for line in lines for v in line)}
    layers = {figure: [_mean(column) for column in zip(*lines, strict=True)] for figure, lines in seeds.items()}
    places = {key: [values.get((place, figure), math.nan) for _, values in last] for key, place, figure in _elsewhere()}
    elsewhere = {key: mean for key, values in places.items() if not math.isnan(mean := _mean(values))}
    return Probed(index, [step for step, _ in last], layers, seeds, elsewhere)


def _elsewhere() -> Iterator[tuple[str, str, str]]:
    for key in ELSEWHERE:
        place, _, figure = key.partition("/")
        yield key, place, figure


def last_probe(run: Run) -> tuple[int, Values] | None:
    """(step, figures) of the last row with a probe that is a number."""
    columns = {place: values for metric, values in run.rows.items() if (place := parse(metric)) is not None}
    if not columns or "step" not in run.rows:
        return None
    there = np.flatnonzero(np.isfinite(np.array(list(columns.values()))).any(axis=0))
    if not len(there):
        return None
    row = there[-1]
    values = {place: float(column[row]) for place, column in columns.items() if np.isfinite(column[row])}
    return int(run.rows["step"][row]), values


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.fmean(known) if known else math.nan


# ---------------------------------------------------------------- what stands out


def findings(probed: Probed) -> Iterator[str]:
    """What is out of the ordinary, one line each, with the figure."""
    for figure, (is_odd, extreme, words) in ODD.items():
        line = probed.layers.get(figure, [])
        known = [(value, layer) for layer, value in enumerate(line) if not math.isnan(value)]
        if known and is_odd((worst := extreme(known))[0]):
            others = sum(is_odd(value) for value, _ in known) - 1
            more = f", so in {others} more layer{'s' if others > 1 else ''}" if others else ""
            yield f"{words.format(value=number(worst[0]), layer=worst[1])}{more}"
    yield from _across_depth(probed)


Extreme = Callable[[list[tuple[float, int]]], tuple[float, int]]
# figure → (from where on it is odd, which layer is the worst, the words)
ODD: dict[str, tuple[Callable[[float], bool], Extreme, str]] = {
    "attn_entropy_frac": (
        lambda v: v < 0.1,
        min,
        "attention entropy is {value} of uniform in layer {layer} (below 0.1: collapsed)",
    ),
    # Kimi K2 (2025, 2507.20534) rescales q and k beyond 100.
    "attn_max_logit": (lambda v: v > 100, max, "attention scores reach {value} in layer {layer} (above 100)"),
    "ffn_dead_frac": (lambda v: v > 0.1, max, "ffn_dead_frac is {value} in layer {layer} (above 0.1)"),
    "act_kurtosis": (lambda v: v > 100, max, "act_kurtosis is {value} in layer {layer} (above 100: outliers)"),
    "update_ratio": (lambda v: v > 0.1, max, "one step moves the matrices of layer {layer} by {value} of their norm"),
}
SKEWED = 10.0  # times between the first and the last layer


def _across_depth(probed: Probed) -> Iterator[str]:
    """Gradients that vanish or explode on the way down, and a residual stream that grows."""
    for figure, words in (
        ("grad_norm", "gradient norm of layer 0 is {ratio} of the last layer's ({first} against {last})"),
        ("residual_rms", "residual RMS goes from {first} in layer 0 to {last} in the last layer ({times} times)"),
    ):
        line = probed.layers.get(figure, [])
        if len(line) < 2 or not (line[0] > 0 and line[-1] > 0):
            continue
        ratio = line[0] / line[-1]
        if max(ratio, 1 / ratio) > SKEWED:
            times, first, last = number(1 / ratio), number(line[0]), number(line[-1])
            yield words.format(ratio=number(ratio), times=times, first=first, last=last)


def number(value: float) -> str:
    """Three digits, thousands set apart: 0.0213, 14.2, 1,230."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _notes(arms: Sequence[Arm], found: Sequence[Probed]) -> Iterator[str]:
    """Arms without probes, and arms probed at other steps."""
    without = [arm.label for i, arm in enumerate(arms) if all(probed.arm != i for probed in found)]
    if without:
        yield f"no probes in {named(without)}: train.probe_every_steps was off, or nothing was probed yet"
    steps = {probed.arm: Counter(probed.steps) for probed in found}
    if len({step for counted in steps.values() for step in counted}) > 1:
        told = (f"{', '.join(map(str, sorted(counted)))} in {arms[i].label}" for i, counted in steps.items())
        yield f"probes are of different steps: {'; '.join(told)}"


# ---------------------------------------------------------------- table and profiles


def _table(arms: Sequence[Arm], found: Sequence[Probed]) -> Table:
    """Figure by figure a row per arm, so that arms stand next to each other."""
    rows = []
    for figure in (f for f in LAYER if any(f in probed.layers for probed in found)):
        rows += [_row(figure, arms[p.arm], _over_layers(p.layers.get(figure, []))) for p in found]
    for figure in (f for f in ELSEWHERE if any(f in probed.elsewhere for probed in found)):
        rows += [_row(figure, arms[p.arm], [_number(p.elsewhere.get(figure, math.nan))]) for p in found]
    return Table("why", COLUMNS, rows)


def _row(figure: str, arm: Arm, cells: list[Cell]) -> list[Cell]:
    mark = "baseline" if arm.is_baseline else ""
    return [Cell(figure, figure), Cell(arm.label, arm.label, mark), *cells, *[MISSING] * (5 - len(cells))]


def _over_layers(line: Sequence[float]) -> list[Cell]:
    known = [(value, layer) for layer, value in enumerate(line) if not math.isnan(value)]
    if not known:
        return []
    cells = [_number(_mean(line))]
    for value, layer in (min(known), max(known, key=lambda pair: (pair[0], -pair[1]))):
        cells += [_number(value), Cell(str(layer), layer)]
    return cells


def _number(value: float) -> Cell:
    return MISSING if math.isnan(value) else Cell(number(value), value)


def _profiles(found: Sequence[Probed]) -> Iterator[Curve]:
    """Each figure against the layer, arm by arm: mean, lowest and highest seed."""
    for figure in LAYER:
        for probed in found:
            line = probed.layers.get(figure, [])
            if len(line) < 2:
                continue
            columns = [[v for v in column if not math.isnan(v)] for column in zip(*probed.seeds[figure], strict=True)]
            low, high = ([pick(c, default=math.nan) for c in columns] for pick in (min, max))
            yield Curve(
                probed.arm, figure, "layer", list(map(float, range(len(line)))), line, low, high, len(probed.steps)
            )
