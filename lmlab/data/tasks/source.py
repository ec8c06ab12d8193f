"""A task as what a run is trained and evaluated on: new examples at every step, the same ones at every evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lmlab.data.prepare import digest
from lmlab.data.spec import BPE, TaskSpec
from lmlab.data.tasks.base import Chance, Examples, Task
from lmlab.data.tasks.split import draw
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError, DataError
from lmlab.registry import Spec, make

if TYPE_CHECKING:
    from lmlab.data.batches import Batch
    from lmlab.data.prepare import Prepared
    from lmlab.data.source import Place

EVAL_SEED = 0  # val and test are the same for every seed of a run
LOSSY = "the targets are the answers of a task, not a text"


@dataclass(frozen=True)
class TaskSplit:
    """Examples that are evaluated on, and what guessing scores on them."""

    examples: Examples
    chance: Chance

    @property
    def n_targets(self) -> int:
        return int(self.examples.answers_BT.sum())

    def batches(
        self, *, rows: int, seq_len: int, packing: str, start: int, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        """The examples as they are, whatever the lengths and ends of texts; the last batch may be shorter."""
        from lmlab.data.tasks.batches import batch_of

        left = self.n_targets if max_tokens is None else max_tokens
        for first in range(0, len(self.examples.inputs_BT), rows):
            if left <= 0:
                return
            part = cut(self.examples, first, first + rows)
            ahead = part.answers_BT.cumsum().reshape(part.answers_BT.shape)
            yield batch_of(dataclasses.replace(part, answers_BT=part.answers_BT & (ahead <= left)))
            left -= int(part.answers_BT.sum())


@dataclass(frozen=True)
class TaskSource:
    """A `Source` (lmlab/data/source.py) of one task."""

    spec: TaskSpec
    task: Task
    tokenizer: Tokenizer
    seq_len: int

    lossless, lossy_why = False, LOSSY

    @cached_property
    def val(self) -> TaskSplit:
        return self._split("val")

    @cached_property
    def test(self) -> TaskSplit:
        return self._split("test")

    def _split(self, name: str) -> TaskSplit:
        examples = draw(self.task, name, EVAL_SEED, 0, self.spec.n_eval, self.seq_len)
        return TaskSplit(examples, self.task.chance(self.seq_len))

    @property
    def corpora(self) -> list[Prepared]:
        return []

    @property
    def tasks(self) -> dict[str, TaskSource]:
        return {"": self}

    @property
    def tokenizer_hash(self) -> str:
        return self.tokenizer.hash

    @cached_property
    def fingerprint(self) -> str:
        """Of the settings and of the examples that evaluate, which a generator that draws others has others of."""
        return digest("task", self.spec.name, dataclasses.asdict(self.spec), self.tokenizer.hash, *self._content())

    def _content(self) -> Iterator[str]:
        for split in (self.val, self.test):
            e = split.examples
            parts = (e.inputs_BT, e.targets_BT, e.answers_BT)
            yield hashlib.blake2b(
                b"".join(np.ascontiguousarray(p).tobytes() for p in parts), digest_size=12
            ).hexdigest()

    @property
    def info(self) -> dict[str, Any]:
        about = {"name": self.tokenizer.kind, "vocab_size": self.tokenizer.vocab_size, "hash": self.tokenizer.hash}
        about |= {"lossless": False, "lossy_why": self.lossy_why}
        splits = {
            name: {"examples": self.spec.n_eval, "tokens": self.spec.n_eval * self.seq_len, "answers": split.n_targets}
            for name, split in (("val", self.val), ("test", self.test))
        }
        own = {"corpus": self.spec.name, "task": self.spec.name, **dataclasses.asdict(self.spec)}
        own["chance"] = self.val.chance._asdict()
        return {**own, "tokenizer": about, "splits": splits, "fingerprint": self.fingerprint}

    def batches(self, *, rows: int, seq_len: int, seed: int, packing: str) -> Any:
        from lmlab.data.tasks.batches import TaskBatches

        return TaskBatches(self.task, rows=rows, seq_len=seq_len, seed=seed)

    def epochs(self, n_tokens: int) -> float:
        return 0.0

    def said(self) -> str:
        per_row = self.val.n_targets / self.spec.n_eval
        return f"drawn anew for every step, {per_row:g} answers in {self.seq_len} tokens"


def drawn(spec: TaskSpec, tokenizer: Spec, place: Place) -> TaskSource:
    """The task under its tokenizer. Raises ConfigError: rows too short; DataError: ids that the tokenizer has not."""
    if not spec.text:
        return with_ids(spec, tokenizer, place)
    if place.trained is None and isinstance(tokenizer, BPE):
        raise ConfigError(
            f"`tokenizer=bpe` is trained on a corpus, and `data={spec.name}` has none",
            f"use tokenizer=byte or tokenizer=hf, or mix it: data=mix data.mix=[sotu:0.9,{spec.name}:0.1]",
        )
    found: Tokenizer = place.trained or make(tokenizer, ())
    return TaskSource(spec, make(spec, found), found, place.seq_len)


def with_ids(spec: TaskSpec, tokenizer: Spec, place: Place) -> TaskSource:
    """A task whose vocabulary is its own, or that of the model it is trained on with."""
    task: Task = make(spec, None)
    found: Tokenizer = place.trained or make(tokenizer, task.vocab_size)
    if found.kind != "ids" or found.vocab_size < task.vocab_size:
        raise DataError(
            f"`data={spec.name}` has {task.vocab_size} ids of its own, and the run's vocabulary has "
            f"{found.vocab_size} ({found.kind})",
            "evaluate a run that was trained on the task with as large a vocabulary",
        )
    return TaskSource(spec, task, found, place.seq_len)


def cut(examples: Examples, first: int, stop: int) -> Examples:
    return Examples(*(getattr(examples, f.name)[first:stop] for f in dataclasses.fields(Examples)))
