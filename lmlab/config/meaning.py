"""What decides an architecture's function, whatever way it was written down. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lmlab.config.fields import show
from lmlab.model.spec import (
    GQA,
    MHA,
    MLA,
    MQA,
    Arch,
    DynamicNTK,
    FfnSpec,
    Learned,
    Llama3,
    Rope,
    RoutedSpec,
    TokenChoiceSpec,
    YaRN,
)

PARTS = tuple(f.name for f in dataclasses.fields(Arch))
# What may differ without changing what a model in evaluation computes.
FREE = (
    *("model.seq_len", "model.dropout", "model.z_loss"),
    *("attn.dropout", "attn.backend", "attn.form"),
    *("moe.aux_coef", "moe.z_coef", "moe.jitter", "moe.bias_step"),
)


def meaning(arch: Arch) -> dict[str, Any]:
    """What decides the function, by dotted key, nulls worked out. Equal for two ways of writing one architecture."""
    flat: dict[str, Any] = {}
    for part in PARTS:
        spec = getattr(arch, part)
        if part != "model":
            flat[part] = spec.name
        flat |= {f"{part}.{f.name}": getattr(spec, f.name) for f in dataclasses.fields(spec)}
    flat = {k: v for k, v in flat.items() if k not in FREE} | _worked_out(arch)
    return {k: v for k, v in flat.items() if v is not _GONE}


_GONE = object()


def _worked_out(arch: Arch) -> dict[str, Any]:
    m, a, D, H = arch.model, arch.attn, arch.model.d_model, arch.model.n_heads
    found: dict[str, Any] = {"model.logit_scale": arch.logit_scale()}
    if type(a) in (MHA, MQA, GQA):
        found |= {"attn": "heads", "attn.n_kv_heads": a.kv_heads(H), "attn.head_dim": arch.head_dim()}
        found["attn.queries_per_kv"] = _GONE
    elif isinstance(a, MLA):
        found |= {"attn.kv_rank": a.latent_size(D), "attn.rope_dim": a.rotary_size(D, H)}
        found |= {"attn.nope_dim": a.plain_size(D, H), "attn.v_dim": a.value_size(D, H)}
    found |= {"attn.pattern": _GONE, "attn.window": [a.layer_window(layer) for layer in range(m.n_layers)]}
    if isinstance(arch.ffn, FfnSpec):
        found |= {"ffn.d_ff": arch.ffn.width(D), "ffn.mult": _GONE, "ffn.multiple_of": _GONE}
    if isinstance(arch.moe, RoutedSpec):
        found |= _routing(arch, arch.moe)
    if isinstance(arch.pos, Learned):
        found["pos.max_len"] = arch.pos.max_len or m.seq_len
    if isinstance(arch.pos, Rope):  # pairing is a matter of the rows' order, not of the function
        size = a.rotary_size(D, H)
        found |= {"pos.pairing": _GONE, "pos.fraction": arch.pos.width(size) / size}
    if isinstance(arch.rope_scaling, (DynamicNTK, YaRN, Llama3)):
        found["rope_scaling.original_len"] = arch.rope_scaling.original(m.seq_len)
    if isinstance(arch.rope_scaling, YaRN):
        s = arch.rope_scaling
        own = 0.1 * math.log(s.factor) + 1 if s.attention_factor is None else s.attention_factor
        found["rope_scaling.attention_factor"] = own
    return found


def _routing(arch: Arch, moe: RoutedSpec) -> dict[str, Any]:
    """The width of an expert, that of dense layers where there are any, which layers are routed; of what evens the load
    only whether a bias takes part in the choice."""
    found: dict[str, Any] = {}
    routed = [moe.routes(layer) for layer in range(arch.model.n_layers)]
    if isinstance(arch.ffn, FfnSpec):
        found["moe.d_expert"] = arch.ffn.width(arch.model.d_model) if moe.d_expert is None else moe.d_expert
        found |= {"ffn.d_ff": found["moe.d_expert"]} if all(routed) else {}
    every_and_first = placed(routed)
    if every_and_first is not None:
        found["moe.every_n_layers"], found["moe.first_dense_layers"] = every_and_first
    if isinstance(moe, TokenChoiceSpec):
        found["moe.balance"] = "aux_free" if moe.balance == "aux_free" else "aux"
    if getattr(moe, "capacity_factor", None) is None:
        found["moe.group"] = _GONE  # of losses alone
    return found


def placed(routed: list[bool]) -> tuple[int, int] | None:
    """(every_n_layers, first_dense_layers), the smallest that route these layers; None where there are none such."""
    layers = range(len(routed))
    for every in (n + 1 for n in layers):
        for first in layers:
            if routed == [layer >= first and (layer + 1) % every == 0 for layer in layers]:
                return every, first
    return None


def differences(wanted: Arch, found: Arch) -> list[tuple[str, Any, Any]]:
    """(key, in wanted, in found) of what decides the function and is not the same; a part's fields follow the part."""
    a, b = meaning(wanted), meaning(found)
    keys = [k for k in (*a, *b) if not same(a.get(k), b.get(k))]
    parts = {k for k in keys if "." not in k}
    keys = [k for k in dict.fromkeys(keys) if k in parts or k.partition(".")[0] not in parts]
    return [(k, _as_written(wanted, k, a.get(k)), _as_written(found, k, b.get(k))) for k in keys]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def _as_written(arch: Arch, key: str, value: Any) -> Any:
    """A window as the user wrote it, not layer by layer, and what evens the load; the rest as it was compared."""
    if key == "moe.balance":
        return getattr(arch.moe, "balance", None)
    return arch.attn.window if key == "attn.window" else arch.attn.name if key == "attn" else value


def show_value(value: Any) -> str:
    return show(value) if not isinstance(value, list) else str(value)
