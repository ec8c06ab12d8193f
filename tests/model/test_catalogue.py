"""Every option of every model group builds and learns; every field that can be set takes effect."""

from __future__ import annotations

import pytest
import torch

from lmlab.check.flags import dead_flags
from lmlab.cli.check_plan import planned
from lmlab.config.load import load
from lmlab.registry import OPTIONS
from tests.composed import MODEL_GROUPS, model, rows

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


@pytest.mark.parametrize(("group", "name"), [*EVERY, ("model", "tiny")], ids=lambda v: v)
def test_no_field_is_dead(group, name):
    """Each field of the option, set by its declared probe from the command line, changes what the model does."""
    words = [f"{group}={name}"]
    row = dead_flags(words, load(words).experiment, planned, groups=(group,))
    assert row.state == "pass", row.reason
    shared = name in ("gqa", "mqa") and "refused here: attn.v_proj (" in row.reason  # mha's: their values are shared
    assert "refused here" not in row.reason or shared
