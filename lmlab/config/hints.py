"""A hint that names another option says which of the typed fields to leave out: those that the option has not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lmlab.config.catalogue import entries
from lmlab.config.fields import fields
from lmlab.config.parse import Override
from lmlab.config.tree import GROUPS
from lmlab.errors import Errors, LmlabError

CHOICE = re.compile(rf"\b({'|'.join(GROUPS)})=(\w+)")


def followable(error: LmlabError, typed: Sequence[Override], user: Path | None = None) -> LmlabError:
    """The error, `group=name` in its hint followed by `without group.field` for each typed field in the way."""
    if isinstance(error, Errors) or not error.hint:
        return error

    def with_fields(found: re.Match[str]) -> str:
        group, name = found.groups()
        entry = entries(group, user).get(name)
        if entry is None or entry.spec is None or f"{group}={name}" in [str(o) for o in typed]:
            return found[0]
        had = fields(entry.spec)
        dead = [o.key for o in typed if o.key.startswith(f"{group}.") and o.key.partition(".")[2] not in had]
        return found[0] + (f" without {' and '.join(dead)}" if dead else "")

    error.hint = CHOICE.sub(with_fields, error.hint)
    return error
