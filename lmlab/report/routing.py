"""Where tokens went, of arms that have experts: figures of each layer at the last evaluation of val, the load of its
experts as a picture, and how evenly training steps were spread, against steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmlab.report.arms import stat
from lmlab.report.comparison import named
from lmlab.report.curves import drawn, over_seeds, smoothed
from lmlab.report.model import Arm, Cell, Column, Curve, Load, Report, Routing, Run, Table
from lmlab.report.tables import MISSING, with_spread
from lmlab.report.why import number
from lmlab.runs.routing_names import FIGURES, LOAD, bars, parse

VAL, STEP, NONE = "val", "step", "none"
SHOWN = ("load_max", "load_min", "entropy", "dropped_frac", "unused_frac", "balance", "stability")
COLUMNS = (
    Column("arm", "arm", False, "What the runs are, by what differs in this report."),
    Column("layer", "layer", True, "Counted from 0; those without experts are left out."),
    *(Column(figure, figure, True, f"{FIGURES[figure]} Mean ± sd over seeds.") for figure in SHOWN),
)
OVER_TIME = {
    "load_max": "Choices of the busiest expert over the mean, in the layer where that is largest",
    "unused_frac": "Share of experts that no token of the step chose, mean over layers",
}
MANY_DROPPED = 0.1


@dataclass(frozen=True)
class Routed:
    """The last evaluation of an arm's runs. layers: {layer: {figure: a value per run that has it}}."""

    arm: int
    steps: list[int]
    layers: dict[int, dict[str, list[float]]]


def routing(arms: Sequence[Arm]) -> Routing | None:
    """The section, or None where no arm has experts."""
    having = {i: arm for i, arm in enumerate(arms) if has_experts(arm)}
    if not having:
        return None
    found = [routed for i, arm in having.items() if (routed := routed_of(i, arm)) is not None]
    many = len(arms) > 1
    said = [f"{arms[one.arm].label + ': ' if many else ''}{line}" for one in found for line in findings(one)]
    curves = [curve for i, arm in having.items() for figure in OVER_TIME if (curve := over_time(i, arm, figure))]
    loads = [load for i, arm in having.items() for load in loads_of(i, arm)]
    return Routing(
        Table("routing", COLUMNS, list(_rows(arms, found))), said, list(_notes(having, found)), loads, curves
    )


def has_experts(arm: Arm) -> bool:
    return arm.config.get("moe", NONE) != NONE or any(parse(metric) for run in arm.runs for metric in run.rows)


# ---------------------------------------------------------------- figures at the end


def routed_of(index: int, arm: Arm) -> Routed | None:
    """Of the arm's finished runs (while there is none, of those that got somewhere)."""
    steps: list[int] = []
    layers: dict[int, dict[str, list[float]]] = {}
    for run in drawn(arm):
        found = last_evaluation(run)
        if found is None:
            continue
        steps.append(found[0])
        for (layer, figure), value in found[1].items():
            layers.setdefault(layer, {}).setdefault(figure, []).append(value)
    return Routed(index, steps, dict(sorted(layers.items()))) if steps else None


def last_evaluation(run: Run) -> tuple[int, dict[tuple[int, str], float]] | None:
    """(step, {(layer, figure): value}) of the last row with a figure of val's routing."""
    known = {metric: where for metric in run.rows if (where := parse(metric)) is not None and where[0] == VAL}
    if not known or STEP not in run.rows:
        return None
    there = np.flatnonzero(np.isfinite(np.array([run.rows[metric] for metric in known])).any(axis=0))
    if not len(there):
        return None
    row = there[-1]
    values = {where[1:]: float(run.rows[metric][row]) for metric, where in known.items()}
    return int(run.rows[STEP][row]), {where: value for where, value in values.items() if math.isfinite(value)}


def _rows(arms: Sequence[Arm], found: Sequence[Routed]) -> Iterator[list[Cell]]:
    for one in found:
        arm = arms[one.arm]
        for layer, figures in one.layers.items():
            mark = "baseline" if arm.is_baseline else ""
            cells = [_figure(figures.get(figure, [])) for figure in SHOWN]
            yield [Cell(arm.label, arm.label, mark), Cell(str(layer), layer), *cells]


def _figure(values: Sequence[float]) -> Cell:
    if not values:
        return MISSING
    found = stat(values)
    return Cell(with_spread(found, number, number), found.mean)


def findings(one: Routed) -> Iterator[str]:
    """Experts that nobody chose, and many choices that found no room: the worst layer, and in how many more."""
    for figure, least, words in (
        ("unused_frac", 0.0, "{value} of the experts of layer {layer} are chosen by no token of val"),
        ("dropped_frac", MANY_DROPPED, "{value} of the choices of layer {layer} find no room"),
    ):
        means = {i: stat(own[figure]).mean for i, own in one.layers.items() if own.get(figure)}
        bad = [layer for layer, value in means.items() if value > least]
        if bad:
            worst = max(bad, key=lambda layer: means[layer])
            others = len(bad) - 1
            more = f", some in {others} more layer{'s' if others > 1 else ''}" if others else ""
            yield words.format(value=f"{means[worst]:.1%}", layer=worst) + more


def _notes(having: dict[int, Arm], found: Sequence[Routed]) -> Iterator[str]:
    known = {one.arm for one in found}
    if without := [arm.label for i, arm in having.items() if i not in known]:
        yield f"no figures of routing in {named(without)}: nothing was evaluated yet"
    if unstable := [
        having[one.arm].label for one in found if not any("stability" in own for own in one.layers.values())
    ]:
        yield f"no stability in {named(unstable)}: no earlier checkpoint was kept at the last evaluation"
    counted = {having[one.arm].label: Counter(one.steps) for one in found}
    if len({step for steps in counted.values() for step in steps}) > 1:
        told = (f"{', '.join(map(str, sorted(steps)))} in {label}" for label, steps in counted.items())
        yield f"routing is of different steps: {'; '.join(told)}"


# ---------------------------------------------------------------- pictures


def loads_of(index: int, arm: Arm) -> Iterator[Load]:
    """Which expert is the busiest is chance, so that each run's are put in order before the mean is taken."""
    layers: dict[int, list[list[float]]] = {}
    for run in drawn(arm):
        for metric, load in run.lists.items():
            where = parse(metric)
            if where is not None and where[0] == VAL and where[2] == LOAD and sum(load) > 0:
                mean = sum(load) / len(load)
                layers.setdefault(where[1], []).append(sorted((n / mean for n in load), reverse=True))
    for layer, seeds in sorted(layers.items()):
        same = [load for load in seeds if len(load) == len(seeds[0])]
        yield Load(index, layer, [stat(column).mean for column in zip(*same, strict=True)], len(same))


def over_time(index: int, arm: Arm, figure: str) -> Curve | None:
    """Of training steps: the highest layer's load_max, the mean over layers of any other figure."""
    seeds = []
    for run in drawn(arm):
        columns = [run.rows[m] for m in run.rows if (where := parse(m)) is not None and where[::2] == ("", figure)]
        if not columns:
            continue
        lines = np.array(columns)
        at = np.flatnonzero(np.isfinite(lines).all(axis=0))
        values = lines[:, at].max(axis=0) if figure == "load_max" else lines[:, at].mean(axis=0)
        seeds.append((run, (at, smoothed(values), np.full(len(at), np.nan))))
    return over_seeds(index, name_over_time(figure), STEP, seeds)


def name_over_time(figure: str) -> str:
    """What a curve's metric is called: it is of all layers, so of none of the metrics that a row has."""
    return f"moe/{figure}"


def load_bars(load: Load) -> str:
    """`█▅▃▁·`"""
    return bars(load.over_mean)


def load_name(report: Report, load: Load, *, many: bool) -> str:
    """`layer 3 of norm=layernorm`; `many`: whether there are other arms."""
    return f"layer {load.layer}" + (f" of {report.arms[load.arm].label}" if many else "")
