"""Runs that differ only in their seeds make an arm: its label, its figures over seeds, its distance to the baseline.

Only finished runs enter a figure; the others are counted by state. Bits per byte compare across tokenizers as long as
the validation text is the same; where it is not, there is no difference to tell.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlab.report.axes import canonical, differing, labelled, typed_keys
from lmlab.report.checked import number
from lmlab.report.facts import noncausal
from lmlab.report.labels import by_values, labels
from lmlab.report.model import BPB, Arm, Delta, Run, Stat
from lmlab.report.plans import Sweep
from lmlab.runs.layout import parse_name

STATS = (
    *(BPB, "val/loss", "best/val/bits_per_byte", "best/val/loss", "test/bits_per_byte", "test/loss", "train/loss"),
    *("val/token_accuracy", "tokens_per_s", "elapsed_s", "tokens", "peak_memory_bytes"),
)
Order = Mapping[str, tuple[int, int]]  # run key → place of its arm in the sweeps
LAST = (math.inf, math.inf)


def make_arms(runs: Sequence[Run], sweeps: Sequence[Sweep]) -> tuple[list[str], list[Arm]]:
    """(axes, arms in the sweep's order, else by their values). Runs without a configuration are in none."""
    place = order(sweeps)
    found = sorted(_groups([run for run in runs if run.config]), key=lambda made: _begun(made.runs))
    groups = [made.runs for made in found]
    raw = differing([group[0].config for group in groups], typed_keys([run for group in groups for run in group]))
    axes, values = labelled(raw, groups)
    rank = by_values(axes, values, groups)
    for key in ("data", "code"):
        if any(key in made.apart for made in found):
            axis = f"{key}.fingerprint" if key in axes else key
            axes = [*axes, axis]
            values = [
                v | {axis: made.apart.get(key) or _known(key, made.runs)} for v, made in zip(values, found, strict=True)
            ]
    ranked = sorted(range(len(found)), key=lambda i: (_place(groups[i], place), rank[i]))
    groups, values = [groups[i] for i in ranked], [values[i] for i in ranked]
    names = labels(axes, values, groups)
    return axes, [
        Arm(name, own, group[0].config, group, stats=stats(group), facts=facts(group))
        for name, own, group in zip(names, values, groups, strict=True)
    ]


@dataclass
class Group:
    """Runs of one configuration; `apart`: by what it is told from others of that configuration (data, code)."""

    runs: list[Run]
    apart: dict[str, str] = field(default_factory=dict)


def _groups(runs: Sequence[Run]) -> list[Group]:
    """Runs of one configuration, by seed. Other data makes another arm; so does other code where a seed comes twice, as
    of a run and the one that was set aside for it: they are no draws of one experiment."""
    by_config: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_by_seed):
        by_config.setdefault(canonical(run.config), []).append(run)
    groups = [Group(group) for group in by_config.values()]
    groups = [part for group in groups for part in _split(group, "data", data_id)]
    twice = [len({seed_key(run) for run in group.runs}) < len(group.runs) for group in groups]
    return [
        part
        for group, is_twice in zip(groups, twice, strict=True)
        for part in (_split(group, "code", _code) if is_twice else [group])
    ]


def _split(group: Group, key: str, of: Callable[[Run], str | None]) -> list[Group]:
    """The group's runs by what `of` tells; those of which it is not known stay with the first."""
    known = list(dict.fromkeys(value for run in group.runs if (value := of(run)) is not None))
    if len(known) < 2:
        return [group]
    parts = {value: Group([], group.apart | {key: _short(value)}) for value in known}
    for run in group.runs:
        parts[of(run) or known[0]].runs.append(run)
    short = Counter(part.apart[key] for part in parts.values())
    for i, part in enumerate(parts.values(), start=1):  # the same files, other text: never in practice
        part.apart[key] += f" ({i})" if short[part.apart[key]] > 1 else ""
    return list(parts.values())


def data_id(run: Run) -> str | None:
    """What was trained and validated on: the files' fingerprint and the text of val."""
    fingerprint, text = run.manifest.get("fingerprint"), val_text(run)
    return None if fingerprint is None and text is None else f"{fingerprint or 'unknown'} {canonical(text)}"


def _code(run: Run) -> str | None:
    found = run.manifest.get("code_hash")
    return str(found) if found else None


def _short(value: str) -> str:
    return value.split(" ", 1)[0][:8]


def _known(key: str, runs: Sequence[Run]) -> str | None:
    found = next((value for run in runs if (value := (data_id if key == "data" else _code)(run)) is not None), None)
    return None if found is None else _short(found)


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


def _place(group: Sequence[Run], place: Order) -> tuple[float, float]:
    return min((place.get(run_key(run.path, run.name), LAST) for run in group), default=LAST)


def _begun(group: Sequence[Run]) -> tuple[bool, str, str]:
    """By when they were begun, those set aside last."""
    begun = min((str(run.manifest.get("started") or "~") for run in group), default="~")
    return (all(parse_name(run.name).old is not None for run in group), begun, group[0].name)


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
    return number(run.result.get(metric))


def facts(runs: Sequence[Run]) -> dict[str, Any]:
    """Parameters, those that a token meets, FLOPs, tokens and peak memory of an arm, and why it is not causal; None
    where no run tells."""
    own = stats(runs)
    memory = [value for run in finished(runs) if (value := figure(run, "peak_memory_bytes")) is not None]
    return {
        "parameters": _first(runs, "parameters"),
        "active_parameters": _first(runs, "active_parameters"),
        "noncausal": next((why for run in runs if (why := noncausal(run))), None),
        "flops_per_token": _first(runs, "flops_per_token"),
        "tokens": own["tokens"].mean if "tokens" in own else None,
        "peak_memory_bytes": max(memory, default=None),
    }


def _first(runs: Sequence[Run], key: str) -> Any:
    return next((run.manifest[key] for run in runs if isinstance(run.manifest.get(key), (int, float))), None)


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
