"""fp16 with a scaled loss: overflow costs a step and no run, and the result is fp32's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmlab.train.loss_scale import FIRST, FLOOR

FP16 = "train.precision=fp16"


def steps(made: Any, first: int, end: int, lr: float = 3e-3) -> list[float]:
    return [float(made.stepper(made.batches.batch(k), step=k, lr=lr)[0]) for k in range(first, end)]


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in made.master.state_dict().items()}


@pytest.mark.parametrize("extra", [[], ["moe=topk", "moe.n_experts=4"], ["attn.backend=tiled", "pos=alibi"]])
def test_fp16_learns_as_fp32_does(trainer: Callable[..., Any], extra: list[str]) -> None:
    half, full = trainer(FP16, *extra, micro_rows=4), trainer(*extra, micro_rows=4)
    assert {p.dtype for p in half.twin.copies} == {torch.float16}
    assert {p.dtype for p in half.twin.masters} == {torch.float32}
    ours, theirs = steps(half, 0, 12), steps(full, 0, 12)
    assert theirs[-1] < theirs[0] - 0.3
    assert ours == pytest.approx(theirs, rel=3e-3)
    assert half.stepper.figures()["train/loss_scale"] == FIRST


@pytest.mark.parametrize("optim", ["adamw", "muon", "lion"])
def test_an_overflow_skips_the_step_and_halves_the_scale(trainer: Callable[..., Any], optim: str) -> None:
    made = trainer(FP16, f"optim={optim}", "moe=topk", "moe.n_experts=4", "moe.balance=aux_free")
    stepper = made.stepper
    steps(made, 0, 1)
    kept, moments = weights(made), copy.deepcopy(list(stepper.optimizer.state.values()))
    stepper.loss_scale.scaler.update(2.0**30)
    loss, norm = stepper(made.batches.batch(1), step=1, lr=1e-3)
    assert math.isfinite(float(loss))
    assert not math.isfinite(float(norm))
    assert not stepper.diverged(float(loss), norm)
    assert all(torch.equal(v, kept[n]) for n, v in weights(made).items())
    for now, then in zip(stepper.optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(now[key], then[key]) for key in then)
    assert stepper.loss_scale.scaler.get_scale() == 2.0**29
    assert stepper.figures()["train/skipped_steps"] == 1


def test_a_first_scale_that_overflows_is_lowered_and_the_run_goes_on(trainer: Callable[..., Any]) -> None:
    """What is left is what fp32 learns of the batches that were not skipped."""
    made, full = trainer(FP16), trainer()
    scale = made.stepper.loss_scale
    scale.scaler.update(2.0**24)
    ours = steps(made, 0, 24)
    skipped = scale.figures()["train/skipped_steps"]
    assert 2 < skipped < 20
    assert scale.scale() == 2.0**24 * scale.tokens / 2**skipped
    theirs = steps(full, skipped, 24)
    assert ours[skipped:] == pytest.approx(theirs, rel=3e-3)
    assert ours[-1] < ours[0] - 0.3


def test_what_no_scale_makes_finite_has_diverged(trainer: Callable[..., Any]) -> None:
    made = trainer(FP16)
    stepper = made.stepper
    batch, norm = made.batches.batch(0), torch.tensor(float("inf"))
    assert stepper.diverged(float("nan"), torch.zeros(()))
    made.twin.model.embed.weight.register_hook(lambda g: g * float("nan"))
    for step in range(40):
        loss, norm = stepper(batch, step=step, lr=1e-3)
        if stepper.diverged(float(loss), norm):
            break
    assert step == math.log2(FIRST / FLOOR)
    assert stepper.loss_scale.scale() < FLOOR


def test_scale_and_skipped_steps_come_back_and_the_run_goes_on_bit_for_bit(trainer: Callable[..., Any]) -> None:
    from lmlab.runs.checkpoint import Checkpoint
    from lmlab.train.loop import State

    through, first, then = trainer(FP16), trainer(FP16), trainer(FP16)
    for made in (through, first):
        made.stepper.loss_scale.scaler.update(2.0**20)
    steps(through, 0, 12)
    steps(first, 0, 6)
    state = copy.deepcopy(first.state(State(step=6)))
    found = Checkpoint(6, weights(first), state, "", {}, made.prepared.train.path)
    assert then.load(found).step == 6
    assert then.stepper.loss_scale.state() == first.stepper.loss_scale.state()
    assert then.stepper.loss_scale.state()["skipped"] > 0
    steps(then, 6, 12)
    assert then.stepper.figures() == through.stepper.figures()
    for n, value in weights(then).items():
        assert torch.equal(value, weights(through)[n]), n


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm", "dyt"])
@pytest.mark.parametrize("attn", ["mha", "mla"])
def test_every_norm_computes_in_fp16(trainer: Callable[..., Any], norm: str, attn: str) -> None:
    made = trainer(FP16, f"norm={norm}", f"attn={attn}", "train.residual_dtype=fp32")
    assert all(math.isfinite(loss) for loss in steps(made, 0, 2))
    assert math.isfinite(made.loss_on(made.prepared.val, 256).nats_per_token)
