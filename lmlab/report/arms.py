"""Runs that differ only in their seeds make an arm: its label, its figures over seeds, its distance to the baseline.

Only finished runs enter a figure; the others are counted by state. Bits per byte compare across tokenizers as long as
the validation text is the same; where it is not, there is no difference to tell.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmlab.errors import RunError, listed
from lmlab.report.axes import canonical, differing, labelled, shown, typed_keys, typed_words
from lmlab.report.model import BPB, Arm, Delta, Run, Stat
from lmlab.report.sources import Sweep
from lmlab.runs.layout import parse_name

STATS = (
    *(BPB, "val/loss", "best/val/bits_per_byte", "best/val/loss", "test/bits_per_byte", "test/loss", "train/loss"),
    *("tokens_per_s", "elapsed_s", "tokens", "peak_memory_bytes"),
)
Order = Mapping[str, tuple[int, int]]  # run key → place of its arm in the sweeps


def make_arms(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> tuple[list[str], list[Arm]]:
    """(axes, arms in the sweep's order, else by when they were begun). Runs without a configuration are in none."""
    groups = _groups([run for run in runs if run.config])
    place = order(sweeps)
    found = sorted(groups.values(), key=lambda group: _place(group, place))
    raw = differing([group[0].config for group in found], typed_keys([run for group in found for run in group]))
    axes, values = labelled(raw, found)
    if len({canonical(group[0].config) for group in found}) < len(found):
        axes = [*axes, "code"]
        values = [own | {"code": _code(group[0])} for own, group in zip(values, found, strict=True)]
    usual = _usual(axes, values)
    arms = [
        Arm(_label(own, group, usual), own, group[0].config, group, stats=stats(group), facts=facts(group))
        for own, group in zip(values, found, strict=True)
    ]
    _tell_apart(arms)
    return axes, arms


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one configuration, by seed. Where a seed comes twice, as of a run and the one that was set aside for it,
    other code makes another arm: the two are no two draws of one experiment."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_by_seed):
        groups.setdefault(canonical(run.config), []).append(run)
    twice = {name for name, group in groups.items() if len({seed_key(run) for run in group}) < len(group)}
    split: dict[str, list[Run]] = {}
    for name, group in groups.items():
        for run in group:
            split.setdefault(f"{name} {_code(run)}" if name in twice else name, []).append(run)
    return split


def _code(run: Run) -> str:
    return str(run.manifest.get("code_hash") or "unknown")[:8]


def run_key(path: Path | None, name: str) -> str:
    return str(path.resolve()) if path is not None else f"planned {name}"


def order(sweeps: Sequence[Sweep]) -> dict[str, tuple[int, int]]:
    """Where each member's arm stands in its sweep; of a run in two sweeps, in the first."""
    places: dict[str, tuple[int, int]] = {}
    for i, sweep in enumerate(sweeps):
        rank = {arm: j for j, arm in enumerate(sweep.arms)}
        for member in sweep.members:
            places.setdefault(run_key(member.path, member.run), (i, rank.get(member.arm, len(rank))))
    return places


def _by_seed(run: Run) -> tuple[int, str]:
    seed = run.seeds.get("all")
    return (-1 if seed is None else seed, run.name)


def _place(group: Sequence[Run], place: Order) -> tuple[float, float, str, str]:
    last = (math.inf, math.inf)
    first = min((place.get(run_key(run.path, run.name), last) for run in group), default=last)
    begun = min((str(run.manifest.get("started") or "~") for run in group), default="~")
    return (*first, begun, group[0].name)


def _usual(axes: Sequence[str], values: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of each field that is an axis the value that more than half of the arms have: it goes without saying."""
    usual = {}
    for axis in (axis for axis in axes if "." in axis):
        counted = Counter(canonical(own.get(axis)) for own in values)
        value, n = counted.most_common(1)[0]
        if 2 * n > len(values):
            usual[axis] = value
    return usual


def _label(values: Mapping[str, Any], group: Sequence[Run], usual: Mapping[str, str]) -> str:
    """`norm=rmsnorm pos=rope`; fields only where they are not as usual. Without axes what differs from the default."""
    there = {axis: value for axis, value in values.items() if axis in group[0].config or value is not None}
    said = {axis: value for axis, value in there.items() if canonical(value) != usual.get(axis)} or there
    words = [f"{axis}={shown(value)}" for axis, value in said.items()]
    if not values:
        typed = typed_words(group[0])
        words = [f"{key}={value}" for key, value in typed.items() if key.partition(".")[0] not in NOT_SAID]
    return " ".join(words) or "default"


NOT_SAID = ("seed", "wandb", "paths", "name", "device", "hydra")


def _tell_apart(arms: Sequence[Arm]) -> None:
    """Arms that differ in nothing that makes an axis (fields only one lmlab knows) still get labels of their own."""
    seen: dict[str, int] = {}
    for arm in arms:
        seen[arm.label] = seen.get(arm.label, 0) + 1
        arm.label += f" ({seen[arm.label]})" if seen[arm.label] > 1 else ""


# ---------------------------------------------------------------- figures


def finished(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.state == "finished"]


def stats(runs: Sequence[Run]) -> dict[str, Stat]:
    """Mean, sample sd and n of each figure over the finished runs that have it."""
    found = {}
    for metric in STATS:
        values = [value for run in finished(runs) if (value := figure(run, metric)) is not None]
        if values:
            found[metric] = stat(values)
    return found


def stat(values: Sequence[float]) -> Stat:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Stat(statistics.fmean(values), sd, len(values))


def figure(run: Run, metric: str) -> float | None:
    """A figure of the run's result that is a finite number."""
    value = run.result.get(metric)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def facts(runs: Sequence[Run]) -> dict[str, Any]:
    """parameters, flops_per_token, tokens and peak memory of an arm; None where no run tells."""
    own = stats(runs)
    memory = [value for run in finished(runs) if (value := figure(run, "peak_memory_bytes")) is not None]
    return {
        "parameters": _first(runs, "parameters"),
        "flops_per_token": _first(runs, "flops_per_token"),
        "tokens": own["tokens"].mean if "tokens" in own else None,
        "peak_memory_bytes": max(memory, default=None),
    }


def _first(runs: Sequence[Run], key: str) -> Any:
    return next((run.manifest[key] for run in runs if isinstance(run.manifest.get(key), (int, float))), None)


# ---------------------------------------------------------------- baseline


def find_baseline(arms: Sequence[Arm], text: str | None, sweeps: Sequence[Sweep]) -> int:
    """The arm that `text` names (a run, words key=value, a label), else the sweep's own, else the first.

    Raises RunError naming the arms: no arm fits, or several do.
    """
    if text:
        return _named(arms, text.strip(), sweeps)
    for sweep in sweeps:
        if sweep.baseline is not None and (i := _of_sweep(arms, sweep, sweep.baseline)) is not None:
            return i
    return 0


def _named(arms: Sequence[Arm], text: str, sweeps: Sequence[Sweep]) -> int:
    fits = [i for i, arm in enumerate(arms) if arm.label == text]
    fits = fits or [i for i, arm in enumerate(arms) if any(_is_run(run, text) for run in arm.runs)]
    fits = fits or [i for sweep in sweeps if (i := _of_sweep(arms, sweep, text)) is not None]
    words = [word for word in re.split(r"[\s,]+(?![^\[]*\])", text) if word]
    if not fits and all("=" in word for word in words):
        fits = [i for i, arm in enumerate(arms) if all(_has(arm, word) for word in words)]
    there = listed((arm.label for arm in arms), 12)
    if not fits:
        raise RunError(f"`--baseline {text}` is no arm and no run of this report", f"the arms: {there}")
    if len(set(fits)) > 1:
        several = listed((arms[i].label for i in sorted(set(fits))), 12)
        raise RunError(f"`--baseline {text}` fits several arms: {several}", f"name one by more words: {there}")
    return fits[0]


def _is_run(run: Run, text: str) -> bool:
    name = parse_name(run.name)
    by_hash = re.fullmatch(r"[0-9a-f]{4,8}", text) is not None and name.hash.startswith(text)
    by_path = run.path is not None and Path(text).exists() and Path(text).resolve() == run.path.resolve()
    return text in (run.name, name.slug) or by_hash or by_path


def _of_sweep(arms: Sequence[Arm], sweep: Sweep, arm_id: str) -> int | None:
    keys = {run_key(member.path, member.run) for member in sweep.members if member.arm == arm_id}
    return next((i for i, arm in enumerate(arms) if any(run_key(r.path, r.name) in keys for r in arm.runs)), None)


def _has(arm: Arm, word: str) -> bool:
    """Whether `key=value` is so in the arm: by its axes or its whole configuration."""
    key, _, value = word.partition("=")
    key = {"lr": "optim.lr"}.get(key, key)
    there = [values[key] for values in (arm.values, arm.config) if key in values]
    return any(shown(v).lower() == value.lower() or (_is_float(value) and v == float(value)) for v in there)


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# ---------------------------------------------------------------- distance to the baseline


def delta(arm: Arm, base: Arm) -> Delta:
    """Arm minus baseline in val/bits_per_byte: over the seeds both have, else the difference of the means."""
    mine, theirs = finished(arm.runs), finished(base.runs)
    if not mine:
        return Delta(None, why="no finished run")
    if not theirs:
        return Delta(None, why="the baseline has no finished run")
    if other_text(mine, theirs):
        return Delta(None, why="other validation text")
    a, b = ({seed_key(run): v for run in runs if (v := figure(run, BPB)) is not None} for runs in (mine, theirs))
    if not a or not b:
        return Delta(None, why="bits per byte can't be told")
    if common := [seed for seed in a if seed in b]:
        pairs = stat([a[seed] - b[seed] for seed in common])
        return Delta(pairs.mean, pairs.sd, pairs.n, paired=True)
    one, other = stat(list(a.values())), stat(list(b.values()))
    spread = None if one.sd is None or other.sd is None else math.hypot(one.sd, other.sd)
    return Delta(one.mean - other.mean, spread, min(one.n, other.n))


def seed_key(run: Run) -> tuple[int | None, ...]:
    """What two runs share that have the same seeds in effect."""
    return tuple(run.seeds.get(name) for name in ("init", "data", "dropout"))


def other_text(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Whether two arms were validated on different text, whatever its tokens."""
    ours, theirs = ({canonical(text) for run in runs if (text := val_text(run))} for runs in (a, b))
    if ours and theirs:
        return ours != theirs
    keys = {key for run in (a[0], b[0]) for key in run.config if key.split(".")[0] == "data" and key != "data.packing"}
    return any(canonical(a[0].config.get(key)) != canonical(b[0].config.get(key)) for key in keys)


def val_text(run: Run) -> list[Any] | None:
    """What tells validation texts apart: the corpus's content, how it is split, and how much of it is val."""
    data = run.manifest.get("data")
    val = (data.get("splits") or {}).get("val") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(val, dict) or not data.get("source_hash"):
        return None
    split = [run.config.get(f"data.{key}") for key in ("val_frac", "test_frac", "field")]
    return [data["source_hash"], val.get("documents"), val.get("bytes"), *split]
