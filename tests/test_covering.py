"""Every two choices that may stand together do so in one of these: built, trained for two steps, checked."""

from __future__ import annotations

import math

import pytest
import torch

from lmlab.check.gate import quick
from lmlab.data.batches import Batch
from lmlab.kernels.resolve import resolve
from lmlab.model.transformer import build
from lmlab.registry import make
from lmlab.train.step import Stepper
from lmlab.train.twin import Twin
from tests.covering import PARTS, covering, experiment, legal, legal_pairs, options, pairs

CPU, VOCAB, T = torch.device("cpu"), 97, 16
ADAM_EPS = 1e-8


def test_every_legal_pair_is_covered_by_legal_compositions():
    rows = covering()
    assert set().union(*map(pairs, rows)) >= legal_pairs()
    assert all(legal(row) for row in rows)
    together = legal_pairs()
    assert len(rows) < len(together) / 30
    assert {(("attn", "gqa"), ("attn.weights", "shaped")), (("attn.form", "absorbed"), ("pos", "t5"))} <= together
    assert (("attn.v_proj", "none"), ("attn.weights", "softmax")) not in together
    for group, made in PARTS.items():
        assert {part().name for part in made.values()} == set(options(group)), group


def batch(packed: bool) -> Batch:
    tokens = torch.randint(VOCAB, (4, T), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(T).expand(4, T)
    ids = (torch.arange(T) // 6).expand(4, T)
    return Batch(
        tokens, tokens.roll(-1, 1), positions % 6 if packed else positions, ids if packed else None, torch.ones(4, T)
    )


@pytest.mark.parametrize("row", covering(), ids=lambda row: f"{row['attn']}-{row['ffn']}-{row['pos']}-{row['block']}")
def test_it_trains_two_steps_and_passes_its_check(row):
    exp = experiment(row)
    torch.manual_seed(0)
    master = build(exp.arch, VOCAB, resolve(exp.kernels, CPU, torch.bfloat16), seed=0, device=CPU)
    before = {name: p.detach().clone() for name, p in master.named_parameters()}
    step = Stepper(Twin(master, torch.bfloat16), make(exp.optim, master), 2, exp.optim.clip, 0, CPU)
    losses = [step(batch(exp.data.packing == "documents"), step=i, lr=1e-3)[0].item() for i in range(2)]
    assert all(math.isfinite(loss) and loss < 3 * math.log(VOCAB) for loss in losses)
    assert step.finite()
    unmoved = {n: p.grad for n, p in master.named_parameters() if torch.equal(p, before[n])}
    if getattr(exp.attn, "weights", "") == "shaped" and master.blocks[0].attn.q.weight.abs().max() < 1e-4:
        unmoved.pop("pos.weight", None)  # near q = 0 the softmax and the uniform part cancel, and a bias with them
    still = {
        n for n, g in unmoved.items() if g is None or not 0 < g.abs().max() < ADAM_EPS
    }  # below it nothing can move
    assert not still, f"two steps did not move {still}"
    wrong = [found for found in quick(exp) if found.state == "fail"]
    assert not wrong
