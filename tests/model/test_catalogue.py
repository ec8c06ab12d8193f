"""Every option of every model group builds and learns; every field that can be set takes effect."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.transformer import build
from lmlab.registry import OPTIONS
from tests.composed import DEFAULT, MODEL_GROUPS, arch, model, rows

EVERY = [(group, name) for group in MODEL_GROUPS for name in OPTIONS[group]]


@pytest.mark.parametrize(("group", "name"), EVERY, ids=lambda v: v)
def test_every_option_builds_and_learns(group, name):
    net = model(torch.float32, **{group: name}).train()
    tokens, positions = rows()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(tokens, positions, targets_BT=tokens.roll(-1, 1)).loss / tokens.numel()
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


def fields() -> list[tuple[str, str, str, Any]]:
    """(group, option, field, probe) of everything that can be set; once per class that brings it."""
    found: dict[tuple[str, str], tuple[str, str, str, Any]] = {}
    for group, name in [*EVERY, ("model", "decoder")]:
        for field in dataclasses.fields(OPTIONS[group][name]):
            owner = next(
                c for c in reversed(OPTIONS[group][name].__mro__) if field.name in vars(c).get("__annotations__", {})
            )
            key = (owner.__qualname__, field.name)
            if key not in found or DEFAULT.get(group) == name:
                found[key] = (group, name, field.name, field.metadata["probe"])
    return list(found.values())


def effect(spec: specs.Arch) -> tuple[dict[str, tuple[int, ...]], torch.Tensor, str]:
    net = build(spec, 97, resolve(Auto(), "cpu", torch.float32), seed=0, device="cpu").train()
    torch.manual_seed(0)
    logits = net(*rows(T=12)).logits_BTV.detach()
    return {n: tuple(p.shape) for n, p in net.named_parameters()}, logits, net.paths()["attention"]


@pytest.mark.parametrize(("group", "name", "field", "probe"), fields(), ids=lambda v: str(v))
def test_no_field_is_dead(group, name, field, probe):
    assert probe is not None, f"{group}.{field} has no probe"
    spec = arch(model={"n_layers": 3}) if group == "model" else arch(**{group: name})
    if (group, field) == ("model", "seq_len"):  # acts through the table it sizes
        spec.pos = specs.Learned()
    changed = copy.deepcopy(spec)
    setattr(getattr(changed, group), field, probe)
    assert getattr(getattr(spec, group), field) != probe
    before, after = effect(spec), effect(changed)
    moved = before[1].shape == after[1].shape and not torch.equal(before[1], after[1])
    assert before[0] != after[0] or moved or before[2] != after[2]
