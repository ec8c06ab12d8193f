"""Blocks, norms and ffns as modules, against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.ffn import FFN
from lmlab.model.mask import CAUSAL
from lmlab.model.norm import LayerNorm, RMSNorm
from lmlab.registry import OPTIONS
from tests.composed import close, model

OPS = resolve(Auto(), "cpu", torch.float64)
DIMS = Dims(d_model=32, n_heads=4, head_dim=8, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=8)
ACTS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("bias", [True, False])
def test_ffn_is_down_act_up(name, bias):
    ffn, x = FFN(OPTIONS["ffn"][name](bias=bias), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    y, stats = ffn(x, None)
    close(y, F.linear(ACTS[name](F.linear(x, ffn.up.weight, ffn.up.bias)), ffn.down.weight, ffn.down.bias))
    assert stats is None
    assert ffn.up.weight.shape == (128, 32)
    assert (ffn.up.bias is not None) == bias


def test_swiglu_is_down_of_silu_gate_times_up():
    ffn, x = FFN(specs.SwiGLU(), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    close(ffn(x)[0], (F.silu(x @ ffn.gate.weight.T) * (x @ ffn.up.weight.T)) @ ffn.down.weight.T)
    assert ffn.gate.weight.shape == (88, 32)  # 8·32/3 = 85.3, by 8


@pytest.mark.parametrize(
    "norm", [LayerNorm(specs.LayerNorm(), DIMS, OPS), RMSNorm(specs.RMSNorm(), DIMS, OPS)], ids=["layer", "rms"]
)
def test_norm_add_is_sum_then_norm(norm):
    x, branch = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    total, normed = norm.add(x, branch, 1.5)
    close(total, 1.5 * x + branch, 1e-6)
    close(normed, norm(1.5 * x + branch), 1e-6)


def test_norm_add_keeps_the_residual_wide_and_the_output_narrow():
    norm = RMSNorm(specs.RMSNorm(), DIMS, OPS).bfloat16()
    total, normed = norm.add(torch.randn(2, 32), torch.randn(2, 32).bfloat16())
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)


def test_layernorm_bias_is_optional():
    assert LayerNorm(specs.LayerNorm(bias=False), DIMS, OPS).bias is None


def halves(net):
    block = net.blocks[0]
    view = net.views(CAUSAL, torch.arange(5)[None], torch.float64)[0]
    return block, view, torch.randn(1, 5, 64).double()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_prenorm_is_x_plus_f_of_norm_x(norm):
    block, view, x = halves(model(block="prenorm", norm=norm))
    x1 = x + block.attn(block.norm1(x), view)
    close(block(x, view)[0], x1 + block.ffn(block.norm2(x1))[0])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_postnorm_is_norm_of_x_plus_f_of_x(norm):
    block, view, x = halves(model(block="postnorm", norm=norm))
    x1 = block.norm1(x + block.attn(x, view))
    close(block(x, view)[0], block.norm2(x1 + block.ffn(x1)[0]))
