"""Evaluation: token-weighted sums, one figure for every batch size, bits per byte by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmlab.eval.loss import LossSum, total
from lmlab.model.transformer import Output
from lmlab.train.setup import evaluate_file


def test_sums_are_token_weighted() -> None:
    assert total([LossSum(2.0, 1, 1), LossSum(90.0, 9, 9)]).nats_per_token == pytest.approx(9.2)


def test_uniform_byte_model_is_eight_bits() -> None:
    assert LossSum(math.log(256) * 1000, 1000, 1000).bits_per_byte == pytest.approx(8.0, abs=1e-12)


def test_nothing_scored_is_not_a_number() -> None:
    assert math.isnan(LossSum().nats_per_token)
    assert math.isnan(LossSum(1.0, 1, 0).bits_per_byte)


@pytest.mark.parametrize("seq_len", [16, 13])
@pytest.mark.parametrize("max_tokens", [None, 1, 100, 257])
def test_any_batch_size_gives_one_figure(trainer: Callable[..., Any], seq_len: int, max_tokens: int | None) -> None:
    made = trainer(f"model.seq_len={seq_len}", f"train.batch_tokens={8 * seq_len}")
    made.master.double()
    kwargs = dict(start=made.prepared.tokenizer.start, token_bytes=made.token_bytes, max_tokens=max_tokens)
    found = [evaluate_file(made.master, made.prepared.val, made.exp, rows=rows, **kwargs) for rows in (1, 3, 8)]
    assert len({(f.tokens, f.bytes) for f in found}) == 1
    assert found[0].tokens == min(max_tokens or 10**9, made.prepared.val.n_tokens - 1)
    assert [f.nats for f in found] == pytest.approx([found[0].nats] * 3, rel=1e-12)


def test_bytes_of_the_whole_split_are_its_raw_bytes(trainer: Callable[..., Any]) -> None:
    made = trainer()
    assert made.loss_on(made.prepared.val).bytes == made.prepared.val.raw_bytes


def test_evaluation_leaves_mode_and_generator_alone(trainer: Callable[..., Any]) -> None:
    made = trainer("model.dropout=0.5", "attn.dropout=0.5")
    made.master.train()
    before = torch.get_rng_state()
    first, second = (made.loss_on(made.prepared.val) for _ in range(2))
    assert first == second
    assert made.master.training
    assert torch.equal(before, torch.get_rng_state())


def test_output_of_a_model_without_targets_is_logits(trainer: Callable[..., Any]) -> None:
    made = trainer()
    batch = made.batches.batch(0)
    out = made.master(batch.tokens_BT, batch.positions_BT)
    assert isinstance(out, Output)
    assert out.loss is None
    assert out.logits_BTV.shape == (*batch.tokens_BT.shape, made.prepared.tokenizer.vocab_size)
