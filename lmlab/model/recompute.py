"""Activation checkpointing: of a block only what enters it is kept, and backward computes the rest again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, x_BTD: Tensor, view: Any, valid_BT: Optional[Tensor]) -> tuple[Tensor, Any]:
    """The block without a cache. The second time random numbers are those of the first, the stats are dropped, and
    buffers stay as the first time left them (Chen et al. 2016, 1604.06174)."""
    contexts = partial(_contexts, block)
    return checkpoint(block, x_BTD, view, valid_BT, None, use_reentrant=False, context_fn=contexts)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _unmoved(block)


@contextmanager
def _unmoved(block: nn.Module) -> Iterator[None]:
    """Running averages that move inside are put back; what nobody touched is not written, as backward may hold it."""
    kept = [(buffer, buffer._version, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in kept:
                if buffer._version != version:
                    buffer.copy_(value)
