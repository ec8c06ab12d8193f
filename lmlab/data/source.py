"""What a run is trained and evaluated on: token files, examples of a task, or a mixture of both, all alike from here.

The option of `data` names the function that opens it (`opens` of its spec). Nothing here imports torch: a plan needs
counts, a sweep needs fingerprints.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lmlab.data.spec import DataSpec, Part
from lmlab.data.tokenizer import Tokenizer
from lmlab.registry import Spec

if TYPE_CHECKING:
    from lmlab.data.batches import Batch
    from lmlab.data.prepare import Prepared
    from lmlab.data.tasks.source import TaskSource


class Batches(Protocol):
    """Endless training batches."""

    def batch(self, k: int) -> Batch:
        """Batch k: a pure function of k and of what the batches were made with."""

    def epoch(self, k: int) -> float:
        """How often what there is to read was read before batch k; 0 where every row is new."""


class Split(Protocol):
    """What is evaluated on, the same whatever the batch size."""

    @property
    def n_targets(self) -> int:
        """Targets that count."""

    def batches(
        self, *, rows: int, seq_len: int, packing: str, start: int, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        """All of it, or its first `max_tokens` targets, `rows` rows at once."""


class Source(Protocol):
    """`fingerprint` is of what is trained and evaluated on: the same everywhere. `info` is for a manifest."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def tokenizer_hash(self) -> str: ...

    @property
    def info(self) -> dict[str, Any]: ...

    @property
    def val(self) -> Split: ...

    @property
    def test(self) -> Split: ...

    @property
    def lossless(self) -> bool:
        """Whether bits per byte of val can be told; why not is `lossy_why`."""

    @property
    def lossy_why(self) -> str: ...

    @property
    def corpora(self) -> list[Prepared]:
        """The corpora among it, in order."""

    @property
    def tasks(self) -> dict[str, TaskSource]:
        """The tasks whose answers are counted in evaluations, by name in a mixture; "" for one alone."""

    def batches(self, *, rows: int, seq_len: int, seed: int, packing: str) -> Batches: ...

    def epochs(self, n_tokens: int) -> float:
        """How often training on so many tokens reads what there is; 0 where every row is new."""

    def said(self) -> str:
        """How much there is, for the plan: `2,941,000 tokens`."""


@dataclass(frozen=True)
class Place:
    """Where a source is opened, and for what: `seq_len` is the length of its rows, `trained` a tokenizer to use in
    place of the one that the experiment makes, `parts` those of a mixture. progress(what, share done or None)."""

    cache: Path
    seq_len: int
    progress: Callable[[str, float | None], None] | None = None
    force: bool = False
    trained: Tokenizer | None = None
    parts: Sequence[Part] = ()


def open_source(data: DataSpec, tokenizer: Spec, place: Place) -> Source:
    """Raises DataError, ConfigError: no such data, too short a row, a tokenizer that does not fit."""
    module, _, name = data.opens.partition(":")
    source: Source = getattr(importlib.import_module(module), name)(data, tokenizer, place)
    return source
