"""RMSNorm and LayerNorm against torch and the formulas; the fused forms against the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels.norm import _RMS, add, fused_layer_norm, fused_rms_norm, layer_norm, rms_norm, torch_rms_norm
from tests.composed import close

RMS = [pytest.param(rms_norm, id="plain"), pytest.param(fused_rms_norm, id="fused")]
LAYER_FORMS = (layer_norm, fused_layer_norm)
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


@pytest.mark.parametrize("norm", [*RMS, *LAYER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gradients_over_many_rows_agree_with_float64(norm, dtype):
    """Sums over 4096 rows: a bf16 sum sticks at 256 times its terms."""
    x, grad = torch.randn(4096, 64).to(dtype), (1 + torch.randn(4096, 64)).to(dtype)
    parameters = [torch.rand(64).add(0.5).to(dtype), torch.randn(64).to(dtype)][: 2 if norm in LAYER_FORMS else 1]

    def gradients(form, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(form(*leaves, 1e-5), leaves, grad.to(leaves[0].dtype))

    exact = gradients(layer_norm if norm in LAYER_FORMS else rms_norm, *(t.double() for t in (x, *parameters)))
    for got, want in zip(gradients(norm, x, *parameters), exact, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("form", [rms_norm, _RMS.apply, torch_rms_norm], ids=["plain", "cpu", "accelerator"])
def test_the_weight_of_rms_norm_multiplies_after_the_cast(form):
    x, weight = torch.randn(64, 48).bfloat16(), (torch.rand(48) + 0.5).bfloat16()
    unit = form(x, torch.ones_like(weight), 1e-6)
    assert torch.equal(form(x, weight, 1e-6), unit * weight)


@pytest.mark.parametrize("norm", [fused_rms_norm, fused_layer_norm])
def test_a_second_derivative_is_refused(norm):
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.ones(8).bfloat16()
    args = (weight,) if norm is fused_rms_norm else (weight, None)
    (grad,) = torch.autograd.grad(norm(x, *args, 1e-6).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


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
