"""What each layer must do by itself, whatever the layers around it do: how far its attention sees, where it drops."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lmlab.check.composed import Composed, Rows, without_dropout
from lmlab.check.invariants import long_rows
from lmlab.check.rows import EXACT, Row, distance, not_asked
from lmlab.check.small import given
from lmlab.model.mask import CAUSAL, Mask, documents
from lmlab.model.transformer import Transformer

OFTEN = 0.5  # the dropout that is asked for
BRANCHES = ("attn", "ffn")

# ---------------------------------------------------------------- how far attention sees


def causality_by_layer(c: Composed) -> Row:
    """An edit of one input of a layer's attention moves no output before it, none that its window or another document
    hides, and one at the end of the window."""
    return _reach("causality by layer", c, training=False)


def causality_in_training_by_layer(c: Composed) -> Row:
    """The same in train mode."""
    return _reach("causality in training by layer", c, training=True)


@torch.no_grad()
def _reach(name: str, c: Composed, *, training: bool) -> Row:
    net = copy.deepcopy(c.soft).train(training)
    worst = 0.0
    for asked, places in _asked(c):
        x_BTD = _inputs(asked, places, c.arch.model.d_model)
        for layer, out_BTD in enumerate(_outputs(net, asked, x_BTD)):
            moved_TT = _moved(out_BTD)
            window = c.arch.attn.layer_window(layer)
            seen_TT = _seen(asked, places, window)
            off = torch.where(seen_TT, 0.0, moved_TT)
            worst = max(worst, float(off.max()))
            if not float(off.max()) <= EXACT:
                at, place = (int(i) for i in torch.nonzero(~(off <= EXACT))[0])
                return _too_far(name, layer, places[at], place, float(off[at, place]), window, asked)
            if window is not None and window < len(seen_TT.T) and not bool(_ends(moved_TT, places, window).any()):
                told = f"layer {layer}: no input is seen {window - 1} tokens later"
                return Row(name, "fail", told, f"its window is {window}, counting the token itself")
    return Row(name, "pass", f"moved by {worst:.2g} outside of windows and documents")


def _asked(c: Composed) -> Iterator[tuple[Rows, Sequence[int]]]:
    """Rows, and the places that are edited one by one: a row, two documents in one, a long row."""
    T, first = c.T, c.T // 3
    plain = c.rows(1)
    yield plain, range(T)
    restarted = torch.cat((torch.arange(first), torch.arange(T - first)))[None]
    ids = (torch.arange(T) >= first).long()[None]
    yield dataclasses.replace(plain, positions_BT=restarted, documents_BT=ids), range(T)
    whole = long_rows(c)
    n = whole.tokens_BT.shape[1]
    yield whole, (0, n // 3, n - 2)


def _attentions(net: Transformer, asked: Rows) -> Iterator[tuple[nn.Module, Any]]:
    mask: Mask = CAUSAL if asked.documents_BT is None else CAUSAL & documents(asked.documents_BT)
    blocks: list[Any] = list(net.blocks)
    for block, view in zip(blocks, net.views(mask, asked.positions_BT, net.ops.dtype), strict=True):
        yield block.attn, view


def _inputs(asked: Rows, places: Sequence[int], D: int) -> Tensor:
    """(2 + places, T, D): a row of random inputs twice, and the row with the input of each place negated."""
    row = torch.randn(asked.tokens_BT.shape[1], D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x_BTD = row.repeat(2 + len(places), 1, 1)
    for n, at in enumerate(places, start=2):
        x_BTD[n, at] *= -1
    return x_BTD


def _outputs(net: Transformer, asked: Rows, x_BTD: Tensor) -> Iterator[Tensor]:
    """(B, T, D): what each layer's attention makes of x. One row at a time, each from the same seed, where it draws
    for every row anew: then the first two, which are the same, differ."""
    for (attn, view), (_, alone) in zip(
        _attentions(net, _repeated(asked, len(x_BTD))), _attentions(net, asked), strict=True
    ):
        out_BTD = attn(x_BTD, view, None)
        if distance(out_BTD[0], out_BTD[1]) > EXACT:
            out_BTD = torch.cat([_seeded(attn, row_TD[None], alone) for row_TD in x_BTD])
        yield out_BTD


def _repeated(asked: Rows, B: int) -> Rows:
    ids = asked.documents_BT
    return Rows(
        asked.tokens_BT.expand(B, -1), asked.positions_BT.expand(B, -1), None if ids is None else ids.expand(B, -1)
    )


def _seeded(attn: nn.Module, x_BTD: Tensor, view: Any) -> Tensor:
    torch.manual_seed(0)
    out: Tensor = attn(x_BTD, view, None)
    return out


def _moved(out_BTD: Tensor) -> Tensor:
    """(places, T): by how much each output of the first row differs in those edited, over max(1, largest)."""
    return (out_BTD[2:] - out_BTD[0]).abs().amax(2) / out_BTD[0].abs().max().clamp_min(1)


def _seen(asked: Rows, places: Sequence[int], window: Optional[int]) -> Tensor:
    """(places, T): the outputs that may see the input of a place."""
    T = asked.tokens_BT.shape[1]
    back = torch.arange(T)[None] - torch.tensor(places)[:, None]
    seen = (back >= 0) & (back < (T if window is None else window))
    ids = asked.documents_BT
    return seen if ids is None else seen & (ids[0][None] == ids[0][list(places)][:, None])


def _ends(moved_TT: Tensor, places: Sequence[int], window: int) -> Tensor:
    """How much the last output that the window lets see each place was moved."""
    T = moved_TT.shape[1]
    pairs = [(n, at + window - 1) for n, at in enumerate(places) if at + window <= T]
    return torch.stack([moved_TT[n, at] for n, at in pairs]) if pairs else torch.ones(1)


def _too_far(name: str, layer: int, at: int, place: int, off: float, window: Optional[int], asked: Rows) -> Row:
    ids = asked.documents_BT
    if place < at:
        reason = "a token sees a later one"
    elif ids is not None and bool(ids[0, at] != ids[0, place]):
        reason = "a token sees another document"
    else:
        reason = f"its window is {window}, counting the token itself"
    return Row(name, "fail", f"layer {layer}: input {at} edited, output {place} moved by {off:.2g}", reason)


# ---------------------------------------------------------------- where it drops


def dropout(c: Composed) -> Row:
    """model.dropout acts on the embedding and on each residual branch of each block, attn.dropout in each attention."""
    wanted = ("model", "attn") if hasattr(c.arch.attn, "dropout") else ("model",)
    return _dropout(c, wanted)


def dropout_as_set(c: Composed) -> Row:
    """Of those that are set: what nobody asked for may be missing in a part of one's own."""
    wanted = [group for group in ("model", "attn") if getattr(getattr(c.arch, group), "dropout", 0) > 0]
    return _dropout(c, wanted) if wanted else not_asked("dropout", "it is 0")


@torch.no_grad()
def _dropout(c: Composed, wanted: Sequence[str]) -> Row:
    asked, silent, n = c.rows(), [], 0
    for group in wanted:
        arch, more = without_dropout(c.arch), {"dropout": OFTEN} | ({"backend": "auto"} if group == "attn" else {})
        net = c.build(dataclasses.replace(arch, **{group: given(getattr(arch, group), **more)}))
        net.load_state_dict(c.net.state_dict())
        places = list(_drops_of_branches(net, asked) if group == "model" else _drops_of_attention(net, asked))
        silent += [f"{group}.dropout in {place}" for place, acts in places if not acts]
        n += len(places)
    if silent:
        return Row("dropout", "fail", f"does nothing: {', '.join(silent[:4])}", f"{len(silent)} of {n} places")
    return Row("dropout", "pass", f"acts in {n} places")


def _drops_of_branches(net: Transformer, asked: Rows) -> Iterator[tuple[str, bool]]:
    """(place, whether anything is drawn there). The other branch of the block and all biases are made 0, so that
    nothing else varies; a branch that can't be told apart like this is left out."""
    rows = asked.tokens_BT, asked.positions_BT, None
    yield "the embedding", _draws(net.train(), *rows, call=net.embedded)
    x_BTD = net.eval().embedded(*rows)
    blocks: list[Any] = list(net.blocks)
    for layer, (block, view) in enumerate(
        zip(blocks, net.views(CAUSAL, asked.positions_BT, net.ops.dtype), strict=True)
    ):
        for name, p in block.named_parameters():
            if name.endswith("bias"):
                p.zero_()
        branches = [name for name in BRANCHES if isinstance(getattr(block, name, None), nn.Module)]
        for branch in branches:
            with ExitStack() as stack:
                for other in branches:
                    if other != branch:
                        stack.enter_context(getattr(block, other).register_forward_hook(_nothing))
                told_apart = block.eval()(x_BTD, view, None, None)[0]
                acts = _draws(block.train(), x_BTD, view, None, None)
                stack.enter_context(getattr(block, branch).register_forward_hook(_nothing))
                if not torch.equal(told_apart, block.eval()(x_BTD, view, None, None)[0]):
                    yield f"blocks.{layer} ({branch})", acts


def _drops_of_attention(net: Transformer, asked: Rows) -> Iterator[tuple[str, bool]]:
    x_BTD = net.eval().embedded(asked.tokens_BT, asked.positions_BT, None)
    for layer, (attn, view) in enumerate(_attentions(net, asked)):
        yield f"blocks.{layer}", _draws(attn.train(), x_BTD, view, None)


def _nothing(module: nn.Module, given: Any, out: Any) -> Any:
    """A forward hook: 0 in place of a branch, its statistics kept."""
    return (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else torch.zeros_like(out)


def _draws(module: nn.Module, *given: Any, call: Any = None) -> bool:
    """Whether two seeds give two results."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        out = (call or module)(*given)
        found.append(out[0] if isinstance(out, tuple) else out)
    return not torch.equal(found[0], found[1])
