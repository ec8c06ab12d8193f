"""How a cache is named on the command line: full, int8, window:512, sink:4+508."""

from __future__ import annotations

import re

from lmlab.errors import ConfigError
from lmlab.model.cache import CacheKind

_WINDOW = re.compile(r"window:(\d+)")
_SINK = re.compile(r"sink:(\d+)\+(\d+)")
LIMIT = 2**31


def cache_kind(text: str) -> CacheKind:
    """The kind that a word stands for. Raises ConfigError."""
    if text in ("full", "int8"):
        return CacheKind(text)
    if match := _WINDOW.fullmatch(text):
        window, sinks = int(match[1]), 0
    elif match := _SINK.fullmatch(text):
        sinks, window = int(match[1]), int(match[2])
        if sinks == 0:
            raise ConfigError(f"`--cache` is {text}: no token is a sink", f"write window:{window}")
    else:
        raise ConfigError(
            f"`--cache` is {text}", "use full, int8, window:N (the newest N) or sink:N+M (the first N and the newest M)"
        )
    if not 1 <= window < LIMIT or sinks >= LIMIT:
        raise ConfigError(f"`--cache` is {text}: a window keeps at least the token itself", "use window:1 or more")
    return CacheKind(window=window, sinks=sinks)
