"""What becomes of arms beyond the length they were trained on, from `lmlab eval --long-context`: effective lengths,
losses beside those at the trained length, and what of it does not compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lmlab.report.comparison import named
from lmlab.report.long_lines import lines, maps
from lmlab.report.long_read import KEY
from lmlab.report.long_series import NEEDLE, Measured, Series, average, measured, reasons, series, token_set
from lmlab.report.long_tables import answers, chance_of, scores_table, short_table, speed_table, text_table
from lmlab.report.model import Arm, LongContext
from lmlab.report.why import number as short
from lmlab.runs.intervals import wilson

FEW_DOCUMENTS = 5
SLIDING, APART = "sliding_loss", "loss"
CUT = 12  # lines of one kind


def long_context(arms: Sequence[Arm]) -> LongContext | None:
    """The section, or None where no run was evaluated so."""
    found = measured(arms)
    if not found:
        return None
    all_of = series(arms, found)
    several = sum(bool(one.bodies) for one in found) > 1
    tables = [scores_table(arms, all_of), text_table(arms, all_of), speed_table(arms, all_of)]
    return LongContext(
        tables=[table for table in tables if table.rows],
        short=short_table(arms, all_of),
        findings=list(_findings(arms, all_of)),
        notes=[*_unlike(arms, found), *_noncausal(arms, found), *_notes(arms, found, all_of)],
        unlike=_unlike_words(arms, found),
        lines=lines(arms, all_of, several=several),
        maps=list(maps(all_of)),
    )


# ---------------------------------------------------------------- what stands out


def _findings(arms: Sequence[Arm], all_of: Sequence[Series]) -> Iterator[str]:
    """Of each arm how the best scaling does at the longest length, against the trained one."""
    by_arm: dict[int, list[Series]] = {}
    for one in all_of:
        by_arm.setdefault(one.arm, []).append(one)
    for i, of_arm in list(by_arm.items())[:CUT]:
        length = max((n for one in of_arm for n in one.cells), default=0)
        known = {one.name: ratio for one in of_arm if (ratio := _ratio(one, length)) is not None}
        if length <= of_arm[0].trained or not known:
            continue
        best = min(known, key=lambda name: known[name])
        times, base = f"{length / of_arm[0].trained:.3g} × the trained length", _base(of_arm)
        more = f"; of {len(known)} scalings the lowest, {_worst(known)}" if len(known) > 1 else ""
        who = best if len(by_arm) > 1 or len(known) > 1 else arms[i].label
        yield f"{who}: perplexity at {length:,} tokens, {times}, is {short(known[best])} times that at {base:,}{more}"


def _base(of_arm: Sequence[Series]) -> int:
    """The length that ratios of an arm are to."""
    return max((one.anchor for one in of_arm if one.anchor is not None), default=of_arm[0].trained)


def _ratio(one: Series, length: int) -> float | None:
    ratios = one.ratios(length, SLIDING) or one.ratios(length, APART)
    found = average(ratios)
    return found.mean if found is not None else None


def _worst(known: dict[str, float]) -> str:
    worst = max(known, key=lambda name: known[name])
    return f"the highest is {worst} with {short(known[worst])}"


# ---------------------------------------------------------------- what does not compare


def _unlike_words(arms: Sequence[Arm], found: Sequence[Measured]) -> str:
    words = ["token sets differ: losses of different arms do not compare"] if len(_sets(found)) > 1 else []
    words += ["arms that are not causal do not compare with the others"] if any(_noncausal(arms, found)) else []
    return "; ".join(words)


def _noncausal(arms: Sequence[Arm], found: Sequence[Measured]) -> Iterator[str]:
    names = [arms[one.arm].label for one in found if one.bodies and arms[one.arm].facts.get("noncausal")]
    if names:
        yield f"not causal, so that losses here are of tokens that see later ones: {named(names)}"


def _sets(found: Sequence[Measured]) -> Counter[str]:
    return Counter(token_set(one.bodies[0]) for one in _having_text(found))


def _having_text(found: Sequence[Measured]) -> list[Measured]:
    """Not those evaluated on tasks alone."""
    return [one for one in found if one.bodies and isinstance(one.bodies[0][KEY].get("tokens"), int)]


def _unlike(arms: Sequence[Arm], found: Sequence[Measured]) -> Iterator[str]:
    """Arms measured on different token sets, by what differs; arms trained at different lengths."""
    told: dict[str, list[str]] = {}
    trained: dict[str, list[str]] = {}
    for one in _having_text(found):
        told.setdefault(_set_words(one), []).append(arms[one.arm].label)
    for one in (one for one in found if one.bodies):
        trained.setdefault(f"{one.bodies[0][KEY]['trained_length']:,}", []).append(arms[one.arm].label)
    if len(_sets(found)) > 1:
        words = "; ".join(f"{said} in {named(labels)}" for said, labels in told.items())
        yield f"losses of arms on different token sets can't be compared, only each with itself by length: {words}"
    if len(trained) > 1:
        words = "; ".join(f"{n} in {named(labels)}" for n, labels in trained.items())
        yield f"trained at different lengths, which ratios and effective lengths are of: {words}"


def _set_words(one: Measured) -> str:
    """`32,768 tokens of 8 documents of sotu val [f1f1f1f1]`"""
    body = one.bodies[0]
    inner = body[KEY]
    tokens, n = inner.get("tokens"), inner.get("n_documents")
    said = f"{tokens:,} tokens"
    said += f" of {n:,} document{'' if n == 1 else 's'}" if isinstance(n, int) else ""
    where = " ".join(str(word) for word in (body.get("data"), body.get("split")) if word)
    mark = f" [{str(body['fingerprint'])[:8]}]" if body.get("fingerprint") else ""
    return f"{said}{f' of {where}' if where else ''}{mark}"


def _notes(arms: Sequence[Arm], found: Sequence[Measured], all_of: Sequence[Series]) -> Iterator[str]:
    yield from _who(arms, found)
    yield from _of_text(arms, found)
    yield from _left_out(arms, found)
    yield from _not_available(all_of)
    yield from _alone(all_of)
    yield from _at_chance(all_of)
    if any(one.n_seeds > 1 for one in all_of):
        yield "± is the sample standard deviation over seeds; SE is over documents (windows, of copy), mean over seeds"
    elif all_of:
        yield "one seed of each arm; SE is over documents (windows, of copy)"


def _who(arms: Sequence[Arm], found: Sequence[Measured]) -> Iterator[str]:
    """Arms and runs without an evaluation, of another checkpoint, or on another token set than the arm's others."""
    known = {one.arm for one in found if one.bodies}
    if none := [arm.label for i, arm in enumerate(arms) if i not in known]:
        yield f"no evaluation of long contexts in {named(none)}: `lmlab eval RUN --long-context` makes one"
    for one in found:
        label = arms[one.arm].label
        if one.without:
            yield f"{label} is without {named(one.without)}: no evaluation of its last checkpoint"
        if one.apart:
            yield f"{label} is without {named(one.apart)}: measured on another token set than its other runs"
        unended = [run.name for run in one.runs if run.state not in ("finished", "imported")]
        if unended:
            steps = sorted({str(body.get("step")) for body in one.bodies})
            yield f"{label}: {named(unended)} did not finish, and was evaluated at step {', '.join(steps)}"


def _of_text(arms: Sequence[Arm], found: Sequence[Measured]) -> Iterator[str]:
    """Few documents, text that is no documents, looks at test."""
    few, streams, looks = {}, [], {}
    for one in found:
        for body in one.bodies[:1]:
            n, label = body[KEY].get("n_documents"), arms[one.arm].label
            if isinstance(n, int) and n < FEW_DOCUMENTS:
                few[label] = n
            if body[KEY].get("unit") == "stream":
                streams.append(label)
            if body.get("split") == "test":
                looks[label] = max((b.get("test_evaluations") or 1 for b in one.bodies), default=1)
    for n in sorted(set(few.values())):
        which = named([label for label, own in few.items() if own == n])
        words = f"only {n} document{'' if n == 1 else 's'}" if n else "no whole document"
        yield f"{words} in {which}: standard errors over fewer than {FEW_DOCUMENTS} tell little"
    if streams:
        yield f"measured on a stream in which documents follow each other, not on long documents: {named(streams)}"
    if looks:
        times = ", ".join(f"{n} time{'' if n == 1 else 's'} in {label}" for label, n in looks.items())
        yield f"the test split was looked at ({times}): what is chosen by these figures is chosen on test"


def _left_out(arms: Sequence[Arm], found: Sequence[Measured]) -> Iterator[str]:
    """Lengths that were asked for and not measured."""
    told: dict[str, list[str]] = {}
    for one in found:
        for body in one.bodies:
            for row in body[KEY]["left_out"]:
                labels = told.setdefault(f"{row.get('length')}: {row.get('why')}", [])
                labels += [arms[one.arm].label] if arms[one.arm].label not in labels else []
    yield from (f"not measured at {words} ({named(labels)})" for words, labels in list(told.items())[:CUT])


def _not_available(all_of: Sequence[Series]) -> Iterator[str]:
    """Lines that have no figure at some length, and why."""
    told: dict[tuple[str, str], list[str]] = {}
    for one in all_of:
        gone = reasons(one.missing)
        for task, missing in one.tasks_missing.items():
            gone |= {f"{task}: {why}": lengths for why, lengths in reasons(missing).items() if why not in gone}
        for why, lengths in gone.items():
            told.setdefault((", ".join(f"{n:,}" for n in lengths), why), []).append(one.name or "the arm")
    yield from (f"not available at {at} tokens: {why} ({named(names)})" for (at, why), names in told.items())


def _alone(all_of: Sequence[Series]) -> Iterator[str]:
    """Lines that have nothing at or below the trained length to stand beside."""
    names = [one.name or "the arm" for one in all_of if one.cells and one.anchor is None]
    if names:
        yield f"nothing was measured at or below the trained length of {named(names)}: longer figures stand alone"
    below = [one for one in all_of if one.anchor is not None and one.anchor < one.trained]
    if below:
        told = ", ".join(f"{one.anchor:,} in {one.name or 'the arm'}" for one in below[:CUT])
        yield f"the trained length itself was not measured; longer figures stand beside the longest below it: {told}"


def _at_chance(all_of: Sequence[Series]) -> Iterator[str]:
    """An effective length of a score that is no better than chance says nothing."""
    told: dict[str, list[str]] = {}
    for one in all_of:
        for what in [NEEDLE, *one.tasks]:
            correct, n = answers(one, what, one.trained)
            chance = chance_of(one, what)
            if n and chance is not None and wilson(correct, n)[0] <= chance:
                told.setdefault(what, []).append(f"{one.name + ': ' if one.name else ''}{correct} of {n}")
    for what, names in told.items():
        yield f"{what} is not above chance at the trained length, so its effective length says nothing: {named(names)}"
