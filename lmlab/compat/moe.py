"""What routing does not go together with: finders behind the table's rows on moe. Torch-free.

Each takes an experiment and returns (message, hint), or None when it finds nothing wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from lmlab.compat.pos import Wrong
from lmlab.model.spec import FfnSpec, RoutedSpec, TokenChoiceSpec, TopK

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment


def _topk(e: Experiment) -> Optional[TopK]:
    return e.moe if isinstance(e.moe, TopK) else None


def routed_layers(e: Experiment) -> Wrong | None:
    m, layers = e.moe, e.model.n_layers
    if not isinstance(m, RoutedSpec) or any(m.routes(layer) for layer in range(layers)):
        return None
    every, dense = m.every_n_layers, m.first_dense_layers
    message = (
        f"`moe.every_n_layers` {every} and `moe.first_dense_layers` {dense} leave no layer of {layers} its experts"
    )
    return message, "use moe.every_n_layers=1 moe.first_dense_layers=0, or moe=none"


def top_k(e: Experiment) -> Wrong | None:
    m = _topk(e)
    if m is None:
        return None
    if m.top_k > m.n_experts:
        return f"`moe.top_k` is {m.top_k}, and `moe.n_experts` is {m.n_experts}", _at_most(m, m.n_experts)
    return None


def _at_most(m: TopK, most: int) -> str:
    norm = " moe.norm_topk=false" if most == 1 and m.norm_topk else ""
    return f"use moe.top_k={most}{norm}, or more experts"


def norm_topk(e: Experiment) -> Wrong | None:
    m = _topk(e)
    if m is None or m.top_k != 1 or not m.norm_topk:
        return None
    message = "`moe.norm_topk` is true with `moe.top_k` 1: the weight is always 1, and the router would learn nothing"
    return message, "use moe.norm_topk=false, or moe=switch, or moe.top_k=2"


def expert_groups(e: Experiment) -> Wrong | None:
    m = _topk(e)
    if m is None:
        return None
    E, groups, few = m.n_experts, m.n_expert_groups, m.n_limited_groups
    if E % groups:
        message = f"`moe.n_expert_groups` {groups} does not divide `moe.n_experts` {E}"
        return message, f"use {' or '.join(str(n) for n in range(1, min(E, groups) + 1) if E % n == 0)}"
    if few is None:
        if groups == 1:
            return None
        message = f"`moe.n_expert_groups` is {groups}, and `moe.n_limited_groups` is null: a token may use them all"
        return message, f"use moe.n_limited_groups={max(1, groups // 2)}, or moe.n_expert_groups=1"
    if few >= groups:
        message = f"`moe.n_limited_groups` is {few}, and `moe.n_expert_groups` is {groups}: no group would be left out"
        return message, "use moe.n_limited_groups=null moe.n_expert_groups=1" + (
            f", or fewer than {groups}" if groups > 1 else ""
        )
    if m.top_k > few * (E // groups):
        message = f"`moe.top_k` is {m.top_k}, and {few} groups of {E // groups} experts are what a token may use"
        return message, f"use moe.n_limited_groups={-(-m.top_k * groups // E)} or more, or a smaller moe.top_k"
    return None


def unused_width(e: Experiment) -> Wrong | None:
    """The ffn's own width where every layer has experts of another."""
    m, f = e.moe, e.ffn
    if not isinstance(m, RoutedSpec) or m.d_expert is None or not isinstance(f, FfnSpec):
        return None
    if not all(m.routes(layer) for layer in range(e.model.n_layers)):
        return None
    named = [name for name in ("d_ff", "mult", "multiple_of") if getattr(f, name) is not None]
    if not named:
        return None
    told = " and ".join(f"`ffn.{name}` {getattr(f, name):g}" for name in named)
    message = f"{told} would do nothing: every layer has experts, and `moe.d_expert` {m.d_expert} is their width"
    return message, f"use {' '.join(f'ffn.{name}=null' for name in named)}, or moe.d_expert=null"


def dead_settings(e: Experiment) -> Wrong | None:
    """Fields that nothing reads as the others are."""
    m: Any = e.moe
    if not isinstance(m, TokenChoiceSpec):
        return None
    usual = type(m)()
    if m.balance != "aux" and m.aux_coef != usual.aux_coef:
        message = f"`moe.aux_coef` is {m.aux_coef:g}, and `moe.balance` is {m.balance}: it would do nothing"
        return message, "use moe.balance=aux, or leave moe.aux_coef out"
    if m.balance != "aux_free" and m.bias_step != usual.bias_step:
        message = f"`moe.bias_step` is {m.bias_step:g}, and `moe.balance` is {m.balance}: it would do nothing"
        return message, "use moe.balance=aux_free, or leave moe.bias_step out"
    if m.capacity_factor is None:
        for name in ("overflow", "priority"):
            if getattr(m, name) != getattr(usual, name):
                message = f"`moe.{name}` is {getattr(m, name)}, and `moe.capacity_factor` is null: nobody is left out"
                return message, f"use moe.capacity_factor=1.25, or leave moe.{name} out"
    return None


def group_of_batch(e: Experiment) -> Wrong | None:
    m, rows = e.moe, max(1, e.train.batch_tokens // e.model.seq_len)
    if not isinstance(m, RoutedSpec) or m.group != "batch":
        return None
    micro = e.train.micro_batch
    if micro == rows:
        return None
    said = f"is {micro} of {rows} rows" if isinstance(micro, int) else f"is {micro}, which may split a step"
    message = (
        f"`moe.group` is batch, and `train.micro_batch` {said}: the losses of the router would depend on the split"
    )
    return message, f"use train.micro_batch={rows}, or moe.group=sequence"
