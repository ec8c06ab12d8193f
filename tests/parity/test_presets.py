"""Every preset against `transformers`, composed from its own files with only the sizes changed; float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lmlab.config.load import load
from lmlab.interop.families import FAMILIES
from lmlab.interop.llamas import ATTENTION, ENDS, FFN, LAYER, OURS
from lmlab.interop.names import Layout, Row, rows
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer
from tests.parity.copied import D, H, L, agree, composed, drawn

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
LLAMA = FAMILIES["llama"].table


def gpt_j(arch: Arch) -> list[Row]:
    layer = {"norm1": "ln_1", "attn.o": "attn.out_proj", "ffn.up": "mlp.fc_in", "ffn.down": "mlp.fc_out"}
    layer |= {f"attn.{n}": f"attn.{n}_proj" for n in "qkv"}
    ends = rows("transformer.", {"embed": "wte", "norm": "ln_f"})
    return [*ends, Row("lm_head", ("head",)), *rows("transformer.h.{}.", layer, OURS)]


def gemma2(arch: Arch) -> list[Row]:
    norms = {"norm1": "input_layernorm", "norm1_out": "post_attention_layernorm"}
    norms |= {"norm2": "pre_feedforward_layernorm", "norm2_out": "post_feedforward_layernorm"}
    return [*ENDS, *rows(LAYER, ATTENTION | FFN | norms, OURS)]


def vaswani(arch: Arch) -> list[Row]:
    layer = {"attn.o": "self_attn.out_proj", "norm1": "norm1", "norm2": "norm2", "ffn.up": "linear1"}
    packed = Row("layers.{}.self_attn.in_proj", tuple(f"{OURS}attn.{n}" for n in "qkv"), THIRDS)
    return [Row("embed", ("embed",)), packed, *rows("layers.{}.", layer | {"ffn.down": "linear2"}, OURS)]


THIRDS = Layout(lambda w: list(w.tensor_split(3, 0)), lambda ws: torch.cat(list(ws)))


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
    agree(composed("preset=gpt2"), gpt2("gelu_new"), FAMILIES["gpt2"].table)


def test_nanogpt_is_gpt2_with_the_exact_gelu_and_no_biases():
    agree(composed("preset=nanogpt"), gpt2("gelu"), FAMILIES["gpt2"].table, without=r"bias$")


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
    attn = (
        "attn=gqa attn.n_kv_heads=2 attn.head_dim=24 attn.softcap=5 attn.window=5 attn.pattern=SL "
        f"attn.scale={40**-0.5!r} attn.backend={backend}"
    )
    words = f"preset=gemma block=sandwich model.n_layers=4 model.logit_softcap=10 ffn.d_ff={F} {attn}"
    agree(composed(*words.split()), theirs, gemma2)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads):
    """BLOOM writes √(2/π) with 8 digits, 7e-10 off: that is what the tolerance allows for."""
    config = transformers.BloomConfig(vocab_size=V, hidden_size=16 * heads, n_layer=L, n_head=heads)
    theirs = drawn(lambda: transformers.BloomForCausalLM(config))
    ours = composed("preset=bloom", f"model.d_model={16 * heads}", f"model.n_heads={heads}")
    agree(ours, theirs, FAMILIES["bloom"].table, tol=2e-9)


def test_neox():
    config = transformers.GPTNeoXConfig(
        **COMMON | {"intermediate_size": 4 * D}, **rope(partial_rotary_factor=0.25), layer_norm_eps=1e-5
    )
    theirs = drawn(lambda: transformers.GPTNeoXForCausalLM(config))
    agree(composed("preset=neox"), theirs, FAMILIES["gpt_neox"].table)


def test_gptj_of_its_parts():
    """One norm for both branches, interleaved pairs on half of each head, a bias of the head."""
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
        "model.tie_embeddings=false model.head_bias=true"
    )
    agree(composed(*words.split()), theirs, gpt_j)


def test_olmo2():
    config = transformers.Olmo2Config(
        **COMMON | {"intermediate_size": 256}, **rope(500000.0), tie_word_embeddings=False
    )
    theirs = drawn(lambda: transformers.Olmo2ForCausalLM(config))
    agree(composed("preset=olmo2"), theirs, FAMILIES["olmo2"].table)


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


MOE = dict(experts_implementation="eager")


def test_mixtral():
    config = transformers.MixtralConfig(
        **COMMON | MOE | {"intermediate_size": 224, "rms_norm_eps": 1e-5}, **rope(1e6), num_key_value_heads=1
    )
    agree(composed("preset=mixtral"), drawn(lambda: transformers.MixtralForCausalLM(config)), FAMILIES["mixtral"].table)


def test_olmoe():
    sizes = COMMON | MOE | {"intermediate_size": 32, "rms_norm_eps": 1e-5}
    config = transformers.OlmoeConfig(**sizes, **rope(), num_experts=64, num_experts_per_tok=8)
    agree(composed("preset=olmoe"), drawn(lambda: transformers.OlmoeForCausalLM(config)), FAMILIES["olmoe"].table)


def test_deepseek():
    """Its own choice of experts, with widths and a number of them that a test can hold."""
    config = transformers.DeepseekV3Config(
        **COMMON | MOE | dict(num_key_value_heads=H, n_routed_experts=32, first_k_dense_replace=1),
        **dict(moe_intermediate_size=24, kv_lora_rank=24, q_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=12),
        v_head_dim=20,
        **rope(),
    )
    small = f"moe.n_experts=32 moe.d_expert=24 moe.first_dense_layers=1 ffn.d_ff={F} attn.kv_rank=24 attn.q_rank=28"
    ours = composed("preset=deepseek", *small.split(), "attn.rope_dim=8", "attn.nope_dim=12", "attn.v_dim=20")
    agree(ours, drawn(lambda: transformers.DeepseekV3ForCausalLM(config)), FAMILIES["deepseek_v3"].table)


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
    agree(composed("preset=vanilla"), drawn(Vaswani), vaswani)


PUBLISHED = {  # vocabulary and parameters of GPT-2, LLaMA 7B, Gemma 2B, BLOOM 560M, Pythia 160M, OLMo 2 7B, Qwen3 0.6B
    # Mixtral 8x7B, OLMoE 1B-7B, DeepSeek-V3 without its biases of the choice and its layer of multi-token prediction
    "mixtral": (32000, 46_702_792_704),
    "olmoe": (50304, 6_919_161_856),
    "deepseek": (129280, 671_026_404_352),
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
