"""What holds for every composed model: rows that compare two routes to one result, in float64.

Each takes a Composed and gives a Row. `figure` says how far apart the routes were, so that a pass can be doubted too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from lmlab.check import oracle
from lmlab.check.composed import LIKELIEST_DROP, Composed, Rows, as_dict, gradients
from lmlab.check.rows import EXACT, Row, distance, gradient_distance, judged, known, not_asked
from lmlab.check.small import VOCAB
from lmlab.model.cache import Cache, CacheIgnored
from lmlab.model.transformer import Transformer

FAR = 4096  # positions are asked for beyond it
SHIFTS = (1, 977)
LONG = 640  # tokens of a long row: more than one tile of queries and of keys


@torch.no_grad()
def logits(net: Transformer, asked: Rows) -> Tensor:
    out: Tensor = asked.call(net).logits_BTV
    return out


# ---------------------------------------------------------------- the formulas


@torch.no_grad()
def against_oracle(c: Composed) -> Row:
    """The model against the formulas: plain rows, positions far out and with gaps, documents, padding."""
    config, state, off = as_dict(c.arch), c.net.state_dict(), {}
    try:
        for what, asked in _asked_of_oracle(c).items():
            expected = oracle.logits(
                config, state, asked.tokens_BT, asked.positions_BT, asked.documents_BT, asked.valid_BT
            )
            seen = torch.ones_like(asked.tokens_BT) if asked.valid_BT is None else asked.valid_BT
            off[what] = distance(logits(c.net, asked)[seen.bool()], expected[seen.bool()][:, :VOCAB])
    except oracle.NoOracle as missing:
        return not_asked("oracle", f"{missing.part} is not one of lmlab's own: no formula to compare with")
    worst = max(off, key=lambda what: (off[what] != off[what], off[what]))
    row = judged("oracle", off[worst])
    where = "" if row.state == "pass" else f" ({worst})"
    return dataclasses.replace(row, figure=row.figure + where + f"; {_peak(c)}")


def _asked_of_oracle(c: Composed) -> dict[str, Rows]:
    T, plain = c.T, c.rows(1)
    first, pads = max(1, T // 3), T // 4
    inside = torch.arange(T).expand(1, T)
    restarted = torch.cat((torch.arange(first), torch.arange(T - first)))[None]
    return {
        "rows": plain,
        "far positions" if _table(c) is None else "positions with gaps": spread(c, plain),
        "documents": dataclasses.replace(
            plain, positions_BT=restarted, documents_BT=(inside >= first).long().expand(1, T)
        ),
        "padding": dataclasses.replace(
            plain, positions_BT=(inside - pads).clamp_min(0), valid_BT=(inside >= pads).expand(1, T)
        ),
    }


def spread(c: Composed, asked: Rows) -> Rows:
    """The rows at growing positions with gaps: beyond 4,096, or as far as a learned table goes."""
    T, table = asked.tokens_BT.shape[1], _table(c)
    draw = torch.Generator().manual_seed(5)
    if table is None:
        gaps = torch.randint(1, 40, (T,), generator=draw)
        gaps[T // 2] += FAR
        return dataclasses.replace(asked, positions_BT=gaps.cumsum(0).expand_as(asked.tokens_BT))
    kept = max(1, T // 2)
    chosen = torch.randperm(table, generator=draw)[:kept].sort().values
    return dataclasses.replace(asked, tokens_BT=asked.tokens_BT[:, :kept], positions_BT=chosen[None])


def long_rows(c: Composed) -> Rows:
    """A row of 640 tokens; with a table of positions its last ones are repeated."""
    asked = c.rows(1, LONG)
    last = int(spread(c, c.rows(1)).positions_BT.max()) if hasattr(c.net.pos, "weight") else LONG
    return dataclasses.replace(asked, positions_BT=asked.positions_BT.clamp_max(last))


def _table(c: Composed) -> Optional[int]:
    """Rows of a table of positions, where there is one with a row a position."""
    weight = getattr(c.net.pos, "weight", None)
    return None if weight is None or not adds_positions(c) else int(weight.shape[0])


def _peak(c: Composed) -> str:
    why = f": {c.unpeaked}" if c.unpeaked else ""
    return f"largest attention weight {c.peak:.2f}{why}"


# ---------------------------------------------------------------- causality


@torch.no_grad()
def causality(c: Composed) -> Row:
    """A token edited changes nothing before it, in evaluation; and nothing past the reach of the windows."""
    row = _edits("causality", c, c.net)
    reach = _reach(c)
    if row.state != "pass" or reach is None or reach >= c.T - 1:
        return row
    asked = c.rows()
    moved = _moved(logits(c.net, asked), logits(c.net, asked.edited(0)))
    last = int(torch.nonzero(moved > EXACT * 1e2).max()) if bool((moved > EXACT * 1e2).any()) else -1
    off = float(moved[reach + 1 :].max())
    figure = f"{row.figure}; token 0 reaches position {last}, windows allow {reach}"
    return Row("causality", "pass" if off <= EXACT else "fail", figure, "" if off <= EXACT else f"moved by {off:.2g}")


@torch.no_grad()
def causality_in_training(c: Composed) -> Row:
    """The same in train mode, with dropout as it is set, but not so much that nothing is left of a token."""
    return _edits("causality in training", c, c.in_training(LIKELIEST_DROP))


def _edits(name: str, c: Composed, net: Transformer) -> Row:
    row = _edited(name, net, c.rows(), sorted({1, c.T // 2, c.T - 1} - {0}))
    if row.state != "pass":
        return row
    far = _edited(name, net, long_rows(c), [LONG // 2])
    return row if far.state == "pass" else dataclasses.replace(far, figure=f"{far.figure} (of {LONG})")


def _edited(name: str, net: Transformer, asked: Rows, places: Sequence[int]) -> Row:
    worst, blind = (0.0, 0, 0), []
    before = _seeded(net, asked)
    for at in places:
        moved = _moved(before, _seeded(net, asked.edited(at)))
        place = int(moved[:at].argmax())
        worst = max(worst, (float(moved[place]), at, place))
        if not bool(moved[at] > 0):
            blind.append(at)
    off, at, place = worst
    if off > EXACT or off != off:
        return Row(name, "fail", f"token {at} edited, position {place} moved by {off:.2g}", "a token sees a later one")
    if blind:
        return Row(name, "fail", f"token {blind[0]} edited, its own position did not move", "the edit is not seen")
    return Row(name, "pass", f"moved by {off:.2g} before the edit")


@torch.no_grad()
def _seeded(net: Transformer, asked: Rows) -> Tensor:
    torch.manual_seed(0)
    return logits(net, asked)


def _moved(a: Tensor, b: Tensor) -> Tensor:
    """(T,): by how much the logits of each position differ, over max(1, max |a|)."""
    return (a - b).abs().amax((0, 2)) / a.abs().max().clamp_min(1)


def _reach(c: Composed) -> Optional[int]:
    """How far a token can be seen through the windows of all layers; None where a layer sees everything, and where
    tokens compete for room at experts."""
    windows = getattr(c.arch.attn, "layer_window", None)
    if not callable(windows) or getattr(c.arch.moe, "capacity_factor", None) is not None:
        return None
    each = [windows(layer) for layer in range(c.arch.model.n_layers)]
    return None if None in each else sum(w - 1 for w in each)


def causality_by_gradient(c: Composed) -> Row:
    """The logits of a position have no gradient at the embedding of a later token."""
    net, asked = c.copy(), c.rows(1)
    kept: list[Tensor] = []

    def embedding(ids: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        kept.append(plain.embedding(ids, weight, *rest).detach().requires_grad_())
        return kept[-1]

    plain = net.ops
    net.ops = dataclasses.replace(plain, embedding=embedding)
    out, off, own = asked.call(net).logits_BTV, 0.0, float("inf")
    for at in (0, c.T // 2, c.T - 2):
        (grad,) = torch.autograd.grad(out[0, at].square().sum(), kept[0], retain_graph=True)
        size = grad[0].norm(dim=-1)
        off, own = max(off, float(size[at + 1 :].max())), min(own, float(size[: at + 1].max()))
    row = judged("causality by gradient", off, what="gradient at later tokens at most")
    return row if own > 0 else Row(row.name, "fail", "no gradient at earlier tokens either", "nothing reaches a logit")


# ---------------------------------------------------------------- positions, packing, padding, batches


def adds_positions(c: Composed) -> bool:
    """Whether positions change the embeddings, so that the model may know where a row begins."""
    x = torch.zeros(1, 2, c.arch.model.d_model, dtype=torch.float64)
    with torch.no_grad():
        here, there = (c.net.pos.embed(x, torch.tensor([[p, p + 1]])) for p in (0, 1))
    return not torch.equal(here, there)


@torch.no_grad()
def shift(c: Composed) -> Row:
    """A constant added to all positions changes nothing: only distances count."""
    if adds_positions(c):
        return not_asked("shift", f"pos={c.arch.pos.name} adds something of each position to the embeddings")
    asked = c.rows()
    here = logits(c.net, asked)
    moved = [dataclasses.replace(asked, positions_BT=asked.positions_BT + by) for by in SHIFTS]
    return judged("shift", max(distance(logits(c.net, there), here) for there in moved))


@torch.no_grad()
def packed(c: Composed) -> Row:
    """A document in a row with others is the document alone."""
    return _packed("packed = alone", c, c.net)


@torch.no_grad()
def packed_in_training(c: Composed) -> Row:
    """The same in train mode, without dropout. What is declared to see later tokens there sees those of others."""
    name = "packed = alone in training"
    torch.manual_seed(1)
    other = logits(c.quiet, c.rows())
    if not torch.equal(other, _seeded(c.quiet, c.rows())):
        return not_asked(name, "two passes in training differ, by something that is not called dropout")
    reason = c.declared.get("causality in training")
    return known(_packed(name, c, c.quiet), {} if reason is None else {name: reason})


def _packed(name: str, c: Composed, net: Transformer) -> Row:
    first = max(1, c.T // 3)
    cuts = [(0, first), (first, c.T)]
    asked = c.rows()
    alone = [_alone(asked, start, stop) for start, stop in cuts]
    ids = torch.cat([torch.full_like(a.positions_BT, n) for n, a in enumerate(alone)], 1)
    together = Rows(asked.tokens_BT, torch.cat([a.positions_BT for a in alone], 1), documents_BT=ids)
    found = logits(net, together)
    off = [distance(found[:, a:b], logits(net, one)) for (a, b), one in zip(cuts, alone, strict=True)]
    row = judged(name, max(off, key=lambda o: (o != o, o)))
    return row if row.state != "pass" else judged(name, max(_beyond_documents(c, net), *off))


def _beyond_documents(c: Composed, net: Transformer) -> float:
    """By how much a token of a long row's middle document moves the others."""
    asked = long_rows(c)
    third = LONG // 3
    inside = torch.arange(LONG)[None]
    ids = inside // third
    asked = dataclasses.replace(asked, positions_BT=asked.positions_BT % third, documents_BT=ids)
    at = third + third // 2
    moved = _moved(_seeded(net, asked), _seeded(net, asked.edited(at)))
    return float(torch.where(ids[0] == 1, 0.0, moved).max())


def _alone(asked: Rows, start: int, stop: int) -> Rows:
    tokens = asked.tokens_BT[:, start:stop]
    return Rows(tokens, torch.arange(stop - start).expand_as(tokens))


@torch.no_grad()
def padded(c: Composed) -> Row:
    """A text behind padding is the text without it."""
    pads, asked = c.T // 3, c.rows()
    alone = _alone(asked, pads, c.T)
    filled = dataclasses.replace(
        asked,
        positions_BT=(asked.positions_BT - pads).clamp_min(0),
        valid_BT=torch.arange(c.T).expand_as(asked.tokens_BT) >= pads,
    )
    return judged("padded = alone", distance(logits(c.net, filled)[:, pads:], logits(c.net, alone)))


@torch.no_grad()
def batched(c: Composed) -> Row:
    """A text among others of other lengths, padded on the left, is the text alone."""
    B = 3
    asked, pads = c.rows(B), torch.tensor([0, c.T // 4, c.T // 2])[:, None]
    together = dataclasses.replace(
        asked, positions_BT=(asked.positions_BT - pads).clamp_min(0), valid_BT=torch.arange(c.T).expand(B, -1) >= pads
    )
    found, off = logits(c.net, together), 0.0
    for b, cut in enumerate(pads.flatten().tolist()):
        alone = _alone(Rows(asked.tokens_BT[b : b + 1], asked.positions_BT[b : b + 1]), cut, c.T)
        off = max(off, distance(found[b : b + 1, cut:], logits(c.net, alone)))
    return judged("batched = alone", off)


@torch.no_grad()
def cached(c: Composed) -> Row:
    """A row in chunks of any size, by a cache of keys and values, is the whole row."""
    asked, off = c.rows(), {}
    full = logits(c.net, asked)
    length = torch.full((2, 1), c.T) if c.net.pos.needs_length else None
    for size in sorted({1, 3, 7, c.T}):
        cache, found = Cache(c.net), []
        for start in range(0, c.T, size):
            part = slice(start, start + size)
            asked_for = asked.tokens_BT[:, part], asked.positions_BT[:, part]
            try:
                found.append(c.net(*asked_for, length_BT=length, cache=cache).logits_BTV)
            except CacheIgnored as ignored:
                return not_asked("cached = full", ignored.message)
        off[size] = distance(torch.cat(found, 1), full)
    worst = max(off, key=lambda size: (off[size] != off[size], off[size]))
    row = judged("cached = full", off[worst])
    return row if row.state == "pass" else dataclasses.replace(row, figure=f"{row.figure} (chunks of {worst})")


def micro_batches(c: Composed) -> Row:
    """The gradient of a batch is the sum of its rows' gradients, targets missing here and there."""
    asked = c.rows(4)
    weights = (torch.rand(4, c.T, generator=torch.Generator().manual_seed(3)) > 0.3).float()
    whole = gradients(c.quiet, asked, weights)
    parts: dict[str, Tensor] = {}
    for b in range(4):
        one = Rows(asked.tokens_BT[b : b + 1], asked.positions_BT[b : b + 1])
        for name, grad in gradients(c.quiet, one, weights[b : b + 1]).items():
            parts[name] = parts[name] + grad if name in parts else grad
    off, where = gradient_distance(parts, whole)
    row = judged("micro-batches = whole", off)
    return row if row.state == "pass" else dataclasses.replace(row, figure=f"{row.figure} ({where})")


# ---------------------------------------------------------------- gradients, determinism


def every_gradient(c: Composed) -> Row:
    """Every parameter gets a gradient that is finite and not 0. Peaked scores could saturate a cap to the last bit."""
    found = gradients(c.soft, spread(c, c.rows()))
    names = [name for name, _ in c.soft.named_parameters()]
    without = [name for name in names if name not in found or not bool(found[name].any())]
    broken = [name for name, grad in found.items() if not bool(grad.isfinite().all())]
    if without or broken:
        kind, named = ("not finite", broken) if broken else ("no gradient", without)
        return Row("gradients", "fail", f"{kind}: {', '.join(named[:4])}", f"{len(named)} of {len(names)} parameters")
    return Row("gradients", "pass", f"all of {len(names)} parameters")


def determinism(c: Composed) -> Row:
    """Two builds from one seed, two training passes, and two evaluations with dropout set: the same bits."""
    first, second = (c.build(dtype=torch.float32) for _ in range(2))
    a, b = first.state_dict(), second.state_dict()
    if odd := [name for name in a if not torch.equal(a[name], b[name])]:
        return Row("determinism", "fail", f"one seed, two values of {odd[0]}", "the draw is not of the seed alone")
    asked = c.rows()
    grads = []
    for net in (first.train(), second.train()):
        torch.manual_seed(0)
        grads.append(gradients(net, asked))
    if odd := [name for name in grads[0] if not torch.equal(grads[0][name], grads[1][name])]:
        return Row("determinism", "fail", f"two passes, two gradients of {odd[0]}", "an operation is not repeatable")
    net = dropped(c)
    if not torch.equal(logits(net, asked), logits(net, asked)):
        return Row("determinism", "fail", "two evaluations with dropout 0.5 differ", "dropout acts in eval mode")
    return Row("determinism", "pass", "bit for bit")


def dropped(c: Composed) -> Transformer:
    """The model with dropout 0.5 wherever it has any, in eval mode."""
    net = c.copy()
    for module in net.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.5  # type: ignore[assignment]
    return net.eval()
