"""What norms, the ffn and attention do not go together with: finders behind compat.py's rows on the model. Torch-free.

Each takes an experiment and returns (message, hint), or None when it finds nothing wrong. `remarks` says what is
allowed and yet should be known before training. Positions and sizes are in pos.py beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab.compat.pos import Wrong, farthest, heads_split_width, sizes_fit, with_fields
from lmlab.model.spec import (
    GQA,
    T5,
    BatchNorm,
    DeepNorm,
    DynamicNTK,
    FfnSpec,
    HeadsSpec,
    LayerNorm,
    NoNorm,
    Parallel,
    PostNorm,
    Reordered,
    RMSNorm,
    Sandwich,
)

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment


def ffn_width(e: Experiment) -> Wrong | None:
    if not isinstance(e.ffn, FfnSpec) or e.ffn.d_ff is None:
        return None
    dead = [n for n in ("mult", "multiple_of") if getattr(e.ffn, n) is not None]
    if not dead:
        return None
    also = " and ".join(f"`ffn.{n}` {getattr(e.ffn, n):g}" for n in dead)
    message = f"`ffn.d_ff` {e.ffn.d_ff} is the width as it stands, so that {also} would do nothing"
    return message, "set " + " ".join(f"ffn.{n}=null" for n in dead) + ", or ffn.d_ff=null"


def head_bias(e: Experiment) -> Wrong | None:
    if not (e.model.head_bias and e.model.tie_embeddings):
        return None
    message = "`model.head_bias` is true and so is `model.tie_embeddings`: a tied head is the embedding, without a bias"
    return message, "add model.tie_embeddings=false"


# ---------------------------------------------------------------- norms and embeddings


def norm_none(e: Experiment) -> Wrong | None:
    if not isinstance(e.norm, NoNorm):
        return None
    where, cures = [], []
    if type(e.block) in (PostNorm, Sandwich, Reordered, DeepNorm):
        where, cures = [f"`block={e.block.name}`"], ["block=prenorm"]
    if isinstance(e.block, Parallel) and e.block.n_norms == 2:
        where, cures = ["`block.n_norms` 2"], ["block.n_norms=1"]
    if e.model.embed_norm:
        where, cures = [*where, "`model.embed_norm` true"], [*cures, "model.embed_norm=false"]
    if not where:
        return None
    hint = f"use another norm, or {' '.join(cures)}"
    if isinstance(e.block, DeepNorm):
        return f"{where[0]} multiplies the residual by alpha at every layer, and `norm=none` never brings it back", hint
    says = "says where a norm stands" if len(where) == 1 else "say where a norm stands"
    return f"{' and '.join(where)} {says}, and `norm=none` is no norm: it would do nothing", hint


def embed_scale(e: Experiment) -> Wrong | None:
    m = e.model
    if m.embed_scale == "none" or not m.embed_norm or not isinstance(e.norm, (LayerNorm, RMSNorm, BatchNorm)):
        return None
    message = f"`model.embed_scale` is {m.embed_scale}, and `norm={e.norm.name}` of `model.embed_norm` true undoes it"
    return message, "use model.embed_scale=none, or model.embed_norm=false"


# ---------------------------------------------------------------- attention


def window(e: Experiment) -> Wrong | None:
    size, length = e.arch.attn.window, e.model.seq_len
    if size is None or 1 < size < length:
        return None
    none = f"attn.window=null{' attn.pattern=null' if getattr(e.attn, 'pattern', None) else ''}"
    fits = _shorter(e, length // 2 if size > 1 else 2)
    some = f"use attn.window={fits} or another number below {length}, or {none}"
    hint = some if length > 2 else f"use {none}: rows of {length} tokens have no shorter window"
    if size == 1:
        return "`attn.window` is 1: a token would see itself alone, and q, k and positions would do nothing", hint
    return f"`attn.window` is {size}, and `model.seq_len` is {length}: no token would be left out", hint


def _shorter(e: Experiment, size: int) -> int:
    """A window near the size that leaves a max_distance of T5's its meaning."""
    if isinstance(e.pos, T5) and e.pos.max_distance != T5().max_distance:
        size = max(size, e.pos.n_buckets // 2 + 2)
    return max(2, min(size, e.model.seq_len - 1))


def pattern(e: Experiment) -> Wrong | None:
    letters, layers, length = getattr(e.attn, "pattern", None), e.model.n_layers, e.model.seq_len
    if letters is None:
        return None
    if set(letters) - set("SL"):
        return f"`attn.pattern` is {letters}, and its letters are S (window) and L (full)", "write it like SSSL"
    size = "" if e.arch.attn.window is not None else f" attn.window={_shorter(e, length // 4)}"
    unset = f"`attn.pattern` {letters} says which layers have a window, and `attn.window` is null"
    if size and length <= 2:
        return unset, "use attn.pattern=null"
    if len(letters) > layers:
        message = f"`attn.pattern` {letters} has {len(letters)} letters, and `model.n_layers` is {layers}"
        hint = f"use at most {layers} letters; {_same(letters[:layers], size)}"
        return f"{message}: the last ones would do nothing", hint
    if "S" not in letters:
        return (
            f"`attn.pattern` {letters} has no S: `attn.window` would do nothing",
            f"add an S, or {_same(letters, size)}",
        )
    if "L" not in letters:
        message = f"`attn.pattern` {letters} has no L: null says the same, a window in every layer"
        return message, _same(letters, size)
    return (unset, f"give it one:{size}, or use attn.pattern=null") if size else None


def _same(letters: str, size: str) -> str:
    """What to set for layers of these letters; size: the window to give them, where they have none."""
    if set(letters) == {"S"}:
        return f"use attn.pattern=null{size} for a window in every layer"
    if set(letters) == {"L"}:
        return "use attn.window=null attn.pattern=null for none"
    return f"use attn.pattern={letters}{size}, which are those that act"


def backend(e: Experiment) -> Wrong | None:
    a = e.arch.attn
    if a.backend == "sdpa" and a.softcap is not None:
        return f"`attn.softcap` is {a.softcap:g}, which `attn.backend` sdpa can't do", "use attn.backend=auto"
    if a.backend in ("tiled", "flex") and a.dropout > 0:
        message = f"`attn.dropout` is {a.dropout:g}, which `attn.backend` {a.backend} can't do"
        return message, "use attn.backend=auto, or model.dropout instead"
    if a.backend == "flex" and e.device == "cpu":
        return "`attn.backend` is flex, which has no backward on the CPU", "use attn.backend=tiled, dense or auto"
    return None


def kv_heads_once(e: Experiment) -> Wrong | None:
    a = e.attn
    if not isinstance(a, GQA) or a.n_kv_heads is None or a.queries_per_kv is None:
        return None
    message = f"`attn.n_kv_heads` is {a.n_kv_heads}, so that `attn.queries_per_kv` {a.queries_per_kv} would do nothing"
    fits = e.model.n_heads % a.queries_per_kv == 0
    return message, "use attn.queries_per_kv=null" + (", or attn.n_kv_heads=null" if fits else "")


def qk_norm_eps(e: Experiment) -> Wrong | None:
    a = e.attn
    if not isinstance(a, HeadsSpec) or a.qk_norm != "none" or a.qk_norm_eps == type(a)().qk_norm_eps:
        return None
    message = f"`attn.qk_norm_eps` is {a.qk_norm_eps:g}, and `attn.qk_norm` none has no norm that it would be added in"
    return message, "use attn.qk_norm=head or full, or leave attn.qk_norm_eps out"


def left_out(e: Experiment) -> Wrong | None:
    a = e.attn
    if not isinstance(a, HeadsSpec) or (a.v_proj, a.o_proj) == ("linear", "linear"):
        return None
    which = " and ".join(f"`attn.{n}` none" for n in ("v_proj", "o_proj") if getattr(a, n) == "none")
    put_back = " ".join(f"attn.{n}=linear" for n in ("v_proj", "o_proj") if getattr(a, n) == "none")
    found = [w for w in (_not_shaped(a, which), _bias_of_none(a), _width_of_heads(e, a, which), _values(e, a)) if w]
    if not found:
        return None
    cures = [cure for _, cure in found]
    if "" in cures:
        return found[0][0], f"use {put_back}"
    return found[0][0], f"{'add' if cures[0] == 'attn.weights=shaped' else 'use'} {' '.join(cures)}, or {put_back}"


def _not_shaped(a: HeadsSpec, which: str) -> Wrong | None:
    if a.weights == "shaped":
        return None
    return f"{which} needs shaped attention, `attn.weights` is {a.weights}", "attn.weights=shaped"


def _bias_of_none(a: HeadsSpec) -> Wrong | None:
    if a.o_proj == "linear" or not a.bias_o:
        return None
    return "`attn.bias_o` true is the bias of a projection that `attn.o_proj` none leaves out", "attn.bias_o=false"


def _width_of_heads(e: Experiment, a: HeadsSpec, which: str) -> Wrong | None:
    width, D = e.model.n_heads * a.head_size(e.model.d_model, e.model.n_heads), e.model.d_model
    if width == D or heads_split_width(e):
        return None
    message = f"{which} needs heads that fill the width: {width} channels of heads, `model.d_model` {D}"
    cut = D % e.model.n_heads == 0 and sizes_fit(with_fields(e, "attn", head_dim=None))
    return message, "attn.head_dim=null" if cut else ""


def _values(e: Experiment, a: HeadsSpec) -> Wrong | None:
    H, K = e.model.n_heads, a.kv_heads(e.model.n_heads)
    if a.v_proj == "linear" or H == K:
        return None
    message = f"`attn.v_proj` none gives every head a value of its own, `attn={a.name}` has {K}"
    return f"{message} for {H} heads", "attn=mha"


def remarks(e: Experiment) -> list[str]:
    """What is allowed and yet should be known before training."""
    s, length, found = e.rope_scaling, e.model.seq_len, []
    if getattr(s, "factor", None) == 1:
        found.append(f"rope_scaling={s.name} with a factor of 1 changes nothing")
    elif isinstance(s, DynamicNTK) and s.original(length) >= length:
        told = (
            f"rope_scaling=dynamic_ntk changes nothing in rows up to {s.original(length)} tokens, only in longer ones"
        )
        found.append(told)
    if isinstance(e.pos, T5) and e.pos.n_buckets // 2 > farthest(e):
        first, last = e.pos.n_buckets // 2, e.pos.n_buckets - 1
        found.append(
            f"no key of a training row is farther than {farthest(e)}: "
            f"buckets {first} to {last} of pos=t5 stay as they are"
        )
    if isinstance(e.attn, GQA) and e.attn.kv_heads(e.model.n_heads) == e.model.n_heads:
        found.append(f"attn=gqa with as many kv heads as heads ({e.model.n_heads}) is attn=mha")
    return found
