"""How cached columns lie in memory: plain, as int8 with a factor per token and head, or in pages.

A storage has slots along time. `write` puts tokens (B, T, K, C) into some, `read` gives some as (B, s, K, C), in the
dtype that was written; `as_read` is what a value becomes by lying there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmlab.errors import LmlabError

Span = tuple[int, int]  # (start, stop)
LEAST = 64  # slots that a growing storage begins with


class Storage:
    """Base. `like` has the batch, heads, channels, dtype and device of what will be written; `slots` is how many it may
    ever need (None = no end), `whole`: have them all from the start."""

    def __init__(self, like_BTKC: Tensor, slots: int | None, *, whole: bool) -> None:
        self.slots, self.dtype = slots, like_BTKC.dtype
        self.B, _, self.K, self.C = like_BTKC.shape
        self.tensors: list[Tensor] = self.made(like_BTKC, slots if whole and slots is not None else 0)

    def made(self, like_BTKC: Tensor, n: int) -> list[Tensor]:
        """What n slots take, each tensor (B, K, n, ·)."""
        return [like_BTKC.new_empty(self.B, self.K, n, self.C)]

    @property
    def n_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def reserve(self, n: int) -> None:
        """Room for n slots; what is there is copied when it has to grow, each time to twice as much. Raises LmlabError
        beyond the slots it was made for."""
        if self.slots is not None and n > self.slots:
            raise LmlabError(f"the cache was made for {self.slots} tokens, {n} are asked for", "make it with more")
        have = self.tensors[0].shape[2]
        if n > have:
            most = max(n, 2 * have, LEAST)
            size = most if self.slots is None else min(most, self.slots)
            self.tensors = [torch.cat((t, t.new_empty(*t.shape[:2], size - have, t.shape[3])), 2) for t in self.tensors]

    def write(self, slots: Span, new_BTKC: Tensor) -> None:
        self.tensors[0][:, :, slots[0] : slots[1]] = new_BTKC.transpose(1, 2)

    def put(self, slot_1: Tensor, new_B1KC: Tensor) -> None:
        """One token of each row into the slot that a tensor names: nobody looks at it."""
        for tensor, part in zip(self.tensors, self.parts(new_B1KC), strict=True):
            tensor.index_copy_(2, slot_1, part.transpose(1, 2))

    def clear(self, start: int) -> None:
        """Zeros in the slots from `start` on."""
        for tensor in self.tensors:
            tensor[:, :, start:] = 0

    def parts(self, new_BTKC: Tensor) -> tuple[Tensor, ...]:
        """What lies in each tensor of what is written."""
        return (new_BTKC,)

    def read(self, slots: Span) -> Tensor:
        """(B, s, K, C): a view where nothing has to be computed."""
        return self.tensors[0][:, :, slots[0] : slots[1]].transpose(1, 2)

    def as_read(self, new_BTKC: Tensor) -> Tensor:
        return new_BTKC

    def repeat(self, n: int) -> None:
        """n rows of each."""
        self.B *= n
        self.tensors = [t.repeat_interleave(n, 0) for t in self.tensors]


class Plain(Storage):
    """The values themselves, (B, K, N, C): a head's keys lie together, so that attention copies nothing."""


class Quantized(Storage):
    """int8 in [−127, 127] and one bf16 factor per token and head: |x| / 127 of its largest channel."""

    def made(self, like_BTKC: Tensor, n: int) -> list[Tensor]:
        whole = like_BTKC.new_empty(self.B, self.K, n, self.C, dtype=torch.int8)
        return [whole, like_BTKC.new_empty(self.B, self.K, n, 1, dtype=torch.bfloat16)]

    def write(self, slots: Span, new_BTKC: Tensor) -> None:
        for tensor, part in zip(self.tensors, self.parts(new_BTKC), strict=True):
            tensor[:, :, slots[0] : slots[1]] = part.transpose(1, 2)

    def read(self, slots: Span) -> Tensor:
        whole, factor = (t[:, :, slots[0] : slots[1]].transpose(1, 2) for t in self.tensors)
        return self._joined(whole, factor)

    def as_read(self, new_BTKC: Tensor) -> Tensor:
        return self._joined(*self.parts(new_BTKC))

    def parts(self, x_BTKC: Tensor) -> tuple[Tensor, Tensor]:
        factor = (x_BTKC.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
        divisor = factor.to(x_BTKC.dtype)
        whole = (x_BTKC / divisor.masked_fill(divisor == 0, 1.0)).round().clamp(-127, 127)
        return whole.to(torch.int8), factor

    def _joined(self, whole: Tensor, factor: Tensor) -> Tensor:
        return whole.to(self.dtype) * factor.to(self.dtype)


class Paged(Storage):
    """A reference of paged memory (Kwon et al. 2023, 2309.06180): a pool of pages, a table of them per row, unordered.

    Every read gathers its pages; nothing here is fast.
    """

    PAGE = 8

    def made(self, like_BTKC: Tensor, n: int) -> list[Tensor]:
        self.table = torch.empty(self.B, 0, dtype=torch.long, device=like_BTKC.device)
        self.draw = torch.Generator().manual_seed(0)
        return [like_BTKC.new_empty(0, self.PAGE, self.K, self.C)]

    def reserve(self, n: int) -> None:
        missing = -(-n // self.PAGE) - self.table.shape[1]
        if self.slots is not None and n > self.slots:
            raise LmlabError(f"the cache was made for {self.slots} tokens, {n} are asked for", "make it with more")
        if missing <= 0:
            return
        pool = self.tensors[0]
        fresh = pool.new_empty(self.B * missing, *pool.shape[1:])
        shuffled = torch.randperm(len(fresh), generator=self.draw).to(pool.device) + len(pool)
        self.tensors = [torch.cat((pool, fresh))]
        self.table = torch.cat((self.table, shuffled.view(self.B, missing)), 1)

    def write(self, slots: Span, new_BTKC: Tensor) -> None:
        at = torch.arange(*slots, device=self.table.device)
        self.tensors[0][self.table[:, at // self.PAGE], at % self.PAGE] = new_BTKC

    def read(self, slots: Span) -> Tensor:
        first, last = slots[0] // self.PAGE, -(-slots[1] // self.PAGE)
        pages = self.tensors[0].index_select(0, self.table[:, first:last].flatten())
        columns = pages.view(self.B, -1, self.K, self.C)
        start = slots[0] - first * self.PAGE
        return columns[:, start : start + slots[1] - slots[0]]

    def repeat(self, n: int) -> None:
        """Each row's pages copied n − 1 times."""
        rows = self.table.repeat_interleave(n, 0)
        self.tensors = [self.tensors[0].index_select(0, rows.flatten())]
        self.B *= n
        self.table = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
