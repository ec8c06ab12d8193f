"""Dense, SDPA and tiled against the formula written out per head and query, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from lmlab.kernels import attention as kernels
from lmlab.kernels import tiled as tiles
from lmlab.kernels.attention import Softmax, must_expand, plain_softmax, probabilities
from lmlab.kernels.scores import Scores
from tests.composed import close

BACKENDS = {
    "dense": (kernels.render_dense, kernels.dense),
    "sdpa": (kernels.render_sdpa, kernels.sdpa),
    "tiled": (tiles.render_tiled, tiles.tiled),
}
DROPPING = ["dense", "sdpa"]


def attend(backend, q, k, v, scores, scale, dropout=0.0):
    render, attention = BACKENDS[backend]
    rendered = render(scores, q.shape[1], k.shape[1], q.dtype, q.device)
    return attention(q, k, v, scores, rendered, scale=scale, dropout=dropout)


def _seen(scores, b, t, S, own):
    """The keys that row b's query t, which is key `own`, sees."""
    keys = range(S)
    if scores.causal:
        keys = [s for s in keys if s <= own]
    if scores.window is not None:
        keys = [s for s in keys if s > own - scores.window]
    if scores.documents is not None:
        q, k = (x[b % len(x)].tolist() for x in scores.documents)
        keys = [s for s in keys if q[t] == k[s]]
    if scores.valid_BS is not None:
        keys = [s for s in keys if scores.valid_BS[b, s]]
    return list(keys)


def bias_by_hand(scores, b, h, t, keys):
    q, k = (x[b % len(x)].tolist() for x in scores.positions)
    distances = [max(0, q[t] - k[s]) for s in keys]
    if scores.slope_H is not None:
        return -scores.slope_H[h].double() * torch.tensor(distances).double()
    return torch.stack([scores.bias_HR[h, min(d, scores.bias_HR.shape[1] - 1)] for d in distances])


def by_hand(q, k, v, scores, scale):
    """One head and one query at a time."""
    (B, T, H, _), S = q.shape, k.shape[1]
    rows = []
    seen = {(b, t): _seen(scores, b, t, S, t + S - T) for b in range(B) for t in range(T)}
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        head, keys = h // (H // k.shape[2]), seen[b, t]
        if not keys:
            rows.append(v.new_zeros(v.shape[-1]))
            continue
        x = scale * k[b, keys, head] @ q[b, t, h]
        if scores.softcap is not None:
            x = scores.softcap * torch.tanh(x / scores.softcap)
        if scores.slope_H is not None or scores.bias_HR is not None:
            x = x + bias_by_hand(scores, b, h, t, keys)
        weights = torch.exp(x - x.max())
        rows.append(weights / weights.sum() @ v[b, keys, head])
    return torch.stack(rows).view(B, T, H, -1)


def sample(T=5, S=5, H=4, K=2, C=6, Cv=None, dtype=torch.float64):
    shapes = ((T, H, C), (S, K, C), (S, K, Cv or C))
    return [(3 * torch.randn(2, *shape)).to(dtype).requires_grad_() for shape in shapes]


def parts(T, S, H, bias):
    """The optional fields of a Scores: documents reset the positions; the first row has padding, the second is it."""
    ids = torch.tensor([[0] * 2 + [1] * (S - 2), [0] * 3 + [1] * (S - 3)])
    positions = torch.stack([torch.arange(S), torch.arange(S) % 3])
    valid = torch.ones(2, S, dtype=torch.bool)
    valid[0, :2], valid[1] = False, False
    fields = {"documents": (ids[:, S - T :], ids), "valid_BS": valid}
    if bias != "none":
        fields["positions"] = (positions[:, S - T :], positions)
    if bias == "slope":
        fields["slope_H"] = torch.tensor([0.5, 0.25, 0.125, 1.0])[:H].double()
    if bias == "learned":
        fields["bias_HR"] = torch.randn(H, 3).double().requires_grad_()
    return fields


def combinations(fields):
    """Every choice of causal, window, documents and padding; positions are one row's without documents."""
    for causal, window, *chosen in itertools.product([False, True], [None, 2], [False, True], [False, True]):
        kept = {n: fields[n] for n, on in zip(["documents", "valid_BS"], chosen, strict=True) if on}
        rest = {n: fields[n] for n in ("positions", "slope_H", "bias_HR") if n in fields}
        if "positions" in rest and not chosen[0]:
            rest["positions"] = tuple(x[:1] for x in rest["positions"])
        yield Scores(causal=causal, window=window, **kept, **rest)


def run(attention, inputs, weight):
    out = attention()
    return [out, *torch.autograd.grad(out, inputs, weight, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("bias", ["none", "slope", "learned"])
@pytest.mark.parametrize(("H", "K"), [(2, 1), (4, 2), (2, 2)], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize(("T", "S"), [(4, 4), (2, 5)], ids=["square", "cached"])
def test_every_combination_is_the_formula(softcap, bias, H, K, T, S, monkeypatch):
    monkeypatch.setattr(tiles, "ROWS", 2)
    monkeypatch.setattr(tiles, "KEYS", 2)
    q, k, v = sample(T, S, H, K, C=3, Cv=2)
    weight = torch.randn(2, T, H, 2).double()
    for scores in combinations(parts(T, S, H, bias)):
        scores = scores._replace(softcap=softcap)
        inputs = [q, k, v, *([scores.bias_HR] if bias == "learned" else [])]
        want = run(lambda: by_hand(q, k, v, scores, 0.4), inputs, weight)  # noqa: B023 (called at once)
        for backend in BACKENDS:
            if backend == "sdpa" and softcap is not None:
                continue
            got = run(lambda: attend(backend, q, k, v, scores, 0.4), inputs, weight)  # noqa: B023
            for name, a, b in zip(["out", "dq", "dk", "dv", "dbias"], got, want, strict=False):
                error = (a - b).abs().max() / max(1.0, b.abs().max().item())
                assert error <= 1e-10, f"{backend} {name} is off by {error:.3g} with {scores}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", ["none", "slope", "learned"])
def test_a_query_that_sees_nothing_gives_exactly_0(backend, bias):
    q, k, v = sample(4, 4)
    scores = Scores(causal=True, **parts(4, 4, 4, bias))
    out = attend(backend, q, k, v, scores, 0.4)
    assert not out[1].any()
    assert not out[0, :2].any()
    assert out[0, 2:].all()
    inputs = [q, k, v, *([scores.bias_HR] if bias == "learned" else [])]
    grads = torch.autograd.grad(out.square().sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert not any(g[1].any() for g in grads[:3])


def test_sdpa_has_no_softcap():
    q, k, v = sample()
    with pytest.raises(AssertionError, match="softcap"):
        attend("sdpa", q, k, v, Scores(softcap=2.0), 0.4)


@pytest.mark.parametrize("bias", ["none", "slope", "learned"])
def test_probabilities_are_what_attends(bias):
    q, k, v = sample(3, 5)
    scores = Scores(causal=True, softcap=2.0, **parts(3, 5, 4, bias))
    logits, probs = probabilities(q, k, scores, scale=0.4)
    assert logits.isneginf().equal(probs == 0)
    close(torch.einsum("bhts,bshc->bthc", probs, v.repeat_interleave(2, 2)), attend("dense", q, k, v, scores, 0.4))


@pytest.mark.parametrize("cap", [None, 1.5], ids=["uncapped", "capped"])
@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (1, 4, 3, 5), (2, 4, 3, 5), None], ids=str)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.bfloat16, 1e-2)], ids=["fp64", "bf16"])
def test_the_softmax_in_place_is_the_plain_one(cap, shape, dtype, tol):
    product = torch.randn(2, 4, 3, 5).to(dtype).double().requires_grad_()
    mask = None if shape is None else torch.randn(shape).to(dtype).double().requires_grad_()
    weight = torch.randn(2, 4, 3, 5).to(dtype).double()
    inputs = [x for x in (product, mask) if x is not None]
    want = run(lambda: plain_softmax(product, mask, cap), inputs, weight)
    low = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (product, mask)]
    got = run(lambda: Softmax.apply(low[0] * 1, low[1], cap), [x for x in low if x is not None], weight.to(dtype))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        close(a.double(), b, tol)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", ["none", "learned"])
def test_compiled_in_one_graph_is_eager(backend, bias):
    q, k, v = sample(4, 4)
    scores = Scores(causal=True, softcap=None if backend == "sdpa" else 2.0, **parts(4, 4, 4, bias))
    render, attention = BACKENDS[backend]
    inputs = [q, k, v, *([scores.bias_HR] if bias == "learned" else [])]
    weight = torch.randn_like(q)

    def block(q, k, v, scores, rendered):
        return attention(2 * q, k, v, scores, rendered, scale=0.4) * 2

    def outcome(block):
        return run(lambda: block(q, k, v, scores, render(scores, 4, 4, q.dtype, q.device)), inputs, weight)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(compiled), outcome(block), strict=True):
        close(a, b)


def test_a_mask_on_cuda_finds_no_kernel_for_grouped_heads():
    cpu, cuda, mask = torch.device("cpu"), torch.device("cuda"), torch.ones(1, 1, 5, 5)
    assert [must_expand(mask, cuda), must_expand(None, cuda), must_expand(mask, cpu)] == [True, False, False]


@pytest.mark.parametrize("K", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_expanded_heads_are_the_grouped_ones(K, monkeypatch):
    q, k, v = sample(K=K)
    scores = Scores(causal=True, window=3)
    want = attend("sdpa", q, k, v, scores, 0.4)
    monkeypatch.setattr("lmlab.kernels.attention.must_expand", lambda mask, device: True)
    got = attend("sdpa", q, k, v, scores, 0.4)
    close(got, want)
    pairs = zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)), strict=True)
    for a, b in pairs:
        close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_do_not_overflow(backend, dtype):
    q = torch.ones(1, 1, 1, 1, dtype=dtype)
    k = torch.tensor([1000.0, 1001.0, 999.0]).view(1, 3, 1, 1).to(dtype)
    v = torch.eye(3).view(1, 3, 1, 3).to(dtype)
    weights = attend(backend, q, k, v, Scores(), 1.0).flatten()
    assert (weights.double() - k.flatten().double().softmax(0)).abs().max() < 4e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("T", [7, 160, 300])
def test_low_precision_gradients_agree_with_float64(backend, dtype, tol, softcap, T):
    if backend == "sdpa" and softcap is not None:
        return
    low = [(t / 3).detach().to(dtype).requires_grad_() for t in sample(T, T, C=16)]
    exact = [t.detach().double().requires_grad_() for t in low]
    weight = torch.randn(2, T, 4, 16).to(dtype)
    scores = Scores(causal=True, softcap=softcap)
    got = torch.autograd.grad((attend(backend, *low, scores, 0.25).double() * weight).sum(), low)
    want = torch.autograd.grad((attend("dense", *exact, scores, 0.25) * weight).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < tol


@pytest.mark.parametrize("backend", DROPPING)
def test_dropout_keeps_the_mean(backend):
    q, k = torch.zeros(1, 64, 4, 8), torch.zeros(1, 64, 4, 8)
    v = torch.ones(1, 64, 4, 8)
    out = attend(backend, q, k, v, Scores(), 1.0, dropout=0.5)
    assert out.std() > 0
    assert abs(out.mean().item() - 1) < 0.1
