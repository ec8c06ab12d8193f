"""Compiled blocks: no graph breaks, few graphs, and the gradients of eager code per tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lmlab.model.attn import SoftmaxAttention
from tests.composed import grads, model, rows, same_grads

# Each compiles for about 10 s, so fp32 has one case, with both norms; precision goes wrong in bf16 first.
CASES = {
    "bf16-prenorm-rope": {"block": "prenorm", "pos": "rope", "attn": "gqa"},
    "bf16-postnorm-alibi": {"block": "postnorm", "pos": "alibi", "norm": "layernorm", "ffn": "gelu"},
    "bf16-sandwich-t5-softcap": {"block": "sandwich", "pos": "t5", "attn": ("gqa", {"softcap": 5.0}), "ffn": "geglu"},
    "bf16-deepnorm-mla-tiled": {"block": "deepnorm", "attn": ("mla", {"backend": "tiled"})},
    "fp32-experts": {"moe": ("topk", {"capacity_factor": 0.75, "overflow": "reroute", "n_shared": 1, "z_coef": 0.1})},
    "fp32-postnorm-rope": {"block": "postnorm", "norm": "layernorm", "attn": ("gqa", {"qk_norm": "head"})},
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_compiled_gradients_are_the_eager_ones_per_tensor(case):
    dtype, tol = (torch.bfloat16, 4e-2) if case.startswith("bf16") else (torch.float32, 2e-5)
    eager = model(dtype, model={"n_layers": 2, "d_model": 32, "n_heads": 2}, **CASES[case]).train()
    compiled = copy.deepcopy(eager)
    compiled.compile_blocks()
    tokens, positions = rows(4)
    kwargs = {"targets_BT": tokens.roll(-1, 1)}
    got = grads(compiled, tokens, positions, **kwargs)
    assert all(g.isfinite().all() for g in got.values())
    same_grads(got, grads(eager, tokens, positions, **kwargs), tol)


def test_blocks_share_graphs_and_lengths_cost_one_more():
    counter = CompileCounter()
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


def test_flex_in_compiled_blocks_costs_no_graph_a_step(monkeypatch):
    """Masks and biases are new functions in each forward, of the same code: forward only, on the CPU."""
    monkeypatch.setattr(SoftmaxAttention, "choose", lambda *asked, **how: ("flex", "asked by this test"))
    counter = torch._dynamo.testing.CompileCounter()
    sizes = {"n_layers": 4, "d_model": 64, "n_heads": 2, "seq_len": 160}
    attn = ("gqa", {"softcap": 5.0, "window": 40, "pattern": "SL"})
    net = model(torch.float32, model=sizes, pos="t5", attn=attn).eval()
    plain = copy.deepcopy(net)
    for block in net.blocks:
        block.compile(fullgraph=True, backend=counter)
    tokens, positions = rows(2, 160)
    with torch.no_grad():
        for length in (50, 60, 70):
            for documents in (None, positions // length):
                got = net(tokens, positions, documents_BT=documents).logits_BTV
                torch.testing.assert_close(got, plain(tokens, positions, documents_BT=documents).logits_BTV)
    assert counter.frame_count == 2 * 2  # kinds of layers, with and without documents


KINDS: dict[str, tuple[int, int, dict]] = {
    "all alike": (1, 2, {}),
    "windows": (2, 3, {"attn": ("mha", {"window": 5, "pattern": "SL"})}),
    "windows-nope": (3, 4, {"attn": ("mha", {"window": 5, "pattern": "SL", "nope_every_n_layers": 4})}),
    "windows-experts": (
        3,
        3,
        {"attn": ("mha", {"window": 5, "pattern": "SL"}), "moe": ("topk", {"first_dense_layers": 1})},
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_there_are_three_graphs_for_each_kind_of_layer_and_no_breaks(case, monkeypatch):
    """One with gradients, one without, one for all further lengths: PERFORMANCE's rule."""
    kinds, n_layers, chosen = KINDS[case]
    counter, compile_ = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_(self, backend=counter, **how))
    net = model(torch.float32, model={"n_layers": n_layers, "d_model": 32, "n_heads": 2}, **chosen)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        net.compile_blocks()
        for _ in range(2):
            grads(net.train(), *rows(2, 16), targets_BT=rows(2, 16)[0])
        assert counter.frame_count == kinds
        with torch.no_grad():
            net.eval()(*rows(2, 16))
            assert counter.frame_count == 2 * kinds
            for length in (24, 40, 33):
                net(*rows(2, length))
        assert counter.frame_count == 3 * kinds
        assert counter.frame_count < torch._dynamo.config.recompile_limit
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_run_stays_within_the_recompile_limit(monkeypatch):
    """What a run does to one compiled model, in the precision where short rows and long ones attend differently. A
    limit that is hit is an error under fullgraph."""
    counter, compile_ = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_(self, backend=counter, **how))
    with torch._dynamo.config.patch(recompile_limit=1):
        net = model(torch.bfloat16, model={"d_model": 32, "n_heads": 2, "dropout": 0.1})
        net.compile_blocks()
        for _ in range(2):
            for B, T in ((4, 16), (3, 16)):  # a step, and its last micro-batch with fewer rows
                grads(net.train(), *rows(B, T), targets_BT=rows(B, T)[0])
            with torch.no_grad():
                for B, T in ((4, 16), (4, 24), (1, 40), (1, 600)):
                    net.eval()(*rows(B, T))
        assert counter.frame_count < torch._dynamo.config.recompile_limit


def test_many_models_of_a_process_stay_within_the_limit(monkeypatch):
    """Graphs are counted per code object, whichever model they are of: benchmarks and sweeps make many in a process."""
    counter, compile_ = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile_(self, backend=counter, **how))
    nets = []
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for ffn in ("swiglu", "glu", "gelu", "relu", "silu", "bilinear", "reglu", "geglu", "relu2", "gelu_tanh"):
            net = model(torch.float32, model={"d_model": 32, "n_heads": 2}, ffn=ffn)
            net.compile_blocks()
            grads(net.train(), *rows(2, 16), targets_BT=rows(2, 16)[0])
            nets.append(net)
    assert counter.frame_count >= len(nets)
