"""A cache that has stopped growing: single tokens go into slots that a counter on the device names, and every query is
handed all slots with a mask of those that are filled. Shapes and addresses stay, so a CUDA graph can be recorded of a
whole step; the price is that slots not yet filled are read as well.

    fix(cache)      # after the prefill; from then on one token at a time
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from lmlab.errors import LmlabError
from lmlab.model.cache import Cache, Kept, LayerCache, Layout
from lmlab.model.mask import Mask
from lmlab.model.storage import Paged, Storage


class FixedLayout:
    """What a Layout is to the model, for T = 1."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        slots, positions = layout.slots, layout._positions.storage
        assert slots is not None
        assert positions is not None
        self.window, self.sinks, self.ring_from, self.max_len = layout.window, layout.sinks, layout.ring_from, slots
        self.columns, self.tokens_B1 = layout.columns, layout.tokens_B1
        self.column_1 = torch.tensor([layout.columns], device=device)  # of the next token
        self.slot_1 = torch.zeros_like(self.column_1)
        self.slots_S = torch.arange(slots, device=device)
        self.positions = FixedKept(positions, self)
        valid = layout._valid.storage
        self.valid = None if valid is None else FixedKept(valid, self)
        self.mask, self.k_pos_BS = Mask(), layout.k_pos_BS
        self.plan = None  # a slot that a tensor names needs none

    def begin(self, positions_BT: Tensor, valid_BT: Optional[Tensor]) -> None:
        """Mask and positions for one more token of each row."""
        if positions_BT.shape[1] != 1 or valid_BT is not None:
            raise LmlabError("a fixed cache takes one token of each row at a time", "fill it before it is fixed")
        self.slot_1.copy_(self._slot())
        self.k_pos_BS = self.positions.append(positions_BT[..., None, None])[..., 0, 0]
        valid_BS = (self.slots_S <= self.column_1)[None]
        if self.valid is not None:
            one = torch.ones_like(positions_BT, dtype=torch.bool)
            valid_BS = valid_BS & self.valid.append(one[..., None, None])[..., 0, 0]
            if self.tokens_B1 is not None and self.window is not None:
                near = self.k_pos_BS > positions_BT - self.window  # before the ring lie more than some rows' sinks
                valid_BS = valid_BS & (near | (self.k_pos_BS < self.sinks))
        self.mask = Mask(windowed=True, valid_BS=valid_BS)
        self.column_1.add_(1)
        self.columns += 1

    def _slot(self) -> Tensor:
        if self.window is None:
            return self.column_1
        assert self.ring_from is not None
        inside = self.column_1 - self.ring_from
        return torch.where(inside < 0, self.column_1, self.ring_from + inside % self.window)


class FixedKept:
    """One tensor of the columns, all of its slots at once."""

    def __init__(self, storage: Storage, layout: FixedLayout) -> None:
        self.storage, self.layout = storage, layout
        storage.clear(layout.columns)

    def append(self, new_B1KC: Tensor, plan: None = None) -> Tensor:
        """(B, S, K, C), those not filled too: they hold zeros."""
        self.storage.put(self.layout.slot_1, new_B1KC)
        return self.storage.read((0, self.layout.max_len))


def why_not(cache: Cache) -> Optional[str]:
    """What keeps a cache from being fixed, or None."""
    if cache.max_len is None:
        return "the cache grows"
    if not cache.columns:
        return "nothing is in it yet"
    for layout in cache.layouts:
        if layout.ring_from is None:
            return "a row has not had all of its sinks yet"
    if any(isinstance(storage, Paged) for layer in cache.layers for storage in layer.storages):
        return "pages are handed out on the host"
    return None


def fix(cache: Cache) -> list[Tensor]:
    """Fix the cache, in place; the counters that a step moves, to be put back where a step did not count. Raises
    LmlabError where `why_not` says why not."""
    if (reason := why_not(cache)) is not None:
        raise LmlabError(f"this cache can't be fixed: {reason}", "decode with the cache as it is")
    device = cache._parameters[0].device
    fixed = {layout: FixedLayout(layout, device) for layout in cache.layouts}
    for layer in cache.layers:
        _fix_layer(layer, fixed[layer.layout])
    cache.layouts = list(fixed.values())  # type: ignore[arg-type]
    cache.fixed = True
    return [layout.column_1 for layout in fixed.values()]


def _fix_layer(layer: LayerCache, layout: FixedLayout) -> None:
    layer.layout = layout  # type: ignore[assignment]
    layer.kept = [FixedKept(_filled(kept), layout) for kept in layer.kept]  # type: ignore[misc]


def _filled(kept: Kept) -> Storage:
    assert kept.storage is not None
    return kept.storage
