"""Weights of one run as the start of another: what is copied, pooled, resized, begun, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.compat.start import check_start, with_weights
from lmlab.config.load import load
from lmlab.errors import LmlabError, RunError
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.init import z
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer, build
from lmlab.train.start import Weights, counted, interpolate, pool_heads, started

SIZES = "model.n_layers=2 model.d_model=32 model.n_heads=8 model.seq_len=16 train.batch_tokens=128"
VOCAB = 40
OPS = resolve(Auto(), "cpu", torch.float64)


def arch(line: str = "") -> Arch:
    typed = {word.partition("=")[0] for word in line.split()}
    return load([*(w for w in SIZES.split() if w.partition("=")[0] not in typed), *line.split()]).experiment.arch


def made(of: Arch, vocab: int = VOCAB) -> Transformer:
    """Weights of which none is 0 or 1, biases and norms too."""
    net = build(of, vocab, OPS, seed=1, device="cpu", dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return net.eval()


def begun(old: Arch, new: Arch, resize: str = "none", source: dict[str, Tensor] | None = None) -> Weights:
    with torch.device("meta"):
        skeleton = Transformer(new, VOCAB, OPS)
    return started(source or made(old).state_dict(), old, new, skeleton, resize=resize, seed=3)


def logits(of: Arch, state: dict[str, Tensor], T: int = 12) -> Tensor:
    net = build(of, VOCAB, OPS, seed=None, device="cpu", dtype=torch.float64)
    net.load_state_dict(state, strict=True)
    tokens = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = net.eval()(tokens, torch.arange(T).expand(2, T)).logits_BTV
    assert out is not None
    return out


# ---------------------------------------------------------------- the same function

# what is changed: composition before, composition after
SAME: dict[str, tuple[str, str]] = {
    "nothing": ("", ""),
    "longer rows with rope": ("", "model.seq_len=64"),
    "shorter rows with rope": ("", "model.seq_len=8"),
    "dropout": ("", "model.dropout=0.1 attn.dropout=0.2"),
    "mha is gqa of all heads": ("", "attn=gqa attn.n_kv_heads=8"),
    "mqa is gqa of one head": ("attn=mqa", "attn=gqa attn.n_kv_heads=1"),
    "a head of its own": ("", "model.tie_embeddings=false"),
    "biases of attention": ("", "attn.bias_qkv=true attn.bias_o=true"),
    "biases of the ffn": ("ffn=gelu", "ffn=gelu ffn.bias=true"),
    "biases of experts": ("moe=topk ffn=gelu", "moe=topk ffn=gelu ffn.bias=true"),
    "a router's losses": ("moe=topk", "moe=topk moe.aux_coef=0 moe.z_coef=0.1 moe.jitter=0.1"),
    "room for all": ("moe=topk", "moe=topk moe.capacity_factor=3.99"),
    "biases of norms": ("norm=nanogpt", "norm=layernorm"),
    "bias of the head": ("model.tie_embeddings=false", "model.tie_embeddings=false model.head_bias=true"),
    "the form of mla": ("attn=mla", "attn=mla attn.form=absorbed"),
    "a scaling of factor 1": ("", "rope_scaling=pi rope_scaling.factor=1"),
    "batch norm's statistics": ("norm=batchnorm", "norm=batchnorm model.seq_len=32"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_what_leaves_the_function_unchanged(case: str) -> None:
    before, after = (arch(line) for line in SAME[case])
    assert check_start(before, after, "none", "theirs") == []
    source = made(before).state_dict()
    found = begun(before, after, source=source)
    there, here = logits(before, source), logits(after, found.state)
    reordered = case in ("the form of mla", "biases of experts")  # another order of products
    assert torch.allclose(there, here, rtol=0, atol=1e-10) if reordered else torch.equal(there, here)


def test_backends_compute_the_same() -> None:
    before, after = arch("attn.backend=sdpa"), arch("attn.backend=dense")
    assert check_start(before, after, "none", "theirs") == []
    source = made(before).state_dict()
    assert torch.allclose(logits(before, source), logits(after, begun(before, after).state), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "after",
    [
        *("attn.window=4", "attn.window=4 attn.pattern=SL", "attn.softcap=20", "pos.theta=500000"),
        *("rope_scaling=yarn", "rope_scaling=llama3 model.seq_len=64", "ffn=geglu", "ffn=reglu"),
        "model.z_loss=1e-4",
    ],
)
def test_what_has_no_weights_may_change(after: str) -> None:
    old, new = arch(), arch(after)
    assert check_start(old, new, "none", "theirs") == []
    found = begun(old, new)
    assert {t.how for t in found.taken} == {"copied"}
    assert not any(t.note for t in found.taken)


# ---------------------------------------------------------------- pooled heads


@pytest.mark.parametrize("kv", [1, 2, 4, 8])
def test_pooled_heads_are_means_by_hand(kv: int) -> None:
    old = arch("attn.qk_norm=full attn.bias_qkv=true")
    new = arch(f"attn=gqa attn.n_kv_heads={kv} attn.qk_norm=full attn.bias_qkv=true")
    assert check_start(old, new, "none", "theirs") == []
    source = made(old).state_dict()
    found, C = begun(old, new, source=source).state, 4
    for name in ("k.weight", "v.weight", "k.bias", "v.bias", "k_norm.weight"):
        theirs, mine = (state[f"blocks.1.attn.{name}"] for state in (source, found))
        assert len(mine) == kv * C
        for head in range(kv):
            # query head h reads key/value head h // (H/K): those that now share one read these before
            read = [h for h in range(8) if h // (8 // kv) == head]
            mean = sum(theirs[h * C : h * C + C] for h in read) / len(read)
            assert torch.allclose(mine[head * C : head * C + C], mean, rtol=0, atol=1e-15), (name, head)
    assert torch.equal(found["blocks.1.attn.q.weight"], source["blocks.1.attn.q.weight"])


def test_heads_that_are_equal_in_a_group_pool_to_the_same_function() -> None:
    old, new = arch(), arch("attn=gqa attn.n_kv_heads=2")
    source = made(old).state_dict()
    for name, tensor in source.items():
        if ".attn.k." in name or ".attn.v." in name:
            heads = tensor.unflatten(0, (2, 4, 4))
            source[name] = heads[:, :1].expand_as(heads).flatten(0, 2).clone()
    found = begun(old, new, source=source)
    assert torch.allclose(logits(old, source), logits(new, found.state), rtol=0, atol=1e-10)
    assert counted(found.taken)["resized"] == {"tensors": 4, "parameters": 4 * 8 * 32}


def test_fewer_heads_of_gqa_and_one_norm_for_all_heads() -> None:
    old = arch("attn=gqa attn.n_kv_heads=4 attn.qk_norm=head")
    new = arch("attn=mqa attn.qk_norm=head")
    assert check_start(old, new, "none", "theirs") == []
    found = begun(old, new)
    assert {t.name for t in found.taken if t.note} == {f"blocks.{i}.attn.{x}.weight" for i in (0, 1) for x in "kv"}
    assert {t.note for t in found.taken if t.note} == {"16×32 → 4×32, means of 4 heads"}


def test_heads_that_do_not_divide_stay() -> None:
    theirs = torch.randn(12, 3)
    assert pool_heads(theirs, 6, 4) is theirs
    assert torch.equal(pool_heads(theirs, 6, 6), theirs)


# ---------------------------------------------------------------- learned tables


def test_interpolation_is_linear_and_keeps_both_ends() -> None:
    theirs = torch.randn(5, 3, dtype=torch.float64)
    found = interpolate(theirs, 9)
    assert torch.allclose(found[::2], theirs, rtol=0, atol=1e-15)
    assert torch.allclose(found[1::2], (theirs[1:] + theirs[:-1]) / 2, rtol=0, atol=1e-15)
    fewer = interpolate(theirs, 3)
    assert torch.allclose(fewer, theirs[[0, 2, 4]], rtol=0, atol=1e-15)
    assert torch.equal(interpolate(theirs, 5), theirs)


@pytest.mark.parametrize("rows", [8, 24])
def test_a_learned_table_resized(rows: int) -> None:
    old, new = arch("pos=learned"), arch(f"pos=learned pos.max_len={rows} model.seq_len=8")
    source = made(old).state_dict()
    theirs = source["pos.weight"]
    (said,) = [str(e) for e in check_start(old, new, "none", "theirs")]
    assert f"`pos=learned` has {rows} rows, and that of theirs has 16" in said
    assert "init.resize=interpolate" in said
    for how in ("interpolate", "extend"):
        assert check_start(old, new, how, "theirs") == []
    found = begun(old, new, "interpolate", source).state["pos.weight"]
    at = torch.linspace(0, 15, rows, dtype=torch.float64)
    low = at.floor().long().clamp_max(14)
    by_hand = torch.lerp(theirs[low], theirs[low + 1], (at - low)[:, None])
    assert torch.allclose(found, by_hand, rtol=0, atol=1e-12)
    found = begun(old, new, "extend", source).state["pos.weight"]
    assert torch.equal(found[:16], theirs[:rows])
    drawn = z(3, "pos.weight", (rows, 32)).double() * 0.02
    assert torch.allclose(found[16:], drawn[16:rows], rtol=1e-6, atol=0)


def test_a_resize_that_would_do_nothing_is_refused() -> None:
    for old, new in (("", ""), ("pos=learned", "pos=learned")):
        (said,) = [str(e) for e in check_start(arch(old), arch(new), "extend", "theirs")]
        assert "it would do nothing" in said


# ---------------------------------------------------------------- refused

REFUSED: dict[str, tuple[str, str, str, str]] = {
    "width": ("", "model.d_model=64", "`model.d_model` is 64, and that of theirs is 32", "leave model.d_model out"),
    "depth": ("", "model.n_layers=3", "`model.n_layers` is 3, and that of theirs is 2", "leave"),
    "heads": ("attn.head_dim=4", "attn.head_dim=4 model.n_heads=4", "`model.n_heads` is 4", "leave model.n_heads out"),
    "ffn width": ("", "ffn.d_ff=64", "`ffn.d_ff` is 64, and that of theirs is 88", "add ffn.d_ff=88"),
    "norm": ("", "norm=layernorm", "`norm=layernorm` has other weights than `norm=rmsnorm` of theirs", "leave norm="),
    "eps": ("", "norm.eps=1e-5", "`norm.eps` is 1e-05, and that of theirs is 1e-06", "leave norm.eps out"),
    "block": ("", "block=postnorm", "`block=postnorm` has other weights than `block=prenorm`", "leave block= out"),
    "pos": ("", "pos=alibi", "`pos=alibi` has other weights than `pos=rope`", "leave pos= out"),
    "pairing": ("", "pos.pairing=interleaved", "`pos.pairing` is interleaved, and that of theirs is half", "leave"),
    "fraction": ("", "pos.fraction=0.5", "`pos.fraction` is 0.5, and that of theirs is 1", "leave"),
    "sinusoids": ("pos=sinusoidal", "pos=sinusoidal pos.theta=100", "`pos.theta` is 100, and that of theirs", "leave"),
    "attention": ("", "attn=mla", "`attn=mla` has other weights than `attn=mha`", "leave attn= out"),
    "more kv heads": ("attn=gqa", "", "`attn.n_kv_heads` is 8, and that of theirs is 4: heads", "1, 2, 4"),
    "qk_norm": ("", "attn.qk_norm=head", "`attn.qk_norm` is head, and that of theirs is none", "leave"),
    "scale": ("", "attn.scale=1", "`attn.scale` is 1, and that of theirs is null", "leave"),
    "gate": ("", "ffn=gelu", "`ffn=gelu` has no gate, and `ffn=swiglu` of theirs has one", "glu, bilinear, reglu"),
    "no gate": ("ffn=gelu", "ffn=geglu", "`ffn=geglu` has a gate, and `ffn=gelu` of theirs has none", "relu, relu2"),
    "biases lost": ("attn.bias_qkv=true", "", "`attn.bias_qkv` is false, and that of theirs is true", ""),
    "head lost": ("model.tie_embeddings=false", "", "`model.tie_embeddings` is true, and that of theirs is false", ""),
    "embed_norm": ("", "model.embed_norm=true model.logit_scale=1", "`model.embed_norm` is true", "leave"),
    "padding": ("", "model.vocab_multiple=8", "`model.vocab_multiple` is 8, and that of theirs is 1", "leave"),
    "logit_softcap": ("", "model.logit_softcap=30", "`model.logit_softcap` is 30", "leave"),
    "null is another factor": (
        "block=postnorm", "block=postnorm model.tie_embeddings=false", "`model.logit_scale` is 1", "logit_scale=0.17"
    ),
    "shaped": ("attn.weights=shaped", "attn=gqa attn.weights=shaped", "no heads that could be pooled", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_both_values_and_the_remedy(case: str) -> None:
    before, after, message, hint = REFUSED[case]
    errors = check_start(arch(before), arch(after), "none", "theirs")
    assert len(errors) == 1, [str(e) for e in errors]
    assert message in errors[0].message
    assert hint in errors[0].hint


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ("moe=topk", "moe.top_k=1", "leave moe.top_k out; what may change: "),
        ("moe=topk", "moe.top_k=9 moe.n_experts=8", "leave moe.top_k and moe.n_experts out; "),
        ("moe=topk", "moe.capacity_factor=100", "use moe.capacity_factor=null"),
        ("", "attn.window=1000", "use attn.window="),
        ("", "model.n_heads=3", "leave model.n_heads out; "),
        ("attn=gqa", "attn.n_kv_heads=3", "use one of "),
    ],
)
def test_what_is_refused_anyway_is_no_remedy(before: str, after: str, hint: str) -> None:
    old = arch(before)
    with pytest.raises(LmlabError) as caught:
        arch(f"{before} {after}")
    keys = [word.partition("=")[0] for word in after.split()]
    (told,) = with_weights(caught.value, old, keys)
    assert told.hint.startswith(hint)


def test_another_activation_does_not_hide_another_width() -> None:
    said = [e.message for e in check_start(arch(), arch("ffn=geglu ffn.d_ff=64 ffn.bias=true"), "none", "theirs")]
    assert len(said) == 1
    assert said[0].startswith("`ffn.d_ff` is 64")


Damage = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.pop("blocks.0.attn.q.weight"), "the source has no blocks.0.attn.q.weight"),
        (lambda s: s.update(extra=torch.zeros(2)), "extra of the source has no place"),
        (lambda s: s.update({"norm.weight": torch.zeros(7)}), "norm.weight is 32, and the source's is 7"),
        (lambda s: s.update({"embed.weight": torch.zeros(41, 32)}), "embed.weight is 40×32, and the source's is 41×32"),
        (lambda s: s.pop("norm.weight"), "the source has no norm.weight"),
    ],
)
def test_no_tensor_is_dropped_or_left_to_chance(damage: Damage, message: str) -> None:
    source = dict(made(arch()).state_dict())
    damage(source)
    with pytest.raises(RunError, match=message):
        begun(arch(), arch(), source=source)


def test_on_meta_it_tells_the_same() -> None:
    old = arch("pos=learned")
    new = arch("pos=learned model.seq_len=32 attn=mqa attn.bias_o=true model.tie_embeddings=false")
    real = begun(old, new, "extend")
    meta = begun(old, new, "extend", {n: t.to("meta") for n, t in made(old).state_dict().items()})
    assert real.taken == meta.taken
    assert {t.name: t.note for t in real.taken if "attn" not in t.name and t.note} == {
        "pos.weight": "16×32 → 32×32, 16 rows drawn",
        "head.weight": "of embed.weight",
    }
    assert torch.equal(real.state["head.weight"], real.state["embed.weight"])
    assert real.state["head.weight"].data_ptr() != real.state["embed.weight"].data_ptr()
    assert counted(real.taken)["fresh"] == {"tensors": 2, "parameters": 64}
