"""One more token of each row: the whole row again, over a cache, or by a CUDA graph of the step over a fixed cache.

A step of a small model is hundreds of kernels, each shorter than its launch: replayed as one graph they are launched
together. What can't be recorded runs as it is, and `path` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from lmlab.model.cache import Cache
from lmlab.model.fixed import fix, why_not
from lmlab.model.transformer import Transformer

if TYPE_CHECKING:
    from lmlab.generate.decode import Rows

GRAPH_FROM = 16  # new tokens: recording costs a few steps
WARM_UP = 2  # steps before the recording: libraries choose their algorithms in the first


def whole(model: Transformer, rows: Rows) -> Tensor:
    """(B, V) logits of the rows' last tokens, the rows computed from their beginning."""
    more = {"valid_BT": rows.valid_BT, "length_BT": rows.declared_B1}
    logits_B1V = model(rows.tokens_BT, rows.positions_BT, last=1, **more).logits_BTV
    assert logits_B1V is not None
    return logits_B1V[:, -1]


class Step:
    """Feeds one token of each row and gives the logits after it. `path`: how, and why."""

    def __init__(self, model: Transformer, rows: Rows, cache: Optional[Cache], max_new: int) -> None:
        self.model, self.rows, self.cache = model, rows, cache
        self.ids_B1 = rows.tokens_BT[:, -1:].clone()
        self.positions_B1 = rows.lengths_B1.clone()
        self.replay: Optional[Callable[[], Tensor]] = None
        self.path = "whole rows" if cache is None else "eager"
        if cache is not None and worth_recording(rows.tokens_BT.device, max_new):
            self._record(cache)

    def __call__(self, ids_B: Tensor) -> Tensor:
        if self.cache is None:
            self.rows.add(ids_B)
            return whole(self.model, self.rows)
        self.ids_B1.copy_(ids_B[:, None])
        return self._forward() if self.replay is None else self.replay()

    def _forward(self) -> Tensor:
        """(B, V) logits after `ids_B1`; the counters move on, on the device."""
        asked = {"length_BT": self.rows.declared_B1, "cache": self.cache}
        logits_B1V = self.model(self.ids_B1, self.positions_B1, **asked).logits_BTV
        self.positions_B1.add_(1)
        assert logits_B1V is not None
        return logits_B1V[:, -1]

    def _record(self, cache: Cache) -> None:
        """Fix the cache and record a step. Steps that only warm up write where the next token will, and what counts
        is put back."""
        if (reason := why_not(cache)) is not None:
            self.path = f"eager ({reason})"
            return
        counters = [*fix(cache), self.positions_B1]
        kept = [c.clone() for c in counters]

        def put_back() -> None:
            for counter, value in zip(counters, kept, strict=True):
                counter.copy_(value)

        try:
            self.replay = recorded(self._forward, put_back)
            self.path = "CUDA graph"
        except RuntimeError as error:
            self.path = f"eager (not recorded: {str(error).strip().splitlines()[0]})"
        put_back()


def worth_recording(device: torch.device, max_new: int) -> bool:
    return device.type == "cuda" and max_new >= GRAPH_FROM


def recorded(step: Callable[[], Tensor], put_back: Callable[[], None]) -> Callable[[], Tensor]:
    """A function that replays `step` and gives what it gave. Raises RuntimeError when it waits for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
            put_back()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
