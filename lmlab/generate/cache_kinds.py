"""How a cache is named on the command line: full, int8, window:512, sink:4+508."""

from __future__ import annotations

import re
from typing import Any

from lmlab.errors import ConfigError
from lmlab.model.cache import CacheKind
from lmlab.model.spec import Arch

_WINDOW = re.compile(r"window:(\d+)")
_SINK = re.compile(r"sink:(\d+)\+(\d+)")
LIMIT = 2**31


def cache_kind(text: str, *, also: str = "") -> CacheKind:
    """The kind that a word stands for. also: what else the caller takes, for the hint. Raises ConfigError."""
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
            f"`--cache` is {text}",
            f"use full, int8, {also}window:N (the newest N) or sink:N+M (the first N and the newest M)",
        )
    if not 1 <= window < LIMIT or sinks >= LIMIT:
        raise ConfigError(f"`--cache` is {text}: a window keeps at least the token itself", "use window:1 or more")
    return CacheKind(window=window, sinks=sinks)


def idle(kind: CacheKind, arch: Arch, n: int, what: str) -> list[ConfigError]:
    """An error for a kind that drops nothing of any layer in rows of n cached tokens; `what` says which rows."""
    if kind.window is None:
        return []
    attn: Any = arch.attn
    own = [attn.layer_window(layer) for layer in range(arch.model.n_layers)]
    if all(kind.layout(window) == (window, 0) for window in own):
        widest = max(window for window in own if window is not None)
        return [ConfigError(f"`--cache` is {kind}: no layer keeps more than its window of {widest}", _smaller(widest))]
    if kind.window + kind.sinks >= n:
        return [ConfigError(f"`--cache` is {kind}, which drops nothing: {what}", _smaller(n))]
    return []


def _smaller(n: int) -> str:
    """What drops something of n tokens."""
    return (
        f"use a smaller one, of fewer than {n} tokens" if n > 1 else "leave it out: nothing keeps less than one token"
    )
