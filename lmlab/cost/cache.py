"""Bytes of the keys and values that a request keeps, from the sizes alone; `Cache.n_bytes` measures the same.

Σ over layers of B · min(N, window) · heads · (channels of k + channels of v) · bytes      (full: 2·B·N·L·K·C·bytes)
"""

from __future__ import annotations

from lmlab.model.cache import FULL, CacheKind
from lmlab.model.spec import Arch

INT8_FACTOR_BYTES = 2  # one bf16 factor per token, head and tensor


def cache_bytes(arch: Arch, batch: int, tokens: int, value_bytes: int, kind: CacheKind = FULL) -> int:
    """Of `batch` rows of `tokens` tokens without padding, each value in `value_bytes` bytes."""
    sizes = arch.attn.cached(arch.model.d_model, arch.model.n_heads)
    quantized = kind.storage == "int8"
    per_token = sum(heads * (c + INT8_FACTOR_BYTES if quantized else c * value_bytes) for heads, c in sizes)
    layouts = (kind.layout(arch.attn.layer_window(layer)) for layer in range(arch.model.n_layers))
    kept = sum(tokens if window is None else min(tokens, window + sinks) for window, sinks in layouts)
    return batch * kept * per_token
