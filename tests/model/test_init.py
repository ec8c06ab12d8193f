"""The table of initial values and the draws."""

from __future__ import annotations

import math

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.init import Rule, draw_, table, z
from lmlab.model.transformer import build
from lmlab.registry import OPTIONS
from tests.composed import arch, model, rows

VARIANTS = [
    {"ffn": "gelu"},
    {"pos": "learned"},
    {"attn": "gqa"},
    {"norm": "layernorm"},
    {"block": "postnorm"},
    {"model": {"tie_embeddings": False}},
    {"block": "sandwich"},
    {"block": "parallel"},
    {"pos": "t5"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equal_tensors_are_equal_across_variants(variant):
    base, other = model(torch.float32).state_dict(), model(torch.float32, **variant).state_dict()
    shared = [n for n in base if n in other and base[n].shape == other[n].shape]
    assert {"embed.weight", "blocks.1.attn.q.weight", "blocks.0.attn.o.weight"} <= set(shared)
    assert all(torch.equal(base[n], other[n]) for n in shared)
    assert base.keys() != other.keys() or len(shared) < len(base) or "block" in variant


def test_names_shapes_and_seeds_each_give_their_own_draw():
    first = z(0, "a", (4, 4))
    assert torch.equal(z(0, "a", (4, 4)), first)
    for other in (z(1, "a", (4, 4)), z(0, "b", (4, 4)), z(0, "a", (4, 5))[:, :4]):
        assert not torch.equal(other, first)


def test_draws_leave_the_default_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model()
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_the_same_in_every_dtype():
    wide, narrow = model(torch.float64).state_dict(), model(torch.float32).state_dict()
    assert all(torch.equal(wide[n], narrow[n].double()) for n in wide)


def test_the_draw_is_pinned():
    """Values of another version would make old runs incomparable."""
    small = z(0, "embed.weight", (2, 2)).flatten().tolist()
    assert small == pytest.approx([0.5954380631, -0.1978313029, 0.1083277315, 1.6251708269], abs=1e-6)
    large = z(0, "embed.weight", (64, 64))[0, :4].tolist()
    assert large == pytest.approx(LARGE, abs=1e-6)


LARGE = [-0.5390285254, -1.0271474123, -1.4805371761, -0.4710195065]


def test_standard_deviations_are_the_table():
    net = model(
        torch.float32,
        attn=("gqa", {"bias_qkv": True}),
        norm="layernorm",
        pos="learned",
        model={"n_layers": 4, "d_model": 128, "tie_embeddings": False},
    )
    rules = table(net)
    assert (
        rules["blocks.3.attn.o.weight"].std
        == rules["blocks.0.ffn.down.weight"].std
        == pytest.approx(0.02 / math.sqrt(8))
    )
    assert rules["blocks.0.attn.v.weight"].std == rules["pos.weight"].std == rules["embed.weight"].std == 0.02
    assert rules["head.weight"].std == min(0.02, 0.5 / math.sqrt(128))
    for name, p in net.named_parameters():
        if rules[name].std == 0:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        else:
            assert abs(p.std().item() / rules[name].std - 1) < 0.1, name
            assert abs(p.mean().item()) < 0.1 * rules[name].std + 0.02 * rules[name].std, name


@pytest.mark.parametrize("d_model", [64, 256])
@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize(
    ("block", "tied", "allowed"),
    [
        *((block, tied, 0.3 if tied else 0.15) for block in ("prenorm", "postnorm") for tied in (False, True)),
        *((block, True, 0.3) for block in OPTIONS["block"] if block not in ("prenorm", "postnorm")),
    ],
)
def test_the_first_loss_is_near_ln_v(d_model, pos, block, tied, allowed):
    vocab = 2048
    net = model(
        torch.float32,
        vocab=vocab,
        block=block,
        pos=pos,
        model={"d_model": d_model, "n_layers": 4, "tie_embeddings": tied, "seq_len": 64},
    )
    tokens, positions = rows(8, 64, vocab=vocab)
    with torch.no_grad():
        loss = net(tokens, positions, targets_BT=tokens.roll(-1, 1)).loss.item() / tokens.numel()
    assert abs(loss - math.log(vocab)) < allowed


def test_deepnorm_is_xavier_with_gain_beta_on_what_makes_values_and_ffn():
    net = model(torch.float32, block="deepnorm", attn="gqa", model={"n_layers": 4, "d_model": 128})
    rules = table(net)
    for name, p in net.blocks[2].named_parameters():
        if p.ndim == 2:
            gain = 1.0 if name in ("attn.q.weight", "attn.k.weight") else 0.42045
            want = gain * math.sqrt(2 / (p.shape[0] + p.shape[1]))
            assert rules[f"blocks.2.{name}"].std == pytest.approx(want, rel=1e-4), name
            assert p.std().item() == pytest.approx(want, rel=0.05), name
    assert rules["embed.weight"].std == 0.02
    latent = model(torch.float32, block="deepnorm", attn=("mla", {"q_rank": 8}))
    attn, stds = latent.blocks[0].attn, table(latent)
    gains = {
        n: stds[f"blocks.0.attn.{n}"].std / math.sqrt(2 / sum(p.shape))
        for n, p in attn.named_parameters()
        if p.ndim == 2
    }
    assert {n for n, gain in gains.items() if gain == pytest.approx(0.5)} == {"v_up.weight", "o.weight"}
    assert table(model(block=("deepnorm", {"beta": 0.1})))["blocks.0.ffn.up.weight"].std == pytest.approx(
        0.1 * math.sqrt(2 / (64 + 176))
    )


def test_scales_that_do_not_start_at_1():
    net = model(
        torch.float32,
        block="simplified",
        norm=("rmsnorm", {"offset": 1}),
        pos="t5",
        attn=("mha", {"weights": "shaped"}),
    )
    block = net.blocks[0]
    assert (block.beta_attn.item(), round(block.beta_ffn.item(), 6)) == (1.0, 0.1)
    assert (block.attn.mix == 1).all()
    for p in (block.attn.q.weight, block.norm1.weight, net.pos.weight):
        assert (p == 0).all()


def test_a_part_may_bring_rules_of_its_own():
    net = model(torch.float32)
    net.blocks[0].attn.init_rules = lambda: {"q.weight": Rule(3.0, 0.0)}
    draw_(net, 0)
    assert (net.blocks[0].attn.q.weight == 3).all()
    assert net.blocks[1].attn.q.weight.std() < 0.05


def test_drawing_is_left_out_for_loading():
    empty = build(arch(), 97, resolve(Auto(), "cpu", torch.float32), seed=None, device="cpu")
    empty.load_state_dict(model(torch.float32).state_dict())
    assert torch.equal(empty.embed.weight, model(torch.float32).embed.weight)
