"""Lines and maps of the section on long contexts: perplexity and scores against length, loss against the position in
the longest window, ratios beside published ones, answers by length and depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lmlab.report.arms import stat
from lmlab.report.checked import number
from lmlab.report.long_series import COPY, NEEDLE, OWN, Found, Series, exp, numbers
from lmlab.report.long_tables import chance_of, counted, dicts
from lmlab.report.model import Arm, DepthMap, LongLine
from lmlab.report.published import published

OF_LOSS = {"sliding_perplexity": "sliding_loss", "perplexity": "loss"}
SCORE, POSITION, RATIO = "score/", "position", "ratio"
Point = tuple[float, list[float]]  # x, a value per seed


def lines(arms: Sequence[Arm], all_of: Sequence[Series], *, several: bool) -> list[LongLine]:
    """All lines, those of a figure after each other. several: whether more than one arm was evaluated."""
    found = [line for figure, key in OF_LOSS.items() for one in all_of if (line := _perplexity(one, figure, key))]
    found += _positions(all_of)
    whats = dict.fromkeys(what for one in all_of for what in _whats(one))
    found += [line for what in whats for one in all_of if (line := _score(one, what))]
    ratios = [line for one in all_of if (line := _ratio(one))]
    return found + (ratios + list(published(_like(arms, ratios))) if ratios else [])


def _line(one: Series, figure: str, points: Sequence[Point], chance: float | None = None) -> LongLine | None:
    points = [(x, values) for x, values in sorted(points) if values]
    if not points:
        return None
    x = [float(x) for x, _ in points]
    mean = [stat(values).mean for _, values in points]
    low, high = [min(values) for _, values in points], [max(values) for _, values in points]
    n = max(len(values) for _, values in points)
    return LongLine(figure, one.arm, one.scaling, one.name, x, mean, low, high, n, one.trained, chance)


def _perplexity(one: Series, figure: str, key: str) -> LongLine | None:
    """exp of the mean loss over seeds."""
    line = _line(one, figure, [(length, one.values(length, key)) for length in one.cells])
    if line is None:
        return None
    mean, low, high = (list(map(exp, values)) for values in (line.mean, line.low, line.high))
    return replace(line, mean=mean, low=low, high=high)


def _ratio(one: Series) -> LongLine | None:
    """Of perplexities apart to that at the trained length, against length / trained length; nothing without one that is
    longer."""
    if one.anchor is None or max(one.cells) <= one.anchor:
        return None
    return _line(one, RATIO, [(length / one.trained, one.ratios(length, "loss")) for length in one.cells])


def _like(arms: Sequence[Arm], ratios: Sequence[LongLine]) -> Callable[[str], tuple[int, str] | None]:
    """The first line of an arm that has the part, of `rope_scaling=pi` the first with that scaling."""

    def found(word: str) -> tuple[int, str] | None:
        key, _, value = word.partition("=")
        of_scaling = [line for line in ratios if key == "rope_scaling" and line.scaling.split(" ")[0] == value]
        plain = [line for line in ratios if key == "pos" and arms[line.arm or 0].config.get("pos") == value]
        known = of_scaling + [line for line in plain if line.scaling in (OWN, "none")]
        return next(((line.arm, line.scaling) for line in known if line.arm is not None), None)

    return found


def _positions(all_of: Sequence[Series]) -> list[LongLine]:
    """Nats/token of each bucket of the longest length, at the bucket's middle."""
    longest = max((length for one in all_of for length, found in one.cells.items() if _has_buckets(found)), default=0)
    found = []
    for one in all_of:
        by_middle: dict[float, list[float]] = {}
        for bucket in (b for cell in one.cells.get(longest, []) for b in dicts(cell.get("buckets"))):
            low, high, nats, tokens = (number(bucket.get(key)) for key in ("from", "to", "nats", "tokens"))
            if low is not None and high is not None and nats is not None and tokens:
                by_middle.setdefault((low + high) / 2, []).append(nats / tokens)
        if line := _line(one, POSITION, list(by_middle.items())):
            found.append(replace(line, length=longest))
    return found


def _has_buckets(found: Sequence[Found]) -> bool:
    return any(dicts(cell.get("buckets")) for cell in found)


# ---------------------------------------------------------------- scores


def _whats(one: Series) -> list[str]:
    cells = [cell for found in one.cells.values() for cell in found]
    own = [what for what in (NEEDLE, COPY) if any(cell.get(what) for cell in cells)]
    return [*own, *one.tasks]


def _score(one: Series, what: str) -> LongLine | None:
    if what == COPY:
        copies = {length: [c.get(COPY) for c in found] for length, found in one.cells.items()}
        points: list[Point] = [
            (n, numbers([c for c in own if isinstance(c, dict)], "accuracy")) for n, own in copies.items()
        ]
    elif what == NEEDLE:
        points = [(length, _shares(dicts(cell.get(NEEDLE)) for cell in found)) for length, found in one.cells.items()]
    else:
        points = [(length, numbers(found, "exact")) for length, found in one.tasks.get(what, {}).items()]
    return _line(one, SCORE + what, points, chance_of(one, what))


def _shares(seeds: Iterator[list[Found]]) -> list[float]:
    return [correct / n for correct, n in map(counted, seeds) if n]


def maps(all_of: Sequence[Series]) -> Iterator[DepthMap]:
    """Of the needle and each task that has depths, of every line: answers by length and depth, all seeds together. All
    maps of one score have the same rows and columns."""
    for what in dict.fromkeys(what for one in all_of for what in _whats(one) if what != COPY):
        found = [(one, _answers(one, what)) for one in all_of]
        found = [(one, own) for one, own in found if any(own.values())]
        lengths = sorted({n for one, own in found for n in [*own, *one.missing, *one.tasks_missing.get(what, {})]})
        depths = sorted({v for _, own in found for answers in own.values() for v in numbers(answers, "depth")})
        yield from (_map(one, what, own, lengths, depths) for one, own in found if depths)


def _answers(one: Series, what: str) -> dict[int, list[Found]]:
    """What was answered at each depth, by length."""
    if what == NEEDLE:
        return {n: [depth for cell in cells for depth in dicts(cell.get(NEEDLE))] for n, cells in one.cells.items()}
    of_task = one.tasks.get(what, {})
    return {n: [depth for cell in cells for depth in dicts(cell.get("depths"))] for n, cells in of_task.items()}


def _map(one: Series, what: str, found: dict[int, list[Found]], lengths: list[int], depths: list[float]) -> DepthMap:
    def at(length: int, depth: float) -> tuple[int, int]:
        return counted([answer for answer in found.get(length, []) if answer.get("depth") == depth])

    grid = [[at(length, depth) for length in lengths] for depth in depths]
    correct, n = ([[cell[i] for cell in row] for row in grid] for i in (0, 1))
    return DepthMap(what, one.arm, one.scaling, one.name, one.trained, lengths, depths, correct, n)
