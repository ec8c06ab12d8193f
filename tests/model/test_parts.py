"""Blocks, norms and ffns as modules, against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels import activation
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.ffn import FFN
from lmlab.model.mask import CAUSAL
from lmlab.model.norm import BatchNorm, DyT, LayerNorm, NoNorm, RMSNorm
from lmlab.registry import OPTIONS
from lmlab.train.twin import Twin
from tests.composed import close, model, rows

OPS = resolve(Auto(), "cpu", torch.float64)
DIMS = Dims(d_model=32, n_heads=4, head_dim=8, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=8)
ACTS = {
    "relu": F.relu,
    "relu2": lambda x: x.clamp_min(0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATES = {
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "bilinear": lambda x: x,
    "reglu": lambda x: x.clamp_min(0),
    "geglu": ACTS["gelu"],
    "swiglu": ACTS["silu"],
}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("bias", [True, False])
def test_ffn_is_down_act_up(name, bias):
    ffn, x = FFN(OPTIONS["ffn"][name](bias=bias), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    y, stats = ffn(x, None)
    close(y, F.linear(ACTS[name](F.linear(x, ffn.up.weight, ffn.up.bias)), ffn.down.weight, ffn.down.bias))
    assert stats is None
    assert ffn.up.weight.shape == (128, 32)
    assert (ffn.up.bias is not None) == bias


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_ffn_is_down_of_act_gate_times_up(name, bias):
    ffn, x = FFN(OPTIONS["ffn"][name](bias=bias), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    hidden = GATES[name](F.linear(x, ffn.gate.weight, ffn.gate.bias)) * F.linear(x, ffn.up.weight, ffn.up.bias)
    close(ffn(x)[0], F.linear(hidden, ffn.down.weight, ffn.down.bias))
    assert ffn.gate.weight.shape == (88, 32)  # 8·32/3 = 85.3, by 8


def test_every_ffn_is_covered_here():
    assert {*ACTS, *GATES} == set(OPTIONS["ffn"])


def test_worked_values_of_activations():
    one = torch.ones(())
    assert F.gelu(one).item() == pytest.approx(0.841345, abs=5e-7)
    assert activation.gelu_tanh(one).item() == pytest.approx(0.841192, abs=5e-7)
    x = torch.linspace(-6, 6, 100001).double()
    for act, at, low in ((F.gelu, -0.75, -0.17), (F.silu, -1.278, -0.278)):
        y = act(x)
        assert y.min().item() == pytest.approx(low, abs=1e-3)
        assert x[y.argmin()].item() == pytest.approx(at, abs=5e-3)


def test_swish_goes_from_half_of_x_to_relu():
    x = torch.randn(50).double()
    close(activation.silu(x, 0.0), x / 2)
    close(activation.silu(x, 1.0), F.silu(x))
    close(activation.silu(x, 1e6), F.relu(x), 1e-5)
    close(activation.silu(x, 1.7), x * torch.sigmoid(1.7 * x))


def test_geglu_by_the_tanh_approximation_is_gemmas():
    ffn, x = FFN(specs.GEGLU(approximate="tanh"), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    hidden = F.gelu(ffn.gate(x), approximate="tanh") * ffn.up(x)
    close(ffn(x)[0], hidden @ ffn.down.weight.T)
    assert not torch.equal(ffn(x)[0], FFN(specs.GEGLU(), DIMS, OPS).double()(x)[0])


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


NORMS = list(OPTIONS["norm"])


@pytest.mark.parametrize("norm", NORMS)
def test_prenorm_is_x_plus_f_of_norm_x(norm):
    block, view, x = halves(model(block="prenorm", norm=norm))
    x1 = x + block.attn(block.norm1(x), view)
    close(block(x, view)[0], x1 + block.ffn(block.norm2(x1))[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("name", "alpha"), [("postnorm", 1.0), ("deepnorm", 2**0.5)])
def test_postnorm_and_deepnorm_are_norm_of_alpha_x_plus_f_of_x(name, alpha, norm):
    block, view, x = halves(model(block=name, norm=norm))  # two layers: (2·2)^(1/4) = √2
    x1 = block.norm1(alpha * x + block.attn(x, view))
    close(block(x, view)[0], block.norm2(alpha * x1 + block.ffn(x1)[0]))


@pytest.mark.parametrize("norm", NORMS)
def test_sandwich_is_x_plus_norm_of_f_of_norm_x(norm):
    block, view, x = halves(model(block="sandwich", norm=norm))
    x1 = x + block.norm1_out(block.attn(block.norm1(x), view))
    close(block(x, view)[0], x1 + block.norm2_out(block.ffn(block.norm2(x1))[0]))


@pytest.mark.parametrize("norm", NORMS)
def test_reordered_is_x_plus_norm_of_f_of_x(norm):
    block, view, x = halves(model(block="reordered", norm=norm))
    x1 = x + block.norm1(block.attn(x, view))
    close(block(x, view)[0], x1 + block.norm2(block.ffn(x1)[0]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n_norms", [1, 2])
def test_parallel_adds_both_to_x(n_norms, norm):
    block, view, x = halves(model(block=("parallel", {"n_norms": n_norms}), norm=norm))
    norm2 = block.norm1 if n_norms == 1 else block.norm2
    if n_norms == 2:
        for p in block.norm2.parameters():
            torch.nn.init.normal_(p)
    assert hasattr(block, "norm2") == (n_norms == 2)
    close(block(x, view)[0], x + block.attn(block.norm1(x), view) + block.ffn(norm2(x))[0])


@pytest.mark.parametrize(
    ("n_layers", "alpha", "beta"), [(4, 1.68179, 0.42045), (12, 2.21336, 0.31947), (24, 2.63215, 0.26864)]
)
def test_deepnorm_factors(n_layers, alpha, beta):
    assert specs.DeepNorm().factors(n_layers) == pytest.approx((alpha, beta), abs=5e-6)
    assert specs.DeepNorm(alpha=1.5).factors(n_layers)[0] == 1.5
    assert specs.DeepNorm(beta=0.5).factors(n_layers)[1] == 0.5


def test_only_blocks_that_end_in_a_norm_have_no_final_one():
    without = {name for name in OPTIONS["block"] if "norm.weight" not in model(block=name).state_dict()}
    assert without == {"postnorm", "deepnorm"}


# ---------------------------------------------------------------- norms


def batchnorm(**fields):
    norm = BatchNorm(specs.BatchNorm(**fields), DIMS, OPS).double()
    with torch.no_grad():
        norm.weight.normal_()
    return norm


@pytest.mark.parametrize("padded", [False, True])
def test_batchnorm_is_torchs_over_the_valid_tokens(padded):
    ours, theirs = batchnorm(), torch.nn.BatchNorm1d(32).double()
    theirs.weight.data.copy_(ours.weight)
    valid = torch.tensor([[False, True, True, True], [True] * 4]) if padded else None
    keep = slice(None) if valid is None else valid
    for _ in range(3):
        x = 3 * torch.randn(2, 4, 32).double() + 1
        want = theirs(x[keep].reshape(-1, 32))
        close(ours(x, valid)[keep].reshape(-1, 32), want)
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    close(ours.eval()(x)[keep].reshape(-1, 32), theirs.eval()(x[keep].reshape(-1, 32)))


def test_batchnorm_in_evaluation_moves_nothing_and_is_per_token():
    norm = batchnorm().eval()
    x = torch.randn(2, 4, 32).double()
    close(norm(x)[:, :2], norm(x[:, :2]))
    assert torch.equal(norm.running_mean, torch.zeros(32).double())


def test_batchnorm_keeps_wide_statistics_in_a_bf16_twin():
    twin = Twin(model(torch.float32, norm="batchnorm").train(), torch.bfloat16)
    tokens, positions = rows()
    twin.model.train()
    twin.model(tokens, positions, targets_BT=tokens).loss.backward()
    twin.zero_grads()
    twin.collect()
    moved = [b for n, b in twin.model.named_buffers() if n.endswith("running_mean")]
    assert len(moved) == 5
    assert all(b.dtype == torch.float32 and b.abs().sum() > 0 for b in moved)


def test_dyt_is_a_scaled_tanh():
    norm, x = DyT(specs.DyT(alpha=0.7), DIMS, OPS).double(), torch.randn(2, 3, 32).double()
    with torch.no_grad():
        norm.alpha.fill_(0.7)
        norm.weight.normal_()
        norm.bias.normal_()
    close(norm(x), norm.weight * torch.tanh(0.7 * x) + norm.bias)
    assert model(norm=("dyt", {"alpha": 0.7})).norm.alpha.item() == pytest.approx(0.7)
    assert DyT(specs.DyT(bias=False), DIMS, OPS).bias is None


def test_rmsnorm_by_1_plus_weight_is_gemmas():
    norm, x = RMSNorm(specs.RMSNorm(offset=1), DIMS, OPS), 3 * torch.randn(2, 3, 32)
    with torch.no_grad():
        norm.weight.normal_()
    want = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight.float())
    close(norm(x), want, 1e-6)
    narrow = RMSNorm(specs.RMSNorm(offset=1), DIMS, OPS).bfloat16()
    narrow.load_state_dict(norm.state_dict())
    w = 1 + narrow.weight.float()  # before the cast: 1 + w in bf16 would lose w
    x16 = x.bfloat16().float()
    exact = x16 * torch.rsqrt(x16.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    assert torch.equal(narrow(x.bfloat16()), exact.bfloat16())
    assert model(norm=("rmsnorm", {"offset": 1})).norm.weight.abs().max() == 0


def test_no_norm_is_x():
    x = torch.randn(2, 3, 32)
    assert NoNorm(specs.NoNorm(), DIMS, OPS)(x) is x
