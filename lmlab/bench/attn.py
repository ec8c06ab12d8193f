"""The backends of attention by length and by what hides or bends the scores, forward and backward.

Each takes its turn beside a large matrix product; a figure is the FLOPs of the pairs that are attended, 4 a channel
forward and 8 backward, a second over the product's (what a backend computes again, or computes and hides, is not
counted). What a backend makes of mask and bias is made once a step for all layers: its time stands apart.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmlab.bench.contender import device_of, replaced
from lmlab.bench.limits import Yardstick, measure, multiplying, synchronize
from lmlab.bench.result import Bar, Result
from lmlab.bench.timing import ROUNDS, Spread, in_turns, ratio
from lmlab.compat import rules
from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.errors import ConfigError, in_one_line
from lmlab.kernels.ops import Ops
from lmlab.kernels.resolve import resolve
from lmlab.kernels.scores import Scores
from lmlab.model.attn import Attention
from lmlab.model.dims import Dims
from lmlab.model.pos import alibi_slopes
from lmlab.runs.machine import gib
from lmlab.train.device import be_deterministic, resolve_precision, tune_malloc
from lmlab.train.memory import USABLE_FRAC, free_bytes

SOFTCAP = 30.0
MASKS: dict[str, tuple[str, ...]] = {  # and what is typed for one like it
    "causal": (),
    "window": ("attn.window=2",),  # composes with any length
    "documents": ("data.packing=documents",),
    "alibi": ("pos=alibi",),
    "softcap": (f"attn.softcap={SOFTCAP:g}",),
}
LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (256, 1024, 4096, 16384)}
SHAPE = {"cpu": (), "cuda": ("model.d_model=1024", "model.n_heads=16", "train.batch_tokens=65536")}
N_DOCUMENTS = 4  # of a row, about
WINDOW_PART = 4  # of a row
SQUARES = 5  # of (B, H, T, S): what dense attention holds at its peak, scores, probabilities and their gradients
SLOWER = 1.03
LEAST_S = 0.05
PRODUCT = "its limit"
HEAD = ("mask", "T", "rows", "backend", "of the matmul rate", "auto is", "made once", "")


@dataclass(frozen=True)
class Heads:
    """Letters as in lmlab/model/dims.py."""

    H: int
    K: int
    C: int
    tokens: int  # of a step
    dtype: torch.dtype
    device: torch.device

    def rows(self, T: int) -> int:
        return max(1, self.tokens // T)

    def tensors(self, T: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [(self.rows(T), T, heads, self.C) for heads in (self.H, self.K, self.K)]
        q, k, v = (torch.randn(size, dtype=self.dtype, device=self.device).requires_grad_() for size in sizes)
        return q, k, v

    def scores(self, mask: str, T: int) -> Scores:
        """As a model of that composition would make them."""
        causal = Scores(causal=True)
        if mask == "window":
            return causal._replace(window=max(1, T // WINDOW_PART))
        if mask == "documents":
            ids_BT = document_ids(self.rows(T), T).to(self.device)
            return causal._replace(documents=(ids_BT, ids_BT))
        if mask == "alibi":
            positions = torch.arange(T, device=self.device)[None]
            slope_H = torch.tensor(alibi_slopes(self.H), dtype=torch.float64, device=self.device)
            return causal._replace(positions=(positions, positions), slope_H=slope_H)
        return causal._replace(softcap=SOFTCAP) if mask == "softcap" else causal

    def flops(self, scores: Scores, T: int) -> int:
        """Forward and backward, of the pairs that are attended."""
        return 12 * self.H * self.C * pairs(scores, self.rows(T), T)

    def said(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return f"H={self.H} K={self.K} C={self.C}, {self.tokens} tokens a step, {precision}, forward and backward"


def document_ids(B: int, T: int) -> Tensor:
    """(B, T): each row cut at random, about N_DOCUMENTS − 1 times; the same at every call."""
    draw = torch.Generator().manual_seed(0)
    return (torch.rand(B, T, generator=draw) < (N_DOCUMENTS - 1) / T).long().cumsum(1)


def pairs(scores: Scores, B: int, T: int) -> int:
    """Queries and keys that see each other, of B causal rows, in one head."""
    if scores.documents is not None:
        lengths = torch.cat([row.bincount() for row in scores.documents[0].expand(B, -1)])
        return int((lengths * (lengths + 1) // 2).sum())
    w = T if scores.window is None else min(T, scores.window)
    return B * (w * (w + 1) // 2 + (T - w) * w)


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """Every backend at every length, or at the `model.seq_len` that is typed, under every mask."""
    tune_malloc()
    device = device_of(words)
    base = replaced(SHAPE[device.type], [*_grouped(words), *words])
    few = next((w for w in words if w in ("model.seq_len=1", "model.seq_len=2", "model.seq_len=3")), None)
    if few is not None:
        raise ConfigError(f"`{few}` is too short a row for windows and documents", "use model.seq_len=4 or more")
    exp = load(base).experiment
    be_deterministic(device)
    torch.manual_seed(0)
    dtype = resolve_precision(exp.train.precision, device)
    limits = measure(device, dtype)
    said(limits.said())
    ops = resolve(exp.kernels, device, dtype)
    attn: Any = exp.attn
    heads = Heads(
        exp.model.n_heads, attn.kv_heads(exp.model.n_heads), exp.arch.head_dim(), exp.train.batch_tokens, dtype, device
    )
    lengths = (exp.model.seq_len,) if any(w.startswith("model.seq_len=") for w in words) else LENGTHS[device.type]
    product = multiplying(device, dtype)
    records: list[dict[str, Any]] = []
    for mask, typed in MASKS.items():
        like = load(replaced(base, [f"device={device}", *typed])).experiment
        usable, refused = allowed(like, ops)
        records += [{"mask": mask, "T": None, "backend": name, "refused": why} for name, why in refused.items()]
        chosen = module(like, ops)
        for T in lengths:
            said(f"{mask}, T={T}")
            auto = chosen.choose(heads.scores(mask, T), T, T, device, dtype)
            records += compared(mask, T, heads, usable, auto, ops, product, rounds)
            gc.collect()
    facts = {"overrides": list(words), "rounds": rounds, "heads": heads.said()}
    bars = [
        Bar(f"{one['mask']} T={one['T']} over {one['backend']}", Spread(**one["auto_over"]))
        for one in records
        if "auto_over" in one and not one["auto"]
    ]
    table = [cells(one) for one in records]
    told = [heads.said(), *slower(records)]
    return Result("attn", limits, facts, HEAD, table, records, told, bars, "speed of what auto picks")


def _grouped(words: Sequence[str]) -> list[str]:
    """`attn.n_kv_heads` is a field of attn=gqa."""
    return ["attn=gqa"] if any(word.startswith("attn.n_kv_heads=") for word in words) else []


def allowed(exp: Experiment, ops: Ops) -> tuple[list[str], dict[str, str]]:
    """The backends that such a composition may name, and why the others are refused."""
    attn: Any = exp.attn
    usable, refused = [], {}
    for backend in ops.attention:
        if errors := rules.check(replace(exp, attn=replace(attn, backend=backend))):
            refused[backend] = "; ".join(map(in_one_line, errors))
        else:
            usable.append(backend)
    return usable, refused


def module(exp: Experiment, ops: Ops) -> Attention:
    """The composition's attention, without memory."""
    model = exp.model
    dims = Dims(
        d_model=model.d_model,
        n_heads=model.n_heads,
        head_dim=exp.arch.head_dim(),
        n_layers=model.n_layers,
        vocab_size=1,
        seq_len=model.seq_len,
        rotary_dim=0,
    )
    with torch.device("meta"):
        return Attention(exp.attn, dims, ops, 0)  # type: ignore[arg-type]


def compared(
    mask: str,
    T: int,
    heads: Heads,
    usable: Sequence[str],
    auto: tuple[str, str],
    ops: Ops,
    product: Yardstick,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """A record of each backend at one length."""
    scores, device = heads.scores(mask, T), heads.device
    qkv = heads.tensors(T)
    if "flex" in usable:
        torch._dynamo.reset()  # a graph for each length and mask is more than it keeps
    calls: dict[str, Callable[[], object]] = {}
    own = {"mask": mask, "T": T, "rows": heads.rows(T), "pairs": pairs(scores, heads.rows(T), T)}
    rows: dict[str, dict[str, Any]] = {}
    for name in usable:
        rows[name] = {**own, "backend": name, "auto": name == auto[0]} | ({"why": auto[1]} if name == auto[0] else {})
        needed, free = held_bytes(name, scores, heads, T), free_bytes(device) * USABLE_FRAC
        if needed > free:
            rows[name]["refused"] = f"needs about {gib(needed)}, {gib(free)} may be used"
            continue
        try:
            call, rows[name]["render_s"] = attending(ops, name, scores, qkv)
            call()
        except torch.OutOfMemoryError:
            rows[name]["refused"] = f"out of memory, {gib(free)} may be used"
            continue
        calls[name] = call
    times = in_turns({PRODUCT: product.call, **calls}, device, rounds=rounds, least_s=LEAST_S)
    flops = heads.flops(scores, T)
    most = [product.work / s for s in times[PRODUCT]]
    for name in calls:
        share = [flops / s / rate for s, rate in zip(times[name], most, strict=True)]
        rows[name] |= {"share": Spread.of(share).as_dict(), "seconds": Spread.of(times[name]).as_dict()}
        if auto[0] in calls:
            rows[name]["auto_over"] = ratio(times[name], times[auto[0]]).as_dict()
    yield from rows.values()


def attending(
    ops: Ops, backend: str, scores: Scores, qkv: tuple[Tensor, Tensor, Tensor]
) -> tuple[Callable[[], object], float]:
    """A call of forward and backward, and the seconds that rendering took."""
    q, k, v = qkv
    T, device, scale = q.shape[1], q.device, 1 / math.sqrt(q.shape[-1])
    synchronize(device)
    begun = time.perf_counter()
    rendered = ops.render[backend](scores, T, T, q.dtype, device)
    synchronize(device)
    took, attend, grad = time.perf_counter() - begun, ops.attention[backend], torch.randn_like(q)

    def call() -> object:
        return torch.autograd.grad(attend(q, k, v, scores, rendered, scale=scale), qkv, grad)

    return call, took


def held_bytes(backend: str, scores: Scores, heads: Heads, T: int) -> int:
    """About what the squares over T that a backend makes take at their peak; the rest is small beside them."""
    square, item = T * T, heads.dtype.itemsize
    if backend not in ("dense", "sdpa"):
        return 0
    of_heads = heads.H if scores.biased else 1
    of_rows = heads.rows(T) if scores.documents is not None else 1
    mask = 0 if backend == "sdpa" and scores.plain_causal() and not scores.biased else of_heads * of_rows * square
    probabilities = SQUARES * heads.rows(T) * heads.H * square if backend == "dense" else 0
    return (2 * mask + probabilities) * item


def slower(records: Sequence[dict[str, Any]]) -> list[str]:
    """Where what auto picks loses to the best: by more than SLOWER - 1, and in its most favourable round too."""
    lost, where = [], {(one["mask"], one["T"]) for one in records if "auto_over" in one}
    for mask, T in sorted(where, key=lambda at: (list(MASKS).index(at[0]), at[1])):
        found = [one for one in records if (one["mask"], one["T"]) == (mask, T) and "auto_over" in one]
        best = min(found, key=lambda one: one["auto_over"]["median"])
        picked = next(one["backend"] for one in found if one["auto"])
        over = Spread(**best["auto_over"])
        if over.median < 1 / SLOWER and over.high < 1:
            lost.append(f"{mask} T={T}: {picked} has {over.said()} of the speed of {best['backend']}")
    return [f"auto loses more than {SLOWER - 1:.0%} to the best backend: {'; '.join(lost) or 'nowhere in every round'}"]


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    where = one["mask"], "all" if one["T"] is None else str(one["T"]), str(one.get("rows", ""))
    mark = f"auto: {one['why']}" if one.get("auto") else ""
    if "refused" in one:
        return (*where, one["backend"], "", "", "", "; ".join(filter(None, (mark, one["refused"]))))
    over = Spread(**one["auto_over"]).said(unit="×") if "auto_over" in one and not one["auto"] else ""
    made = f"{1000 * one['render_s']:.3g} ms"
    return (*where, one["backend"], Spread(**one["share"]).said(".0%"), over, made, mark)
