"""A mixture: each row of a training batch is of one part, drawn with the parts' shares.

Which part row r of batch k is of is a pure function of (seed, k, r), and so is what stands in it: of a corpus row r of
that corpus' own batch k, of a task the next of the examples that are drawn for the batch. val and test are the first
part's; of tasks the answers are counted beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmlab.data.prepare import Prepared, corpus, digest
from lmlab.data.source import Place, Source, open_source
from lmlab.data.spec import Mix, Part
from lmlab.data.tasks.source import TaskSource
from lmlab.data.tokenizer import Tokenizer
from lmlab.data.tokens import TokenFile
from lmlab.registry import Spec, make


@dataclass(frozen=True)
class Mixed:
    """A `Source` (lmlab/data/source.py) of several."""

    spec: Mix
    parts: list[Part]
    sources: list[Source]

    @property
    def first(self) -> Prepared:
        found = self.sources[0]
        assert isinstance(found, Prepared)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        return self.first.tokenizer

    @property
    def tokenizer_hash(self) -> str:
        return self.first.tokenizer_hash

    @property
    def val(self) -> TokenFile:
        return self.first.val

    @property
    def test(self) -> TokenFile:
        return self.first.test

    @property
    def lossless(self) -> bool:
        return self.first.lossless

    @property
    def lossy_why(self) -> str:
        return self.first.lossy_why

    @property
    def corpora(self) -> list[Prepared]:
        return [corpus for source in self.sources for corpus in source.corpora]

    @property
    def tasks(self) -> dict[str, TaskSource]:
        found = zip(self.parts, self.sources, strict=True)
        return {part.label: task for part, source in found for task in source.tasks.values()}

    @property
    def fingerprint(self) -> str:
        return digest("mix", [[p.share, s.fingerprint] for p, s in zip(self.parts, self.sources, strict=True)])

    @property
    def info(self) -> dict[str, Any]:
        own = [{"part": p.label, "share": p.share, **s.info} for p, s in zip(self.parts, self.sources, strict=True)]
        whole = {"corpus": "+".join(part.label for part in self.parts), "mix": own}
        return self.first.info | whole | {"fingerprint": self.fingerprint}

    def batches(self, *, rows: int, seq_len: int, seed: int, packing: str) -> Any:
        return make(self.spec, self, rows=rows, seq_len=seq_len, seed=seed, packing=packing)

    def epochs(self, n_tokens: int) -> float:
        """Of the corpus that is read most often."""
        return max(s.epochs(round(p.share * n_tokens)) for p, s in zip(self.parts, self.sources, strict=True))

    def said(self) -> str:
        return " + ".join(f"{p.share:g} {p.label} ({s.said()})" for p, s in zip(self.parts, self.sources, strict=True))


def mixed(spec: Mix, tokenizer: Spec, place: Place) -> Mixed:
    """The first part by its own tokenizer, all others by the same one."""
    first, *others = place.parts
    opened: list[Source] = [corpus(first.spec, tokenizer, place)]
    there = dataclasses.replace(place, trained=opened[0].tokenizer)
    opened += [open_source(part.spec, tokenizer, there) for part in others]
    return Mixed(spec, list(place.parts), opened)


def part_of_rows(shares: list[float], seed: int, k: int, rows: int) -> np.ndarray:
    """(rows,) int64: the part of each row of batch k, the same on every machine."""
    drawn = hashlib.shake_256(f"lmlab mix {seed} {k}".encode()).digest(8 * rows)
    place = np.frombuffer(drawn, dtype="<u8") / 2.0**64
    return np.minimum(np.searchsorted(np.cumsum(shares), place, side="right"), len(shares) - 1)
