"""Errors a user can cause or meet, and how they are printed.

Every one is two lines: `error:` what is wrong, with the full key and both values; `hint:` the remedy. No traceback is
shown unless `--debug` is given. The class carries the exit status: 1 the run failed, 2 usage or configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_SIGINT, EXIT_SIGTERM = 0, 1, 2, 130, 143


class LmlabError(Exception):
    """What is wrong, and what to do about it. `exit_code` is the status the command line ends with."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"error: {self.message}" + (f"\nhint: {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[type[LmlabError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class ConfigError(LmlabError):
    """A key, a value or a combination of parts that can't be used."""


class DataError(LmlabError):
    """A corpus, tokenizer or token file that is missing, empty, damaged or too short."""


class RunError(LmlabError):
    """A run directory or checkpoint that is missing, damaged or in use."""


class TrainingFailed(LmlabError):
    """Training started and could not go on: out of memory, disk full, diverged."""

    exit_code = EXIT_FAILED


class Errors(LmlabError):
    """Several errors at once, printed one after the other."""

    def __init__(self, errors: Sequence[LmlabError]) -> None:
        super().__init__("; ".join(e.message for e in errors))
        self.errors = tuple(errors)
        self.exit_code = max(e.exit_code for e in errors)

    def __str__(self) -> str:
        return "\n".join(str(e) for e in self.errors)

    def __reduce__(self) -> tuple[type[Errors], tuple[tuple[LmlabError, ...]]]:  # type: ignore[override]
        return Errors, (self.errors,)


def raise_all(errors: Sequence[LmlabError]) -> None:
    """Raise nothing, the one error, or all of them together."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise Errors(errors)


def in_one_line(error: BaseException) -> str:
    """What is wrong, without the hint: for tables and manifests."""
    if isinstance(error, LmlabError):
        return error.message
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def listed(names: Iterable[str], limit: int = 8) -> str:
    """`a, b, c`; long lists are cut at `limit` with an ellipsis."""
    names = list(names)
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
