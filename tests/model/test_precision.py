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
    "sandwich-t5-softcap": {"block": "sandwich", "pos": "t5", "attn": ("gqa", {"softcap": 5.0}), "ffn": "geglu"},
    "deepnorm-mla": {"block": "deepnorm", "norm": "dyt", "attn": ("mla", {"q_rank": 16}), "ffn": "relu2"},
    "parallel-tiled": {"block": "parallel", "attn": ("mqa", {"window": 9, "backend": "tiled"}), "ffn": "bilinear"},
    "reordered-full": {"block": "reordered", "norm": ("rmsnorm", {"offset": 1}), "attn": ("mha", {"qk_norm": "full"})},
    "simplified-shaped": {
        "block": "simplified",
        "attn": ("mha", {"weights": "shaped", "v_proj": "none", "o_proj": "none"}),
        "ffn": ("silu", {"beta": 2.0}),
        "model": SIZES | {"tie_embeddings": False},
    },
    "batchnorm": {"norm": ("batchnorm", {"bias": False}), "ffn": "glu"},
}
# Their true gradient is 0, or nearly: one number added to all scores of a query, where no rotation follows; a factor on
# almost all of what a norm is handed.
ZERO = ("attn.k.bias", "beta_attn")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bf16_gradients_are_the_float64_ones_per_tensor(case, kernels):
    narrow = model(torch.bfloat16, kernels=kernels, **({"model": SIZES} | CASES[case])).train()
    for name, p in narrow.named_parameters():
        if case == "simplified-shaped" and name.endswith("q.weight"):  # starts at 0, and k then has no gradient
            torch.nn.init.normal_(p, std=0.05)
    exact = copy.deepcopy(narrow).double()
    tokens, positions = rows(32, 64)
    got, want = (grads(net, tokens, positions, targets_BT=tokens.roll(-1, 1)) for net in (narrow, exact))
    off = distances(got, want)
    off = {n: d for n, d in off.items() if want[n].numel() > 1}  # a scalar's: all tokens' terms, which nearly cancel
    assert len(off) > 10
    assert max(off.values()) <= 0.03, sorted(off.items(), key=lambda item: -item[1])[:5]
    off = distances(grads(exact.float(), tokens, positions, targets_BT=tokens.roll(-1, 1)), want)
    assert max(off.values()) <= 1e-4, sorted(off.items(), key=lambda item: -item[1])[:5]


def distances(got, want):
    """‖got − want‖ / ‖want‖ by parameter."""
    return {n: ((got[n].double() - w).norm() / w.norm()).item() for n, w in want.items() if not n.endswith(ZERO)}
