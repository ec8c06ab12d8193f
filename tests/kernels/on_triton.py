"""Triton's kernels beside the plain formulas in float64, outputs and gradients; each function raises where they differ.

Called in a process of its own under the interpreter (device cpu), or on a GPU. Allowed, of the largest value of a
tensor or of 1: fp32 1e-5; fp16 1e-3, its last place; bf16 2^-7, one last place, because the interpreter cuts off where
a GPU rounds; twice as much where a formula rounds twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.kernels import activation, norm, rope
from lmlab.kernels import activation_triton as fused_act
from lmlab.kernels import norm_triton as fused_norm
from lmlab.kernels import rope_triton as fused_rope

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2.0**-7}
DTYPES = tuple(TOLERANCE)


def same(what: str, got: Sequence[Tensor], want: Sequence[Tensor], roundings: int = 1) -> None:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, what
        off = ((a.double() - b).abs().max() / b.abs().max().clamp_min(1)).item()
        assert off <= roundings * TOLERANCE[a.dtype], f"{what}: tensor {n} in {a.dtype} is off by {off:.3g}"


def with_gradients(f: Callable[..., Any], leaves: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of f(*leaves) and the gradient of each leaf, for drawn gradients of the outputs that `dtype` has."""
    out = f(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    draw = torch.Generator().manual_seed(3)
    grads = [torch.randn(o.shape, generator=draw, dtype=torch.float64).to(o.device, dtype).to(o.dtype) for o in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def compare(what: str, f: Callable[..., Any], plain: Callable[..., Any], leaves: Sequence[Tensor], n: int = 1) -> None:
    """n: how often the formula rounds."""
    exact = [t.detach().double().requires_grad_() for t in leaves]
    same(what, with_gradients(f, leaves, leaves[0].dtype), with_gradients(plain, exact, leaves[0].dtype), n)


def drawn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Normal values; of one channel alone positive ones, for the norm of a sum near 0 magnifies its rounding."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    values = values.abs() + 0.5 if shape[-1] == 1 else values
    return values.to(device, dtype).requires_grad_()


# ---------------------------------------------------------------- norms


def norm_forms(alpha: float) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], str]]:
    """Of each variant: Triton's, the plain one, and which of x, branch, weight, bias they take."""

    def pair(name: str, *settings: float | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def of(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: f(*given, *settings)

        return of(getattr(fused_norm, f"triton_{name}")), of(getattr(norm, name))

    return {
        "rms": (*pair("rms_norm", 1e-6), "xw"),
        "rms offset": (*pair("rms_norm", 1e-6, 1.0), "xw"),
        "layer": (*pair("layer_norm", 1e-5), "xwb"),
        "layer without bias": (*pair("layer_norm", None, 1e-5), "xw"),
        "add rms": (*pair("add_rms_norm", 1e-6, alpha), "xrw"),
        "add rms offset": (*pair("add_rms_norm", 1e-6, alpha, 1.0), "xrw"),
        "add layer": (*pair("add_layer_norm", 1e-5, alpha), "xrwb"),
        "add layer without bias": (*pair("add_layer_norm", None, 1e-5, alpha), "xrw"),
    }


def norms(device: str = "cpu") -> None:
    """Every variant at every size, in every dtype at one; the longest rows are read in pieces."""
    for n, (D, N) in enumerate(((1, 3), (7, 65), (96, 1), (257, 3), (4100, 3), (9001, 2))):
        for dtype in DTYPES if (D, N) == (257, 3) else (torch.float32,):
            for name, (f, plain, takes) in norm_forms(alpha=1.0 if n % 2 else 1.3).items():
                given = {
                    "x": drawn(N, D, dtype=dtype, device=device),
                    "r": drawn(N, D, dtype=dtype, device=device, seed=1),
                    "w": drawn(D, dtype=dtype, device=device, seed=2),
                    "b": drawn(D, dtype=dtype, device=device, seed=3),
                }
                compare(f"{name} {N}×{D}", f, plain, [given[k] for k in takes], 2)


def norms_of_mixed_dtypes(device: str = "cpu") -> None:
    """An fp32 residual beside a bf16 branch and weight: the sum stays fp32, the rest is bf16."""
    for alpha in (1.0, 1.3):
        for name, (f, plain, takes) in norm_forms(alpha).items():
            if "r" in takes:
                residual = drawn(5, 33, dtype=torch.float32, device=device)
                others = [
                    drawn(*((5, 33) if k == "r" else (33,)), dtype=torch.bfloat16, device=device, seed=n)
                    for n, k in enumerate(takes[1:])
                ]
                out = f(residual, *others)
                assert [o.dtype for o in out] == [torch.float32, torch.bfloat16]
                exact = plain(residual.double(), *(o.double() for o in others))
                same(f"{name} sum", out[:1], exact[:1])
                same(f"{name} normed", out[1:], exact[1:], 2)
                grads = torch.autograd.grad(out, [residual, *others], [torch.ones_like(o) for o in out])
                assert [g.dtype for g in grads] == [torch.float32] + [torch.bfloat16] * len(others)


def norms_of_views(device: str = "cpu") -> None:
    """Rows cut out of wider ones, transposed ones, and gradients that are one number for all; parts that get none."""
    packed = drawn(4, 3, 48, dtype=torch.float32, device=device)
    weight = drawn(32, dtype=torch.float32, device=device)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "cut": lambda t: t[..., 8:40],
        "transposed": lambda t: t.transpose(0, 1)[..., 16:],
        "every second": lambda t: torch.cat((t, t), -1)[..., ::3],
    }
    for name, view in views.items():
        compare(
            f"{name} view",
            lambda t, w, view=view: fused_norm.triton_add_rms_norm(view(t), view(t * 2), w, 1e-6),
            lambda t, w, view=view: norm.add_rms_norm(view(t), view(t * 2), w, 1e-6),
            [packed, weight],
        )
    for part in (0, 1):
        ours, theirs = (
            torch.autograd.grad(form(packed[..., 16:], packed[..., 16:] * 2, weight, 1e-6)[part].sum(), packed)[0]
            for form in (fused_norm.triton_add_rms_norm, norm.add_rms_norm)
        )
        same(f"output {part} alone", [ours], [theirs.double()])
    empty = fused_norm.triton_rms_norm(packed[:0, :, :32], weight, 1e-6)
    assert empty.shape == (0, 3, 32)
    assert torch.autograd.grad(empty.sum(), weight)[0].abs().max() == 0


# ---------------------------------------------------------------- activations


def activations(device: str = "cpu") -> None:
    """Every option, on whole tensors and on views, in every dtype; far from 0 as well, and NaN stays NaN."""
    settings: dict[str, list[dict[str, Any]]] = {
        "silu": [{}, {"beta": 1.7}, {"beta": 0.0}],
        "geglu": [{}, {"approximate": "tanh"}],
    }
    for dtype in DTYPES:
        x = drawn(3, 5, 74, dtype=dtype, device=device)
        for name, plain in activation.ACTIVATIONS.items():
            for more in settings.get(name, [{}]):
                f = fused_act.TRITON_ACTIVATIONS[name]
                for view in (lambda t: 3 * t, lambda t: t[..., 1:38], lambda t: 9 * t.transpose(0, 1)):
                    compare(
                        f"{name} {more}",
                        lambda t, f=f, view=view, more=more: f(view(t), **more),
                        lambda t, f=plain, view=view, more=more: f(view(t), **more),
                        [x],
                        3 if dtype.itemsize < 4 else 1,  # the view is rounded before, and its gradient after
                    )
        for name, plain in activation.GATES.items():
            for more in settings.get(name, [{}]):
                f = fused_act.TRITON_GATES[name]
                gate, up = (drawn(2, 1500, dtype=dtype, device=device, seed=n) for n in (0, 1))
                compare(
                    f"{name} {more}",
                    lambda g, u, f=f, more=more: f(g, u, **more),
                    lambda g, u, f=plain, more=more: f(g, u, **more),
                    [gate, up],
                )
                compare(
                    f"{name} {more} of halves",
                    lambda t, f=f, more=more: f(*t.chunk(2, -1), **more),
                    lambda t, f=plain, more=more: f(*t.chunk(2, -1), **more),
                    [x],
                )
    odd = torch.tensor([float("nan"), 0.0], device=device)
    for f in fused_act.TRITON_ACTIVATIONS.values():
        assert f(odd).isnan().tolist() == [True, False]


# ---------------------------------------------------------------- rope


def rotations(device: str = "cpu") -> None:
    """Both pairings, all and part of the channels, tables of one row and of each, few heads and many, views."""
    forms = {
        "half": (fused_rope.triton_rotate_half, rope.rotate_half),
        "interleaved": (fused_rope.triton_rotate_interleaved, rope.rotate_interleaved),
    }
    for (name, (f, plain)), width, rows, H in itertools.product(forms.items(), (2, 6, 16, 18), (1, 3), (1, 5)):
        for dtype in DTYPES if (rows, H) == (3, 5) else (torch.float32,):
            x = drawn(3, H, 7, 18, dtype=dtype, device=device)
            angles = torch.randn(rows, 7, 1, width // 2, dtype=torch.float64, device=device)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            for view in (lambda t: t.transpose(1, 2), lambda t: t.permute(0, 2, 1, 3).flip(1)):
                compare(
                    f"{name} {width} of 18, {rows} rows, {H} heads",
                    lambda t, f=f, view=view, cos=cos, sin=sin: f(view(t), cos, sin),
                    lambda t, f=plain, view=view, cos=cos, sin=sin: f(view(t), cos.double(), sin.double()),
                    [x],
                )


def second_derivatives_are_refused(device: str = "cpu") -> None:
    x, weight = torch.randn(2, 8, device=device, requires_grad=True), torch.ones(8, device=device)
    table = torch.ones(1, 1, 1, 4, device=device)
    for f in (
        lambda t: fused_norm.triton_rms_norm(t, weight, 1e-6),
        lambda t: fused_act.TRITON_GATES["swiglu"](t, t * 2),
        lambda t: fused_rope.triton_rotate_half(t[:, None, None], table, table),
    ):
        (grad,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def nothing_is_launched_on_meta(device: str = "cpu") -> None:
    """Shapes and dtypes come out, so that a forward without values can be counted."""
    x = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    weight = torch.ones(8, device="meta", dtype=torch.bfloat16)
    total, normed = fused_norm.triton_add_rms_norm(x, x, weight, 1e-6)
    turned = fused_rope.triton_rotate_half(x[:, :, None], torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2))
    assert (total.dtype, normed.dtype, turned.shape) == (torch.float32, torch.bfloat16, (2, 3, 1, 8))
    assert all(t.is_meta for t in (total, normed, turned, fused_act.TRITON_GATES["swiglu"](x, x)))
