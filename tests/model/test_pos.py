"""Positions: rotations, sinusoids, learned tables, ALiBi."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.check import oracle_parts
from lmlab.errors import ConfigError, LmlabError
from lmlab.kernels.resolve import resolve
from lmlab.kernels.scores import Scores
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.mask import CAUSAL
from lmlab.model.pos import T5, Alibi, Learned, NoPosition, Rope, Sinusoidal, alibi_slopes, t5_buckets
from tests.composed import close, model, peaked, rows

OPS = resolve(Auto(), "cpu", torch.float64)
DIMS = Dims(d_model=32, n_heads=4, head_dim=8, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=8)


def rotated(x_BTHC, positions, pairing="half", **fields):
    tables = Rope(specs.Rope(pairing=pairing, **fields), DIMS, OPS).tables(positions, positions)
    kind, cos, sin = tables.rotation(x_BTHC.dtype)
    return OPS.rope[kind](x_BTHC, cos, sin)


def at(*positions):
    return torch.tensor([positions])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_is_relative(pairing):
    q, k = torch.randn(2, 1, 1, 1, 8).double()
    score = lambda m, n: (rotated(q, at(m), pairing) * rotated(k, at(n), pairing)).sum()  # noqa: E731
    for m, n, shift in ((5, 2, 7), (3, 3, 100), (90, 1, 5000)):
        close(score(m, n), score(m + shift, n + shift), 1e-9)
    assert abs(score(5, 2) - score(6, 2)) > 1e-3


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_keeps_norms_and_position_zero(pairing):
    x = torch.randn(1, 3, 4, 8).double()
    out = rotated(x, at(0, 7, 4097), pairing)
    close(out.norm(dim=-1), x.norm(dim=-1))
    close(out[:, 0], x[:, 0])


def test_half_is_interleaved_under_a_fixed_permutation():
    x = torch.randn(1, 5, 4, 8).double()
    order = torch.arange(8).view(4, 2).T.flatten()  # 0 2 4 6 1 3 5 7
    positions = torch.arange(5)[None]
    close(rotated(x, positions, "interleaved")[..., order], rotated(x[..., order], positions, "half"))


def test_rope_fraction_leaves_the_rest():
    x = torch.randn(1, 5, 4, 8).double()
    out = rotated(x, torch.arange(5)[None], fraction=0.5)
    close(out[..., 4:], x[..., 4:])
    close(out[..., :4], rotated_by_formula(x[..., :4]))


def rotated_by_formula(x):
    angle = torch.arange(5).double()[:, None] * 10000.0 ** (-torch.arange(0, 4, 2).double() / 4)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x[..., :2], x[..., 2:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def test_angles_are_exact_far_out():
    places = (0, 1, 255, 256, 257, 4095, 65535, 65536, 70001, 2**24 - 1)
    cos, sin = Rope(specs.Rope(), DIMS, OPS).angles(at(*places))
    for n, place in enumerate(places):
        for i in range(4):
            assert abs(cos[0, n, i].item() - math.cos(place * 10000 ** (-2 * i / 8))) < 1e-8
            assert abs(sin[0, n, i].item() - math.sin(place * 10000 ** (-2 * i / 8))) < 1e-8


@pytest.mark.parametrize("place", [-1, 2**24])
def test_a_position_no_table_has_is_an_error(place):
    with pytest.raises(IndexError):
        Rope(specs.Rope(), DIMS, OPS).angles(at(place))


class Seen(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "pos", [Rope(specs.Rope(), DIMS, OPS), Sinusoidal(specs.Sinusoidal(), DIMS, OPS)], ids=lambda p: type(p).__name__
)
def test_tables_are_kept_and_serve_every_length(pos):
    def use(n):
        positions = torch.arange(n).expand(2, n)
        pos.tables(positions, positions)
        pos.embed(torch.zeros(2, n, 32), positions)

    use(5)
    with Seen() as seen:
        use(300)
    assert not seen.names & {"cos", "sin", "polar", "pow"}
    assert not list(pos.buffers())


@pytest.mark.parametrize("pos", ["none", "sinusoidal", "learned", "rope", "alibi", "t5"])
@pytest.mark.parametrize("documents", [True, False], ids=["packed", "stream"])
def test_no_position_is_looked_at_off_the_cpu(pos, documents):
    """A tensor on meta has no values: reading one, which on an accelerator is a stall, is an error there."""
    net = model(pos=pos).to("meta")
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    own = torch.zeros_like(tokens) if documents else None
    positions = torch.zeros_like(tokens) if documents else torch.arange(16, device="meta").expand(2, 16)
    assert net(tokens, positions, documents_BT=own).logits_BTV.shape == (2, 16, 97)


def test_rows_that_share_positions_share_a_table_row():
    rope = Rope(specs.Rope(), DIMS, OPS)
    same, own = torch.arange(5).repeat(3, 1), torch.arange(15).view(3, 5)
    assert rope.tables(same, same).cos.shape[0] == 1
    assert rope.tables(own, own).cos.shape[0] == 3


def test_an_odd_rotary_width_is_refused():
    with pytest.raises(ConfigError, match=r"`pos.fraction` 0.4 of 8 channels turns 3 channels"):
        Rope(specs.Rope(fraction=0.4), DIMS, OPS)


def test_sinusoidal_is_the_paper_and_shifts_by_a_rotation():
    pos = Sinusoidal(specs.Sinusoidal(), DIMS, OPS)
    table = pos.embed(torch.zeros(1, 40, 32).double(), torch.arange(40)[None])[0]
    for p, i in ((0, 0), (3, 1), (39, 15)):
        theta = 10000 ** (-2 * i / 32)
        assert abs(table[p, 2 * i].item() - math.sin(p * theta)) < 1e-12
        assert abs(table[p, 2 * i + 1].item() - math.cos(p * theta)) < 1e-12
    pairs = torch.complex(table[:, 1::2], table[:, ::2])  # e^(i·p·θ)
    turn = pairs[7] / pairs[0]
    assert (pairs[:-7] * turn - pairs[7:]).abs().max() < 1e-12


def test_learned_refuses_past_its_table():
    pos = Learned(specs.Learned(), DIMS, OPS)
    assert pos.weight.shape == (16, 32)
    with pytest.raises(LmlabError, match=r"16 positions .* position 16 was asked for"):
        pos.embed(torch.zeros(1, 17, 32), torch.arange(17)[None])
    with pytest.raises(LmlabError, match="position 99"):
        pos.embed(torch.zeros(1, 1, 32), at(99))
    assert Learned(specs.Learned(max_len=40), DIMS, OPS).weight.shape[0] == 40


def test_alibi_bias_is_minus_slope_times_distance_however_far():
    tables = Alibi(specs.Alibi(), DIMS, OPS).tables(at(0), at(0))
    far = (at(200000), 200000 - torch.tensor([[0, 1, 2, 100, 123456, -3]]))
    scores = Scores(positions=far, slope_H=tables.slope_H)
    want = -torch.tensor(alibi_slopes(4)).double()[:, None] * torch.tensor([0, 1, 2, 100, 123456, 0])
    close(scores.bias(range(1), range(6), torch.float64)[0, :, 0], want)
    assert torch.equal(scores.bias(range(1), range(6), torch.bfloat16)[0, :, 0], want.bfloat16())


def test_a_bias_by_table_holds_its_last_value_from_there_on():
    bias_HR = torch.tensor([[5.0, 3.0, 1.0], [50.0, 30.0, 10.0]])
    positions = (torch.tensor([[9], [9]]), 9 - torch.tensor([[0, 1, 2, 9, -1], [2, 2, 1, 1, 0]]))
    bias = Scores(positions=positions, bias_HR=bias_HR).bias(range(1), range(5), torch.float32)
    assert bias.shape == (2, 2, 1, 5)
    assert bias[0, :, 0].tolist() == [[5, 3, 1, 1, 5], [50, 30, 10, 10, 50]]
    assert bias[1, 1, 0].tolist() == [10, 10, 30, 30, 50]


def test_positions_with_gaps_are_as_far_apart_as_they_say():
    (view, _) = model(pos="alibi").views(CAUSAL, at(0, 100), torch.float64)
    close(view.rendered.mask[0, :, 1, 0], -100 * torch.tensor(alibi_slopes(4)).double())


def official_t5_bucket(distance, n_buckets, max_distance):
    """The formula of the paper's code for a causal decoder, in float32 as it is there."""
    exact = n_buckets // 2
    if distance < exact:
        return distance
    share = torch.log(torch.tensor(distance / exact)) / math.log(max_distance / exact)
    return min(exact + int(share * (n_buckets - exact)), n_buckets - 1)


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (2, 5), (5, 64)])
def test_t5_buckets_are_the_official_ones(n_buckets, max_distance):
    want = [official_t5_bucket(d, n_buckets, max_distance) for d in range(max_distance + 1)]
    assert t5_buckets(n_buckets, max_distance) == want
    assert want[-1] == n_buckets - 1


def exact_t5_bucket(distance, n_buckets, most):
    """In fractions: the last k of n logarithmic buckets with (distance / half)^n ≥ (most / half)^k."""
    half = n_buckets // 2
    n = n_buckets - half
    if distance < half:
        return distance
    powers = Fraction(distance, half) ** n
    return half + max(k for k in range(n) if powers >= Fraction(most, half) ** k)


@pytest.mark.parametrize("n_buckets", [2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 32, 33])
def test_t5_buckets_are_exact(n_buckets):
    for most in (n_buckets // 2 + 1, n_buckets, 16, 20, 27, 64, 81, 125, 128, 243, 256, 300):
        if most > n_buckets // 2:
            want = [exact_t5_bucket(d, n_buckets, most) for d in range(most + 1)]
            assert t5_buckets(n_buckets, most) == want, (n_buckets, most)
            assert [oracle_parts.bucket(d, n_buckets, most) for d in range(most + 1)] == want


@pytest.mark.parametrize(
    ("n_buckets", "most", "begins"),
    [
        (9, 128, {5: 8, 6: 16, 7: 32, 8: 64}),
        (9, 4096, {5: 16, 6: 64, 7: 256, 8: 1024}),
        (129, 2048, {65 + 12: 128, 65 + 25: 256, 65 + 38: 512, 65 + 51: 1024}),
        (200, 2**24, {199: None}),
    ],
)
def test_t5_buckets_begin_where_the_root_is_whole(n_buckets, most, begins):
    found = t5_buckets(n_buckets, most)
    assert len(found) == most + 1
    assert found[-1] == n_buckets - 1
    for bucket, first in begins.items():
        if first is not None:
            assert (found[first], found[first - 1]) == (bucket, bucket - 1)
            assert oracle_parts.bucket(first, n_buckets, most) == bucket


def test_t5_gives_each_head_its_bucket_however_far():
    pos = T5(specs.T5(n_buckets=4, max_distance=8), DIMS, OPS)
    with torch.no_grad():
        pos.weight.copy_(torch.arange(16.0).view(4, 4))
    tables = pos.tables(at(0), at(0))
    assert tables.bias_HR.tolist() == [[4 * h + b for b in (0, 1, 2, 2, 3, 3, 3, 3, 3)] for h in range(4)]


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 48])
def test_alibi_slopes_are_the_official_ones(n_heads):
    def official(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    closest = 2 ** math.floor(math.log2(n_heads))
    want = official(closest)
    if closest != n_heads:
        want += official(2 * closest)[0::2][: n_heads - closest]
    assert alibi_slopes(n_heads) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "part",
    [NoPosition(specs.NoPosition(), DIMS, OPS), Rope(specs.Rope(), DIMS, OPS), Alibi(specs.Alibi(), DIMS, OPS)],
    ids=lambda p: type(p).__name__,
)
def test_nothing_is_added_to_embeddings(part):
    x = torch.randn(1, 4, 32)
    assert part.embed(x, torch.arange(4)[None]) is x


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "none"])
def test_a_shift_of_all_positions_changes_nothing(pos):
    net = peaked(model(pos=pos))
    tokens, positions = rows()
    with torch.no_grad():
        close(net(tokens, positions + 5000).logits_BTV, net(tokens, positions).logits_BTV, 1e-9)


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "sinusoidal"])
def test_positions_past_the_training_length_are_right(pos):
    net = peaked(model(pos=pos))
    tokens, positions = rows(T=40)
    with torch.no_grad():
        net(tokens[:, :8], positions[:, :8])
        first = net(tokens, positions).logits_BTV
        close(first, model_like(net, pos)(tokens, positions).logits_BTV)


def model_like(net, pos):
    fresh = model(pos=pos, seed=5)
    fresh.load_state_dict(net.state_dict())
    return fresh
