"""What else differs between arms besides what is compared, one line each, with both values and the arms.

A training key (learning rate, data, steps, …) that differs is no confound where the report holds an arm that differs
from this one in that key alone and has the baseline's value: then its effect can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmlab.report.arms import finished, seed_key
from lmlab.report.axes import canonical, differing, shown, typed_keys
from lmlab.report.facts import (
    FACTS,
    Fact,
    code,
    corpus,
    corpus_id,
    fingerprint,
    kernels,
    tokenizer,
    tokenizer_id,
    tokens,
    version,
)
from lmlab.report.model import Arm, Run
from lmlab.report.tables import seed_text

TRAINING = ("optim", "schedule", "train", "data", "tokenizer")
NAMES_PER_LINE = 12
BUDGET_FRAC = 0.01
NAMED = {"optim.lr": "learning rate (optim.lr)"}


def confounds(arms: Sequence[Arm], baseline: int) -> list[str]:
    """All lines, those that matter most first."""
    if not arms:
        return []
    measured = [arm for arm in arms if finished(arm.runs)]
    base = arms[baseline] if finished(arms[baseline].runs) or not measured else measured[0]
    found = Comparison(arms, base)
    lines = [*_data_lines(found), *_key_lines(found), *_fact_lines(found)]
    return [*lines, *_budget_lines(found), *_seed_lines(found), *_within_lines(found)]


class Comparison:
    """The arms against one of them: which keys differ, and which of those are what the report is about."""

    def __init__(self, arms: Sequence[Arm], base: Arm) -> None:
        self.arms, self.base = arms, base
        self.where = "the baseline" if base.is_baseline else base.label
        self.keys = differing([arm.config for arm in arms], typed_keys([run for arm in arms for run in arm.runs]))
        self._known = {self._point(arm.config) for arm in arms}
        self.measured = [arm for arm in arms if finished(arm.runs) and arm is not base] if finished(base.runs) else []

    def _point(self, config: dict[str, Any], key: str = "", value: str = "") -> tuple[str, ...]:
        return tuple(value if k == key else canonical(config.get(k)) for k in self.keys)

    def differs(self, arm: Arm, key: str) -> bool:
        return canonical(arm.config.get(key)) != canonical(self.base.config.get(key))

    def is_compared(self, arm: Arm, key: str) -> bool:
        """Whether the report holds the arm that has the baseline's value of this key, and else is as `arm`."""
        return self._point(arm.config, key, canonical(self.base.config.get(key))) in self._known

    def explains(self, arm: Arm, causes: Sequence[str]) -> bool:
        """Whether keys among `causes` differ, all of them being what is compared."""
        keys = [key for key in self.keys if _is_among(key, causes) and self.differs(arm, key)]
        return bool(keys) and all(self.is_compared(arm, key) for key in keys)

    def line(self, what: str, values: Sequence[tuple[Arm, str]], base: str, tail: str = "") -> str | None:
        """`what: 0.001 in A, B; 0.01 in C; 0.003 in the baseline`; None when no arm is left to name."""
        by_value: dict[str, list[str]] = {}
        for arm, value in values:
            by_value.setdefault(value, []).append(arm.label)
        if not by_value:
            return None
        left, unnamed, parts = NAMES_PER_LINE, 0, []
        for value, labels in by_value.items():
            if left > 0:
                parts.append(f"{value} in {_names(labels, left)}")
            else:
                unnamed += len(labels)
            left -= len(labels)
        parts += [f"other values in {unnamed} more"] if unnamed else []
        return f"{what}: {'; '.join(parts)}; {base} in {self.where}{tail}"


def _names(labels: Sequence[str], limit: int) -> str:
    more = len(labels) - limit
    return ", ".join(labels[:limit]) + (f", … and {more} more" if more > 0 else "")


def _is_among(key: str, causes: Sequence[str]) -> bool:
    return any(key == cause or key.startswith(f"{cause}.") for cause in causes)


# ---------------------------------------------------------------- data


def _data_lines(found: Comparison) -> Iterator[str]:
    """Other data and another tokenizer, said apart: bits per byte outlive the second, nothing outlives the first."""
    checks = (
        ("data", corpus, corpus_id, ("data",), " (bits/byte compare only on the same text)"),
        ("tokenizer", tokenizer, tokenizer_id, ("tokenizer", "data"), " (bits/byte compare, nats/token do not)"),
    )
    for what, text, identity, causes, tail in checks:
        base_run = next(iter(finished(found.base.runs)), None)
        if base_run is None:
            return
        known = identity(base_run)
        other = [
            (arm, text(finished(arm.runs)[0], base_run))
            for arm in found.measured
            if identity(finished(arm.runs)[0]) not in (None, known) and not found.explains(arm, causes)
        ]
        if known is not None and (line := found.line(what, other, text(base_run, base_run), tail)):
            yield line
    if line := _fingerprint_line(found):
        yield line


def _fingerprint_line(found: Comparison) -> str | None:
    """Same corpus and tokenizer, yet other token files (another split, a cut, an older preparation)."""
    base, other = _one(found.base, fingerprint), []
    by_keys = [key for key in found.keys if _is_among(key, ("data", "tokenizer"))]
    for arm in found.measured:
        run, ref = finished(arm.runs)[0], finished(found.base.runs)[0]
        same = corpus_id(run) == corpus_id(ref) and tokenizer_id(run) == tokenizer_id(ref)
        mine = _one(arm, fingerprint)
        if same and mine not in (None, base) and not any(found.differs(arm, key) for key in by_keys):
            other.append((arm, mine))
    return found.line("data fingerprint", other, base or "unknown")


# ---------------------------------------------------------------- keys


def _key_lines(found: Comparison) -> Iterator[str]:
    """Training keys that differ and are not what is compared. Data, tokenizer and length are told by what came of
    them, where that is known."""
    told = {"data": corpus_id, "tokenizer": tokenizer_id, "train": tokens}
    for key in found.keys:
        head = key.partition(".")[0]
        if head not in TRAINING:
            continue
        of = told.get(head) if head != "train" or key.startswith("train.max_") else None
        values = [
            (arm, shown(arm.config.get(key)))
            for arm in found.arms
            if arm is not found.base and found.differs(arm, key) and not found.is_compared(arm, key)
            if not (of and _told(arm, found.base, of))
        ]
        if line := found.line(NAMED.get(key, key), values, shown(found.base.config.get(key))):
            yield line


def _told(arm: Arm, base: Arm, of: Callable[[Run], str | None]) -> bool:
    """Whether a fact of finished runs differs, which then has a line of its own."""
    mine, other = _one(arm, of), _one(base, of)
    return None not in (mine, other) and mine != other


# ---------------------------------------------------------------- facts


def _fact_lines(found: Comparison) -> Iterator[str]:
    yield from _code_lines(found)
    for fact in FACTS:
        base = _one(found.base, fact.of)
        values = [
            (arm, mine)
            for arm in found.measured
            if (mine := _one(arm, fact.of)) not in (None, base) and not found.explains(arm, fact.causes)
        ]
        if base is not None and (line := found.line(fact.name, values, base, fact.tail)):
            yield line
    yield from _kernel_lines(found)


def _one(arm: Arm, of: Callable[[Run], str | None]) -> str | None:
    """What the arm's finished runs tell; several values joined."""
    values = dict.fromkeys(value for run in finished(arm.runs) if (value := of(run)) is not None)
    return " and ".join(values) or None


def _code_lines(found: Comparison) -> Iterator[str]:
    """Other code, by its hash; of arms with other plug-ins, which enter that hash, by lmlab's version and git."""
    base_runs = finished(found.base.runs)
    for of, alike in ((code, True), (version, False)):
        base = _one(found.base, of)
        arms = [a for a in found.measured if (finished(a.runs)[0].plugins == base_runs[0].plugins) is alike]
        values = [(arm, mine) for arm in arms if (mine := _one(arm, of)) not in (None, base)]
        if line := found.line("code version", values, base or "unknown"):
            yield line


def _kernel_lines(found: Comparison) -> Iterator[str]:
    """The path of each operation. Where an operation is not used in one of the arms there is nothing to compare."""
    causes = ("kernels", "compile", "train.precision", "attn.backend")
    for operation in dict.fromkeys(op for arm in found.arms for run in finished(arm.runs) for op in kernels(run)):

        def of(run: Run, operation: str = operation) -> str | None:
            return kernels(run).get(operation)

        base = _one(found.base, of)
        values = [
            (arm, mine)
            for arm in found.measured
            if (mine := _one(arm, of)) not in (None, base) and not found.explains(arm, causes)
        ]
        if base is not None and (line := found.line(f"kernel path of {operation}", values, base)):
            yield line


# ---------------------------------------------------------------- budget and seeds


def _budget_lines(found: Comparison) -> Iterator[str]:
    """Parameters and FLOPs per token more than 1 % away from the baseline's."""
    for key, what in (("parameters", "parameters"), ("flops_per_token", "FLOPs/token")):
        base = found.base.facts.get(key)
        if not base:
            continue
        values = [
            (arm, f"{value:,.0f} ({(value / base - 1) * 100:+.1f} %)".replace("-", "−"))
            for arm in found.arms
            if (value := arm.facts.get(key)) and abs(value - base) > BUDGET_FRAC * base
        ]
        if line := found.line(what, values, f"{base:,.0f}"):
            yield line


def _seed_lines(found: Comparison) -> Iterator[str]:
    def seeds(arm: Arm) -> str:
        return ", ".join(seed_text(run) for run in finished(arm.runs))

    def keys(arm: Arm) -> set[Any]:
        return {seed_key(run) for run in finished(arm.runs)}

    values = [(arm, seeds(arm)) for arm in found.measured if keys(arm) != keys(found.base)]
    if line := found.line("seeds", values, seeds(found.base)):
        yield line


def _within_lines(found: Comparison) -> Iterator[str]:
    """Seeds of one arm that were not made alike: their spread is then not that of seeds alone."""
    checks = [*FACTS, Fact("code version", code), Fact("data fingerprint", fingerprint)]
    checks.append(Fact("kernel paths", lambda run: ", ".join(f"{k} {v}" for k, v in kernels(run).items()) or None))
    for fact in checks:
        mixed = []
        for arm in found.arms:
            by_value: dict[str, list[str]] = {}
            for run in finished(arm.runs):
                if (value := fact.of(run)) is not None:
                    by_value.setdefault(value, []).append(seed_text(run))
            if len(by_value) > 1:
                texts = (f"{value} (seed {', '.join(seeds)})" for value, seeds in by_value.items())
                mixed.append(f"{arm.label}: {', '.join(texts)}")
        if mixed:
            more = f"; … and {len(mixed) - NAMES_PER_LINE} more" if len(mixed) > NAMES_PER_LINE else ""
            yield f"{fact.name} differs within {'; '.join(mixed[:NAMES_PER_LINE])}{more}{fact.tail}"
