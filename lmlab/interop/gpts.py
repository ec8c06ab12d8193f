"""GPT-2, GPT-NeoX, BLOOM and Phi: LayerNorm, plain activations, biases; each with a packing of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmlab.interop import rope
from lmlab.interop.family import (
    PLAIN,
    Family,
    Words,
    activation,
    common,
    eps,
    head_dim,
    heads,
    plain_ffn,
    sizes,
    width_of_ffn,
)
from lmlab.interop.keys import Keys
from lmlab.interop.names import SAME, THIRDS_TURNED, TURNED, Layout, Row, by_head, rows
from lmlab.model.spec import Arch, Learned, Parallel

OURS = "blocks.{}."
QKV = tuple(f"{OURS}attn.{n}" for n in "qkv")
BIASES: Words = {"attn.bias_qkv": True, "attn.bias_o": True}
MASKS = r".*\.(attn|attention|self_attention)\.(bias|masked_bias)$"
INV_FREQ = r".*rotary_emb\.inv_freq$"


def layer_norm(keys: Keys, key: str) -> Words:
    return {"norm": "layernorm", "norm.eps": keys[key]}


def _layer(prefix: str, packed: Row, names: dict[str, tuple[str, Layout]]) -> list[Row]:
    return [packed, *(Row(prefix + theirs, (OURS + ours,), how) for ours, (theirs, how) in names.items())]


# ---------------------------------------------------------------- GPT-2


def gpt2_words(keys: Keys) -> Words:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    keys.get("reorder_and_upcast_attn")  # how, not what
    return {
        **layer_norm(keys, "layer_norm_epsilon"),
        "block": "prenorm",
        "pos": "learned",
        "pos.max_len": keys["n_positions"],
        "attn": "mha",
        **BIASES,
        **plain_ffn(keys.one_of("activation_function", PLAIN), keys["n_inner"] or 4 * keys.whole("n_embd")),
        **sizes(keys, "n_layer", "n_embd", "n_head"),
    }


def gpt2_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    m = arch.model
    table = (arch.pos.max_len or m.seq_len) if isinstance(arch.pos, Learned) else longest
    return {
        "vocab_size": vocab,
        "n_embd": m.d_model,
        "n_layer": m.n_layers,
        "n_head": m.n_heads,
        "n_positions": table,
        "n_inner": width_of_ffn(arch),
        "activation_function": activation(arch, PLAIN),
        "layer_norm_epsilon": eps(arch),
        "tie_word_embeddings": m.tie_embeddings,
    }


def gpt2_table(arch: Arch) -> Sequence[Row]:
    names = {"norm1": ("ln_1", SAME), "norm2": ("ln_2", SAME), "attn.o": ("attn.c_proj", TURNED)}
    names |= {"ffn.up": ("mlp.c_fc", TURNED), "ffn.down": ("mlp.c_proj", TURNED)}
    ends = rows("transformer.", {"embed": "wte", "pos": "wpe", "norm": "ln_f"})
    layer = "transformer.h.{}."
    return [*ends, Row("lm_head", ("head",)), *_layer(layer, Row(layer + "attn.c_attn", QKV, THIRDS_TURNED), names)]


# ---------------------------------------------------------------- GPT-NeoX


def neox_words(keys: Keys) -> Words:
    keys.get("rotary_pct"), keys.get("rotary_emb_base")  # old names: transformers puts them into rope_parameters
    parallel = keys["use_parallel_residual"]
    return {
        **layer_norm(keys, "layer_norm_eps"),
        **({"block": "parallel", "block.n_norms": 2} if parallel else {"block": "prenorm"}),
        **rope.words(keys, keys.whole("hidden_size") // keys.whole("num_attention_heads"), partial=True),
        "attn": "mha",
        **(BIASES if keys.get("attention_bias", True) else {}),
        **plain_ffn(keys.one_of("hidden_act", PLAIN), keys["intermediate_size"]),
        **sizes(keys),
    }


def neox_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    found = common(arch, vocab, longest, partial=True)
    share, theta = found.get("partial_rotary_factor", 1.0), found.get("rope_theta", 10000.0)
    return {
        **found,
        "rotary_pct": share,
        "rotary_emb_base": theta,
        "layer_norm_eps": eps(arch),
        "hidden_act": activation(arch, PLAIN),
        "use_parallel_residual": isinstance(arch.block, Parallel),
        "attention_bias": bool(getattr(arch.attn, "bias_qkv", False)),
    }


def neox_table(arch: Arch) -> Sequence[Row]:
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn.o": "attention.dense"}
    names |= {"ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"}
    packed = Row("gpt_neox.layers.{}.attention.query_key_value", QKV, by_head(arch.model.n_heads))
    ends = [*rows("gpt_neox.", {"embed": "embed_in", "norm": "final_layer_norm"}), Row("embed_out", ("head",))]
    return [*ends, packed, *rows("gpt_neox.layers.{}.", names, OURS)]


# ---------------------------------------------------------------- BLOOM


def bloom_words(keys: Keys) -> Words:
    keys.only("apply_residual_connection_post_layernorm", False)
    keys.get("n_embed")  # the old name of hidden_size
    D = keys.whole("hidden_size")
    return {
        **layer_norm(keys, "layer_norm_epsilon"),
        "block": "prenorm",
        "pos": "alibi",
        "attn": "mha",
        **BIASES,
        **plain_ffn("gelu_tanh", 4 * D),
        **sizes(keys, "n_layer", "hidden_size", "n_head"),
        "model.embed_norm": True,
        "model.logit_scale": 1.0,
    }


def bloom_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    m = arch.model
    found = {"vocab_size": vocab, "hidden_size": m.d_model, "n_layer": m.n_layers, "n_head": m.n_heads}
    return found | {"layer_norm_epsilon": eps(arch), "tie_word_embeddings": m.tie_embeddings}


def bloom_table(arch: Arch) -> Sequence[Row]:
    ends = {"embed": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "norm": "ln_f"}
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn.o": "self_attention.dense"}
    names |= {"ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"}
    packed = Row("transformer.h.{}.self_attention.query_key_value", QKV, by_head(arch.model.n_heads))
    return [*rows("transformer.", ends), Row("lm_head", ("head",)), packed, *rows("transformer.h.{}.", names, OURS)]


# ---------------------------------------------------------------- Phi


def phi_words(keys: Keys) -> Words:
    keys.only("qk_layernorm", False)
    keys.only("tie_word_embeddings", False, why="the head has a bias")
    return {
        **layer_norm(keys, "layer_norm_eps"),
        "block": "parallel",
        "block.n_norms": 1,
        **rope.words(keys, head_dim(keys), partial=True),
        **heads(keys),
        **BIASES,
        **plain_ffn(keys.one_of("hidden_act", PLAIN), keys["intermediate_size"]),
        **sizes(keys),
        "model.head_bias": True,
    }


def phi_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    kv, size = arch.attn.kv_heads(arch.model.n_heads), arch.head_dim()
    own = {"layer_norm_eps": eps(arch), "hidden_act": activation(arch, PLAIN), "num_key_value_heads": kv}
    own |= {} if size * arch.model.n_heads == arch.model.d_model else {"head_dim": size}
    return common(arch, vocab, longest, partial=True) | own


def phi_table(arch: Arch) -> Sequence[Row]:
    names = {"norm1": "input_layernorm", "attn.o": "self_attn.dense", "ffn.up": "mlp.fc1", "ffn.down": "mlp.fc2"}
    names |= {f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}
    ends = rows("model.", {"embed": "embed_tokens", "norm": "final_layernorm"})
    return [*ends, Row("lm_head", ("head",)), *rows("model.layers.{}.", names, OURS)]


OLD_BLOOM = frozenset(
    "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add "
    "skip_bias_add_qkv seq_length n_inner hidden_dropout_prob".split()
)
GPTS = (
    Family(
        *("gpt2", "GPT2LMHeadModel", "transformer.", gpt2_words, gpt2_config, gpt2_table),
        harmless=frozenset({"n_ctx"}),
        skipped=(MASKS,),
    ),
    Family(
        *("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.", neox_words, neox_config, neox_table),
        skipped=(MASKS, INV_FREQ),
        head="embed_out",
    ),
    Family(
        *("bloom", "BloomForCausalLM", "transformer.", bloom_words, bloom_config, bloom_table),
        harmless=OLD_BLOOM,
        skipped=(MASKS,),
    ),
    Family("phi", "PhiForCausalLM", "model.", phi_words, phi_config, phi_table),
)
