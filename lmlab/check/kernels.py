"""Other ways to the same model: the reference kernels against the fastest ones, and the backends of attention."""

from __future__ import annotations

import dataclasses

import torch

from lmlab.check.composed import Composed, Rows, gradients, without_dropout
from lmlab.check.invariants import logits, spread
from lmlab.check.rows import EXACT, Row, distance, gradient_distance, not_asked
from lmlab.check.small import given
from lmlab.compat import rules
from lmlab.model.transformer import Transformer

FP32, FP32_GRADIENTS = 2e-5, 1e-4
BF16 = 0.02  # the fastest kernels may be this much further from float64 than the reference ones, relative to the norm
BACKENDS = ("dense", "sdpa", "tiled")
LONG = 640  # more than one tile of queries and of keys


def against_reference(c: Composed) -> Row:
    """Outputs and gradients of kernels=auto and kernels=reference in float64, fp32 and bf16."""
    asked, said = c.rows(), []
    for dtype, tol, tol_grads in ((torch.float64, EXACT, EXACT), (torch.float32, FP32, FP32_GRADIENTS)):
        plain, fast = (_same_weights(c, dtype, plain=p) for p in (True, False))
        off = distance(logits(fast, asked), logits(plain, asked))
        of_plain, of_fast = gradients(plain, asked), gradients(fast, asked)
        off_grads, where = gradient_distance(of_fast, of_plain)
        said.append(f"{str(dtype).removeprefix('torch.')} {max(off, off_grads):.1g}")
        if off <= tol and dtype != torch.float64 and off_grads > tol_grads:
            exact = gradients(_same_weights(c, torch.float64, plain=True), asked)
            errors = gradient_distance(of_fast, exact)[0], gradient_distance(of_plain, exact)[0]
            if errors[0] <= max(tol_grads, errors[1]):  # it is the rounding of the reference that sets them apart
                said[-1] += f" (from float64 {errors[0]:.1g}, the reference {errors[1]:.1g})"
                continue
        if not (off <= tol and off_grads <= tol_grads):
            figure = f"{said[-1]} ({'outputs' if off > tol else where})"
            return Row("kernels = reference", "fail", figure, f"allowed {tol:g}, gradients {tol_grads:g}")
    errors = _in_bf16(c, asked)
    said.append("bfloat16 {:.1g} against {:.1g} of the reference".format(*errors))
    state = "pass" if errors[0] <= errors[1] + BF16 else "fail"
    return Row("kernels = reference", state, "; ".join(said), "" if state == "pass" else f"allowed {BF16:g} more")


def _same_weights(c: Composed, dtype: torch.dtype, *, plain: bool) -> Transformer:
    net = c.with_kernels(dtype, plain=plain)
    net.load_state_dict(c.net.state_dict())
    return net


def _in_bf16(c: Composed, asked: Rows) -> tuple[float, float]:
    """‖error‖ / ‖exact‖ of the outputs in bf16: of the fastest kernels and of the reference ones. In eval mode: what a
    batch norm would add in train mode is not the kernels'."""
    exact = logits(c.net, asked)
    off = []
    for plain in (False, True):
        net = _same_weights(c, torch.bfloat16, plain=plain).eval()
        off.append(float((logits(net, asked).double() - exact).norm() / exact.norm().clamp_min(1e-30)))
    return off[0], off[1]


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
    asked = _long(c)
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


def _long(c: Composed) -> Rows:
    """A row of 640 tokens; with a table of positions its last ones are repeated."""
    asked = c.rows(1, LONG)
    last = int(spread(c, c.rows(1)).positions_BT.max()) if hasattr(c.net.pos, "weight") else LONG
    return dataclasses.replace(asked, positions_BT=asked.positions_BT.clamp_max(last))
