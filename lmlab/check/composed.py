"""The model that `lmlab check` asks its questions: small, in float64, on weights that hide nothing.

Every parameter is random (norm weights off 1, biases off 0), and what makes q is scaled until attention is peaked: on
nearly uniform attention a leak or a wrong scale hardly shows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Optional

import torch
from torch import Tensor, nn

from lmlab.check.small import VOCAB, T, given, small
from lmlab.config.tree import Experiment
from lmlab.kernels.attention import probabilities
from lmlab.kernels.ops import Ops
from lmlab.kernels.resolve import resolve
from lmlab.kernels.scores import Scores
from lmlab.kernels.spec import Auto, Reference
from lmlab.model.init import table, z
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer, build

PEAK = 0.5  # the mean largest attention weight of the last row
NEARLY = 0.95  # of a cap on the scores


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a model is called with: all (B, T)."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Optional[Tensor] = None
    valid_BT: Optional[Tensor] = None

    def call(self, net: Transformer, **more: Any) -> Any:
        return net(self.tokens_BT, self.positions_BT, documents_BT=self.documents_BT, valid_BT=self.valid_BT, **more)

    def edited(self, at: int) -> Rows:
        """The token at one place replaced by another."""
        tokens = self.tokens_BT.clone()
        tokens[:, at] = (tokens[:, at] + 1) % VOCAB
        return dataclasses.replace(self, tokens_BT=tokens)


def rows(B: int = 2, length: int = T, seed: int = 1) -> Rows:
    """Random tokens at positions 0, 1, 2, …"""
    tokens = torch.randint(VOCAB, (B, length), generator=torch.Generator().manual_seed(seed))
    return Rows(tokens, torch.arange(length).expand(B, length))


class Composed:
    """An experiment's model at the size of a check; what is expensive is made once."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.arch = small(experiment.arch)
        self.T = min(T, self.arch.model.seq_len)

    def build(
        self, arch: Optional[Arch] = None, dtype: torch.dtype = torch.float64, *, plain: bool = False
    ) -> Transformer:
        """A model with its initial values, in eval mode; plain: on the reference kernels."""
        kernels = Reference() if plain else self.experiment.kernels
        ops = resolve(kernels, "cpu", dtype)
        return build(arch or self.arch, VOCAB, ops, seed=0, device="cpu", dtype=dtype).eval()

    @cached_property
    def net(self) -> Transformer:
        """Random and peaked, in eval mode. Don't change it: `copy()` is for that."""
        net = randomized(self.build())
        self.peak, self.unpeaked = peaked(net, self.rows())
        return net

    peak: float = 0.0
    unpeaked: str = ""  # why attention could not be made peaked

    def copy(self) -> Transformer:
        return copy.deepcopy(self.net)

    @cached_property
    def quiet(self) -> Transformer:
        """The same weights without dropout, in train mode."""
        net = self.build(without_dropout(self.arch))
        net.load_state_dict(self.net.state_dict())
        return net.train()

    @cached_property
    def soft(self) -> Transformer:
        """Random, but not peaked, without dropout, in train mode."""
        return randomized(self.build(without_dropout(self.arch))).train()

    @cached_property
    def declared(self) -> dict[str, str]:
        """The failures that its parts declare: {row: reason}."""
        return self.net.known_failures()

    def rows(self, B: int = 2, length: Optional[int] = None, seed: int = 1) -> Rows:
        return rows(B, self.T if length is None else length, seed)

    def with_kernels(self, dtype: torch.dtype, *, plain: bool) -> Transformer:
        """The quiet model in another dtype, on the reference kernels or on the fastest ones."""
        ops = resolve(Reference() if plain else Auto(), "cpu", dtype)
        net = build(without_dropout(self.arch), VOCAB, ops, seed=0, device="cpu", dtype=dtype)
        return net.train()


def without_dropout(arch: Arch) -> Arch:
    return dataclasses.replace(arch, attn=given(arch.attn, dropout=0.0), model=given(arch.model, dropout=0.0))


def as_dict(arch: Arch) -> dict[str, dict[str, Any]]:
    """The plain dict that a run's configuration has of these parts."""
    parts = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    return {group: {"name": part.name, **vars(part)} for group, part in parts.items()}


# ---------------------------------------------------------------- weights


@torch.no_grad()
def randomized(net: Transformer, seed: int = 0) -> Transformer:
    """Every parameter drawn anew, in place: matrices keep lengths, tables are 0.5, the rest is off its start by 0.3."""
    starts = table(net)
    for name, p in net.named_parameters():
        noise = z(seed, f"check {name}", tuple(p.shape)).to(p.dtype)
        if name in ("embed.weight", "pos.weight"):
            p.copy_(0.5 * noise)
        elif p.ndim >= 2 and starts[name].mean == 0:
            p.copy_(noise * p.shape[-1] ** -0.5)
        else:
            p.copy_(starts[name].mean + 0.3 * noise)
    for name, b in net.named_buffers():
        noise = z(seed, f"check {name}", tuple(b.shape)).to(torch.float64)
        if name.endswith("running_mean"):
            b.copy_(0.3 * noise)
        elif name.endswith("running_var"):
            b.copy_((0.3 * noise).exp())
    return net


@torch.no_grad()
def peaked(net: Transformer, asked: Rows) -> tuple[float, str]:
    """Scale what makes q, in place, until attention is peaked. Returns (the peak, why it is not reached or "")."""
    blocks: list[Any] = list(net.blocks)
    makers = [maker for block in blocks if (maker := _maker_of_q(block.attn)) is not None]
    peak, full = last_row_peak(net, asked)
    for _ in range(40):
        if not makers or peak >= PEAK or full:
            break
        for maker in makers:
            maker.mul_(1.7)
        peak, full = last_row_peak(net, asked)
    if peak >= PEAK:
        return peak, ""
    return (
        peak,
        "nothing is named q"
        if not makers
        else "the cap on the scores is reached"
        if full
        else "scaling q does not do it",
    )


def _maker_of_q(attn: Any) -> Optional[Tensor]:
    """The last parameter that q goes through."""
    named = dict(attn.named_parameters())
    return next((named[n] for n in ("q_up.weight", "q_norm.weight", "q.weight") if n in named), None)


@torch.no_grad()
def last_row_peak(net: Transformer, asked: Rows) -> tuple[float, bool]:
    """Mean over layers, rows and heads of the largest attention weight of the last token, 0 without attention; and
    whether a cap on the scores is nearly reached, from where on only rounding would grow."""
    peaks: list[float] = []
    full: list[bool] = []

    def spied(inner: Any) -> Any:
        def attention(q: Tensor, k: Tensor, v: Tensor, scores: Any, rendered: Any, **how: Any) -> Tensor:
            if bool(q.any()):  # not the uniform part of shaped attention
                _, probs = probabilities(q, k, scores, scale=how["scale"])
                peaks.append(float(probs[:, :, -1].amax(-1).mean()))
                if scores.softcap is not None:
                    bare, _ = probabilities(q, k, Scores(softcap=scores.softcap), scale=how["scale"])
                    full.append(float(bare.abs().amax()) > NEARLY * scores.softcap)
            return inner(q, k, v, scores, rendered, **how)

        return attention

    with wrapped(net, spied):
        asked.call(net)
    return (sum(peaks) / len(peaks) if peaks else 0.0), any(full)


@contextmanager
def wrapped(net: nn.Module, wrap: Any) -> Iterator[None]:
    """Inside, every backend of attention is `wrap(backend)`."""
    owners = [m for m in net.modules() if isinstance(getattr(m, "ops", None), Ops)]
    before = [m.ops for m in owners]
    for module in owners:
        ops: Any = module.ops
        module.ops = dataclasses.replace(ops, attention={n: wrap(f) for n, f in ops.attention.items()})
    try:
        yield
    finally:
        for module, ops in zip(owners, before, strict=True):
            module.ops = ops


def gradients(net: Transformer, asked: Rows, weights_BT: Optional[Tensor] = None) -> dict[str, Tensor]:
    """The gradient of Σ weight · nats of each next token (of the last: the first) by parameter name."""
    net.zero_grad(set_to_none=True)
    loss = asked.call(net, targets_BT=asked.tokens_BT.roll(-1, 1), weights_BT=weights_BT).loss
    loss.backward()
    return {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}
