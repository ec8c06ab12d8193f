"""Routing in evaluation: counts by hand, stability, what fills a batch up, decoding, units of experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.data.batches import Batch
from lmlab.eval import probes
from lmlab.eval.caches import token_by_token
from lmlab.eval.loss import evaluate, total
from lmlab.eval.routing import choices, stability
from lmlab.model.cache import Cache, CacheKind
from lmlab.runs.routing_names import FIGURES, LOAD, bars, name, parse
from lmlab.train.routing import Routing
from tests.composed import VOCAB, model, rows

BYTES = torch.ones(VOCAB, dtype=torch.long)
TOPK = ("topk", {"n_experts": 4, "top_k": 2})


def batch(B: int = 3, T: int = 16, *, filled: int = 0, seed: int = 1) -> Batch:
    """`filled`: tokens at the end that only fill it up."""
    tokens, positions = rows(B, T, seed=seed)
    weights = torch.ones(B, T)
    weights.view(-1)[B * T - filled :] = 0
    return Batch(tokens, tokens.roll(-1, 1), positions, None, weights)


def heard(net: Any, batches: list[Batch]) -> tuple[Routing, float]:
    routing = Routing()
    return routing, total(evaluate(net, batches, BYTES, hear=routing.add)).nats


# ---------------------------------------------------------------- names and bars


def test_names_are_read_back():
    assert parse(name(3, "load_max")) == ("", 3, "load_max")
    assert parse(name(12, LOAD, "val")) == ("val", 12, "load")
    words = ("val/loss", "moe/x/y", "moe/3", "part/val/moe/3/z", "probe/3/z", "val/moe/3")
    assert [parse(word) for word in words] == [None] * 6


def test_bars_stand_for_the_loads():
    assert bars([0, 1, 4, 8]) == "·▁▄█"
    assert bars([0, 0]) == "··"
    assert bars([]) == ""
    assert bars([4, 4, 8, 8, 0, 0], width=3) == "▄█·"  # means of neighbours


# ---------------------------------------------------------------- the pass of the evaluation


def test_figures_of_choices_made_by_hand():
    """A router that sends every token to experts 2 and 0: the others have none, and the balance loss is by hand."""
    net = model(moe=TOPK)
    with torch.no_grad():
        for block in net.blocks:
            block.ffn.router.weight.zero_()
    of = batch(2, 8)
    routing, _ = heard(net, [of])
    found = routing.evaluated("val")
    # equal scores: topk takes two experts, the same for every token
    for layer in range(2):
        assert sorted(found[name(layer, LOAD, "val")]) == [0, 0, 16, 16]
        assert found[name(layer, "load_max", "val")] == 2.0
        assert found[name(layer, "load_min", "val")] == 0.0
        assert found[name(layer, "unused_frac", "val")] == 0.5
        assert found[name(layer, "dropped_frac", "val")] == 0.0
        assert found[name(layer, "entropy", "val")] == pytest.approx(math.log(4))
        assert found[name(layer, "balance", "val")] == pytest.approx(1.0)  # E · Σ f · 1/E
        assert found[name(layer, "z", "val")] == pytest.approx(math.log(4) ** 2)
    assert {parse(key)[2] for key in found} == {*FIGURES, LOAD} - {"stability"}  # type: ignore[index]


def test_the_share_that_is_dropped_is_counted():
    net = model(moe=("topk", {"n_experts": 4, "top_k": 2, "capacity_factor": 1.0}))
    with torch.no_grad():
        for block in net.blocks:
            block.ffn.router.weight.zero_()
    routing, _ = heard(net, [batch(2, 8)])
    # two experts are asked by 8 tokens of a row each and have room for ceil(2·8/4) = 4
    assert routing.figures("val")[name(0, "dropped_frac", "val")] == 0.5


@pytest.mark.parametrize(
    "moe",
    [TOPK, ("switch", {"n_experts": 4}), ("expert_choice", {"n_experts": 4}), ("topk", {"capacity_factor": 0.5})],
    ids=str,
)
def test_what_fills_a_batch_up_is_no_token_of_the_split(moe):
    """The same 40 tokens as rows of 16, 16 and 8 alone, and in one batch that is filled up."""
    net = model(moe=moe)
    whole = batch(4, 16, filled=24)
    routing, nats = heard(net, [whole])
    short = Batch(*(t if t is None else t[2:3, :8] for t in (whole.tokens_BT, whole.targets_BT, whole.positions_BT,
                                                             None, whole.weights_BT)))  # fmt: skip
    apart, alone = heard(net, [whole.rows(0, 2), short])
    assert nats == pytest.approx(alone, rel=1e-12)
    one, other = routing.evaluated("val"), apart.evaluated("val")
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value == pytest.approx(other[key], rel=1e-9), key
    asked = sum(one[name(0, LOAD, "val")])
    assert asked == {"topk": 80, "switch": 40}.get(moe[0], asked)


def test_the_loss_is_that_of_language_alone():
    """However large the factors of the router's own losses are."""
    plain = model(moe=("topk", {"aux_coef": 0.0}))
    heavy = model(moe=("topk", {"aux_coef": 100.0, "z_coef": 100.0}))
    assert heard(plain, [batch()])[1] == heard(heavy, [batch()])[1]


def test_a_model_without_experts_has_no_figures():
    net = model()
    routing, _ = heard(net, [batch()])
    assert routing.evaluated("val") == {}
    assert choices(net, [batch()]) == [None, None]


# ---------------------------------------------------------------- choices and stability


@pytest.mark.parametrize(
    "moe",
    [TOPK, ("switch", {"n_experts": 4}), ("expert_choice", {"n_experts": 4}), ("topk", {"group": "batch"})],
    ids=str,
)
def test_choices_are_those_of_the_pass(moe):
    net, of = model(moe=moe), batch(3, 16, filled=20)
    routing, _ = heard(net, [of])
    for layer, asked in enumerate(choices(net, [of])):
        assert asked is not None
        assert len(asked) == 28
        assert asked.sum(0).tolist() == routing.evaluated("val")[name(layer, LOAD, "val")]
    assert not [m for m in net.modules() if m._forward_pre_hooks]


def test_a_layer_without_experts_has_no_choices():
    net = model(moe=("topk", {"n_experts": 4, "first_dense_layers": 1}))
    dense, routed = choices(net, [batch()])
    assert dense is None
    assert routed is not None
    assert list(stability([dense, routed], [dense, routed], "val")) == [name(1, "stability", "val")]


def test_stability_is_the_share_of_choices_that_stay():
    before = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    now = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=torch.bool)
    assert stability([before, None], [now, None], "val") == {"val/moe/0/stability": 0.5}
    nobody = torch.zeros(3, 4, dtype=torch.bool)
    assert stability([nobody], [nobody], "val") == {}


def test_the_same_weights_are_stable_and_others_are_not():
    one, other = model(moe=TOPK), model(moe=TOPK, seed=1)
    found = choices(one, [batch()])
    assert set(stability(choices(one, [batch()]), found, "val").values()) == {1.0}
    assert all(value < 0.9 for value in stability(choices(other, [batch()]), found, "val").values())


# ---------------------------------------------------------------- decoding

DROPLESS = {
    "topk": {},
    "sigmoid": {"score": "sigmoid"},
    "limited": {"n_experts": 8, "n_expert_groups": 4, "n_limited_groups": 2},
    "aux_free": {"balance": "aux_free", "score": "sigmoid"},
    "shared": {"n_shared": 1, "norm_topk": False},
}


def one_by_one(net: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    cache = Cache(net, CacheKind())
    parts = [(tokens[:, t : t + 1], positions[:, t : t + 1]) for t in range(tokens.shape[1])]
    with torch.no_grad():
        return torch.cat([net(*part, cache=cache).logits_BTV for part in parts], 1)


@pytest.mark.parametrize("fields", DROPLESS.values(), ids=list(DROPLESS))
def test_dropless_routing_in_decoding_is_that_of_the_whole_row(fields):
    net = model(moe=("topk", {"n_experts": 8, **fields}))
    for block in net.blocks:
        if block.ffn.router.bias is not None:
            block.ffn.router.bias.copy_(torch.linspace(-0.2, 0.2, 8))
    tokens, positions = rows(3, 16)
    with torch.no_grad():
        whole = net(tokens, positions).logits_BTV
    off = (one_by_one(net, tokens, positions) - whole).abs().max() / whole.abs().max()
    assert off < 1e-10


def test_with_capacity_decoding_drops_nothing():
    """A token alone always finds room, so that it is the model without capacity that decodes."""
    fields = {"n_experts": 4, "top_k": 2}
    tight, loose = (model(moe=("topk", fields | more)) for more in ({"capacity_factor": 0.5}, {}))
    tokens, positions = rows(2, 16)
    with torch.no_grad():
        free, full = loose(tokens, positions).logits_BTV, tight(tokens, positions).logits_BTV
    decoded = one_by_one(tight, tokens, positions)
    assert (decoded - free).abs().max() < 1e-10
    assert (decoded - full).abs().max() > 1e-3
    of = batch(2)
    told = token_by_token(tight, [of], BYTES, kind=CacheKind())
    assert told.tokens == 32
    assert told.nats == pytest.approx(total(evaluate(loose, [of], BYTES)).nats, rel=1e-12)
    assert abs(told.nats - total(evaluate(tight, [of], BYTES)).nats) > 1e-3


# ---------------------------------------------------------------- rows through a cache

TIGHT = {
    "position": ("topk", {"n_experts": 4, "capacity_factor": 0.5}),
    "probability": ("topk", {"n_experts": 4, "capacity_factor": 0.5, "priority": "probability"}),
    "reroute": ("switch", {"n_experts": 4, "capacity_factor": 0.5, "overflow": "reroute"}),
    "expert_choice": ("expert_choice", {"n_experts": 4, "capacity_factor": 1.0}),
    "batch": ("topk", {"n_experts": 4, "capacity_factor": 0.5, "group": "batch"}),
}


@pytest.mark.parametrize("filled", [0, 5, 13, 16, 24])
@pytest.mark.parametrize("moe", TIGHT.values(), ids=list(TIGHT))
def test_whole_rows_through_a_cache_give_the_loss_without_one(moe, filled):
    """Whatever room an expert has: what fills a batch up takes none of it."""
    net, of = model(moe=moe), batch(3, filled=filled)
    bare = total(evaluate(net, [of], BYTES)).nats
    for kind in (CacheKind(), CacheKind("paged"), CacheKind(window=15, sinks=4)):  # the last drops nothing either
        assert total(evaluate(net, [of], BYTES, kind=kind)).nats == pytest.approx(bare, rel=1e-12), kind


@pytest.mark.parametrize("kind", [CacheKind(window=4), CacheKind(window=3, sinks=2)], ids=str)
@pytest.mark.parametrize("moe", [moe for moe in TIGHT.values() if "group" not in moe[1]], ids=str)
def test_a_row_that_is_cut_short_is_that_row_alone_in_a_cache_that_drops(moe, kind):
    net, of = model(moe=moe), batch(2, filled=10)
    of_tokens = of.tokens_BT, of.targets_BT, of.positions_BT, None, of.weights_BT
    short = Batch(*(t if t is None else t[1:, :6] for t in of_tokens))
    alone = total(evaluate(net, [of.rows(0, 1), short], BYTES, kind=kind)).nats
    assert total(evaluate(net, [of], BYTES, kind=kind)).nats == pytest.approx(alone, rel=1e-12)


def test_a_window_of_a_cache_is_one_of_attention_whatever_room_experts_have():
    net, of = model(moe=TIGHT["position"]), batch(3, filled=10)
    cut = model(moe=TIGHT["position"], attn=("mha", {"window": 4}))
    cut.load_state_dict(net.state_dict())
    by_cache = total(evaluate(net, [of], BYTES, kind=CacheKind(window=4))).nats
    assert by_cache == pytest.approx(total(evaluate(cut, [of], BYTES)).nats, rel=1e-12)


@pytest.mark.parametrize("priority", ["position", "probability"])
def test_what_fills_a_batch_up_takes_no_room_token_by_token(priority):
    """Rows of one batch share the room: of 3 rows ceil(2·3/4) = 2 an expert, of 2 rows 1."""
    fields = {"n_experts": 4, "top_k": 2, "capacity_factor": 1.0, "group": "batch", "priority": priority}
    net, of = model(moe=("topk", fields)), batch(3, filled=16)
    told = token_by_token(net, [of], BYTES, kind=CacheKind())
    alone = token_by_token(net, [of.rows(0, 2)], BYTES, kind=CacheKind())
    assert told.tokens == alone.tokens == 32
    assert told.nats == pytest.approx(alone.nats, rel=1e-12)
    of = batch(2, filled=9)
    nats = []
    for ids in (0, 41):
        of.tokens_BT[of.weights_BT == 0] = ids
        nats.append(token_by_token(net, [of], BYTES, kind=CacheKind()).nats)
    assert nats[0] == nats[1]


# ---------------------------------------------------------------- probes


def probed(net: Any, of: Batch) -> dict[str, float]:
    return probes.as_row(probes.activations(net, of))


def by_hand(net: Any, of: Batch, layer: int) -> tuple[float, float]:
    """(share of zeros, share of dead units) with a loop over tokens and experts."""
    ffn: Any = net.blocks[layer].ffn
    kept: list[Tensor] = []
    handle = ffn.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        net(of.tokens_BT, of.positions_BT)
    handle.remove()
    pairs, _ = ffn.route(*ffn.logits(kept[0], None))
    x_ND, E = kept[0].flatten(0, 1), ffn.n_experts
    hidden: list[list[Tensor]] = [[] for _ in range(E)]
    for token, expert in zip(pairs.tokens_M.tolist(), pairs.experts_M.tolist(), strict=True):
        if expert < E:
            up = ffn.experts.ffn.up
            bias = 0 if up.bias is None else up.bias[expert]
            hidden[expert].append(torch.relu(up.weight[expert] @ x_ND[token] + bias))
    reached = [torch.stack(own) == 0 for own in hidden if own]
    zeros = torch.cat([own.flatten() for own in reached]).double().mean()
    dead = torch.stack([own.all(0) for own in reached]).double().mean()
    return float(zeros), float(dead)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "moe",
    [
        ("topk", {"n_experts": 4}),
        ("switch", {"n_experts": 8, "capacity_factor": 0.5}),
        ("expert_choice", {"n_experts": 4}),
    ],
    ids=str,
)
def test_zeros_and_dead_units_of_experts_are_those_of_the_rows_that_reached_them(moe, bias):
    net, of = model(moe=moe, ffn=("relu", {"bias": bias})), batch(2)
    if bias:
        with torch.no_grad():
            net.blocks[1].ffn.experts.ffn.up.bias[2].fill_(-1e3)
    ops = [block.ffn.experts.ops for block in net.blocks]
    found = probed(net, of)
    for layer in range(2):
        zeros, dead = by_hand(net, of, layer)
        assert found[f"probe/{layer}/ffn_zero_frac"] == pytest.approx(zeros, rel=1e-12)
        assert found[f"probe/{layer}/ffn_dead_frac"] == pytest.approx(dead, rel=1e-12)
    assert all(block.ffn.experts.ops is before for block, before in zip(net.blocks, ops, strict=True))


def test_units_of_shared_experts_count_too_and_an_expert_that_nobody_reached_has_none():
    net = model(
        moe=("topk", {"n_experts": 4, "top_k": 1, "norm_topk": False, "n_shared": 1}), ffn=("relu", {"bias": True})
    )
    with torch.no_grad():
        for block in net.blocks:
            block.ffn.router.weight.zero_()  # all to one expert
            block.ffn.experts.ffn.up.bias.fill_(-1e3)  # which is dead
            block.ffn.shared.up.bias.fill_(1e3)  # and the shared one is not
    found = probed(net, batch())
    assert found["probe/0/ffn_zero_frac"] == found["probe/0/ffn_dead_frac"] == 0.5


def test_a_step_probe_of_experts_has_every_figure():
    net, of = model(moe=TOPK), batch()
    probe = probes.StepProbe(net, net, torch.device("cpu"))
    net(of.tokens_BT, of.positions_BT, targets_BT=of.targets_BT).objective.backward()
    probe.before_update()
    torch.optim.SGD(net.parameters(), lr=1e-3).step()
    found = probe.after_update(of)
    assert {"probe/1/ffn_zero_frac", "probe/1/ffn_dead_frac", "probe/1/grad_norm"} < found.keys()
    assert all(math.isfinite(value) for value in found.values())
