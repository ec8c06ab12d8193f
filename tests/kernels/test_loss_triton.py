"""The Triton loss in the interpreter against the plain one in float64: loss, z-loss, both gradients."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lmlab.kernels import loss
from tests.kernels.interpreted import run

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd rows, one block": dict(N=7, V=61),
    "a block to the column": dict(V=128),
    "a tail of one": dict(V=129),
    "a tail as 50257 has": dict(N=3, V=1024 + 50257 % 1024, block=256),
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=2.0),
    "z-loss": dict(z_coef=0.2),
    "padded": dict(n_valid=200),
    "padded by more than a block": dict(n_valid=90, block=64),
    "all": dict(N=9, scale=0.6, softcap=3.0, z_coef=0.1, n_valid=250, block=64),
    "loud": dict(scale=4.0),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def sample(dtype: torch.dtype, N: int, V: int, n_valid: int | None) -> tuple[torch.Tensor, ...]:
    """Weights of 0, ignored targets, and a target at either end."""
    torch.manual_seed(0)
    hidden, head = (torch.randn(n, 24).mul(0.5).to(dtype).requires_grad_() for n in (N, V))
    targets, weights = torch.randint(n_valid or V, (N,)), torch.rand(N) + 0.5
    targets[0], targets[1], targets[2] = 0, (n_valid or V) - 1, loss.IGNORED
    weights[N // 2] = 0
    return hidden, head, targets, weights


def parity(dtype: torch.dtype, names: tuple[str, ...] = tuple(CASES)) -> None:
    """Raises AssertionError naming the case. The chunks are of 4 rows."""
    from lmlab.kernels import loss_triton

    loss.chunk_rows = lambda device, n_vocab: 4
    for name in names:
        case = {"N": 6, "V": 300, "scale": 1.0, "softcap": None, "z_coef": 0.0, "n_valid": None, "block": 128}
        case |= CASES[name]
        loss_triton.LONGEST = case["block"]
        form = case["scale"], case["softcap"], case["z_coef"], case["n_valid"]
        rows = sample(dtype, case["N"], case["V"], case["n_valid"])
        exact = [t.detach().double().requires_grad_() for t in rows[:2]]
        want = loss.linear_cross_entropy(*exact, *rows[2:], *form)
        got = loss_triton.triton_linear_cross_entropy(*rows, *form)
        figures = {"objective": (got.objective, want.objective), "nats": (got.nats, want.nats)}
        gradients = (torch.autograd.grad(3 * t.objective, inputs) for t, inputs in ((got, rows[:2]), (want, exact)))
        figures |= dict(zip(("d_hidden", "d_head"), zip(*gradients, strict=True), strict=True))
        for what, (a, b) in figures.items():
            off = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
            assert off <= TOLERANCE[dtype], f"{name}: {what} is off by {off:.2g}"
        assert got.nats.requires_grad == (case["z_coef"] == 0)
        if name in ("plain", "all"):
            with torch.no_grad():
                assert loss_triton.triton_linear_cross_entropy(*rows, *form).nats == got.nats


def planted() -> None:
    """One gradient in a hundred wrong by 1 %."""
    from lmlab.kernels.loss_triton import Rows

    right = Rows.__call__

    def wrong(self: Any, logits_NV: torch.Tensor, *rows: torch.Tensor) -> None:
        right(self, logits_NV, *rows)
        logits_NV.view(-1)[::100] *= 1.01

    Rows.__call__ = wrong  # type: ignore[method-assign]
    try:
        parity(torch.float32, ("plain",))
    finally:
        Rows.__call__ = right  # type: ignore[method-assign]


def beside() -> None:
    """float64 and tensors without values have no kernel."""
    from lmlab.kernels.loss_triton import shape_of, triton_linear_cross_entropy

    rows = [t.detach().double() if t.is_floating_point() else t for t in sample(torch.float32, 13, 61, None)]
    want = loss.linear_cross_entropy(*rows, 0.5, None, 0.1)
    got = triton_linear_cross_entropy(*rows, 0.5, None, 0.1)
    assert got.objective.dtype == torch.float64
    assert abs(got.objective / want.objective - 1) < 1e-12
    on_meta = [t.to("meta") for t in sample(torch.float32, 13, 61, None)]
    assert triton_linear_cross_entropy(*on_meta, 0.5).objective.is_meta
    assert [shape_of(V) for V in (61, 1000, 50257)] == [(64, 1), (1024, 4), (4096, 8)]


ASKED = {
    "beside": beside,
    "float32": lambda: parity(torch.float32),
    "float16": lambda: parity(torch.float16),
    "planted": planted,
}


def ask() -> None:
    """Print what each of them is wrong about, as JSON."""
    found = {}
    for name, one in ASKED.items():
        try:
            one()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error) or "an assertion without words"
    print(json.dumps(found))


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """One process for all: to start one takes as long as the rest."""
    return json.loads(run("from tests.kernels.test_loss_triton import ask; ask()"))


@pytest.mark.parametrize("name", [name for name in ASKED if name != "planted"])
def test_agrees_with_the_plain_loss(wrong, name):
    assert wrong[name] == ""


def test_a_planted_wrong_gradient_is_caught(wrong):
    assert wrong["planted"].startswith("plain: d_h")


@pytest.mark.parametrize(("dtype", "capped"), [("bf16", True), ("fp32", False)])
def test_the_kernel_compiles_for_cuda(dtype, capped, tmp_path, monkeypatch):
    """The interpreter forgives what the compiler does not. Needs no GPU: Triton brings its assembler."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lmlab.kernels.loss_triton import LONGEST, _differentiate

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"logits_ptr": dtype, "targets_ptr": "i64", "objective_ptr": "fp32", "nats_ptr": "fp32"}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(("stride", "V", "n_valid"), "i32")
    signature |= dict.fromkeys(("scale", "softcap", "z_coef"), "fp32")
    fixed = {"CAPPED": capped, "WANTED": True, "BLOCK": LONGEST}
    source = ASTSource(_differentiate, signature | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "st.global" in made.asm["ptx"]
