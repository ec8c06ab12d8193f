"""What goes on inside a model, layer by layer: activations, attention, hidden units, gradients, updates.

Activations come from one extra forward pass: eager, in eval mode, without gradients, on a few rows. Its hooks are gone
afterwards, so that the step stays as it is compiled. The names are those of lmlab/runs/probe_names.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.data.batches import Batch
from lmlab.kernels.attention import probabilities
from lmlab.kernels.experts import spans
from lmlab.kernels.ops import Ops, wide
from lmlab.kernels.scores import Scores
from lmlab.model.transformer import Transformer
from lmlab.runs.probe_names import name

MAX_ROWS, MAX_TOKENS = 8, 4096  # of the forward pass, whatever the micro-batch: figures of two runs compare
MAX_SCORES = 1 << 24  # attention scores in memory at once
LOGIT_ROWS = 512
Found = dict[int | str, dict[str, Tensor]]  # place → figure → 0-d tensor


def probe_rows(seq_len: int) -> int:
    """How many rows of a batch are probed."""
    return min(MAX_ROWS, max(1, MAX_TOKENS // seq_len))


class StepProbe:
    """Looks at an optimizer step from both sides. `master` holds the weights and gradients, `model` computes."""

    def __init__(self, master: Transformer, model: Transformer, device: torch.device) -> None:
        self.model, self.device = model, device
        self._places = places(master)
        self._grads: dict[int | str, Tensor] = {}
        self._before: dict[int | str, list[Tensor]] = {}

    @torch.no_grad()
    def before_update(self) -> None:
        """Take the gradients' norms, not yet clipped, and keep the matrices."""
        for place, parameters in self._places.items():
            grads = [p.grad for p in parameters if p.grad is not None]
            self._grads[place] = torch.nn.utils.get_total_norm(grads)
            self._before[place] = [p.clone() for p in parameters if p.ndim >= 2]

    @torch.no_grad()
    def after_update(self, batch: Batch) -> dict[str, float]:
        """Every figure of the step: the weights are the new ones, the rows the first of the step's batch."""
        found = activations(self.model, batch.rows(0, probe_rows(batch.tokens_BT.shape[1])).to(self.device))
        for place, parameters in self._places.items():
            own = found.setdefault(place, {})
            own["grad_norm"] = self._grads.pop(place)
            if before := self._before.pop(place):
                own["update_ratio"] = update_ratio(before, [p for p in parameters if p.ndim >= 2])
        return as_row(found)


def places(model: Transformer) -> dict[int | str, list[Tensor]]:
    """The parameters of each layer, of the embedding, and of a head of its own."""
    found: dict[int | str, list[Tensor]] = {i: list(block.parameters()) for i, block in enumerate(model.blocks)}
    found["embed"] = [model.embed.weight]
    if model.head is not None:
        found["head"] = list(model.head.parameters())
    return {place: parameters for place, parameters in found.items() if parameters}


def update_ratio(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """‖after − before‖ / ‖before‖ of several tensors taken as one."""
    moved = torch._foreach_sub(after, before)
    return torch.nn.utils.get_total_norm(moved) / torch.nn.utils.get_total_norm(before)


def as_row(found: Found) -> dict[str, float]:
    """{probe/<place>/<figure>: value}, read from the device at once."""
    names = [name(place, figure) for place, figures in found.items() for figure in figures]
    values = [value.double() for figures in found.values() for value in figures.values()]
    return dict(zip(names, torch.stack(values).tolist(), strict=True))


# ---------------------------------------------------------------- one forward pass


@torch.no_grad()
def activations(model: Transformer, batch: Batch) -> Found:
    """Figures of one forward pass over the whole batch. No buffer moves, nothing random is drawn."""
    found: Found = {layer: {} for layer in range(len(model.blocks))}
    last: list[Tensor] = []
    was_training = model.training
    model.eval()
    try:
        with model.eager(), watched(model, found, last):
            model(
                batch.tokens_BT,
                batch.positions_BT,
                documents_BT=batch.documents_BT,
                targets_BT=batch.targets_BT,  # the loss, for logits of all tokens may not fit
                weights_BT=batch.weights_BT,
            )
    finally:
        model.train(was_training)
    parts = [model.logits(part).abs().amax() for part in last[-1].flatten(0, 1).split(LOGIT_ROWS)]
    found["final"] = {"residual_rms": rms(last[-1])}
    found["logits"] = {"absmax": torch.stack(parts).amax()}
    return found


@contextmanager
def watched(model: Transformer, found: Found, last: list[Tensor]) -> Iterator[None]:
    """Hooks for as long as it lasts: figures go into `found`, what the head is handed to the end of `last`."""

    def first_input(_: nn.Module, args: tuple[Any, ...]) -> None:
        found["embed"] = {"residual_rms": rms(args[0])}

    with ExitStack() as until:
        until.callback(model.blocks[0].register_forward_pre_hook(first_input).remove)
        for layer, block in enumerate(model.blocks):
            _watch_block(block, found[layer], last, until)
        if model.norm is not None:
            until.callback(model.norm.register_forward_hook(lambda _, __, out: last.append(out)).remove)
        yield


def _watch_block(block: nn.Module, own: dict[str, Tensor], last: list[Tensor], until: ExitStack) -> None:
    """A part without `ffn.down`, or an attention that never calls `ops.attention`, has no figures of that kind."""

    def output(_: nn.Module, __: Any, out: Any) -> None:
        own.update(stream_figures(out[0]))
        last[:] = [out[0]]

    until.callback(block.register_forward_hook(output).remove)
    _watch_hidden(getattr(block, "ffn", None), Hidden(own), until)
    attn = getattr(block, "attn", None)
    ops = getattr(attn, "ops", None)
    if attn is not None and isinstance(ops, Ops):
        until.callback(setattr, attn, "ops", ops)
        spied = {backend: _spied(attend, own) for backend, attend in ops.attention.items()}
        attn.ops = dataclasses.replace(ops, attention=spied)


def _watch_hidden(ffn: Any, hidden: Hidden, until: ExitStack) -> None:
    """What enters the last map of an ffn; of experts that of each, by the rows that reached it, and of shared ones."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        hidden.add(args[0])

    experts: Any = getattr(ffn, "experts", None)
    stacked = getattr(experts, "ffn", None)
    each = getattr(experts, "each", None) or ()
    for one in (ffn, getattr(ffn, "shared", None), *each):
        down = getattr(one, "down", None)
        if isinstance(down, nn.Module):
            until.callback(down.register_forward_pre_hook(before).remove)
    if stacked is not None and isinstance(getattr(experts, "ops", None), Ops):
        until.callback(setattr, experts, "ops", experts.ops)
        experts.ops = dataclasses.replace(experts.ops, experts=_heard(experts.ops.experts, stacked.down, hidden))


def _heard(apply: Callable[..., Tensor], down: Any, hidden: Hidden) -> Any:
    """The rows of stacked experts as they come to `down`. Without biases they are weighted by then, which makes no zero
    of what is none: a row that nobody takes stands after the last end."""

    def experts(x_MF: Tensor, weight_EDF: Tensor, bias_ED: Any, ends_E: Tensor) -> Tensor:
        if weight_EDF is down.weight:
            for start, end in spans(ends_E, len(x_MF)):
                hidden.add(x_MF[start:end])
        return apply(x_MF, weight_EDF, bias_ED, ends_E)

    return experts


def _spied(attend: Callable[..., Tensor], own: dict[str, Tensor]) -> Any:
    """The backend, and the figures of the layer's first call: shaped attention makes a second one with q = 0."""

    def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, rendered: Any, **how: Any) -> Tensor:
        if "attn_entropy" not in own:
            own.update(attention_figures(q, k, scores, scale=how["scale"]))
        return attend(q, k, v, scores, rendered, **how)

    return attention


# ---------------------------------------------------------------- figures


def rms(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype)).square().mean().sqrt()


def stream_figures(x_BTD: Tensor) -> dict[str, Tensor]:
    """Of a block's output."""
    x = x_BTD.to(wide(x_BTD.dtype))
    squares = (x - x.mean()).square()
    kurtosis = squares.square().mean() / squares.mean().square()
    return {"residual_rms": rms(x), "act_absmax": x.abs().amax(), "act_kurtosis": kurtosis}


class Hidden:
    """Hidden activations of a layer's ffn, or of its experts one after the other; figures of all so far go into `own`.
    An expert that no row reached has none."""

    def __init__(self, own: dict[str, Tensor]) -> None:
        self.own, self.sums = own, torch.zeros(4, dtype=torch.float64)

    def add(self, hidden_NF: Tensor) -> None:
        """The rows of one ffn, (…, F)."""
        zero_NF = (hidden_NF == 0).flatten(0, -2)
        if not len(zero_NF):
            return
        dead_F = zero_NF.all(0)
        counts = [zero_NF.sum(), torch.tensor(zero_NF.numel()), dead_F.sum(), torch.tensor(len(dead_F))]
        self.sums = self.sums.to(zero_NF.device) + torch.stack([n.to(zero_NF.device).double() for n in counts])
        self.own["ffn_zero_frac"] = self.sums[0] / self.sums[1]
        self.own["ffn_dead_frac"] = self.sums[2] / self.sums[3]


def hidden_figures(hidden_BTF: Tensor) -> dict[str, Tensor]:
    """Exact zeros, and units that are zero for every token."""
    own: dict[str, Tensor] = {}
    Hidden(own).add(hidden_BTF)
    return own


def attention_figures(q_BTHC: Tensor, k_BSKC: Tensor, scores: Scores, *, scale: float) -> dict[str, Tensor]:
    """Entropy and largest score, some rows or heads at a time. Queries that see nothing don't count, and those that see
    one key have no fraction."""
    sums = torch.zeros(4, dtype=torch.float64, device=q_BTHC.device)
    tops = []
    for rows, keys, heads in chunks(q_BTHC, k_BSKC):
        q, k = q_BTHC[rows, :, heads], k_BSKC[rows, :, keys]
        logits, probs = probabilities(q, k, _part(scores, rows, heads), scale=scale)
        counts = (logits > float("-inf")).sum(-1)
        entropy = torch.special.entr(probs).sum(-1)
        attended = probs.sum(-1) > 0
        several = attended & (counts > 1)
        frac = entropy[several] / counts[several].to(entropy.dtype).log()
        sums += torch.stack([entropy[attended].sum(), attended.sum(), frac.sum(), several.sum()])
        tops.append(logits.amax())
    return {
        "attn_entropy": sums[0] / sums[1],
        "attn_entropy_frac": sums[2] / sums[3],
        "attn_max_logit": torch.stack(tops).amax(),
    }


def chunks(q_BTHC: Tensor, k_BSKC: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, key heads and the query heads that read them, of MAX_SCORES scores or one key head of one row each."""
    (B, T, H), (S, K) = q_BTHC.shape[:3], k_BSKC.shape[1:3]
    n_rows = max(1, MAX_SCORES // (H * T * S))
    n_keys = K if H * T * S <= MAX_SCORES else max(1, MAX_SCORES // (H // K * T * S))
    for row in range(0, B, n_rows):
        for key in range(0, K, n_keys):
            heads = slice(key * (H // K), min(K, key + n_keys) * (H // K))
            yield slice(row, row + n_rows), slice(key, key + n_keys), heads


def _part(scores: Scores, rows: slice, heads: slice) -> Scores:
    """The scores of some rows and query heads."""

    def some(ids: Tensor) -> Tensor:
        return ids if len(ids) == 1 else ids[rows]

    def both(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        return None if pair is None else (some(pair[0]), some(pair[1]))

    return scores._replace(
        documents=both(scores.documents),
        positions=both(scores.positions),
        valid_BS=None if scores.valid_BS is None else scores.valid_BS[rows],
        kept_BS=None if scores.kept_BS is None else some(scores.kept_BS),
        slope_H=None if scores.slope_H is None else scores.slope_H[heads],
        bias_HR=None if scores.bias_HR is None else scores.bias_HR[heads],
    )
