"""Which arm the others are compared with: the one named, else that of a bundle or sweep, else the finished one
nearest to the default composition."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from lmlab.errors import RunError, listed
from lmlab.report.arms import finished, run_key
from lmlab.report.axes import shown, typed_words
from lmlab.report.labels import NOT_SAID
from lmlab.report.model import Arm, Run
from lmlab.report.plans import Sweep
from lmlab.report.sources import Selection
from lmlab.runs.layout import parse_name

NAMED = 12


def find_baseline(arms: Sequence[Arm], text: str | None, selection: Selection) -> tuple[int, str]:
    """(the arm, who chose it: "typed", "bundle", "sweep", or "" for nobody).

    `text` names a run, words key=value, a label, an option. Of several sweeps and bundles the first that has its
    baseline here is taken. Raises RunError naming the arms: no arm fits `text`, or several do.
    """
    if text is not None and text.strip():
        return _named(arms, text.strip(), selection.sweeps), "typed"
    for own in selection.baselines:
        at = _of_sweep(arms, *own) if isinstance(own, tuple) else _of_bundle(arms, own)
        if at is not None:
            return at, "sweep" if isinstance(own, tuple) else "bundle"
    return _first(arms), ""


def _first(arms: Sequence[Arm]) -> int:
    """Of the arms with a finished run the one nearest to the default composition, of equally near ones the nearest to
    the other arms, then the first. An arm whose configuration was edited after it was trained comes last."""

    def rank(i: int) -> tuple[bool, bool, int, int, int]:
        done, edited = finished(arms[i].runs), any(run.edited for run in arms[i].runs)
        changed = (len([key for key in typed_words(run) if key.partition(".")[0] not in NOT_SAID]) for run in done)
        apart = sum(arms[i].values.get(axis) != value for arm in arms for axis, value in arm.values.items())
        return not done, edited, min(changed, default=0), apart, i

    return min(range(len(arms)), key=rank)


def _of_sweep(arms: Sequence[Arm], sweep: Sweep, arm_id: str) -> int | None:
    """The arm that holds most of the sweep's runs of that name; those of an edited configuration count last."""
    keys = {run_key(member.path, member.run) for member in sweep.members if member.arm == arm_id}
    held = [[run for run in arm.runs if run_key(run.path, run.name) in keys] for arm in arms]
    weights = [(sum(not run.edited for run in runs), len(runs)) for runs in held]
    best = max(range(len(arms)), key=lambda i: weights[i], default=None)
    return best if best is not None and weights[best][1] else None


def _of_bundle(arms: Sequence[Arm], own: Path | str) -> int | None:
    if isinstance(own, str):
        return next((i for i, arm in enumerate(arms) if arm.label == own), None)
    place = own.resolve()
    return next((i for i, arm in enumerate(arms) if any(r.path and r.path.resolve() == place for r in arm.runs)), None)


# ---------------------------------------------------------------- what a person typed


def _named(arms: Sequence[Arm], text: str, sweeps: Sequence[Sweep]) -> int:
    words = [word for word in re.split(r"[\s,]+(?![^\[]*\])", text) if word]
    for fits in (
        [i for i, arm in enumerate(arms) if arm.label == text],
        [i for i, arm in enumerate(arms) if any(_is_run(run, text) for run in arm.runs)],
        [i for sweep in sweeps if (i := _of_sweep(arms, sweep, text)) is not None],
        [i for i, arm in enumerate(arms) if sorted(arm.label.split()) == sorted(words)],
        [i for i, arm in enumerate(arms) if all(_has(arm, word) for word in words)],
    ):
        if fits:
            return _only(arms, text, sorted(set(fits)))
    there = listed((arm.label for arm in arms), NAMED)
    raise RunError(f"`--baseline {text}` is no arm and no run of this report", f"the arms: {there}")


def _only(arms: Sequence[Arm], text: str, fits: Sequence[int]) -> int:
    if len(fits) > 1:
        several = "; ".join(arms[i].label for i in fits[:NAMED]) + ("; …" if len(fits) > NAMED else "")
        raise RunError(f"`--baseline {text}` fits several arms", f"name one of them by more words: {several}")
    return fits[0]


def _is_run(run: Run, text: str) -> bool:
    name = parse_name(run.name)
    by_hash = re.fullmatch(r"[0-9a-f]{4,8}", text) is not None and name.hash.startswith(text)
    by_path = run.path is not None and Path(text).exists() and Path(text).resolve() == run.path.resolve()
    return text in (run.name, name.slug) or by_hash or by_path


def _has(arm: Arm, word: str) -> bool:
    """Whether `key=value` is so in the arm, by its axes or its whole configuration; a bare `layernorm`: as any part."""
    key, mark, value = word.partition("=")
    if not mark:
        parts = [v for values in (arm.values, arm.config) for k, v in values.items() if "." not in k]
        return any(shown(v).lower() == word.lower() for v in parts)
    key = {"lr": "optim.lr"}.get(key, key)
    there = [values[key] for values in (arm.values, arm.config) if key in values]
    return any(shown(v).lower() == value.lower() or (_is_float(value) and v == float(value)) for v in there)


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
