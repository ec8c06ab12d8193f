"""A composition at the size of a check: the same parts, small widths, short rows; what is given as a number follows.

Head counts keep their ratio, windows their share of a row, and there are as many layers as a pattern needs. A row is
longer than the original length of dynamic NTK, and much shorter than that of YaRN and Llama 3, which keep theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from lmlab.model.spec import Arch, MoESpec

T, VOCAB, WIDTH, HEADS, LAYERS, EXPERTS = 24, 97, 64, 8, 12, 16
LARGEST = 128  # channels of a head
SHORTEST = 8  # a row that can be cut in two and padded
BY_HEAD = ("head_dim", "rope_dim", "nope_dim", "v_dim")  # fields of attention that follow the head size
BY_WIDTH = ("kv_rank", "q_rank")  # … the width


def small(arch: Arch) -> Arch:
    """The composition of a check. It is `arch` itself, shortened, when that is no wider than 64."""
    m = arch.model
    pattern, every = getattr(arch.attn, "pattern", None), getattr(arch.attn, "nope_every_n_layers", None)
    routed = next((layer + 1 for layer in range(m.n_layers) if arch.moe.routes(layer)), 0)
    layers = min(m.n_layers, LAYERS, max(2, len(pattern or ""), every or 0, routed))
    arch = narrowed(arch) if m.d_model > WIDTH else arch
    model = given(arch.model, n_layers=layers, seq_len=m.seq_len if SHORTEST <= m.seq_len < T else T)
    d_ff = getattr(arch.ffn, "d_ff", None)
    return dataclasses.replace(
        arch,
        model=model,
        ffn=given(arch.ffn, d_ff=None if d_ff is None else min(d_ff, 8 * arch.model.d_model)),
        attn=given(arch.attn, window=_window(arch, layers), backend=_backend(arch)),
        pos=given(arch.pos, max_len=_table(arch)),
        rope_scaling=given(arch.rope_scaling, original_len=_original(arch)),
        moe=_experts(arch, arch.model.d_model / m.d_model),
    )


def _experts(arch: Arch, by_width: float) -> MoESpec:
    """At most 16 experts, in as many groups as before where these divide them, and as wide as the model is now. A token
    still leaves some out, and an expert has room for as small a share of the tokens that would fill it."""
    moe: Any = arch.moe
    E, width = getattr(moe, "n_experts", 0), getattr(moe, "d_expert", None)
    few = E if E <= EXPERTS else EXPERTS
    groups = getattr(moe, "n_expert_groups", 1)
    groups = groups if few % groups == 0 and groups < few else min(4, max(1, few // 2))
    limited = getattr(moe, "n_limited_groups", None)
    limited = None if limited is None else min(limited, groups - 1)
    most = few if limited is None else few // groups * limited
    k = getattr(moe, "top_k", 1)
    fewer = k if few == E else few if k == E else min(k, few // 2, most)
    room = getattr(moe, "capacity_factor", None)
    return given(
        moe,
        n_experts=few,
        top_k=fewer,
        capacity_factor=room if room is None or few == E else room * few * k / (E * fewer),
        n_expert_groups=groups,
        n_limited_groups=limited,
        d_expert=None if width is None else max(1, min(round(width * by_width), 8 * arch.model.d_model)),
    )


def narrowed(arch: Arch) -> Arch:
    """d_model 64 or near it. The head size is one at which the rotary channels pair up."""
    m = arch.model
    K = arch.attn.kv_heads(m.n_heads)
    heads, kv = _heads(m.n_heads, K)
    full = getattr(arch.pos, "width", None)
    several = callable(full) and full(arch.attn.rotary_size(m.d_model, m.n_heads)) >= 4
    least = 4 if several else 2  # of one pair theta would say nothing
    start, own = max(8, 2 * (WIDTH // heads // 2)), m.d_model // m.n_heads
    sizes = sorted({*range(2, 66, 2), min(own, LARGEST)}, key=lambda c: abs(c - start))
    for kept in (0, LARGEST):  # what is given of a head of very many channels would be too little of a small one
        for C in sizes:
            found = _at(arch, heads, kv, C, kept)
            turned = _turned(found)
            if turned is None or (turned >= least and turned % 2 == 0):
                return found
    found = _at(arch, heads, kv, start, LARGEST)  # a tiny share of the channels: as many in number
    size = found.attn.rotary_size(found.model.d_model, heads)
    return dataclasses.replace(found, pos=given(found.pos, fraction=min(1.0, least / size)))


def _turned(arch: Arch) -> Optional[int]:
    """The rotary width, None where nothing turns."""
    width = getattr(arch.pos, "width", None)
    return width(arch.attn.rotary_size(arch.model.d_model, arch.model.n_heads)) if callable(width) else None


def _heads(H: int, K: int) -> tuple[int, int]:
    """At most 8 query heads; kv heads in the same ratio, as far as that goes."""
    if H <= HEADS:
        return H, K
    if K == H:
        few = 4 if H & (H - 1) == 0 else 6  # ALiBi's slopes differ where H is no power of two
        return few, few
    kv = min(K, 2)
    return min(HEADS, kv * (H // K)), kv


def _at(arch: Arch, heads: int, kv: int, C: int, kept: int = 0) -> Arch:
    """kept: the channels of a head that are given are not fewer than that, or than they were."""
    m, D = arch.model, heads * C
    by_width, by_head = D / m.d_model, C * m.n_heads / m.d_model
    sizes: dict[str, Any] = {name: _share(arch.attn, name, by_head, kept) for name in BY_HEAD}
    sizes |= {name: _share(arch.attn, name, by_width) for name in BY_WIDTH}
    if getattr(arch.attn, "n_kv_heads", None) is not None:
        sizes["n_kv_heads"] = kv
    ffn = {"d_ff": _share(arch.ffn, "d_ff", by_width)}
    if (getattr(arch.ffn, "multiple_of", None) or 0) > 8:
        ffn["multiple_of"] = 8
    return dataclasses.replace(
        arch,
        model=given(m, d_model=D, n_heads=heads),
        attn=given(arch.attn, **sizes),
        ffn=given(arch.ffn, **ffn),
    )


def _share(part: Any, name: str, ratio: float, kept: int = 0) -> Optional[int]:
    """The field times the ratio, an even number of at least 2; null stays null, and what is up to `kept` as it is."""
    value = getattr(part, name, None)
    return None if value is None else max(2, min(value, kept), 2 * round(value * ratio / 2))


def given(part: Any, **values: Any) -> Any:
    """The part with those values that it has a field for."""
    names = {f.name for f in dataclasses.fields(part)}
    return dataclasses.replace(part, **{k: v for k, v in values.items() if k in names})


def _window(arch: Arch, layers: int) -> Optional[int]:
    """Its share of the row, and so short that the row outruns the reach of all layers."""
    window, length = getattr(arch.attn, "window", None), arch.model.seq_len
    if window is None or window == 1:
        return window
    return max(2, min(round(window * min(T, length) / length), (T - 3) // layers + 1))


def _backend(arch: Arch) -> Optional[str]:
    backend = getattr(arch.attn, "backend", None)
    return "auto" if backend == "flex" else backend  # it has no float64


def _table(arch: Arch) -> Optional[int]:
    rows, length = getattr(arch.pos, "max_len", None), arch.model.seq_len
    return None if rows is None else T if rows <= length else T + 8


def _original(arch: Arch) -> Optional[int]:
    original = getattr(arch.rope_scaling, "original", None)
    if not callable(original):
        return getattr(arch.rope_scaling, "original_len", None)
    L = original(arch.model.seq_len)
    if arch.rope_scaling.name != "dynamic_ntk":
        return int(L)
    return max(2, min(T // 2, round(L * T / arch.model.seq_len)))
