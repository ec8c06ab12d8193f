"""A checkpoint's rotations scaled otherwise for a while: the weights stay, and nothing is left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmlab.errors import ConfigError
from lmlab.model.rope_scaling import Scaling
from lmlab.model.transformer import Transformer
from lmlab.registry import OPTIONS, Spec

OWN, NONE = "own", "none"
NAMES = (NONE, "pi", "ntk", "dynamic_ntk", "yarn")  # in the order in which they are shown


@dataclass(frozen=True)
class Choice:
    """One scaling at one factor. factor None: as trained (`own`), or without a scaling (`none`)."""

    name: str
    factor: float | None = None

    @property
    def plain(self) -> bool:
        """Whether it is RoPE as it was, to the last bit."""
        return self.name == NONE or self.factor == 1

    def spec(self, original_len: int) -> Spec:
        """The option's spec; original_len: tokens of the rows that plain rotations were trained at."""
        made: Any = OPTIONS["rope_scaling"][self.name]()
        if self.factor is not None:
            made.factor = self.factor
        if any(f.name == "original_len" for f in dataclasses.fields(made)):
            made.original_len = original_len
        return made


@contextmanager
def scaled(model: Transformer, choice: Choice, original_len: int) -> Iterator[Transformer]:
    """The model with its rotations scaled so; afterwards as it was. `own` leaves them alone.

    Raises ConfigError where no rotations are (`pos` is not rope) or where this scaling can't act on them."""
    if choice.name == OWN:
        yield model
        return
    before = getattr(model.pos, "scaling", None)
    if before is None:
        raise ConfigError(
            f"`--rope-scaling` {choice.name}: {type(model.pos).__name__} has no rotations that could be scaled",
            "leave --rope-scaling out: the model is evaluated as it was trained",
        )
    spec = choice.spec(original_len)
    model.pos.scale_by(model.scaling_of(spec) if spec.build else Scaling(spec, model.dims, model.ops))
    try:
        yield model
    finally:
        model.pos.scale_by(before)
