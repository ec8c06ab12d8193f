"""Experts behind a router, as modules: equal to one ffn where they must be, gradients, groups, extremes."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch

from lmlab.config.load import load
from lmlab.cost.flops import active_parameters, matmul_parameters
from lmlab.kernels.resolve import resolve
from lmlab.model.ffn import FFN
from lmlab.model.moe import MoE
from lmlab.model.spec import GLU, SwiGLU, TopK
from lmlab.model.transformer import build
from lmlab.train.optim import adamw
from tests.composed import close

SMALL = ["model=nano", "model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.seq_len=16"]
VOCAB = 29


def net(*words, dtype=torch.float64, seed=0, moe=None):
    """moe: a router that the command line would refuse."""
    own = [w for w in SMALL if w.partition("=")[0] not in {x.partition("=")[0] for x in words}]
    exp = load([*own, "train.batch_tokens=64", *words]).experiment
    arch = exp.arch if moe is None else dataclasses.replace(exp.arch, moe=moe)
    made = build(arch, VOCAB, resolve(exp.kernels, "cpu", dtype), seed=seed, device="cpu", dtype=dtype)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.ndim >= 2:  # far from nothing: routers that choose, experts that differ
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name) + p.numel()))
    return made


def tokens(B=4, T=16, seed=0):
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def called(model, ids, **more):
    return model(ids, torch.arange(ids.shape[1]).expand(ids.shape), **more)


def trained(model, ids, weights=None, valid=None):
    """(loss, penalty, gradients) of one pass."""
    model.zero_grad(set_to_none=True)
    out = called(model, ids, targets_BT=ids.roll(-1, 1), weights_BT=weights, valid_BT=valid)
    out.objective.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------- one ffn


@pytest.mark.parametrize("ffn", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("bias", ["false", "true"])
def test_one_expert_is_the_dense_ffn(ffn, bias):
    words = [f"ffn={ffn}", f"ffn.bias={bias}"]
    one = net(*words, moe=TopK(n_experts=1, top_k=1, norm_topk=False, aux_coef=0.0))
    dense = net(*words)
    state = {
        name.replace(".experts.ffn.", "."): t[0] if ".experts." in name else t
        for name, t in one.state_dict().items()
        if ".router." not in name
    }
    dense.load_state_dict(state)
    close(called(one, tokens()).logits_BTV, called(dense, tokens()).logits_BTV)


def test_equal_experts_are_the_dense_ffn_whoever_is_chosen():
    many = net("moe=topk", "moe.n_experts=5", "moe.top_k=3")
    with torch.no_grad():
        for name, p in many.named_parameters():
            if ".experts." in name:
                p.copy_(p[:1].expand_as(p))
    dense = net()
    dense.load_state_dict(
        {
            n.replace(".experts.ffn.", "."): t[0] if ".experts." in n else t
            for n, t in many.state_dict().items()
            if ".router." not in n
        }
    )
    close(called(many, tokens()).logits_BTV, called(dense, tokens()).logits_BTV)


@pytest.mark.parametrize("overflow", ["drop", "reroute"])
@pytest.mark.parametrize("priority", ["position", "probability"])
def test_a_large_capacity_is_none(overflow, priority):
    free = net("moe=topk")
    wide = net(moe=TopK(capacity_factor=100.0, overflow=overflow, priority=priority))
    wide.load_state_dict(free.state_dict())
    ids = tokens()
    (out, grads), (expected, of_free) = trained(wide, ids), trained(free, ids)
    close(out.objective, expected.objective)
    for name, grad in of_free.items():
        close(grads[name], grad)


# ---------------------------------------------------------------- hand-made logits


def router(spec, logits):
    """(pairs by token, stats) of one group with these logits."""
    made = net()
    moe = MoE(spec, made.dims, made.ops, 0, ffn=SwiGLU(d_ff=4)).double()
    pairs, stats = moe.route(torch.tensor([logits], dtype=torch.float64), None)
    taken: dict[int, list[tuple[int, float]]] = {t: [] for t in range(len(logits))}
    for t, e, w in zip(pairs.tokens_M.tolist(), pairs.experts_M.tolist(), pairs.weights_M.tolist(), strict=True):
        if e < spec.n_experts:
            taken[t].append((e, w))
    return taken, stats


LOGITS = [[math.log(p) for p in row] for row in ([0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.1, 0.2, 0.7])]


def test_weights_of_the_chosen():
    taken, stats = router(TopK(n_experts=3, top_k=2, norm_topk=False), LOGITS[:1])
    assert [e for e, _ in taken[0]] == [0, 1]
    assert [w for _, w in taken[0]] == pytest.approx([0.7, 0.2])
    taken, _ = router(TopK(n_experts=3, top_k=2, weight_scale=2.0), LOGITS[:1])
    assert [w for _, w in taken[0]] == pytest.approx([2 * 7 / 9, 2 * 2 / 9])  # the softmax over the two logits, twice
    assert (stats.dropped, stats.asked) == (0, 2)


def test_what_finds_no_room_is_dropped_and_counted():
    """Capacity ceil(1·4/3·0.5) = 1: of three tokens at expert 0 the first stays, or the surest."""
    spec = TopK(n_experts=3, top_k=1, norm_topk=False, capacity_factor=0.5)
    taken, stats = router(spec, LOGITS)
    assert [[e for e, _ in taken[t]] for t in range(4)] == [[0], [], [], [2]]
    assert (stats.dropped, stats.asked, stats.load_E.tolist()) == (2, 4, [3, 0, 1])
    spec.priority = "probability"
    assert [[e for e, _ in router(spec, LOGITS)[0][t]] for t in range(4)] == [[], [], [0], [2]]
    spec.priority, spec.overflow = "position", "reroute"
    taken, stats = router(spec, LOGITS)
    assert [[e for e, _ in taken[t]] for t in range(4)] == [[0], [1], [2], []]
    assert taken[1][0][1] == pytest.approx(0.3)
    assert stats.dropped == 1


def test_all_choices_of_a_token_come_before_those_of_the_next():
    """Causal: the second choice of token 0 is before the first choice of token 1."""
    rows = [[math.log(p) for p in row] for row in ([0.6, 0.3, 0.1], [0.2, 0.7, 0.1])]
    taken, _ = router(TopK(n_experts=3, top_k=2, capacity_factor=0.75), rows)  # room for one
    assert [[e for e, _ in taken[t]] for t in range(2)] == [[0, 1], []]


def test_a_bias_steers_the_choice_and_not_the_weight():
    moe = net("moe=topk", "moe.balance=aux_free", "moe.n_experts=3", "moe.norm_topk=false").blocks[0].ffn
    moe.router.bias.copy_(torch.tensor([-1.0, 0.0, 0.0]))
    pairs, _ = moe.route(torch.tensor([LOGITS[:1]], dtype=torch.float64), None)
    assert pairs.experts_M.tolist() == [1, 2]
    assert pairs.weights_M.tolist() == pytest.approx([0.2, 0.1])
    moe.after_step(torch.tensor([9, 3, 0]))  # mean 4
    assert moe.router.bias.tolist() == pytest.approx([-1.001, 0.001, 0.001])


# ---------------------------------------------------------------- the balance loss


def penalty_of(model, ids):
    out = called(model, ids, targets_BT=ids)
    return out.penalty.item() / ids.numel()


def test_two_layers_collapsed_to_opposite_experts_give_two():
    """Per layer, then the mean: 2.0 of two experts; the mean of the loads would say 1.0."""
    model = net("moe=topk", "moe.n_experts=2", "moe.top_k=1", "moe.norm_topk=false", "moe.aux_coef=1", "norm=layernorm")
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.norm2.weight.zero_()
            block.norm2.bias.fill_(1.0)  # every token is the vector of ones before its router
            block.ffn.router.weight.zero_()
            block.ffn.router.weight[layer % 2] = 50.0
    assert penalty_of(model, tokens()) == pytest.approx(2.0, abs=1e-12)


def test_uniform_routers_give_exactly_one_in_fp32():
    model = net("moe=topk", "moe.aux_coef=1", dtype=torch.float32)
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.router.weight.zero_()
    assert penalty_of(model, tokens()) == 1.0


def test_the_gradient_is_linear_in_aux_coef_and_off_at_zero():
    ids, state = tokens(), net("moe=topk").state_dict()
    grads = {}
    for coef in (0.0, 0.5, 1.0):
        model = net("moe=topk", f"moe.aux_coef={coef}")
        model.load_state_dict(state)
        out, found = trained(model, ids)
        grads[coef] = found
        assert (out.penalty is None) == (coef == 0.0)
    none = net("moe=topk", "moe.balance=none")
    none.load_state_dict(state)
    off = trained(none, ids)[1]
    for name, zero in grads[0.0].items():
        assert torch.equal(zero, off[name])
        close(grads[1.0][name] - zero, 2 * (grads[0.5][name] - zero))
    assert not torch.equal(grads[1.0]["blocks.0.ffn.router.weight"], off["blocks.0.ffn.router.weight"])


@pytest.mark.parametrize(
    "words",
    [
        ["moe=topk", "moe.z_coef=0.1"],
        ["moe=switch"],
        ["moe=expert_choice", "moe.z_coef=0.1"],
        ["moe=topk", "moe.capacity_factor=0.7", "moe.overflow=reroute", "moe.score=sigmoid", "moe.n_shared=1"],
    ],
)
def test_accumulation_gives_one_gradient(words):
    """Rows whole, in twos, and one by one, on ragged weights."""
    model, ids = net(*words), tokens(8)
    weights = (torch.rand(8, 16, generator=torch.Generator().manual_seed(3)) > 0.4).double()
    weights[5] = 0  # a row that counts nowhere
    whole = trained(model, ids, weights)[1]
    for size in (4, 1):
        total = {name: torch.zeros_like(g) for name, g in whole.items()}
        for start in range(0, 8, size):
            part = slice(start, start + size)
            for name, grad in trained(model, ids[part], weights[part])[1].items():
                total[name] += grad
        for name, grad in whole.items():
            close(total[name], grad)


def test_a_batch_as_one_group_depends_on_the_split():
    """What the label says: the same tokens, whole and as rows, give other losses."""
    model, ids = net("moe=topk", "moe.group=batch", "moe.aux_coef=1", "train.micro_batch=4"), tokens()
    whole = penalty_of(model, ids)
    rows = sum(penalty_of(model, ids[b : b + 1]) for b in range(4)) / 4
    assert abs(whole - rows) > 0.01
    assert "micro-batches = whole" in model.known_failures()


# ---------------------------------------------------------------- extremes


ROUTERS = [
    ["moe=topk"],
    ["moe=topk", "moe.capacity_factor=0.3", "moe.overflow=reroute"],
    ["moe=topk", "moe.capacity_factor=0.3", "moe.priority=probability", "moe.balance=aux_free"],
    ["moe=switch"],
    ["moe=expert_choice"],
    ["moe=topk", "moe.score=sigmoid", "moe.n_expert_groups=4", "moe.n_limited_groups=2", "moe.z_coef=0.1"],
]


@pytest.mark.parametrize("words", ROUTERS, ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_breaks_when_all_is_masked_or_all_go_to_one_expert(words, dtype):
    model, ids = net(*words, dtype=dtype).train(), tokens(2)
    for valid in (torch.zeros(2, 16, dtype=torch.bool), torch.arange(16).expand(2, 16) >= torch.tensor([[0], [16]])):
        out, grads = trained(model, ids, valid=valid)
        assert out.objective.isfinite()
        assert all(g.isfinite().all() for g in grads.values())
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.router.weight.zero_()  # ties: who is chosen is the same for all
    out, grads = trained(model, ids)
    assert out.objective.isfinite()
    assert all(g.isfinite().all() for g in grads.values())


def test_an_expert_without_a_token_has_a_gradient_of_zeros():
    model = net("moe=topk", "moe.n_experts=64", "moe.top_k=1", "moe.norm_topk=false")
    out, grads = trained(model, tokens(1))
    unused = out.stats[0].load_E == 0
    assert unused.any()
    up = grads["blocks.0.ffn.experts.ffn.up.weight"]
    assert not up[unused].any()
    assert up[~unused].flatten(1).any(1).all()


@pytest.mark.parametrize("words", ROUTERS, ids=" ".join)
def test_grouped_experts_are_the_loop(words):
    """The reference computes one linear per expert; float32 to rounding, with and without biases."""
    for more in ([], ["ffn=gelu", "ffn.bias=true"]):
        fast, plain = (net(*words, *more, f"kernels={k}", dtype=torch.float32) for k in ("auto", "reference"))
        plain.load_state_dict(fast.state_dict())
        (a, of_fast), (b, of_plain) = trained(fast, tokens()), trained(plain, tokens())
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-5)
        for name, grad in of_plain.items():
            torch.testing.assert_close(of_fast[name], grad, rtol=1e-4, atol=1e-4)


def test_experts_of_an_ffn_that_does_not_stack():
    """An ffn of somebody else's is made E times, and computed one after the other."""

    class Other(FFN):
        def __init__(self, spec, dims, ops, layer=None):
            super().__init__(spec, dims, ops, layer)

    sys.modules[__name__].Other = Other
    own = net("moe=topk", "ffn=glu")
    spec = GLU()
    spec.build = f"{__name__}:Other"
    theirs = MoE(TopK(), own.dims, own.ops, 0, ffn=spec).double()
    mine = own.blocks[0].ffn
    state = {"router.weight": mine.router.weight}
    for e in range(8):
        for n in ("gate", "up", "down"):
            state[f"experts.each.{e}.{n}.weight"] = getattr(mine.experts.ffn, n).weight[e]
    theirs.load_state_dict(state)
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    close(theirs(x)[0], mine(x)[0])


def test_only_layers_that_route_have_experts():
    model = net("moe=topk", "model.n_layers=6", "moe.every_n_layers=2", "moe.first_dense_layers=2")
    assert [hasattr(block.ffn, "router") for block in model.blocks] == [False, False, False, True, False, True]
    assert [s is not None for s in called(model, tokens(1)).stats] == [False, False, False, True, False, True]


@pytest.mark.parametrize("block", ["prenorm", "deepnorm"])
def test_residual_and_deepnorm_init_reach_every_expert(block):
    exp = load([*SMALL, "moe=topk", "moe.n_shared=1", f"block={block}"]).experiment
    made = build(exp.arch, VOCAB, resolve(exp.kernels, "cpu", torch.float32), seed=0, device="cpu")
    ffn = made.blocks[0].ffn
    D, F = 32, exp.ffn.width(32)
    down = 0.02 / math.sqrt(4) if block == "prenorm" else 16**-0.25 * math.sqrt(2 / (D + F))
    for e in range(8):
        assert ffn.experts.ffn.down.weight[e].std().item() == pytest.approx(down, rel=0.08)
    assert ffn.shared.down.weight.std().item() == pytest.approx(down, rel=0.08)
    assert ffn.router.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_router_computes_in_fp32_what_it_is_given_in_bf16():
    router = net("moe=topk", dtype=torch.bfloat16).blocks[0].ffn.router
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = router(x)
    assert out.dtype == torch.float32
    exact = x.double() @ router.weight.double().T
    assert (out - exact).abs().max() < 1e-5  # bf16 would be off by 1e-2


def test_jitter_moves_the_router_in_training_only():
    model, ids = net("moe=topk", "moe.jitter=0.5"), tokens()
    model.eval()
    assert torch.equal(called(model, ids).logits_BTV, called(model, ids).logits_BTV)
    model.train()
    assert not torch.equal(called(model, ids).logits_BTV, called(model, ids).logits_BTV)


def test_stacked_biases_do_not_decay_and_are_no_products():
    exp = load([*SMALL, "moe=topk", "ffn.bias=true"]).experiment
    made = build(exp.arch, VOCAB, resolve(exp.kernels, "cpu", torch.float32), seed=0, device="cpu")
    names = {id(p): name for name, p in made.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in adamw(exp.optim, made).param_groups)
    assert "blocks.0.ffn.experts.ffn.up.weight" in decayed
    assert {"blocks.0.ffn.experts.ffn.up.bias", "blocks.0.norm1.weight"} <= kept
    plain = load([*SMALL, "moe=topk"]).experiment
    without = build(plain.arch, VOCAB, made.ops, seed=0, device="cpu")
    assert matmul_parameters(made, exp.arch) == matmul_parameters(without, plain.arch)


def test_what_a_token_goes_through_is_counted():
    """Eight experts of three D·F matrices, two of them met: by hand, of one layer."""
    exp = load([*SMALL, "moe=topk", "moe.n_shared=1", "moe.d_expert=24"]).experiment
    made = build(exp.arch, VOCAB, resolve(exp.kernels, "cpu", torch.float32), seed=0, device="cpu")
    D, F = 32, 24
    layer = 4 * D * D + 8 * D + (2 + 1) * 3 * D * F
    assert matmul_parameters(made, exp.arch) == 2 * layer + VOCAB * D
    assert active_parameters(made, exp.arch) == 2 * (layer + 2 * D) + VOCAB * D + D
    half = load([*SMALL, "moe=topk", "moe.n_shared=1", "moe.d_expert=24", "moe.capacity_factor=0.5"]).experiment
    assert matmul_parameters(made, half.arch) == 2 * (layer - 3 * D * F) + VOCAB * D
