"""What is wrong with a kind of cache, and a remedy that there is."""

from __future__ import annotations

import pytest

from lmlab.errors import ConfigError
from lmlab.generate.cache_kinds import cache_kind, idle
from tests.composed import arch


def test_unknown_kinds_list_what_the_caller_takes():
    with pytest.raises(ConfigError) as plain:
        cache_kind("FULL")
    assert plain.value.hint.startswith("use full, int8, window:N")
    with pytest.raises(ConfigError) as more:
        cache_kind("FULL", also="none (all again each time), ")
    assert more.value.hint.startswith("use full, int8, none (all again each time), window:N")


@pytest.mark.parametrize(
    ("window", "n", "kind", "hint"),
    [
        (1, 16, "window:8", "leave it out: nothing keeps less than one token"),
        (4, 16, "window:8", "use a smaller one, of fewer than 4 tokens"),
        (None, 16, "window:16", "use a smaller one, of fewer than 16 tokens"),
        (None, 1, "window:1", "leave it out: nothing keeps less than one token"),
    ],
)
def test_a_cache_that_drops_nothing_has_a_hint_that_can_be_followed(window, n, kind, hint):
    (error,) = idle(cache_kind(kind), arch(attn=("mha", {"window": window})), n, "rows")
    assert error.hint == hint
    if "fewer" in hint:
        less = int(hint.split()[7]) - 1
        assert not idle(cache_kind(f"window:{less}"), arch(attn=("mha", {"window": window})), n, "rows")
