"""Llama and those that name their tensors like it: Mistral, Gemma, Qwen2, Qwen3, OLMo2, DeepSeek-V3 (dense, MLA)."""

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
from lmlab.interop.keys import Keys, refused
from lmlab.interop.names import Row, keys_then_values, rows
from lmlab.model.spec import MLA, Arch
from lmlab.model.spec import RMSNorm as RMSNormSpec

LAYER, OURS = "model.layers.{}.", "blocks.{}."
ATTENTION = {f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"}
ATTENTION |= {f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
FFN = {f"ffn.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
AFTER = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
ENDS = [Row("model.embed_tokens", ("embed",)), Row("model.norm", ("norm",)), Row("lm_head", ("head",))]
PICKED_EPS = RMSNormSpec().eps  # of our norms inside attention


def table(arch: Arch) -> Sequence[Row]:
    return [*ENDS, *rows(LAYER, ATTENTION | FFN | NORMS, OURS)]


def _parts(keys: Keys, block: str = "prenorm") -> Words:
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


def _config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    m, a = arch.model, arch.attn
    return {
        **common(arch, vocab, longest),
        "rms_norm_eps": eps(arch),
        "hidden_act": activation(arch, GATED),
        "num_key_value_heads": a.kv_heads(m.n_heads),
        "head_dim": arch.head_dim(),
    }


def _biases(keys: Keys) -> Words:
    return {"attn.bias_qkv": True, "attn.bias_o": True} if keys.get("attention_bias") else {}


def _has_biases(arch: Arch) -> dict[str, Any]:
    return {"attention_bias": bool(getattr(arch.attn, "bias_qkv", False))}


def _inner_eps(keys: Keys, which: str) -> None:
    """Our norms inside attention have one eps. Raises ConfigError for another."""
    if keys["rms_norm_eps"] != PICKED_EPS:
        raise refused("rms_norm_eps", keys["rms_norm_eps"], f"only {PICKED_EPS:g}: {which} has it too")


# ---------------------------------------------------------------- the families


def llama_words(keys: Keys) -> Words:
    return _parts(keys) | _biases(keys) | ({"ffn.bias": True} if keys.get("mlp_bias") else {})


def llama_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    bias = bool(getattr(arch.ffn, "bias", False))
    return _config(arch, vocab, longest) | _has_biases(arch) | {"mlp_bias": bias}


def mistral_words(keys: Keys) -> Words:
    window = keys["sliding_window"]
    return _parts(keys) | ({} if window is None else {"attn.window": window})


def mistral_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return _config(arch, vocab, longest) | {"sliding_window": arch.attn.window}


def gemma_words(keys: Keys) -> Words:
    keys.only("use_bidirectional_attention", None, False)
    own: Words = {"norm.offset": 1, "model.embed_scale": "sqrt_d_model", "model.logit_scale": 1.0}
    keys.only("hidden_activation", None, "gelu_pytorch_tanh")  # an old key; hidden_act gelu is read as this, too
    return _parts(keys) | own | _biases(keys)


def gemma_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return _config(arch, vocab, longest) | _has_biases(arch)


def qwen2_words(keys: Keys) -> Words:
    return _parts(keys) | {"attn.bias_qkv": True} | layer_windows(keys)


def qwen2_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    window, kinds = arch.attn.window, layer_types(arch)
    first = next((n for n, kind in enumerate(kinds) if kind != "full_attention"), len(kinds))
    sliding = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
    return _config(arch, vocab, longest) | sliding | {"max_window_layers": first}  # the old way of saying layer_types


def qwen3_words(keys: Keys) -> Words:
    _inner_eps(keys, "the norm of q and k")
    return _parts(keys) | {"attn.qk_norm": "head"} | _biases(keys) | layer_windows(keys)


def qwen3_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    return qwen2_config(arch, vocab, longest) | _has_biases(arch)


def olmo2_words(keys: Keys) -> Words:
    _inner_eps(keys, "the norm of q and k")
    return _parts(keys, "reordered") | {"attn.qk_norm": "full"} | _biases(keys)


def olmo2_table(arch: Arch) -> Sequence[Row]:
    return [*ENDS, *rows(LAYER, ATTENTION | FFN | AFTER, OURS)]


def deepseek_words(keys: Keys) -> Words:
    dense, layers = keys["first_k_dense_replace"], keys["num_hidden_layers"]
    if dense is None or dense < layers:
        raise refused("first_k_dense_replace", dense, f"layers with experts: only {layers} or more, all dense")
    keys.only("attention_bias", False)
    keys.only("num_key_value_heads", keys["num_attention_heads"])
    pairing = "interleaved" if keys["rope_interleave"] else "half"
    inner = {"kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "nope_dim": "qk_nope_head_dim"}
    inner |= {"v_dim": "v_head_dim"} | ({} if keys["q_lora_rank"] is None else {"q_rank": "q_lora_rank"})
    return {
        "norm": "rmsnorm",
        "norm.eps": keys["rms_norm_eps"],
        "block": "prenorm",
        **rope.words(keys, keys.whole("qk_rope_head_dim"), whole_score=True),
        "pos.pairing": pairing,
        "attn": "mla",
        **{f"attn.{ours}": keys[theirs] for ours, theirs in inner.items()},
        **keys.one_of("hidden_act", GATED),
        "ffn.d_ff": keys["intermediate_size"],
        **sizes(keys),
    }


def deepseek_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    a, D, H = arch.attn, arch.model.d_model, arch.model.n_heads
    own: dict[str, Any] = {}
    if isinstance(a, MLA):
        own = {"kv_lora_rank": a.latent_size(D), "q_lora_rank": a.q_rank, "qk_rope_head_dim": a.rotary_size(D, H)}
        own |= {"qk_nope_head_dim": a.plain_size(D, H), "v_head_dim": a.value_size(D, H)}
    interleaved = getattr(arch.pos, "pairing", "interleaved") == "interleaved"
    dense = {"first_k_dense_replace": arch.model.n_layers, "num_nextn_predict_layers": 0, "attention_bias": False}
    found = common(arch, vocab, longest) | {"rms_norm_eps": eps(arch), "hidden_act": activation(arch, GATED)}
    return found | {"num_key_value_heads": H, "rope_interleave": interleaved} | own | dense


def deepseek_table(arch: Arch) -> Sequence[Row]:
    a, D, H = arch.attn, arch.model.d_model, arch.model.n_heads
    assert isinstance(a, MLA)
    up = keys_then_values(H, a.plain_size(D, H), a.value_size(D, H))
    inner = {"attn.q": "q_proj", "attn.q_down": "q_a_proj", "attn.q_norm": "q_a_layernorm", "attn.q_up": "q_b_proj"}
    inner |= {"attn.kv_down": "kv_a_proj_with_mqa", "attn.kv_norm": "kv_a_layernorm", "attn.o": "o_proj"}
    packed = Row(LAYER + "self_attn.kv_b_proj", (OURS + "attn.k_up", OURS + "attn.v_up"), up)
    return [*ENDS, *rows(LAYER + "self_attn.", inner, OURS), packed, *rows(LAYER, FFN | NORMS, OURS)]


EXPERTS = frozenset(
    "moe_intermediate_size n_shared_experts n_routed_experts routed_scaling_factor n_group topk_group "
    "num_experts_per_tok norm_topk_prob ep_size scoring_func topk_method aux_loss_alpha seq_aux moe_layer_freq "
    "num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef head_dim qk_head_dim".split()
)
LLAMAS = (
    Family("llama", "LlamaForCausalLM", "model.", llama_words, llama_config, table),
    Family("mistral", "MistralForCausalLM", "model.", mistral_words, mistral_config, table),
    Family("qwen2", "Qwen2ForCausalLM", "model.", qwen2_words, qwen2_config, table),
    Family("qwen3", "Qwen3ForCausalLM", "model.", qwen3_words, qwen3_config, table),
    Family("gemma", "GemmaForCausalLM", "model.", gemma_words, gemma_config, table),
    Family("olmo2", "Olmo2ForCausalLM", "model.", olmo2_words, gemma_config, olmo2_table),
    Family(
        *("deepseek_v3", "DeepseekV3ForCausalLM", "model.", deepseek_words, deepseek_config, deepseek_table),
        harmless=EXPERTS,
        pairing=lambda config: "interleaved" if config.get("rope_interleave", True) else "half",
    ),
)
