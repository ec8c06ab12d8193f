"""Rotations against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto, Reference
from tests.composed import close

KERNELS = [pytest.param(Auto(), id="auto"), pytest.param(Reference(), id="reference")]


def turned(x, angles, pairing, width):
    """Channel pairs as complex numbers, times e^(i·angle)."""
    head = x[..., :width]
    a, b = (
        (head[..., : width // 2], head[..., width // 2 :]) if pairing == "half" else (head[..., ::2], head[..., 1::2])
    )
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    pair = (z.real, z.imag)
    out = torch.cat(pair, -1) if pairing == "half" else torch.stack(pair, -1).flatten(-2)
    return torch.cat((out, x[..., width:]), -1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("width", [8, 4], ids=["all", "part"])
@pytest.mark.parametrize("rows", [1, 3], ids=["shared", "per-row"])
def test_rotation_is_complex_multiplication(kernels, pairing, width, rows):
    x = torch.randn(3, 5, 2, 8).double().requires_grad_()
    angles = torch.randn(rows, 5, width // 2).double()
    rotate = resolve(kernels, "cpu", torch.float64).rope[pairing]
    out = rotate(x, angles.cos()[:, :, None], angles.sin()[:, :, None])
    want = turned(x, angles, pairing, width)
    close(out, want)
    weight = torch.randn_like(out)
    close(torch.autograd.grad((out * weight).sum(), x)[0], torch.autograd.grad((want * weight).sum(), x)[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_unit_vector_turns_to_cos_and_sin(kernels, pairing):
    angle = torch.tensor(0.7, dtype=torch.float64).view(1, 1, 1, 1)
    rotate = resolve(kernels, "cpu", torch.float64).rope[pairing]
    out = rotate(torch.tensor([1.0, 0.0]).double().view(1, 1, 1, 2), angle.cos(), angle.sin())
    close(out.flatten(), torch.stack((angle.cos(), angle.sin())).flatten())


def test_a_second_derivative_is_refused():
    x, angle = torch.randn(1, 3, 2, 4).requires_grad_(), torch.randn(1, 3, 1, 2)
    out = resolve(Auto(), "cpu", torch.float32).rope["half"](x, angle.cos(), angle.sin())
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
