"""Compiled blocks: no graph breaks, few graphs, and the gradients of eager code per tensor."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.composed import grads, model, rows, same_grads

CASES = {
    "prenorm-rope": {"block": "prenorm", "pos": "rope", "attn": "gqa"},
    "postnorm-alibi": {"block": "postnorm", "pos": "alibi", "norm": "layernorm", "ffn": "gelu"},
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
def test_compiled_gradients_are_the_eager_ones_per_tensor(case, dtype, tol):
    eager = model(dtype, model={"n_layers": 2, "d_model": 32, "n_heads": 2}, **CASES[case]).train()
    compiled = copy.deepcopy(eager)
    compiled.compile_blocks()
    tokens, positions = rows(4)
    kwargs = {"targets_BT": tokens.roll(-1, 1)}
    got = grads(compiled, tokens, positions, **kwargs)
    assert all(g.isfinite().all() for g in got.values())
    same_grads(got, grads(eager, tokens, positions, **kwargs), tol)


def test_blocks_share_graphs_and_lengths_cost_one_more():
    counter = torch._dynamo.testing.CompileCounter()
    net = model(torch.float32, model={"n_layers": 4, "d_model": 32, "n_heads": 2, "dropout": 0.1}).train()
    for block in net.blocks:
        block.compile(fullgraph=True, backend=counter)
    for length in (16, 16):
        tokens, positions = rows(2, length)
        grads(net, tokens, positions, targets_BT=tokens)
    assert counter.frame_count == 1
    with torch.no_grad():
        net.eval()(*rows(2, 16))
    assert counter.frame_count == 2
    with torch.no_grad():
        for length in (9, 11, 13):
            net(*rows(2, length))
    assert counter.frame_count == 3
