"""What parts of an architecture do not go together: the finders behind compat.py's rows on the model. Torch-free.

Each takes an experiment and returns (message, hint), or None when it finds nothing wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab.model.spec import (
    MLA,
    NTK,
    T5,
    DeepNorm,
    DynamicNTK,
    FfnSpec,
    HeadsSpec,
    Learned,
    Llama3,
    NoNorm,
    NoPosition,
    NoScaling,
    Parallel,
    PostNorm,
    Reordered,
    Rope,
    Sandwich,
    Sinusoidal,
    YaRN,
)

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment

Wrong = tuple[str, str]  # message, hint


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---------------------------------------------------------------- sizes


def _heads_sized(e: Experiment) -> bool:
    """Whether every head size is given, so that the width need not be cut into equal heads."""
    if isinstance(e.attn, MLA):
        return None not in (e.attn.nope_dim, e.attn.v_dim, e.attn.rope_dim)
    return getattr(e.attn, "head_dim", None) is not None


def heads_split_width(e: Experiment) -> Wrong | None:
    m = e.model
    if _heads_sized(e) or m.d_model % m.n_heads == 0:
        return None
    fit = sorted(sorted(_divisors(m.d_model), key=lambda d: abs(d - m.n_heads))[:2])
    size = max(2, 2 * (m.d_model // m.n_heads // 2))
    message = f"`model.d_model` is {m.d_model}, which `model.n_heads` {m.n_heads} does not divide"
    keys = ("nope_dim", "rope_dim", "v_dim") if isinstance(e.attn, MLA) else ("head_dim",)
    given = " ".join(f"attn.{key}={size}" for key in keys)
    return message, f"use model.n_heads={' or '.join(map(str, fit))}, or give the head size: {given}"


def kv_heads_split_heads(e: Experiment) -> Wrong | None:
    heads, kv = e.model.n_heads, e.arch.attn.kv_heads(e.model.n_heads)
    if heads % kv == 0:
        return None
    given = getattr(e.attn, "n_kv_heads", kv)
    value = f"{kv}" if given is not None else f"null, n_heads / 2 = {kv}"
    message = f"`attn.n_kv_heads` is {value}, which does not divide `model.n_heads` {heads}"
    return message, f"use one of {', '.join(map(str, _divisors(heads)))}"


def rotary_width(e: Experiment) -> Wrong | None:
    width = getattr(e.pos, "width", None)
    if not callable(width) or not hasattr(e.pos, "fraction"):
        return None
    size = e.arch.attn.rotary_size(e.model.d_model, e.model.n_heads)
    d = width(size)
    if d == 2 and isinstance(e.pos, Rope) and e.pos.theta != Rope().theta:
        message = f"`pos.theta` is {e.pos.theta:g}, and a single pair turns, by one radian a token whatever it is"
        return message, "leave pos.theta out, or use a larger head size or pos.fraction"
    if (d >= 2 and d % 2 == 0) or heads_split_width(e):
        return None
    what = "`attn.rope_dim`" if isinstance(e.attn, MLA) else "the head size"
    odd = f"the rotary width is {d} (`pos.fraction` {e.pos.fraction:g} of {what} {size})"
    fits = list(range(2, size + 1, 2))
    if not fits:
        return f"{odd}, and channels turn in pairs", "use a head size of at least 2, or pos=alibi"
    near = min(fits, key=lambda k: abs(k - d))
    cure = f"use pos.fraction={near / size:.6g} for {near} channels" if near / size <= 1 else ""
    key = "attn.rope_dim" if isinstance(e.attn, MLA) else "attn.head_dim"
    other = "" if size % 2 == 0 else f", or an even size ({key})"
    return f"{odd}, and channels turn in pairs", cure + other


def sinusoidal_width(e: Experiment) -> Wrong | None:
    if not isinstance(e.pos, Sinusoidal) or e.model.d_model % 2 == 0:
        return None
    message = f"`pos=sinusoidal` needs an even width (a sine and a cosine a pair), `model.d_model` is {e.model.d_model}"
    return message, f"use model.d_model={e.model.d_model + 1}"


def learned_table(e: Experiment) -> Wrong | None:
    rows, length = getattr(e.pos, "max_len", None), e.model.seq_len
    if not isinstance(e.pos, Learned) or rows is None or rows >= length:
        return None
    return (
        f"`pos.max_len` is {rows}, shorter than `model.seq_len` {length}",
        f"use pos.max_len={length} or more, or null",
    )


def t5_buckets(e: Experiment) -> Wrong | None:
    if not isinstance(e.pos, T5):
        return None
    exact = e.pos.n_buckets // 2
    if e.pos.max_distance > exact:
        return _distances_reached(e, e.pos, exact)
    message = f"`pos.max_distance` is {e.pos.max_distance}, but half of `pos.n_buckets` {e.pos.n_buckets} stand for one"
    return f"{message} distance each: the others would be empty", f"use pos.max_distance={4 * exact}, or fewer buckets"


def _distances_reached(e: Experiment, pos: T5, exact: int) -> Wrong | None:
    """A max_distance of the user's own where no key is farther than the buckets that stand for one distance each."""
    windows = [e.arch.attn.layer_window(layer) for layer in range(e.model.n_layers)]
    far = max(e.model.seq_len if w is None else min(w, e.model.seq_len) for w in windows) - 1
    if far > exact or pos.max_distance == T5().max_distance:
        return None
    message = f"`pos.max_distance` is {pos.max_distance}, and no key is farther than {far}, where half of"
    hint = f"use pos.n_buckets={max(2, far)} or fewer, or leave pos.max_distance at {T5().max_distance}"
    return f"{message} `pos.n_buckets` {pos.n_buckets} stand for one distance each: it would do nothing", hint


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


# ---------------------------------------------------------------- norms


def norm_none(e: Experiment) -> Wrong | None:
    if not isinstance(e.norm, NoNorm):
        return None
    where = f"`block={e.block.name}`" if type(e.block) in (PostNorm, Sandwich, Reordered) else None
    where = "`block.n_norms` 2" if isinstance(e.block, Parallel) and e.block.n_norms == 2 else where
    where = "`model.embed_norm` true" if e.model.embed_norm else where
    if isinstance(e.block, DeepNorm):
        message = (
            "`block=deepnorm` multiplies the residual by alpha at every layer, and `norm=none` never brings it back"
        )
        return message, "use another norm, or block=prenorm"
    if where is None:
        return None
    message = f"{where} says where a norm stands, and `norm=none` is no norm: it would do nothing"
    return message, "use another norm, or block=prenorm without model.embed_norm"


# ---------------------------------------------------------------- positions


def scaling_needs_rope(e: Experiment) -> Wrong | None:
    built_in = type(e.pos).__module__.startswith("lmlab.")
    if isinstance(e.rope_scaling, NoScaling) or isinstance(e.pos, Rope) or not built_in:
        return None
    message = f"`rope_scaling={e.rope_scaling.name}` scales rotations, and `pos={e.pos.name}` has none"
    return message, "use pos=rope, or rope_scaling=none"


def scaling_of_one_pair(e: Experiment) -> Wrong | None:
    if not isinstance(e.rope_scaling, (NTK, DynamicNTK)) or not isinstance(e.pos, Rope) or heads_split_width(e):
        return None
    if e.pos.width(e.arch.attn.rotary_size(e.model.d_model, e.model.n_heads)) != 2:
        return None
    message = f"`rope_scaling={e.rope_scaling.name}` keeps the fastest pair, and a rotary width of 2 has no other"
    return f"{message}: it would do nothing", "use rope_scaling=pi, or a larger head size or pos.fraction"


def scaling_bounds(e: Experiment) -> Wrong | None:
    s = e.rope_scaling
    if isinstance(s, YaRN) and s.beta_fast <= s.beta_slow:
        low, high, lo, hi = s.beta_slow, s.beta_fast, "beta_slow", "beta_fast"
    elif isinstance(s, Llama3) and s.high_freq_factor <= s.low_freq_factor:
        low, high, lo, hi = s.low_freq_factor, s.high_freq_factor, "low_freq_factor", "high_freq_factor"
    else:
        return None
    message = f"`rope_scaling.{hi}` is {high:g}, not above `rope_scaling.{lo}` {low:g}"
    return message, f"use rope_scaling.{hi}={4 * low:g}, or a smaller {lo}"


def nope_layers(e: Experiment) -> Wrong | None:
    n = getattr(e.attn, "nope_every_n_layers", None)
    if n is None:
        return None
    message = f"`attn.nope_every_n_layers` is {n}"
    if isinstance(e.pos, (NoPosition, Sinusoidal, Learned)):
        return (
            f"{message}, but `pos={e.pos.name}` gives the layers nothing that they could go without",
            "use pos=rope, alibi or t5, or null",
        )
    if n == 1:
        return f"{message}: no layer would have positions, and `pos={e.pos.name}` would do nothing", "use pos=none"
    if n > e.model.n_layers:
        return (
            f"{message}, and `model.n_layers` is {e.model.n_layers}: no layer would go without positions",
            f"use a number up to {e.model.n_layers}, or null",
        )
    return None


# ---------------------------------------------------------------- attention


def window(e: Experiment) -> Wrong | None:
    size, length = e.arch.attn.window, e.model.seq_len
    if size == 1:
        message = "`attn.window` is 1: a token would see itself alone, and q, k and positions would do nothing"
        return message, f"use attn.window=2 or another number below {length}, or null"
    if size is None or size < length:
        return None
    message = f"`attn.window` is {size}, and `model.seq_len` is {length}: no token would be left out"
    return message, f"use attn.window={max(2, length // 2)} or another number below {length}, or null"


def pattern(e: Experiment) -> Wrong | None:
    letters, layers = getattr(e.attn, "pattern", None), e.model.n_layers
    if letters is None:
        return None
    if set(letters) - set("SL"):
        return f"`attn.pattern` is {letters}, and its letters are S (window) and L (full)", "write it like SSSL"
    if e.arch.attn.window is None:
        hint = f"give it one: attn.window={max(1, e.model.seq_len // 4)}"
        return f"`attn.pattern` {letters} says which layers have a window, and `attn.window` is null", hint
    if "S" not in letters:
        return f"`attn.pattern` {letters} has no S: `attn.window` would do nothing", "use attn.window=null, or an S"
    if "L" not in letters:
        return (
            f"`attn.pattern` {letters} has no L: null says the same, a window in every layer",
            "use attn.pattern=null",
        )
    if len(letters) > layers:
        message = f"`attn.pattern` {letters} has {len(letters)} letters, and `model.n_layers` is {layers}"
        return f"{message}: the last ones would do nothing", f"use at most {layers} letters, like {letters[-layers:]}"
    return None


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


def left_out(e: Experiment) -> Wrong | None:
    a, m = e.attn, e.model
    if not isinstance(a, HeadsSpec) or (a.v_proj, a.o_proj) == ("linear", "linear"):
        return None
    which = " and ".join(f"`attn.{n}` none" for n in ("v_proj", "o_proj") if getattr(a, n) == "none")
    if a.weights != "shaped":
        return f"{which} needs shaped attention, `attn.weights` is {a.weights}", "add attn.weights=shaped"
    if a.o_proj == "none" and a.bias_o:
        return (
            "`attn.bias_o` true is the bias of a projection that `attn.o_proj` none leaves out",
            "use attn.bias_o=false",
        )
    width = m.n_heads * a.head_size(m.d_model, m.n_heads)
    if width != m.d_model and not heads_split_width(e):
        message = f"{which} needs heads that fill the width: {width} channels of heads, `model.d_model` {m.d_model}"
        return message, "use attn.head_dim=null"
    if a.v_proj == "none" and a.kv_heads(m.n_heads) != m.n_heads:
        message = f"`attn.v_proj` none gives every head a value of its own, `attn={a.name}` has {a.kv_heads(m.n_heads)}"
        return f"{message} for {m.n_heads} heads", "use attn=mha"
    return None


def remarks(e: Experiment) -> list[str]:
    """What is allowed and yet should be known before training."""
    s, length = e.rope_scaling, e.model.seq_len
    if getattr(s, "factor", None) == 1:
        return [f"rope_scaling={s.name} with a factor of 1 changes nothing"]
    if isinstance(s, DynamicNTK) and s.original(length) >= length:
        return [
            f"rope_scaling=dynamic_ntk changes nothing in rows up to {s.original(length)} tokens, only in longer ones"
        ]
    return []
