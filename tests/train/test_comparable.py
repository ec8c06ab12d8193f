"""What makes runs comparable: equal draws of equal tensors, equal batches, whatever else differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

VARIANTS = ["ffn=gelu", "pos=learned", "attn=gqa", "norm=layernorm", "model.tie_embeddings=false", "model.n_layers=3"]


def draws(made: Any) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Each weight by name and shape, divided by its own standard deviation where it was drawn."""
    from lmlab.model.init import table

    rules = table(made.master)
    named = made.master.named_parameters()
    return {(n, tuple(p.shape)): p.detach() / rules[n].std for n, p in named if rules[n].std > 0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_of_equal_name_and_shape_start_equal(trainer: Callable[..., Any], variant: str) -> None:
    base, other = draws(trainer()), draws(trainer(variant))
    shared = base.keys() & other.keys()
    assert ("blocks.1.attn.q.weight", (32, 32)) in shared
    assert ("embed.weight", (257, 32)) in shared
    for key in shared:
        torch.testing.assert_close(base[key], other[key], atol=0, rtol=1e-6, msg=str(key))


def test_another_init_seed_draws_everything_anew(trainer: Callable[..., Any]) -> None:
    base, other = draws(trainer()), draws(trainer("seed.init=1"))
    assert all(not torch.equal(base[key], other[key]) for key in base)
    same = draws(trainer("seed.data=1"))
    assert all(torch.equal(base[key], same[key]) for key in base)


@pytest.mark.parametrize("variant", [*VARIANTS, "lr=1e-4", "seed.init=4", "train.micro_batch=2"])
def test_batches_are_equal_across_variants(trainer: Callable[..., Any], variant: str) -> None:
    base, other = trainer().batches, trainer(variant).batches
    assert [base.batch(k).hash() for k in (0, 1, 57)] == [other.batch(k).hash() for k in (0, 1, 57)]


def test_batches_differ_across_steps_and_data_seeds(trainer: Callable[..., Any]) -> None:
    hashes = {trainer(f"seed.data={s}").batches.batch(k).hash() for s in (0, 1) for k in (0, 1, 57)}
    assert len(hashes) == 6
