"""Decoding: with a cache as without, a batch as its rows alone, greedy as the argmax of whole rows; float64."""

from __future__ import annotations

import pytest
import torch

from lmlab.check.composed import randomized
from lmlab.errors import LmlabError, RunError
from lmlab.generate.decode import CHUNK, generate
from lmlab.generate.sampling import GREEDY, Sampling
from lmlab.model.cache import CacheKind
from tests.composed import VOCAB, model, peaked

PROMPTS = [[5], [1, 2, 3], [9, 8, 7, 6, 5, 4], [1, 2], [3] * 11, [0, 96], [50, 51, 52, 53], [7, 7, 7, 7, 7]]
SAMPLED = Sampling(0.9, top_k=20, top_p=0.95, seed=1)
COMPOSED = {
    "default": {},
    "learned": {"pos": "learned"},
    "alibi, window": {"pos": "alibi", "attn": ("gqa", {"window": 4})},
    "t5, mla": {"pos": "t5", "attn": "mla"},
    "dynamic_ntk": {"rope_scaling": ("dynamic_ntk", {"original_len": 6})},
}


def made(name: str = "default"):
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "seq_len": 64}
    return peaked(randomized(model(model=sizes, **COMPOSED[name])))


@pytest.mark.parametrize("name", COMPOSED)
def test_greedy_is_the_argmax_of_whole_rows(name):
    net = made(name)
    for prompt in PROMPTS[:3]:
        row, length = list(prompt), torch.tensor([[len(prompt) + 10]])
        for _ in range(10):
            tokens = torch.tensor([row])
            row.append(int(net(tokens, torch.arange(len(row))[None], length_BT=length).logits_BTV[0, -1].argmax()))
        assert generate(net, [prompt], max_new=10).tokens == [row[len(prompt) :]]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_batch_is_its_rows_alone(name, sampling):
    net = made(name)
    together = generate(net, PROMPTS, max_new=12, sampling=sampling)
    assert together.tokens == [generate(net, [p], max_new=12, sampling=sampling).tokens[0] for p in PROMPTS]


@pytest.mark.parametrize("kind", [None, CacheKind(), CacheKind(window=3, sinks=2)], ids=str)
@pytest.mark.parametrize("more", [{}, {"priority": "probability"}, {"overflow": "reroute"}], ids=str)
def test_padding_takes_no_room_at_experts(more, kind):
    """Rows of 1 to 11 tokens in one batch: each has the room of its own tokens, whatever stands before it."""
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "seq_len": 64}
    moe = ("topk", {"n_experts": 4, "capacity_factor": 0.5, **more})
    net = peaked(randomized(model(model=sizes, moe=moe)))
    together = generate(net, PROMPTS, max_new=12, kind=kind).tokens
    assert together == [generate(net, [p], max_new=12, kind=kind).tokens[0] for p in PROMPTS]


@pytest.mark.parametrize("kind", [None, CacheKind("paged")], ids=["none", "paged"])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_cache_changes_nothing(name, kind):
    net = made(name)
    expected = generate(net, PROMPTS, max_new=12, sampling=SAMPLED).tokens
    assert generate(net, PROMPTS, max_new=12, sampling=SAMPLED, kind=kind).tokens == expected


def test_a_row_ends_at_the_first_of_several_ends():
    net = made()
    whole = generate(net, PROMPTS, max_new=20, sampling=SAMPLED).tokens
    ends = (whole[0][9], whole[1][4])
    found = generate(net, PROMPTS, max_new=20, sampling=SAMPLED, end=ends)
    for ids, cut, ended in zip(whole, found.tokens, found.ended, strict=True):
        stops = [ids.index(end) for end in ends if end in ids]
        assert cut == ids[: min(stops, default=20)]
        assert ended == bool(stops)


def test_a_long_prompt_is_read_in_chunks():
    net = made("alibi, window")
    prompt = torch.randint(VOCAB, (2 * CHUNK + 3,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = generate(net, [prompt, prompt[:-1]], max_new=4, kind=None)
    assert generate(net, [prompt, prompt[:-1]], max_new=4).tokens == whole.tokens


def test_samples_are_copies_of_the_prompt_that_go_on_by_themselves():
    net, prompts = made(), PROMPTS[:2]
    flat = Sampling(30.0, seed=1)
    found = generate(net, prompts, max_new=8, sampling=flat, samples=3).tokens
    written_out = [p for p in prompts for _ in range(3)]
    assert found == generate(net, written_out, max_new=8, sampling=flat).tokens
    assert len({tuple(ids) for ids in found}) == 6


def test_a_row_ends_at_the_end_token_and_the_others_go_on():
    net = made()
    free = generate(net, PROMPTS, max_new=20, sampling=SAMPLED).tokens
    end = free[2][5]
    found = generate(net, PROMPTS, max_new=20, sampling=SAMPLED, end=end)
    for ids, whole, ended in zip(found.tokens, free, found.ended, strict=True):
        assert ids == (whole[: whole.index(end)] if end in whole else whole)
        assert ended == (end in whole)
    heard: list[list[int]] = []
    generate(net, PROMPTS, max_new=20, sampling=SAMPLED, end=end, on_tokens=heard.append)
    assert [[i for i in row if i >= 0] for row in zip(*heard, strict=True)] == found.tokens


def test_it_stops_when_all_rows_have_ended():
    net, calls = made(), []
    end = generate(net, [[5]], max_new=1).tokens[0][0]
    found = generate(net, [[5]], max_new=50, end=end, on_tokens=calls.append)
    assert (found.tokens, found.ended, len(calls)) == ([[]], [True], 1)


def test_nothing_global_moves():
    net = made().train()
    before = torch.get_rng_state()
    generate(net, [[5]], max_new=4, sampling=SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training


def test_training_goes_on_after_a_sample():
    """What a forward pass without gradients leaves behind (tables) serves one with gradients."""
    for name in COMPOSED:
        net = made(name)
        generate(net, [[5, 6]], max_new=4)
        tokens = torch.tensor([[1, 2, 3, 4]])
        net(tokens, torch.arange(4)[None], targets_BT=tokens).loss.backward()


def test_counts_are_of_what_was_computed():
    found = generate(made(), PROMPTS, max_new=12)
    assert found.prefill_tokens == sum(map(len, PROMPTS))
    assert found.decode_tokens == len(PROMPTS) * 11  # the first new token comes of the prefill
    assert found.cache_bytes == 2 * 2 * 8 * 32 * 8 * (11 + 12)
    assert generate(made(), [[5]], max_new=1).decode_tokens == 0


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(LmlabError, match="no tokens"):
        generate(made(), prompts, max_new=1)


def test_a_compiled_model_generates():
    net = made()
    expected = generate(net, PROMPTS[:2], max_new=4).tokens
    net.compile_blocks()
    assert generate(net, PROMPTS[:2], max_new=4).tokens == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.5)], ids=str)
def test_logits_that_are_no_numbers_are_told(sampling, value):
    net, told = made(), list[list[int]]()
    with torch.no_grad():
        net.norm.weight[3] = value
    with pytest.raises(RunError, match="no finite score"):
        generate(net, PROMPTS[:2], max_new=3, sampling=sampling, on_tokens=told.append)
    assert told == []
