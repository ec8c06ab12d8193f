"""A fixed cache: the same logits as a growing one, with shapes and addresses that stay and no look at the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.errors import LmlabError
from lmlab.generate.decode import generate
from lmlab.generate.sampling import Sampling
from lmlab.model.cache import Cache, CacheKind
from lmlab.model.fixed import fix
from tests.composed import close, rows
from tests.model.test_cache import ATTN, KINDS, POS, T, asked_length, chunked, made

FIXABLE = {name: kind for name, kind in KINDS.items() if name != "paged"} | {"int8": CacheKind("int8")}
FIRST = 7  # columns of the prefill


class Looks(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def stepped(net: Any, tokens: Any, positions: Any, kind: CacheKind, valid: Any = None) -> tuple[Any, list[str]]:
    """(logits of the columns after FIRST, one by one over a fixed cache; what looked at the host)."""
    cache, length = Cache(net, kind, max_len=T), asked_length(net, tokens.shape[1], len(tokens))
    first = None if valid is None else valid[:, :FIRST]
    net(tokens[:, :FIRST], positions[:, :FIRST], valid_BT=first, length_BT=length, cache=cache)
    fix(cache)
    out, looks = [], Looks()
    with looks:
        for n in range(FIRST, T):
            at = slice(n, n + 1)
            asked = {"length_BT": cache.length_B1, "cache": cache}
            out.append(net(tokens[:, at], positions[:, at].clone(), **asked).logits_BTV)
    return torch.cat(out, 1), looks.found


@pytest.mark.parametrize(("pos", "scaling"), POS, ids=lambda p: p if isinstance(p, str) else str(p[0]))
@pytest.mark.parametrize("attn", ATTN)
def test_fixed_is_growing(attn, pos, scaling):
    net, (tokens, positions) = made(attn, pos, scaling), rows(2, T)
    for name, kind in FIXABLE.items():
        growing, _ = chunked(net, tokens, positions, 1, kind)
        fixed, looks = stepped(net, tokens, positions, kind)
        close(fixed, growing[:, FIRST:])
        on_the_cpu_only = pos == "learned" or scaling == "dynamic_ntk"  # bounds of a table, rows that are equal
        assert bool(looks) == on_the_cpu_only, name


@pytest.mark.parametrize("kind", FIXABLE)
@pytest.mark.parametrize("attn", ["mha", "gqa, windows", "mla"])
def test_fixed_is_growing_with_padding(attn, kind):
    net, pads = made(attn), torch.tensor([0, 2, 5])[:, None]
    tokens, columns = rows(3, T)
    valid, positions = columns >= pads, (columns - pads).clamp_min(0)
    growing, _ = chunked(net, tokens, positions, 1, FIXABLE[kind], valid=valid)
    if kind == "sinks":  # the last row has its two sinks in column 6
        assert FIRST == 7
    close(stepped(net, tokens, positions, FIXABLE[kind], valid)[0], growing[:, FIRST:])


def test_what_lies_in_free_slots_reaches_nobody():
    net, (tokens, positions) = made(), rows(1, T)
    with torch.no_grad():
        cache = Cache(net, max_len=T)
        net(tokens[:, :FIRST], positions[:, :FIRST], cache=cache)
        for layer in cache.layers:
            for storage in layer.storages:
                storage.tensors[0][:, :, FIRST:] = torch.nan
        fix(cache)
        assert net(tokens[:, :1], positions[:, FIRST : FIRST + 1], cache=cache).logits_BTV.isfinite().all()


def test_counters_can_be_put_back():
    """As steps that only warm up do: the token after them is the first."""
    net, (tokens, positions) = made("gqa, windows"), rows(2, T)
    with torch.no_grad():
        cache = Cache(net, max_len=T)
        net(tokens[:, :FIRST], positions[:, :FIRST], cache=cache)
        counters = fix(cache)
        kept = [c.clone() for c in counters]
        at = slice(FIRST, FIRST + 1)
        first = net(tokens[:, at], positions[:, at], cache=cache).logits_BTV
        for counter, value in zip(counters, kept, strict=True):
            counter.copy_(value)
        assert torch.equal(net(tokens[:, at], positions[:, at], cache=cache).logits_BTV, first)


@pytest.mark.parametrize(
    ("kind", "max_len", "fed", "padding", "why"),
    [
        (CacheKind(), None, 3, 0, "the cache grows"),
        (CacheKind("paged"), T, 3, 0, "pages are handed out"),
        (CacheKind(window=4, sinks=2), T, 3, 2, "all of its sinks"),
        (CacheKind(), T, 0, 0, "nothing is in it"),
    ],
)
def test_what_cannot_be_fixed_says_why(kind, max_len, fed, padding, why):
    net, (tokens, positions) = made(), rows(1, T)
    cache = Cache(net, kind, max_len=max_len)
    with torch.no_grad():
        if fed:
            valid = positions[:, :fed] >= padding if padding else None
            net(tokens[:, :fed], (positions[:, :fed] - padding).clamp_min(0), valid_BT=valid, cache=cache)
        with pytest.raises(LmlabError, match=why):
            fix(cache)


def test_a_fixed_cache_takes_single_tokens_and_has_no_history():
    net, (tokens, positions) = made(), rows(1, T)
    cache = Cache(net, max_len=T)
    with torch.no_grad():
        net(tokens[:, :3], positions[:, :3], cache=cache)
        fix(cache)
        with pytest.raises(LmlabError, match="one token of each row at a time"):
            net(tokens[:, 3:5], positions[:, 3:5], cache=cache)
        for ask in (cache.prefix, lambda: cache.fork(2)):
            with pytest.raises(LmlabError, match="a fixed cache"):
                ask()


@pytest.mark.parametrize("kind", [CacheKind(), CacheKind(window=4, sinks=2), CacheKind("int8")], ids=str)
def test_a_recorded_step_gives_the_same_text(monkeypatch, kind):
    """With a recording that calls the step itself: what is generated is what is generated without one."""
    net = made("gqa, windows")
    asked: dict[str, Any] = {"max_new": 20, "kind": kind, "sampling": Sampling(temperature=1.0, seed=3), "samples": 2}
    plain = generate(net, [[1, 2, 3], [4, 5, 6, 7, 8]], **asked)
    assert plain.decode_path == "eager"

    def warmed_up(step: Any, put_back: Any) -> Any:
        step()
        put_back()
        return step

    monkeypatch.setattr("lmlab.generate.step.worth_recording", lambda device, max_new: True)
    monkeypatch.setattr("lmlab.generate.step.recorded", warmed_up)
    found = generate(net, [[1, 2, 3], [4, 5, 6, 7, 8]], **asked)
    assert found.decode_path == "CUDA graph"
    assert found.tokens == plain.tokens


def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch):
    def fails(step: Any, put_back: Any) -> Any:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    net = made()
    plain = generate(net, [[1, 2, 3]], max_new=12)
    monkeypatch.setattr("lmlab.generate.step.worth_recording", lambda device, max_new: True)
    monkeypatch.setattr("lmlab.generate.step.recorded", fails)
    found = generate(net, [[1, 2, 3]], max_new=12)
    assert found.decode_path.startswith("eager (not recorded: operation not permitted")
    assert found.tokens == plain.tokens
