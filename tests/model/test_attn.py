"""Attention: grouping, head size, windows, backends, dropout, rows with nothing to attend."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.attn import Attention, SoftmaxAttention
from lmlab.model.dims import Dims
from lmlab.model.mask import CAUSAL, Mask, documents, padding, window
from lmlab.model.pos import PosTables
from tests.composed import close, grads, model, peaked, rows, same_grads

BACKENDS = ["sdpa", "dense", "tiled"]
OPS = resolve(Auto(), "cpu", torch.float64)
DIMS = Dims(d_model=32, n_heads=4, head_dim=8, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=8)


def part(spec, dims=DIMS):
    attn = Attention(spec, dims, OPS).double()
    with torch.no_grad():
        for p in attn.parameters():
            p.normal_(std=0.4)
    return attn.eval()


def applied(attn, x, mask=CAUSAL):
    positions = torch.arange(x.shape[1]).expand(x.shape[:2])
    return attn(x, attn.prepare(mask, PosTables(), positions, positions, x.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_mask_and_positions_it_is_permutation_equivariant(backend):
    attn, x, order = part(specs.GQA(backend=backend)), torch.randn(2, 9, 32).double(), torch.randperm(9)
    close(applied(attn, x[:, order], Mask()), applied(attn, x, Mask())[:, order])


def test_it_is_torchs_multi_head_attention():
    attn, x = part(specs.MHA(bias_qkv=True, bias_o=True)), torch.randn(2, 9, 32).double()
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([attn.q.weight, attn.k.weight, attn.v.weight]))
        theirs.in_proj_bias.copy_(torch.cat([attn.q.bias, attn.k.bias, attn.v.bias]))
        theirs.out_proj.weight.copy_(attn.o.weight)
        theirs.out_proj.bias.copy_(attn.o.bias)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    close(applied(attn, x), theirs(x, x, x, attn_mask=hidden, need_weights=False)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [1, 2])
def test_gqa_is_mha_with_keys_and_values_repeated_per_group(backend, K):
    few, many = part(specs.GQA(n_kv_heads=K, backend=backend)), part(specs.MHA(backend=backend))
    with torch.no_grad():
        many.q.weight.copy_(few.q.weight)
        many.o.weight.copy_(few.o.weight)
        for name in ("k", "v"):
            heads = getattr(few, name).weight.view(K, 8, 32).repeat_interleave(4 // K, 0)
            getattr(many, name).weight.copy_(heads.reshape(32, 32))
    x = torch.randn(2, 9, 32).double()
    close(applied(few, x), applied(many, x))


def test_mqa_has_one_kv_head_and_head_dim_may_differ():
    dims = Dims(d_model=32, n_heads=4, head_dim=24, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=24)
    attn = part(specs.MQA(head_dim=24), dims)
    shapes = {name: tuple(p.shape) for name, p in attn.named_parameters()}
    assert shapes == {"q.weight": (96, 32), "k.weight": (24, 32), "v.weight": (24, 32), "o.weight": (32, 96)}
    assert attn.scale == pytest.approx(24**-0.5)
    assert applied(attn, torch.randn(1, 5, 32).double()).shape == (1, 5, 32)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_window_on_every_backend(backend):
    attn, x = part(specs.MHA(window=3, backend=backend)), torch.randn(1, 5, 32).double().requires_grad_()
    out = applied(attn, x)
    reached = [
        sum(torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0).item() for i in range(5)
    ]
    assert reached == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_windowed_layers_reach_as_far_as_two_windows(backend):
    net = peaked(model(attn=("mha", {"window": 4, "backend": backend}), pos="none"))
    tokens, positions = rows(1)
    edited = tokens.clone()
    edited[0, 0] = (edited[0, 0] + 1) % 97
    with torch.no_grad():
        moved = (net(tokens, positions).logits_BTV != net(edited, positions).logits_BTV)[0].any(-1)
    assert moved.nonzero().flatten().tolist() == list(range(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_with_nothing_to_attend_gives_zero_and_finite_gradients(backend):
    attn, x = part(specs.MHA(backend=backend)), torch.randn(2, 5, 32).double().requires_grad_()
    valid = torch.tensor([[False, False, True, True, True], [True] * 5])
    out = applied(attn, x, CAUSAL & padding(valid))
    assert out[0, :2].abs().max() == 0
    assert out[0, 2:].abs().min() > 0
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert grad.isfinite().all()
    assert grad[0, :2].abs().max() == 0


def test_qk_norm_has_one_weight_per_channel_for_q_and_for_k():
    attn = part(specs.GQA(qk_norm="head"))
    assert attn.q_norm.weight.shape == attn.k_norm.weight.shape == (8,)
    assert attn.q_norm.weight is not attn.k_norm.weight


@pytest.mark.parametrize("kind", ["head", "full"])
def test_the_eps_of_qk_norm_is_its_own(kind):
    """(mean(q²) + eps)^−½: with an eps far above the mean square q is divided by √eps, and nothing else changes."""
    large, small = part(specs.GQA(qk_norm=kind, qk_norm_eps=1e8)), part(specs.GQA(qk_norm=kind))
    assert (large.q_norm.eps, large.k_norm.eps) == (1e8, 1e8)
    assert (small.q_norm.eps, small.k_norm.eps) == (1e-6, 1e-6)
    q = torch.randn(3, large.q_norm.weight.numel()).double()
    assert torch.allclose(large.q_norm(q), q / 1e4 * large.q_norm.weight, rtol=1e-6)


def test_key_value_heads_by_how_many_queries_share_one():
    assert [specs.GQA(queries_per_kv=4).kv_heads(H) for H in (4, 8, 32)] == [1, 2, 8]
    assert [specs.GQA().kv_heads(H) for H in (1, 4, 32)] == [1, 2, 16]
    assert specs.GQA(n_kv_heads=2).kv_heads(32) == 2


def test_qk_norm_before_or_after_rope_is_the_same_with_unit_weights():
    x = torch.randn(1, 6, 4, 8).double()
    norm, angle = torch.nn.functional.rms_norm, torch.randn(1, 6, 1, 4).double()
    turn = lambda y: OPS.rope["half"](y, angle.cos(), angle.sin())  # noqa: E731
    close(turn(norm(x, (8,), None, 1e-6)), norm(turn(x), (8,), None, 1e-6))


def test_qk_norm_makes_scores_independent_of_the_projections_scale():
    attn, x = part(specs.MHA(qk_norm="head")), torch.randn(1, 6, 32).double()
    before = applied(attn, x)
    with torch.no_grad():
        attn.q.weight.mul_(50)
        attn.k.weight.mul_(50)
    close(applied(attn, x), before, 1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "dense"])
def test_dropout_acts_in_training_only(backend):
    net = model(torch.float32, attn=("mha", {"dropout": 0.5, "backend": backend}))
    tokens, positions = rows()
    first, second = (net(tokens, positions).logits_BTV for _ in range(2))
    assert torch.equal(first, second)
    net.train()
    assert not torch.equal(net(tokens, positions).logits_BTV, first)
    torch.manual_seed(3)
    once = net(tokens, positions).logits_BTV
    torch.manual_seed(3)
    assert torch.equal(net(tokens, positions).logits_BTV, once)


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "none"])
@pytest.mark.parametrize(("attn", "window"), [("gqa", None), ("gqa", 4), ("mla", None), ("mla", 4)])
@pytest.mark.parametrize("packed", [True, False], ids=["documents", "stream"])
def test_backends_agree(pos, attn, window, packed):
    tokens, positions = rows()
    ids = (torch.arange(16) // 6).expand(2, 16) if packed else None
    nets = [model(pos=pos, attn=(attn, {"window": window, "backend": backend})) for backend in BACKENDS]
    kwargs = {"documents_BT": ids, "targets_BT": tokens.roll(-1, 1)}
    state = peaked(nets[0]).state_dict()
    if pos == "t5":
        state["pos.weight"] = torch.randn_like(state["pos.weight"])
    found = []
    for net in nets:
        net.load_state_dict(state)
        found.append(grads(net, tokens, positions, **kwargs))
    same_grads(found[1], found[0], 1e-9)
    same_grads(found[2], found[0], 1e-9)


def test_a_cap_on_the_scores_is_dense_or_tiled():
    tokens, positions = rows()
    nets = [model(attn=("gqa", {"softcap": 20.0, "backend": backend})) for backend in ("auto", "tiled")]
    first, second = (grads(peaked(net), tokens, positions, targets_BT=tokens) for net in nets)
    same_grads(first, second, 1e-9)
    assert nets[0].paths()["attention"] == "dense (a cap on the scores)"


@pytest.mark.parametrize(
    ("mask", "biased", "dtype", "keys", "expected"),
    [
        (CAUSAL, False, torch.float32, 256, "sdpa"),
        (CAUSAL, False, torch.bfloat16, 256, "dense"),
        (CAUSAL, False, torch.bfloat16, 4096, "sdpa"),
        (CAUSAL, True, torch.float32, 256, "dense"),
        (CAUSAL, True, torch.float32, 512, "tiled"),
        (CAUSAL, True, torch.bfloat16, 512, "dense"),
        (CAUSAL, True, torch.bfloat16, 4096, "tiled"),
        (CAUSAL & documents(torch.zeros(1, 1)), False, torch.float32, 256, "dense"),
        (CAUSAL & documents(torch.zeros(1, 1)), False, torch.float32, 512, "sdpa"),
        (CAUSAL & documents(torch.zeros(1, 1)), False, torch.bfloat16, 512, "dense"),
        (CAUSAL & documents(torch.zeros(1, 1)), True, torch.float32, 4096, "tiled"),
    ],
    ids=[
        "fp32",
        "bf16-short",
        "bf16-long",
        "bias",
        "longer-bias",
        "bf16-bias",
        "bf16-long-bias",
        "documents",
        "more",
        "bf16-more",
        "long",
    ],
)
def test_auto_follows_a_fixed_rule(mask, biased, dtype, keys, expected):
    scores = mask.scores(slope_H=torch.ones(4) if biased else None)
    chosen = lambda spec, T=keys: part(spec).choose(scores, T, keys, torch.device("cpu"), dtype)[0]  # noqa: E731
    assert chosen(specs.MHA()) == expected
    assert [chosen(specs.MHA(backend=name)) for name in BACKENDS] == BACKENDS
    assert chosen(specs.MHA(), 1) == "sdpa"
    assert chosen(specs.MHA(softcap=30.0), 1) == "dense"


@pytest.mark.parametrize(
    ("mask", "more", "spec", "expected"),
    [
        (CAUSAL, {}, specs.MHA(), "sdpa"),
        (CAUSAL, {"slope_H": torch.ones(4)}, specs.MHA(), "flex"),
        (CAUSAL, {"bias_HR": torch.ones(4, 8)}, specs.MHA(), "flex"),
        (CAUSAL, {}, specs.MHA(softcap=30.0), "flex"),
        (CAUSAL & window(8), {}, specs.MHA(), "flex"),
        (CAUSAL & documents(torch.zeros(1, 1)), {}, specs.MHA(), "flex"),
        (CAUSAL & window(8), {}, specs.MHA(dropout=0.1), "sdpa"),
        (CAUSAL & window(8), {}, specs.MHA(softcap=30.0, dropout=0.1), "dense"),
        (CAUSAL & window(8), {}, specs.MLA(nope_dim=8), "flex"),
        (CAUSAL & window(8), {}, specs.MLA(v_dim=8), "sdpa"),
    ],
    ids=["plain", "alibi", "t5", "softcap", "window", "documents", "dropout", "both", "latent", "narrow"],
)
def test_on_cuda_flex_computes_what_sdpa_needs_a_mask_for(monkeypatch, mask, more, spec, expected):
    monkeypatch.setattr("lmlab.model.attn.triton_installed", lambda: True)
    attn = SoftmaxAttention(spec, dataclasses.replace(DIMS, d_model=64, head_dim=16), OPS)
    scores = mask.scores(softcap=getattr(spec, "softcap", None), **more)
    asked: Any = (scores, 256, 256, torch.device("cuda"))
    assert attn.choose(*asked, torch.bfloat16)[0] == expected
    assert attn.choose(*asked, torch.float64)[0] != "flex"
    assert attn.choose(*asked, torch.bfloat16, cached=True)[0] != "flex"
    monkeypatch.setattr("lmlab.model.attn.triton_installed", lambda: False)
    assert attn.choose(*asked, torch.bfloat16)[0] != "flex"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_asked_by_name_is_used_and_recorded(backend):
    net = model(attn=("mha", {"backend": backend}), pos="alibi")
    assert net.paths()["attention"].startswith(backend)
    net(*rows())
    assert net.paths()["attention"] == f"{backend} (attn.backend)"


def test_kinds_of_layers_share_one_view():
    net = model()
    _, positions = rows()
    views = net.views(CAUSAL, positions, torch.float64)
    assert views[0] is views[1]


def test_tables_and_masks_are_built_once_a_forward(monkeypatch):
    made = []
    net = model(pos="t5", model={"n_layers": 4}, attn=("gqa", {"window": 4, "pattern": "SL", "backend": "dense"}))
    count = lambda name, f: lambda *args: (made.append(name), f(*args))[1]  # noqa: E731
    monkeypatch.setattr(net.pos, "tables", count("tables", net.pos.tables))
    for block in net.blocks:
        attn = block.attn
        attn.ops = dataclasses.replace(attn.ops, render={n: count(n, f) for n, f in attn.ops.render.items()})
    net(*rows())
    assert sorted(made) == ["dense", "dense", "tables"]  # two kinds of layers, four layers
