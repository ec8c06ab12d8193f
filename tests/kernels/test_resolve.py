"""What resolve() hands out, and that its choices agree."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto, Reference
from tests.composed import close, grads, model, rows, same_grads


@pytest.mark.parametrize("biased", [True, False])
def test_fans_agree(biased):
    x = torch.randn(2, 3, 8).double()
    weights = [torch.randn(n, 8).double() for n in (8, 4, 4)]
    biases = [torch.randn(n).double() for n in (8, 4, 4)] if biased else None
    apart = resolve(Reference(), "cpu", torch.float64).fan(x, weights, biases)
    packed = resolve(Auto(), "cpu", torch.float64).fan(x, weights, biases)
    for a, b in zip(packed, apart, strict=True):
        close(a, b)


def test_embedding_gradient_is_the_sum_over_its_tokens():
    ops = resolve(Auto(), "cpu", torch.bfloat16)
    weight = torch.zeros(3, 2).bfloat16().requires_grad_()
    out = ops.embedding(torch.tensor([[1] * 1000, [2] * 1000]), weight)
    out.backward(torch.full_like(out, 0.01))
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad[1:].float() - 10).abs().max() < 0.05  # summed in bf16 it sticks near 4
    assert weight.grad[0].abs().max() == 0


def test_a_second_derivative_of_the_embedding_is_refused():
    weight = torch.randn(3, 2).bfloat16().requires_grad_()
    out = resolve(Auto(), "cpu", torch.bfloat16).embedding(torch.tensor([0, 1]), weight)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_ops_are_frozen_and_shared_by_copies():
    ops = resolve(Auto(), "cpu", torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.fan = None
    assert copy.deepcopy(ops) is ops
    assert ops.names["linear_cross_entropy"] != resolve(Reference(), "cpu", torch.float32).names["linear_cross_entropy"]


@pytest.mark.parametrize(
    "chosen", [{}, {"norm": "layernorm", "block": "postnorm", "pos": "alibi", "attn": "gqa"}], ids=["default", "other"]
)
@pytest.mark.parametrize(
    ("dtype", "tol"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 6e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_auto_equals_reference_through_a_whole_model(chosen, dtype, tol):
    tokens, positions = rows(4)
    kwargs = {"targets_BT": tokens.roll(-1, 1)}
    auto, reference = (model(dtype, kernels=kernels, **chosen) for kernels in ("auto", "reference"))
    same_grads(grads(auto, tokens, positions, **kwargs), grads(reference, tokens, positions, **kwargs), tol)
