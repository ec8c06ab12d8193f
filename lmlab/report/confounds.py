"""What else differs between arms besides what is compared, one line each, with both values and the arms.

A training key (learning rate, data, steps, …) that alone differs is named with "(all that differs)". Beside other
differences it is a confound, unless the report holds a finished arm that differs from this one in that key alone and
has the baseline's value: then its effect can be seen, and a note says that Δ holds it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmlab.report.arms import finished, seed_key
from lmlab.report.axes import shown
from lmlab.report.comparison import NAMES_PER_LINE, Comparison, comparison
from lmlab.report.facts import (
    FACTS,
    Fact,
    code,
    corpus,
    corpus_id,
    fingerprint,
    kernels,
    text_bytes,
    tokenizer,
    tokenizer_id,
    tokens,
    version,
)
from lmlab.report.model import Arm, Run
from lmlab.report.tables import seed_text

BUDGET_FRAC = 0.01
NAMED = {"optim.lr": "learning rate (optim.lr)", "init.run": "starting weights (init.run)"}


def confounds(arms: Sequence[Arm], baseline: int) -> list[str]:
    """All lines, those that matter most first."""
    if not arms:
        return []
    found = comparison(arms, baseline)
    lines = [*_data_lines(found), *_key_lines(found), *_fact_lines(found)]
    return [*lines, *_budget_lines(found), *_seed_lines(found), *_within_lines(found)]


def held_in_delta(arms: Sequence[Arm], baseline: int) -> Iterator[str]:
    """Of each training key: in how many arms Δ holds its effect beside that of what else differs, which another arm
    than the baseline shows apart."""
    found = comparison(arms, baseline)
    for key in found.training_keys():
        held = [
            arm
            for arm in found.measured
            if arm.delta is not None and arm.delta.mean is not None and found.differs(arm, key)
            if found.is_compared(arm, key) and not found.is_alone(arm, (key,))
        ]
        many, them, their = ("arms", "them", "their") if len(held) > 1 else ("arm", "it", "its")
        remedy = f"compare {them} with the arm of {their} own {key}"
        if not all(found.has_own_base(arm, key) for arm in held):
            remedy = f"the {many} of the baseline's {key} show{'' if len(held) > 1 else 's'} it apart"
        if held:
            yield f"Δ holds the effect of {key} too in {len(held)} {many}: {remedy}"


# ---------------------------------------------------------------- data


def _data_lines(found: Comparison) -> Iterator[str]:
    """Other data and another tokenizer, said apart: bits per byte outlive the second, nothing outlives the first."""
    checks = (
        ("data", corpus, corpus_id, ("data",), "bits/byte compare only on the same text"),
        ("tokenizer", tokenizer, tokenizer_id, ("tokenizer",), "bits/byte compare, nats/token do not"),
    )
    base_run = next(iter(finished(found.base.runs)), None)
    if base_run is None:
        return
    for what, text, identity, causes, tail in checks:
        known = identity(base_run)
        runs = [(arm, finished(arm.runs)[0]) for arm in found.measured]
        other = [(arm, text(run, base_run)) for arm, run in runs if identity(run) not in (None, known)]
        if known is not None:
            yield from found.lines(what, other, text(base_run, base_run), causes, tail)
    if line := _fingerprint_line(found):
        yield line
    if line := _text_line(found):
        yield line


def _fingerprint_line(found: Comparison) -> str | None:
    """Same corpus and tokenizer, yet other token files (another split, a cut, an older preparation)."""
    base, other = _one(found.base, fingerprint), []
    for arm in found.measured:
        run, ref = finished(arm.runs)[0], finished(found.base.runs)[0]
        same = corpus_id(run) == corpus_id(ref) and tokenizer_id(run) == tokenizer_id(ref)
        mine = _one(arm, fingerprint)
        if same and mine not in (None, base):
            other.append((arm, str(mine)))
    return found.line("data fingerprint", other, base or "unknown")


def _text_line(found: Comparison) -> str | None:
    """With another tokenizer the same number of tokens is another amount of text."""

    def seen(arm: Arm) -> float:
        return next((size for run in finished(arm.runs) if (size := text_bytes(run)) is not None), 0.0)

    def words(size: float) -> str:
        return f"about {float(f'{size:.3g}'):,.0f} bytes"

    base = seen(found.base)
    others = [arm for arm in found.measured if _one(arm, tokenizer_id) != _one(found.base, tokenizer_id)]
    values = [(arm, words(seen(arm))) for arm in others if seen(arm) and abs(seen(arm) - base) > BUDGET_FRAC * base]
    return found.line("text seen", values, words(base)) if base else None


# ---------------------------------------------------------------- keys


def _key_lines(found: Comparison) -> Iterator[str]:
    """Training keys that differ, but for those whose effect a finished arm shows apart. What data and tokenizer were is
    told by what came of them, and a length only matters where the tokens differ."""
    for key in found.training_keys():
        values = [
            (arm, shown(arm.config.get(key)))
            for arm in found.arms
            if arm is not found.base and found.differs(arm, key) and not _told(arm, found.base, key)
            if found.is_alone(arm, (key,)) or not found.is_compared(arm, key)
        ]
        yield from found.lines(NAMED.get(key, key), values, shown(found.base.config.get(key)), (key,))


def _told(arm: Arm, base: Arm, key: str) -> bool:
    """Whether a fact of finished runs says all that this key could: other data, another tokenizer, equal tokens."""
    head = key.partition(".")[0]
    of: Callable[[Run], str | None] | None = {"data": corpus_id, "tokenizer": tokenizer_id}.get(head)
    of = tokens if key.startswith("train.max_") else of
    if of is None:
        return False
    mine, other = _one(arm, of), _one(base, of)
    return None not in (mine, other) and (mine == other) is (of is tokens)


# ---------------------------------------------------------------- facts


def _fact_lines(found: Comparison) -> Iterator[str]:
    yield from _code_lines(found)
    for fact in FACTS:
        base = _one(found.base, fact.of)
        values = [
            (arm, mine)
            for arm in found.measured
            if (mine := _one(arm, fact.of)) not in (None, base) and not found.differing_among(arm, fact.causes)
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
    """The path of each operation. Where an operation is not used in one of the arms there is nothing to compare; where
    the kernels were chosen otherwise, or the blocks compiled, that key says it."""
    for operation in dict.fromkeys(op for arm in found.arms for run in finished(arm.runs) for op in kernels(run)):

        def of(run: Run, operation: str = operation) -> str | None:
            return kernels(run).get(operation)

        base = _one(found.base, of)
        values = [
            (arm, mine)
            for arm in found.measured
            if (mine := _one(arm, of)) not in (None, base) and not found.differing_among(arm, ("kernels", "compile"))
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
