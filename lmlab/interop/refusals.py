"""What is wrong with a composition that a folder decides, told by the keys of its config.json: lmlab's own can't be set
at import."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmlab.config.fields import show
from lmlab.config.meaning import FREE, PARTS
from lmlab.errors import ConfigError, Errors, LmlabError

KEY = re.compile(r"`(\w+(?:\.\w+)?)[=`]")
# Our key → theirs, the first that the file has.
THEIRS: dict[str, tuple[str, ...]] = {
    "model.d_model": ("hidden_size", "n_embd", "n_embed"),
    "model.n_layers": ("num_hidden_layers", "n_layer"),
    "model.n_heads": ("num_attention_heads", "n_head"),
    "model.tie_embeddings": ("tie_word_embeddings",),
    "attn.n_kv_heads": ("num_key_value_heads",),
    "attn.head_dim": ("head_dim",),
    "attn.window": ("sliding_window",),
    "attn.pattern": ("layer_types", "max_window_layers"),
    "attn.kv_rank": ("kv_lora_rank",),
    "attn.q_rank": ("q_lora_rank",),
    "attn.rope_dim": ("qk_rope_head_dim",),
    "attn.nope_dim": ("qk_nope_head_dim",),
    "attn.v_dim": ("v_head_dim",),
    "norm.eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "ffn.d_ff": ("intermediate_size", "n_inner"),
    "pos.theta": ("rope_theta", "rotary_emb_base"),
    "pos.fraction": ("partial_rotary_factor", "rotary_pct"),
    "pos.max_len": ("n_positions", "max_position_embeddings"),
    "rope_scaling": ("rope_type", "type"),
    "rope_scaling.original_len": ("original_max_position_embeddings", "max_position_embeddings"),
}
NESTED = ("rope_parameters", "rope_scaling")


def by_the_folder(error: LmlabError, raw: Mapping[str, Any], typed: Sequence[str]) -> list[LmlabError]:
    """The errors of a composition, each with a hint that can be followed: what the folder decides is mended in its
    config.json or not at all, what was typed beside it is left out. raw: config.json; typed: the keys given."""
    return [_told(e, raw, typed) for e in (error.errors if isinstance(error, Errors) else (error,))]


def _told(error: LmlabError, raw: Mapping[str, Any], typed: Sequence[str]) -> LmlabError:
    keys = [key for key in dict.fromkeys(KEY.findall(error.message)) if _decided(key)]
    if not keys:
        return error
    if own := [key for key in typed if _decided(key)]:
        return ConfigError(error.message, f"leave {' and '.join(own)} out: the folder says what the model is")
    said = dict.fromkeys(text for key in keys for text in _said(key, raw))
    whose = f"its config.json says {' and '.join(said)}; " if said else ""
    return ConfigError(error.message, f"{whose}lmlab can't be told otherwise, so this model can't be imported as it is")


def _decided(key: str) -> bool:
    return key.partition(".")[0] in PARTS and key not in (*FREE, "pos.pairing")


def _said(key: str, raw: Mapping[str, Any]) -> Iterator[str]:
    """`partial_rotary_factor` 0.25, with the object it stands in; nothing of what the file leaves to its default."""
    names = THEIRS.get(key, (key.partition(".")[2],))
    for name, where in itertools.product(names, ("", *NESTED)):
        found = raw.get(where) if where else raw
        if isinstance(found, Mapping) and not isinstance(found.get(name), (Mapping, type(None))):
            yield f"`{where + '.' if where else ''}{name}` {show(found[name])}"
            return
