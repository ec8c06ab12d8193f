"""Every preset against `transformers`, composed from its own files with only the sizes changed; float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lmlab.config.load import load
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.transformer import Transformer
from tests.parity.copied import D, H, L, Names, agree, composed, drawn, of_three, third, turned

transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
V, F = 97, 176
COMMON = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=H,
    rms_norm_eps=1e-6,
    attn_implementation="eager",
    pad_token_id=None,
)
LAYER = "model.layers.{}."
LLAMA: Names = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "norm1": LAYER + "input_layernorm",
    "norm2": LAYER + "post_attention_layernorm",
    **{f"attn.{n}": f"{LAYER}self_attn.{n}_proj" for n in "qkvo"},
    **{f"attn.{n}_norm": f"{LAYER}self_attn.{n}_norm" for n in "qk"},
    **{f"ffn.{n}": f"{LAYER}mlp.{n}_proj" for n in ("gate", "up", "down")},
}
BLOOM_LAYER = "transformer.h.{}."
BLOOM: Names = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "norm1": BLOOM_LAYER + "input_layernorm",
    "norm2": BLOOM_LAYER + "post_attention_layernorm",
    "attn.o": BLOOM_LAYER + "self_attention.dense",
    "ffn.up": BLOOM_LAYER + "mlp.dense_h_to_4h",
    "ffn.down": BLOOM_LAYER + "mlp.dense_4h_to_h",
}
NEOX_LAYER = "gpt_neox.layers.{}."
NEOX: Names = {
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "lm_head",
    "norm1": NEOX_LAYER + "input_layernorm",
    "norm2": NEOX_LAYER + "post_attention_layernorm",
    **{f"attn.{n}": (NEOX_LAYER + "attention.query_key_value", of_three(j)) for j, n in enumerate("qkv")},
    "attn.o": NEOX_LAYER + "attention.dense",
    "ffn.up": NEOX_LAYER + "mlp.dense_h_to_4h",
    "ffn.down": NEOX_LAYER + "mlp.dense_4h_to_h",
}
GPT_LAYER = "transformer.h.{}."
GPT2: Names = {
    "embed": "transformer.wte",
    "pos": "transformer.wpe",
    "norm": "transformer.ln_f",
    "norm1": GPT_LAYER + "ln_1",
    "norm2": GPT_LAYER + "ln_2",
    **{f"attn.{n}": (GPT_LAYER + "attn.c_attn", turned(third(j))) for j, n in enumerate("qkv")},
    "attn.o": (GPT_LAYER + "attn.c_proj", turned()),
    "ffn.up": (GPT_LAYER + "mlp.c_fc", turned()),
    "ffn.down": (GPT_LAYER + "mlp.c_proj", turned()),
}
GPTJ: Names = {
    "embed": "transformer.wte",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "norm1": GPT_LAYER + "ln_1",
    **{f"attn.{n}": f"{GPT_LAYER}attn.{n}_proj" for n in "qkv"},
    "attn.o": GPT_LAYER + "attn.out_proj",
    "ffn.up": GPT_LAYER + "mlp.fc_in",
    "ffn.down": GPT_LAYER + "mlp.fc_out",
}


def rope(theta: float = 10000.0, **more: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def test_llama():
    config = transformers.LlamaConfig(**COMMON | {"intermediate_size": 256}, **rope(), tie_word_embeddings=False)
    theirs = drawn(lambda: transformers.LlamaForCausalLM(config))
    agree(composed("preset=llama"), theirs, LLAMA)


def gpt2(activation: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=D,
        n_layer=L,
        n_head=H,
        activation_function=activation,
        attn_implementation="eager",
    )
    return drawn(lambda: transformers.GPT2LMHeadModel(config))


def test_gpt2():
    agree(composed("preset=gpt2"), gpt2("gelu_new"), GPT2)


def test_nanogpt_is_gpt2_with_the_exact_gelu_and_no_biases():
    agree(composed("preset=nanogpt"), gpt2("gelu"), GPT2, without=r"bias$")


def test_gemma():
    config = transformers.GemmaConfig(**COMMON, **rope(), num_key_value_heads=1, head_dim=24)
    theirs = drawn(lambda: transformers.GemmaForCausalLM(config))
    agree(composed("preset=gemma", f"ffn.d_ff={F}", "attn.head_dim=24"), theirs, LLAMA)


@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_gemma2_of_its_parts(backend):
    """softcaps small enough to bite; the window counts the current token; layers alternate, the first has the window"""
    config = transformers.Gemma2Config(
        **COMMON | {"num_hidden_layers": 4},
        **rope(),
        num_key_value_heads=2,
        head_dim=24,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        sliding_window=5,
    )
    theirs = drawn(lambda: transformers.Gemma2ForCausalLM(config))
    names = LLAMA | {
        "norm1_out": LAYER + "post_attention_layernorm",
        "norm2": LAYER + "pre_feedforward_layernorm",
        "norm2_out": LAYER + "post_feedforward_layernorm",
    }
    attn = (
        "attn=gqa attn.n_kv_heads=2 attn.head_dim=24 attn.softcap=5 attn.window=5 attn.pattern=SL "
        f"attn.scale={40**-0.5!r} attn.backend={backend}"
    )
    words = f"preset=gemma block=sandwich model.n_layers=4 model.logit_softcap=10 ffn.d_ff={F} {attn}"
    agree(composed(*words.split()), theirs, names)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads):
    """BLOOM writes √(2/π) with 8 digits, 7e-10 off: that is what the tolerance allows for."""
    config = transformers.BloomConfig(vocab_size=V, hidden_size=16 * heads, n_layer=L, n_head=heads)
    theirs = drawn(lambda: transformers.BloomForCausalLM(config))
    packed = {
        f"attn.{n}": (BLOOM_LAYER + "self_attention.query_key_value", of_three(j, heads)) for j, n in enumerate("qkv")
    }
    ours = composed("preset=bloom", f"model.d_model={16 * heads}", f"model.n_heads={heads}")
    agree(ours, theirs, BLOOM | packed, tol=2e-9)


def test_neox():
    config = transformers.GPTNeoXConfig(
        **COMMON | {"intermediate_size": 4 * D}, **rope(partial_rotary_factor=0.25), layer_norm_eps=1e-5
    )
    theirs = drawn(lambda: transformers.GPTNeoXForCausalLM(config))
    agree(composed("preset=neox"), theirs, NEOX)


def test_gptj_of_its_parts():
    """One norm for both branches, interleaved pairs on half of each head; its head has a bias, ours has none."""
    config = transformers.GPTJConfig(
        vocab_size=V,
        n_positions=16,
        n_embd=D,
        n_layer=L,
        n_head=H,
        rotary_dim=8,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    theirs = drawn(lambda: transformers.GPTJForCausalLM(config))
    words = (
        "norm=layernorm block=parallel pos.pairing=interleaved pos.fraction=0.5 ffn=gelu_tanh ffn.bias=true "
        "model.tie_embeddings=false"
    )
    agree(composed(*words.split()), theirs, GPTJ, without=r"lm_head\.bias")


def test_olmo2():
    config = transformers.Olmo2Config(
        **COMMON | {"intermediate_size": 256}, **rope(500000.0), tie_word_embeddings=False
    )
    theirs = drawn(lambda: transformers.Olmo2ForCausalLM(config))
    names = LLAMA | {"norm1": LAYER + "post_attention_layernorm", "norm2": LAYER + "post_feedforward_layernorm"}
    agree(composed("preset=olmo2"), theirs, names)


def test_qwen3():
    config = transformers.Qwen3Config(
        **COMMON | {"intermediate_size": 3 * D},
        **rope(1000000.0),
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
    )
    theirs = drawn(lambda: transformers.Qwen3ForCausalLM(config))
    agree(composed("preset=qwen3", "attn.head_dim=24"), theirs, LLAMA)


class Vaswani(nn.Module):
    """torch's own post-norm layers between √D-scaled embeddings with sinusoids and a tied head, logits over √D."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = dict(dim_feedforward=4 * D, dropout=0.0, activation="relu", batch_first=True, norm_first=False)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(D, H, **layer) for _ in range(L))

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        table = [
            [(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / D)) for c in range(D)] for p in range(T)
        ]
        x = self.embed(tokens) * math.sqrt(D) + torch.tensor(table, dtype=torch.float64)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=future)
        return x @ self.embed.weight.T / math.sqrt(D)


def test_vanilla():
    names: Names = {
        "embed": "embed",
        **{f"attn.{n}": ("layers.{}.self_attn.in_proj_", third(j)) for j, n in enumerate("qkv")},
        "attn.o": "layers.{}.self_attn.out_proj",
        "norm1": "layers.{}.norm1",
        "norm2": "layers.{}.norm2",
        "ffn.up": "layers.{}.linear1",
        "ffn.down": "layers.{}.linear2",
    }
    agree(composed("preset=vanilla"), drawn(Vaswani), names)


PUBLISHED = {  # vocabulary and parameters of GPT-2, LLaMA 7B, Gemma 2B, BLOOM 560M, Pythia 160M, OLMo 2 7B, Qwen3 0.6B
    "gpt2": (50257, 124_439_808),
    "llama": (32000, 6_738_415_616),
    "gemma": (256000, 2_506_172_416),
    "bloom": (250880, 559_214_592),
    "neox": (50304, 162_322_944),
    "olmo2": (100352, 7_298_617_344),
    "qwen3": (151936, 596_049_920),
}


@pytest.mark.parametrize("preset", sorted(PUBLISHED))
def test_unchanged_sizes_have_the_published_number_of_parameters(preset):
    vocab, wanted = PUBLISHED[preset]
    with torch.device("meta"):
        net = Transformer(load([f"preset={preset}"]).experiment.arch, vocab, resolve(Auto(), "cpu", torch.float32))
    assert sum(p.numel() for p in net.parameters()) == wanted
