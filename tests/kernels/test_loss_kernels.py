"""The loss from hidden states: plain against torch and the formula, chunked against plain, outputs and gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels import loss
from lmlab.kernels.loss import chunked_linear_cross_entropy, linear_cross_entropy
from lmlab.train.device import bf16_is_native
from tests.composed import close

FORMS = [pytest.param(linear_cross_entropy, id="plain"), pytest.param(chunked_linear_cross_entropy, id="chunked")]
CHUNK_ROWS_RULE = loss.chunk_rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "chunk_rows", lambda device, n_vocab: 16)
    monkeypatch.setattr(loss, "block_rows", lambda device, n_vocab: 5)


def sample(dtype, N=50, D=24, V=61):
    hidden, head = torch.randn(N, D).to(dtype).requires_grad_(), torch.randn(V, D).to(dtype).requires_grad_()
    weights = torch.rand(N) * (torch.arange(N) % 5 != 0)
    return hidden, head, torch.randint(V, (N,)), weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_loss_is_torchs_cross_entropy_in_float64(form, scale):
    hidden, head, targets, weights = sample(torch.float64)
    got, nats = form(hidden, head, targets, weights, scale)
    want = (F.cross_entropy(scale * hidden @ head.T, targets, reduction="none") * weights).sum()
    assert got.dtype == torch.float64
    close(got, want)
    assert nats is got
    ours, theirs = (torch.autograd.grad(total / 7, (hidden, head)) for total in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"])
def test_chunked_agrees_with_plain(dtype, tol):
    hidden, head, targets, weights = sample(dtype)
    plain, chunked = (
        f(hidden, head, targets, weights, 0.7).objective for f in (linear_cross_entropy, chunked_linear_cross_entropy)
    )
    assert chunked.dtype == plain.dtype == torch.float32
    assert abs(chunked.item() / plain.item() - 1) < 1e-5
    exact = [t.detach().double().requires_grad_() for t in (hidden, head)]
    want = torch.autograd.grad(linear_cross_entropy(*exact, targets, weights, 0.7).objective, exact)
    for got, ref in zip(torch.autograd.grad(chunked, (hidden, head)), want, strict=True):
        assert got.dtype == dtype
        assert (got.double() - ref).norm() / ref.norm() < tol


@pytest.mark.parametrize("scale", [1.0, 768**-0.5], ids=["1", "768**-0.5"])
@pytest.mark.parametrize("factor", [1.0, 1 / 3], ids=["sum", "third"])
@pytest.mark.parametrize("even", [1.0, 0.3], ids=["weights-1", "weights-0.3"])
def test_bf16_gradients_have_no_common_factor(scale, factor, even):
    """Roundings may scatter, but a factor that all gradients share must not pass through bf16."""
    N, D, V = 1024, 64, 512
    hidden, head = (torch.randn(n, D).bfloat16().requires_grad_() for n in (N, V))
    targets, weights = torch.randint(V, (N,)), torch.full((N,), even)
    total = chunked_linear_cross_entropy(hidden, head, targets, weights, scale).objective
    got = torch.autograd.grad(factor * total, (hidden, head))
    exact = [t.detach().double().requires_grad_() for t in (hidden, head)]
    want = torch.autograd.grad(factor * linear_cross_entropy(*exact, targets, weights, scale).objective, exact)
    for a, b in zip(got, want, strict=True):
        assert abs((a.double() * b).sum() / b.square().sum() - 1) < 5e-4


def test_backward_may_be_called_twice():
    hidden, head, targets, weights = sample(torch.float32)
    total = chunked_linear_cross_entropy(hidden, head, targets, weights, 0.7).objective
    first = torch.autograd.grad(3 * total, (hidden, head), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(3 * total, (hidden, head))))


@pytest.mark.parametrize(
    ("device", "n_vocab", "rows"),
    [("cpu", 4096, 512), ("cuda", 50304, 5336), ("cuda", 4096, 65536), ("cuda", 262144, 4096)],
)
def test_chunks_follow_device_and_vocabulary(device, n_vocab, rows):
    assert CHUNK_ROWS_RULE(torch.device(device), n_vocab) == rows


@pytest.mark.parametrize("form", FORMS)
def test_no_target_counts_when_all_weights_are_zero(form):
    hidden, head, targets, weights = sample(torch.float32)
    total = form(hidden, head, targets, torch.zeros_like(weights), 1.0).objective
    assert total.item() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(total, (hidden, head)))


@pytest.mark.parametrize("form", FORMS)
def test_an_improbable_target_is_finite(form):
    hidden = torch.tensor([[1.0]], requires_grad=True)
    total = form(hidden, torch.tensor([[200.0], [0.0]]), torch.tensor([1]), torch.ones(1), 1.0).objective
    assert total.item() == 200.0


def test_only_what_needs_a_gradient_gets_one():
    hidden, head, targets, weights = sample(torch.float32)
    chunked_linear_cross_entropy(hidden.detach(), head, targets, weights, 1.0).objective.backward()
    assert head.grad is not None
    with torch.no_grad():
        assert not chunked_linear_cross_entropy(hidden, head, targets, weights, 1.0).objective.requires_grad


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [None, 4.0], ids=["plain", "capped"])
@pytest.mark.parametrize("z_coef", [0.0, 0.3], ids=["no-z", "z"])
@pytest.mark.parametrize("n_valid", [None, 55], ids=["whole", "padded"])
def test_the_formula_with_everything(form, softcap, z_coef, n_valid):
    """Σ w · (log Σ e^l − l_target + z · log² Σ e^l), written out, over rows that count and columns that are valid."""
    hidden, head, targets, weights = sample(torch.float64)
    targets %= 55
    raw = 0.7 * hidden @ head.T
    logits = (raw if softcap is None else softcap * torch.tanh(raw / softcap))[:, :n_valid]
    lse = logits.exp().sum(1).log()
    nats = (weights * (lse - logits[range(50), targets]))[::3].sum()
    want = nats + z_coef * (weights * lse**2)[::3].sum()
    ignored = targets.clone()
    ignored[torch.arange(50) % 3 != 0] = loss.IGNORED
    got = form(hidden, head, ignored, weights, 0.7, softcap, z_coef, n_valid)
    close(got.objective, want)
    close(got.nats, nats)
    assert got.nats.requires_grad == (z_coef == 0)
    ours, theirs = (torch.autograd.grad(total, (hidden, head)) for total in (got.objective, want))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    assert (ours[0][torch.arange(50) % 3 != 0] == 0).all()
    assert n_valid is None or (ours[1][n_valid:] == 0).all()
    with torch.no_grad():
        close(form(hidden, head, ignored, weights, 0.7, softcap, z_coef, n_valid).nats, nats)


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_all_be_ignored_or_none_be_there(form):
    hidden, head, targets, weights = sample(torch.float32)
    total = form(hidden, head, torch.full_like(targets, loss.IGNORED), weights, 1.0, None, 0.1).objective
    assert total.item() == 0
    assert all((g == 0).all() for g in torch.autograd.grad(total, (hidden, head)))
    total = form(hidden[:0], head, targets[:0], weights[:0], 1.0).objective
    assert total.item() == 0
    assert (torch.autograd.grad(total, head)[0] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", [61, -1])
def test_a_target_outside_is_an_error(form, target):
    hidden, head, targets, weights = sample(torch.float32)
    targets[3] = target
    with pytest.raises(IndexError if form is linear_cross_entropy else RuntimeError, match="out of bounds"):
        form(hidden, head, targets, weights, 1.0)


PEAK = """
import resource
import torch
import torch.nn.functional as F
from lmlab.kernels.loss import chunked_linear_cross_entropy

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

N, D, V, dtype = 8192, 768, 50257, torch.{dtype}
hidden, head = (torch.empty(n, D, dtype=dtype).normal_(std=0.02).requires_grad_() for n in (N, V))
targets, weights = torch.randint(V, (N,)), torch.ones(N)
hidden.grad, head.grad = torch.ones_like(hidden), torch.ones_like(head)  # every form has them
before = peak()
{total}.backward()
print(peak() - before)
"""
TOTALS = {
    "lean": "chunked_linear_cross_entropy(hidden, head, targets, weights, 1.0).objective",
    "eager": "F.cross_entropy(F.linear(hidden, head).float(), targets)",
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_a_quarter_of_eager_logits(dtype):
    """MiB above inputs and gradients, each in a process of its own."""
    if dtype == "bfloat16" and not bf16_is_native(torch.device("cpu")):
        pytest.skip("this CPU only emulates bf16: products of this size take hours")
    mib = {}
    for name, total in TOTALS.items():
        code = PEAK.format(dtype=dtype, total=total)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        mib[name] = float(done.stdout)
    print(f"{dtype}: lean {mib['lean']:.0f} MiB, eager {mib['eager']:.0f} MiB, {mib['lean'] / mib['eager']:.1%}")
    assert mib["lean"] <= 0.25 * mib["eager"]
