"""Evaluations of long contexts put together: of each arm and scaling what its seeds found at each length.

Seeds are averaged only where they were measured on one token set; the others are left out and said. Nothing here is
computed anew but means, sample deviations and sums of counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmlab.report.arms import stat
from lmlab.report.axes import canonical
from lmlab.report.checked import number
from lmlab.report.long_read import KEY
from lmlab.report.model import Arm, Run, Stat

OWN, NONE, NEEDLE, COPY = "own", "none", "needle", "copy"
NEEDLE_CHANCE = 0.1  # one of ten candidates
TOKEN_SET = ("data", "split", "fingerprint", "unit", "n_documents", "tokens")
_Z = 1.959963984540054  # of 95 %
Found = dict[str, Any]


@dataclass
class Series:
    """One arm under one scaling. Lists hold an entry per seed that has it."""

    arm: int
    scaling: str
    name: str
    trained: int
    n_seeds: int
    cells: dict[int, list[Found]] = field(default_factory=dict)  # by length
    missing: dict[int, str] = field(default_factory=dict)  # length → why it is not available
    tasks: dict[str, dict[int, list[Found]]] = field(default_factory=dict)
    tasks_missing: dict[str, dict[int, str]] = field(default_factory=dict)
    summary: dict[str, list[Found]] = field(default_factory=dict)
    plain: Series | None = None  # the same checkpoint as it was trained, which ratios are to

    @property
    def lengths(self) -> list[int]:
        return sorted({*self.cells, *self.missing})

    @property
    def anchor(self) -> int | None:
        """The trained length, or the longest measured below it; None where only longer ones were measured."""
        return max((length for length in self.base.cells if length <= self.trained), default=None)

    @property
    def base(self) -> Series:
        """What figures stand beside: a factor that is typed changes those at the trained length, too."""
        return self if self.plain is None or not self.plain.cells else self.plain

    def values(self, length: int | None, key: str) -> list[float]:
        """A figure at one length, by seed."""
        if length is None:
            return []
        return numbers(self.cells.get(length, []), key)

    def ratios(self, length: int, key: str) -> list[float]:
        """Perplexity over that at the trained length (`anchor`) as trained, by seed; `key` is a loss in nats."""
        pairs = [
            (number(one.get(key)), number(base.get(key)))
            for one in self.cells.get(length, [])
            for base in self.base.cells.get(self.anchor or 0, [])
            if one["_run"] == base["_run"]
        ]
        return [exp(a - b) for a, b in pairs if a is not None and b is not None]


@dataclass
class Measured:
    """The evaluations of one arm that go together, and why others of its runs do not count."""

    arm: int
    runs: list[Run]
    bodies: list[Found]
    apart: list[str]  # runs on another token set than most
    without: list[str]  # runs without an evaluation, or with one of another checkpoint
    stale: bool  # whether there is one of another checkpoint


def reasons(missing: dict[int, str]) -> dict[str, list[int]]:
    """{why: the lengths that are not available for it}; reasons that differ in their numbers alone are one."""
    found: dict[str, tuple[str, list[int]]] = {}
    for length, why in sorted(missing.items()):
        found.setdefault(re.sub(r"\d[\d,]*", "#", why), (why, []))[1].append(length)
    return dict(found.values())


def numbers(found: Sequence[Found], key: str) -> list[float]:
    return [value for one in found if (value := number(one.get(key))) is not None]


def exp(nats: float) -> float:
    """A perplexity, as a finite number for any loss."""
    return math.exp(min(nats, 700.0))


def average(values: Sequence[float]) -> Stat | None:
    """Over seeds; a deviation that is rounding alone is none."""
    if not values:
        return None
    found = stat(values)
    return replace(found, sd=0.0) if found.sd is not None and found.sd < 1e-12 * abs(found.mean) else found


# ---------------------------------------------------------------- which evaluations go together


def measured(arms: Sequence[Arm]) -> list[Measured]:
    """Of each arm the evaluations on the token set that most of its runs have, of equally many the first's."""
    return [found for i, arm in enumerate(arms) if (found := _of_arm(i, arm)).bodies or found.stale]


def _of_arm(index: int, arm: Arm) -> Measured:
    having = [(run, run.long_context) for run in arm.runs if run.long_context is not None]
    began = [run for run in arm.runs if run.path is not None and run.long_context is None]
    without = [f"{run.name}{f' ({run.long_other})' if run.long_other else ''}" for run in began]
    stale = any(run.long_other for run in began)
    if not having:
        return Measured(index, [], [], [], without, stale)
    sets = [token_set(body) for _, body in having]
    wanted = Counter(sets).most_common(1)[0][0]
    kept = [pair for pair, own in zip(having, sets, strict=True) if own == wanted]
    apart = [run.name for (run, _), own in zip(having, sets, strict=True) if own != wanted]
    return Measured(index, [run for run, _ in kept], [body for _, body in kept], apart, without, stale)


def token_set(body: Found) -> str:
    """What was measured on."""
    return canonical([body[KEY].get(key, body.get(key)) for key in TOKEN_SET])


# ---------------------------------------------------------------- series


def series(arms: Sequence[Arm], found: Sequence[Measured]) -> list[Series]:
    """Arm by arm, scalings in the order they were measured in."""
    several = sum(bool(one.bodies) for one in found) > 1
    made: list[Series] = []
    for one in found:
        named = _names(arms[one.arm].label if several else "", one.bodies)
        by_scaling: dict[str, Series] = {}
        for run, body in zip(one.runs, one.bodies, strict=True):
            _add(by_scaling, one, run, body[KEY], named)
        for own in by_scaling.values():
            own.plain = by_scaling.get(OWN, by_scaling.get(NONE))
        made += by_scaling.values()
    return made


def _add(by_scaling: dict[str, Series], one: Measured, run: Run, inner: Found, named: Callable[[str], str]) -> None:
    def at(entry: Found) -> Series:
        scaling = _scaling(entry, inner)
        trained = inner["trained_length"]
        fresh = Series(one.arm, scaling, named(scaling), trained, len(one.bodies))
        return by_scaling.setdefault(scaling, fresh)

    for cell in inner["cells"]:
        own = at(cell)
        if why := cell.get("not_available"):
            own.missing.setdefault(cell["length"], str(why))
        else:
            more = {"_run": run.name, "_documents": inner.get("n_documents")}
            own.cells.setdefault(cell["length"], []).append(cell | more)
    for cell in inner["tasks"]:
        own, task = at(cell), str(cell.get("task"))
        if why := cell.get("not_available"):
            own.tasks_missing.setdefault(task, {}).setdefault(cell["length"], str(why))
        else:
            own.tasks.setdefault(task, {}).setdefault(cell["length"], []).append(cell | {"_run": run.name})
    for row in inner["summary"]:
        at(row).summary.setdefault(str(row.get("what")), []).append(row)


def _scaling(entry: Found, inner: Found) -> str:
    """Its name; with the factor where one scaling was measured at one length with several."""
    name, factor = str(entry.get("scaling", OWN)), number(entry.get("factor"))
    at = (name, entry.get("length"), entry.get("task"))
    cells = inner["cells" if "task" not in entry else "tasks"]
    several = len(inner.get("factors") or ()) > 1
    twice = several or sum((str(c.get("scaling", OWN)), c["length"], c.get("task")) == at for c in cells) > 1
    return f"{name} ×{factor:g}" if twice and factor is not None else name


def _names(label: str, bodies: Sequence[Found]) -> Callable[[str], str]:
    trained = {str(body[KEY].get("trained_scaling") or "none") for body in bodies}
    own = "as trained" + (f" ({', '.join(sorted(trained))})" if trained - {"none"} else "")
    measured = {_scaling(c, body[KEY]) for body in bodies for key in ("cells", "tasks") for c in body[KEY][key]}
    alone = measured <= {NONE} or (measured <= {OWN} and own == "as trained")

    def named(scaling: str) -> str:
        said = own if scaling == OWN else scaling
        return " · ".join(word for word in (label, "" if alone and label else said) if word)

    return named
