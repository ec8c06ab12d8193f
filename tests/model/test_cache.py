"""Cached = full: rows in chunks of any size give the logits of whole rows, on every part and cache; float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.check.composed import randomized, wrapped
from lmlab.cost.cache import cache_bytes
from lmlab.errors import LmlabError
from lmlab.model.cache import FULL, Cache, CacheKind, prefix_of
from lmlab.model.mask import CAUSAL, Mask
from lmlab.model.transformer import Transformer
from tests.composed import arch, close, model, peaked, rows

T, W = 18, 4
CHUNKS = (1, 3, 7, W, W + 1, T)
SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "seq_len": T}
ATTN: dict[str, Any] = {
    "mha": "mha",
    "mqa": "mqa",
    "gqa, windows": ("gqa", {"n_kv_heads": 2, "window": W, "qk_norm": "head", "bias_qkv": True}),
    "wide windows": ("mha", {"window": 3 * W}),  # wider than what sinks and window of a kind keep
    "windows and whole, NoPE": ("mha", {"window": W, "pattern": "SL", "nope_every_n_layers": 2}),
    "softcap": ("gqa", {"softcap": 20.0, "scale": 0.3}),
    "shaped, no projections": ("mha", {"weights": "shaped", "v_proj": "none", "o_proj": "none"}),
    "mla": ("mla", {"kv_rank": 12, "rope_dim": 4}),
    "mla absorbed, windows": ("mla", {"form": "absorbed", "window": W, "q_rank": 12}),
}
SCALING: dict[str, Any] = {
    "none": "none",
    "pi": "pi",
    "ntk": "ntk",
    "dynamic_ntk": ("dynamic_ntk", {"original_len": 5}),
    "yarn": ("yarn", {"original_len": 64, "factor": 4.0}),
    "llama3": ("llama3", {"original_len": 64, "factor": 4.0}),
}
POS: list[tuple[Any, str]] = [(p, "none") for p in ("none", "sinusoidal", "learned", "alibi", ("t5", {"n_buckets": 8}))]
POS += [("rope", s) for s in SCALING] + [(("rope", {"pairing": "interleaved", "fraction": 0.5}), "none")]
KINDS = {"full": FULL, "paged": CacheKind("paged"), "window": CacheKind(window=W), "sinks": CacheKind("full", W, 2)}
BLOCKS = ("prenorm", "postnorm", "deepnorm", "sandwich", "reordered", "parallel", "simplified")


def made(attn: str = "mha", pos: Any = "rope", scaling: str = "none", **more: Any) -> Transformer:
    net = model(attn=ATTN[attn], pos=pos, rope_scaling=SCALING[scaling], model=SIZES | more)
    return peaked(randomized(net), T)


@pytest.mark.parametrize(("attn", "layouts"), [("mha", 1), ("windows and whole, NoPE", 2)])
def test_positions_are_asked_once_per_layout_with_its_own_keys(attn: str, layouts: int, monkeypatch) -> None:
    net, asked = made(attn, "alibi", n_layers=4), []
    plain = net.pos.tables

    def spied(q: Tensor, k: Tensor, length: Tensor | None = None) -> Any:
        asked.append((q[0].tolist(), sorted(k[0].tolist())))
        return plain(q, k, length)

    monkeypatch.setattr(net.pos, "tables", spied)
    tokens, positions = rows(2, T)
    chunked(net, tokens, positions, 6)
    windowed = [(list(range(s, s + 6)), list(range(max(0, s - W + 1), s + 6))) for s in (0, 6, 12)]
    whole = [(list(range(s, s + 6)), list(range(s + 6))) for s in (0, 6, 12)]
    each = [windowed, whole] if layouts == 2 else [whole]
    assert asked == [kind[n] for n in range(3) for kind in each]


def asked_length(net: Transformer, n: int, B: int = 2) -> Tensor | None:
    return torch.full((B, 1), n) if net.pos.needs_length else None


@torch.no_grad()
def chunked(net: Transformer, tokens: Tensor, positions: Tensor, size: int, kind: CacheKind = FULL, **how: Any):
    """(logits of all columns, the cache)."""
    valid, length = how.pop("valid", None), how.pop("length", asked_length(net, tokens.shape[1], len(tokens)))
    cache, out = Cache(net, kind, **how), []
    for start in range(0, tokens.shape[1], size):
        part = slice(start, start + size)
        some = None if valid is None else valid[:, part]
        out.append(net(tokens[:, part], positions[:, part], valid_BT=some, length_BT=length, cache=cache).logits_BTV)
    return torch.cat(out, 1), cache


@torch.no_grad()
def whole(net: Transformer, tokens: Tensor, positions: Tensor, kind: CacheKind) -> Tensor:
    """The logits by whole rows, with the mask that the kind stands for written out, where no narrower window is."""
    kept = (positions < kind.sinks)[:1]
    masks = {False: Mask(causal=True, window=kind.window, kept_BS=kept if kind.sinks else None), True: CAUSAL}
    x = net.embedded(tokens, positions, None)
    views = {own: net.views(mask, positions, x.dtype, asked_length(net, T)) for own, mask in masks.items()}
    for layer, block in enumerate(net.blocks):
        own, most = block.attn.window, (kind.window or T) + kind.sinks
        x = block(x, views[own is not None and own <= most][layer])[0]
    return net.logits(x if net.norm is None else net.norm(x))


@pytest.mark.parametrize(("pos", "scaling"), POS, ids=lambda p: p if isinstance(p, str) else str(p[0]))
@pytest.mark.parametrize("attn", ATTN)
def test_cached_is_full(attn, pos, scaling):
    net, (tokens, positions) = made(attn, pos, scaling), rows(2, T)
    for name, kind in KINDS.items():
        full = whole(net, tokens, positions, kind)
        for size in CHUNKS:
            found, _ = chunked(net, tokens, positions, size, kind, max_len=T if size % 2 else None)
            assert torch.isfinite(found).all(), (name, size)
            close(found, full)


@pytest.mark.parametrize("backend", ["dense", "sdpa", "tiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_is_full_on_every_backend(backend, kind):
    net = peaked(model(attn=("gqa", {"backend": backend}), pos="alibi", model=SIZES), T)
    tokens, positions = rows(2, T)
    full = whole(net, tokens, positions, KINDS[kind])
    for size in CHUNKS:
        close(chunked(net, tokens, positions, size, KINDS[kind])[0], full)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_hands_the_cache_on(block):
    net = peaked(randomized(model(block=block, attn=ATTN["gqa, windows"], norm="batchnorm", model=SIZES)), T)
    tokens, positions = rows(2, T)
    for size in (1, 5):
        close(chunked(net, tokens, positions, size)[0], net(tokens, positions).logits_BTV.detach())


# ---------------------------------------------------------------- left padding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attn", ["mha", "gqa, windows", "wide windows", "mla"])
@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "learned"])
def test_padded_batch_is_each_row_alone(kind, attn, pos):
    net, pads = made(attn, pos), torch.tensor([0, 5, 11])[:, None]
    tokens, positions = rows(3, T)
    valid = positions >= pads
    for size in CHUNKS:
        together, _ = chunked(net, tokens, (positions - pads).clamp_min(0), size, KINDS[kind], valid=valid)
        for b, n in enumerate(pads.flatten().tolist()):
            alone, _ = chunked(net, tokens[b : b + 1, n:], positions[b : b + 1, : T - n], 1, KINDS[kind])
            close(together[b : b + 1, n:], alone)


def test_padding_after_a_first_chunk_without_is_refused():
    net, (tokens, positions) = made(), rows(2, T)
    cache = Cache(net)
    with torch.no_grad():
        net(tokens[:, :2], positions[:, :2], cache=cache)
        with pytest.raises(LmlabError, match="begun without padding"):
            net(tokens[:, 2:3], positions[:, 2:3], valid_BT=torch.tensor([[True], [False]]), cache=cache)


def test_a_declared_length_holds_for_a_request():
    """Dynamic NTK: the length is of the request; a short one after a long one is as from a fresh model."""
    net, (tokens, positions) = made(scaling="dynamic_ntk"), rows(2, T)
    short = chunked(net, tokens[:, :4], positions[:, :4], 2)[0]
    chunked(net, tokens, positions, 2)
    assert torch.equal(chunked(net, tokens[:, :4], positions[:, :4], 2)[0], short)
    longer = chunked(net, tokens[:, :4], positions[:, :4], 2, length=torch.full((2, 1), T))[0]
    close(longer, net(tokens[:, :4], positions[:, :4], length_BT=torch.full((2, 1), T)).logits_BTV.detach())
    assert (longer - short).abs().max() > 1e-3
    cache = Cache(net)
    with torch.no_grad():
        net(tokens[:, :4], positions[:, :4], length_BT=torch.full((2, 1), T), cache=cache)
        with pytest.raises(LmlabError, match="length is not the one"):
            net(tokens[:, 4:5], positions[:, 4:5], length_BT=torch.full((2, 1), T + 1), cache=cache)
        with pytest.raises(LmlabError, match="asks how long"):
            net(tokens, positions, cache=Cache(net))


# ---------------------------------------------------------------- int8


def int8(x: Tensor) -> Tensor:
    """The formula again: x in steps of a 127th of its token's largest value per head, that factor in bf16."""
    factor = (x.abs().amax(-1, keepdim=True) / 127).bfloat16().to(x.dtype)
    return (x / factor).round().clamp(-127, 127) * factor


@pytest.mark.parametrize("attn", ["mha", "gqa, windows", "mla absorbed, windows"])
def test_int8_is_attention_of_rounded_keys_and_values(attn):
    net, (tokens, positions) = made(attn), rows(2, T)

    def rounding(inner):
        def attention(q, k, v, *rest, **how):
            k_read = int8(k)
            v_read = k_read[..., : v.shape[-1]] if attn.startswith("mla") else int8(v)
            return inner(q, k_read, v_read, *rest, **how)

        return attention

    with wrapped(net, rounding), torch.no_grad():
        full = net(tokens, positions).logits_BTV
    for size in CHUNKS:
        close(chunked(net, tokens, positions, size, CacheKind("int8"))[0], full)
    exact = net(tokens, positions).logits_BTV.detach()
    assert 1e-6 < (full - exact).abs().max() / exact.abs().max() < 0.2


def test_int8_keeps_zeros_and_large_values():
    net, (tokens, positions) = made(), rows(1, 4)
    with torch.no_grad():
        for block in net.blocks:
            block.attn.v.weight.zero_()
            block.attn.k.weight.mul_(1e6)
    assert torch.isfinite(chunked(net, tokens, positions, 1, CacheKind("int8"))[0]).all()


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("attn", "kind", "values"),
    [
        ("mha", FULL, 2 * 4 * 8 * T),
        ("mqa", FULL, 2 * 1 * 8 * T),
        ("gqa, windows", FULL, 2 * 2 * 8 * W),
        ("mha", CacheKind(window=W), 2 * 4 * 8 * W),
        ("mha", CacheKind("full", W, 2), 2 * 4 * 8 * (W + 2)),
        ("mla", FULL, (12 + 4) * T),
    ],
)
def test_bytes_are_the_formula(attn, kind, values):
    net, (tokens, positions) = made(attn), rows(2, T)
    _, cache = chunked(net, tokens, positions, 3, kind, max_len=T)
    assert cache.n_bytes == cache_bytes(net.arch, 2, T, 8, kind) == 2 * 2 * values * 8


def test_bytes_of_published_sizes():
    """32 layers, 32 heads of 128, two bytes: 2 GiB at 4,096 tokens, 16 at 32,768; 16 requests of 131,072: 1,024."""
    sizes = {"n_layers": 32, "d_model": 4096, "n_heads": 32, "seq_len": 4096}
    big = arch(model=sizes)
    assert [cache_bytes(big, B, n, 2) / 2**30 for B, n in ((1, 4096), (1, 32768), (16, 131072))] == [2, 16, 1024]


def test_int8_takes_at_most_0_55_of_bf16():
    net = model(torch.bfloat16, model={"d_model": 256, "n_heads": 4, "n_layers": 2, "seq_len": 64})
    tokens, positions = rows(1, 64)
    small, plain = (chunked(net, tokens, positions, 64, CacheKind(s), max_len=64)[1].n_bytes for s in ("int8", "full"))
    assert small == cache_bytes(net.arch, 1, 64, 2, CacheKind("int8"))
    assert small / plain <= 0.55


def test_decoding_copies_no_cache():
    """A token more moves the token, not the storage: the memory stays where it is."""
    net, (tokens, positions) = made("mha"), rows(2, T)
    for kind in (FULL, CacheKind(window=W), CacheKind("full", W, 2)):
        cache = Cache(net, kind, max_len=T)
        with torch.no_grad():
            net(tokens[:, :8], positions[:, :8], cache=cache)
            before = [t.data_ptr() for layer in cache.layers for s in layer.storages for t in s.tensors]
            for at in range(8, T):
                net(tokens[:, at : at + 1], positions[:, at : at + 1], cache=cache)
        assert [t.data_ptr() for layer in cache.layers for s in layer.storages for t in s.tensors] == before


def test_more_than_a_static_cache_holds_is_refused():
    net, (tokens, positions) = made(), rows(2, T)
    with pytest.raises(LmlabError, match=f"made for {T - 1} tokens, {T} are asked for"):
        chunked(net, tokens, positions, 1, max_len=T - 1)


# ---------------------------------------------------------------- pages and forks


def test_pages_lie_in_no_order():
    net, (tokens, positions) = made(), rows(2, T)
    _, cache = chunked(net, tokens, positions, 3, CacheKind("paged"))
    (storage, _) = cache.layers[0].storages
    assert storage.table.shape == (2, -(-T // storage.PAGE))
    assert storage.table.flatten().tolist() != sorted(storage.table.flatten().tolist())


@pytest.mark.parametrize("kind", [*KINDS.values(), CacheKind("int8")], ids=str)
@pytest.mark.parametrize("attn", ["gqa, windows", "mla"])
def test_forked_is_unforked(kind, attn):
    net, (tokens, positions) = made(attn, "alibi"), rows(4, T)
    prefix = tokens[:1, :7]
    tokens = torch.cat((prefix.expand(4, -1), tokens[:, 7:]), 1)
    _, cache = chunked(net, prefix, positions[:1, :7], 3, kind)
    cache.fork(4, prefix_of(net, prefix, positions[:1, :7], kind))
    with torch.no_grad():
        found = [net(tokens[:, at : at + 1], positions[:, at : at + 1], cache=cache).logits_BTV for at in range(7, T)]
    close(torch.cat(found, 1), chunked(net, tokens, positions, 1, kind)[0][:, 7:])


def test_a_fork_of_another_prefix_is_refused():
    net, (tokens, positions) = made(), rows(1, T)
    _, cache = chunked(net, tokens, positions, T)
    key = prefix_of(net, tokens, positions, FULL)
    wrong = {
        "tokens": prefix_of(net, tokens.roll(1, 1), positions, FULL),
        "positions": prefix_of(net, tokens, positions + 1, FULL),
        "kind": prefix_of(net, tokens, positions, CacheKind(window=W)),
        "rope": prefix_of(made(pos=("rope", {"theta": 500.0})), tokens, positions, FULL),
    }
    for name, expected in wrong.items():
        with pytest.raises(LmlabError, match=f"filled with other .*{name}"):
            cache.fork(2, expected)
    with torch.no_grad():
        net.head_weight[0, 0] += 1
    with pytest.raises(LmlabError, match="weights"):
        cache.fork(2, key)


# ---------------------------------------------------------------- misuse


def test_gradients_and_documents_are_refused():
    net, (tokens, positions) = made(), rows(2, T)
    with pytest.raises(LmlabError, match="inference"):
        net(tokens, positions, cache=Cache(net))
    with torch.no_grad(), pytest.raises(LmlabError, match="documents"):
        net(tokens, positions, documents_BT=torch.zeros_like(tokens), cache=Cache(net))


def test_changed_weights_are_noticed():
    net, (tokens, positions) = made(), rows(2, T)
    _, cache = chunked(net, tokens[:, :4], positions[:, :4], 4)
    with torch.no_grad():
        net.blocks[0].attn.q.weight.mul_(2)
        with pytest.raises(LmlabError, match="weights changed"):
            net(tokens[:, 4:5], positions[:, 4:5], cache=cache)


def test_an_attention_that_ignores_its_cache_is_noticed():
    net, (tokens, positions) = made(), rows(2, T)
    attend = net.blocks[1].attn.forward
    net.blocks[1].attn.forward = lambda x, view, cache=None: attend(x, view)
    with torch.no_grad(), pytest.raises(LmlabError, match=r"layer 1 \(Attention\) does not use the cache"):
        net(tokens[:, :3], positions[:, :3], cache=Cache(net))


def test_last_gives_the_last_logits_only():
    net, (tokens, positions) = made(), rows(2, T)
    assert torch.equal(net(tokens, positions, last=2).logits_BTV, net(tokens, positions).logits_BTV[:, -2:])


def test_kinds_print_as_they_are_typed():
    assert [str(k) for k in (*KINDS.values(), CacheKind("int8"))] == ["full", "paged", "window:4", "sink:2+4", "int8"]
