"""What routing does not go together with: finders behind the table's rows on moe. Torch-free.

Each takes an experiment and returns (message, hint), or None when it finds nothing wrong. A finder here gives changes
that could mend it, and the hint names of each kind the first that does so and breaks no other row on moe.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

from lmlab.compat.pos import Wrong
from lmlab.config.meaning import show_value
from lmlab.model.spec import ExpertChoice, FfnSpec, NoMoE, RoutedSpec, Switch, TokenChoiceSpec, TopK

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment

Change = dict[str, Any]  # key → value; `moe` → the name of another option
Found = tuple[str, list[list[Change]]]  # the message; per kind of remedy the changes to try, the best one first
OTHERS: dict[str, Callable[[], Any]] = {"none": NoMoE, "switch": Switch}
FINDERS: list[Callable[[Experiment], Optional[Found]]] = []


def hinted(find: Callable[[Experiment], Optional[Found]]) -> Callable[[Experiment], Wrong | None]:
    """The finder with a hint made of those of its changes that can be followed."""
    FINDERS.append(find)

    @functools.wraps(find)
    def wrong(e: Experiment) -> Wrong | None:
        found = find(e)
        if found is None:
            return None
        whole = [f for f in FINDERS if f is find or f(e) is None]
        remedies = [next((c for c in kind if not any(f(changed(e, c)) for f in whole)), None) for kind in found[1]]
        words = [" ".join(f"{key}={show_value(value)}" for key, value in c.items()) for c in remedies if c]
        return found[0], f"use {', or '.join(words or ['moe=none'])}"

    return wrong


def changed(e: Experiment, change: Change) -> Experiment:
    for key, value in change.items():
        group, _, name = key.partition(".")
        part: Any = getattr(e, group)
        if name:
            part = dataclasses.replace(part, **{name: value})
        else:
            new = OTHERS[value]()
            part = dataclasses.replace(
                new, **{f.name: getattr(part, f.name) for f in dataclasses.fields(new) if hasattr(part, f.name)}
            )
        moved: dict[str, Any] = {group: part}
        e = dataclasses.replace(e, **moved)
    return e


def as_usual(m: Any, *names: str) -> Change:
    """What sets these fields back to their defaults, of those that are others."""
    usual = type(m)()
    return {f"moe.{n}": getattr(usual, n) for n in names if getattr(m, n) != getattr(usual, n)}


def numbers(name: str, values: Sequence[Any], **more: Any) -> list[Change]:
    return [{f"moe.{name}": value} | {f"moe.{n}": v for n, v in more.items()} for value in values]


def fewer(m: TopK) -> list[Change]:
    """A token that goes through fewer experts than there are, or than it asks for."""
    most = min(m.top_k, m.n_experts + 1) - 1
    return [*numbers("top_k", range(most, 1, -1)), *numbers("top_k", [1], norm_topk=False)]


def learns(m: Any) -> bool:
    """Whether the router of a single expert has anything to learn: how much of it a token takes."""
    return isinstance(m, TopK) and m.score == "sigmoid" and not m.norm_topk


# ---------------------------------------------------------------- layers and numbers of experts


@hinted
def routed_layers(e: Experiment) -> Found | None:
    m, layers = e.moe, range(e.model.n_layers)
    if not isinstance(m, RoutedSpec):
        return None
    routed = [m.routes(layer) for layer in layers]
    said = f"`moe.every_n_layers` {m.every_n_layers} and `moe.first_dense_layers` {m.first_dense_layers}"
    if not any(routed):
        usual: Change = {"moe.every_n_layers": 1, "moe.first_dense_layers": 0}
        return f"{said} leave no layer of {len(layers)} its experts", [[usual], [{"moe": "none"}]]
    without = dataclasses.replace(m, first_dense_layers=0)
    if m.first_dense_layers and routed == [without.routes(layer) for layer in layers]:
        message = f"{said} leave the layers their experts that the first alone does: the second does nothing"
        return message, [numbers("first_dense_layers", [0])]
    return None


@hinted
def one_expert(e: Experiment) -> Found | None:
    m = e.moe
    if not isinstance(m, RoutedSpec) or m.n_experts > 1 or learns(m):
        return None
    message = "`moe.n_experts` is 1: its weight is always 1, and the router would learn nothing"
    return message, [[{"moe": "none"}], numbers("n_experts", [2**n for n in range(1, 13)])]


@hinted
def top_k(e: Experiment) -> Found | None:
    m = e.moe
    if not isinstance(m, TopK) or m.top_k <= m.n_experts or (m.n_experts == 1 and m.score == "softmax"):
        return None
    more = numbers("n_experts", [m.top_k * n for n in (2, 4, 8, 16)])
    message = f"`moe.top_k` is {m.top_k}, and `moe.n_experts` is {m.n_experts}"
    return message, [[*numbers("top_k", [m.n_experts]), *fewer(m)], more]


@hinted
def norm_topk(e: Experiment) -> Found | None:
    m = e.moe
    if not isinstance(m, TopK) or m.top_k != 1 or not m.norm_topk or (m.n_experts == 1 and m.score == "softmax"):
        return None
    message = "`moe.norm_topk` is true with `moe.top_k` 1: the weight is always 1, and the router would learn nothing"
    return message, [numbers("norm_topk", [False]), [{"moe": "switch"}], numbers("top_k", [2])]


@hinted
def all_experts(e: Experiment) -> Found | None:
    """Fields that choose among experts, where a token goes through them all."""
    m = e.moe
    if not isinstance(m, TopK) or m.top_k != m.n_experts or (m.n_experts == 1 and not learns(m)):
        return None
    said = f"every token goes through all `moe.n_experts` {m.n_experts}"
    if m.balance != "none" and (m.balance == "aux_free" or as_usual(m, "aux_coef")):
        field, value = ("balance", m.balance) if m.balance == "aux_free" else ("aux_coef", f"{m.aux_coef:g}")
        even: list[Change] = [{"moe.balance": "none"} | as_usual(m, "aux_coef", "bias_step")]
        return f"`moe.{field}` is {value}, and {said}: their load is even", [even, fewer(m)]
    if m.overflow == "reroute":
        return f"`moe.overflow` is reroute, and {said}: there is no other", [numbers("overflow", ["drop"]), fewer(m)]
    if m.score == "softmax" and not m.norm_topk:
        message = f"`moe.norm_topk` is false, and {said}: their weights add up to 1 already"
        return message, [numbers("norm_topk", [True]), fewer(m)]
    return None


# ---------------------------------------------------------------- groups of experts


@hinted
def expert_groups(e: Experiment) -> Found | None:
    m = e.moe
    if not isinstance(m, TopK) or (message := _of_groups(m)) is None:
        return None
    return message, [[*_groups(m)], [{"moe.n_expert_groups": 1, "moe.n_limited_groups": None}]]


def _of_groups(m: TopK) -> str | None:
    E, groups, few = m.n_experts, m.n_expert_groups, m.n_limited_groups
    if E % groups:
        return f"`moe.n_expert_groups` {groups} does not divide `moe.n_experts` {E}"
    if few is None:
        none = f"`moe.n_expert_groups` is {groups}, and `moe.n_limited_groups` is null: a token may use them all"
        return none if groups > 1 else None
    if few >= groups:
        return f"`moe.n_limited_groups` is {few}, and `moe.n_expert_groups` is {groups}: no group would be left out"
    if m.top_k > few * (E // groups):
        return f"`moe.top_k` is {m.top_k}, and {few} groups of {E // groups} experts are what a token may use"
    if groups == E:
        return f"`moe.n_expert_groups` is {groups}, as many as `moe.n_experts`: the best groups are the best experts"
    return None


def _groups(m: TopK) -> Iterator[Change]:
    """Groups of two or more experts, and how many of them, nearest to what is set; what is as set is left out."""
    E, now = m.n_experts, (m.n_expert_groups, m.n_limited_groups)
    wanted = max(1, now[0] // 2) if now[1] is None else now[1]
    found = [
        (groups, few)
        for groups in range(2, E // 2 + 1)
        if E % groups == 0
        for few in range(-(-m.top_k * groups // E), groups)
    ]
    for pair in sorted(found, key=lambda p: (abs(p[0] - now[0]), abs(p[1] - wanted))):
        names = zip(("moe.n_expert_groups", "moe.n_limited_groups"), pair, now, strict=True)
        yield {name: value for name, value, old in names if value != old}


# ---------------------------------------------------------------- fields that nothing reads


@hinted
def dead_settings(e: Experiment) -> Found | None:
    """Fields that nothing reads as the others are."""
    m: Any = e.moe
    if not isinstance(m, TokenChoiceSpec):
        return None
    for name, reader in (("aux_coef", "aux"), ("bias_step", "aux_free")):
        if m.balance != reader and as_usual(m, name):
            message = f"`moe.{name}` is {getattr(m, name):g}, and `moe.balance` is {m.balance}: it would do nothing"
            return message, [numbers("balance", [reader]), [as_usual(m, name)]]
    for name in ("overflow", "priority"):
        if m.capacity_factor is None and as_usual(m, name):
            message = f"`moe.{name}` is {getattr(m, name)}, and `moe.capacity_factor` is null: nobody is left out"
            return message, [_room(m), [as_usual(m, "overflow", "priority")]]
    return None


def _room(m: TokenChoiceSpec) -> list[Change]:
    """A capacity that leaves tokens out."""
    return numbers("capacity_factor", [1.25, 1.0, 0.5])


@hinted
def room_for_all(e: Experiment) -> Found | None:
    """A capacity that leaves no token out, however many there are: ceil(k·T/E·factor) is T or more."""
    m: Any = e.moe
    factor = getattr(m, "capacity_factor", None)
    if not isinstance(m, RoutedSpec) or factor is None or m.n_experts == 1:
        return None
    least = m.n_experts / m.choices()
    if isinstance(m, ExpertChoice):
        message = f"`moe.capacity_factor` is {factor:g}, and with {least:g} an expert takes every token"
        return (message, [numbers("capacity_factor", [float(m.n_experts)])]) if factor > least else None
    if factor < least or not isinstance(m, TokenChoiceSpec):
        return None
    message = (
        f"`moe.capacity_factor` is {factor:g}, and with {least:g} an expert has room for every token: none is left out"
    )
    return message, [[{"moe.capacity_factor": None} | as_usual(m, "overflow", "priority")], _room(m)]


@hinted
def unused_width(e: Experiment) -> Found | None:
    """The ffn's own width where every layer has experts of another."""
    m, f = e.moe, e.ffn
    if not isinstance(m, RoutedSpec) or m.d_expert is None or not isinstance(f, FfnSpec):
        return None
    named = [name for name in ("d_ff", "mult", "multiple_of") if getattr(f, name) is not None]
    if not named or not all(m.routes(layer) for layer in range(e.model.n_layers)):
        return None
    told = " and ".join(f"`ffn.{name}` {getattr(f, name):g}" for name in named)
    message = f"{told} would do nothing: every layer has experts, and `moe.d_expert` {m.d_expert} is their width"
    return message, [[{f"ffn.{name}": None for name in named}], numbers("d_expert", [None])]


@hinted
def group_of_batch(e: Experiment) -> Found | None:
    m, rows = e.moe, max(1, e.train.batch_tokens // e.model.seq_len)
    micro = e.train.micro_batch
    if not isinstance(m, RoutedSpec) or m.group != "batch" or micro == rows:
        return None
    said = f"is {micro} of {rows} rows" if isinstance(micro, int) else f"is {micro}, which may split a step"
    message = (
        f"`moe.group` is batch, and `train.micro_batch` {said}: the losses of the router would depend on the split"
    )
    return message, [[{"train.micro_batch": rows}], numbers("group", ["sequence"])]
