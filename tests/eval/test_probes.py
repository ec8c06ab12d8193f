"""Probes against values known by hand, and that a look inside leaves nothing behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lmlab.data.batches import Batch
from lmlab.eval import probes
from lmlab.eval.probes import (
    StepProbe,
    activations,
    attention_figures,
    chunks,
    hidden_figures,
    stream_figures,
    update_ratio,
)
from lmlab.kernels.scores import Scores
from lmlab.model.mask import CAUSAL
from lmlab.runs.probe_names import ELSEWHERE, LAYER, name, parse
from tests.composed import model, rows

PAST = Scores(causal=True)


def batch(B: int = 2, T: int = 16, seed: int = 1) -> Batch:
    tokens, positions = rows(B, T, seed=seed)
    return Batch(tokens, tokens.roll(-1, 1), positions, None, torch.ones(B, T))


def figures(net: Any, of: Batch | None = None) -> dict[str, float]:
    return probes.as_row(activations(net, of or batch()))


def heads(B: int, T: int, H: int, C: int, seed: int) -> Tensor:
    return torch.randn(B, T, H, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- attention


def test_uniform_attention_has_the_entropy_of_the_keys_it_sees():
    q, k = torch.zeros(2, 8, 4, 3), heads(2, 8, 2, 3, 0).float()
    whole = attention_figures(q, k, Scores(), scale=1.0)
    assert whole["attn_entropy"].item() == pytest.approx(math.log(8), abs=1e-6)
    causal = attention_figures(q, k, PAST, scale=1.0)
    by_hand = sum(math.log(n) for n in range(1, 9)) / 8
    assert causal["attn_entropy"].item() == pytest.approx(by_hand, abs=1e-6)
    for found in (whole, causal):
        assert found["attn_entropy_frac"].item() == pytest.approx(1, abs=1e-6)
        assert found["attn_max_logit"].item() == 0


def test_attention_on_one_key_has_no_entropy_and_its_score_is_the_largest():
    q, k = torch.ones(1, 3, 1, 1), torch.tensor([0.0, -200.0, 500.0]).view(1, 3, 1, 1)
    found = attention_figures(q, k, PAST, scale=0.5)
    # Query 2 sees 250; queries 0 and 1 do not, they see 0 and −100.
    assert found["attn_max_logit"].item() == 250
    assert found["attn_entropy"].item() == pytest.approx(0, abs=1e-12)
    hidden = attention_figures(q[:, :2], k[:, :2], PAST, scale=0.5)
    assert hidden["attn_max_logit"].item() == 0
    ahead = attention_figures(q, torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1), Scores(True, softcap=1.5), scale=1.0)
    assert ahead["attn_max_logit"].item() == pytest.approx(1.5 * math.tanh(2 / 1.5))


def test_queries_that_see_nothing_or_one_key_do_not_count():
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    found = attention_figures(q, k, Scores(True, valid_BS=torch.tensor([[False, False, True, True]])), scale=1.0)
    assert found["attn_entropy"].item() == pytest.approx(math.log(2) / 2)  # queries 2 and 3: ln 1 and ln 2
    assert found["attn_entropy_frac"].item() == pytest.approx(1)


def test_chunks_of_rows_and_heads_give_the_figures_of_the_whole(monkeypatch):
    B, T = 3, 10
    q, k = heads(B, T, 4, 5, 1), heads(B, T, 2, 5, 2)
    ids = torch.arange(T).expand(B, T) // torch.tensor([[3], [4], [20]])
    positions = torch.arange(T)[None]
    scores = Scores(
        True, documents=(ids, ids), positions=(positions, positions), slope_H=torch.tensor([1, 0.5, 0.2, 0])
    )
    whole = attention_figures(q, k, scores, scale=1.0)
    monkeypatch.setattr(probes, "MAX_SCORES", 200)
    assert len(list(chunks(q, k))) == B * 2
    parts = attention_figures(q, k, scores, scale=1.0)
    for figure, value in whole.items():
        assert parts[figure].item() == pytest.approx(value.item(), rel=1e-12), figure


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "flex"])
def test_figures_are_those_of_the_dense_backend(backend):
    chosen = {"attn": ("gqa", {"window": 5}), "pos": "alibi"}
    dense = figures(model(**chosen | {"attn": ("gqa", {"window": 5, "backend": "dense"})}))
    net = model(**chosen)
    for block in net.blocks:
        block.attn.wanted = backend  # the specification refuses flex on a CPU, where it has no backward
    other = figures(net)
    assert other.keys() == dense.keys()
    for key, value in dense.items():
        assert other[key] == pytest.approx(value, rel=1e-8), key


# ---------------------------------------------------------------- stream, hidden units, updates


def test_stream_figures_by_hand():
    found = stream_figures(torch.tensor([[[3.0, -4.0]]]))
    assert found["residual_rms"].item() == pytest.approx(math.sqrt(12.5))
    assert found["act_absmax"].item() == 4
    assert found["act_kurtosis"].item() == pytest.approx(1)  # two points


def test_kurtosis_of_a_gaussian_is_3_and_an_outlier_raises_it():
    x = torch.randn(1, 1000, 100) * 7 + 2
    assert stream_figures(x)["act_kurtosis"].item() == pytest.approx(3, abs=0.1)
    x[0, 0, 0] = 700
    assert stream_figures(x)["act_kurtosis"].item() > 100


def test_dead_units_are_zero_for_every_token():
    hidden = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], [[0.0, 2.0, 5.0], [0.0, 0.0, 1e-30]]])
    found = hidden_figures(hidden)
    assert found["ffn_zero_frac"].item() == pytest.approx(8 / 12)
    assert found["ffn_dead_frac"].item() == pytest.approx(1 / 3)


def test_a_relu_with_a_very_negative_bias_is_dead_in_its_layer_alone():
    net = model(ffn=("relu", {"bias": True}))
    with torch.no_grad():
        net.blocks[1].ffn.up.bias.fill_(-1e3)
    found = figures(net)
    assert (found["probe/1/ffn_zero_frac"], found["probe/1/ffn_dead_frac"]) == (1, 1)
    assert found["probe/0/ffn_dead_frac"] < found["probe/0/ffn_zero_frac"] < 1


@pytest.mark.parametrize("block", ["prenorm", "postnorm"])
def test_stream_is_that_of_the_blocks_outputs(block):
    net, of = model(block=block), batch()
    found = figures(net, of)
    with torch.no_grad():
        x = net.embedded(of.tokens_BT, of.positions_BT, None)
        assert found["probe/embed/residual_rms"] == pytest.approx(x.square().mean().sqrt().item())
        views = net.views(CAUSAL, of.positions_BT, x.dtype)
        for layer, block_ in enumerate(net.blocks):
            x, _ = block_(x, views[layer])
            assert found[name(layer, "residual_rms")] == pytest.approx(x.square().mean().sqrt().item())
        x = x if net.norm is None else net.norm(x)
        assert found["probe/final/residual_rms"] == pytest.approx(x.square().mean().sqrt().item())
        assert found["probe/logits/absmax"] == pytest.approx(net.logits(x).abs().amax().item())


def test_update_ratio_of_a_known_step():
    before = [torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0], [4.0]])]
    assert update_ratio(before, [0.99 * p for p in before]).item() == pytest.approx(0.01)


def test_gradients_and_updates_of_plain_descent():
    """SGD: Δw = −lr · g, so that the ratio is lr · ‖g‖ / ‖w‖ over the matrices of a layer."""
    net, of, lr = model(norm="layernorm", model={"tie_embeddings": False}), batch(), 1e-3
    probe = StepProbe(net, net, torch.device("cpu"))
    net(of.tokens_BT, of.positions_BT, targets_BT=of.targets_BT).loss.backward()
    wanted = {}
    for place, module in (("0", net.blocks[0]), ("1", net.blocks[1]), ("embed", net.embed), ("head", net.head)):
        every = list(module.parameters())
        g = torch.cat([p.grad.flatten() for p in every])
        matrices = [p for p in every if p.ndim >= 2]
        moved = torch.cat([p.grad.flatten() for p in matrices]).norm() * lr
        ratio = moved / torch.cat([p.detach().flatten() for p in matrices]).norm()
        wanted |= {f"probe/{place}/grad_norm": g.norm().item(), f"probe/{place}/update_ratio": ratio.item()}
    probe.before_update()
    for p in net.parameters():
        p.grad.mul_(0.5)  # clipped: the norm is from before, the update is the optimizer's own
    torch.optim.SGD(net.parameters(), lr=2 * lr).step()
    found = probe.after_update(of)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    known = {name(layer, figure) for layer in range(2) for figure in LAYER} | {f"probe/{key}" for key in ELSEWHERE}
    assert found.keys() == known
    assert all(math.isfinite(v) for v in found.values())


def test_at_most_8_rows_and_4096_tokens_are_probed():
    assert [probes.probe_rows(n) for n in (16, 512, 1024, 4096, 9000)] == [8, 8, 4, 1, 1]


def test_names_are_read_back():
    assert parse("probe/12/attn_entropy") == (12, "attn_entropy")
    assert parse("probe/logits/absmax") == ("logits", "absmax")
    assert [parse(word) for word in ("val/loss", "probe/x/y", "probe/3")] == [None, None, None]


# ---------------------------------------------------------------- leaves nothing behind


class Mean(nn.Module):
    """An attention of one's own: it never calls `ops.attention`."""

    def prepare(self, *args: Any) -> None:
        return None

    def forward(self, x_BTD: Tensor, view: Any, cache: Any = None) -> Tensor:
        return x_BTD.cumsum(1)


class Plain(nn.Module):
    """An ffn without `down`."""

    def forward(self, x_BTD: Tensor, valid_BT: Tensor | None = None) -> tuple[Tensor, None]:
        return x_BTD.tanh(), None


def test_parts_of_ones_own_have_the_figures_they_offer():
    net = model()
    net.blocks[0].attn, net.blocks[1].ffn = Mean(), Plain()
    found = figures(net)
    assert not [key for key in found if key.startswith(("probe/0/attn", "probe/1/ffn"))]
    assert {"probe/0/residual_rms", "probe/0/ffn_dead_frac", "probe/1/attn_entropy"} < found.keys()


def test_shaped_attention_tells_of_its_softmax_not_of_its_uniform_part():
    net = model(attn=("mha", {"weights": "shaped"}))
    with torch.no_grad():
        net.blocks[0].attn.q.weight.normal_(std=5.0)
    assert figures(net)["probe/0/attn_entropy_frac"] < 0.9


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind_even_when_it_fails(fails, monkeypatch):
    net = model(norm="batchnorm", model={"dropout": 0.5}).train()
    ops = [block.attn.ops for block in net.blocks]
    held = {key: value.clone() for key, value in net.state_dict().items()}
    random = torch.get_rng_state()
    if fails:
        monkeypatch.setattr(net, "loss", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            activations(net, batch())
    else:
        activations(net, batch())
    assert all(block.attn.ops is before for block, before in zip(net.blocks, ops, strict=True))
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert all(m.training for m in net.modules())
    assert all(torch.equal(value, held[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in net.parameters())


def test_compiled_blocks_are_not_compiled_again_and_give_the_figures_of_eager_ones():
    torch._dynamo.reset()
    counter = CompileCounter()
    net, of = model(torch.float32), batch()
    eager = figures(net, of)
    for block in net.blocks:
        block.compile(fullgraph=True, backend=counter)

    def step() -> int:
        net.train()
        net(of.tokens_BT, of.positions_BT, targets_BT=of.targets_BT).loss.backward()
        return int(counter.frame_count)

    compiled = step()
    found = figures(net, of)
    figures(net, batch(3))
    assert counter.frame_count == compiled == step()
    for key, value in eager.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    torch._dynamo.reset()


# ---------------------------------------------------------------- lmlab eval --probe


def test_eval_probe_prints_a_row_per_layer_and_records_the_same(small: list[str], capsys) -> None:
    from lmlab.cli.app import run
    from tests.cli.conftest import run_here

    path: Path = run_here([*small, "ffn=relu"]).path
    assert run(["eval", str(path), "--probe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (file,) = (path / "eval").glob("*.json")
    recorded = json.loads(file.read_text())
    shown = [figure for figure in LAYER if figure not in ("grad_norm", "update_ratio")]
    assert lines[1].split() == ["layer", *shown]
    for layer in range(2):
        cells = lines[2 + layer].split()
        assert cells == [str(layer), *(f"{recorded[name(layer, figure)]:.4g}" for figure in shown)]
    assert f"logits/absmax {recorded['probe/logits/absmax']:.4g} · of 128 tokens" in lines[4]
    assert 0 < recorded["probe/0/ffn_zero_frac"] < 1
    assert run(["eval", str(path), "--probe", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {key: value for key, value in again.items() if parse(key)} == {k: v for k, v in recorded.items() if parse(k)}
    assert run(["eval", str(path), "--json"]) == 0
    assert not [key for key in json.loads(capsys.readouterr().out) if "probe" in key]
