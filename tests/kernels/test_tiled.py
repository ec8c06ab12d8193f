"""Tiled attention is dense attention, in memory linear in T and as one operator."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.kernels import tiled as kernel
from lmlab.kernels.attention import dense, render_dense
from lmlab.kernels.scores import Scores
from lmlab.kernels.tiled import attended, merged, render_tiled, tiled, tiles
from tests.composed import close

KINDS = ["plain", "window", "documents", "padding", "slope", "learned", "capped"]


def scores_of(kind, T, S, H=4):
    """Causal attention and one thing more; `learned` has positions of each row's own."""
    ids = (torch.arange(S) // 6)[None]
    rows = torch.stack([torch.arange(S), torch.arange(S) % 7])
    valid = torch.ones(2, S, dtype=torch.bool)
    valid[0, : S // 2], valid[1] = False, False
    fields = {
        "plain": {},
        "window": {"window": 6},
        "documents": {"documents": (ids[:, S - T :], ids)},
        "padding": {"valid_BS": valid},
        "slope": {"positions": (rows[:1, S - T :], rows[:1]), "slope_H": torch.rand(H).double()},
        "learned": {"positions": (rows[:, S - T :], rows), "bias_HR": torch.randn(H, 9).double().requires_grad_()},
        "capped": {"softcap": 2.0},
    }
    return Scores(causal=True, **fields[kind])


def sample(T, S, H=4, K=2, C=6, Cv=8, B=2, dtype=torch.float64):
    return [torch.randn(B, n, h, c).to(dtype).requires_grad_() for n, h, c in ((T, H, C), (S, K, C), (S, K, Cv))]


@pytest.fixture
def small(monkeypatch):
    """Many tiles in few tokens."""
    monkeypatch.setattr(kernel, "ROWS", 4)
    monkeypatch.setattr(kernel, "KEYS", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
@pytest.mark.parametrize(("T", "S"), [(23, 23), (9, 23), (1, 23)])
def test_tiles_are_dense_attention(kind, causal, T, S):
    q, k, v = sample(T, S)
    scores = scores_of(kind, T, S)._replace(causal=causal)
    inputs = [q, k, v, *([scores.bias_HR] if kind == "learned" else [])]
    want = dense(q, k, v, scores, render_dense(scores, T, S, q.dtype, q.device), scale=0.4)
    got = tiled(q, k, v, scores, render_tiled(scores, T, S, q.dtype, q.device), scale=0.4)
    weight = torch.randn_like(want)
    close(got, want)
    for a, b in zip(*(torch.autograd.grad(out, inputs, weight) for out in (got, want)), strict=True):
        close(a, b)


def test_parts_merge_in_any_order():
    logits, v = torch.randn(2, 3, 12).double() * 8, torch.randn(2, 12, 5).double()
    logits[:, 0] = float("-inf")  # a query that sees nothing
    logits[:, 1, :4] = float("-inf")  # nothing in the first part
    parts = [attended(logits[..., i : i + 4].clone(), v[:, i : i + 4]) for i in range(0, 12, 4)]
    for a, b, c in itertools.permutations(parts):
        m, l, u = merged(merged(a, b), c)
        assert not l[:, 0].any()
        close(u[:, 1:] / l[:, 1:, None], logits[:, 1:].softmax(-1) @ v)
        close((m + l.log())[:, 1:], logits[:, 1:].logsumexp(-1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize(("T", "S"), [(23, 23), (9, 23)])
def test_hidden_tiles_are_skipped_and_seen_ones_need_no_mask(window, T, S):
    scores, cpu = Scores(causal=True, window=window), torch.device("cpu")
    left = scores.seen(range(T), range(S), T, S, cpu)[0, 0].clone()
    for _, row in tiles(scores, T, S):
        for tile in row:
            part = left[tile.rows.start : tile.rows.stop, tile.keys.start : tile.keys.stop]
            assert part.any()
            assert bool(part.all()) == (tile.scores.seen(tile.rows, tile.keys, T, S, cpu) is None)
            part.fill_(False)
    assert not left.any()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


@pytest.mark.parametrize("kind", ["plain", "slope", "learned", "capped"])
def test_nothing_of_T_by_S_is_made_or_saved(kind):
    T, H = 1024, 2
    q, k, v = sample(T, T, H=H, K=1, C=4, Cv=4, B=1, dtype=torch.float32)
    scores = scores_of(kind, T, T, H)
    if kind == "learned":
        scores = scores._replace(positions=tuple(x[:1] for x in scores.positions))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        tiled(q, k, v, scores, None, scale=0.5)
    assert max(saved) == q.numel()
    assert sum(saved) < 8 * q.numel()
    flat = kernel._flat(scores)
    with torch.no_grad(), Largest() as largest:  # an operator's inside is hidden from a mode: its two halves
        out, sums = kernel._forward(q, k, v, 0.5, *flat)
        kernel._backward(torch.ones_like(out), q, k, v, out, sums, 0.5, *flat)
    assert largest.elements <= H * kernel.ROWS * kernel.KEYS < T * T


def test_sums_are_fp32_in_bf16():
    low = [x.detach() for x in sample(256, 256, K=4, C=64, Cv=64, dtype=torch.bfloat16)]
    low[0] = low[0] * 6  # scores of standard deviation 6
    exact = [x.double() for x in low]
    scores = Scores(causal=True)
    want = tiled(*exact, scores, None, scale=0.125)
    off = [
        ((out.double() - want).norm() / want.norm()).item()
        for out in (
            tiled(*low, scores, None, scale=0.125),
            dense(*low, scores, render_dense(scores, 256, 256, torch.bfloat16, low[0].device), scale=0.125),
        )
    ]
    assert off[0] < 2e-3 < 6e-3 < off[1]


def test_the_gradient_of_a_bias_is_repeatable():
    q, k, v = sample(64, 64, dtype=torch.float32)
    scores = scores_of("learned", 64, 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (
            torch.autograd.grad(tiled(q, k, v, scores, None, scale=0.4).sum(), [q, k, v, scores.bias_HR])
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@pytest.mark.usefixtures("small")
def test_it_is_one_operator_to_a_compiler():
    q, k, v = sample(23, 23)
    scores, graphs = scores_of("learned", 23, 23), []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    block = torch.compile(lambda q, s: tiled(2 * q, k, v, s, None, scale=0.4), fullgraph=True, backend=backend)
    close(block(q, scores), tiled(2 * q, k, v, scores, None, scale=0.4))
    assert sum("lmlab.tiled_attention" in str(target) for target in graphs[0]) == 1
    assert len(graphs[0]) < 10


@pytest.mark.parametrize("kind", ["plain", "learned"])
def test_the_operator_is_registered_rightly(kind):
    q, k, v = sample(5, 5)
    torch.library.opcheck(kernel.tiled_attention, (q, k, v, 0.4, *kernel._flat(scores_of(kind, 5, 5))))


def test_it_runs_on_the_meta_device():
    q, k, v = (x.detach().to("meta").requires_grad_() for x in sample(23, 23))
    out = tiled(q, k, v, Scores(causal=True, softcap=2.0), None, scale=0.4)
    assert out.shape == (2, 23, 4, 8)
    assert [g.shape for g in torch.autograd.grad(out.sum(), [q, k, v])] == [x.shape for x in (q, k, v)]


def test_dropout_is_refused():
    with pytest.raises(AssertionError, match="dropout"):
        tiled(*sample(5, 5), Scores(), None, scale=0.4, dropout=0.1)
