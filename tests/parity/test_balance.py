"""The balance loss of Mixtral, Qwen3-MoE and OLMoE in transformers against ours; DeepSeek-V3 has none there.

Theirs is E·Σ f·P over the tokens of all layers and rows together, with f counted k times; ours is of one layer and one
row, with f of sum 1, and the mean over layers and rows is taken of that.
"""

from __future__ import annotations

import pytest
import torch

from lmlab.model import routing
from tests.composed import close, rows
from tests.parity.copied import Wide
from tests.parity.folders import CASES, ROWS, model_of, ours, run_of, saved

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
WITH_LOSS = ("mixtral", "qwen3_moe", "olmoe")
COEF = 0.125


def theirs_of(gates: list[torch.Tensor], k: int) -> torch.Tensor:
    """gates: logits (tokens, E) of each layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    with Wide():
        return load_balancing_loss_func(tuple(gates), gates[0].shape[-1], k)


def ours_of(gate_GSE: torch.Tensor, k: int) -> torch.Tensor:
    """Per row."""
    probs = gate_GSE.softmax(-1)
    return routing.balance(probs.topk(k, -1).indices, probs, None)


@pytest.mark.parametrize("family", WITH_LOSS)
def test_of_one_layer_and_one_row_theirs_is_k_times_ours_and_the_import_says_so(family, tmp_path):
    cls, config = CASES[family]
    wide, narrow = model_of(cls, config | dict(num_hidden_layers=1, router_aux_loss_coef=COEF))
    k = config["num_experts_per_tok"]
    net = ours(run_of(saved(tmp_path / "hf", narrow), tmp_path / "runs"))
    assert net.arch.moe.aux_coef == COEF * k
    tokens, positions = rows(1, 24, vocab=ROWS)
    with Wide():
        aux = wide(tokens, output_router_logits=True).aux_loss.detach()
    found = net(tokens, positions, targets_BT=tokens.roll(-1, 1))
    close(k * found.stats[0].balance_G, aux[None], 1e-9)
    close(found.penalty.detach() / tokens.numel(), COEF * aux, 1e-9)
    assert abs(aux.item() - k) > 1e-3  # not the even load, where it is k whatever f is


@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_even_load_is_1_and_theirs_k(k):
    gates = [torch.zeros(1, 12, 6).double() + 1e-9 * torch.eye(6).double().repeat(2, 1) for _ in range(3)]
    gates = [sum(g.roll(n, -1) for n in range(k)) for g in gates]
    close(torch.cat([ours_of(g, k) for g in gates]), torch.ones(3).double(), 1e-8)
    close(theirs_of([g[0] for g in gates], k), torch.tensor(float(k)).double(), 1e-8)


def test_layers_that_collapse_apart_are_even_to_theirs_and_not_to_ours():
    gates = [
        torch.tensor([[20.0, -20.0]]).double().expand(1, 8, 2),
        torch.tensor([[-20.0, 20.0]]).double().expand(1, 8, 2),
    ]
    close(torch.cat([ours_of(g, 1) for g in gates]).mean(), torch.tensor(2.0).double(), 1e-9)
    close(theirs_of([g[0] for g in gates], 1), torch.tensor(1.0).double(), 1e-9)


def test_rows_count_together_in_theirs_and_each_alone_in_ours():
    gate = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)).double() * 3
    whole = theirs_of([gate.flatten(0, 1)], 2)
    close(whole, 2 * ours_of(gate.flatten(0, 1)[None], 2)[0], 1e-10)
    assert (2 * ours_of(gate, 2).mean() - whole).abs() > 0.1
