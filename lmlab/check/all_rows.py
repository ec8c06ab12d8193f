"""Every row of `lmlab check` in its order, the quick ones that stand before a training, and what they answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from lmlab.check import counts, invariants, kernels, layers
from lmlab.check.composed import Composed
from lmlab.check.rows import Row, attempted, known
from lmlab.config.tree import Experiment

Ask = Callable[[Composed], Row]


QUICK: dict[str, Ask] = {
    "oracle": invariants.against_oracle,
    "causality": invariants.causality,
    "causality in training": invariants.causality_in_training,
    "causality by layer": layers.causality_by_layer,
    "causality in training by layer": layers.causality_in_training_by_layer,
    "packed = alone": invariants.packed,
    "packed = alone in training": invariants.packed_in_training,
    "cached = full": invariants.cached,
    "gradients": invariants.every_gradient,
    "dropout": layers.dropout_as_set,
}
ROWS: dict[str, Ask] = {
    "oracle": invariants.against_oracle,
    "causality": invariants.causality,
    "causality in training": invariants.causality_in_training,
    "causality by layer": layers.causality_by_layer,
    "causality in training by layer": layers.causality_in_training_by_layer,
    "causality by gradient": invariants.causality_by_gradient,
    "shift": invariants.shift,
    "packed = alone": invariants.packed,
    "packed = alone in training": invariants.packed_in_training,
    "padded = alone": invariants.padded,
    "batched = alone": invariants.batched,
    "cached = full": invariants.cached,
    "micro-batches = whole": invariants.micro_batches,
    "gradients": invariants.every_gradient,
    "dropout": layers.dropout,
    "loss at step 0": counts.first_loss,
    "initial values": counts.initial_values,
    "parameters and FLOPs": counts.counts,
    "kernels = reference": kernels.against_reference,
    "backends agree": kernels.backends,
    "determinism": invariants.determinism,
}
IMPLIED = ("causality", "causality by layer", "packed = alone")  # by formulas that are met, in evaluation
# What people ask of an implementation, and the rows that answer it.
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "is the mask applied before the softmax?",
        ("causality", "causality by layer", "causality by gradient", "oracle"),
    ),
    ("do query heads read the right key/value heads, in order?", ("oracle", "backends agree")),
    ("is the scale 1/√C, and the softmax stable?", ("oracle", "kernels = reference")),
    ("does RoPE turn q and k only, and by distance alone?", ("shift", "oracle")),
    ("do the norms stand where the block says?", ("oracle", "gradients")),
    ("does the cache grow along time?", ("cached = full",)),
    (
        "one mathematics for training and inference?",
        (
            "causality in training",
            "packed = alone",
            "packed = alone in training",
            "batched = alone",
            "micro-batches = whole",
        ),
    ),
)


def asked(experiment: Experiment, wanted: dict[str, Ask] | None = None, implied: Sequence[str] = ()) -> list[Row]:
    """The rows, in order. A model that can't be built fails in the first one. implied: rows that are left out where the
    oracle's passes and no part declares a failure."""
    c = Composed(experiment)
    built = attempted("the model", lambda: Row("the model", "pass", f"{len(c.declared)} known failures declared"))
    if built.state == "fail":
        return [built]
    rows: list[Row] = []
    met = False
    with torch.random.fork_rng(devices=[]):
        for name, ask in (wanted or ROWS).items():
            if not (met and name in implied):
                rows.append(attempted(name, functools.partial(ask, c)))
                met |= name == "oracle" and rows[-1].state == "pass" and not c.declared
    return [known(row, c.declared) for row in rows]


def failed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.state == "fail"]
