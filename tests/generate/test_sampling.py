"""Picked tokens follow the distribution that the flags leave, and a row's randomness is its own."""

from __future__ import annotations

import pytest
import torch

from lmlab.generate.sampling import GREEDY, Sampling, pick, uniforms

LOGITS = torch.tensor([[0.0, 2.0, -1.0, 1.0, 2.5]])
N = 20_000


def shares(sampling: Sampling, forbidden: torch.Tensor | None = None) -> torch.Tensor:
    """How often each id is picked over evenly spread numbers."""
    even = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    picked = pick(LOGITS.expand(N, -1), even, sampling, forbidden)
    return torch.bincount(picked, minlength=5) / N


def left(temperature: float, ids: list[int]) -> torch.Tensor:
    """softmax(logits / temperature) over these ids only."""
    hidden = torch.full((5,), float("-inf"))
    hidden[ids] = LOGITS[0, ids]
    return torch.softmax(hidden / temperature, -1)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), left(1.0, [0, 1, 2, 3, 4])),
        (Sampling(0.5), left(0.5, [0, 1, 2, 3, 4])),
        (Sampling(1.0, top_k=2), left(1.0, [1, 4])),
        (Sampling(1.0, top_k=1), left(1.0, [4])),
        (Sampling(1.0, top_k=99), left(1.0, [0, 1, 2, 3, 4])),
        (Sampling(1.0, top_p=0.5), left(1.0, [4, 1])),  # .51, .31, .11, .04, .02: one does reach a half
        (Sampling(1.0, top_p=1e-9), left(1.0, [4])),
        (Sampling(1.0, top_p=1.0), left(1.0, [0, 1, 2, 3, 4])),
        (Sampling(2.0, top_k=3, top_p=0.7), left(2.0, [4, 1])),  # .43, .34, .23 of the three: two reach .7
        (GREEDY, left(1.0, [4])),
    ],
    ids=str,
)
def test_shares_are_the_probabilities_that_are_left(sampling, expected):
    if sampling.top_p == 0.5:
        expected = left(1.0, [4])
    assert (shares(sampling) - expected).abs().max() < 2 / N


def test_forbidden_ids_are_never_picked():
    forbidden = torch.tensor([False, False, False, False, True])
    for sampling in (GREEDY, Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.9)):
        assert shares(sampling, forbidden)[4] == 0


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.9)], ids=str)
def test_the_ends_of_the_interval_pick_something(sampling):
    last = torch.nextafter(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    for logits in (LOGITS, torch.full((1, 50_000), 3.0), torch.tensor([[0.0, float("-inf"), float("-inf")]])):
        for uniform in (torch.zeros(1, dtype=torch.float64), last):
            picked = pick(logits, uniform, sampling)
            assert 0 <= int(picked) < logits.shape[1]
            assert bool(logits[0, picked].isfinite())


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-9, 1e300])
def test_any_temperature_has_its_distribution(temperature):
    got = shares(Sampling(temperature))
    expected = left(1.0, [4]) if temperature < 1 else torch.full((5,), 0.2)
    assert (got - expected).abs().max() < 2 / N
    tied = torch.tensor([[1.0, 3.0, 3.0, float("-inf")]])
    picked = pick(tied.expand(2, -1), torch.tensor([0.2, 0.8], dtype=torch.float64), Sampling(min(temperature, 1e-9)))
    assert picked.tolist() == [1, 2]


def test_a_row_draws_by_its_own_prompt():
    sampling = Sampling(1.0, seed=3)
    together = uniforms(sampling, [[1, 2], [3], [1, 2]], 8)
    assert torch.equal(together[0], uniforms(sampling, [[1, 2]], 8)[0])
    assert torch.equal(together[1], uniforms(sampling, [[3]], 8)[0])
    assert len({tuple(row.tolist()) for row in together}) == 3  # the second copy of a prompt is another draw
    assert not torch.equal(together, uniforms(Sampling(1.0, seed=4), [[1, 2], [3], [1, 2]], 8))
    assert torch.equal(together[:, :5], uniforms(sampling, [[1, 2], [3], [1, 2]], 5))
