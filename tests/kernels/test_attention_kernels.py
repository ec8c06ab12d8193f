"""Dense and SDPA against the formula written out per head, in float64."""

from __future__ import annotations

import pytest
import torch

from lmlab.kernels.attention import dense, must_expand, sdpa
from tests.composed import close

BACKENDS = [pytest.param(dense, id="dense"), pytest.param(sdpa, id="sdpa")]


def by_hand(q, k, v, seen, scale, bias=None):
    """One head and one query at a time."""
    B, T, H, _ = q.shape
    group = H // k.shape[2]
    out = torch.zeros(B, T, H, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = seen[b % seen.shape[0], t].nonzero()[:, 0]
                scores = scale * k[b, keys, h // group] @ q[b, t, h]
                if bias is not None:
                    scores = scores + bias[h, t, keys]
                weights = torch.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, keys, h // group]
    return out


def sample(T=5, S=5, H=4, K=2, C=6, dtype=torch.float64):
    return [(3 * torch.randn(2, n, heads, C)).to(dtype).requires_grad_() for n, heads in ((T, H), (S, K), (S, K))]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("K", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (2, 5), (1, 5)])
def test_causal_is_aligned_bottom_right(attention, K, T, S):
    q, k, v = sample(T, S, K=K)
    seen = torch.tensor([[[j <= i + S - T for j in range(S)] for i in range(T)]])
    out = attention(q, k, v, mask=None, causal=True, scale=0.4, dropout=0.0)
    want = by_hand(q, k, v, seen, 0.4)
    close(out, want)
    weight = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((want * weight).sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per-row"])
@pytest.mark.parametrize("per_head", [False, True], ids=["mask", "bias"])
def test_masks_and_biases_of_every_shape(attention, per_row, per_head):
    q, k, v = sample()
    seen = torch.rand(2 if per_row else 1, 5, 5) < 0.5
    seen |= torch.eye(5, dtype=torch.bool)
    bias = torch.randn(4, 5, 5).double() if per_head else None
    mask = seen[:, None] if bias is None else bias.masked_fill(~seen[:, None], float("-inf"))
    out = attention(q, k, v, mask=mask, causal=False, scale=0.4, dropout=0.0)
    close(out, by_hand(q, k, v, seen, 0.4, bias))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_a_mask_on_cuda_finds_no_kernel_for_grouped_heads():
    cpu, cuda, mask = torch.device("cpu"), torch.device("cuda"), torch.ones(1, 1, 5, 5)
    assert [must_expand(mask, cuda), must_expand(None, cuda), must_expand(mask, cpu)] == [True, False, False]


@pytest.mark.parametrize("K", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_expanded_heads_are_the_grouped_ones(K, monkeypatch):
    q, k, v = sample(K=K)
    mask = torch.randn(1, 4, 5, 5).double()
    how = {"mask": mask, "causal": False, "scale": 0.4, "dropout": 0.0}
    want = sdpa(q, k, v, **how)
    monkeypatch.setattr("lmlab.kernels.attention.must_expand", lambda mask, device: True)
    got = sdpa(q, k, v, **how)
    close(got, want)
    pairs = zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)), strict=True)
    for a, b in pairs:
        close(a, b)


@pytest.mark.parametrize("attention", BACKENDS)
def test_causal_and_mask_together(attention):
    q, k, v = sample()
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(-1)
    out = attention(q, k, v, mask=seen, causal=True, scale=1.0, dropout=0.0)
    close(out, by_hand(q, k, v, seen[0].tril(), 1.0))
    floats = torch.zeros(1, 1, 5, 5).double().masked_fill(~seen, float("-inf"))
    close(attention(q, k, v, mask=floats, causal=True, scale=1.0, dropout=0.0), out)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_do_not_overflow(attention, dtype):
    q = torch.ones(1, 1, 1, 1, dtype=dtype)
    k = torch.tensor([1000.0, 1001.0, 999.0]).view(1, 3, 1, 1).to(dtype)
    v = torch.eye(3).view(1, 3, 1, 3).to(dtype)
    weights = attention(q, k, v, mask=None, causal=False, scale=1.0, dropout=0.0).flatten()
    assert (weights.double() - k.flatten().double().softmax(0)).abs().max() < 4e-3


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("T", [7, 160, 300])
def test_low_precision_gradients_agree_with_float64(attention, dtype, tol, T):
    exact = [(t / 3).detach() for t in sample(T, T, C=16)]
    low = [t.to(dtype).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in low]
    weight = torch.randn(2, T, 4, 16).to(dtype)
    how = {"mask": None, "causal": True, "scale": 0.25, "dropout": 0.0}
    got = torch.autograd.grad((attention(*low, **how).double() * weight).sum(), low)
    want = torch.autograd.grad((dense(*exact, **how) * weight).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < tol


@pytest.mark.parametrize("attention", BACKENDS)
def test_dropout_keeps_the_mean(attention):
    q, k = torch.zeros(1, 64, 4, 8), torch.zeros(1, 64, 4, 8)
    v = torch.ones(1, 64, 4, 8)
    out = attention(q, k, v, mask=None, causal=False, scale=1.0, dropout=0.5)
    assert out.std() > 0
    assert abs(out.mean().item() - 1) < 0.1
