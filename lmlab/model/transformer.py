"""The decoder: embedding, positions, L blocks, head. Knows roles, never variants; builds every part by its spec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.errors import LmlabError
from lmlab.kernels.ops import HeadLoss, Ops, capped
from lmlab.model.block import Parts
from lmlab.model.cache import Cache
from lmlab.model.dims import Dims
from lmlab.model.init import draw_
from lmlab.model.mask import CAUSAL, Mask, documents, padding
from lmlab.model.recompute import recomputed
from lmlab.model.spec import Arch
from lmlab.registry import Spec, make


class Output(NamedTuple):
    """With targets: the head's loss, of which `loss` is Σ weight · nats (0-d, at least fp32). Without: the logits.
    stats: one entry per layer. penalty: what routers add to be trained, on the same scale (None = nothing)."""

    logits_BTV: Optional[Tensor]
    head: Optional[HeadLoss]
    stats: tuple[Any, ...]
    penalty: Optional[Tensor] = None

    @property
    def loss(self) -> Optional[Tensor]:
        """The language's alone: neither z-loss nor penalty."""
        return None if self.head is None else self.head.nats

    @property
    def z_loss(self) -> Optional[Tensor]:
        """What the z-loss adds, without a gradient; None where there is none."""
        if self.head is None or self.head.objective is self.head.nats:
            return None
        return (self.head.objective - self.head.nats).detach()

    @property
    def objective(self) -> Tensor:
        """What is differentiated: the loss, the z-loss and the penalty."""
        assert self.head is not None
        return self.head.objective if self.penalty is None else self.head.objective + self.penalty


class Transformer(nn.Module):
    """A decoder-only Transformer, made on the current torch device (meta for counts)."""

    def __init__(self, arch: Arch, vocab_size: int, ops: Ops) -> None:
        """vocab_size: ids that it reads and predicts; its matrices have arch.vocab_rows(vocab_size)."""
        super().__init__()
        model = arch.model
        self.arch, self.ops, self.dropout = arch, ops, model.dropout
        self.logit_scale, self.logit_softcap = arch.logit_scale(), model.logit_softcap
        self.dims = dims = Dims(
            d_model=model.d_model,
            n_heads=model.n_heads,
            head_dim=arch.head_dim(),
            n_layers=model.n_layers,
            vocab_size=vocab_size,
            seq_len=model.seq_len,
            rotary_dim=arch.attn.rotary_size(model.d_model, model.n_heads),
        )
        n_rows = arch.vocab_rows(vocab_size)
        self.z_loss, self.n_valid = model.z_loss, None if n_rows == vocab_size else vocab_size
        self.recompute = False  # in training only what enters a block is kept
        self.embed = nn.Embedding(n_rows, model.d_model)
        self.embed_scale = arch.embed_scale()
        self.embed_norm = make(arch.norm, dims, ops, None) if model.embed_norm else None
        self.pos = make(arch.pos, dims, ops, None)
        if arch.rope_scaling.build:
            self.pos.scale_by(self.scaling_of(arch.rope_scaling))
        self.blocks = nn.ModuleList(self._block(arch, dims, ops, layer) for layer in range(model.n_layers))
        self.norm = make(arch.norm, dims, ops, None) if arch.block.final_norm() else None
        self.head = None if model.tie_embeddings else nn.Linear(model.d_model, n_rows, bias=model.head_bias)
        self._attention_used: dict[str, None] = {}

    @staticmethod
    def _block(arch: Arch, dims: Dims, ops: Ops, layer: int) -> nn.Module:
        parts = Parts(
            norm=lambda: make(arch.norm, dims, ops, layer),
            attn=lambda: make(arch.attn, dims, ops, layer),
            ffn=lambda: (
                make(arch.moe, dims, ops, layer, ffn=arch.ffn)
                if arch.moe.routes(layer)
                else make(arch.ffn, dims, ops, layer)
            ),
            dropout=arch.model.dropout,
        )
        return make(arch.block, dims, ops, layer, parts=parts)

    def scaling_of(self, spec: Spec) -> Any:
        """The scaling of rotations of this spec, for `pos.scale_by`."""
        return make(spec, self.dims, self.ops, None)

    @property
    def routed(self) -> bool:
        """Whether any layer has experts."""
        return any(self.arch.moe.routes(layer) for layer in range(self.dims.n_layers))

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the head's own matrix, or the embedding's when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def head_bias(self) -> Optional[Tensor]:
        """(V,), or None."""
        return None if self.head is None else self.head.bias

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        documents_BT: Optional[Tensor] = None,
        valid_BT: Optional[Tensor] = None,
        length_BT: Optional[Tensor] = None,
        cache: Optional[Cache] = None,
        targets_BT: Optional[Tensor] = None,
        weights_BT: Optional[Tensor] = None,
        last: Optional[int] = None,
    ) -> Output:
        """Loss when targets are given, else logits. documents_BT: ids, attention stays inside one (positions then
        start again at each). valid_BT: False = padding. length_BT: (B, 1 or T) tokens that the text of each token has
        or will have, for scalings that ask (None = of its document in the row). cache: the tokens go on from what it
        holds. weights_BT: of each target in the loss (None = 1). last: logits of so many last tokens only."""
        how = dict(documents_BT=documents_BT, valid_BT=valid_BT, length_BT=length_BT, cache=cache, last=last)
        x_BTD, stats = self.hidden(tokens_BT, positions_BT, **how)  # type: ignore[arg-type]
        if targets_BT is None:
            return Output(self.logits(x_BTD), None, stats)
        return Output(None, self.loss(x_BTD, targets_BT, weights_BT), stats, penalty(stats, targets_BT, weights_BT))

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        documents_BT: Optional[Tensor] = None,
        valid_BT: Optional[Tensor] = None,
        length_BT: Optional[Tensor] = None,
        cache: Optional[Cache] = None,
        last: Optional[int] = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """What the head is handed (B, T or `last`, D), and each layer's stats; arguments as of `forward`."""
        x_BTD = self.embedded(tokens_BT, positions_BT, valid_BT)
        if cache is None:
            mask = CAUSAL if documents_BT is None else CAUSAL & documents(documents_BT)
            mask = mask if valid_BT is None else mask & padding(valid_BT)
            views = self.views(mask, positions_BT, self.embed.weight.dtype, length_BT)
        else:
            if documents_BT is not None:
                raise LmlabError("a cache knows no documents in a row", "give each document a row of its own")
            cache.begin(tokens_BT, positions_BT, valid_BT, length_BT)
            views = self.cached_views(cache, positions_BT, self.embed.weight.dtype, length_BT)
        stats = []
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        again = self.recompute and self.training and cache is None and torch.is_grad_enabled()
        for block, view, kept in zip(self.blocks, views, caches, strict=True):
            if again:
                x_BTD, found = recomputed(block, x_BTD, view, valid_BT)
            else:
                x_BTD, found = block(x_BTD, view, valid_BT, kept)
            stats.append(found)
        if cache is not None:
            cache.appended()
        if last is not None:
            x_BTD = x_BTD[:, -last:]
            valid_BT = None if valid_BT is None else valid_BT[:, -last:]
        return (x_BTD if self.norm is None else self.norm(x_BTD, valid_BT)), tuple(stats)

    def embedded(self, tokens_BT: Tensor, positions_BT: Tensor, valid_BT: Optional[Tensor]) -> Tensor:
        """What the first block is handed (B, T, D)."""
        x_BTD = self.ops.embedding(tokens_BT, self.embed.weight)
        x_BTD = x_BTD if self.ops.residual_dtype is None else x_BTD.to(self.ops.residual_dtype)
        x_BTD = x_BTD if self.embed_scale == 1 else x_BTD * self.embed_scale
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD, valid_BT).to(x_BTD.dtype)
        x_BTD = self.pos.embed(x_BTD, positions_BT)
        return F.dropout(x_BTD, self.dropout) if self.dropout and self.training else x_BTD

    def views(
        self, mask: Mask, positions_BT: Tensor, dtype: torch.dtype, length_BT: Optional[Tensor] = None
    ) -> list[Any]:
        """What each layer's attention is handed, prepared once per kind of layer."""
        if length_BT is None and self.pos.needs_length:
            length_BT = mask.lengths()
        tables = self.pos.tables(positions_BT, positions_BT, length_BT)
        made: dict[Any, Any] = {}
        views = []
        for kind, attn in self._attentions():
            if kind not in made:
                made[kind] = attn.prepare(mask, tables, positions_BT, positions_BT, dtype)
                self._attention_used[_describe(attn, made[kind])] = None
            views.append(made[kind])
        return views

    def cached_views(
        self, cache: Cache, positions_BT: Tensor, dtype: torch.dtype, length_BT: Optional[Tensor]
    ) -> list[Any]:
        """The same with the keys that each layer's cache holds, the new ones among them."""
        tables_of = {lay: self.pos.tables(positions_BT, lay.k_pos_BS, length_BT) for lay in cache.layouts}
        made: dict[Any, Any] = {}
        views = []
        for (kind, attn), kept in zip(self._attentions(), cache.layers, strict=True):
            layout, tables = kept.layout, tables_of[kept.layout]
            if (kind, layout) not in made:
                made[kind, layout] = attn.prepare(layout.mask, tables, positions_BT, layout.k_pos_BS, dtype)
            views.append(made[kind, layout])
        return views

    def _attentions(self) -> list[tuple[Any, Any]]:
        """(kind, attention) of each layer; a part that names no kind is one of its own."""
        parts: list[Any] = [block.attn for block in self.blocks]
        return [(getattr(attn, "kind", layer), attn) for layer, attn in enumerate(parts)]

    def loss(self, x_BTD: Tensor, targets_BT: Tensor, weights_BT: Optional[Tensor]) -> HeadLoss:
        """Σ weight · nats of the targets, in training with the z-loss."""
        if weights_BT is None:
            weights_BT = torch.ones_like(targets_BT, dtype=torch.float32)
        hidden_ND, head_VD = x_BTD.flatten(0, 1), self.head_weight
        if self.head_bias is not None:
            hidden_ND, head_VD = with_bias(hidden_ND, head_VD, self.head_bias)
        rows = hidden_ND, head_VD, targets_BT.flatten(), weights_BT.flatten()
        z_coef = self.z_loss if self.training else 0.0
        return self.ops.linear_cross_entropy(*rows, self.logit_scale, self.logit_softcap, z_coef, self.n_valid)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """(B, T, V), scaled, then capped."""
        bias = None if self.head_bias is None else self.head_bias[: self.n_valid]
        logits_BTV = F.linear(x_BTD, self.head_weight[: self.n_valid], bias)
        return capped(logits_BTV if self.logit_scale == 1 else logits_BTV * self.logit_scale, self.logit_softcap)

    @torch.no_grad()
    def after_step(self, loads: Sequence[Optional[Tensor]]) -> None:
        """What parts do between steps; loads: per layer how the choices of the whole step fell on its experts."""
        blocks: list[Any] = list(self.blocks)
        for block, load_E in zip(blocks, loads, strict=True):
            if load_E is not None and hasattr(block.ffn, "after_step"):
                block.ffn.after_step(load_E)

    def compile_blocks(self) -> None:
        """torch.compile each block, in place, without graph breaks: one graph per kind of layer, with and without
        gradients, and one more per kind once other lengths arrive."""
        blocks: list[Any] = list(self.blocks)
        kinds = len({(kind, type(b.ffn)) for (kind, _), b in zip(self._attentions(), blocks, strict=True)})
        config = torch._dynamo.config
        # counted per code object, whichever model of this process it is of
        config.recompile_limit = max(config.recompile_limit, 4) + 4 * kinds
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
        for block in self.blocks:
            block.compile(fullgraph=True)

    def eager(self) -> AbstractContextManager[Any]:
        """Inside, compiled blocks run as they are written, and what is compiled stays."""
        compiled = any(block._compiled_call_impl is not None for block in self.blocks)
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    def known_failures(self) -> dict[str, str]:
        """What its parts declare to be wrong with themselves: {row of `lmlab check`: why}."""
        found: dict[str, str] = {}
        for module in self.modules():
            if module is not self:
                found |= getattr(module, "known_failures", {})
        return found

    def noncausal(self) -> str:
        """Why a token may see later ones in evaluation, in the words of the parts that say so (`noncausal`), or ""."""
        reasons = [getattr(module, "noncausal", "") for module in self.modules() if module is not self]
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    def paths(self) -> dict[str, str]:
        """Which implementation each operation used, for the manifest; attention after a forward says why as well."""
        used = self._attention_used or self._attention_expected()
        return {**self.ops.names, "attention": "; ".join(used)}

    def _attention_expected(self) -> dict[str, None]:
        with torch.no_grad():
            positions = torch.arange(self.dims.seq_len, device=self.embed.weight.device)[None]
            self.views(CAUSAL, positions, self.ops.dtype)
        used, self._attention_used = self._attention_used, {}
        return used


def penalty(stats: Sequence[Any], targets_BT: Tensor, weights_BT: Optional[Tensor]) -> Optional[Tensor]:
    """Σ over rows of their weight times the routers' mean penalty: divided by all weights, as the loss is, it does not
    ask how the batch was split."""
    found = [s.penalty_G for s in stats if s is not None and s.penalty_G is not None]
    if not found:
        return None
    weight_B = torch.ones_like(targets_BT, dtype=found[0].dtype).sum(1) if weights_BT is None else weights_BT.sum(1)
    weight_G = weight_B if len(found[0]) == len(weight_B) else weight_B.sum()[None]
    return (torch.stack(found).mean(0) * weight_G.to(found[0].dtype)).sum()


def with_bias(hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """The same products with the bias as one more column of the head, times 1; zeros fill up to 8, which matrix
    products of half precision want their rows to be multiples of."""
    ones = F.pad(hidden_ND.new_ones(len(hidden_ND), 1), (0, 7))
    return torch.cat((hidden_ND, ones), -1), torch.cat((head_VD, F.pad(bias_V[:, None], (0, 7))), -1)


def _describe(attn: nn.Module, view: Any) -> str:
    backend = getattr(view, "backend", None)
    return type(attn).__name__ if backend is None else f"{backend} ({view.why})"


def build(
    arch: Arch,
    vocab_size: int,
    ops: Ops,
    *,
    seed: int | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A model on `device`: made on meta, given memory, drawn by name. seed None leaves the values for loading.

    Draws are fp32 whatever `dtype` is, so a float64 model is the fp32 one to the last bit.
    """
    with torch.device("meta"):
        model = Transformer(arch, vocab_size, ops)
    if any(True for _ in model.buffers()):  # a part's own table: its values would be lost on meta
        with torch.device(device):
            model = Transformer(arch, vocab_size, ops)
    else:
        model.to_empty(device=device)
    model.to(dtype)
    if seed is not None:
        draw_(model, seed)
    return model
