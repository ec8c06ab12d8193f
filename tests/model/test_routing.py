"""Routing against values worked out by hand: places, capacity, reroute, balance, groups of experts."""

from __future__ import annotations

import pytest
import torch

from lmlab.model.routing import balance, counts, limited, places, rerouted
from lmlab.model.spec import ExpertChoice, Switch, TopK

NOBODY = 3


def test_places_by_order_and_by_value():
    experts = torch.tensor([[0, 1, 0, NOBODY, 1, 0]])
    assert places(experts, 3).tolist() == [[0, 0, 1, 0, 1, 2]]
    value = torch.tensor([[0.1, 0.5, 0.3, 0.0, 0.9, 0.2]])
    assert places(experts, 3, value).tolist() == [[2, 1, 0, 0, 0, 1]]
    assert counts(experts, 3).tolist() == [[3, 2, 0, 1]]


def test_places_of_groups_are_apart():
    experts = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert places(experts, 2).tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("spec", "tokens", "room"),
    [
        (TopK(n_experts=4, top_k=2, capacity_factor=1.25), 16, 10),
        (TopK(n_experts=4, top_k=2, capacity_factor=1e6), 16, 16),
        (TopK(n_experts=4, top_k=2), 16, None),
        (Switch(n_experts=8, capacity_factor=1.0), 9, 2),
        (Switch(n_experts=10, capacity_factor=0.7), 100, 7),  # 7.000000000000001 in floating point
        (ExpertChoice(n_experts=8, capacity_factor=2.0), 64, 16),
        (ExpertChoice(n_experts=8, capacity_factor=8.0), 64, 64),
    ],
)
def test_capacity(spec, tokens, room):
    assert spec.capacity(tokens) == room


@pytest.mark.parametrize(
    ("spec", "tokens", "computed", "gathered"),
    [
        (TopK(n_experts=8, top_k=2), 32, 2, 2),
        (TopK(n_experts=8, top_k=2, capacity_factor=0.5), 32, 1, 2),
        (TopK(n_experts=8, top_k=2, capacity_factor=0.01), 32, 0.25, 2),  # one place each for 32 tokens
        (TopK(n_experts=8, top_k=2, capacity_factor=1.25), 3, 2, 2),
        (Switch(n_experts=8, capacity_factor=0.5), 20, 0.8, 1),  # 2 places each
        (ExpertChoice(n_experts=8, capacity_factor=2.0), 64, 2, 2),
        (ExpertChoice(n_experts=128, capacity_factor=2.0), 32, 4, 4),  # half a place is one
    ],
)
def test_what_is_computed_is_what_there_is_room_for(spec, tokens, computed, gathered):
    assert (spec.computed(tokens), spec.gathered(tokens)) == (computed, gathered)


def test_reroute_fills_the_next_choice():
    """Three tokens want expert 0 first; it takes one, the next list decides, the last token finds one full expert."""
    ranked = torch.tensor([[[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 0, 1]]])
    room = torch.tensor([[1]])
    order = torch.arange(4)[None]
    assert rerouted(ranked, 1, room, order).tolist() == [[[0], [1], [2], [NOBODY]]]
    assert rerouted(ranked, 2, room, order).tolist() == [[[0, 1], [2, NOBODY], [NOBODY] * 2, [NOBODY] * 2]]
    assert rerouted(ranked, 1, room, order.flip(1)).tolist() == [[[NOBODY], [1], [0], [2]]]
    assert rerouted(ranked, 2, torch.tensor([[4]]), order).tolist() == [[[0, 1], [0, 1], [0, 1], [2, 0]]]


def test_reroute_never_asks_those_that_are_left_out():
    ranked = torch.tensor([[[0, NOBODY, NOBODY], [0, NOBODY, NOBODY]]])
    assert rerouted(ranked, 1, torch.tensor([[1]]), torch.arange(2)[None]).tolist() == [[[0], [NOBODY]]]


def test_limited_leaves_the_best_groups_by_their_two_best():
    choice = torch.tensor([[[9.0, 0.0, 0.0, 5.0, 5.0, 0.0, 1.0, 1.0, 1.0]]])  # groups of three: 9, 10, 2
    kept = limited(choice, 3, 1).isfinite()
    assert kept.tolist() == [[[False] * 3 + [True] * 3 + [False] * 3]]
    assert limited(choice, 3, 2).isfinite().tolist() == [[[True] * 6 + [False] * 3]]
    of_one = limited(torch.tensor([[[1.0, 3.0, 2.0]]]), 3, 1)
    assert of_one.isfinite().tolist() == [[[False, True, False]]]


@pytest.mark.parametrize("E", [2, 3, 8, 64])
@pytest.mark.parametrize("k", [1, 2])
def test_balance_is_one_when_even_and_E_when_collapsed(E, k):
    S = 4 * E
    even = torch.full((1, S, E), 1 / E, dtype=torch.float64)
    anyone = torch.randint(E, (1, S, k), generator=torch.Generator().manual_seed(0))
    assert balance(anyone, even, None).item() == 1.0  # a uniform router, whoever its ties fall to
    sure = torch.zeros(1, S, E, dtype=torch.float64)
    sure[..., 1] = 1
    assert balance(torch.ones(1, S, 1, dtype=torch.long), sure, None).item() == E


def test_balance_does_not_count_padding():
    probs = torch.rand(1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs = probs / probs.sum(-1, keepdim=True)
    chosen, valid = probs.argmax(-1, keepdim=True), torch.tensor([[False, True, True, False, True, True]])
    alone = balance(chosen[:, valid[0]], probs[:, valid[0]], None)
    padded = balance(chosen.masked_fill(~valid[..., None], 4), probs, valid)
    assert padded.item() == pytest.approx(alone.item(), abs=1e-15)
    nobody = torch.zeros(1, 6, dtype=torch.bool)
    assert balance(torch.full((1, 6, 1), 4), probs, nobody).item() == 0.0
