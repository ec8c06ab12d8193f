"""Scaled rotations and position biases against `transformers`: frequencies alone, and whole Llamas; float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import rope_scaling as scalings
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.pos import alibi_slopes, t5_buckets
from tests.composed import close
from tests.parity.copied import Wide, agree, composed, drawn
from tests.parity.test_presets import COMMON, LLAMA

transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = [
    (d, base, L, s) for d in (8, 64, 128) for base in (1e4, 5e5) for L in (64, 2048, 8192) for s in (1.5, 4.0, 32.0)
]


def theirs(kind: str, d: int, base: float, L: int, factor: float, n: int | None = None, **more: Any) -> Any:
    """(frequencies, factor on cos and sin) as transformers has them, in float64."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = {} if kind in ("linear", "dynamic") else {"original_max_position_embeddings": L}
    config = transformers.LlamaConfig(
        hidden_size=2 * d,
        num_attention_heads=2,
        max_position_embeddings=L,
        rope_parameters={"rope_type": kind, "rope_theta": base, "factor": factor, **original, **more},
    )
    with Wide():
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=n)


def ours(cls: type, spec: Any, d: int, seq_len: int = 16) -> Any:
    dims = Dims(d_model=2 * d, n_heads=2, head_dim=d, n_layers=1, vocab_size=97, seq_len=seq_len, rotary_dim=d)
    return cls(spec, dims, resolve(Auto(), "cpu", torch.float64))


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Each frequency to 12 digits: they span orders of magnitude."""
    assert wanted.dtype == torch.float64
    close(found / wanted, torch.ones_like(wanted), 1e-12)


@pytest.mark.parametrize(("d", "base", "L", "s"), CASES)
def test_frequencies(d, base, L, s):
    cpu = torch.device("cpu")
    same(ours(scalings.PI, specs.PI(factor=s), d).frequencies(base, d, cpu), theirs("linear", d, base, L, s)[0])
    found = ours(scalings.YaRN, specs.YaRN(factor=s, original_len=L), d)
    wanted, magnitude = theirs("yarn", d, base, L, s)
    same(found.frequencies(base, d, cpu), wanted)
    assert found.magnitude == pytest.approx(magnitude, rel=1e-14)
    found = ours(scalings.Llama3, specs.Llama3(factor=s, original_len=L), d)
    same(found.frequencies(base, d, cpu), theirs("llama3", d, base, L, s, **LLAMA3)[0])


@pytest.mark.parametrize(("d", "base", "L", "s"), CASES)
def test_dynamic_ntk_by_length(d, base, L, s):
    found = ours(scalings.DynamicNTK, specs.DynamicNTK(factor=s, original_len=L), d)
    for n in (L // 2, L, L + 1, 3 * L):
        grown = found.grown(base, d, torch.tensor([[n]]))[0, 0]
        same(grown, theirs("dynamic", d, base, L, s, n)[0])
        assert bool(found.longer(torch.tensor(n))) == (n > L)


def test_yarn_with_its_own_ends_and_attention_factor():
    spec = specs.YaRN(factor=8.0, original_len=2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)
    found = ours(scalings.YaRN, spec, 64)
    wanted, magnitude = theirs("yarn", 64, 1e4, 2048, 8.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25)
    same(found.frequencies(1e4, 64, torch.device("cpu")), wanted)
    assert found.magnitude == magnitude == 1.25


WHOLE = {
    "yarn": ("yarn", {"original_max_position_embeddings": 2048}, "rope_scaling.original_len=2048"),
    "llama3": ("llama3", {"original_max_position_embeddings": 16, **LLAMA3}, "rope_scaling.original_len=16"),
    "linear": ("pi", {}, ""),
    "dynamic": ("dynamic_ntk", {}, "rope_scaling.original_len=16"),
}


@pytest.mark.parametrize("T", [12, 48])
@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_llama_with_a_scaling(kind, T):
    option, more, word = WHOLE[kind]
    config = transformers.LlamaConfig(
        **COMMON | {"intermediate_size": 256},
        max_position_embeddings=16 if kind == "dynamic" else 64,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more},
    )
    net = drawn(lambda: transformers.LlamaForCausalLM(config))
    words = ["preset=llama", f"rope_scaling={option}", "rope_scaling.factor=4", *word.split()]
    agree(composed(*words), net, LLAMA, T=T)


@pytest.mark.parametrize(("n", "far"), [(32, 128), (8, 12), (16, 128), (64, 1000), (320, 1600)])
def test_t5_buckets_at_every_distance(n, far):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(2001)
    with Wide():
        wanted = T5Attention._relative_position_bucket(-distances, bidirectional=False, num_buckets=n, max_distance=far)
    found = torch.tensor(t5_buckets(n, far))[distances.clamp_max(far)]
    assert found.tolist() == wanted.tolist()


def test_alibi_slopes_of_any_number_of_heads():
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    for heads in range(1, 41):
        with Wide():
            wanted = _get_alibi_slopes(heads, torch.device("cpu"))
        close(torch.tensor(alibi_slopes(heads), dtype=torch.float64), wanted.flatten().double(), 1e-14)
