"""What happens to attention's scores besides q·kᵀ: what hides them, what is added, the cap. Nothing in it is T×S.

The backends render it: whole (dense, SDPA), a tile at a time (tiled), or as functions (FlexAttention).
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lmlab.kernels.ops import wide


class Scores(NamedTuple):
    """score = cap(scale · q·k) + bias, hidden where any of causal, window, documents, valid says so.

    Order in the row decides what is past, never the logical position. With fewer queries than keys (a cache) the
    queries are the last ones: query i of T is key i + S − T. A query that sees nothing gives 0.
    """

    causal: bool = False
    window: Optional[int] = None  # keys seen up to the query, counting its own
    documents: Optional[tuple[Tensor, Tensor]] = None  # ids (1 or B, T) of the queries, (1 or B, S) of the keys
    valid_BS: Optional[Tensor] = None  # False = padding
    kept_BS: Optional[Tensor] = None  # True = a key that the window does not hide (attention sinks)
    positions: Optional[tuple[Tensor, Tensor]] = None  # (1 or B, T) and (1 or B, S): what a bias is a function of
    slope_H: Optional[Tensor] = None  # bias −slope · distance
    bias_HR: Optional[Tensor] = None  # bias at distance R; the last holds from there on; may want a gradient
    softcap: Optional[float] = None  # c of c·tanh(score / c)

    @property
    def biased(self) -> bool:
        """Whether something is added to scores that are seen."""
        return self.slope_H is not None or self.bias_HR is not None

    def plain_causal(self) -> bool:
        """Whether `causal` hides and nothing else does."""
        return self.causal and self.window is None and self.documents is None and self.valid_BS is None

    def seen(self, rows: range, keys: range, T: int, S: int, device: torch.device) -> Optional[Tensor]:
        """The boolean (1 or B, 1, t, s) of some queries and keys, True = attend; None when nothing is hidden."""
        seen: Optional[Tensor] = None
        if self.causal or self.window is not None:
            ones = torch.ones(len(rows), len(keys), dtype=torch.bool, device=device)
            own = rows.start + S - T - keys.start  # the column of the first query's own key
            seen = (ones.tril(own) if self.causal else ones)[None, None]
            if self.window is not None:
                near = ones.triu(own - self.window + 1)
                kept = None if self.kept_BS is None else self.kept_BS[:, None, None, keys.start : keys.stop]
                seen = seen & (near if kept is None else near | kept)
        if self.documents is not None:
            q_BT, k_BS = (
                ids[:, part.start : part.stop] for ids, part in zip(self.documents, (rows, keys), strict=True)
            )
            seen = _both(seen, (q_BT[:, :, None] == k_BS[:, None, :])[:, None])
        if self.valid_BS is not None:
            valid = self.valid_BS[:, None, None, keys.start : keys.stop].expand(-1, 1, len(rows), -1)
            seen = _both(seen, valid)
        return seen

    def bias(self, rows: range, keys: range, dtype: torch.dtype) -> Optional[Tensor]:
        """The bias (1 or B, H, t, s) in `dtype`. A key after its query counts as distance 0: it is masked."""
        if not self.biased:
            return None
        distance = self._distance(rows, keys)
        if self.slope_H is not None:
            slope = -self.slope_H.to(wide(dtype))[:, None, None]
            return (distance[:, None].to(wide(dtype)) * slope).to(dtype)
        assert self.bias_HR is not None
        distance = distance.clamp_max(self.bias_HR.shape[1] - 1)
        values = self.bias_HR.to(dtype).index_select(1, distance.flatten())
        return values.unflatten(1, distance.shape).transpose(0, 1)

    def add_bias_gradient(self, grad_HR: Tensor, d_BHTS: Tensor, rows: range, keys: range) -> None:
        """Add to `grad_HR` that of `bias_HR`, from the gradient of the scores of some queries and keys."""
        if self.bias_HR is None:
            return
        H, R = self.bias_HR.shape
        distance = self._distance(rows, keys).clamp_max(R - 1)
        d_BHTS = d_BHTS if distance.shape[0] > 1 else d_BHTS.sum(0, keepdim=True)
        at = distance[:, None] + torch.arange(0, H * R, R, device=distance.device)[:, None, None]
        grad_HR.view(-1).index_add_(0, at.flatten(), d_BHTS.flatten())

    def _distance(self, rows: range, keys: range) -> Tensor:
        """How far back a key's position lies (1 or B, t, s), 0 if it lies ahead."""
        assert self.positions is not None, "a bias is a function of positions"
        q_BT, k_BS = self.positions
        q_BT, k_BS = q_BT[:, rows.start : rows.stop], k_BS[:, keys.start : keys.stop]
        return (q_BT[:, :, None] - k_BS[:, None, :]).clamp_min(0)


def _both(a: Optional[Tensor], b: Tensor) -> Tensor:
    return b if a is None else a & b
