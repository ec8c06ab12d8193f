"""A bf16 model against the same weights in float64: the gradient of every tensor, over as many tokens as a step has."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.composed import grads, model, rows

SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "seq_len": 64}
CASES = {
    "prenorm-rope": {"block": "prenorm", "pos": "rope", "norm": "rmsnorm"},
    "postnorm-alibi": {
        "block": "postnorm",
        "pos": "alibi",
        "norm": "layernorm",
        "attn": ("gqa", {"bias_qkv": True, "bias_o": True}),
    },
}
ZERO = ("attn.k.bias",)  # one number added to all scores of a query, where no rotation follows: its true gradient is 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bf16_gradients_are_the_float64_ones_per_tensor(case, kernels):
    narrow = model(torch.bfloat16, kernels=kernels, model=SIZES, **CASES[case]).train()
    exact = copy.deepcopy(narrow).double()
    tokens, positions = rows(32, 64)
    got, want = (grads(net, tokens, positions, targets_BT=tokens.roll(-1, 1)) for net in (narrow, exact))
    off = {n: ((got[n].double() - want[n]).norm() / want[n].norm()).item() for n in want if not n.endswith(ZERO)}
    assert len(off) > 10
    assert max(off.values()) <= 0.03, sorted(off.items(), key=lambda item: -item[1])[:5]
