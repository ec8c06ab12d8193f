"""The model that `lmlab check` asks its questions: small, in float64, on weights that hide nothing.

Every parameter is random (norm weights off 1, biases off 0), and what makes q is scaled until attention is peaked: on
nearly uniform attention a leak or a wrong scale hardly shows. Nothing is so large that it hides what comes before it:
scores and what goes into a cap are bounded, for past that the rounding of a score moves weights by more than the rows
allow, and a function that is flat passes no edit on.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from lmlab.check.small import VOCAB, T, given, small
from lmlab.config.tree import Experiment
from lmlab.kernels.attention import probabilities
from lmlab.kernels.ops import Ops
from lmlab.kernels.resolve import on_cpu, resolve, why_not
from lmlab.kernels.scores import Scores
from lmlab.kernels.spec import Auto, Reference
from lmlab.model.init import table, z
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer, build
from lmlab.registry import Spec

PEAK = 0.5  # the mean largest attention weight of the last row
LOUDEST = 30.0  # a score: made in float32 it is off by some 1e-6, and so are the weights
STEEPEST = 3.0  # what goes into a cap, over the cap: tanh passes on 1 % of an edit there
LIKELIEST_DROP = 0.2  # at more, a token of a narrow model may be dropped altogether


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a model is called with: all (B, T)."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Optional[Tensor] = None
    valid_BT: Optional[Tensor] = None

    def on(self, device: torch.device) -> Rows:
        """The same rows on another device."""
        moved: Any = {name: t if t is None else t.to(device) for name, t in vars(self).items()}
        return Rows(**moved)

    def call(self, net: Transformer, **more: Any) -> Any:
        return net(self.tokens_BT, self.positions_BT, documents_BT=self.documents_BT, valid_BT=self.valid_BT, **more)

    def edited(self, at: int) -> Rows:
        """The token at one place replaced by another."""
        tokens = self.tokens_BT.clone()
        tokens[:, at] = (tokens[:, at] + 1) % VOCAB
        return dataclasses.replace(self, tokens_BT=tokens)


def rows(B: int = 2, length: int = T, seed: int = 1) -> Rows:
    """Random tokens at positions 0, 1, 2, …; no token twice in a row as long as there are enough, for equal ones could
    tie where tokens are ranked."""
    draw = torch.Generator().manual_seed(seed)
    each = [torch.randperm(VOCAB, generator=draw)[:length] for _ in range(B)]
    tokens = torch.stack(each) if length <= VOCAB else torch.randint(VOCAB, (B, length), generator=draw)
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
        kernels = Reference() if plain else on_cpu(self.experiment.kernels)
        ops = resolve(kernels, "cpu", dtype)
        return build(arch or self.arch, VOCAB, ops, seed=0, device="cpu", dtype=dtype).eval()

    @cached_property
    def net(self) -> Transformer:
        """Random and peaked, in eval mode. Don't change it: `copy()` is for that."""
        net = heard(randomized(self.build()), self.rows())
        self.peak, self.unpeaked = peaked(net, self.rows())
        return net

    peak: float = 0.0
    unpeaked: str = ""  # why attention could not be made peaked

    def copy(self) -> Transformer:
        return copy.deepcopy(self.net)

    @cached_property
    def quiet(self) -> Transformer:
        """The same weights without dropout, in train mode."""
        return self.in_training(0.0)

    def in_training(self, most: float) -> Transformer:
        """The same weights in train mode, no dropout being larger than `most`."""
        net = self.build(without_dropout(self.arch, most))
        net.load_state_dict(self.net.state_dict())
        return with_less_dropout(net, most).train()

    @cached_property
    def soft(self) -> Transformer:
        """Random, but not peaked, without dropout, in train mode."""
        net = with_less_dropout(randomized(self.build(without_dropout(self.arch))), 0.0)
        return heard(net, self.rows()).train()

    @cached_property
    def declared(self) -> dict[str, str]:
        """The failures that its parts declare: {row: reason}."""
        return self.net.known_failures()

    def rows(self, B: int = 2, length: Optional[int] = None, seed: int = 1) -> Rows:
        return rows(B, self.T if length is None else length, seed)

    @property
    def compared(self) -> tuple[Spec, torch.device]:
        """The kernels that stand beside the reference ones, those asked for by name or the fastest, and where they run:
        on the CPU, or on the experiment's GPU where they have no CPU."""
        kernels = self.experiment.kernels
        fast = Auto() if isinstance(kernels, Reference) else kernels
        word = self.experiment.device if self.experiment.device.startswith("cuda") else "cuda"
        return fast, torch.device(word if why_not(fast, "cpu") else "cpu")

    def with_kernels(self, dtype: torch.dtype, *, plain: bool, device: torch.device | str = "cpu") -> Transformer:
        """The quiet model in another dtype, on the reference kernels or on the ones that are compared with them."""
        ops = resolve(Reference() if plain else self.compared[0], device, dtype)
        net = build(without_dropout(self.arch), VOCAB, ops, seed=0, device=device, dtype=dtype)
        return net.train()


def without_dropout(arch: Arch, most: float = 0.0) -> Arch:
    """The parts with no dropout above `most`."""
    attn = given(arch.attn, dropout=min(most, getattr(arch.attn, "dropout", 0.0)))
    return dataclasses.replace(arch, attn=attn, model=given(arch.model, dropout=min(most, arch.model.dropout)))


def with_less_dropout(net: Transformer, most: float) -> Transformer:
    """The same for modules that parts of one's own have, in place."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = min(module.p, most)
    return net


def as_dict(arch: Arch) -> dict[str, dict[str, Any]]:
    """The plain dict that a run's configuration has of these parts."""
    parts = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    return {group: {"name": part.name, **vars(part)} for group, part in parts.items()}


# ---------------------------------------------------------------- weights


@torch.no_grad()
def randomized(net: Transformer, seed: int = 0) -> Transformer:
    """Every parameter drawn anew, in place: matrices keep lengths, tables are 0.5, the rest is off its start by 0.3,
    or off ±1 where it starts further out."""
    starts = table(net)
    for name, p in net.named_parameters():
        noise = z(seed, f"check {name}", tuple(p.shape)).to(p.dtype)
        if name in ("embed.weight", "pos.weight"):
            p.copy_(0.5 * noise)
        elif p.ndim >= 2 and starts[name].mean == 0:
            p.copy_(noise * p.shape[-1] ** -0.5)
        else:
            p.copy_(max(-1.0, min(starts[name].mean, 1.0)) + 0.3 * noise)
    for name, b in net.named_buffers():
        noise = z(seed, f"check {name}", tuple(b.shape)).to(torch.float64)
        if name.endswith("running_mean"):
            b.copy_(0.3 * noise)
        elif name.endswith("running_var"):
            b.copy_((0.3 * noise).exp())
        elif name.endswith("router.bias"):
            b.copy_(0.1 * noise)
    for module in net.modules():
        _louder_before_signs(module)
    return net


def _louder_before_signs(attn: Any) -> None:
    """A norm of one channel is its sign: all that its input gets for a gradient is rounding, more of it nearer to 0."""
    for name in ("q", "k"):
        norm, linear = getattr(attn, f"{name}_norm", None), getattr(attn, name, None)
        if isinstance(linear, nn.Linear) and norm is not None and norm.weight.numel() == 1:
            linear.weight.mul_(LOUDEST)


class Look(NamedTuple):
    """Of one pass. peak: mean over layers, rows and heads of the largest attention weight of the last token, 0 without
    attention. room: by how much the scores may grow until one of them is as large as it may be; capped: by its cap."""

    peak: float
    room: float
    capped: bool


@torch.no_grad()
def peaked(net: Transformer, asked: Rows, loudest: float = LOUDEST) -> tuple[float, str]:
    """Scale what makes q, in place, until attention is peaked. Returns (the peak, why it is not reached or "")."""
    makers, seen = _makers_of_q(net), look(net, asked, loudest)
    for _ in range(40):
        if not makers or seen.peak >= PEAK or seen.room < 1.05:
            break
        for maker in makers:
            maker.mul_(min(1.7, seen.room))
        seen = look(net, asked, loudest)
    if seen.peak >= PEAK:
        return seen.peak, ""
    if not makers:
        return seen.peak, "nothing is named q"
    full = "the cap on the scores is reached" if seen.capped else f"scores of {loudest:g} do not do it"
    return seen.peak, full if seen.room < 1.05 else "scaling q does not do it"


@torch.no_grad()
def heard(net: Transformer, asked: Rows) -> Transformer:
    """Scores, and what goes into the cap on the logits, made as small as they have to be, in place; nothing is changed
    where they are."""
    makers = _makers_of_q(net)
    for _ in range(8):
        if not makers or (room := look(net, asked).room) >= 1:
            break
        for maker in makers:
            maker.mul_(0.9 * room)
    cap, net.logit_softcap = net.logit_softcap, None
    for _ in range(8):
        if cap is None or (room := STEEPEST * cap / max(1e-30, float(asked.call(net).logits_BTV.abs().max()))) >= 1:
            break
        _quieter(net, 0.9 * room)
    net.logit_softcap = cap
    return net


def _quieter(net: Transformer, factor: float) -> None:
    """The logits times the factor: by the head's own matrix, by the last norm, or by the embedding."""
    if net.head is not None:
        for p in net.head.parameters():
            p.mul_(factor)
    elif net.norm is not None and hasattr(net.norm, "weight"):
        offset = getattr(net.norm, "offset", 0)
        for name, p in net.norm.named_parameters():
            start = offset if name == "weight" else 0
            if name in ("weight", "bias"):
                p.copy_((p + start) * factor - start)
    else:
        net.embed.weight.mul_(factor)


def _makers_of_q(net: Transformer) -> list[Tensor]:
    blocks: list[Any] = list(net.blocks)
    return [maker for block in blocks if (maker := _maker_of_q(block.attn)) is not None]


def _maker_of_q(attn: Any) -> Optional[Tensor]:
    """The last parameter that q goes through."""
    named = dict(attn.named_parameters())
    return next((named[n] for n in ("q_up.weight", "q_norm.weight", "q.weight") if n in named), None)


@torch.no_grad()
def look(net: Transformer, asked: Rows, loudest: float = LOUDEST) -> Look:
    """What attention does with the rows; loudest: what a score may be."""
    peaks: list[float] = []
    rooms: list[tuple[float, bool]] = [(float("inf"), False)]

    def spied(inner: Any) -> Any:
        def attention(q: Tensor, k: Tensor, v: Tensor, scores: Any, rendered: Any, **how: Any) -> Tensor:
            if bool(q.any()):  # not the uniform part of shaped attention
                _, probs = probabilities(q, k, scores, scale=how["scale"])
                peaks.append(float(probs[:, :, -1].amax(-1).mean()))
                bare, _ = probabilities(q, k, Scores(), scale=how["scale"])
                most = loudest if scores.softcap is None else min(loudest, STEEPEST * scores.softcap)
                rooms.append((most / max(1e-30, float(bare.abs().amax())), most < loudest))
            return inner(q, k, v, scores, rendered, **how)

        return attention

    with wrapped(net, spied):
        asked.call(net)
    return Look(sum(peaks) / len(peaks) if peaks else 0.0, *min(rooms))


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
    objective = asked.call(net, targets_BT=asked.tokens_BT.roll(-1, 1), weights_BT=weights_BT).objective
    objective.backward()
    return {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}
