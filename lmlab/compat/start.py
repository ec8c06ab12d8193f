"""What a run may change against the run whose weights it starts from. Torch-free.

Everything that decides the function is compared with nulls worked out. What has no weights may differ where the table
says so; what changes the shape of weights may where lmlab/train/start.py knows how to make one of the other; the rest
is refused, so that no weight is dropped or left to chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lmlab.config.meaning import meaning, same, show_value
from lmlab.errors import ConfigError, Errors, LmlabError, listed
from lmlab.model.spec import GQA, MHA, MQA, Arch, FfnSpec, HeadsSpec, Learned, Rope, RoutedSpec
from lmlab.registry import OPTIONS, Spec

# No weights, and a model that was trained with one can be trained on with another.
ROUTER = ("aux_coef", "z_coef", "jitter", "bias_step", "capacity_factor", "overflow", "priority", "group")
FREE = (
    *("rope_scaling", "attn.window", "attn.softcap", "pos.theta", "ffn.beta", "ffn.approximate"),
    *(f"moe.{name}" for name in ROUTER),
)
# Off, on: a bias that starts at 0 changes nothing.
BIASES = ("attn.bias_qkv", "attn.bias_o", "ffn.bias", "norm.bias", "model.head_bias")
MAY = (
    "what may change: rope_scaling, pos.theta, model.seq_len, window, softcap, dropout, z_loss, activation, fewer kv "
    "heads, the router's losses and capacity"
)
FFN = "lmlab.model.ffn:FFN"


# Besides these what may change where it fits, and is told so when it does not.
FITTING = ("attn", "ffn", "attn.n_kv_heads", "model.tie_embeddings", "pos.max_len", *BIASES)


def with_weights(error: LmlabError, old: Arch, typed: Sequence[str]) -> list[LmlabError]:
    """The errors of a composition that starts from the weights of `old`: where a typed key stands in the way that may
    not change at all, the only remedy is to leave it out."""
    known = meaning(old)
    fixed = [key for key in typed if key in known and key not in FITTING and not _is_free(key, old)]
    return [_left_out(e, fixed) for e in (error.errors if isinstance(error, Errors) else (error,))]


def _left_out(error: LmlabError, fixed: Sequence[str]) -> LmlabError:
    named = [key for key in fixed if f"`{key}`" in error.message or f"`{key}=" in error.message]
    return ConfigError(error.message, f"leave {' and '.join(named)} out; {MAY}") if named else error


def check_start(old: Arch, new: Arch, resize: str, run: str) -> list[LmlabError]:
    """Everything in `new` that the weights of `run`, whose architecture is `old`, can't serve."""
    before, after = meaning(old), meaning(new)
    found: list[LmlabError] = []
    following: list[LmlabError] = []
    refused = set()
    for part in (key for key in after if "." not in key and not _is_free(key, new)):
        if before.get(part) != after[part] and not (part == "ffn" and _other_activation(old, new)):
            found.append(_of_part(part, old, new, run))
            refused.add(part)
    for key in (key for key in after if key in before and "." in key and not _is_free(key, new)):
        if key.partition(".")[0] not in refused and not same(before[key], after[key]):
            told = following if _follows(key, old, new) else found
            told += _of_field(key, before[key], after[key], old, new, run)
    found += [*_pairing(old, new, run), *_table(old, new, resize, run)]
    return found or following


def _follows(key: str, old: Arch, new: Arch) -> bool:
    """Whether a value was set alike, and is another by what differs elsewhere: the width of an ffn with d_model."""
    group, _, field = key.partition(".")
    mine, theirs = getattr(new, group), getattr(old, group)
    return type(mine) is type(theirs) and getattr(mine, field, None) == getattr(theirs, field, None)


def _is_free(key: str, new: Arch) -> bool:
    """A field of a part of one's own is never free: what it does is not known."""
    free = {"rope_scaling": True, "attn": True, "pos": isinstance(new.pos, Rope), "ffn": new.ffn.build == FFN}
    free["moe"] = isinstance(new.moe, RoutedSpec) and new.moe.build.startswith("lmlab.model.moe:")
    return any(key == name or key.startswith(f"{name}.") for name in FREE if free[name.partition(".")[0]])


def _other_activation(old: Arch, new: Arch) -> bool:
    """Whether two ffns have the same weights around another activation."""
    return old.ffn.build == new.ffn.build == FFN and _gated(old.ffn) == _gated(new.ffn)


def _gated(ffn: Spec) -> bool:
    return isinstance(ffn, FfnSpec) and ffn.gated()


def _of_part(key: str, old: Arch, new: Arch, run: str) -> LmlabError:
    mine, theirs = getattr(new, key), getattr(old, key)
    if key == "ffn" and mine.build == theirs.build == FFN:
        has, other = ("a gate", "none") if _gated(mine) else ("no gate", "one")
        fit = [n for n, s in OPTIONS["ffn"].items() if s.build == FFN and _gated(s()) == _gated(theirs)]
        message = f"`ffn={mine.name}` has {has}, and `ffn={theirs.name}` of {run} has {other}: its weights don't fit"
        return ConfigError(message, f"use one of {listed(fit, 12)}")
    message = f"`{key}={mine.name}` has other weights than `{key}={theirs.name}` of {run}"
    return ConfigError(message, f"leave {key}= out; {MAY}")


def _of_field(key: str, theirs: Any, mine: Any, old: Arch, new: Arch, run: str) -> list[LmlabError]:
    """The error of one field whose value differs, when it is one."""
    if key == "pos.max_len":  # see `_table`
        return []
    if key == "attn.n_kv_heads" and {type(old.attn), type(new.attn)} <= {MHA, MQA, GQA}:
        return list(_kv_heads(theirs, mine, old, run))
    if key == "model.tie_embeddings" and theirs and not mine:  # the head begins as the embedding
        return []
    if key in BIASES and mine and not theirs:
        return []
    said = f"`{key}` is {show_value(mine)}, and that of {run} is {show_value(theirs)}"
    if key == "model.logit_scale" and new.model.logit_scale is None:
        return [ConfigError(f"{said}: null means another factor here", f"add model.logit_scale={show_value(theirs)}")]
    if key in BIASES or key == "model.tie_embeddings":
        return [ConfigError(f"{said}: weights would be lost", f"leave {key} out")]
    worked_out = key in ("ffn.d_ff", "attn.head_dim")
    remedy = f"add {key}={show_value(theirs)}, or leave out what changed it" if worked_out else f"leave {key} out"
    return [ConfigError(f"{said}: its weights were trained with that", f"{remedy}; {MAY}")]


def _kv_heads(theirs: int, mine: int, old: Arch, run: str) -> Iterator[LmlabError]:
    said = f"`attn.n_kv_heads` is {mine}, and that of {run} is {theirs}"
    fit = [k for k in range(1, theirs + 1) if theirs % k == 0]
    if isinstance(old.attn, HeadsSpec) and old.attn.weights != "softmax":
        yield ConfigError(f"{said}: shaped attention has no heads that could be pooled", "leave it as it was")
    elif mine not in fit:
        reason = "heads can be pooled, not made" if mine > theirs else f"{theirs} heads can't be pooled to {mine}"
        yield ConfigError(f"{said}: {reason}", f"use one of {listed(map(str, fit))}")


def _pairing(old: Arch, new: Arch, run: str) -> Iterator[LmlabError]:
    if isinstance(old.pos, Rope) and isinstance(new.pos, Rope) and old.pos.pairing != new.pos.pairing:
        message = f"`pos.pairing` is {new.pos.pairing}, and that of {run} is {old.pos.pairing}"
        yield ConfigError(f"{message}: other channels would turn together", "leave pos.pairing out")


def table_rows(arch: Arch) -> int | None:
    """Rows of a learned table of positions; None for other positions."""
    return (arch.pos.max_len or arch.model.seq_len) if isinstance(arch.pos, Learned) else None


def _table(old: Arch, new: Arch, resize: str, run: str) -> Iterator[LmlabError]:
    theirs, mine = table_rows(old), table_rows(new)
    if theirs is None or mine is None or theirs == mine:
        if resize != "none":
            why = "there is no learned table of another length"
            yield ConfigError(f"`init.resize` is {resize}, and {why}: it would do nothing", "leave init.resize out")
    elif resize == "none":
        message = f"`pos=learned` has {mine} rows, and that of {run} has {theirs}; `init.resize` is none"
        keep = f", or keep the table: pos.max_len={theirs}" if new.model.seq_len <= theirs else ""
        yield ConfigError(message, f"add init.resize=interpolate or init.resize=extend{keep}")


def draws(old: Arch, new: Arch, resize: str) -> bool:
    """Whether any weight is drawn: the new rows of a table that is extended."""
    theirs, mine = table_rows(old), table_rows(new)
    return resize == "extend" and theirs is not None and mine is not None and mine > theirs
