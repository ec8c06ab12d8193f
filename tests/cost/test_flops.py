"""FLOPs per token against published and hand-worked figures."""

from __future__ import annotations

import pytest
import torch

from lmlab.config.load import load
from lmlab.cost.flops import flops_per_token, matmul_parameters, mean_context, palm_flops_per_token
from lmlab.kernels.resolve import resolve
from lmlab.model.transformer import Transformer


def skeleton(*overrides: str, vocab_size: int = 4096) -> tuple[Transformer, object]:
    arch = load(overrides).experiment.arch
    ops = resolve(load([]).experiment.kernels, torch.device("meta"), torch.float32)
    with torch.device("meta"):
        return Transformer(arch, vocab_size, ops), arch


def test_gpt2_small_is_854_7_palm_and_798_0_causal() -> None:
    """GPT-2 124M, T=1024, vocabulary 50,257, in MFLOP per token."""
    model, arch = skeleton("preset=nanogpt", vocab_size=50257)
    assert palm_flops_per_token(model, arch) / 1e6 == pytest.approx(854.7, abs=0.3)
    assert flops_per_token(model, arch) / 1e6 == pytest.approx(798.0, abs=0.3)


def test_a_block_is_twelve_d_squared() -> None:
    model, arch = skeleton("ffn=gelu", "model.n_layers=3", "model.d_model=128", vocab_size=100)
    assert matmul_parameters(model, arch) == 3 * 12 * 128**2 + 100 * 128


def test_lookups_are_free_and_the_head_always_counts() -> None:
    size = ["pos=learned", "model.n_layers=1", "model.d_model=64"]
    tied, untied = (matmul_parameters(*skeleton(*size, f"model.tie_embeddings={t}")) for t in ("true", "false"))
    assert tied == untied


def test_window_counts_attended_pairs() -> None:
    assert mean_context(5, 3) + 0.5 == (1 + 2 + 3 + 3 + 3) / 5
    assert mean_context(256, None) == mean_context(256, 256) == mean_context(256, 1000) == 128


def attention_flops(*overrides: str) -> float:
    """What depends on the context, in FLOP per token."""
    model, arch = skeleton("model.n_layers=2", "model.d_model=64", "model.n_heads=2", "model.seq_len=256", *overrides)
    return flops_per_token(model, arch) - 6 * matmul_parameters(model, arch)


def test_attention_costs_what_its_heads_and_windows_attend_to() -> None:
    plain = attention_flops()
    assert plain == 6 * 2 * 64 * 256  # 6·L·H·C·T
    assert attention_flops("attn=mqa") == plain
    assert attention_flops("attn.weights=shaped") == 2 * plain
    windowed = attention_flops("attn.window=32")
    assert windowed == pytest.approx(plain * mean_context(256, 32) / 128)
    assert attention_flops("attn.window=32", "attn.pattern=SL") == pytest.approx((plain + windowed) / 2)
    # naive: keys 32 + 16 wide, values 32; absorbed: keys 16 + 16, values 16
    assert attention_flops("attn=mla") == pytest.approx(plain * (48 + 32) / 64)
    assert attention_flops("attn=mla", "attn.form=absorbed") == pytest.approx(plain * (32 + 16) / 64)
