"""Every architectural choice on one page, torch-free: norm, block, pos, rope_scaling, attn, ffn, moe, model.

A class is one option (`norm=rmsnorm`), its fields are what a user may set (`norm.eps=1e-5`). Widths that follow from
other fields (head size, kv heads, ffn width) are methods here, so that the model, the checks and the cost agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from lmlab.registry import Spec, option, setting

# ---------------------------------------------------------------- norm


@option("norm", "layernorm", build="lmlab.model.norm:LayerNorm")
class LayerNorm(Spec):
    eps: float = setting(1e-5, "added to the variance", gt=0, probe=0.1)
    bias: bool = setting(True, "learn a shift", probe=False)


@option("norm", "rmsnorm", build="lmlab.model.norm:RMSNorm")
class RMSNorm(Spec):
    eps: float = setting(1e-6, "added to the mean square", gt=0, probe=0.1)
    offset: int = setting(
        0, "added to the weight, which then starts at 1 − offset (Gemma: 1)", ge=0, le=1, probe=1, since=2
    )


@option("norm", "batchnorm", build="lmlab.model.norm:BatchNorm")
class BatchNorm(Spec):
    eps: float = setting(1e-5, "added to the variance", gt=0, probe=0.1)
    bias: bool = setting(True, "learn a shift", probe=False)
    momentum: float = setting(0.1, "share of a new batch in the running statistics", gt=0, le=1, probe=0.9)


@option("norm", "dyt", build="lmlab.model.norm:DyT")
class DyT(Spec):
    alpha: float = setting(0.5, "what the learned slope starts at", gt=0, probe=2.0)
    bias: bool = setting(True, "learn a shift", probe=False)


@option("norm", "none", build="lmlab.model.norm:NoNorm")
class NoNorm(Spec):
    pass


# ---------------------------------------------------------------- block


@dataclass
class BlockSpec(Spec):
    def final_norm(self) -> bool:
        """Whether a norm stands between the last block and the head."""
        return True


@option("block", "prenorm", build="lmlab.model.block:PreNorm")
class PreNorm(BlockSpec):
    pass


@option("block", "postnorm", build="lmlab.model.block:PostNorm")
class PostNorm(BlockSpec):
    def final_norm(self) -> bool:
        return False


@option("block", "deepnorm", build="lmlab.model.block:DeepNorm")
class DeepNorm(BlockSpec):
    alpha: Optional[float] = setting(None, "factor on the residual; null = (2·n_layers)^(1/4)", gt=0, probe=1.5)
    beta: Optional[float] = setting(None, "gain of v, o and ffn; null = (8·n_layers)^(-1/4)", gt=0, probe=0.2)

    def final_norm(self) -> bool:
        return False

    def factors(self, n_layers: int) -> tuple[float, float]:
        """(alpha, beta) of a decoder of n_layers."""
        alpha = (2 * n_layers) ** 0.25 if self.alpha is None else self.alpha
        return alpha, (8 * n_layers) ** -0.25 if self.beta is None else self.beta


@option("block", "sandwich", build="lmlab.model.block:Sandwich")
class Sandwich(BlockSpec):
    pass


@option("block", "reordered", build="lmlab.model.block:Reordered")
class Reordered(BlockSpec):
    pass


@option("block", "parallel", build="lmlab.model.block:Parallel")
class Parallel(BlockSpec):
    n_norms: int = setting(1, "1 = attention and ffn share one norm (GPT-J), 2 = one each (NeoX)", ge=1, le=2, probe=2)


@option("block", "simplified", build="lmlab.model.block:Simplified")
class Simplified(BlockSpec):
    beta_attn: float = setting(1.0, "what the learned factor on attention starts at", gt=0, probe=0.5)
    beta_ffn: float = setting(0.1, "what the learned factor on the ffn starts at", gt=0, probe=0.5)


# ---------------------------------------------------------------- pos


@option("pos", "none", build="lmlab.model.pos:NoPosition")
class NoPosition(Spec):
    pass


@option("pos", "sinusoidal", build="lmlab.model.pos:Sinusoidal")
class Sinusoidal(Spec):
    theta: float = setting(10000.0, "base of the wavelengths", gt=1, probe=100.0)


@option("pos", "learned", build="lmlab.model.pos:Learned")
class Learned(Spec):
    max_len: Optional[int] = setting(None, "rows of the table; null = model.seq_len", ge=1, le=100_000_000, probe=512)


@option("pos", "rope", build="lmlab.model.pos:Rope")
class Rope(Spec):
    theta: float = setting(10000.0, "base of the wavelengths", gt=1, probe=100.0)
    pairing: str = setting("half", "which channels turn together", choices=("half", "interleaved"), probe="interleaved")
    fraction: float = setting(1.0, "share of each head's channels that turn", gt=0, le=1, probe=0.5)

    def width(self, head_dim: int) -> int:
        """The rotary width d: channels of each head that are rotated."""
        return round(head_dim * self.fraction)


@option("pos", "alibi", build="lmlab.model.pos:Alibi")
class Alibi(Spec):
    pass


@option("pos", "t5", build="lmlab.model.pos:T5")
class T5(Spec):
    n_buckets: int = setting(32, "learned values per head", ge=2, le=10_000, probe=8)
    max_distance: int = setting(128, "all distances from here on share the last bucket", ge=2, le=2**24, probe=12)


# ---------------------------------------------------------------- rope_scaling


@dataclass
class ScalingSpec(Spec):
    """What all scalings share: positions up to factor · original_len are brought near those that were trained."""

    factor: float = setting(2.0, "s, how many times the original length is wanted", ge=1, le=1e6, probe=8.0)


@dataclass
class LengthScalingSpec(ScalingSpec):
    """Scalings that ask how long the original rows were."""

    original_len: Optional[int] = setting(None, "tokens of the original rows; null = model.seq_len", ge=2, probe=8)

    def original(self, seq_len: int) -> int:
        """L, the original length."""
        return seq_len if self.original_len is None else self.original_len


@option("rope_scaling", "none")
class NoScaling(Spec):
    pass


@option("rope_scaling", "pi", build="lmlab.model.rope_scaling:PI")
class PI(ScalingSpec):
    pass


@option("rope_scaling", "ntk", build="lmlab.model.rope_scaling:NTK")
class NTK(ScalingSpec):
    pass


@option("rope_scaling", "dynamic_ntk", build="lmlab.model.rope_scaling:DynamicNTK")
class DynamicNTK(LengthScalingSpec):
    pass


@option("rope_scaling", "yarn", build="lmlab.model.rope_scaling:YaRN")
class YaRN(LengthScalingSpec):
    beta_fast: float = setting(32.0, "rotations over the original length above which a pair is kept", gt=0, probe=4.0)
    beta_slow: float = setting(1.0, "rotations below which a pair is divided by the factor", gt=0, probe=0.1)
    attention_factor: Optional[float] = setting(
        None, "factor on cos and sin; null = 0.1·ln(factor) + 1", gt=0, probe=1.5
    )

    def bounds(self, theta: float, width: int, seq_len: int) -> tuple[int, int]:
        """Pair indices where the ramp begins and ends: (1e4, d=64, L=2048) → 8, 21."""

        def pair(rotations: float) -> float:
            turns = self.original(seq_len) / (rotations * 2 * math.pi)
            return width * math.log(turns) / (2 * math.log(theta))

        return max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), width - 1)


@option("rope_scaling", "llama3", build="lmlab.model.rope_scaling:Llama3")
class Llama3(LengthScalingSpec):
    low_freq_factor: float = setting(1.0, "original_len over it: wavelengths above are divided", gt=0, probe=0.1)
    high_freq_factor: float = setting(4.0, "original_len over it: wavelengths below are kept", gt=0, probe=2.0)


# ---------------------------------------------------------------- attn


@dataclass
class AttnSpec(Spec):
    """What all softmax attentions share, and the sizes that the model, the checks and the cost ask of them."""

    window: Optional[int] = setting(None, "keys seen, counting the token itself; null = all", ge=1, probe=8)
    pattern: Optional[str] = setting(
        None, "a letter per layer, repeated: S = window, L = full, like SSSL; null = all S", probe="SL", since=2
    )
    nope_every_n_layers: Optional[int] = setting(
        None, "every n-th layer goes without positions; null = none", ge=1, probe=2, since=2
    )
    softcap: Optional[float] = setting(
        None, "c of c·tanh(score / c), before the mask; null = none", gt=0, probe=0.05, since=2
    )
    scale: Optional[float] = setting(None, "factor on q·k; null = 1/√(channels of q)", gt=0, probe=1.0, since=2)
    bias_o: bool = setting(False, "bias of the output projection", probe=True)
    dropout: float = setting(0.0, "dropout of the attention probabilities", ge=0, lt=1, probe=0.5)
    backend: str = setting(
        "auto",
        "who computes attention",
        choices=("auto", "sdpa", "flex", "tiled", "dense"),
        probe="dense",
    )

    def head_size(self, d_model: int, n_heads: int) -> int:
        """C, channels of each head's query and key."""
        return d_model // n_heads

    def value_size(self, d_model: int, n_heads: int) -> int:
        """Channels of each head's value."""
        return self.head_size(d_model, n_heads)

    def rotary_size(self, d_model: int, n_heads: int) -> int:
        """Channels of each head that positions may rotate."""
        return self.head_size(d_model, n_heads)

    def kv_heads(self, n_heads: int) -> int:
        """K, the number of key/value heads."""
        return n_heads

    def cached(self, d_model: int, n_heads: int) -> tuple[tuple[int, int], ...]:
        """(heads, channels) of each tensor that a layer's cache keeps of a token: keys, then values."""
        sizes = self.head_size(d_model, n_heads), self.value_size(d_model, n_heads)
        return tuple((self.kv_heads(n_heads), size) for size in sizes)

    def context_flops(self, d_model: int, n_heads: int) -> float:
        """Forward FLOPs of one query per key it attends to, all heads: 2·(channels of k + channels of v) each."""
        return 2 * n_heads * (self.head_size(d_model, n_heads) + self.value_size(d_model, n_heads))

    def layer_window(self, layer: int) -> Optional[int]:
        """The window of a layer, None where it sees everything."""
        full = self.pattern is not None and self.pattern[layer % len(self.pattern)] == "L"
        return None if full else self.window

    def layer_has_positions(self, layer: int) -> bool:
        """Whether a layer uses rotations and biases; not every n-th does (NoPE layers)."""
        return self.nope_every_n_layers is None or (layer + 1) % self.nope_every_n_layers != 0


@dataclass
class HeadsSpec(AttnSpec):
    """Attention with projections of its own for q, k and v."""

    head_dim: Optional[int] = setting(None, "channels per head; null = d_model / n_heads", ge=1, le=65_536, probe=32)
    qk_norm: str = setting(
        "none",
        "RMSNorm of q and k: head = one weight per head channel, full = over all heads",
        choices=("none", "head", "full"),
        probe="head",
    )
    qk_norm_eps: float = setting(1e-6, "added to the mean square of q and of k by qk_norm", gt=0, probe=0.1, since=4)
    bias_qkv: bool = setting(False, "biases of the q, k, v projections", probe=True)
    weights: str = setting(
        "softmax",
        "shaped = a·identity + b·softmax − c·uniform, a, b, c learned per head",
        choices=("softmax", "shaped"),
        probe="shaped",
        since=2,
    )
    v_proj: str = setting(
        "linear", "none = the input itself is the value", choices=("linear", "none"), probe="none", since=2
    )
    o_proj: str = setting(
        "linear", "none = the heads are put out as they are", choices=("linear", "none"), probe="none", since=2
    )

    def head_size(self, d_model: int, n_heads: int) -> int:
        return self.head_dim if self.head_dim is not None else d_model // n_heads

    def context_flops(self, d_model: int, n_heads: int) -> float:
        """Shaped attention attends twice."""
        return super().context_flops(d_model, n_heads) * (2 if self.weights == "shaped" else 1)


@option("attn", "mha", build="lmlab.model.attn:Attention")
class MHA(HeadsSpec):
    pass


@option("attn", "mqa", build="lmlab.model.attn:Attention")
class MQA(HeadsSpec):
    def kv_heads(self, n_heads: int) -> int:
        return 1


@option("attn", "gqa", build="lmlab.model.attn:Attention")
class GQA(HeadsSpec):
    n_kv_heads: Optional[int] = setting(
        None, "key/value heads; null = n_heads / queries_per_kv", ge=1, le=10_000, probe=1
    )
    queries_per_kv: Optional[int] = setting(
        None, "query heads that share a key/value head, at every n_heads; null = 2", ge=1, le=10_000, probe=4, since=4
    )

    def kv_heads(self, n_heads: int) -> int:
        return self.n_kv_heads if self.n_kv_heads is not None else max(1, n_heads // (self.queries_per_kv or 2))


@option("attn", "mla", build="lmlab.model.mla:MLA")
class MLA(AttnSpec):
    """Widths left null follow D / H, as in DeepSeek-V2: nope_dim and v_dim are it, rope_dim is half of it."""

    kv_rank: Optional[int] = setting(
        None, "width of the shared k, v latent; null = d_model / 4", ge=1, le=65_536, probe=24
    )
    q_rank: Optional[int] = setting(
        None, "width of the q latent; null = q straight from the input", ge=1, le=65_536, probe=24
    )
    rope_dim: Optional[int] = setting(
        None, "channels that turn, one key for all heads; null = D / H / 2", ge=2, le=65_536, probe=4
    )
    nope_dim: Optional[int] = setting(
        None, "channels per head that do not turn; null = D / H", ge=1, le=65_536, probe=8
    )
    v_dim: Optional[int] = setting(None, "channels per head of the value; null = D / H", ge=1, le=65_536, probe=8)
    form: str = setting(
        "naive",
        "absorbed = attend in the latent, k_up and v_up moved to q and to the output",
        choices=("naive", "absorbed"),
        probe="absorbed",
    )

    def latent_size(self, d_model: int) -> int:
        """Width of the latent that keys and values are made from."""
        return self.kv_rank if self.kv_rank is not None else max(1, d_model // 4)

    def rotary_size(self, d_model: int, n_heads: int) -> int:
        return self.rope_dim if self.rope_dim is not None else 2 * max(1, d_model // n_heads // 4)

    def plain_size(self, d_model: int, n_heads: int) -> int:
        """Channels of each head's query and key that do not turn."""
        return self.nope_dim if self.nope_dim is not None else d_model // n_heads

    def head_size(self, d_model: int, n_heads: int) -> int:
        return self.plain_size(d_model, n_heads) + self.rotary_size(d_model, n_heads)

    def value_size(self, d_model: int, n_heads: int) -> int:
        return self.v_dim if self.v_dim is not None else d_model // n_heads

    def cached(self, d_model: int, n_heads: int) -> tuple[tuple[int, int], ...]:
        """The latent and the rotated key, shared by the heads."""
        return ((1, self.latent_size(d_model) + self.rotary_size(d_model, n_heads)),)

    def context_flops(self, d_model: int, n_heads: int) -> float:
        """The absorbed form attends in the latent: its keys are kv_rank + rope_dim wide, its values kv_rank."""
        if self.form == "naive":
            return super().context_flops(d_model, n_heads)
        return 2 * n_heads * (2 * self.latent_size(d_model) + self.rotary_size(d_model, n_heads))


# ---------------------------------------------------------------- ffn


@dataclass
class FfnSpec(Spec):
    """Width: `d_ff` as it is, or `mult`·d_model (null = 4) rounded up to `multiple_of` (null = 8)."""

    d_ff: Optional[int] = setting(None, "hidden width; null = from mult", ge=1, le=100_000_000, probe=256)
    mult: Optional[float] = setting(
        None, "hidden width over d_model before the gated 2/3; null = 4", gt=0, le=1000, probe=2.0
    )
    multiple_of: Optional[int] = setting(None, "round the width up to this; null = 8", ge=1, le=1_000_000, probe=768)
    bias: bool = setting(False, "biases of the projections", probe=True)

    def gated(self) -> bool:
        """Whether a second, multiplying projection stands beside `up`; it takes 2/3 of the width."""
        return False

    def width(self, d_model: int) -> int:
        """F, the hidden width. 8D/3 rounded up for gated options: 768 → 2048; 4096 by 256 → 11008."""
        if self.d_ff is not None:
            return self.d_ff
        raw = (4.0 if self.mult is None else self.mult) * d_model * (2 / 3 if self.gated() else 1)
        step = 8 if self.multiple_of is None else self.multiple_of
        return step * math.ceil(round(raw / step, 9))

    def activation(self) -> dict[str, Any]:
        """Keyword arguments of the activation, when it takes any."""
        return {}


@dataclass
class GatedSpec(FfnSpec):
    """act(gate) · up."""

    def gated(self) -> bool:
        return True


@option("ffn", "relu", build="lmlab.model.ffn:FFN")
class ReLU(FfnSpec):
    pass


@option("ffn", "relu2", build="lmlab.model.ffn:FFN")
class ReLU2(FfnSpec):
    pass


@option("ffn", "gelu", build="lmlab.model.ffn:FFN")
class GELU(FfnSpec):
    pass


@option("ffn", "gelu_tanh", build="lmlab.model.ffn:FFN")
class GELUTanh(FfnSpec):
    pass


@option("ffn", "silu", build="lmlab.model.ffn:FFN")
class SiLU(FfnSpec):
    beta: float = setting(1.0, "slope inside the sigmoid: 0 = x/2, towards ∞ = relu", ge=0, le=1e6, probe=4.0, since=2)

    def activation(self) -> dict[str, Any]:
        return {"beta": self.beta}


@option("ffn", "glu", build="lmlab.model.ffn:FFN")
class GLU(GatedSpec):
    pass


@option("ffn", "bilinear", build="lmlab.model.ffn:FFN")
class Bilinear(GatedSpec):
    pass


@option("ffn", "reglu", build="lmlab.model.ffn:FFN")
class ReGLU(GatedSpec):
    pass


@option("ffn", "geglu", build="lmlab.model.ffn:FFN")
class GEGLU(GatedSpec):
    approximate: str = setting("none", "tanh = the approximation Gemma uses", choices=("none", "tanh"), probe="tanh")

    def activation(self) -> dict[str, Any]:
        return {"approximate": self.approximate}


@option("ffn", "swiglu", build="lmlab.model.ffn:FFN")
class SwiGLU(GatedSpec):
    pass


# ---------------------------------------------------------------- moe


@dataclass
class MoESpec(Spec):
    """How tokens are routed to experts, each of them an ffn; `none` leaves one ffn for all tokens."""

    def routes(self, layer: int) -> bool:
        """Whether the ffn of this layer is experts behind a router."""
        return False


@option("moe", "none")
class NoMoE(MoESpec):
    pass


@dataclass
class RoutedSpec(MoESpec):
    """What all routers share. A group is the tokens that balance, z-loss and capacity are taken over."""

    n_experts: int = setting(8, "experts that are chosen from (E)", ge=1, le=4096, probe=4)
    d_expert: Optional[int] = setting(
        None, "hidden width of an expert; null = the ffn's", ge=1, le=100_000_000, probe=64
    )
    n_shared: int = setting(0, "experts that every token goes through besides", ge=0, le=1024, probe=1)
    every_n_layers: int = setting(1, "every n-th layer has experts", ge=1, le=10_000, probe=2)
    first_dense_layers: int = setting(0, "layers at the bottom that have none", ge=0, le=10_000, probe=1)
    jitter: float = setting(0.0, "in training the router sees x · u, u in 1 ± jitter", ge=0, lt=1, probe=0.5)
    z_coef: float = setting(0.0, "factor on the mean square of log Σ e^logit", ge=0, le=1e6, probe=1.0)
    group: str = setting(
        "sequence",
        "losses of the router are taken over: sequence, or batch = what the micro-batch holds",
        choices=("sequence", "batch"),
        probe="batch",
    )

    def routes(self, layer: int) -> bool:
        return layer >= self.first_dense_layers and (layer + 1) % self.every_n_layers == 0

    def choices(self) -> int:
        """k, experts a token asks for."""
        return 1

    def computed(self, tokens: int) -> float:
        """Experts whose products are computed per token of a row of so many, shared ones apart: at most, where capacity
        leaves some out."""
        return min(float(self.choices()), self.room(tokens))

    def gathered(self, tokens: int) -> float:
        """Rows that are brought to chosen experts per token, those that find no room among them."""
        return float(self.choices())

    def room(self, tokens: int) -> float:
        """Places at all experts per token of a row of so many."""
        most = self.capacity(tokens)
        return self.n_experts * (1.0 if most is None else most / tokens)

    def capacity(self, tokens: int) -> Optional[int]:
        """Tokens an expert takes from a group of so many: ceil(k·T/E·cf), at most T; (16 of 4, k=2, 1.25) → 10. None =
        all that come."""
        factor: Optional[float] = getattr(self, "capacity_factor", None)
        if factor is None:
            return None
        return min(tokens, math.ceil(round(self.choices() * tokens / self.n_experts * factor, 9)))


@dataclass
class TokenChoiceSpec(RoutedSpec):
    """Each token chooses experts."""

    score: str = setting("softmax", "what logits become", choices=("softmax", "sigmoid"), probe="sigmoid")
    capacity_factor: Optional[float] = setting(
        None, "an expert takes at most ceil(k·T/E·factor) of a row's T tokens; null = all", gt=0, le=1e6, probe=0.5
    )
    overflow: str = setting("drop", "a token that finds an expert full", choices=("drop", "reroute"), probe="reroute")
    priority: str = setting(
        "position", "who comes first to a full expert", choices=("position", "probability"), probe="probability"
    )
    balance: str = setting("aux", "what evens the load", choices=("aux", "aux_free", "none"), probe="none")
    aux_coef: float = setting(0.01, "factor on the balance loss E·Σ f·P", ge=0, le=1e6, probe=10.0)
    bias_step: float = setting(0.001, "aux_free: what a step moves the bias of an expert by", ge=0, le=1e6, probe=0.5)


@option("moe", "topk", build="lmlab.model.moe:MoE")
class TopK(TokenChoiceSpec):
    top_k: int = setting(2, "experts a token goes through (k)", ge=1, le=4096, probe=3)
    norm_topk: bool = setting(True, "divide the weights of a token's experts by their sum", probe=False)
    weight_scale: float = setting(1.0, "factor on the weights of the chosen experts", gt=0, le=1e6, probe=2.5)
    n_expert_groups: int = setting(1, "groups of experts, of which a token may use some", ge=1, le=4096, probe=4)
    n_limited_groups: Optional[int] = setting(
        None, "groups a token may use: those of the largest two scores; null = all", ge=1, le=4096, probe=2
    )

    def choices(self) -> int:
        return self.top_k


@option("moe", "switch", build="lmlab.model.moe:MoE")
class Switch(TokenChoiceSpec):
    capacity_factor: Optional[float] = setting(
        1.25, "an expert takes at most ceil(T/E·factor) of a row's T tokens; null = all", gt=0, le=1e6, probe=0.5
    )


@option("moe", "expert_choice", build="lmlab.model.moe:ExpertChoice")
class ExpertChoice(RoutedSpec):
    capacity_factor: float = setting(
        2.0, "an expert takes ceil(T/E·factor) of a row's T tokens: mean experts per token", gt=0, le=1e6, probe=1.0
    )

    def computed(self, tokens: int) -> float:
        return self.room(tokens)

    def gathered(self, tokens: int) -> float:
        return self.room(tokens)


# ---------------------------------------------------------------- model


@option("model", "decoder")
class Decoder(Spec):
    """The sizes. `model=tiny` is one of the files under conf/model/, all of this one class."""

    n_layers: int = setting(6, "blocks (L)", ge=1, le=10_000, probe=2)
    d_model: int = setting(256, "width of the residual stream (D)", ge=1, le=1_000_000, probe=128)
    n_heads: int = setting(4, "query heads (H)", ge=1, le=10_000, probe=2)
    seq_len: int = setting(256, "tokens per training row (T)", ge=1, le=100_000_000, probe=128)
    tie_embeddings: bool = setting(True, "one matrix for embedding and head", probe=False)
    head_bias: bool = setting(False, "bias of the head, which must not be tied", since=3)
    dropout: float = setting(0.0, "dropout of the embedding and of each residual branch", ge=0, lt=1, probe=0.5)
    embed_scale: str = setting(
        "none", "factor on the token embeddings", choices=("none", "sqrt_d_model"), probe="sqrt_d_model", since=2
    )
    embed_norm: bool = setting(False, "a norm (of group norm) right after the embeddings", probe=True, since=2)
    logit_scale: Optional[float] = setting(
        None,
        "factor on the logits; null = 1, or 1/√d_model where a tied head meets its own token at full length",
        gt=0,
        probe=0.5,
    )
    logit_softcap: Optional[float] = setting(None, "c of c·tanh(logit / c); null = none", gt=0, probe=0.2, since=2)
    z_loss: float = setting(
        0.0, "factor on log² Σ e^logit, which training adds to each token's loss", ge=0, le=1e6, probe=1.0, since=5
    )
    vocab_multiple: int = setting(
        1, "rows of embedding and head are a multiple of it; no more are predicted", ge=1, le=65_536, probe=128, since=5
    )


@dataclass
class Arch:
    """The parts that make a model: what `Transformer` is built from and a checkpoint is read back into."""

    model: Decoder
    norm: Spec
    block: BlockSpec
    pos: Spec
    attn: AttnSpec
    ffn: FfnSpec
    rope_scaling: Spec = field(default_factory=NoScaling)
    moe: MoESpec = field(default_factory=NoMoE)

    def head_dim(self) -> int:
        return self.attn.head_size(self.model.d_model, self.model.n_heads)

    def vocab_rows(self, n_ids: int) -> int:
        """Rows of the embedding and of the head: (50257 ids, multiple 128) → 50304."""
        return -(-n_ids // self.model.vocab_multiple) * self.model.vocab_multiple

    def vocab_size(self, n_ids: int, n_rows: int) -> int:
        """What is predicted by weights of so many rows: the tokenizer's ids where vocab_multiple added rows, else a
        token a row, for weights from elsewhere may have more rows than ids."""
        return n_ids if self.model.vocab_multiple > 1 else n_rows

    def embed_scale(self) -> float:
        """The factor on the token embeddings."""
        return {"none": 1.0, "sqrt_d_model": math.sqrt(self.model.d_model)}[self.model.embed_scale]

    def own_token_at_length(self) -> bool:
        """Whether a tied head meets its own token's embedding at full length: without a final norm, or when the
        embeddings are large against what the blocks add."""
        large = self.embed_scale() > 1 or self.model.embed_norm
        return self.model.tie_embeddings and (large or not self.block.final_norm())

    def logit_scale(self) -> float:
        """The factor on the logits: what is set, else such that the loss starts near ln V."""
        if self.model.logit_scale is not None:
            return self.model.logit_scale
        return 1 / math.sqrt(self.model.d_model) if self.own_token_at_length() else 1.0
