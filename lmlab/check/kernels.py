"""Other ways to the same model: the reference kernels against the fastest ones, and the backends of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lmlab.check.composed import Composed, Rows, gradients, without_dropout
from lmlab.check.invariants import logits, long_rows
from lmlab.check.rows import EXACT, Row, distance, gradient_distance, not_asked
from lmlab.check.small import given
from lmlab.compat import rules
from lmlab.model.moe import Router
from lmlab.model.transformer import Transformer

FP32, FP32_GRADIENTS = 2e-5, 1e-4
BF16 = 0.02  # the fastest kernels may be this much further from float64 than the reference ones, relative to the norm
BACKENDS = ("dense", "sdpa", "tiled")
STEADY = 0.3  # of what is allowed in float32: so far from float64 may the reference be
NUDGE = 2.0**-22  # of a weight: some roundings of float32
TRIES = ((2, 24, 8), (1, 6, 16), (1, 3, 32))  # rows, their tokens at most, and how many draws of them


def against_reference(c: Composed) -> Row:
    """Outputs and gradients of kernels=reference and of the kernels beside it (`Composed.compared`) in float64, fp32
    and bf16."""
    chosen, said = steady(c), []
    device = c.compared[1]
    asked = chosen.on(device)
    for dtype, tol, tol_grads in ((torch.float64, EXACT, EXACT), (torch.float32, FP32, FP32_GRADIENTS)):
        plain, fast = (_same_weights(c, dtype, plain=p, device=device) for p in (True, False))
        off = distance(logits(fast, asked), logits(plain, asked))
        off_grads, where = gradient_distance(gradients(fast, asked), gradients(plain, asked))
        said.append(f"{str(dtype).removeprefix('torch.')} {max(off, off_grads):.1g}")
        if not (off <= tol and off_grads <= tol_grads):
            figure = f"{said[-1]} ({'outputs' if off > tol else where})"
            return Row("kernels = reference", "fail", figure, f"allowed {tol:g}, gradients {tol_grads:g}")
    errors = _in_bf16(c, chosen)
    said.append("bfloat16 {:.1g} against {:.1g} of the reference".format(*errors))
    state = "pass" if errors[0] <= errors[1] + BF16 else "fail"
    return Row("kernels = reference", state, "; ".join(said), "" if state == "pass" else f"allowed {BF16:g} more")


def steady(c: Composed) -> Rows:
    """The rows; where float32 is far from float64 on the reference kernels, or roundings of the weights move float64
    itself, those of some draws, shorter ones too, where they do least. A narrow norm that meets almost 0 magnifies any
    rounding, and a ReLU that does may pass on a gradient or none: that is the rows', not the kernels'."""
    exact, *others = (
        _same_weights(c, dtype, plain=True) for dtype in (torch.float64, torch.float32, *[torch.float64] * 2)
    )
    for net, size in zip(others[1:], (NUDGE, -NUDGE), strict=True):
        _nudged(net, size)
    found: list[tuple[float, Rows]] = []
    for asked in (c.rows(B, min(n, c.T), seed) for B, n, draws in TRIES for seed in range(1, draws + 1)):
        out, grads = logits(exact, asked), gradients(exact, asked)
        off = max(distance(logits(net, asked), out) / FP32 for net in others)
        off_grads = max(gradient_distance(gradients(net, asked), grads)[0] / FP32_GRADIENTS for net in others)
        found.append((max(off, off_grads), asked))
        if found[-1][0] <= STEADY:
            break
    return min(found, key=lambda one: one[0])[1]


@torch.no_grad()
def _nudged(net: Transformer, size: float) -> None:
    """Every weight moved by about `size` of itself, in place; the opposite of what -size does."""
    draw = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.mul_(1 + size * torch.randn(p.shape, generator=draw, dtype=torch.float64))


def _same_weights(c: Composed, dtype: torch.dtype, *, plain: bool, device: torch.device | str = "cpu") -> Transformer:
    net = c.with_kernels(dtype, plain=plain, device=device)
    net.load_state_dict(c.net.state_dict())
    return net


def _in_bf16(c: Composed, asked: Rows) -> tuple[float, float]:
    """‖error‖ / ‖exact‖ of the outputs in bf16: of the fastest kernels and of the reference ones. In eval mode: what a
    batch norm would add in train mode is not the kernels'. Routers are handed the logits of the exact model: which
    expert is chosen may hang on a rounding."""
    kept: dict[int, Tensor] = {}
    with routers(c.net, kept.setdefault):
        exact = logits(c.net, asked)
    off, device = [], c.compared[1]
    for plain in (False, True):
        net = _same_weights(c, torch.bfloat16, plain=plain, device=device).eval()
        with routers(net, lambda layer, own: kept[layer].to(own)):
            off.append(
                float((logits(net, asked.on(device)).cpu().double() - exact).norm() / exact.norm().clamp_min(1e-30))
            )
    return off[0], off[1]


@contextmanager
def routers(net: Transformer, put: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Inside, the logits of the nth router are `put(n, its own)`."""
    found = [module for module in net.modules() if isinstance(module, Router)]
    hooks = [
        module.register_forward_hook(lambda module, given, own, n=n: put(n, own)) for n, module in enumerate(found)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backends(c: Composed) -> Row:
    """Outputs and gradients by every backend that the composition permits, on rows of more than one tile."""
    name, attn = "backends agree", c.experiment.arch.attn
    if not hasattr(attn, "backend"):
        return not_asked(name, f"attn={attn.name} has no backend to choose")
    permitted: list[str] = []
    refused: list[str] = []
    for backend in BACKENDS:
        wanted = dataclasses.replace(c.experiment, attn=given(attn, backend=backend, dropout=0.0))
        (refused if rules.check(wanted) else permitted).append(backend)
    asked = long_rows(c)
    found = {}
    for backend in permitted:
        arch = without_dropout(c.arch)
        net = c.build(given(arch, attn=given(arch.attn, backend=backend)))
        net.load_state_dict(c.net.state_dict())
        found[backend] = (logits(net, asked), gradients(net, asked))
    figure = f"{', '.join(permitted)}" + (f" (refused: {', '.join(refused)})" if refused else "")
    if len(found) < 2:
        return Row(name, "pass", figure)
    first, *others = found.values()
    off = max(max(distance(out, first[0]), gradient_distance(grad, first[1])[0]) for out, grad in others)
    state = "pass" if off <= EXACT else "fail"
    return Row(name, state, f"{figure}: off by at most {off:.2g}", "" if state == "pass" else f"allowed {EXACT:g}")
