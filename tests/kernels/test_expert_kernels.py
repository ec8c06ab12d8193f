"""Rows through stacked weights: the loop, the opaque operator and grouped_mm give the same, nobody's rows 0."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.config.load import load
from lmlab.kernels.experts import STEP, aligned, by_grouped_mm, grouped, per_expert, spans
from lmlab.kernels.resolve import resolve
from lmlab.model.moe import MoE, Pairs
from lmlab.model.spec import SwiGLU, TopK
from lmlab.model.transformer import build

ENDS = {
    "even": [4, 8, 12, 16],
    "an expert without rows": [0, 9, 9, 16],
    "rows of nobody": [3, 7, 8, 11],
    "all on one": [0, 0, 16, 16],
    "nobody asks": [0, 0, 0, 0],
}


def case(dtype, D=16, F=8, bias=True):
    torch.manual_seed(0)
    shapes = (16, D), (4, F, D), (4, F)
    x, weight, b = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return x, weight, b if bias else None


def gradients(out, *inputs):
    torch.manual_seed(1)
    return torch.autograd.grad((out * torch.randn_like(out)).sum(), [t for t in inputs if t is not None])


@pytest.mark.parametrize("ends", ENDS.values(), ids=list(ENDS))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("D", "F"), [(16, 8), (7, 3), (1, 1)])
def test_the_operator_is_the_loop(ends, bias, D, F):
    inputs = case(torch.float64, D, F, bias)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    fast, plain = grouped(*inputs, ends_E), per_expert(*inputs, ends_E)
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    assert not fast[ends[-1] :].any()
    for a, b in zip(gradients(fast, *inputs), gradients(plain, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nobody", [0, 1, 64, 130])
@pytest.mark.parametrize("draw", range(8))
def test_rows_in_steps_are_the_loop_whatever_nobodys_rows_hold(draw, nobody):
    """Numbers of rows below, at and above whole steps, in any order, the last ones with and without rows behind."""
    sizes = [0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP, 3 * STEP - 1, 3 * STEP + 7]
    torch.manual_seed(draw)
    ends_E = torch.tensor(sizes)[torch.randperm(len(sizes))].cumsum(0).int()
    M = int(ends_E[-1])
    x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((M + nobody, 6), (len(sizes), 5, 6)))
    x[M:] = float("nan")
    for dtype, tol in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        fast, plain = (f(*inputs, None, ends_E) for f in (grouped, per_expert))
        assert not fast[M:].any()
        pairs = [(fast, plain), *zip(gradients(fast, *inputs), gradients(plain, *inputs), strict=True)]
        for a, b in pairs:
            assert float((a - b).detach().double().norm() / b.detach().double().norm()) <= tol


@pytest.mark.parametrize("ends", ENDS.values(), ids=list(ENDS))
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_grouped_mm_is_the_loop_whatever_nobodys_rows_hold(ends, dtype, tol):
    x, weight, _ = case(dtype)
    ends_E = torch.tensor(ends, dtype=torch.int32)
    with torch.no_grad():
        x[ends[-1] :] = float("nan")
    fast, plain = by_grouped_mm(x, weight, ends_E), per_expert(x, weight, None, ends_E)
    torch.testing.assert_close(fast, plain, rtol=tol, atol=tol)
    for a, b in zip(gradients(fast, x, weight), gradients(plain, x, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_what_grouped_mm_takes():
    assert aligned(torch.empty(2, 8, 16, dtype=torch.bfloat16))
    assert not aligned(torch.empty(2, 8, 12, dtype=torch.bfloat16))
    assert aligned(torch.empty(2, 8, 12, dtype=torch.float32))
    assert not aligned(torch.empty(2, 8, 16, dtype=torch.float64))


def test_on_meta_the_rows_are_shared_evenly():
    assert spans(torch.empty(4, device="meta", dtype=torch.int32), 10) == [(0, 2), (2, 5), (5, 7), (7, 10)]


class Watched(TorchDispatchMode):
    """Elements of every tensor of `width` columns that an operation makes anew."""

    def __init__(self, width):
        super().__init__()
        self.width, self.made = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            wide = isinstance(t, torch.Tensor) and t.ndim > 0 and t.shape[-1] == self.width
            if wide and t.untyped_storage().data_ptr() not in known:
                self.made.append(t.numel())
        return out


@pytest.mark.parametrize("k", [1, 2, 4])
def test_scratch_is_the_rows_in_and_the_rows_out(k):
    """Of N tokens and k choices: 2·k·N·D values besides the sum, N·D, which starts as zeros."""
    N, D = 24, 16
    exp = load(["model=nano", "model.d_model=16", "model.n_heads=2"]).experiment
    net = build(exp.arch, 11, resolve(exp.kernels, "cpu", torch.float32), seed=0, device="cpu")
    moe = MoE(TopK(top_k=k, norm_topk=k > 1), net.dims, net.ops, 0, ffn=SwiGLU(d_ff=8))
    tokens = torch.arange(N).repeat_interleave(k)
    pairs = Pairs(tokens, (tokens * 5 + torch.arange(N * k)) % 8, torch.ones(N * k))
    x = torch.randn(N, D)
    with torch.no_grad(), Watched(D) as seen:
        moe.experts(x, pairs)
    assert sorted(seen.made) == sorted([N * D, N * D, N * k * D, N * k * D])


def test_the_host_is_never_asked_where_experts_end():
    """On tensors without values a forward and a backward pass work with grouped_mm, as on an accelerator: nothing waits
    for a number. The loop asks."""
    words = ["model=nano", "model.d_model=16", "model.n_heads=2", "moe=topk", "moe.capacity_factor=1", "moe.z_coef=1"]
    exp = load(words).experiment
    ops = resolve(exp.kernels, "cpu", torch.bfloat16)
    moe = build(exp.arch, 11, ops, seed=0, device="cpu", dtype=torch.bfloat16).blocks[0].ffn
    plain = moe.experts.ops

    def as_there(x, weight, bias, ends):
        return by_grouped_mm(x, weight, ends)

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 16, 16, dtype=torch.bfloat16, requires_grad=True)
        moe.experts.ops = dataclasses.replace(plain, experts=as_there)
        y, stats = moe(x)
        (y.square().sum() + stats.penalty_G.sum()).backward()
        moe.experts.ops = dataclasses.replace(plain, experts=per_expert)
        with pytest.raises(DataDependentOutputException):
            moe(x)
