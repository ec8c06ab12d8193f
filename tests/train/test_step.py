"""One step: any split into micro-batches is one gradient; masters are fp32; state by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmlab.errors import RunError
from lmlab.registry import make
from lmlab.train.device import bf16_is_native
from lmlab.train.optim import load_state, state_by_name
from lmlab.train.step import dropout_seed
from lmlab.train.twin import Twin


def ragged(batch: Any) -> Any:
    """The batch with row r scored on its first r + 1 targets only."""
    weights = torch.zeros_like(batch.weights_BT)
    for r in range(len(weights)):
        weights[r, : r + 1] = 1
    return dataclasses.replace(batch, weights_BT=weights)


def grads(trainer: Any, batch: Any) -> dict[str, torch.Tensor]:
    trainer.twin.zero_grads()
    trainer.stepper.gradients(batch, step=0)
    return {n: p.grad.clone() for n, p in trainer.master.named_parameters()}


def as_double(trainer: Any) -> Any:
    trainer.master.double()
    trainer.twin = trainer.stepper.twin = Twin(trainer.master, torch.float64)
    return trainer


@pytest.mark.parametrize("extra", [[], ["attn=gqa", "pos=alibi", "norm=layernorm", "block=postnorm"]])
def test_accumulation_is_one_gradient_on_ragged_masks(trainer: Callable[..., Any], extra: list[str]) -> None:
    made = as_double(trainer(*extra))
    batch = ragged(made.batches.batch(3))
    whole = grads(made, batch)
    for micro_rows in (4, 2, 1, 3):
        made.stepper.micro_rows = micro_rows
        split = grads(made, batch)
        for name, g in whole.items():
            assert torch.linalg.norm(g - split[name]) <= 1e-10 * max(1.0, float(torch.linalg.norm(g))), name


def test_the_z_loss_is_told_apart_however_the_batch_is_split(trainer: Callable[..., Any]) -> None:
    made, plain = (as_double(trainer(*extra)) for extra in (["model.z_loss=0.01"], []))
    batch = ragged(made.batches.batch(3))
    want = float(plain.stepper.gradients(batch, step=0))
    assert "train/z_loss" not in plain.stepper.figures()
    told = []
    for micro_rows in (4, 1):
        made.stepper.micro_rows = micro_rows
        assert abs(float(made.stepper.gradients(batch, step=0)) - want) < 1e-10
        told.append(made.stepper.figures()["train/z_loss"])
    with torch.no_grad():
        lse = plain.master(batch.tokens_BT, batch.positions_BT).logits_BTV.logsumexp(-1)
    expected = 0.01 * float((lse.square() * batch.weights_BT).sum() / batch.weights_BT.sum())
    assert all(abs(z - expected) < 1e-9 for z in told)


def test_all_ignored_batch_adds_nothing(trainer: Callable[..., Any]) -> None:
    made = trainer()
    batch = made.batches.batch(0)
    empty = dataclasses.replace(batch, weights_BT=torch.zeros_like(batch.weights_BT))
    assert all(torch.count_nonzero(g) == 0 and torch.isfinite(g).all() for g in grads(made, empty).values())


def test_bf16_gradients_add_up_in_fp32(trainer: Callable[..., Any]) -> None:
    """32 equal micro-batches: the masters' gradient is 32 times one, which a bf16 sum is not."""
    if not bf16_is_native(torch.device("cpu")):
        pytest.skip("this CPU has no native bf16")
    made = trainer("train.precision=bf16")
    twin = made.twin
    assert twin.own
    assert {p.dtype for p in twin.masters} == {torch.float32}
    assert {p.dtype for p in twin.copies} == {torch.bfloat16}
    torch.manual_seed(0)
    given = [torch.randn_like(c) for c in twin.copies]
    twin.zero_grads()
    for _ in range(32):
        for c, g in zip(twin.copies, given, strict=True):
            c.grad = g.clone()
        twin.collect()
    for m, g in zip(twin.masters, given, strict=True):
        assert torch.equal(m.grad, 32 * g.float())


def test_groups_hold_each_parameter_once_and_vectors_do_not_decay(trainer: Callable[..., Any]) -> None:
    made = trainer("norm=layernorm", "attn.bias_qkv=true", "pos=learned")
    groups = made.stepper.optimizer.param_groups
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted({id(p) for p in made.master.parameters()})
    for g in groups:
        assert all((p.ndim >= 2) == (g["weight_decay"] > 0) for p in g["params"])


def test_logged_norm_is_before_clipping_and_update_uses_clipped(trainer: Callable[..., Any]) -> None:
    free, clipped = trainer("optim.clip=null"), trainer("optim.clip=1e-4")
    batch = free.batches.batch(0)
    _, norm_free = free.stepper(batch, step=0, lr=1e-3)
    _, norm_clipped = clipped.stepper(batch, step=0, lr=1e-3)
    assert float(norm_free) == float(norm_clipped) > 1e-3
    total = torch.nn.utils.get_total_norm([p.grad for p in clipped.twin.masters])
    assert float(total) == pytest.approx(1e-4, rel=1e-3)


def test_optimizer_state_returns_by_name_and_refuses_what_does_not_fit(trainer: Callable[..., Any]) -> None:
    made = trainer()
    made.stepper(made.batches.batch(0), step=0, lr=1e-3)
    state = state_by_name(made.stepper.optimizer, made.master)
    fresh = make(made.exp.optim, made.master)
    load_state(fresh, made.master, state)
    for p in made.master.parameters():
        assert all(torch.equal(fresh.state[p][k], made.stepper.optimizer.state[p][k]) for k in fresh.state[p])
    less = {k: v for k, v in state.items() if k != "embed.weight"}
    with pytest.raises(RunError, match=r"embed\.weight"):
        load_state(fresh, made.master, less)
    bare = {**state, "embed.weight": {"step": state["embed.weight"]["step"]}}
    with pytest.raises(RunError, match=r"embed\.weight lacks `exp_avg`"):
        load_state(fresh, made.master, bare)
    wrong = {**state, "embed.weight": {**state["embed.weight"], "exp_avg": torch.zeros(3, 3)}}
    with pytest.raises(RunError, match=r"embed\.weight has shape \(3, 3\)"):
        load_state(fresh, made.master, wrong)


def test_dropout_seed_is_a_function_of_seed_step_micro_rank() -> None:
    seeds = {dropout_seed(s, k, m, r) for s in range(2) for k in range(5) for m in range(3) for r in range(2)}
    assert len(seeds) == 60
    assert dropout_seed(1, 2, 3) == dropout_seed(1, 2, 3, 0)
    assert all(0 <= s < 2**63 for s in seeds)


def test_an_optimizer_without_state_comes_back_too(trainer: Callable[..., Any]) -> None:
    made = trainer()
    plain = torch.optim.SGD(made.master.parameters(), lr=0.1)
    state = state_by_name(plain, made.master)
    assert set(state) == set(dict(made.master.named_parameters()))
    load_state(plain, made.master, state)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_gradients_are_those_of_the_mean_loss(trainer: Callable[..., Any], packing: str) -> None:
    """The sum is divided after backward: the same as backward of the mean."""
    made = as_double(trainer(f"data.packing={packing}", micro_rows=8))
    batch = made.batches.batch(1)
    found = grads(made, batch)
    made.master.zero_grad()
    out = made.master(batch.tokens_BT, batch.positions_BT, documents_BT=batch.documents_BT, targets_BT=batch.targets_BT)
    (out.loss / batch.targets_BT.numel()).backward()
    for name, p in made.master.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-12, rtol=1e-10)
