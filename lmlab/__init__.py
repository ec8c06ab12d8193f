"""lmlab: is this change to a decoder-only Transformer better, and by how much?

`lmlab.load(run)` and `lmlab.results(path)` are fetched on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["load", "results"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from lmlab import api

        return getattr(api, name)
    raise AttributeError(f"module 'lmlab' has no attribute '{name}'")
