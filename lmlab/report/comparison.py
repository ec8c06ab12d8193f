"""Arms against one of them: which keys of their configurations differ, which of those the report shows apart, and the
lines that name what differs with both values and the arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lmlab.report.arms import finished
from lmlab.report.axes import canonical, differing, typed_keys
from lmlab.report.model import Arm

TRAINING = ("init", "optim", "schedule", "train", "data", "tokenizer", "kernels", "compile")
NAMES_PER_LINE = 4
ALONE = "all that differs"


def comparison(arms: Sequence[Arm], baseline: int) -> Comparison:
    """The arms against the baseline; while that has no finished run, against the first arm that has."""
    measured = [arm for arm in arms if finished(arm.runs)]
    return Comparison(arms, arms[baseline] if finished(arms[baseline].runs) or not measured else measured[0])


class Comparison:
    """The arms against one of them: which keys differ, and which of those are what the report is about."""

    def __init__(self, arms: Sequence[Arm], base: Arm) -> None:
        self.arms, self.base = arms, base
        self.where = "the baseline" if base.is_baseline else base.label
        self.keys = differing([arm.config for arm in arms], typed_keys([run for arm in arms for run in arm.runs]))
        self._known = {self._point(arm.config) for arm in arms if finished(arm.runs)}
        self.measured = [arm for arm in arms if finished(arm.runs) and arm is not base] if finished(base.runs) else []

    def _point(self, config: dict[str, Any], key: str = "", value: str = "") -> tuple[str, ...]:
        return tuple(value if k == key else canonical(config.get(k)) for k in self.keys)

    def training_keys(self) -> list[str]:
        return [key for key in self.keys if key.partition(".")[0] in TRAINING]

    def differs(self, arm: Arm, key: str) -> bool:
        return canonical(arm.config.get(key)) != canonical(self.base.config.get(key))

    def differing_among(self, arm: Arm, causes: Sequence[str]) -> bool:
        return any(is_among(key, causes) and self.differs(arm, key) for key in self.keys)

    def is_alone(self, arm: Arm, causes: Sequence[str]) -> bool:
        """Whether nothing else differs between the two configurations than keys among `causes`."""
        own = [key for key in self.keys if self.differs(arm, key)]
        return bool(own) and all(is_among(key, causes) for key in own)

    def is_compared(self, arm: Arm, key: str) -> bool:
        """Whether a finished arm has the baseline's value of this key, and else is as `arm`."""
        return self._point(arm.config, key, canonical(self.base.config.get(key))) in self._known

    def has_own_base(self, arm: Arm, key: str) -> bool:
        """Whether a finished arm has this one's value of the key, and else is as the baseline."""
        return self._point(self.base.config, key, canonical(arm.config.get(key))) in self._known

    def lines(
        self, what: str, values: Sequence[tuple[Arm, str]], base: str, causes: Sequence[str], tail: str = ""
    ) -> Iterator[str]:
        """One line for the arms where more differs, and one for those where this is all."""
        alone = [pair for pair in values if self.is_alone(pair[0], causes)]
        rest = [pair for pair in values if all(pair is not other for other in alone)]
        for some, words in ((rest, [tail]), (alone, [ALONE, tail])):
            said = "; ".join(word for word in words if word)
            if line := self.line(what, some, base, f" ({said})" if said else ""):
                yield line

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
                parts.append(f"{value} in {named(labels, left)}")
            else:
                unnamed += len(labels)
            left -= len(labels)
        parts += [f"other values in {unnamed} more"] if unnamed else []
        return f"{what}: {'; '.join(parts)}; {base} in {self.where}{tail}"


def named(labels: Sequence[str], limit: int = NAMES_PER_LINE) -> str:
    """`A, B, C, D, … and 5 more`."""
    more = len(labels) - limit
    return ", ".join(labels[:limit]) + (f", … and {more} more" if more > 0 else "")


def is_among(key: str, causes: Sequence[str]) -> bool:
    return any(key == cause or key.startswith(f"{cause}.") for cause in causes)
