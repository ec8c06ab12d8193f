"""Tasks as data: batches that depend on (seed, k) alone, loss on the answers alone, the same evaluation for all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmlab.config.load import load
from lmlab.data.source import Place, open_source
from lmlab.errors import LmlabError
from lmlab.eval.loss import evaluate, total
from lmlab.kernels.resolve import resolve
from lmlab.train.setup import Trainer

CPU = torch.device("cpu")
WORDS = (
    "data=mqar data.vocab_size=32 data.n_pairs=2 data.n_eval=24 model=nano model.n_layers=2 model.d_model=32 "
    "model.n_heads=4 model.seq_len=16 train.batch_tokens=128 train.precision=fp32"
).split()


def opened(*words: str, cache: Path = Path("/nowhere")) -> Any:
    keys = {w.partition("=")[0] for w in words}
    exp = load([*(w for w in WORDS if w.partition("=")[0] not in keys), *words]).experiment
    return exp, open_source(exp.data, exp.tokenizer, Place(cache, exp.model.seq_len))


def trainer(*words: str, micro_rows: int = 8) -> Trainer:
    exp, source = opened(*words)
    ops = resolve(exp.kernels, CPU, torch.float32)
    return Trainer.make(exp, source, ops=ops, device=CPU, dtype=torch.float32, micro_rows=micro_rows, compiled=False)


def batches(seed: int = 0, rows: int = 8) -> Any:
    return opened()[1].batches(rows=rows, seq_len=16, seed=seed, packing="rows")


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    order = [3, 0, 7, 3]
    found = [batches().batch(k).hash() for k in order]
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert batches(seed=1).batch(3).hash() != found[0]
    assert batches().epoch(1000) == 0


def test_rows_are_as_long_as_the_model_and_only_answers_weigh() -> None:
    source = opened()[1]
    batch = source.batches(rows=8, seq_len=16, seed=0, packing="rows").batch(0)
    assert batch.tokens_BT.shape == (8, 16)
    assert torch.equal(batch.weights_BT.sum(1), torch.full((8,), 2.0))
    right = torch.from_numpy(source.task.oracle(batch.tokens_BT.numpy()))
    asked = batch.weights_BT > 0
    assert torch.equal(right[asked], batch.targets_BT[asked])


def test_the_answer_to_a_mixed_up_target_that_counts_for_nothing_is_the_same_gradient() -> None:
    made = trainer()
    batch = made.batches.batch(0)
    noise = torch.randint(0, 32, batch.targets_BT.shape)
    other = dataclasses.replace(batch, targets_BT=torch.where(batch.weights_BT > 0, batch.targets_BT, noise))
    assert not torch.equal(other.targets_BT, batch.targets_BT)
    grads = []
    for one in (batch, other):
        made.twin.zero_grads()
        loss = made.stepper.gradients(one, step=0)
        grads.append([float(loss), *(p.grad.clone() for p in made.master.parameters())])
    assert grads[0][0] == grads[1][0]
    assert all(torch.equal(a, b) for a, b in zip(grads[0][1:], grads[1][1:], strict=True))


def test_the_loss_is_that_of_the_answers_by_hand() -> None:
    made = trainer()
    batch = made.batches.batch(0)
    logits = made.master(batch.tokens_BT, batch.positions_BT).logits_BTV
    asked = batch.weights_BT > 0
    by_hand = torch.nn.functional.cross_entropy(logits[asked], batch.targets_BT[asked]).detach()
    assert float(made.stepper.gradients(batch, step=0)) == pytest.approx(float(by_hand), rel=1e-5)


def test_any_split_into_micro_batches_is_one_gradient() -> None:
    found = []
    for micro_rows in (8, 3, 1):
        made = trainer(micro_rows=micro_rows)
        made.twin.zero_grads()
        made.stepper.gradients(made.batches.batch(2), step=0)
        found.append(torch.cat([p.grad.flatten() for p in made.master.parameters()]))
    assert all(torch.linalg.norm(g - found[0]) < 1e-5 for g in found)


def test_val_is_as_many_examples_as_asked_whatever_the_batch_and_no_seed_moves_it() -> None:
    source = opened()[1]
    how = {"seq_len": 16, "packing": "rows", "start": -1}
    whole = [torch.cat([b.tokens_BT for b in source.val.batches(rows=rows, **how)]) for rows in (24, 7, 1)]
    assert whole[0].shape == (24, 16)
    assert all(torch.equal(w, whole[0]) for w in whole)
    assert source.val.n_targets == 48
    made = [trainer(f"seed={seed}") for seed in (0, 1)]
    assert np.array_equal(made[0].prepared.val.examples.inputs_BT, made[1].prepared.val.examples.inputs_BT)
    by_eight = made[0].loss_on(source.val)
    made[0].stepper.micro_rows = 5
    by_five = made[0].loss_on(source.val)
    assert by_eight.tokens == by_five.tokens == 48
    assert by_five.nats_per_token == pytest.approx(by_eight.nats_per_token, rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 48, 1000])
def test_the_first_targets_are_the_first_answers(n: int) -> None:
    made, source = trainer(), opened()[1]
    part = made.loss_on(source.val, n)
    assert part.tokens == min(n, 48)
    each = [t for b in source.val.batches(rows=1, seq_len=16, packing="rows", start=-1) for t in _answers(made, b)]
    assert part.nats == pytest.approx(sum(each[:n]), rel=1e-5)


def _answers(made: Trainer, batch: Any) -> list[float]:
    logits = made.master.eval()(batch.tokens_BT, batch.positions_BT).logits_BTV
    asked = batch.weights_BT > 0
    nats = torch.nn.functional.cross_entropy(logits[asked], batch.targets_BT[asked], reduction="none")
    return nats.tolist()


def test_experts_see_tokens_that_are_not_asked_for() -> None:
    """What has no weight in a task is context, not filling: a router must not leave it out."""
    made = trainer("moe=topk", "moe.n_experts=4")
    source = opened()[1]
    batch = next(source.val.batches(rows=24, seq_len=16, packing="rows", start=-1))
    seen = [int(stats.tokens) for stats in _stats(made, batch)]
    assert seen == [24 * 16] * 2


def _stats(made: Trainer, batch: Any) -> Any:
    heard: list[Any] = []
    total(evaluate(made.master, [batch], made.token_bytes, hear=heard.extend))
    return heard


def test_what_is_logged_is_what_is_right_by_hand() -> None:
    made, source = trainer(), opened()[1]
    figures = made.answers_on("val")
    right = []
    for batch in source.val.batches(rows=1, seq_len=16, packing="rows", start=-1):
        best = made.master.eval()(batch.tokens_BT, batch.positions_BT).logits_BTV.argmax(-1)
        right.append((best == batch.targets_BT)[batch.weights_BT > 0].tolist())
    want = {"val/token_accuracy": np.mean(right), "val/exact": np.mean([all(r) for r in right])}
    assert figures == pytest.approx(want)


def test_the_fingerprint_is_of_settings_and_examples() -> None:
    base = opened()[1].fingerprint
    assert opened()[1].fingerprint == base
    changed = ["data.n_pairs=3", "data.vocab_size=34", "data.n_eval=25", "data.filler=random", "model.seq_len=32"]
    assert len({base, *(opened(word)[1].fingerprint for word in changed)}) == 1 + len(changed)


@pytest.mark.parametrize(
    "words", [("model.seq_len=4",), ("data.n_pairs=90", "model.seq_len=512", "train.batch_tokens=512")]
)
def test_what_does_not_fit_is_told_before_training(words: tuple[str, ...]) -> None:
    with pytest.raises(LmlabError) as found:
        opened(*words)[1].val  # noqa: B018
    assert "model.seq_len" in str(found.value) or "data.vocab_size" in str(found.value)


def test_bits_per_byte_of_answers_are_not_told() -> None:
    """Also where the tokenizer gives every byte back."""
    exp = load(["data=passkey", "model.seq_len=256"]).experiment
    assert exp.tokenizer.name == "byte"
    source = open_source(exp.data, exp.tokenizer, Place(Path("/nowhere"), 256))
    assert source.tokenizer.lossless
    assert not source.lossless
    assert "answers" in source.lossy_why
