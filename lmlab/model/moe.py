"""Experts behind a router, in place of one ffn: `moe(x_BTD, valid_BT) -> (y_BTD, RouterStats)`.

A router turns tokens into pairs (token, expert, weight), which lmlab/model/experts.py computes; what is dropped or does
not count asks for nobody, whose id is E.

Router logits, scores, weights and losses are at least fp32, whatever the model's dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.kernels.ops import Ops, wide
from lmlab.model import routing
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.experts import Experts, Pairs, expert_spec
from lmlab.registry import make


class RouterStats(NamedTuple):
    """What a forward says of its routing. Counts are of tokens that count; sums, so that micro-batches add up."""

    penalty_G: Optional[Tensor]  # what joins the loss, per group: aux_coef · balance + z_coef · z; None = nothing
    balance_G: Tensor  # E·Σ f·P of each group
    z_G: Tensor  # mean (log Σ e^logit)² of each group
    load_E: Tensor  # choices by expert, before any is dropped
    dropped: Tensor  # choices that no expert took; of expert choice: tokens that no expert chose
    asked: Tensor  # choices; of expert choice: tokens
    entropy: Tensor  # Σ over tokens of the entropy of their scores, nats
    tokens: Tensor


class Router(nn.Module):
    """x · Wᵀ in at least fp32; `bias` steers the choice alone (Wang et al. 2024, 2408.15664)."""

    bias: Optional[Tensor]

    def __init__(self, n_experts: int, d_model: int, *, jitter: float, biased: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_model))
        self.jitter = jitter
        self.register_buffer("bias", torch.zeros(n_experts) if biased else None)

    def forward(self, x_GSD: Tensor) -> Tensor:
        """Logits (G, S, E)."""
        x = x_GSD.to(wide(x_GSD.dtype))
        if self.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        return F.linear(x, self.weight.to(x.dtype))


class Routed(nn.Module):
    """What token choice and expert choice share: groups, router, experts, shared experts."""

    def __init__(self, spec: Any, dims: Dims, ops: Ops, layer: int | None = None, *, ffn: Any) -> None:
        super().__init__()
        self.spec, self.n_experts = spec, spec.n_experts
        one = expert_spec(ffn, spec.d_expert)
        biased = getattr(spec, "balance", "") == "aux_free"
        self.router = Router(spec.n_experts, dims.d_model, jitter=spec.jitter, biased=biased)
        self.experts = Experts(one, spec.n_experts, dims, ops, layer)
        self.shared = None
        if spec.n_shared:
            wide_spec = expert_spec(one, spec.n_shared * one.width(dims.d_model))
            self.shared = make(wide_spec, dims, ops, layer)

    @property
    def known_failures(self) -> dict[str, str]:
        return known_failures(self.spec)

    @property
    def noncausal(self) -> str:
        return noncausal(self.spec)

    def forward(self, x_BTD: Tensor, valid_BT: Optional[Tensor] = None) -> tuple[Tensor, RouterStats]:
        B, T, D = x_BTD.shape
        pairs, stats = self.route(*self.logits(x_BTD, valid_BT))
        y_BTD = self.experts(x_BTD.reshape(B * T, D), pairs).view(B, T, D)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD, valid_BT)[0]
        return y_BTD, stats

    def logits(self, x_BTD: Tensor, valid_BT: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        """The router's, and which tokens count, by group."""
        B, T, D = x_BTD.shape
        shape = (1, B * T) if self.spec.group == "batch" else (B, T)
        valid_GS = None if valid_BT is None else valid_BT.expand(B, T).reshape(shape)
        return self.router(x_BTD.reshape(*shape, D)), valid_GS

    def route(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> tuple[Pairs, RouterStats]:
        raise NotImplementedError

    def asked(self, x_BTD: Tensor, valid_BT: Optional[Tensor] = None) -> Tensor:
        """(B, T, E) whether the token and the expert belong together by choice, before any is dropped."""
        asked_GSE = self.chosen(*self.logits(x_BTD, valid_BT))
        return asked_GSE.reshape(*x_BTD.shape[:2], self.n_experts)

    def chosen(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
        """The same by group, (G, S, E)."""
        raise NotImplementedError

    def after_step(self, load_E: Tensor) -> None:
        """Between steps; load_E: how the choices of the whole step fell on the experts."""

    def stats(
        self,
        logits_GSE: Tensor,
        probs_GSE: Tensor,
        asked_GSk: Optional[Tensor],
        valid_GS: Optional[Tensor],
        **counts: Any,
    ) -> RouterStats:
        """asked_GSk: the choices that the balance loss is of; None = there is none."""
        spec = self.spec
        z_G = routing.mean(torch.logsumexp(logits_GSE, -1, keepdim=True).square(), valid_GS)[:, 0]
        even = torch.ones_like(z_G) if asked_GSk is None else routing.balance(asked_GSk, probs_GSE, valid_GS)
        coef = spec.aux_coef if getattr(spec, "balance", "") == "aux" else 0.0
        entropy_GS = torch.special.entr(probs_GSE.detach()).sum(-1)
        counted = torch.ones_like(entropy_GS) if valid_GS is None else valid_GS.to(entropy_GS.dtype)
        return RouterStats(
            penalty_G=coef * even + spec.z_coef * z_G if coef or spec.z_coef else None,
            balance_G=even.detach(),
            z_G=z_G.detach(),
            entropy=(entropy_GS * counted).sum(),
            tokens=counted.sum(),
            **counts,
        )


class MoE(Routed):
    """Each token goes through its k best experts (Shazeer et al. 2017, 1701.06538; Fedus et al. 2021, 2101.03961)."""

    def route(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> tuple[Pairs, RouterStats]:
        spec, E, (G, S, _) = self.spec, self.n_experts, logits_GSE.shape
        sigmoid = spec.score == "sigmoid"
        scores_GSE = self.scores(logits_GSE)
        wanted_GSk = self.wanted(scores_GSE.detach(), valid_GS)
        taken_GSk = self.taken(scores_GSE.detach(), wanted_GSk, valid_GS)
        weights_GSk = self.weights(scores_GSE, wanted_GSk if spec.overflow == "drop" else taken_GSk)
        tokens_M = torch.arange(G * S, device=logits_GSE.device).repeat_interleave(taken_GSk.shape[-1])
        weights_GSk = weights_GSk.masked_fill(taken_GSk == E, 0)
        pairs = Pairs(tokens_M, taken_GSk.flatten(), weights_GSk.flatten())
        probs_GSE = scores_GSE / scores_GSE.sum(-1, keepdim=True) if sigmoid else scores_GSE
        load = routing.counts(wanted_GSk.flatten(1), E)[:, :E].sum(0)
        counts = {"load_E": load, "asked": load.sum(), "dropped": load.sum() - (taken_GSk < E).sum()}
        return pairs, self.stats(logits_GSE, probs_GSE, wanted_GSk, valid_GS, **counts)

    def scores(self, logits_GSE: Tensor) -> Tensor:
        return logits_GSE.sigmoid() if self.spec.score == "sigmoid" else logits_GSE.softmax(-1)

    def chosen(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
        wanted_GSk = self.wanted(self.scores(logits_GSE), valid_GS)
        asked = torch.zeros_like(F.pad(logits_GSE, (0, 1)), dtype=torch.bool)
        return asked.scatter_(-1, wanted_GSk, True)[..., : self.n_experts]

    def preference(self, scores_GSE: Tensor) -> Tensor:
        """What experts are chosen by."""
        choice = scores_GSE if self.router.bias is None else scores_GSE + self.router.bias.to(scores_GSE.dtype)
        few = getattr(self.spec, "n_limited_groups", None)
        return choice if few is None else routing.limited(choice, self.spec.n_expert_groups, few)

    def wanted(self, scores_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
        """(G, S, k) the experts each token asks for, best first."""
        chosen = self.preference(scores_GSE).topk(self.spec.choices(), -1).indices
        return chosen if valid_GS is None else chosen.masked_fill(~valid_GS[..., None], self.n_experts)

    def taken(self, scores_GSE: Tensor, wanted_GSk: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
        """(G, S, k) the experts that take each token: the wanted ones as far as there is room."""
        spec, (G, S, k) = self.spec, wanted_GSk.shape
        if spec.capacity_factor is None:
            return wanted_GSk
        room_G1 = self.room(G, S, valid_GS, scores_GSE.device)
        first = spec.priority == "probability"
        if spec.overflow == "reroute":
            choice = self.preference(scores_GSE)
            ranked = choice.argsort(stable=True, dim=-1, descending=True)
            ranked = ranked.masked_fill(choice.gather(-1, ranked).isneginf(), self.n_experts)
            if valid_GS is not None:
                ranked = ranked.masked_fill(~valid_GS[..., None], self.n_experts)
            order = torch.arange(S, device=ranked.device).expand(G, S)
            if first:
                order = scores_GSE.amax(-1).argsort(stable=True, dim=1, descending=True)
            return routing.rerouted(ranked, k, room_G1, order)
        wanted_GM = wanted_GSk.flatten(1)
        value_GM = None
        if first:
            padded = F.pad(scores_GSE, (0, 1))
            value_GM = padded.gather(-1, wanted_GSk).flatten(1)
        place_GM = routing.places(wanted_GM, self.n_experts, value_GM)
        return wanted_GM.masked_fill(place_GM >= room_G1, self.n_experts).view(G, S, k)

    def room(self, G: int, S: int, valid_GS: Optional[Tensor], device: torch.device) -> Tensor:
        """(G, 1) tokens that each expert takes of each group."""
        if valid_GS is None:
            return torch.full((G, 1), self.spec.capacity(S), device=device)
        return capacity_of(valid_GS.sum(1, keepdim=True), self.spec)

    def weights(self, scores_GSE: Tensor, experts_GSk: Tensor) -> Tensor:
        """The scores of the chosen experts, without the bias that chose them; those of nobody are 0."""
        weights = F.pad(scores_GSE, (0, 1)).gather(-1, experts_GSk)
        if getattr(self.spec, "norm_topk", False):
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        return weights * getattr(self.spec, "weight_scale", 1.0)

    @torch.no_grad()
    def after_step(self, load_E: Tensor) -> None:
        """aux_free: the bias of experts with less than the mean load grows by bias_step, of the others it shrinks."""
        if self.router.bias is not None:
            load = load_E.to(self.router.bias.dtype)
            self.router.bias.add_((load.mean() - load).sign(), alpha=self.spec.bias_step)


class ExpertChoice(Routed):
    """Each expert takes the tokens of a group that it scores highest (Zhou et al. 2022, 2202.09368): even by
    construction, and not causal, for a later token may push out an earlier one."""

    def route(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> tuple[Pairs, RouterStats]:
        E, (G, S, _) = self.n_experts, logits_GSE.shape
        scores_GSE = logits_GSE.softmax(-1)
        tokens_GEC, experts_GEC = self.taken(scores_GSE.detach(), valid_GS)
        weights_GEC = scores_GSE.transpose(1, 2).gather(-1, tokens_GEC).masked_fill(experts_GEC == E, 0)
        flat_GEC = tokens_GEC + torch.arange(0, G * S, S, device=tokens_GEC.device)[:, None, None]
        pairs = Pairs(flat_GEC.flatten(), experts_GEC.flatten(), weights_GEC.flatten())
        load = routing.counts(experts_GEC.flatten(1), E)[:, :E].sum(0)
        seen = torch.zeros(G * S, dtype=torch.long, device=load.device)
        seen = seen.index_add_(0, pairs.tokens_M, (pairs.experts_M < E).long()) > 0
        n = torch.full((), G * S, device=load.device) if valid_GS is None else valid_GS.sum()
        counts = {"load_E": load, "asked": n, "dropped": n - seen.sum()}
        return pairs, self.stats(logits_GSE, scores_GSE, None, valid_GS, **counts)

    def taken(self, scores_GSE: Tensor, valid_GS: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        """(G, E, C) twice: the tokens that each expert takes, and the expert, E where a group has too few tokens."""
        E, C = self.n_experts, self.spec.capacity(scores_GSE.shape[1])
        choice_GES = scores_GSE.transpose(1, 2)
        if valid_GS is not None:
            choice_GES = choice_GES.masked_fill(~valid_GS[:, None], -1)
        tokens_GEC = choice_GES.argsort(stable=True, dim=-1, descending=True)[..., :C]  # of equal ones the first
        experts_GEC = torch.arange(E, device=tokens_GEC.device)[:, None].expand_as(tokens_GEC)
        if valid_GS is not None:
            room = capacity_of(valid_GS.sum(1, keepdim=True), self.spec)[..., None]
            experts_GEC = experts_GEC.masked_fill(torch.arange(C, device=room.device) >= room, E)
        return tokens_GEC, experts_GEC

    def chosen(self, logits_GSE: Tensor, valid_GS: Optional[Tensor]) -> Tensor:
        tokens_GEC, experts_GEC = self.taken(logits_GSE.softmax(-1), valid_GS)
        asked_GES = torch.zeros_like(logits_GSE, dtype=torch.bool).transpose(1, 2).contiguous()
        return asked_GES.scatter_(-1, tokens_GEC, experts_GEC < self.n_experts).transpose(1, 2)


def capacity_of(tokens_G1: Tensor, spec: Any) -> Tensor:
    """`spec.capacity` of many groups."""
    share = spec.choices() * tokens_G1.double() / spec.n_experts * spec.capacity_factor
    return torch.minimum(tokens_G1, (share - 1e-9).ceil().long())


def known_failures(spec: Any) -> dict[str, str]:
    """Rows of `lmlab check` that such routing cannot pass, and why."""
    found: dict[str, str] = {}
    if noncausal(spec):
        why = noncausal(spec)
        found |= dict.fromkeys(("causality", "causality in training", "causality by gradient"), why)
    if getattr(spec, "capacity_factor", None) is not None:
        why = f"moe.capacity_factor={spec.capacity_factor:g}: "
        why += "what an expert has room for depends on how many tokens the row has"
        found |= dict.fromkeys(("cached = full", "packed = alone"), why)
    if spec.group == "batch":
        why = "moe.group=batch: losses and room are those of a micro-batch, so that splitting it changes them"
        found |= dict.fromkeys(("micro-batches = whole", "batched = alone"), why)
    return found


def noncausal(spec: Any) -> str:
    """Why a token may see later ones, or ""."""
    if isinstance(spec, specs.ExpertChoice):
        return "moe=expert_choice: a later token may take an earlier one's place with an expert"
    if getattr(spec, "priority", "position") == "probability" and spec.capacity_factor is not None:
        return "moe.priority=probability: a later token may take an earlier one's place with a full expert"
    if spec.group == "batch" and getattr(spec, "capacity_factor", None) is not None:
        return (
            "moe.group=batch: the rows of a batch share the room of an expert, so that one row's tokens act on others"
        )
    return ""
