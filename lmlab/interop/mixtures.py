"""Families with experts: DeepSeek-V3 (MLA, dense layers first), Mixtral, Qwen3-MoE, OLMoE.

Files hold each expert's matrices by name, however transformers lays them in memory. The balance loss of the last three
is E·Σ f·P over the tokens of all layers and rows together, f counted k times: k at an even load, where ours is 1. So
router_aux_loss_coef · k is our aux_coef, the same number at an even load and, of one layer and one row, at any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmlab.config.meaning import placed
from lmlab.interop import rope
from lmlab.interop.family import GATED, Family, Words, activation, common, eps, sizes, width_of_ffn
from lmlab.interop.keys import Keys, refused
from lmlab.interop.llamas import (
    ATTENTION,
    ENDS,
    FFN,
    LAYER,
    NORMS,
    OURS,
    biases,
    config,
    has_biases,
    inner_norm,
    parts,
)
from lmlab.interop.names import SAME, Row, keys_then_values, rows
from lmlab.model.spec import MLA, Arch, RoutedSpec, TopK

ROUTER = (("weight", "weight"), ("e_score_correction_bias", "bias"))
STACKED = {"ffn.experts.ffn.gate": "gate_proj", "ffn.experts.ffn.up": "up_proj", "ffn.experts.ffn.down": "down_proj"}
MIXTURE = [
    *rows(LAYER, FFN, OURS),  # of dense layers
    *rows(LAYER + "mlp.experts.{expert}.", STACKED, OURS),
    *rows(LAYER + "mlp.shared_experts.", {f"ffn.shared.{n}": f"{n}_proj" for n in ("gate", "up", "down")}, OURS),
    Row(LAYER + "mlp.gate", (OURS + "ffn.router",), SAME, ROUTER),
]


def softmax_choice(keys: Keys, *, norm: bool) -> Words:
    """The best k of a softmax over all experts, and what evens their load."""
    keys["num_experts"]  # either name, as transformers says
    n, k = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    _refuse_choice(k, n, norm)
    found: Words = {"moe": "topk", "moe.n_experts": n, "moe.top_k": k, "moe.norm_topk": norm}
    coef = _number(keys, "router_aux_loss_coef", zero=True) * k
    return found | ({"moe.aux_coef": coef} if coef else {"moe.balance": "none"})


def _refuse_choice(k: int, n: int, norm: bool) -> None:
    if k > n:
        raise refused("num_experts_per_tok", k, f"only up to {n}, the experts that a token may use")
    if norm and k == 1:
        raise refused("num_experts_per_tok", k, "only 2 or more: a weight divided by itself is always 1")


def _number(keys: Keys, key: str, *, zero: bool = False) -> float:
    value = keys[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (value > 0 or (zero and value == 0)):
        return float(value)
    raise refused(key, value, f"only a number {'≥' if zero else '>'} 0")


def routing(arch: Arch) -> TopK:
    """arch's choice of experts, or the usual one: the difference is then seen by whoever compares."""
    return arch.moe if isinstance(arch.moe, TopK) else TopK()


def expert_width(arch: Arch) -> int:
    width = getattr(arch.moe, "d_expert", None)
    return width_of_ffn(arch) if width is None else int(width)


def softmax_config(arch: Arch, experts: str) -> dict[str, Any]:
    """experts: the key of their number, as the family's first version had it."""
    moe = routing(arch)
    coef = moe.aux_coef / moe.top_k if moe.balance == "aux" else 0.0
    return {experts: moe.n_experts, "num_experts_per_tok": moe.top_k, "router_aux_loss_coef": coef}


# ---------------------------------------------------------------- the families


def mixtral_words(keys: Keys) -> Words:
    window = keys["sliding_window"]
    return parts(keys) | ({} if window is None else {"attn.window": window}) | softmax_choice(keys, norm=True)


def mixtral_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    own = {"intermediate_size": expert_width(arch), "sliding_window": arch.attn.window}
    return config(arch, vocab, longest) | own | softmax_config(arch, "num_local_experts")


def mixtral_table(arch: Arch) -> Sequence[Row]:
    at = LAYER + "block_sparse_moe."
    stacked = dict(zip(STACKED, ("w1", "w3", "w2"), strict=True))
    inner = [*rows(at + "experts.{expert}.", stacked, OURS), Row(at + "gate", (OURS + "ffn.router",))]
    return [*ENDS, *rows(LAYER, ATTENTION | NORMS, OURS), *inner]


def qwen3_moe_words(keys: Keys) -> Words:
    window = keys["sliding_window"] if keys["use_sliding_window"] else None
    found = parts(keys) | inner_norm(keys, "head") | biases(keys)
    found |= {} if window is None else {"attn.window": window}
    step, without = keys.whole("decoder_sparse_step"), keys["mlp_only_layers"]
    norm, width = bool(keys["norm_topk_prob"]), keys.whole("moe_intermediate_size")
    routed = [n not in without and (n + 1) % step == 0 for n in range(keys.whole("num_hidden_layers"))]
    choice = softmax_choice(keys, norm=norm) | {"moe.d_expert": width}
    if not any(routed):
        return found
    where = placed(routed)
    if where is None:
        raise refused("mlp_only_layers", without, "only layers that leave every n-th one from some layer on")
    found |= choice | {"moe.every_n_layers": where[0], "moe.first_dense_layers": where[1]}
    return _without_dense_width(found) if all(routed) else found


def _without_dense_width(words: Words) -> Words:
    """intermediate_size is the width of the dense layers: where there are none it says nothing."""
    return {key: value for key, value in words.items() if key != "ffn.d_ff"}


def qwen3_moe_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    every = getattr(arch.moe, "every_n_layers", 1)
    without = [n for n in range(arch.model.n_layers) if (n + 1) % every == 0 and not arch.moe.routes(n)]
    own = {"decoder_sparse_step": every, "mlp_only_layers": without, "norm_topk_prob": routing(arch).norm_topk}
    own |= {"use_sliding_window": arch.attn.window is not None, "sliding_window": arch.attn.window}
    own |= {"moe_intermediate_size": expert_width(arch)} | softmax_config(arch, "num_experts")
    return config(arch, vocab, longest) | has_biases(arch) | own


def olmoe_words(keys: Keys) -> Words:
    keys.only("clip_qkv", None)
    keys.only("head_dim", None, keys.whole("hidden_size") // keys.whole("num_attention_heads"))
    found = parts(keys) | inner_norm(keys, "full") | biases(keys)
    return found | softmax_choice(keys, norm=bool(keys["norm_topk_prob"]))


def olmoe_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    own = {"intermediate_size": expert_width(arch), "norm_topk_prob": routing(arch).norm_topk, "clip_qkv": None}
    found = config(arch, vocab, longest) | has_biases(arch) | own | softmax_config(arch, "num_experts")
    return {key: value for key, value in found.items() if key != "head_dim"}


def mixture_table(arch: Arch) -> Sequence[Row]:
    return [*ENDS, *rows(LAYER, ATTENTION | NORMS, OURS), *MIXTURE]


def deepseek_words(keys: Keys) -> Words:
    keys.only("attention_bias", False)
    keys.only("num_key_value_heads", keys["num_attention_heads"])
    pairing = "interleaved" if keys["rope_interleave"] else "half"
    inner = {"kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim", "nope_dim": "qk_nope_head_dim"}
    inner |= {"v_dim": "v_head_dim"} | ({} if keys["q_lora_rank"] is None else {"q_rank": "q_lora_rank"})
    found = {
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
        **_deepseek_experts(keys),
    }
    return _without_dense_width(found) if found.get("moe.first_dense_layers") == 0 else found


def _deepseek_experts(keys: Keys) -> Words:
    """Sigmoid scores; a bias that is moved between steps steers the choice; groups of experts; shared experts."""
    dense, layers = keys["first_k_dense_replace"], keys.whole("num_hidden_layers")
    if not isinstance(dense, int) or dense < 0:
        raise refused("first_k_dense_replace", dense, "only a whole number ≥ 0")
    if dense >= layers:
        return {}
    keys.only("scoring_func", None, "sigmoid")
    keys.only("topk_method", None, "noaux_tc")
    keys.only("moe_layer_freq", None, 1)
    n, k, norm = keys.whole("n_routed_experts"), keys.whole("num_experts_per_tok"), bool(keys["norm_topk_prob"])
    groups, few = _expert_groups(keys, n)
    _refuse_choice(k, n // groups * (few or groups), norm)
    return {
        **{"moe": "topk", "moe.score": "sigmoid", "moe.balance": "aux_free"},
        **{"moe.n_experts": n, "moe.top_k": k, "moe.norm_topk": norm},
        **{"moe.n_expert_groups": groups, "moe.n_limited_groups": few},
        "moe.weight_scale": _number(keys, "routed_scaling_factor"),
        "moe.n_shared": keys.whole("n_shared_experts"),
        "moe.d_expert": keys.whole("moe_intermediate_size"),
        "moe.first_dense_layers": dense,
    }


def _expert_groups(keys: Keys, n: int) -> tuple[int, int | None]:
    """(groups, those that a token may use); (1, None) where it may use all."""
    groups, few = keys.whole("n_group"), keys.whole("topk_group")
    if n % groups or n < 2 * groups:
        raise refused("n_group", groups, f"only groups of equally many of {n} experts, 2 or more")
    if few > groups:
        raise refused("topk_group", few, f"only up to {groups}, n_group")
    return (1, None) if few == groups else (groups, few)


def _deepseek_layers(arch: Arch) -> dict[str, Any]:
    """Which layers have experts, and how they are chosen."""
    if not isinstance(arch.moe, RoutedSpec):
        return {"first_k_dense_replace": arch.model.n_layers}
    moe = routing(arch)
    few = moe.n_limited_groups
    return {
        **{"first_k_dense_replace": moe.first_dense_layers, "moe_layer_freq": 1},
        **{"n_routed_experts": moe.n_experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.norm_topk},
        **{"n_group": 1 if few is None else moe.n_expert_groups, "topk_group": 1 if few is None else few},
        **{"routed_scaling_factor": moe.weight_scale, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        **{"n_shared_experts": moe.n_shared, "moe_intermediate_size": expert_width(arch)},
    }


def deepseek_config(arch: Arch, vocab: int, longest: int) -> dict[str, Any]:
    a, D, H = arch.attn, arch.model.d_model, arch.model.n_heads
    own: dict[str, Any] = {}
    if isinstance(a, MLA):
        own = {"kv_lora_rank": a.latent_size(D), "q_lora_rank": a.q_rank, "qk_rope_head_dim": a.rotary_size(D, H)}
        own |= {"qk_nope_head_dim": a.plain_size(D, H), "v_head_dim": a.value_size(D, H)}
    interleaved = getattr(arch.pos, "pairing", "interleaved") == "interleaved"
    rest = {"num_nextn_predict_layers": 0, "attention_bias": False} | _deepseek_layers(arch)
    found = common(arch, vocab, longest) | {"rms_norm_eps": eps(arch), "hidden_act": activation(arch, GATED)}
    return found | {"num_key_value_heads": H, "rope_interleave": interleaved} | own | rest


def deepseek_table(arch: Arch) -> Sequence[Row]:
    a, D, H = arch.attn, arch.model.d_model, arch.model.n_heads
    assert isinstance(a, MLA)
    up = keys_then_values(H, a.plain_size(D, H), a.value_size(D, H))
    inner = {"attn.q": "q_proj", "attn.q_down": "q_a_proj", "attn.q_norm": "q_a_layernorm", "attn.q_up": "q_b_proj"}
    inner |= {"attn.kv_down": "kv_a_proj_with_mqa", "attn.kv_norm": "kv_a_layernorm", "attn.o": "o_proj"}
    packed = Row(LAYER + "self_attn.kv_b_proj", (OURS + "attn.k_up", OURS + "attn.v_up"), up)
    return [*ENDS, *rows(LAYER + "self_attn.", inner, OURS), packed, *rows(LAYER, NORMS, OURS), *MIXTURE]


EXPERTS = frozenset(
    "moe_intermediate_size n_shared_experts n_routed_experts routed_scaling_factor n_group topk_group "
    "num_experts_per_tok norm_topk_prob ep_size scoring_func topk_method aux_loss_alpha seq_aux moe_layer_freq "
    "num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef head_dim qk_head_dim".split()
)
JITTER = "router_jitter_noise"
TRAINING = frozenset({"output_router_logits"})  # of the loss
MIXTURES = (
    Family(
        *("deepseek_v3", "DeepseekV3ForCausalLM", "model.", deepseek_words, deepseek_config, deepseek_table),
        harmless=EXPERTS,
        pairing=lambda config: "interleaved" if config.get("rope_interleave", True) else "half",
        wide=("e_score_correction_bias",),
    ),
    Family(
        *("mixtral", "MixtralForCausalLM", "model.", mixtral_words, mixtral_config, mixtral_table),
        harmless=TRAINING | {JITTER},
    ),
    Family(
        *("qwen3_moe", "Qwen3MoeForCausalLM", "model.", qwen3_moe_words, qwen3_moe_config, mixture_table),
        harmless=TRAINING | {"max_window_layers"},
    ),
    Family("olmoe", "OlmoeForCausalLM", "model.", olmoe_words, olmoe_config, mixture_table, harmless=TRAINING),
)
