"""The oracle against hand-worked values and torch's own functions, never against our model."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lmlab.check import oracle, oracle_moe, oracle_parts
from lmlab.check.oracle_parts import NoOracle, bucket, frequencies, slopes, yarn_bounds

PLAIN = {"name": "none"}
D, H, V, T = 8, 2, 11, 6


def config(**parts: Any) -> dict[str, Any]:
    """One layer of prenorm, layernorm, no positions, mha and gelu; parts and fields of the model are replaced."""
    model = {"n_layers": 1, "d_model": D, "n_heads": H, "seq_len": T, "tie_embeddings": True}
    chosen = {
        "norm": {"name": "layernorm", "eps": 1e-5},
        "block": {"name": "prenorm"},
        "pos": {"name": "none"},
        "rope_scaling": PLAIN,
        "attn": {"name": "mha"},
        "ffn": {"name": "gelu"},
    }
    return chosen | {k: v for k, v in parts.items() if k != "model"} | {"model": model | parts.get("model", {})}


def weights(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    known = {
        "embed.weight": (V, D),
        "norm.weight": (D,),
        "norm.bias": (D,),
        **{f"blocks.0.{n}.{p}": (D,) for n in ("norm1", "norm2") for p in ("weight", "bias")},
        **{f"blocks.0.attn.{n}.weight": (D, D) for n in "qkvo"},
        "blocks.0.ffn.up.weight": (4 * D, D),
        "blocks.0.ffn.down.weight": (D, 4 * D),
    } | shapes
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in known.items()}


def rows(B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(B * T).view(B, T) * 5 % V, torch.arange(T).expand(B, T)


def test_it_shares_nothing_with_the_model() -> None:
    for module in (oracle, oracle_moe, oracle_parts):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        named = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        named |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not [n for n in named if n.startswith("lmlab") and not n.startswith("lmlab.check.oracle_")]


def test_a_layer_is_torchs_own_layer() -> None:
    """nn.TransformerEncoderLayer, pre-norm and causal, on the same weights."""
    w = weights()
    layer = torch.nn.TransformerEncoderLayer(
        D, H, 4 * D, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    at = "blocks.0."
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.self_attn.in_proj_weight.copy_(torch.cat([w[f"{at}attn.{n}.weight"] for n in "qkv"]))
        layer.self_attn.out_proj.weight.copy_(w[f"{at}attn.o.weight"])
        layer.linear1.weight.copy_(w[f"{at}ffn.up.weight"])
        layer.linear2.weight.copy_(w[f"{at}ffn.down.weight"])
        for n in ("norm1", "norm2"):
            for p in ("weight", "bias"):
                getattr(getattr(layer, n), p).copy_(w[f"{at}{n}.{p}"])
        tokens, positions = rows()
        mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)
        x = layer(w["embed.weight"][tokens], src_mask=mask)
        expected = F.layer_norm(x, (D,), w["norm.weight"], w["norm.bias"]) @ w["embed.weight"].T
    found = oracle.logits(config(), w, tokens, positions)
    assert (found - expected).abs().max() < 1e-11


def test_the_heads_bias_is_added_before_the_scale() -> None:
    w = weights(**{"head.weight": (V, D), "head.bias": (V,)})
    untied = {"tie_embeddings": False}
    plain = oracle.logits(config(model=untied), w, *rows())
    found = oracle.logits(config(model=untied | {"head_bias": True, "logit_scale": 0.5}), w, *rows())
    assert (found - (plain + w["head.bias"]) / 2).abs().max() < 1e-12


def test_grouped_heads_are_interleaved_not_tiled() -> None:
    four = {"model": {"n_heads": 4}}  # heads of 2 channels, 2 kv heads: query heads 0 and 1 read kv head 0
    w = weights(**{f"blocks.0.attn.{n}.weight": (4, D) for n in "kv"})
    grouped = oracle.logits(config(attn={"name": "gqa", "n_kv_heads": 2}, **four), w, *rows())
    names = [f"blocks.0.attn.{n}.weight" for n in "kv"]
    interleaved = {n: w[n].view(2, 2, D).repeat_interleave(2, 0).view(8, D) for n in names}
    tiled = {n: w[n].view(2, 2, D).repeat(2, 1, 1).view(8, D) for n in names}
    assert (grouped - oracle.logits(config(**four), w | interleaved, *rows())).abs().max() < 1e-12
    assert (grouped - oracle.logits(config(**four), w | tiled, *rows())).abs().max() > 1e-3


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_counts_the_current_token(window: int) -> None:
    row = oracle.Row(list(range(5)), [0] * 5, [True] * 5)
    assert [len(row.keys(i, window)) for i in range(5)] == {1: [1, 1, 1, 1, 1], 3: [1, 2, 3, 3, 3]}[window]


def test_documents_and_padding_hide_keys() -> None:
    row = oracle.Row([0, 1, 0, 1, 2], [0, 0, 1, 1, 1], [False, True, True, True, True])
    assert [row.keys(i, None) for i in range(5)] == [[], [1], [2], [2, 3], [2, 3, 4]]
    assert row.lengths == [1, 1, 3, 3, 3]


def test_slopes_are_the_official_ones() -> None:
    assert slopes(8) == [2.0**-n for n in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


@pytest.mark.parametrize(("d", "L", "bounds"), [(64, 2048, (8, 21)), (128, 4096, (20, 46))])
def test_yarn_bounds(d: int, L: int, bounds: tuple[int, int]) -> None:
    assert yarn_bounds(1e4, d, L, 32, 1) == bounds


@pytest.mark.parametrize(("s", "factor"), [(2, 1.069315), (4, 1.138629), (8, 1.207944), (16, 1.277259)])
def test_yarn_factor_and_ends(s: float, factor: float) -> None:
    yarn = {"name": "yarn", "factor": s, "original_len": 2048, "beta_fast": 32, "beta_slow": 1}
    freqs, found = frequencies(1e4, 64, yarn, 0, 0)
    plain, _ = frequencies(1e4, 64, PLAIN, 0, 0)
    assert found == pytest.approx(factor, abs=1e-6)
    assert freqs[:9] == plain[:9]
    assert freqs[21:] == [f / s for f in plain[21:]]
    assert freqs[14] == pytest.approx(plain[14] * (7 / 13 + 6 / 13 / s))


@pytest.mark.parametrize(("s", "base"), [(2, 20452.23), (4, 41829.37), (8, 85550.38)])
def test_ntk_bases(s: float, base: float) -> None:
    freqs, _ = frequencies(1e4, 64, {"name": "ntk", "factor": s}, 0, 0)
    assert freqs[1] ** (-64 / 2) == pytest.approx(base, rel=1e-6)
    assert freqs[0] == 1
    assert freqs[31] == pytest.approx(frequencies(1e4, 64, PLAIN, 0, 0)[0][31] / s)


def test_dynamic_ntk_grows_past_the_original_length() -> None:
    spec = {"name": "dynamic_ntk", "factor": 2.0, "original_len": 2048}
    assert frequencies(1e4, 64, spec, 0, 2048) == frequencies(1e4, 64, PLAIN, 0, 0)
    assert frequencies(1e4, 64, spec, 0, 4096)[0][1] ** -32 == pytest.approx(31082.24, rel=1e-6)


@pytest.mark.parametrize("name", ["pi", "ntk", "dynamic_ntk", "yarn", "llama3"])
def test_a_factor_of_1_is_plain_at_any_length(name: str) -> None:
    spec = {"name": name, "factor": 1.0, "original_len": 8, "attention_factor": 1.3}
    for n in (4, 8, 4096):
        assert frequencies(1e4, 64, spec, 16, n) == frequencies(1e4, 64, PLAIN, 16, n)
    with pytest.raises(NoOracle):
        frequencies(1e4, 64, {"name": "mine", "factor": 1.0}, 16, 8)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    spec = {"name": "llama3", "factor": 8.0, "original_len": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    freqs, plain = (frequencies(5e5, 128, s, 0, 0)[0] for s in (spec, PLAIN))
    for f, p in zip(freqs, plain, strict=True):
        wavelength = 2 * math.pi / p
        if wavelength < 8192 / 4:
            assert f == p
        elif wavelength > 8192:
            assert f == pytest.approx(p / 8)
        else:
            assert p / 8 < f < p


def test_buckets_of_t5() -> None:
    assert [bucket(d, 32, 128) for d in (0, 1, 15, 16, 127, 128, 10_000)] == [0, 1, 15, 16, 31, 31, 31]


def test_a_rotation_turns_by_the_angle() -> None:
    x = torch.tensor([[1.0, 0.0, 5.0]], dtype=torch.float64)
    turned = oracle_parts.rotated(x, torch.tensor([[0.3]], dtype=torch.float64), "interleaved", 1.0)
    assert turned[0].tolist() == pytest.approx([math.cos(0.3), math.sin(0.3), 5.0])


def test_norms_of_worked_values() -> None:
    x = torch.tensor([9.0, 10.0, 11.0], dtype=torch.float64)
    ones = {"n.weight": torch.ones(3).double()}
    layer = oracle_parts.norm({"name": "layernorm", "eps": 0}, ones, "n", x)
    root = oracle_parts.norm({"name": "rmsnorm", "eps": 0}, ones, "n", x)
    gemma = oracle_parts.norm({"name": "rmsnorm", "eps": 0, "offset": 1}, {"n.weight": torch.zeros(3).double()}, "n", x)
    assert layer.tolist() == pytest.approx([-1.224745, 0, 1.224745], abs=1e-6)
    assert root.tolist() == pytest.approx([0.8970, 0.9967, 1.0964], abs=1e-4)
    assert torch.equal(gemma, root)


def test_gelu_exact_and_tanh_are_two() -> None:
    one = torch.ones(()).double()
    assert float(oracle_parts.activated("gelu", one, {})) == pytest.approx(0.841345, abs=1e-6)
    assert float(oracle_parts.activated("gelu_tanh", one, {})) == pytest.approx(0.841192, abs=1e-6)


def test_mla_scales_by_all_channels_and_yarn_by_its_square() -> None:
    shapes = {"q": (2 * 6, D), "kv_down": (3 + 2, D), "kv_norm": (3,), "k_up": (2 * 4, 3), "v_up": (2 * 4, 3)}
    w = weights(**{f"blocks.0.attn.{n}.weight": s for n, s in shapes.items()})
    mla = {"name": "mla", "kv_rank": 3, "rope_dim": 2, "nope_dim": 4, "v_dim": 4}
    rope = {"name": "rope", "theta": 1e4, "fraction": 1.0, "pairing": "half"}
    yarn = {"name": "yarn", "factor": 1.0, "original_len": 8, "beta_fast": 32, "beta_slow": 1}
    plain = oracle.logits(config(attn=mla, pos=rope), w, *rows())
    by_hand = oracle.logits(config(attn=mla | {"scale": 6**-0.5}, pos=rope), w, *rows())
    assert (plain - by_hand).abs().max() < 1e-12
    assert (plain - oracle.logits(config(attn=mla, pos=rope, rope_scaling=yarn), w, *rows())).abs().max() == 0
    row = oracle.Row([0], [0], [True])
    four = config(attn=mla, pos=rope, rope_scaling=yarn | {"factor": 4.0})
    scale = oracle.latent_heads(four, w, "blocks.0.attn", torch.zeros(1, D).double(), row, True)[3]
    assert scale == pytest.approx(1.138629**2 / math.sqrt(6), rel=1e-5)


@pytest.mark.parametrize(
    ("group", "part"),
    [("norm", "mine"), ("block", "mine"), ("pos", "mine"), ("attn", "mine"), ("ffn", "mine")],
)
def test_an_unknown_part_is_named(group: str, part: str) -> None:
    known = config()[group]
    with pytest.raises(NoOracle) as caught:
        oracle.logits(config(**{group: known | {"name": part}}), weights(), *rows())
    assert caught.value.part == f"{group}={part}"


def test_the_dict_of_a_run_is_what_it_reads() -> None:
    from lmlab.check.composed import as_dict
    from lmlab.config.identity import to_dict
    from lmlab.config.load import load

    exp = load(["attn=gqa", "rope_scaling=yarn"]).experiment
    whole = to_dict(exp)
    assert as_dict(exp.arch) == {f.name: whole[f.name] for f in dataclasses.fields(exp.arch)}
