"""Shaped attention, projections that are left out, layers without positions, windows by a pattern."""

from __future__ import annotations

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.attn import Attention
from lmlab.model.dims import Dims
from lmlab.model.mask import CAUSAL, window
from lmlab.model.pos import PosTables
from tests.composed import close, model, rows

OPS = resolve(Auto(), "cpu", torch.float64)
DIMS = Dims(d_model=32, n_heads=4, head_dim=8, n_layers=1, vocab_size=11, seq_len=16, rotary_dim=8)
BARE = {"weights": "shaped", "v_proj": "none", "o_proj": "none"}


def part(**fields):
    attn = Attention(specs.MHA(**fields), DIMS, OPS).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in attn.parameters():
            p.normal_(std=0.4)
    return attn, torch.randn(2, 9, 32).double()


def applied(attn, x, mask=CAUSAL):
    positions = torch.arange(x.shape[1]).expand(x.shape[:2])
    return attn(x, attn.prepare(mask, PosTables(), positions, positions, x.dtype))


def heads(x):
    return x.view(2, 9, 4, 8)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("backend", ["dense", "sdpa", "tiled"])
def test_shaped_is_identity_softmax_and_uniform_mixed_per_head(size, backend):
    attn, x = part(weights="shaped", window=size, backend=backend)
    plain = Attention(specs.MHA(window=size), DIMS, OPS).double()
    plain.load_state_dict({n: p for n, p in attn.state_dict().items() if n != "mix"})
    value = heads(x @ attn.v.weight.T)
    seen = (CAUSAL if size is None else CAUSAL & window(size)).scores().seen(range(9), range(9), 9, 9, x.device)[0, 0]
    uniform = torch.einsum("ts,bshc->bthc", seen.double() / seen.sum(-1, keepdim=True), value)
    with torch.no_grad():
        plain.o.weight.copy_(torch.eye(32))
    a, b, c = attn.mix.view(3, 4, 1)
    mixed = a * value + b * heads(applied(plain, x)) - c * uniform
    close(applied(attn, x), mixed.reshape(2, 9, 32) @ attn.o.weight.T)


@pytest.mark.parametrize(("name", "K"), [("gqa", 2), ("mqa", 1)])
def test_the_own_value_of_a_query_head_is_its_kv_heads(name, K):
    """As an mha whose keys and values are those of each head's kv head."""
    few = Attention({"gqa": specs.GQA, "mqa": specs.MQA}[name](weights="shaped"), DIMS, OPS).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in few.parameters():
            p.normal_(std=0.4)
    every, x = Attention(specs.MHA(weights="shaped"), DIMS, OPS).double(), torch.randn(2, 9, 32).double()
    wide = {n: few.state_dict()[n].view(K, 8, 32).repeat_interleave(4 // K, 0) for n in ("k.weight", "v.weight")}
    every.load_state_dict(few.state_dict() | {n: w.reshape(32, 32) for n, w in wide.items()})
    close(applied(few, x), applied(every, x))


def test_factors_are_a_vector_so_that_nothing_decays_or_counts_them_as_a_matrix():
    attn, _ = part(weights="shaped")
    assert attn.mix.shape == (12,)


def test_bare_shaped_attention_starts_as_the_identity():
    net = model(attn=("mha", BARE), block="simplified")
    attn = net.blocks[0].attn
    assert {n for n, _ in attn.named_parameters()} == {"q.weight", "k.weight", "mix"}
    x = torch.randn(2, 16, 64).double()
    view = net.views(CAUSAL, rows()[1], torch.float64)[0]
    close(attn(x, view), x)


def test_simplified_block_has_no_skip():
    block = model(block="simplified", attn=("mha", BARE)).blocks[0]
    with torch.no_grad():
        block.beta_attn.fill_(0.7)
        block.attn.q.weight.normal_()
    x = torch.randn(2, 16, 64).double()
    view = block.attn.prepare(CAUSAL, PosTables(), *[rows()[1]] * 2, torch.float64)
    y = block.norm1(x)
    close(block(x, view)[0], 0.7 * block.attn(y, view) + 0.1 * block.ffn(y)[0])


def test_a_pattern_says_which_layers_have_the_window():
    net = model(model={"n_layers": 6}, attn=("mha", {"window": 4, "pattern": "SSL"}))
    assert [block.attn.window for block in net.blocks] == [4, 4, None, 4, 4, None]
    assert len({id(view) for view in net.views(CAUSAL, rows()[1], torch.float64)}) == 2


def test_every_nth_layer_goes_without_positions():
    net = model(model={"n_layers": 4}, attn=("mha", {"nope_every_n_layers": 2}))
    views = net.views(CAUSAL, rows()[1], torch.float64)
    assert [view.rotation is None for view in views] == [False, True, False, True]
    biased = model(pos="alibi", model={"n_layers": 4}, attn=("mha", {"nope_every_n_layers": 4}))
    assert [v.scores.biased for v in biased.views(CAUSAL, rows()[1], torch.float64)] == [True, True, True, False]


def test_the_reach_of_a_pattern_is_that_of_its_windows():
    net = model(pos="none", model={"n_layers": 2}, attn=("mha", {"window": 4, "pattern": "SL"}))
    tokens, positions = rows(1)
    edited = tokens.clone()
    edited[0, 0] = (edited[0, 0] + 1) % 97
    with torch.no_grad():
        moved = (net(tokens, positions).logits_BTV != net(edited, positions).logits_BTV)[0].any(-1)
    assert moved.all()


def test_an_own_scale_replaces_the_root_of_the_channels():
    tokens, positions = rows()
    first, second = (model(attn=("mha", {"scale": s})) for s in (None, 0.25))
    close(first(tokens, positions).logits_BTV, second(tokens, positions).logits_BTV, 1e-14)
    assert not torch.equal(
        model(attn=("mha", {"scale": 4.0}))(tokens, positions).logits_BTV, first(tokens, positions).logits_BTV
    )


def test_full_qk_norm_is_over_all_heads():
    attn, x = part(qk_norm="full")
    assert attn.q_norm.weight.shape == attn.k_norm.weight.shape == (32,)
    plain = Attention(specs.MHA(), DIMS, OPS).double()
    normed = {
        m: torch.nn.functional.rms_norm(x @ getattr(attn, m).weight.T, (32,), getattr(attn, f"{m}_norm").weight, 1e-6)
        for m in "qk"
    }
    positions = torch.arange(9).expand(2, 9)
    view = plain.prepare(CAUSAL, PosTables(), positions, positions, x.dtype)
    out = plain.attend(heads(normed["q"]), heads(normed["k"]), heads(x @ attn.v.weight.T), view)
    close(applied(attn, x), out.reshape(2, 9, 32) @ attn.o.weight.T)
