"""The whole decoder: causality, packing, padding, precision, twins, counts."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.transformer import Transformer, build
from lmlab.registry import OPTIONS
from tests.composed import VOCAB, arch, close, grads, model, peaked, rows, same_grads

POS, ATTN, NORM, BLOCK = (list(OPTIONS[group]) for group in ("pos", "attn", "norm", "block"))
EVERY = [
    *({"pos": p, "attn": a} for p, a in itertools.product(POS, ATTN)),
    *({"norm": n, "block": b} for n, b in itertools.product(NORM, BLOCK)),
]
LAYOUTS = list(itertools.product(POS, ATTN, ("sdpa", "dense", "tiled")))


def composed(pos: str, attn: str, backend: str) -> Transformer:
    net = model(pos=pos, attn=(attn, {"backend": backend}))
    if pos == "t5":
        torch.nn.init.normal_(net.pos.weight)
    return peaked(net)


@pytest.mark.parametrize("chosen", EVERY, ids=lambda c: "-".join(c.values()))
def test_it_is_causal_by_edit_and_by_gradient(chosen):
    net = model(**chosen)
    if chosen.get("norm") != "none":  # without any norm scores grow without bound from layer to layer
        net = peaked(net)
    tokens, positions = rows(1)
    edited = tokens.clone()
    edited[0, 9] = (edited[0, 9] + 1) % VOCAB
    with torch.no_grad():
        before, after = net(tokens, positions).logits_BTV, net(edited, positions).logits_BTV
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()
    entered: list[torch.Tensor] = []
    net.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].retain_grad(), entered.append(args[0]))[0])
    net(tokens, positions).logits_BTV[0, 9].sum().backward()
    reached = entered[0].grad[0].abs().sum(-1)
    assert (reached[:10] > 0).all()
    assert (reached[10:] == 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_causality_holds_in_training_with_one_dropout_draw(training):
    net = model(model={"dropout": 0.3}, attn=("mha", {"dropout": 0.3})).train(training)
    tokens, positions = rows(1)
    edited = tokens.clone()
    edited[0, 9] = (edited[0, 9] + 1) % VOCAB
    outs = []
    for t in (tokens, edited):
        torch.manual_seed(0)
        outs.append(net(t, positions).logits_BTV.detach())
    assert torch.equal(outs[0][:, :9], outs[1][:, :9])


@pytest.mark.parametrize(("pos", "attn", "backend"), LAYOUTS)
def test_a_packed_document_is_the_document_alone(pos, attn, backend):
    net = composed(pos, attn, backend)
    tokens, _ = rows(2)
    ids = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [4] * 9 + [7] * 7])
    positions = torch.tensor([[*range(5), *range(7), *range(4)], [*range(9), *range(7)]])
    with torch.no_grad():
        packed = net(tokens, positions, documents_BT=ids).logits_BTV
        for row, doc in ((0, 0), (0, 1), (0, 2), (1, 4), (1, 7)):
            own = (ids[row] == doc).nonzero()[:, 0]
            alone = net(tokens[row, own][None], torch.arange(len(own))[None]).logits_BTV
            close(packed[row, own], alone[0])


@pytest.mark.parametrize(("pos", "attn", "backend"), LAYOUTS)
def test_a_left_padded_row_is_the_row_alone(pos, attn, backend):
    net = composed(pos, attn, backend)
    tokens, _ = rows(2)
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[1, :6] = False
    positions = (valid.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = net(tokens, positions, valid_BT=valid).logits_BTV
        alone = net(tokens[1:, 6:], torch.arange(10)[None]).logits_BTV
    assert padded.isfinite().all()
    close(padded[1:, 6:], alone)


def test_padding_leaves_gradients_finite_and_equal_to_the_row_alone():
    net = peaked(model(pos="alibi", attn="gqa"))
    tokens, _ = rows(1)
    valid = torch.arange(16)[None] >= 6
    padded = grads(
        net, tokens, (valid.cumsum(-1) - 1).clamp_min(0), valid_BT=valid, targets_BT=tokens, weights_BT=valid.float()
    )
    same_grads(padded, grads(net, tokens[:, 6:], torch.arange(10)[None], targets_BT=tokens[:, 6:]), 1e-9)


def test_documents_with_a_window():
    net = peaked(model(attn=("gqa", {"window": 3})))
    tokens, _ = rows(1)
    ids = torch.tensor([[0] * 8 + [1] * 8])
    with torch.no_grad():
        packed = net(tokens, torch.arange(8).repeat(2)[None], documents_BT=ids).logits_BTV
        close(packed[:, 8:], net(tokens[:, 8:], torch.arange(8)[None]).logits_BTV)


def test_positions_alone_do_not_hide_anything():
    """Positions that start again without document ids must not let a token see the future."""
    net = peaked(model())
    tokens, _ = rows(1)
    positions = torch.arange(8).repeat(2)[None]
    edited = tokens.clone()
    edited[0, 12] = (edited[0, 12] + 1) % VOCAB
    with torch.no_grad():
        close(net(tokens, positions).logits_BTV[:, :12], net(edited, positions).logits_BTV[:, :12], 0.0)


def test_loss_is_the_weighted_sum_of_nats_of_the_logits():
    net = model(kernels="reference")
    tokens, positions = rows()
    targets, weights = tokens.roll(-1, 1), torch.rand(2, 16)
    out = net(tokens, positions, targets_BT=targets, weights_BT=weights)
    assert out.logits_BTV is None
    assert out.loss.shape == ()
    assert out.stats == (None, None)
    nats = -net(tokens, positions).logits_BTV.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    close(out.loss, (nats * weights).sum())
    close(net(tokens, positions, targets_BT=targets).loss, nats.sum())


@pytest.mark.parametrize(
    ("dtype", "loss"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("pos", POS)
def test_precision_goes_all_the_way(dtype, loss, pos):
    tokens, positions = rows()
    net = model(dtype, pos=pos)
    out = net(tokens, positions, targets_BT=tokens)
    assert out.loss.dtype == loss
    assert net(tokens, positions).logits_BTV.dtype == dtype
    assert all(g.dtype == dtype for g in grads(net, tokens, positions, targets_BT=tokens).values())


@pytest.mark.parametrize("pos", POS)
def test_fp32_is_float64_to_rounding(pos):
    wide = peaked(model(pos=pos))
    narrow = copy.deepcopy(wide).float()
    tokens, positions = rows()
    with torch.no_grad():
        exact = wide(tokens, positions).logits_BTV
        close(narrow(tokens, positions).logits_BTV.double(), exact, 2e-5 * max(1, exact.abs().max().item()))


@pytest.mark.parametrize("pos", POS)
def test_the_bf16_twin_has_the_same_tree_and_the_same_loss(pos):
    master = model(torch.float32, pos=pos, model={"tie_embeddings": False})
    twin = copy.deepcopy(master).to(torch.bfloat16)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in master.named_parameters()]
    assert not set(map(id, twin.parameters())) & set(map(id, master.parameters()))
    tokens, positions = rows()
    losses = [net(tokens, positions, targets_BT=tokens).loss.item() for net in (master, twin)]
    assert abs(losses[1] / losses[0] - 1) < 5e-3


def test_names_are_canonical_and_unpacked():
    net = model(
        norm="layernorm",
        pos="learned",
        attn=("gqa", {"qk_norm": "head"}),
        model={"tie_embeddings": False, "n_layers": 1},
    )
    block = [
        "norm1",
        "attn.q",
        "attn.k",
        "attn.v",
        "attn.o",
        "attn.q_norm",
        "attn.k_norm",
        "norm2",
        "ffn.gate",
        "ffn.up",
        "ffn.down",
    ]
    want = {f"blocks.0.{n}.weight" for n in block} | {"blocks.0.norm1.bias", "blocks.0.norm2.bias", "norm.bias"}
    assert set(net.state_dict()) == want | {"embed.weight", "pos.weight", "norm.weight", "head.weight"}


def test_a_tied_head_has_no_parameter_of_its_own():
    tied, own = (model(model={"tie_embeddings": tie}) for tie in (True, False))
    assert "head.weight" not in tied.state_dict()
    assert tied.head_weight is tied.embed.weight
    assert set(own.state_dict()) - set(tied.state_dict()) == {"head.weight"}


def test_it_is_counted_on_meta():
    spec = arch(model={"n_layers": 24, "d_model": 2048, "n_heads": 16, "seq_len": 2048})
    with torch.device("meta"):
        net = Transformer(spec, 50304, resolve(Auto(), torch.device("meta"), torch.float32))
    n_block = 4 * 2048**2 + 3 * 2048 * 5464 + 2 * 2048
    assert sum(p.numel() for p in net.parameters()) == 24 * n_block + 50304 * 2048 + 2048


def test_per_block_counts_are_12_d_squared():
    plain = model(ffn="relu", model={"n_layers": 1}).blocks[0]
    assert sum(p.numel() for p in plain.parameters() if p.ndim == 2) == 12 * 64**2


def test_logit_scale():
    assert model(block="postnorm").logit_scale == pytest.approx(1 / 8)
    assert model(block="postnorm", model={"tie_embeddings": False}).logit_scale == 1
    assert model().logit_scale == 1
    tokens, positions = rows()
    plain, scaled = model(), model(model={"logit_scale": 0.5})
    close(scaled(tokens, positions).logits_BTV, 0.5 * plain(tokens, positions).logits_BTV)


def test_dropout_reaches_embedding_and_branches_and_stops_in_eval():
    net = model(model={"dropout": 0.5})
    tokens, positions = rows()
    assert torch.equal(net(tokens, positions).logits_BTV, net(tokens, positions).logits_BTV)
    net.train()
    torch.manual_seed(0)
    first = net(tokens, positions).logits_BTV
    torch.manual_seed(0)
    assert torch.equal(net(tokens, positions).logits_BTV, first)
    assert not torch.equal(net(tokens, positions).logits_BTV, first)


def test_it_runs_under_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        for chosen in ({}, {"pos": "learned", "norm": "layernorm"}, {"pos": "alibi", "attn": "gqa"}):
            net = model(torch.bfloat16, **chosen)
            tokens, positions = rows()
            first, second = (grads(net, tokens, positions, targets_BT=tokens) for _ in range(2))
            assert all(torch.equal(first[n], second[n]) for n in first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("pos", POS)
def test_training_goes_on_after_inference_mode(pos):
    net = model(torch.float32, pos=pos)
    tokens, positions = rows()
    with torch.inference_mode():
        net(tokens, positions)
    assert all(g.isfinite().all() for g in grads(net, tokens, positions, targets_BT=tokens).values())


def test_a_plug_in_part_with_buffers_of_its_own_is_built(monkeypatch):
    class Rotating(torch.nn.Module):
        """An attention that is not ours: a fixed table as a buffer, a vector and a matrix with names nobody knows."""

        def __init__(self, spec, dims, ops, layer):
            super().__init__()
            self.register_buffer("table", torch.arange(dims.d_model).float())
            self.mix = torch.nn.Parameter(torch.empty(dims.d_model, dims.d_model))
            self.gain = torch.nn.Parameter(torch.empty(dims.d_model))

        def prepare(self, mask, tables, q_pos, k_pos, dtype):
            return None

        def forward(self, x_BTD, view, cache=None):
            return (x_BTD + self.table) @ self.mix * self.gain

    spec = arch()
    monkeypatch.setattr("lmlab.model.attn.Attention", Rotating)
    net = build(spec, VOCAB, resolve(Auto(), "cpu", torch.float32), seed=0, device="cpu")
    attn = net.blocks[1].attn
    assert torch.equal(attn.table, torch.arange(64).float())
    assert torch.equal(attn.gain, torch.ones(64))
    assert 0.015 < attn.mix.std() < 0.025
    assert net(*rows()).logits_BTV.isfinite().all()
    assert net.paths()["attention"] == "Rotating"


def test_embeddings_are_scaled_then_normed_then_given_positions():
    net = model(norm="layernorm", pos="learned", model={"embed_scale": "sqrt_d_model", "embed_norm": True})
    with torch.no_grad():
        for p in net.embed_norm.parameters():
            p.normal_()
    tokens, positions = rows()
    table = torch.nn.functional.embedding(tokens, net.embed.weight) * 8
    close(net.embedded(tokens, positions, None), net.embed_norm(table) + net.pos.weight[positions])


def test_logits_are_scaled_then_capped_in_the_loss_too():
    tokens, positions = rows()
    net, plain = (model(model={"tie_embeddings": False, "logit_softcap": cap}) for cap in (0.3, None))
    for n in (net, plain):
        n.head.weight.data.mul_(10)
    want = 0.3 * torch.tanh(plain(tokens, positions).logits_BTV / 0.3)
    close(net(tokens, positions).logits_BTV, want)
    nats = -want.log_softmax(-1).gather(-1, tokens[..., None]).sum()
    close(net(tokens, positions, targets_BT=tokens).loss, nats)
    reference = model(kernels="reference", model={"tie_embeddings": False, "logit_softcap": 0.3})
    reference.load_state_dict(net.state_dict())
    first, second = (grads(n, tokens, positions, targets_BT=tokens) for n in (net, reference))
    same_grads(first, second, 1e-10)


def test_the_heads_bias_is_in_logits_loss_and_gradients():
    tokens, positions = rows()
    sizes = {"tie_embeddings": False, "head_bias": True, "logit_scale": 0.5, "logit_softcap": 2.0}
    net = model(model=sizes)
    assert net.head.bias.eq(0).all(), "it starts at 0"
    net.head.bias.data.normal_()
    weights = torch.rand(tokens.shape, dtype=torch.float64)
    hidden: list[torch.Tensor] = []
    net.norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    logits = net(tokens, positions).logits_BTV
    want = 2 * torch.tanh((hidden[0] @ net.head.weight.T + net.head.bias) / 2 / 2)
    close(logits, want)
    nats = torch.nn.functional.cross_entropy(want.flatten(0, 1), tokens.flatten(), reduction="none")
    expected = torch.autograd.grad((nats * weights.flatten()).sum(), list(net.parameters()))
    asked = dict(targets_BT=tokens, weights_BT=weights)
    close(net(tokens, positions, **asked).loss, (nats * weights.flatten()).sum())
    named = [name for name, _ in net.named_parameters()]
    assert "head.bias" in named
    same_grads(grads(net, tokens, positions, **asked), dict(zip(named, expected, strict=True)), 1e-10)


@pytest.mark.parametrize("more", [{"embed_scale": "sqrt_d_model"}, {"embed_norm": True}], ids=str)
def test_large_tied_embeddings_get_a_logit_scale(more):
    assert model(model=more).logit_scale == pytest.approx(1 / 8)
    assert model(model=more | {"tie_embeddings": False}).logit_scale == 1
    assert model(model=more | {"logit_scale": 1.0}).logit_scale == 1


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_z_loss_is_trained_on_and_is_no_part_of_the_loss(kernels):
    """Σ weight · coefficient · log² Σ e^logit (PaLM), in train mode only."""
    tokens, positions = rows()
    net, without = (model(kernels=kernels, model={"z_loss": z, "logit_softcap": 3.0}) for z in (0.2, 0.0))
    weights = torch.rand(tokens.shape, dtype=torch.float64)
    asked = dict(targets_BT=tokens, weights_BT=weights)
    plain = without.train()(tokens, positions, **asked)
    assert plain.z_loss is None
    assert plain.objective is plain.loss
    found = net.train()(tokens, positions, **asked)
    lse = net(tokens, positions).logits_BTV.logsumexp(-1)
    close(found.loss, plain.loss)
    close(found.z_loss, 0.2 * (weights * lse.square()).sum())
    want = torch.autograd.grad(without(tokens, positions, **asked).loss + 0.0, list(without.parameters()))
    pulled = torch.autograd.grad(0.2 * (weights * lse.square()).sum(), list(net.parameters()))
    ours = torch.autograd.grad(found.objective, list(net.parameters()))
    for a, b, c in zip(ours, want, pulled, strict=True):
        close(a, b + c)
    assert net.eval()(tokens, positions, **asked).z_loss is None


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    "sizes", [{}, {"tie_embeddings": False, "head_bias": True, "z_loss": 0.1}], ids=["tied", "own"]
)
def test_a_padded_vocabulary_is_the_one_without_its_rows(kernels, sizes):
    tokens, positions = rows()
    net = model(kernels=kernels, model=sizes | {"vocab_multiple": 64})
    plain = model(kernels=kernels, model=sizes)
    assert (len(net.embed.weight), net.dims.vocab_size) == (128, VOCAB)
    if net.head is not None:
        net.head.bias.data.normal_()
    own = ("embed.weight", "head.weight", "head.bias")
    plain.load_state_dict({n: t[:VOCAB] if n in own else t for n, t in net.state_dict().items()})
    assert net(tokens, positions).logits_BTV.shape[-1] == VOCAB
    close(net(tokens, positions).logits_BTV, plain(tokens, positions).logits_BTV)
    for n in (net, plain):
        n.train()(tokens, positions, targets_BT=tokens).objective.backward()
    padded, cut = ({name: p.grad for name, p in n.named_parameters()} for n in (net, plain))
    for name in (name for name in own if name in padded):
        assert (padded[name][VOCAB:] == 0).all()
        padded[name] = padded[name][:VOCAB]
    same_grads(padded, cut, 1e-10)
