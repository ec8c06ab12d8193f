"""Every family by model_type; and which of them an architecture can be written as, found by doing it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.config.amend import quoted
from lmlab.config.fields import show
from lmlab.errors import ConfigError, listed
from lmlab.interop.family import Family, Words
from lmlab.interop.gpts import GPTS
from lmlab.interop.keys import Keys, Refused, transformers_module
from lmlab.interop.llamas import LLAMAS
from lmlab.model.spec import GQA, MHA, MLA, MQA, Arch, Decoder, DynamicNTK, FfnSpec, Learned, Llama3, Rope, YaRN
from lmlab.registry import OPTIONS

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*LLAMAS, *GPTS)}
PARTS = tuple(f.name for f in dataclasses.fields(Arch))
# What may differ without changing what a model in evaluation computes.
FREE = ("model.seq_len", "model.dropout", "attn.dropout", "attn.backend", "attn.form")


def typed(words: Words) -> list[str]:
    """{"norm": "rmsnorm", "norm.eps": 1e-05} → ["norm=rmsnorm", "norm.eps=1e-05"]; a part before its fields."""
    parts = [f"{key}={value}" for key, value in words.items() if "." not in key]
    return parts + [f"{key}={quoted(value)}" for key, value in words.items() if "." in key]


def arch_of(words: Words) -> Arch:
    """The architecture that the words compose, without Hydra: their parts are lmlab's own options."""
    own = {part: {k.partition(".")[2]: v for k, v in words.items() if k.startswith(f"{part}.")} for part in PARTS}
    parts = {p: OPTIONS[p][words.get(p, "none")](**own[p]) for p in PARTS if p != "model"}
    return Arch(model=Decoder(**own["model"]), **parts)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the same function


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
    elif isinstance(a, MLA):
        found |= {"attn.kv_rank": a.latent_size(D), "attn.rope_dim": a.rotary_size(D, H)}
        found |= {"attn.nope_dim": a.plain_size(D, H), "attn.v_dim": a.value_size(D, H)}
    found |= {"attn.pattern": _GONE, "attn.window": [a.layer_window(layer) for layer in range(m.n_layers)]}
    if isinstance(arch.ffn, FfnSpec):
        found |= {"ffn.d_ff": arch.ffn.width(D), "ffn.mult": _GONE, "ffn.multiple_of": _GONE}
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


def differences(wanted: Arch, found: Arch) -> list[tuple[str, Any, Any]]:
    """(key, in wanted, in found) of what decides the function and is not the same; a part's fields follow the part."""
    a, b = meaning(wanted), meaning(found)
    keys = [k for k in (*a, *b) if not _same(a.get(k), b.get(k))]
    parts = {k for k in keys if "." not in k}
    keys = [k for k in dict.fromkeys(keys) if k in parts or k.partition(".")[0] not in parts]
    return [(k, _as_written(wanted, k, a.get(k)), _as_written(found, k, b.get(k))) for k in keys]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def _as_written(arch: Arch, key: str, value: Any) -> Any:
    """A window as the user wrote it, not layer by layer; everything else as it was compared."""
    return arch.attn.window if key == "attn.window" else arch.attn.name if key == "attn" else value


# ---------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Written:
    """An architecture as one family writes it; `lost` is what that does not say."""

    family: Family
    config: dict[str, Any]
    lost: list[str]


def written(arch: Arch, family: Family, vocab: int, longest: int) -> Written:
    """config.json's keys, read back to see what they say."""
    transformers = transformers_module()
    config = family.config(arch, vocab, longest)
    said = {k: v for k, v in config.items() if v is not None or k in ("sliding_window", "q_lora_rank", "rope_scaling")}
    try:
        read = transformers.AutoConfig.for_model(family.model_type, **_copied(said))
        found = arch_of(family.words(Keys(read, said)))
    except Refused as error:
        return Written(family, said, [error.said])
    except Exception as error:  # transformers' own validation
        return Written(family, said, [f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"])
    return Written(family, said, [f"`{k}={show_value(v)}`" for k, v, _ in differences(arch, found)])


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers changes dicts that it is given."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}


def show_value(value: Any) -> str:
    return show(value) if not isinstance(value, list) else str(value)


def choose(arch: Arch, vocab: int, longest: int, wanted: str | None = None) -> Written:
    """The first family that says all of it, or the one that is wanted. Raises ConfigError naming what is lost."""
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"`--family` is {wanted}", f"use one of {', '.join(FAMILIES)}")
    tried = [written(arch, f, vocab, longest) for f in _asked(wanted)]
    whole = next((w for w in tried if not w.lost), None)
    if whole is not None:
        return whole
    nearest = min(tried, key=lambda w: len(w.lost))
    of = f"`--family {wanted}`" if wanted else f"the nearest family, {nearest.family.model_type},"
    message = f"{of} can't express {listed(nearest.lost, 12)}"
    hint = "leave --family out: another one may fit" if wanted else "transformers has no class for it that lmlab knows"
    raise ConfigError(message, hint)


def _asked(wanted: str | None) -> Sequence[Family]:
    return list(FAMILIES.values()) if wanted is None else [FAMILIES[wanted]]
