"""Multi-head latent attention: the paper's formula, both forms, its sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.mask import CAUSAL
from lmlab.model.mla import MLA
from lmlab.model.pos import Rope
from tests.composed import close, grads, model, peaked, rows, same_grads

OPS = resolve(Auto(), "cpu", torch.float64)
SIZES = {"nope_dim": 6, "rope_dim": 4, "v_dim": 5, "kv_rank": 7}


def part(**fields):
    spec = specs.MLA(**SIZES, **fields)
    dims = Dims(d_model=32, n_heads=4, head_dim=10, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=4)
    attn = MLA(spec, dims, OPS).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in attn.parameters():
            p.normal_(std=0.4)
    positions = torch.arange(9).expand(2, 9)
    view = attn.prepare(
        CAUSAL, Rope(specs.Rope(), dims, OPS).tables(positions, positions), positions, positions, torch.float64
    )
    return attn, view, torch.randn(2, 9, 32).double()


def rms(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def turned(x_BTC):
    """Half pairing of 4 channels: (0, 2) by p·1, (1, 3) by p·0.01."""
    angle = torch.arange(x_BTC.shape[1]).double()[:, None] * torch.tensor([1.0, 1e4**-0.5], dtype=torch.float64)
    a, b = x_BTC.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_it_is_the_papers_formula(form, q_rank):
    attn, view, x = part(form=form, q_rank=q_rank)
    q = attn.q(x) if q_rank is None else attn.q_up(rms(attn.q_down(x), attn.q_norm.weight))
    down = x @ attn.kv_down.weight.T
    latent, key = rms(down[..., :7], attn.kv_norm.weight), turned(down[..., 7:])
    heads = []
    for h in range(4):
        q_h = torch.cat((q[..., 10 * h : 10 * h + 6], turned(q[..., 10 * h + 6 : 10 * h + 10])), -1)
        k_h = torch.cat((latent @ attn.k_up.weight[6 * h : 6 * h + 6].T, key), -1)
        scores = q_h @ k_h.transpose(1, 2) / math.sqrt(10)
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
        heads.append(scores.softmax(-1) @ (latent @ attn.v_up.weight[5 * h : 5 * h + 5].T))
    close(attn(x, view), torch.cat(heads, -1) @ attn.o.weight.T)


def test_the_scale_is_of_both_parts():
    assert model(attn=("mla", {"nope_dim": 32, "rope_dim": 16})).blocks[0].attn.scale == pytest.approx(
        0.144338, abs=5e-7
    )


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "none"])
@pytest.mark.parametrize("more", [{}, {"q_rank": 12, "window": 4}, {"softcap": 20.0, "v_dim": 24}], ids=str)
def test_absorbed_is_naive_in_outputs_and_gradients(pos, more):
    naive, absorbed = (model(pos=pos, attn=("mla", {"form": form, **more})) for form in ("naive", "absorbed"))
    absorbed.load_state_dict(peaked(naive).state_dict())
    tokens, positions = rows()
    with torch.no_grad():
        close(absorbed(tokens, positions).logits_BTV, naive(tokens, positions).logits_BTV)
    first, second = (grads(net, tokens, positions, targets_BT=tokens) for net in (absorbed, naive))
    same_grads(first, second, 1e-9)


def test_default_widths_follow_the_head_size():
    shapes = {n: tuple(p.shape) for n, p in model(attn="mla").blocks[0].attn.named_parameters()}
    assert shapes == {
        "q.weight": (4 * (16 + 8), 64),
        "kv_down.weight": (16 + 8, 64),
        "kv_norm.weight": (16,),
        "k_up.weight": (64, 16),
        "v_up.weight": (64, 16),
        "o.weight": (64, 64),
    }


def test_values_may_have_more_channels_than_keys():
    net = peaked(model(attn=("mla", {"v_dim": 48})))
    assert net(*rows()).logits_BTV.isfinite().all()


def test_yarns_factor_acts_on_the_whole_score_and_not_on_cos_and_sin():
    nets = [model(rope_scaling=("yarn", {"factor": f}), attn="mla") for f in (8.0, 1.0)]
    views = [net.views(CAUSAL, torch.arange(16)[None], torch.float64)[0] for net in nets]
    assert [view.temperature for view in views] == [pytest.approx((0.1 * math.log(8) + 1) ** 2), 1.0]
    assert all(view.rotation[1].max() == 1 for view in views)
