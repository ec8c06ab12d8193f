"""Llama and those that name their tensors like it: Mistral, Gemma, Qwen2, Qwen3, OLMo2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmlab.interop import rope
from lmlab.interop.family import (
    GATED,
    Family,
    Words,
    activation,
    common,
    eps,
    head_dim,
    heads,
    layer_types,
    layer_windows,
    sizes,
)
from lmlab.interop.keys import Keys
from lmlab.interop.names import Row, rows
from lmlab.model.spec import Arch, HeadsSpec

LAYER, OURS = "model.layers.{}.", "blocks.{}."
ATTENTION = {f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"}
ATTENTION |= {f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
FFN = {f"ffn.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
AFTER = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
ENDS = [Row("model.embed_tokens", ("embed",)), Row("model.norm", ("norm",)), Row("lm_head", ("head",))]
PICKED_EPS = HeadsSpec().qk_norm_eps


def table(arch: Arch) -> Sequence[Row]:
    return [*ENDS, *rows(LAYER, ATTENTION | FFN | NORMS, OURS)]


def parts(keys: Keys, block: str = "prenorm") -> Words:
    return {
        "norm": "rmsnorm",
        "norm.eps": keys["rms_norm_eps"],
        "block": block,
        **rope.words(keys, head_dim(keys)),
        **heads(keys),
        **keys.one_of("hidden_act", GATED),
        "ffn.d_ff": keys["intermediate_size"],
        **sizes(keys),
    }


def config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    m, a = arch.model, arch.attn
    return {
        **common(arch, vocab, longest),
        "rms_norm_eps": eps(arch),
        "hidden_act": activation(arch, GATED),
        "num_key_value_heads": a.kv_heads(m.n_heads),
        "head_dim": arch.head_dim(),
    }


def biases(keys: Keys) -> Words:
    return {"attn.bias_qkv": True, "attn.bias_o": True} if keys.get("attention_bias") else {}


def has_biases(arch: Arch) -> dict[str, Any]:
    return {"attention_bias": bool(getattr(arch.attn, "bias_qkv", False))}


def inner_norm(keys: Keys, which: str) -> Words:
    """The norm of q and k, whose eps is that of the others there."""
    eps = keys["rms_norm_eps"]
    return {"attn.qk_norm": which} | ({} if eps == PICKED_EPS else {"attn.qk_norm_eps": eps})


# ---------------------------------------------------------------- the families


def llama_words(keys: Keys) -> Words:
    return parts(keys) | biases(keys) | ({"ffn.bias": True} if keys.get("mlp_bias") else {})


def llama_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    bias = bool(getattr(arch.ffn, "bias", False))
    return config(arch, vocab, longest) | has_biases(arch) | {"mlp_bias": bias}


def mistral_words(keys: Keys) -> Words:
    window = keys["sliding_window"]
    return parts(keys) | ({} if window is None else {"attn.window": window})


def mistral_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return config(arch, vocab, longest) | {"sliding_window": arch.attn.window}


def gemma_words(keys: Keys) -> Words:
    keys.only("use_bidirectional_attention", None, False)
    own: Words = {"norm.offset": 1, "model.embed_scale": "sqrt_d_model", "model.logit_scale": 1.0}
    keys.only("hidden_activation", None, "gelu_pytorch_tanh")  # an old key; hidden_act gelu is read as this, too
    return parts(keys) | own | biases(keys)


def gemma_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return config(arch, vocab, longest) | has_biases(arch)


def qwen2_words(keys: Keys) -> Words:
    return parts(keys) | {"attn.bias_qkv": True} | layer_windows(keys)


def qwen2_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    window, kinds = arch.attn.window, layer_types(arch)
    first = next((n for n, kind in enumerate(kinds) if kind != "full_attention"), len(kinds))
    sliding = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
    return config(arch, vocab, longest) | sliding | {"max_window_layers": first}  # the old way of saying layer_types


def qwen3_words(keys: Keys) -> Words:
    return parts(keys) | inner_norm(keys, "head") | biases(keys) | layer_windows(keys)


def qwen3_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return qwen2_config(arch, vocab, longest) | has_biases(arch)


def olmo2_words(keys: Keys) -> Words:
    return parts(keys, "reordered") | inner_norm(keys, "full") | biases(keys)


def olmo2_table(arch: Arch) -> Sequence[Row]:
    return [*ENDS, *rows(LAYER, ATTENTION | FFN | AFTER, OURS)]


LLAMAS = (
    Family("llama", "LlamaForCausalLM", "model.", llama_words, llama_config, table),
    Family("mistral", "MistralForCausalLM", "model.", mistral_words, mistral_config, table),
    Family("qwen2", "Qwen2ForCausalLM", "model.", qwen2_words, qwen2_config, table),
    Family("qwen3", "Qwen3ForCausalLM", "model.", qwen3_words, qwen3_config, table),
    Family("gemma", "GemmaForCausalLM", "model.", gemma_words, gemma_config, table),
    Family("olmo2", "Olmo2ForCausalLM", "model.", olmo2_words, gemma_config, olmo2_table),
)
