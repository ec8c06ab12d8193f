"""Whole models against `transformers`, with weights copied by hand: GPT-2 and Llama, logits and loss in float64."""

from __future__ import annotations

import pytest
import torch

from tests.composed import close, model, rows

transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 4, "seq_len": 16}


def put(ours: torch.nn.Module, theirs: torch.nn.Module, names: dict[str, str], transposed: bool = False) -> None:
    with torch.no_grad():
        for own, other in names.items():
            mine, its = ours.get_submodule(own), theirs.get_submodule(other)
            for kind, p in mine.named_parameters():
                value = getattr(its, kind)
                p.copy_(value.T if transposed and value.ndim == 2 else value)


def randomised(net: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3) if p.ndim > 1 else p.uniform_(0.5, 1.5)
    return net.double().eval()


def agree(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    tokens, positions = rows(2, 16)
    with torch.no_grad():
        close(ours(tokens, positions).logits_BTV, theirs(tokens).logits, 1e-9)
        nats = theirs(tokens, labels=tokens).loss
        shifted = ours(tokens[:, :-1], positions[:, :-1], targets_BT=tokens[:, 1:]).loss / (2 * 15)
    close(shifted, nats, 1e-5 if nats.dtype == torch.float32 else 1e-9)


def test_gpt2():
    theirs = randomised(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=97, n_positions=16, n_embd=64, n_layer=2, n_head=4, attn_implementation="eager"
            )
        )
    )
    attn = ("mha", {"bias_qkv": True, "bias_o": True})
    ours = model(norm="layernorm", pos="learned", attn=attn, ffn=("gelu_tanh", {"bias": True}), model=SIZES)
    put(ours, theirs, {"embed": "transformer.wte", "pos": "transformer.wpe", "norm": "transformer.ln_f"})
    for i, block in enumerate(ours.blocks):
        its = theirs.transformer.h[i]
        put(block, its, {"norm1": "ln_1", "norm2": "ln_2"})
        put(block, its, {"attn.o": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}, transposed=True)
        with torch.no_grad():
            for j, name in enumerate("qkv"):
                part = getattr(block.attn, name)
                part.weight.copy_(its.attn.c_attn.weight[:, 64 * j : 64 * (j + 1)].T)
                part.bias.copy_(its.attn.c_attn.bias[64 * j : 64 * (j + 1)])
    agree(ours, theirs)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_llama(n_kv_heads, head_dim):
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    theirs = randomised(transformers.LlamaForCausalLM(config))
    attn = ("gqa", {"n_kv_heads": n_kv_heads, "head_dim": head_dim})
    ours = model(attn=attn, model=SIZES | {"tie_embeddings": False})
    put(ours, theirs, {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
    for i, block in enumerate(ours.blocks):
        its = theirs.model.layers[i]
        put(block, its, {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"})
        put(block.attn, its.self_attn, {name: f"{name}_proj" for name in "qkvo"})
        put(block.ffn, its.mlp, {name: f"{name}_proj" for name in ("gate", "up", "down")})
    # transformers makes cos and sin in fp32 and keeps a few statistics there
    tokens, positions = rows(2, 16)
    with torch.no_grad():
        close(ours(tokens, positions).logits_BTV, theirs(tokens).logits.double(), 2e-5)
