"""What heads, positions and their scalings do not go together with: finders behind compat.py's rows on the model.
Torch-free.

Each takes an experiment and returns (message, hint), or None when it finds nothing wrong. A hint names a value only
where that value composes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from lmlab.model.spec import (
    MLA,
    NTK,
    T5,
    DynamicNTK,
    HeadsSpec,
    Learned,
    Llama3,
    NoPosition,
    NoScaling,
    Rope,
    ScalingSpec,
    Sinusoidal,
    YaRN,
)
from lmlab.registry import Spec, builder

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment

Wrong = tuple[str, str]  # message, hint


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def with_fields(e: Experiment, group: str, **values: Any) -> Experiment:
    """The experiment with fields of one group set."""
    part: dict[str, Any] = {group: dataclasses.replace(getattr(e, group), **values)}
    return dataclasses.replace(e, **part)


def sizes_fit(e: Experiment) -> bool:
    """Whether none of the rows on sizes refuses it."""
    rows = (heads_split_width, kv_heads_split_heads, rotary_width, sinusoidal_width, scaling_acts)
    return not any(row(e) for row in rows)


# ---------------------------------------------------------------- heads


def _sizes_of_heads(e: Experiment) -> tuple[str, ...]:
    """The fields that give every head size, so that the width need not be cut into equal heads."""
    return ("nope_dim", "rope_dim", "v_dim") if isinstance(e.attn, MLA) else ("head_dim",)


def _unsized(e: Experiment) -> bool:
    """Whether the width is to be cut into equal heads, and can't be."""
    return e.model.d_model % e.model.n_heads != 0 and None in [getattr(e.attn, k, None) for k in _sizes_of_heads(e)]


def heads_split_width(e: Experiment) -> Wrong | None:
    m, keys = e.model, _sizes_of_heads(e)
    if not _unsized(e):
        return None
    near = sorted(_divisors(m.d_model), key=lambda d: abs(d - m.n_heads))
    fit = sorted([n for n in near if sizes_fit(with_fields(e, "model", n_heads=n))][:2])
    cures = [f"use model.n_heads={' or '.join(map(str, fit))}"] if fit else []
    filled = isinstance(e.attn, HeadsSpec) and "none" in (e.attn.v_proj, e.attn.o_proj)  # its heads fill the width
    size = max(2, 2 * (m.d_model // m.n_heads // 2))
    sizes = dict.fromkeys(keys, size)
    free = not filled and all(hasattr(e.attn, key) for key in keys)
    if free and sizes_fit(with_fields(e, "attn", **sizes)):
        cures.append("give the head size: " + " ".join(f"attn.{key}={size}" for key in keys))
    width = m.n_heads * size
    if not cures and sizes_fit(with_fields(e, "model", d_model=width)):
        cures = [f"use model.d_model={width}"]
    message = f"`model.d_model` is {m.d_model}, which `model.n_heads` {m.n_heads} does not divide"
    return message, ", or ".join(cures) or "use a multiple of model.n_heads"


def kv_heads_split_heads(e: Experiment) -> Wrong | None:
    heads, kv = e.model.n_heads, e.arch.attn.kv_heads(e.model.n_heads)
    given, share = getattr(e.attn, "n_kv_heads", kv), getattr(e.attn, "queries_per_kv", None)
    if given is None and share is not None and heads % share:
        message = f"`attn.queries_per_kv` is {share}, which does not divide `model.n_heads` {heads}"
        return message, f"use one of {', '.join(map(str, _divisors(heads)))}"
    if heads % kv == 0:
        return None
    value = f"{kv}" if given is not None else f"null, n_heads / 2 = {kv}"
    message = f"`attn.n_kv_heads` is {value}, which does not divide `model.n_heads` {heads}"
    return message, f"use one of {', '.join(map(str, _divisors(heads)))}"


# ---------------------------------------------------------------- rotations


def _turning(e: Experiment) -> tuple[int, int] | None:
    """(the rotary width, the channels it is a share of); None where positions turn nothing."""
    width = getattr(e.pos, "width", None)
    if not callable(width) or not hasattr(e.pos, "fraction"):
        return None
    size = e.arch.attn.rotary_size(e.model.d_model, e.model.n_heads)
    return width(size), size


def rotary_width(e: Experiment) -> Wrong | None:
    found = _turning(e)
    if found is None or _unsized(e):
        return None
    d, size = found
    own_theta = e.pos.theta if isinstance(e.pos, Rope) and e.pos.theta != Rope().theta else None
    if d == 2 and own_theta is not None:
        message = f"`pos.theta` is {own_theta:g}, and a single pair turns, by one radian a token whatever it is"
        return message, "leave pos.theta out, or use a larger head size or pos.fraction"
    if d >= 2 and d % 2 == 0:
        return None
    what = "`attn.rope_dim`" if isinstance(e.attn, MLA) else "the head size"
    share = getattr(e.pos, "fraction", 1.0)
    message = f"the rotary width is {d} (`pos.fraction` {share:g} of {what} {size}), and channels turn in pairs"
    least = 2 if own_theta is None else 4
    fits = sorted(range(least, size + 1, 2), key=lambda k: abs(k - d))
    near = next((k for k in fits if not scaling_acts(with_fields(e, "pos", fraction=k / size))), None)
    if near is None:
        return message, "use a larger head size" + (", or pos=alibi" if isinstance(e.rope_scaling, NoScaling) else "")
    key = "attn.rope_dim" if isinstance(e.attn, MLA) else "attn.head_dim"
    other = "" if size % 2 == 0 else f", or an even size ({key})"
    return message, f"use pos.fraction={near / size:.6g} for {near} channels{other}"


def _brings(part: Spec, method: str) -> bool:
    """Whether the class of a position of one's own has a method of its own, where lmlab's base does nothing."""
    try:
        lineage = builder(part).__mro__
    except (ImportError, AttributeError):  # told when it is built
        return True
    owner = next((cls for cls in lineage if method in vars(cls)), None)
    return owner is not None and (owner.__module__, owner.__qualname__) != ("lmlab.model.pos", "Position")


def _built_in(part: Spec) -> bool:
    return type(part).__module__.startswith("lmlab.")


def _turns(pos: Spec) -> bool:
    """Whether there are rotations that a scaling could change."""
    return isinstance(pos, Rope) if _built_in(pos) else _brings(pos, "scale_by")


def _serves_layers(pos: Spec) -> bool:
    """Whether the attention layers get anything from the positions, against the embeddings alone."""
    return not isinstance(pos, (NoPosition, Sinusoidal, Learned)) if _built_in(pos) else _brings(pos, "tables")


def scaling_needs_rope(e: Experiment) -> Wrong | None:
    if isinstance(e.rope_scaling, NoScaling) or _turns(e.pos):
        return None
    message = f"`rope_scaling={e.rope_scaling.name}` scales rotations, and `pos={e.pos.name}` has none"
    turned = "pos=rope, or " if _rope_fits(e) else ""
    return message, f"use {turned}rope_scaling=none"


def _rope_fits(e: Experiment) -> bool:
    """Whether pos=rope composes in place of what is there, whose theta stays."""
    part: dict[str, Any] = {"pos": Rope()}
    turned = with_fields(dataclasses.replace(e, **part), "pos", theta=getattr(e.pos, "theta", Rope().theta))
    return sizes_fit(turned) and not yarn_slow(turned) and not yarn_factor(turned)


def scaling_acts(e: Experiment) -> Wrong | None:
    """The slowest pair is the one that every scaling slows first: when it is kept, all are."""
    found, s = _turning(e), e.rope_scaling
    if found is None or not isinstance(s, ScalingSpec) or s.factor == 1 or not isinstance(e.pos, Rope) or _unsized(e):
        return None
    d = found[0]
    if d < 2 or d % 2 or _slowed(s, e.pos.theta, d, e.model.seq_len) > 0:
        return None
    message = f"`rope_scaling={s.name}` keeps the frequency of the slowest pair of rotary width {d}, and so of all"
    larger = "a larger head size or pos.fraction" if d == 2 else "a larger pos.theta or a smaller original_len"
    return f"{message}: no rotation would change", f"use rope_scaling=pi, or {larger}"


def _slowed(s: ScalingSpec, theta: float, d: int, seq_len: int) -> float:
    """Above 0 where the slowest pair is slowed at all; by dynamic NTK in long rows."""
    if isinstance(s, (NTK, DynamicNTK)):
        return float(d > 2)
    if isinstance(s, Llama3):
        rotations = s.original(seq_len) * theta ** (-(d - 2) / d) / (2 * math.pi)
        return s.high_freq_factor - rotations
    if isinstance(s, YaRN):
        return d // 2 - 1 - s.bounds(theta, d, seq_len)[0]
    return 1.0


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


def yarn_slow(e: Experiment) -> Wrong | None:
    """With no pair that makes beta_slow rotations the ramp ends where it begins, or before."""
    s = e.rope_scaling
    if not isinstance(s, YaRN) or s.factor == 1 or not isinstance(e.pos, Rope):
        return None
    L = s.original(e.model.seq_len)
    if 2 * math.pi * s.beta_slow < L:
        return None
    key = "model.seq_len" if s.original_len is None else "rope_scaling.original_len"
    message = f"`{key}` is {L}, and in as many tokens the fastest pair makes {L / (2 * math.pi):.3g} rotations, not the"
    less, more = L / (4 * math.pi), math.floor(4 * math.pi * s.beta_slow) + 1
    hint = f"use rope_scaling.beta_slow={less:.2g}"
    if not scaling_acts(with_fields(e, "rope_scaling", original_len=more)):
        hint += f", or rope_scaling.original_len={more}"
    return f"{message} `rope_scaling.beta_slow` {s.beta_slow:g} below which pairs are divided by the factor", hint


def yarn_factor(e: Experiment) -> Wrong | None:
    s = e.rope_scaling
    if not isinstance(s, YaRN) or s.factor != 1 or s.attention_factor is None:
        return None
    message = f"`rope_scaling.attention_factor` is {s.attention_factor:g}, and `rope_scaling.factor` 1 scales nothing"
    return f"{message}: it would do nothing", "use rope_scaling.attention_factor=null, or a factor above 1"


# ---------------------------------------------------------------- other positions


def sinusoidal_width(e: Experiment) -> Wrong | None:
    m = e.model
    if not isinstance(e.pos, Sinusoidal) or m.d_model % 2 == 0:
        return None
    message = f"`pos=sinusoidal` needs an even width (a sine and a cosine a pair), `model.d_model` is {m.d_model}"
    step = math.lcm(2, m.n_heads) if m.d_model % m.n_heads == 0 else 2
    return message, f"use model.d_model={step * math.ceil(m.d_model / step)}"


def learned_table(e: Experiment) -> Wrong | None:
    rows, length = getattr(e.pos, "max_len", None), e.model.seq_len
    if not isinstance(e.pos, Learned) or rows is None or rows >= length:
        return None
    return (
        f"`pos.max_len` is {rows}, shorter than `model.seq_len` {length}",
        f"use pos.max_len={length} or more, or null",
    )


def farthest(e: Experiment) -> int:
    """The distance of the farthest key in training."""
    windows = [e.arch.attn.layer_window(layer) for layer in range(e.model.n_layers)]
    return max(e.model.seq_len if w is None else min(w, e.model.seq_len) for w in windows) - 1


def t5_buckets(e: Experiment) -> Wrong | None:
    """Half of the buckets stand for one distance each. Beyond them must be distances, and of a max_distance of the
    user's own also keys."""
    if not isinstance(e.pos, T5):
        return None
    n, most, default, far = e.pos.n_buckets, e.pos.max_distance, T5().max_distance, farthest(e)
    exact = n // 2
    if most <= exact:
        message = f"`pos.max_distance` is {most}, but half of `pos.n_buckets` {n} stand for one distance each"
        message, kept = f"{message}: the others would be empty", 4 * exact if far > exact else default
    elif far > exact or most == default:
        return None
    else:
        message = f"`pos.max_distance` is {most}, and no key is farther than {far}, where half of `pos.n_buckets` {n}"
        message, kept = f"{message} stand for one distance each: it would do nothing", default
    few = min(n, most, far)
    cures = [f"use pos.n_buckets={few} or fewer"] if few >= 2 else []
    if kept > exact:
        cures.append(f"use pos.max_distance={kept}")
    return message, ", or ".join(cures) or f"use pos.n_buckets=32 pos.max_distance={default}"


def nope_layers(e: Experiment) -> Wrong | None:
    n, layers = getattr(e.attn, "nope_every_n_layers", None), e.model.n_layers
    if n is None:
        return None
    message, null = f"`attn.nope_every_n_layers` is {n}", "attn.nope_every_n_layers=null"
    if not _serves_layers(e.pos):
        rope = "pos=rope, pos=alibi" if _rope_fits(e) else "pos=alibi"
        cures = f"use {rope} or pos=t5, or {null}" if 2 <= n <= layers else f"use {null}"
        return f"{message}, but `pos={e.pos.name}` gives the layers nothing that they could go without", cures
    if n == 1:
        scaled = "" if isinstance(e.rope_scaling, NoScaling) else " rope_scaling=none"
        none = f"use pos=none {null}{scaled}"
        return f"{message}: no layer would have positions, and `pos={e.pos.name}` would do nothing", none
    if n > layers:
        some = f"use a number up to {layers}, or {null}" if layers > 1 else f"use {null}"
        return f"{message}, and `model.n_layers` is {layers}: no layer would go without positions", some
    return None
