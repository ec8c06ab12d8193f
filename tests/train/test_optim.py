"""Muon and Lion: against torch's Muon matrix by matrix, against the papers' formulas, and through a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmlab.check.flags import dead_flags
from lmlab.cli.check_plan import planned
from lmlab.config.load import load
from lmlab.errors import RunError
from lmlab.registry import OPTIONS, make
from lmlab.train.muon import _alike, orthogonal
from lmlab.train.optim import load_state, state_by_name, state_bytes

OPTIMIZERS = ("adamw", "muon", "lion")
MOE = ("moe=topk", "moe.n_experts=4", "ffn.bias=true", "attn.bias_qkv=true", "model.tie_embeddings=false")


def with_grads(made: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for p in made.master.parameters():
        p.grad = torch.randn_like(p) * 1e-2


def clones(made: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in made.master.named_parameters()}


def test_muon_moves_the_matrices_inside_the_blocks_and_nothing_else(trainer: Callable[..., Any]) -> None:
    made = trainer("optim=muon", *MOE)
    hidden = {n.split(".", 2)[2] for n, p in made.master.named_parameters() if made.exp.optim.moves(n, p.ndim)}
    matrices = {f"attn.{m}.weight" for m in "qkvo"} | {f"ffn.experts.ffn.{m}.weight" for m in ("gate", "up", "down")}
    assert hidden == matrices
    ids = [id(p) for g in made.stepper.optimizer.param_groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in made.master.parameters())


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_for_each_matrix_and_each_expert(trainer: Callable[..., Any], nesterov: bool) -> None:
    """Steps, momentum and AdamW's half, with the products in bfloat16 as torch has them: the same bits but for the
    order of a norm's sum."""
    made = trainer("optim=muon", f"optim.nesterov={str(nesterov).lower()}", "optim.momentum=0.9", *MOE)
    ours = made.stepper.optimizer
    ours.dtype = torch.bfloat16
    start = clones(made)
    theirs: dict[str, list[torch.Tensor]] = {}
    for name, p in made.master.named_parameters():
        parts = start[name].unbind() if made.exp.optim.moves(name, p.ndim) and p.ndim == 3 else [start[name]]
        theirs[name] = [torch.nn.Parameter(part.clone()) for part in parts]
    hidden = {n for n, p in made.master.named_parameters() if made.exp.optim.moves(n, p.ndim)}
    how: dict[str, Any] = dict(lr=0.02, weight_decay=0.1)
    muon = torch.optim.Muon(
        [q for n in hidden for q in theirs[n]], momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **how
    )
    decayed = [q for n, qs in theirs.items() if n not in hidden and qs[0].ndim >= 2 and ".bias" not in n for q in qs]
    plain = [q for n, qs in theirs.items() if n not in hidden and (qs[0].ndim < 2 or ".bias" in n) for q in qs]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for group in ours.param_groups:
        group["lr"] = 0.02
    for step in range(3):
        with_grads(made, step)
        for name, p in made.master.named_parameters():
            assert p.grad is not None
            for i, q in enumerate(theirs[name]):
                q.grad = (p.grad[i] if len(theirs[name]) > 1 else p.grad).clone()
        ours.step()
        muon.step()
        adamw.step()
    for name, p in made.master.named_parameters():
        want = torch.stack([*theirs[name]]) if len(theirs[name]) > 1 else theirs[name][0]
        moved = (want - start[name]).norm()
        assert moved > 0
        limit = 1e-2 if name in hidden else 1e-5  # one bf16 ulp of a norm is 4e-3 of a whole step
        assert (p - want).norm() <= limit * moved, name


@pytest.mark.parametrize("shape", [(5, 24, 24), (3, 16, 40), (2, 40, 16)])
def test_an_orthogonal_update_keeps_the_singular_vectors(shape: tuple[int, ...]) -> None:
    """U·S·Vᵀ becomes U·S'·Vᵀ with S' near 1, of each matrix by itself; zeros stay zeros."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    x[0] *= 1e4
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    made = u.mT @ orthogonal(x, 5) @ vt.mT
    values = made.diagonal(dim1=-2, dim2=-1)
    assert (made - torch.diag_embed(values)).abs().max() < 1e-9
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(shape), 5), torch.zeros(shape))


def test_matrices_of_one_shape_are_taken_together_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(4, 8), torch.zeros(3, 4, 8), torch.zeros(4, 8)]
    assert list(_alike(some)) == [[0, 2, 3, 4], [1]]
    monkeypatch.setattr("lmlab.train.muon.CHUNK", 4 * 8 * 3)
    assert list(_alike(some)) == [[0, 2], [3], [4], [1]]


def test_lion_is_the_papers_formula(trainer: Callable[..., Any]) -> None:
    made = trainer("optim=lion", "optim.weight_decay=0.3", "optim.betas=[0.8,0.95]")
    optimizer = made.stepper.optimizer
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    want, m = clones(made), {n: torch.zeros_like(p) for n, p in clones(made).items()}
    for step in range(4):
        with_grads(made, step)
        for n, p in made.master.named_parameters():
            decay = 0.3 if p.ndim >= 2 else 0.0
            c = 0.8 * m[n] + 0.2 * p.grad
            want[n] = want[n] - 1e-2 * (c.sign() + decay * want[n])
            m[n] = 0.95 * m[n] + 0.05 * p.grad
        optimizer.step()
    for n, p in made.master.named_parameters():
        torch.testing.assert_close(p, want[n], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], m[n], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(trainer: Callable[..., Any], name: str) -> None:
    through, first = trainer(f"optim={name}", *MOE), trainer(f"optim={name}", *MOE)
    for k in range(6):
        through.stepper(through.batches.batch(k), step=k, lr=1e-3)
    for k in range(3):
        first.stepper(first.batches.batch(k), step=k, lr=1e-3)
    state = copy.deepcopy(state_by_name(first.stepper.optimizer, first.master))
    then = trainer(f"optim={name}", *MOE)
    then.master.load_state_dict(first.master.state_dict())
    load_state(then.stepper.optimizer, then.master, state)
    for k in range(3, 6):
        then.stepper(then.batches.batch(k), step=k, lr=1e-3)
    for n, value in then.master.state_dict().items():
        assert torch.equal(value, through.master.state_dict()[n]), n


def test_state_of_either_half_may_not_lack_a_piece(trainer: Callable[..., Any]) -> None:
    made = trainer("optim=muon")
    made.stepper(made.batches.batch(0), step=0, lr=1e-3)
    state = state_by_name(made.stepper.optimizer, made.master)
    assert set(state["blocks.0.attn.q.weight"]) == {"momentum_buffer"}
    assert set(state["embed.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    fresh = make(made.exp.optim, made.master)
    load_state(fresh, made.master, state)
    with pytest.raises(RunError, match=r"blocks\.0\.attn\.q\.weight lacks `momentum_buffer`"):
        load_state(fresh, made.master, {**state, "blocks.0.attn.q.weight": {}})
    with pytest.raises(RunError, match=r"norm\.weight lacks `exp_avg"):
        load_state(fresh, made.master, {**state, "norm.weight": {}})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planned_bytes_of_the_state_are_those_it_has(trainer: Callable[..., Any], name: str) -> None:
    made = trainer(f"optim={name}", *MOE)
    planned = state_bytes(made.exp.optim, made.master)
    made.stepper(made.batches.batch(0), step=0, lr=1e-3)
    state = state_by_name(made.stepper.optimizer, made.master)
    assert planned == sum(v.nbytes for own in state.values() for v in own.values() if v.ndim)


def test_every_optimizer_of_the_catalogue_is_tested_here() -> None:
    assert set(OPTIONS["optim"]) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_field_changes_what_three_steps_come_to(name: str) -> None:
    words = ["model=nano", f"optim={name}"]
    row = dead_flags(words, load(words).experiment, planned, groups=("optim",))
    assert row.state == "pass", row.reason
