"""train.residual_dtype: the sum that blocks add to in fp32, everything else in the half precision."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from tests.composed import model, rows

SIZES = {"n_layers": 6, "d_model": 32, "n_heads": 4, "seq_len": 32}
CASES = {
    "prenorm": {},
    "layernorm-learned": {"norm": "layernorm", "pos": "learned"},
    "sandwich": {"block": "sandwich"},
    "reordered": {"block": "reordered", "norm": ("rmsnorm", {"offset": 1})},
    "parallel-alibi": {"block": "parallel", "pos": "alibi"},
    "embed-norm": {"model": SIZES | {"embed_norm": True}, "pos": "sinusoidal"},
    "no-norm": {"norm": "none"},
    "dyt-moe": {"norm": "dyt", "moe": ("topk", {"n_experts": 4})},
}


def wide_and_narrow(case: str, dtype: torch.dtype):
    narrow = model(dtype, **({"model": SIZES} | CASES[case])).eval()
    wide = model(dtype, **({"model": SIZES} | CASES[case])).eval()
    wide.load_state_dict(narrow.state_dict())
    ops = resolve(Auto(), "cpu", dtype, torch.float32)
    for module in wide.modules():
        if hasattr(module, "ops"):
            module.ops = ops
    return wide, narrow


def stream(net, tokens, positions):
    """What enters and what leaves each block."""
    found = []
    hooks = [b.register_forward_hook(lambda _, args, out: found.extend((args[0], out[0]))) for b in net.blocks]
    out = net(tokens, positions).logits_BTV
    for hook in hooks:
        hook.remove()
    return found, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_a_wide_residual_is_fp32_and_nearer_to_float64(case, dtype):
    wide, narrow = wide_and_narrow(case, dtype)
    exact = copy.deepcopy(narrow).double()
    tokens, positions = rows(4, 32)
    with torch.no_grad():
        sums, logits = stream(wide, tokens, positions)
        narrow_sums, narrow_logits = stream(narrow, tokens, positions)
        want, _ = stream(exact, tokens, positions)
    assert {x.dtype for x in sums} == {torch.float32}
    assert {x.dtype for x in narrow_sums} == {dtype}
    assert logits.dtype == narrow_logits.dtype == dtype
    off = [float((x.double() - want[-1]).norm() / want[-1].norm()) for x in (sums[-1], narrow_sums[-1])]
    assert off[0] < 0.9 * off[1], off


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_its_gradient_through_a_wide_residual(case):
    wide, _ = wide_and_narrow(case, torch.bfloat16)
    tokens, positions = rows(2, 16)
    wide.train()(tokens, positions, targets_BT=tokens.roll(-1, 1)).loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in wide.parameters())


def test_without_it_ops_say_nothing_of_the_residual():
    ops = resolve(Auto(), "cpu", torch.bfloat16)
    assert ops.residual_dtype is None
    assert dataclasses.replace(ops, residual_dtype=torch.float32).dtype == torch.bfloat16
