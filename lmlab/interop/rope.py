"""Rotations in config.json ↔ our words: new `rope_parameters`, old `rope_theta` and `rope_scaling`.

Every scaling is written with its original length, because `model.seq_len` of an imported run is not it. YaRN's
mscale and mscale_all_dim become the one factor they amount to; where they do not amount to one they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmlab.config.fields import show
from lmlab.interop.keys import Keys, refused
from lmlab.model.spec import PI, Arch, DynamicNTK, Llama3, Rope, YaRN

Words = dict[str, Any]
ORIGINAL = "original_max_position_embeddings"
SHARED = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
OWN: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


def raw_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the file itself says under either key."""
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return found if isinstance(found, Mapping) else {}


def refuse_unknown_type(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a scaling that is none of ours, before transformers is asked."""
    said = raw_fields(raw)
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in OWN:
        raise refused("rope_type", kind, f"rotations are scaled by {', '.join(OWN)}")


def words(keys: Keys, head_dim: int, *, partial: bool = False, whole_score: bool = False) -> Words:
    """pos and rope_scaling. head_dim: channels that may turn. partial: whether the family can turn a share of them.
    whole_score: MLA, where YaRN's factor acts on all of the score, not on the part that turns. Raises ConfigError."""
    said = dict(keys["rope_parameters"] or {})
    kind = said.get("rope_type") or said.get("type") or "default"
    for key, value in said.items():
        if key not in SHARED | OWN[kind] and value is not None:
            raise refused(f"rope_parameters.{key}", value, f"rope_type {kind} has no such field")
    theta, share = number(said, "rope_theta"), number(said, "partial_rotary_factor", 1.0)
    for old, new in (("rope_theta", theta), ("rotary_emb_base", theta), ("rotary_pct", share)):
        if keys.raw.get(old) is not None and keys.raw[old] != new:
            raise refused(old, keys.raw[old], f"rope_parameters says {new:g}")
    if share != 1 and not partial:  # such a family's code does not look at it
        raise refused("partial_rotary_factor", share, "only 1")
    found: Words = {"pos": "rope", "pos.theta": theta}
    turned = int(head_dim * share)
    if turned != head_dim:
        found["pos.fraction"] = turned / head_dim
    return found | _scaling(kind, said, keys, whole_score)


def _scaling(kind: str, said: Mapping[str, Any], keys: Keys, whole_score: bool) -> Words:
    if kind == "default":
        return {"rope_scaling": "none"}
    longest = keys.whole("max_position_embeddings")
    original = said.get(ORIGINAL) or longest
    _refuse_other_original(kind, original, keys)
    factor = number(said, "factor", longest / number({"original": original}, "original") if kind == "yarn" else None)
    found: Words = {"rope_scaling.factor": factor}
    if kind == "linear":
        return {"rope_scaling": "pi"} | found
    if kind == "dynamic":  # transformers counts from max_position_embeddings, whatever else is said
        return {"rope_scaling": "dynamic_ntk"} | found | {"rope_scaling.original_len": longest}
    found["rope_scaling.original_len"] = original
    if kind == "llama3":
        ends = {f"rope_scaling.{n}": number(said, n) for n in ("low_freq_factor", "high_freq_factor")}
        return {"rope_scaling": "llama3"} | found | ends
    if said.get("truncate") not in (None, True):
        raise refused("rope_parameters.truncate", said["truncate"], "only true: the ramp's ends are whole pairs")
    for name in ("beta_fast", "beta_slow"):
        if said.get(name):
            found[f"rope_scaling.{name}"] = number(said, name)
    magnitude = _of_whole_score(said, factor) if whole_score else _on_rotated(said, factor)
    if not math.isclose(magnitude, own_magnitude(factor), rel_tol=1e-12):
        found["rope_scaling.attention_factor"] = magnitude
    return {"rope_scaling": "yarn"} | found


def _refuse_other_original(kind: str, original: Any, keys: Keys) -> None:
    """Beside rope_parameters the key takes precedence in transformers, once a model is built; not in every version."""
    keys.get(ORIGINAL)
    beside = keys.raw.get(ORIGINAL, original)
    if kind in ("yarn", "llama3") and beside != original:
        raise refused(ORIGINAL, beside, f"rope_parameters counts from {show(original)}: say it there")


def number(said: Mapping[str, Any], key: str, otherwise: float | None = None) -> float:
    """A number > 0 of the rope fields, or what holds where nothing is said. Raises ConfigError."""
    value = said.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise refused(f"rope_parameters.{key}", value, "only a number > 0")
    return float(value)


def own_magnitude(factor: float, m: float = 1.0) -> float:
    """0.1·m·ln(factor) + 1, YaRN's factor on cos and sin."""
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


def _on_rotated(said: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin."""
    if said.get("attention_factor") is not None:
        return number(said, "attention_factor")
    if not (said.get("mscale") and said.get("mscale_all_dim")):
        return own_magnitude(factor)
    return own_magnitude(factor, number(said, "mscale")) / own_magnitude(factor, number(said, "mscale_all_dim"))


def _of_whole_score(said: Mapping[str, Any], factor: float) -> float:
    """The root of the factor on the score; raises ConfigError where cos and sin have one of their own."""
    own = _on_rotated(said, factor)
    if not math.isclose(own, 1, rel_tol=1e-12):
        why = "cos and sin would be scaled apart from the score, as mscale = mscale_all_dim does not"
        raise refused("rope_parameters.mscale", said.get("mscale"), why)
    return own_magnitude(factor, number(said, "mscale_all_dim")) if said.get("mscale_all_dim") else 1.0


# ---------------------------------------------------------------- and back


def fields(arch: Arch, longest: int, *, partial: bool = False) -> dict[str, Any]:
    """max_position_embeddings and the rope keys, new and old, so that transformers 4 and 5 read the same; nothing of
    another kind of position. longest: tokens that rows may have where no scaling says so; partial: whether the share of
    channels that turn is always said, which has another default there."""
    pos, scaling = arch.pos, arch.rope_scaling
    if not isinstance(pos, Rope):
        return {"max_position_embeddings": longest}
    size = arch.attn.rotary_size(arch.model.d_model, arch.model.n_heads)
    said: dict[str, Any] = {"rope_type": "default"}
    if isinstance(scaling, PI):
        said = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicNTK):
        said, longest = {"rope_type": "dynamic", "factor": scaling.factor}, scaling.original(arch.model.seq_len)
    elif isinstance(scaling, Llama3):
        said = {"rope_type": "llama3", "factor": scaling.factor} | {
            n: getattr(scaling, n) for n in ("low_freq_factor", "high_freq_factor")
        }
    elif isinstance(scaling, YaRN):
        said = {"rope_type": "yarn", "factor": scaling.factor}
        said |= {n: getattr(scaling, n) for n in ("beta_fast", "beta_slow")}
        said |= _magnitude_fields(scaling, arch.attn.name == "mla")
    if isinstance(scaling, (Llama3, YaRN)):
        said["original_max_position_embeddings"] = scaling.original(arch.model.seq_len)
    top = {"rope_theta": pos.theta}
    if partial or pos.width(size) != size:
        top["partial_rotary_factor"] = _share(pos.width(size), size)
    said |= top
    old = {k: v for k, v in said.items() if k not in top}
    scaled = None if said["rope_type"] == "default" else old | {"type": old["rope_type"]}
    return {"max_position_embeddings": longest, "rope_parameters": said, "rope_scaling": scaled, **top}


def _magnitude_fields(scaling: YaRN, whole_score: bool) -> dict[str, float]:
    own = scaling.attention_factor
    if not whole_score or own == 1:
        return {} if own is None else {"attention_factor": own}
    m = 1.0 if own is None or scaling.factor <= 1 else (own - 1) / (0.1 * math.log(scaling.factor))
    return {"mscale": m, "mscale_all_dim": m}


def _share(turned: int, size: int) -> float:
    """A share of which transformers makes the same whole number of channels."""
    share = turned / size
    return share if int(size * share) == turned else math.nextafter(share, 1)
