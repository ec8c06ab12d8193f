"""RMSNorm and LayerNorm against torch and the formulas; the fused forms against the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels.norm import add, fused_layer_norm, fused_rms_norm, layer_norm, rms_norm
from tests.composed import close

RMS = [pytest.param(rms_norm, id="plain"), pytest.param(fused_rms_norm, id="fused")]
LAYER = [pytest.param(layer_norm, id="plain"), pytest.param(fused_layer_norm, id="fused")]


def sample(dtype: torch.dtype, width: int = 48) -> list[torch.Tensor]:
    x, weight, bias, grad = (
        torch.randn(3, 37, width),
        torch.rand(width) + 0.5,
        torch.randn(width),
        torch.randn(3, 37, width),
    )
    return [t.to(dtype).requires_grad_(i < 3) for i, t in enumerate((x, weight, bias, grad))]


@pytest.mark.parametrize("norm", RMS)
def test_rms_norm_is_torchs_in_float64(norm):
    x, weight, _, grad = sample(torch.float64)
    ours, theirs = norm(x, weight, 1e-6), F.rms_norm(x, weight.shape, weight, 1e-6)
    close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(theirs, (x, weight), grad), strict=True
    ):
        close(a, b)


@pytest.mark.parametrize("norm", LAYER)
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_torchs_in_float64(norm, biased):
    x, weight, bias, grad = sample(torch.float64)
    inputs = (x, weight, bias) if biased else (x, weight)
    ours = norm(x, weight, bias if biased else None, 1e-5)
    theirs = F.layer_norm(x, weight.shape, weight, bias if biased else None, 1e-5)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"])
def test_fused_gradients_agree_with_float64_per_tensor(kind, dtype, tol):
    x, weight, bias, grad = sample(dtype, 256)

    def gradients(norm, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        args = leaves[:2] if kind == "rms" else leaves
        return torch.autograd.grad(norm(*args, 1e-6), args, grad.to(leaves[0].dtype))

    fused, plain = (fused_rms_norm, rms_norm) if kind == "rms" else (fused_layer_norm, layer_norm)
    exact = gradients(plain, *(t.double() for t in (x, weight, bias)))
    for got, want in zip(gradients(fused, x, weight, bias), exact, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < tol


@pytest.mark.parametrize("norm", RMS)
def test_rms_norm_at_300_in_fp16_is_one(norm):
    assert torch.equal(norm(torch.full((2, 64), 300.0).half(), torch.ones(64).half(), 1e-6), torch.ones(2, 64).half())


@pytest.mark.parametrize("norm", RMS)
def test_rms_norm_ignores_scale_but_not_shift(norm):
    x, weight = torch.randn(4, 32).double(), torch.ones(32).double()
    close(norm(7 * x, weight, 1e-12), norm(x, weight, 1e-12), 1e-9)
    assert (norm(x + 1, weight, 1e-6) - norm(x, weight, 1e-6)).abs().max() > 0.1
    centred = x - x.mean(-1, keepdim=True)
    close(norm(centred, weight, 1e-6), F.layer_norm(centred, (32,), None, None, 1e-6))


@pytest.mark.parametrize("norm", [*RMS, *LAYER])
def test_the_output_has_the_weights_dtype(norm):
    args = (torch.ones(8).bfloat16(),) if norm in (rms_norm, fused_rms_norm) else (torch.ones(8).bfloat16(), None)
    assert norm(torch.randn(2, 8), *args, 1e-6).dtype == torch.bfloat16


def test_the_sum_keeps_the_residuals_dtype():
    residual, branch = torch.randn(3), torch.randn(3).bfloat16()
    assert add(residual, branch).dtype == torch.float32
    assert add(branch, residual).dtype == torch.bfloat16
    close(add(residual, branch.float(), 2.0), 2 * residual + branch.float(), 1e-6)
