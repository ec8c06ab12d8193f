"""Keys and values of rows that go on: one LayerCache per layer, filled chunk by chunk, then token by token.

    cache = Cache(model, max_len=512)
    model(prompt_BT, positions_BT, cache=cache)           # prefill, in chunks of any size
    model(next_B1, positions_B1, cache=cache)             # decode

A row is a list of columns: whatever was fed, padding too. Which of them a layer keeps is its Layout (all, or attention
sinks and a ring of the newest), how they lie in memory is the storage (lmlab/model/storage.py). What is cached is what
attention uses: keys that are turned already. The masks are those of a whole row, so the chunks' sizes change nothing.

        columns seen  0 1 2 3 4 5 6 7 8          sinks = 2, window = 4
        slots         0 1 | 6 7 8 5              column c ≥ 2 lies in slot 2 + (c − 2) mod 4
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lmlab.errors import LmlabError
from lmlab.model.mask import Mask
from lmlab.model.storage import Paged, Plain, Quantized, Span, Storage

STORAGES: dict[str, type[Storage]] = {"full": Plain, "int8": Quantized, "paged": Paged}


class CacheIgnored(LmlabError):
    """A part of the model does not use the cache it is handed."""


class CacheKind(NamedTuple):
    """What a cache keeps of layers that have no narrower window of their own: everything, or the newest `window`
    columns and the first `sinks` tokens (Xiao et al. 2023, 2309.17453; positions stay those of the text). storage:
    full, int8, or paged, a reference."""

    storage: str = "full"
    window: Optional[int] = None
    sinks: int = 0

    def layout(self, window: Optional[int]) -> tuple[Optional[int], int]:
        """(window, sinks) that a layer keeps: its own window where that is no more than the kind's."""
        if self.window is None or (window is not None and window <= self.window + self.sinks):
            return window, 0
        return self.window, self.sinks

    def __str__(self) -> str:
        if self.window is None:
            return self.storage
        return f"sink:{self.sinks}+{self.window}" if self.sinks else f"window:{self.window}"


FULL = CacheKind()


class Plan(NamedTuple):
    """How a chunk meets a storage. `writes`: (columns of the chunk, slots) pairs. earlier None: write, then the keys
    are the first `stop` slots. Otherwise the keys are those of the slots `earlier` and the chunk's own; then write."""

    writes: list[tuple[Span, Span]]
    stop: int
    earlier: Optional[list[Span]] = None


class Kept:
    """One tensor of the columns that a layout keeps."""

    def __init__(self, storage: type[Storage], slots: Optional[int], *, whole: bool) -> None:
        self.make, self.slots, self.whole = storage, slots, whole
        self.storage: Optional[Storage] = None

    def append(self, new_BTKC: Tensor, plan: Plan) -> Tensor:
        """(B, S, K, C): all that the chunk's queries may see."""
        if self.storage is None:
            self.storage = self.make(new_BTKC, self.slots, whole=self.whole)
        storage = self.storage
        storage.reserve(plan.stop)
        if plan.earlier is None:
            self._write(storage, new_BTKC, plan)
            return storage.read((0, plan.stop))
        keys = torch.cat([*(storage.read(slots) for slots in plan.earlier), storage.as_read(new_BTKC)], 1)
        self._write(storage, new_BTKC, plan)
        return keys

    @staticmethod
    def _write(storage: Storage, new_BTKC: Tensor, plan: Plan) -> None:
        for (start, stop), slots in plan.writes:
            storage.write(slots, new_BTKC[:, start:stop])


class Layout:
    """Which columns some layers keep and where: all (window None), or the first `sinks` tokens of each row and the
    newest `window` columns. max_len: how many tokens a row may have, memory for them being taken at once."""

    def __init__(self, window: Optional[int], sinks: int, max_len: Optional[int]) -> None:
        self.window, self.sinks, self.max_len = window, sinks, max_len
        self.columns = 0  # seen so far
        self.ring_from: Optional[int] = None if sinks else 0  # the column at which the ring begins, once known
        self.tokens_B1: Optional[Tensor] = None  # of each row before the ring, counted where there is padding
        self.plan = Plan([], 0)
        self.mask, self.k_pos_BS = Mask(), torch.empty(0)
        self._positions, self._valid = (Kept(Plain, self.slots, whole=max_len is not None) for _ in range(2))

    @property
    def slots(self) -> Optional[int]:
        """How many it may ever need, None where that is not known."""
        if self.window is None or self.ring_from is None:
            return self.max_len
        most = self.ring_from + self.window
        return most if self.max_len is None else min(most, self.max_len)

    def begin(self, positions_BT: Tensor, valid_BT: Optional[Tensor]) -> None:
        """Plan for a chunk: `plan` for the layers' storages, `mask` and `k_pos_BS` for their attention."""
        T = positions_BT.shape[1]
        if self.ring_from is None:
            self._find_ring(valid_BT, T)
        self.plan = self._planned(T)
        self.k_pos_BS = self._positions.append(positions_BT[..., None, None], self.plan)[..., 0, 0]
        valid_BS = self._valid_keys(positions_BT, valid_BT)
        self.columns += T
        self.mask = self._mask(positions_BT, valid_BS)

    def _find_ring(self, valid_BT: Optional[Tensor], T: int) -> None:
        """The ring begins where every row has its sinks: with padding on the left, some columns later."""
        if valid_BT is None and self.tokens_B1 is None:
            self.ring_from = self.sinks
            return
        counts_BT = torch.ones(1, T) if valid_BT is None else valid_BT.cumsum(1)
        counts_BT = counts_BT if self.tokens_B1 is None else counts_BT + self.tokens_B1
        self.tokens_B1 = counts_BT[:, -1:]
        enough_T = (counts_BT >= self.sinks).all(0)
        if bool(enough_T[-1]):
            self.ring_from = self.columns + int(enough_T.int().argmax()) + 1

    def _planned(self, T: int) -> Plan:
        n, end, ring, window = self.columns, self.columns + T, self.ring_from, self.window
        if window is None or ring is None or end <= ring + window:
            return Plan([((0, T), (n, end))], end)
        if T == 1:
            return Plan([((0, 1), slots) for slots in self._slots(n, end)], ring + window)
        earlier = [(0, min(n, ring)), *self._slots(max(ring, n - window + 1), n)]
        first = max(n, ring, end - window)  # the oldest column of the chunk that the ring keeps
        writes = [] if n >= ring else [((0, ring - n), (n, ring))]
        at = first - n
        for start, stop in self._slots(first, end):
            writes.append(((at, at + stop - start), (start, stop)))
            at += stop - start
        return Plan(writes, ring + window, earlier)

    def _slots(self, start: int, stop: int) -> list[Span]:
        """The slots of columns of the ring, at most `window` of them, in order."""
        assert self.ring_from is not None
        assert self.window is not None
        if start >= stop:
            return []
        first, n = (start - self.ring_from) % self.window, stop - start
        until_end = min(n, self.window - first)
        spans = [(first, first + until_end), (0, n - until_end)]
        return [(self.ring_from + a, self.ring_from + b) for a, b in spans if a < b]

    def _valid_keys(self, positions_BT: Tensor, valid_BT: Optional[Tensor]) -> Optional[Tensor]:
        """(B, S), None as long as nothing was padding."""
        if valid_BT is None and self._valid.storage is None:
            return None
        valid_BT = torch.ones_like(positions_BT, dtype=torch.bool) if valid_BT is None else valid_BT
        if self._valid.storage is None and self.columns:
            raise LmlabError("a cache that was begun without padding is handed some", "pad the first chunk")
        return self._valid.append(valid_BT[..., None, None], self.plan)[..., 0, 0]

    def _mask(self, positions_BT: Tensor, valid_BS: Optional[Tensor]) -> Mask:
        """By the keys' order, except for a single query: it sees all that is kept, in whatever order it lies. A layer
        with a window of its own adds nothing: what is kept is within it, or a sink."""
        T, S = positions_BT.shape[1], self.k_pos_BS.shape[1]
        if T == 1:
            if self.tokens_B1 is not None and self.window is not None and valid_BS is not None:
                near = self.k_pos_BS > positions_BT - self.window  # before the ring lie more than some rows' sinks
                valid_BS = valid_BS & (near | (self.k_pos_BS < self.sinks))
            return Mask(windowed=True, valid_BS=valid_BS)
        if self.window is None or self.window >= S:
            return Mask(windowed=True, causal=True, valid_BS=valid_BS)
        kept_BS = None
        if self.sinks:
            slot = torch.arange(S, device=self.k_pos_BS.device)
            kept_BS = (self.k_pos_BS < self.sinks) & (slot < (S if self.ring_from is None else self.ring_from))
        return Mask(windowed=True, causal=True, window=self.window, valid_BS=valid_BS, kept_BS=kept_BS)

    def repeat(self, n: int) -> None:
        for kept in (self._positions, self._valid):
            if kept.storage is not None:
                kept.storage.repeat(n)
        self.tokens_B1 = None if self.tokens_B1 is None else self.tokens_B1.repeat_interleave(n, 0)


class LayerCache:
    """What one layer keeps."""

    def __init__(self, layout: Layout, storage: type[Storage]) -> None:
        self.layout, self.make = layout, storage
        self.kept: list[Kept] = []
        self.columns = 0

    def append(self, *new_BTKC: Tensor) -> tuple[Tensor, ...]:
        """Each tensor (B, T, K, C) of the new tokens → (B, S, K, C) of all keys they may see, their own at the end or,
        for a single token, anywhere."""
        if not self.kept:
            slots, whole = self.layout.slots, self.layout.max_len is not None
            self.kept = [Kept(self.make, slots, whole=whole) for _ in new_BTKC]
        self.columns += new_BTKC[0].shape[1]
        return tuple(kept.append(new, self.layout.plan) for kept, new in zip(self.kept, new_BTKC, strict=True))

    @property
    def storages(self) -> Iterator[Storage]:
        return (kept.storage for kept in self.kept if kept.storage is not None)


@dataclass(frozen=True)
class Prefix:
    """What a cache was filled by: two that are equal hold the same keys and values."""

    weights: str
    tokens: str
    positions: str
    rope: str
    kind: str


class Cache:
    """The caches of all layers of a model, for inference. max_len: memory for so many columns is taken at once, and
    more are refused; None: it grows."""

    def __init__(self, model: Any, kind: CacheKind = FULL, *, max_len: Optional[int] = None) -> None:
        self.model, self.kind, self.max_len = model, kind, max_len
        layouts: dict[tuple[Optional[int], int], Layout] = {}
        self.layers = []
        for block in model.blocks:
            kept = kind.layout(getattr(block.attn, "window", None))
            layout = layouts.setdefault(kept, Layout(*kept, max_len))
            self.layers.append(LayerCache(layout, STORAGES[kind.storage]))
        self.layouts = list(layouts.values())
        self.length_B1: Optional[Tensor] = None
        self.fixed = False  # by lmlab/model/fixed.py
        self._fed: list[tuple[Tensor, Tensor]] = []
        self._parameters = list(model.parameters())
        self._versions = self._changes()

    @property
    def columns(self) -> int:
        """Tokens fed so far, padding among them."""
        return self.layouts[0].columns

    @property
    def n_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(storage.n_bytes for layer in self.layers for storage in layer.storages)

    def begin(
        self, tokens_BT: Tensor, positions_BT: Tensor, valid_BT: Optional[Tensor], length_BT: Optional[Tensor]
    ) -> None:
        """Called by the model before its layers. Raises LmlabError: gradients are on, another model or length."""
        if torch.is_grad_enabled():
            raise LmlabError("a cache is for inference, and gradients are on", "call the model under torch.no_grad()")
        if self._versions != self._changes():
            raise LmlabError("the weights changed since the cache was begun", "make a new cache")
        if self.model.pos.needs_length:
            self._declare(length_BT)
        positions_BT = positions_BT.expand(tokens_BT.shape)
        if not self.fixed:
            self._fed.append((tokens_BT, positions_BT))
        for layout in self.layouts:
            layout.begin(positions_BT, valid_BT)

    def _changes(self) -> int:
        """Grows with every change of a parameter in place."""
        return sum(p._version for p in self._parameters)

    def _declare(self, length_BT: Optional[Tensor]) -> None:
        """Turned keys hold for one length only."""
        if length_BT is None or length_BT.shape[1] != 1:
            raise LmlabError(
                "this scaling of rotations asks how long each row will be", "give length_BT (B, 1) with a cache"
            )
        if self.length_B1 is length_BT:
            return
        if self.length_B1 is not None and not torch.equal(self.length_B1, length_BT):
            raise LmlabError("the rows' length is not the one that the cache was begun with", "fill a new cache")
        self.length_B1 = length_BT

    def appended(self) -> None:
        """Called by the model after its layers. Raises LmlabError when one did not use its cache."""
        for layer, cache in enumerate(self.layers):
            if cache.columns != cache.layout.columns:
                name = type(self.model.blocks[layer].attn).__name__
                raise CacheIgnored(
                    f"the attention of layer {layer} ({name}) does not use the cache it is handed",
                    "call `k, v = cache.append(k, v)` in its forward, or generate with --cache none",
                )

    def prefix(self) -> Prefix:
        """What it was filled by. Raises LmlabError once it is fixed: from then on nobody keeps count."""
        if self.fixed:
            raise LmlabError("a fixed cache does not know what it was filled by", "ask before it is fixed")
        tokens, positions = (torch.cat(parts, 1) for parts in zip(*self._fed, strict=True))
        return prefix_of(self.model, tokens, positions, self.kind, length_B1=self.length_B1)

    def fork(self, n: int, expected: Optional[Prefix] = None) -> None:
        """n copies of each row, to go on in n ways. Raises LmlabError, naming what differs, when the cache was not
        filled by what the caller takes it for (None: who forks it has filled it)."""
        if self.fixed:
            raise LmlabError("a fixed cache can't be forked", "fork it before it is fixed")
        if expected is not None:
            own = self.prefix()
            names = [name for name in vars(own) if getattr(own, name) != getattr(expected, name)]
            if names:
                raise LmlabError(f"the cache was filled with other {', '.join(names)}", "fill a new one")
        for layer in self.layers:
            for storage in layer.storages:
                storage.repeat(n)
        for layout in self.layouts:
            layout.repeat(n)
        self._fed = [(a.repeat_interleave(n, 0), b.repeat_interleave(n, 0)) for a, b in self._fed]
        self.length_B1 = None if self.length_B1 is None else self.length_B1.repeat_interleave(n, 0)


def prefix_of(
    model: Any, tokens_BT: Tensor, positions_BT: Tensor, kind: CacheKind, *, length_B1: Optional[Tensor] = None
) -> Prefix:
    """The key of a cache that these would fill."""
    return Prefix(
        weights=_digest(*model.state_dict().values()),
        tokens=_digest(tokens_BT),
        positions=_digest(positions_BT.expand(tokens_BT.shape)),
        rope=f"{model.arch.pos} {model.arch.rope_scaling} {None if length_B1 is None else length_B1.tolist()}",
        kind=str(kind),
    )


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
