"""Curves over seeds: each metric of each arm against tokens, FLOPs and seconds, with its lowest and highest seed.

Seeds are interpolated onto one grid within the range they all have. A curve of val holds points of one set of tokens
only: where intervals took a part of val, the end is taken on that part as well, never on all of it. train/loss is
smoothed lightly: a centred mean over 1/50 of its rows (none below 50 rows), narrower at the ends. Seconds go on over a
resumed run, as the run recorded them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from lmlab.report.arms import finished, seed_key
from lmlab.report.comparison import named
from lmlab.report.facts import tokenizer_id
from lmlab.report.model import BPB, TRAIN_LOSS, X_AXES, Arm, Curve, Run
from lmlab.report.tables import seed_text

METRICS = (BPB, TRAIN_LOSS)
MAX_POINTS, SMOOTHED_FRAC = 300, 50
Points = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows (indices), values, val/tokens (NaN where not known)


def curves(arms: Sequence[Arm]) -> tuple[list[Curve], list[str]]:
    """(curves, notes on what they leave out and do not share)."""
    found: list[Curve] = []
    notes: list[str] = []
    parts: dict[int, str] = {}  # of arms with a curve of val: which part of it, "" for all
    for i, arm in enumerate(arms):
        for metric in METRICS:
            seeds = [(run, points) for run in drawn(arm) if len((points := points_of(run, metric))[0])]
            size = None
            if metric == BPB and seeds:
                seeds, size, note = _same_tokens(arm, seeds)
                parts[i] = "" if size is None else f"{size:,.0f} tokens{_of_tokenizer(arms, seeds[0][0])}"
                notes += [note] if note else []
            found += [c for x in X_AXES if (c := over_seeds(i, metric, x, seeds, size)) is not None]
    return found, [*notes, *_part_note(parts), *_seed_note(arms, {curve.arm for curve in found})]


def _of_tokenizer(arms: Sequence[Arm], run: Run) -> str:
    """` of <its hash>` where the arms' tokenizers differ: as many tokens are then not the same text."""
    known = {tokenizer_id(one) for arm in arms for one in drawn(arm)} - {None}
    return f" of tokenizer {str(tokenizer_id(run))[:8]}" if len(known) > 1 else ""


def _part_note(parts: dict[int, str]) -> Iterator[str]:
    if len(set(parts.values())) > 1:
        counted = Counter(parts.values()).most_common()
        words = (f"{part or 'all of val'} in {n} arm{'s' if n > 1 else ''}" for part, n in counted)
        yield "val curves are on different parts of val: " + ", ".join(words)


def _seed_note(arms: Sequence[Arm], shown: set[int]) -> Iterator[str]:
    """Curves over other seeds differ by these as well."""
    by_seeds: dict[str, list[str]] = {}
    keys: dict[str, set[object]] = {}
    for i in sorted(shown):
        runs = drawn(arms[i])
        words = ", ".join(sorted(dict.fromkeys(seed_text(run) for run in runs)))
        by_seeds.setdefault(words, []).append(arms[i].label)
        keys.setdefault(words, set()).update(seed_key(run) for run in runs)
    if len({frozenset(found) for found in keys.values()}) > 1:
        words = "; ".join(f"{seeds} in {named(labels)}" for seeds, labels in by_seeds.items())
        yield f"curves are over different seeds: {words}"


def drawn(arm: Arm) -> list[Run]:
    """The finished runs; while there is none, those that got somewhere."""
    return finished(arm.runs) or [run for run in arm.runs if run.rows]


# ---------------------------------------------------------------- points of a run


def points_of(run: Run, metric: str) -> Points:
    """Where the run has the metric. Of val bits per byte, `part/…` stands for a row's own where both are there."""
    values = run.rows.get(metric)
    if values is None:
        return np.array([], dtype=int), np.array([]), np.array([])
    if metric == BPB:
        return _val_points(run, values)
    at = np.flatnonzero(np.isfinite(values))
    return at, smoothed(values[at]), np.full(len(at), np.nan)


def _val_points(run: Run, values: np.ndarray) -> Points:
    nothing = np.full(len(values), np.nan)
    part, tokens = run.rows.get(f"part/{BPB}", nothing), run.rows.get("val/tokens", nothing)
    has_part = np.isfinite(part)
    at = np.flatnonzero(np.isfinite(values) | has_part)
    plain = at[~has_part[at]]
    values = np.where(has_part, part, values)
    if not len(plain):
        return at, values[at], np.full(len(at), np.nan)
    wanted = _usual(tokens[plain])
    kept = at[has_part[at] | _equal(tokens[at], wanted)]
    return kept, values[kept], np.full(len(kept), wanted)


def _usual(tokens: np.ndarray) -> float:
    """The size of val that most points have; of equally many the smaller, which is that of the intervals."""
    sizes, counts = np.unique(tokens, return_counts=True)  # sorted, NaN last and as one
    return float(sizes[np.argmax(counts)])


def _equal(tokens: np.ndarray, wanted: float) -> np.ndarray:
    return np.isnan(tokens) if np.isnan(wanted) else tokens == wanted


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred mean over 1/50 of the points; towards the ends over as many as stand on both sides."""
    n, half = len(values), len(values) // SMOOTHED_FRAC // 2
    if not half:
        return values
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(n)
    reach = np.minimum(half, np.minimum(i, n - 1 - i))
    return np.asarray((total[i + reach + 1] - total[i - reach]) / (2 * reach + 1))


# ---------------------------------------------------------------- over seeds


def _same_tokens(
    arm: Arm, seeds: list[tuple[Run, Points]]
) -> tuple[list[tuple[Run, Points]], float | None, str | None]:
    """The seeds measured on the same part of val as most, its size (None: all of val, or not known), and a note on
    those left out."""
    sizes = [float(points[2][0]) for _, points in seeds]
    wanted = _usual(np.array(sizes))
    kept = [seed for seed, size in zip(seeds, sizes, strict=True) if size == wanted or np.isnan([size, wanted]).all()]
    size = wanted if any(_is_part(run, wanted) for run, _ in kept) else None
    if len(kept) == len(seeds):
        return kept, size, None
    left = ", ".join(run.name for run, _ in seeds if all(run is not other for other, _ in kept))
    return kept, size, f"val curve of {arm.label} without {left}: validated on another part of val at intervals"


def _is_part(run: Run, size: float) -> bool:
    """Whether so many tokens are less than all of val: a row tells of a part beside, of more tokens, or the data do."""
    if np.isnan(size):
        return False
    if (part := run.rows.get(f"part/{BPB}")) is not None and np.isfinite(part).any():
        return True
    val = ((run.manifest.get("data") or {}).get("splits") or {}).get("val") or {}
    held = [n for key in ("tokens", "documents") if isinstance(n := val.get(key), int)]
    targets = held[0] - held[1] if len(held) == 2 else 0  # one token of each document may be no target
    tokens = run.rows.get("val/tokens", np.array([]))
    return bool((tokens > size).any()) or size < targets


def over_seeds(
    arm: int, metric: str, x_name: str, seeds: Sequence[tuple[Run, Points]], size: float | None = None
) -> Curve | None:
    """The curve of an arm from the points of its seeds; None without a point."""
    lines = [line for run, points in seeds if (line := _line(run, points, x_name)) is not None]
    grid = common_grid([x for x, _ in lines])
    if not len(grid):
        return None
    values = np.array([np.interp(grid, x, y) for x, y in lines])
    mean, low, high = (part.tolist() for part in (values.mean(axis=0), values.min(axis=0), values.max(axis=0)))
    return Curve(arm, metric, x_name, grid.tolist(), mean, low, high, len(lines), size)


def _line(run: Run, points: Points, x_name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(x, y) with x rising; a row whose x is missing or goes back is left out."""
    column = run.rows.get(x_name)
    if column is None:
        return None
    x, y = column[points[0]], points[1]
    known = np.isfinite(x)
    x, y = x[known], y[known]
    rises = np.concatenate([[True], x[1:] > np.maximum.accumulate(x)[:-1]]) if len(x) else known[:0]
    return (x[rises], y[rises]) if len(x) else None


def common_grid(xs: Sequence[np.ndarray]) -> np.ndarray:
    """The seeds' own points where they share them, else evenly spaced ones, within the range that all have."""
    if not xs:
        return np.array([])
    if all(len(x) == len(xs[0]) and (x == xs[0]).all() for x in xs):
        if len(xs[0]) <= MAX_POINTS:
            return xs[0]
        return xs[0][np.unique(np.linspace(0, len(xs[0]) - 1, MAX_POINTS).round().astype(int))]
    low, high = max(x[0] for x in xs), min(x[-1] for x in xs)
    if low > high:
        return np.array([])
    return np.unique(np.linspace(low, high, min(MAX_POINTS, max(len(x) for x in xs))))
