"""Which keys a query attends to: a frozen value, built by `&`, rendered by each attention backend. True = attend.

    CAUSAL          window(3)       CAUSAL & window(3)     documents [0 0 1 1]
    x . . .         x x x x         x . . .                x x . .
    x x . .         x x x x         x x . .                x x . .
    x x x .         x x x x         x x x .                . . x x
    x x x x         . x x x         . x x x                . . x x

Order in the row decides what is past, never the logical position: positions may start again in every document, and a
comparison of them alone would leak. With fewer queries than keys (a cache) the queries are the last ones: query i of T
is key i + S − T.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Optional

from torch import Tensor

from lmlab.kernels.scores import Scores


@dataclass(frozen=True, eq=False)
class Mask:
    """The conjunction of its fields; a field left out hides nothing."""

    causal: bool = False
    window: Optional[int] = None  # keys seen up to the query, counting its own
    documents: Optional[tuple[Tensor, Tensor]] = None  # ids (B, T) of the queries, (B, S) of the keys
    valid_BS: Optional[Tensor] = None  # False = padding
    kept_BS: Optional[Tensor] = None  # keys that no window hides
    windowed: bool = False  # the layer's window is in it already; the keys need not lie in order

    def __and__(self, other: Mask) -> Mask:
        return Mask(
            causal=self.causal or other.causal,
            window=min((w for w in (self.window, other.window) if w is not None), default=None),
            documents=_either(self.documents, other.documents),
            valid_BS=_both(self.valid_BS, other.valid_BS),
            kept_BS=_both(self.kept_BS, other.kept_BS),
            windowed=self.windowed or other.windowed,
        )

    def scores(self, **more: Any) -> Scores:
        """What the backends render, with what positions and the layer add (lmlab/kernels/scores.py)."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name in Scores._fields}
        return Scores(**own, **more)

    def lengths(self) -> Optional[Tensor]:
        """(B, 1 or T): the tokens of each query's document, of its row without padding; None = the whole row."""
        if self.documents is None:
            return None if self.valid_BS is None else self.valid_BS.sum(-1, keepdim=True)
        q_BT, k_BS = self.documents
        same = q_BT[:, :, None] == k_BS[:, None, :]
        return (same if self.valid_BS is None else same & self.valid_BS[:, None, :]).sum(-1)


CAUSAL = Mask(causal=True)


def window(size: int) -> Mask:
    """`size` keys up to the query, counting its own (later keys are CAUSAL's business)."""
    return Mask(window=size)


def documents(q_BT: Tensor, k_BS: Optional[Tensor] = None) -> Mask:
    """Only keys of the query's own document."""
    return Mask(documents=(q_BT, q_BT if k_BS is None else k_BS))


def padding(valid_BS: Tensor) -> Mask:
    """Only keys that are not padding."""
    return Mask(valid_BS=valid_BS)


def _both(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    return b if a is None else a if b is None else a & b


def _either(a: Optional[tuple[Tensor, Tensor]], b: Optional[tuple[Tensor, Tensor]]) -> Optional[tuple[Tensor, Tensor]]:
    assert a is None or b is None, "a row is cut into documents once"
    return b if a is None else a
