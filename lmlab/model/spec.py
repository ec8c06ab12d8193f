"""Every architectural choice on one page, torch-free: norm, block, pos, attn, ffn, model.

A class is one option (`norm=rmsnorm`), its fields are what a user may set (`norm.eps=1e-5`). Widths that follow from
other fields (head size, kv heads, ffn width) are methods here, so that the model, the checks and the cost agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from lmlab.registry import Spec, option, setting

# ---------------------------------------------------------------- norm


@option("norm", "layernorm", build="lmlab.model.norm:LayerNorm")
class LayerNorm(Spec):
    eps: float = setting(1e-5, "added to the variance", gt=0, probe=0.1)
    bias: bool = setting(True, "learn a shift", probe=False)


@option("norm", "rmsnorm", build="lmlab.model.norm:RMSNorm")
class RMSNorm(Spec):
    eps: float = setting(1e-6, "added to the mean square", gt=0, probe=0.1)


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


# ---------------------------------------------------------------- pos


@option("pos", "none", build="lmlab.model.pos:NoPosition")
class NoPosition(Spec):
    pass


@option("pos", "sinusoidal", build="lmlab.model.pos:Sinusoidal")
class Sinusoidal(Spec):
    theta: float = setting(10000.0, "base of the wavelengths", gt=1, probe=100.0)


@option("pos", "learned", build="lmlab.model.pos:Learned")
class Learned(Spec):
    max_len: Optional[int] = setting(None, "rows of the table; null = model.seq_len", ge=1, probe=512)


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


# ---------------------------------------------------------------- attn


@dataclass
class AttnSpec(Spec):
    """What all softmax attentions share."""

    head_dim: Optional[int] = setting(None, "channels per head; null = d_model / n_heads", ge=1, probe=32)
    window: Optional[int] = setting(None, "keys seen, counting the token itself; null = all", ge=1, probe=8)
    qk_norm: str = setting(
        "none", "RMSNorm of q and k: one weight per head channel", choices=("none", "head"), probe="head"
    )
    bias_qkv: bool = setting(False, "biases of the q, k, v projections", probe=True)
    bias_o: bool = setting(False, "bias of the output projection", probe=True)
    dropout: float = setting(0.0, "dropout of the attention probabilities", ge=0, lt=1, probe=0.5)
    backend: str = setting("auto", "who computes attention", choices=("auto", "sdpa", "dense"), probe="dense")

    def head_size(self, d_model: int, n_heads: int) -> int:
        """C, channels per head."""
        return self.head_dim if self.head_dim is not None else d_model // n_heads

    def kv_heads(self, n_heads: int) -> int:
        """K, the number of key/value heads."""
        return n_heads


@option("attn", "mha", build="lmlab.model.attn:Attention")
class MHA(AttnSpec):
    pass


@option("attn", "mqa", build="lmlab.model.attn:Attention")
class MQA(AttnSpec):
    def kv_heads(self, n_heads: int) -> int:
        return 1


@option("attn", "gqa", build="lmlab.model.attn:Attention")
class GQA(AttnSpec):
    n_kv_heads: Optional[int] = setting(None, "key/value heads; null = n_heads / 2", ge=1, probe=1)

    def kv_heads(self, n_heads: int) -> int:
        return self.n_kv_heads if self.n_kv_heads is not None else max(1, n_heads // 2)


# ---------------------------------------------------------------- ffn


@dataclass
class FfnSpec(Spec):
    """Width: `d_ff` as it is, or `mult`·d_model (null = 4) rounded up to `multiple_of` (null = 8)."""

    d_ff: Optional[int] = setting(None, "hidden width; null = from mult", ge=1, probe=256)
    mult: Optional[float] = setting(None, "hidden width over d_model before the gated 2/3; null = 4", gt=0, probe=2.0)
    multiple_of: Optional[int] = setting(None, "round the width up to this; null = 8", ge=1, probe=512)
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


@option("ffn", "relu", build="lmlab.model.ffn:FFN")
class ReLU(FfnSpec):
    pass


@option("ffn", "gelu", build="lmlab.model.ffn:FFN")
class GELU(FfnSpec):
    pass


@option("ffn", "gelu_tanh", build="lmlab.model.ffn:FFN")
class GELUTanh(FfnSpec):
    pass


@option("ffn", "silu", build="lmlab.model.ffn:FFN")
class SiLU(FfnSpec):
    pass


@option("ffn", "swiglu", build="lmlab.model.ffn:FFN")
class SwiGLU(FfnSpec):
    def gated(self) -> bool:
        return True


# ---------------------------------------------------------------- model


@option("model", "decoder")
class Decoder(Spec):
    """The sizes. `model=tiny` is one of the files under conf/model/, all of this one class."""

    n_layers: int = setting(6, "blocks (L)", ge=1, le=10_000, probe=2)
    d_model: int = setting(256, "width of the residual stream (D)", ge=1, le=1_000_000, probe=128)
    n_heads: int = setting(4, "query heads (H)", ge=1, le=10_000, probe=2)
    seq_len: int = setting(256, "tokens per training row (T)", ge=1, le=100_000_000, probe=128)
    tie_embeddings: bool = setting(True, "one matrix for embedding and head", probe=False)
    dropout: float = setting(0.0, "dropout of the embedding and of each residual branch", ge=0, lt=1, probe=0.5)
    logit_scale: Optional[float] = setting(
        None, "factor on the logits; null = 1, or 1/√d_model for a tied postnorm model", gt=0, probe=0.5
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

    def head_dim(self) -> int:
        return self.attn.head_size(self.model.d_model, self.model.n_heads)

    def logit_scale(self) -> float:
        """The factor on the logits. Without a final norm a tied head would meet its own token at full length."""
        if self.model.logit_scale is not None:
            return self.model.logit_scale
        return 1 / math.sqrt(self.model.d_model) if self.model.tie_embeddings and not self.block.final_norm() else 1.0
