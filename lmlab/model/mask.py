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

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """The conjunction of its fields; a field left out hides nothing."""

    causal: bool = False
    window: Optional[int] = None  # keys seen up to the query, counting its own
    documents: Optional[tuple[Tensor, Tensor]] = None  # ids (B, T) of the queries, (B, S) of the keys
    valid_BS: Optional[Tensor] = None  # False = padding

    def __and__(self, other: Mask) -> Mask:
        return Mask(
            causal=self.causal or other.causal,
            window=min((w for w in (self.window, other.window) if w is not None), default=None),
            documents=_either(self.documents, other.documents),
            valid_BS=_both(self.valid_BS, other.valid_BS),
        )

    def plain_causal(self) -> bool:
        """Whether it says `causal` and nothing else: no tensor is needed to render it."""
        return self.causal and self.window is None and self.documents is None and self.valid_BS is None

    def render(self, T: int, S: int, device: torch.device) -> Optional[Tensor]:
        """The boolean (1 or B, 1, T, S), or None when nothing is hidden."""
        seen: Optional[Tensor] = None
        if self.causal or self.window is not None:
            ones = torch.ones(T, S, dtype=torch.bool, device=device)
            seen = ones.tril(S - T) if self.causal else ones
            seen = (seen if self.window is None else seen.triu(S - T - self.window + 1))[None, None]
        if self.documents is not None:
            q_BT, k_BS = self.documents
            seen = _both(seen, (q_BT[:, :, None] == k_BS[:, None, :])[:, None])
        if self.valid_BS is not None:
            seen = _both(seen, self.valid_BS[:, None, None, :].expand(-1, 1, T, S))
        return seen


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
