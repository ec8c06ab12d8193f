"""Models of other libraries at a given shape, each as its own documentation has it trained: net(tokens, targets) ->
mean loss. All tie the head, use SDPA, and have Llama's parts: RMSNorm, RoPE, grouped heads, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.bench.nanogpt import NanoGPT
from lmlab.bench.shapes import Shape


class Called(nn.Module):
    """A library's model, and how its loss is asked for."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.loss(self.net, tokens_BT, targets_BT)


def transformers_llama(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.V,
        hidden_size=shape.D,
        intermediate_size=shape.F,
        num_hidden_layers=shape.L,
        num_attention_heads=shape.H,
        num_key_value_heads=shape.K,
        head_dim=shape.C,
        max_position_embeddings=shape.T,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Called(LlamaForCausalLM(config), lambda net, x, y: net(x, labels=y, shift_labels=y).loss)


def litgpt(shape: Shape) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        name="bench",
        block_size=shape.T,
        vocab_size=shape.V,
        padded_vocab_size=shape.V,
        n_layer=shape.L,
        n_head=shape.H,
        n_query_groups=shape.K,
        n_embd=shape.D,
        head_size=shape.C,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.F,
    )
    net = GPT(config)
    net.apply(net._init_weights)
    net.lm_head.weight = net.transformer.wte.weight
    return Called(net, lambda net, x, y: chunked_cross_entropy(net(x), y))


def x_transformers(shape: Shape) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.D,
        depth=shape.L,
        heads=shape.H,
        attn_dim_head=shape.C,
        attn_kv_heads=shape.K,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=shape.C,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.F / shape.D,
    )
    net = TransformerWrapper(
        num_tokens=shape.V, max_seq_len=shape.T, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True
    )
    return Called(net, lambda net, x, y: F.cross_entropy(net(x).transpose(1, 2), y))


BY_NAME: dict[str, Callable[[Shape], nn.Module]] = {
    "nanoGPT": NanoGPT,
    "transformers": transformers_llama,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}
PACKAGES = {"nanoGPT": "torch", "transformers": "transformers", "litgpt": "litgpt", "x-transformers": "x_transformers"}
