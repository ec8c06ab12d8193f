"""Scalings of rotations: the papers' worked values, identity at factor 1, and lengths as an input."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lmlab.errors import ConfigError
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.pos import Alibi, Rope
from lmlab.model.rope_scaling import NTK, PI, DynamicNTK, Llama3, YaRN, grown_base, plain
from lmlab.registry import OPTIONS, make
from tests.composed import close, model, peaked, rows

OPS = resolve(Auto(), "cpu", torch.float64)
CPU = torch.device("cpu")
SCALED = [name for name in OPTIONS["rope_scaling"] if name != "none"]


def dims(width: int = 64, seq_len: int = 2048) -> Dims:
    return Dims(d_model=width, n_heads=1, head_dim=width, n_layers=1, vocab_size=2, seq_len=seq_len, rotary_dim=width)


def scaled(spec: specs.Spec, **sizes: int) -> Rope:
    rope = Rope(specs.Rope(), dims(**sizes), OPS)
    rope.scale_by(make(spec, dims(**sizes), OPS, None))
    return rope


def test_pi_divides_positions():
    at = torch.arange(40)[None]
    got, want = scaled(specs.PI(factor=4.0)).tables(4 * at, at), scaled(specs.PI(factor=1.0)).tables(at, at)
    close(got.cos, want.cos)
    close(got.sin, want.sin)


@pytest.mark.parametrize(("factor", "base"), [(2, 20452.23), (4, 41829.37), (8, 85550.38)])
def test_ntk_bases(factor, base):
    assert grown_base(1e4, 64, factor) == pytest.approx(base, abs=5e-3)
    got, was = NTK(specs.NTK(factor=factor), dims(), OPS).frequencies(1e4, 64, CPU), plain(1e4, 64, CPU)
    assert got[0] == was[0] == 1
    close(got[-1], was[-1] / factor, 1e-15)


def test_dynamic_ntk_grows_with_the_row_and_is_plain_up_to_the_original_length():
    scaling = DynamicNTK(specs.DynamicNTK(factor=2.0), dims(), OPS)
    got = scaling.grown(1e4, 64, torch.tensor([[1], [2048], [4096]]))[:, 0]
    assert torch.equal(got[0], plain(1e4, 64, CPU))
    assert torch.equal(got[1], plain(1e4, 64, CPU))
    close(got[2], plain(31082.24, 64, CPU), 1e-6)
    assert (1e4 * 3 ** (64 / 62) - 31082.24) ** 2 < 5e-3**2


@pytest.mark.parametrize(("width", "length", "bounds"), [(64, 2048, (8, 21)), (128, 4096, (20, 46))])
def test_yarn_bounds_are_counted_on_the_original_length(width, length, bounds):
    for seq_len, original in ((length, None), (16, length)):
        scaling = YaRN(specs.YaRN(original_len=original), dims(width, seq_len), OPS)
        assert scaling.bounds(1e4, width) == bounds


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_ramps_between():
    got, was = YaRN(specs.YaRN(factor=4.0), dims(), OPS).frequencies(1e4, 64, CPU), plain(1e4, 64, CPU)
    assert torch.equal(got[:9], was[:9])
    close(got[21:], was[21:] / 4, 1e-15)
    ramp = (torch.arange(9, 21).double() - 8) / 13
    close(got[9:21], was[9:21] * (1 - ramp + ramp / 4), 1e-15)


@pytest.mark.parametrize(("factor", "magnitude"), [(2, 1.069315), (4, 1.138629), (8, 1.207944), (16, 1.277259)])
def test_yarn_temperature(factor, magnitude):
    assert YaRN(specs.YaRN(factor=factor), dims(), OPS).magnitude == pytest.approx(magnitude, abs=5e-7)
    at = torch.tensor([[0]])
    _, cos, _ = scaled(specs.YaRN(factor=factor)).tables(at, at).rotation(torch.float64)
    assert cos[0, 0, 0, 0].item() == pytest.approx(magnitude, abs=5e-7)
    assert YaRN(specs.YaRN(factor=factor, attention_factor=1.5), dims(), OPS).magnitude == 1.5


def test_llama3_goes_by_wavelength():
    spec = specs.Llama3(factor=8.0, original_len=8192)
    got, was = Llama3(spec, dims(128), OPS).frequencies(5e5, 128, CPU), plain(5e5, 128, CPU)
    for i in range(64):
        wavelength = 2 * math.pi / was[i].item()
        if wavelength < 8192 / 4:
            want = was[i]
        elif wavelength > 8192 / 1:
            want = was[i] / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * was[i] / 8 + smooth * was[i]
        close(got[i], want, 1e-15)
    assert len({(8192 * f / (2 * math.pi) > 4, 8192 * f / (2 * math.pi) < 1) for f in was.tolist()}) == 3


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_factor_1_is_plain_rope_to_the_last_bit(name, dtype):
    tokens, positions = rows(T=40)
    plain_net, net = (model(dtype, rope_scaling=s) for s in ("none", (name, {"factor": 1.0})))
    with torch.no_grad():
        assert torch.equal(net(tokens, positions).logits_BTV, plain_net(tokens, positions).logits_BTV)
    rope = scaled(dataclasses.replace(OPTIONS["rope_scaling"][name](), factor=1.0))
    at = torch.arange(70000)[None]
    got, want = rope.tables(at, at), Rope(specs.Rope(), dims(), OPS).tables(at, at)
    assert torch.equal(got.cos, want.cos)
    assert torch.equal(got.sin, want.sin)


def test_yarn_of_factor_1_is_plain_whatever_its_attention_factor():
    at, spec = torch.arange(300)[None], specs.YaRN(factor=1.0, attention_factor=1.3)
    got, want = scaled(spec).tables(at, at), Rope(specs.Rope(), dims(), OPS).tables(at, at)
    assert all(
        torch.equal(a, b)
        for a, b in zip(got.rotation(torch.float64)[1:], want.rotation(torch.float64)[1:], strict=True)
    )
    tokens, positions = rows(T=40)
    for attn in ("mha", "mla"):
        nets = [model(rope_scaling=s, attn=attn) for s in ("none", ("yarn", {"factor": 1.0, "attention_factor": 1.3}))]
        with torch.no_grad():
            assert torch.equal(*(net(tokens, positions).logits_BTV for net in nets))


@pytest.mark.parametrize("name", SCALED)
def test_every_scaling_acts_on_long_rows(name):
    tokens, positions = rows(T=40)
    plain_net, net = (peaked(model(rope_scaling=s)) for s in ("none", (name, {"factor": 8.0})))
    with torch.no_grad():
        assert not torch.equal(net(tokens, positions).logits_BTV, plain_net(tokens, positions).logits_BTV)


def dynamic(**more):
    return peaked(model(rope_scaling=("dynamic_ntk", {"factor": 4.0, "original_len": 4}), **more))


def test_dynamic_ntk_up_to_the_original_length_is_plain_to_the_last_bit():
    tokens, positions = rows()
    nets = [model(rope_scaling=s) for s in ("none", ("dynamic_ntk", {"factor": 8.0}))]
    with torch.no_grad():
        assert torch.equal(*(net(tokens, positions).logits_BTV for net in nets))


def test_dynamic_ntk_is_causal_at_equal_length_and_not_across_lengths():
    net = dynamic()
    tokens, positions = rows(1)
    edited = tokens.clone()
    edited[0, 9] = (edited[0, 9] + 1) % 97
    with torch.no_grad():
        whole = net(tokens, positions).logits_BTV
        assert torch.equal(net(edited, positions).logits_BTV[:, :9], whole[:, :9])
        short = net(tokens[:, :9], positions[:, :9]).logits_BTV
        assert (short - whole[:, :9]).abs().max() > 1e-3
        told = net(tokens[:, :9], positions[:, :9], length_BT=torch.tensor([[16]])).logits_BTV
        close(told, whole[:, :9])


def test_dynamic_ntk_after_a_long_request_is_a_fresh_model():
    net, fresh = dynamic(), dynamic()
    tokens, positions = rows(1, T=40)
    with torch.no_grad():
        net(tokens, positions)
        short = tokens[:, :7], positions[:, :7]
        assert torch.equal(net(*short).logits_BTV, fresh(*short).logits_BTV)


def test_dynamic_ntk_counts_each_document_and_each_padded_row_by_itself():
    net = dynamic()
    tokens, _ = rows(1)
    ids = torch.tensor([[0] * 3 + [1] * 13])
    positions = torch.tensor([[*range(3), *range(13)]])
    valid = torch.arange(16)[None] >= 6
    with torch.no_grad():
        packed = net(tokens, positions, documents_BT=ids).logits_BTV
        padded = net(tokens, (valid.cumsum(-1) - 1).clamp_min(0), valid_BT=valid).logits_BTV
        close(packed[:, :3], net(tokens[:, :3], torch.arange(3)[None]).logits_BTV)
        close(packed[:, 3:], net(tokens[:, 3:], torch.arange(13)[None]).logits_BTV)
        close(padded[:, 6:], net(tokens[:, 6:], torch.arange(10)[None]).logits_BTV)


def test_only_dynamic_ntk_asks_for_lengths():
    asked = {name: model(rope_scaling=name).pos.needs_length for name in OPTIONS["rope_scaling"]}
    assert [name for name, needs in asked.items() if needs] == ["dynamic_ntk"]


def test_positions_without_rotations_refuse_a_scaling():
    with pytest.raises(ConfigError, match="Alibi has no rotations"):
        Alibi(specs.Alibi(), dims(), OPS).scale_by(PI(specs.PI(), dims(), OPS))
