"""What a family of models is to lmlab, and the words that several families share.

A family translates in both directions: `words` turns its config.json into what would be typed on lmlab's command line,
`config` turns an architecture into its config.json; `table` names the tensors. Whether an architecture can be written
as a family is decided by doing both, never by a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.interop import rope
from lmlab.interop.keys import Keys, refused
from lmlab.interop.names import Row
from lmlab.model.spec import Arch, FfnSpec

Words = dict[str, Any]
PLAIN = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
PLAIN |= {"silu": "silu", "swish": "silu", "relu2": "relu2"}
GATED: dict[str, Words] = {
    "silu": {"ffn": "swiglu"},
    "swish": {"ffn": "swiglu"},
    "gelu": {"ffn": "geglu"},
    "gelu_pytorch_tanh": {"ffn": "geglu", "ffn.approximate": "tanh"},
    "gelu_new": {"ffn": "geglu", "ffn.approximate": "tanh"},
    "relu": {"ffn": "reglu"},
    "sigmoid": {"ffn": "glu"},
    "linear": {"ffn": "bilinear"},
}


@dataclass(frozen=True)
class Family:
    """model_type, transformers' class, what stands before every tensor's name but the head's, and the translations.

    config(arch, rows of the embedding, longest row) gives the keys that `words` asks for. pairing(config.json): how the
    rotated channels of the tensors pair up. skipped: patterns of tensors that are not weights. wide: ends of the names
    of those that stay fp32 in files of bfloat16.
    """

    model_type: str
    cls: str
    prefix: str
    words: Callable[[Keys], Words]
    config: Callable[[Arch, int, int], dict[str, Any]]
    table: Callable[[Arch], Sequence[Row]]
    harmless: frozenset[str] = frozenset()
    skipped: tuple[str, ...] = (r".*rotary_emb\.inv_freq$",)
    head: str = "lm_head"
    pairing: Callable[[Mapping[str, Any]], str] = lambda config: "half"
    wide: tuple[str, ...] = ()


def sizes(keys: Keys, layers: str = "num_hidden_layers", width: str = "hidden_size", heads: str = "") -> Words:
    found: Words = {"model.n_layers": keys.whole(layers), "model.d_model": keys.whole(width)}
    return found | {
        "model.n_heads": keys.whole(heads or "num_attention_heads"),
        "model.tie_embeddings": bool(keys["tie_word_embeddings"]),
    }


def heads(keys: Keys, *, own_size: bool = True) -> Words:
    """attn=mha, mqa or gqa, and the head size where it is not D / H."""
    H, D = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    K = keys.get("num_key_value_heads", H)
    found: Words = {"attn": "mha"} if K == H else {"attn": "mqa"} if K == 1 else {"attn": "gqa", "attn.n_kv_heads": K}
    C = keys.get("head_dim") if own_size else None
    return found | ({"attn.head_dim": C} if C is not None and C * H != D else {})


def head_dim(keys: Keys) -> int:
    if keys.get("head_dim") is not None:
        return keys.whole("head_dim")
    return keys.whole("hidden_size") // keys.whole("num_attention_heads")


def layer_windows(keys: Keys) -> Words:
    """`layer_types` as a window and a pattern."""
    kinds, window = keys["layer_types"], keys["sliding_window"]
    keys.get("use_sliding_window"), keys.get("max_window_layers")
    letters = {"full_attention": "L", "sliding_attention": "S"}
    if odd := [kind for kind in kinds if kind not in letters]:
        raise refused("layer_types", odd[0], f"only {' and '.join(letters)}")
    text = "".join(letters[kind] for kind in kinds)
    if "S" not in text:
        return {}
    if window is None:
        raise refused("sliding_window", window, "layer_types has sliding_attention")
    period = next(n for n in range(1, len(text) + 1) if text == (text[:n] * len(text))[: len(text)])
    return {"attn.window": window} | ({"attn.pattern": text[:period]} if "L" in text else {})


def plain_ffn(act: str, width: int) -> Words:
    return {"ffn": act, "ffn.d_ff": width, "ffn.bias": True}


# ---------------------------------------------------------------- and back


def common(arch: Arch, rows: int, longest: int, *, partial: bool = False) -> dict[str, Any]:
    """Keys that most families share."""
    m = arch.model
    return {
        "vocab_size": rows,
        "hidden_size": m.d_model,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "intermediate_size": width_of_ffn(arch),
        "tie_word_embeddings": m.tie_embeddings,
        **rope.fields(arch, longest, partial=partial),
    }


def width_of_ffn(arch: Arch) -> int:
    return arch.ffn.width(arch.model.d_model) if isinstance(arch.ffn, FfnSpec) else 4 * arch.model.d_model


def eps(arch: Arch) -> float:
    return float(getattr(arch.norm, "eps", 1e-5))


def activation(arch: Arch, words: Mapping[str, Any]) -> str:
    """The name of arch's activation, else the first there is: the difference is then seen by whoever compares."""
    own = {"ffn": arch.ffn.name}
    if getattr(arch.ffn, "approximate", "none") == "tanh":
        own["ffn.approximate"] = "tanh"
    return next((name for name, said in words.items() if said in (own, arch.ffn.name)), next(iter(words)))


def layer_types(arch: Arch) -> list[str]:
    windows = [arch.attn.layer_window(layer) for layer in range(arch.model.n_layers)]
    return ["full_attention" if w is None else "sliding_attention" for w in windows]
