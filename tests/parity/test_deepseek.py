"""Multi-head latent attention against `transformers`' DeepSeek V2 and V3, all layers dense; float64."""

from __future__ import annotations

import math

import pytest

from lmlab.interop.families import FAMILIES
from tests.parity.copied import agree, composed, drawn
from tests.parity.test_presets import COMMON, F, H

transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
NOPE, TURNED, VALUE, RANK = 12, 8, 20, 24
ATTN = f"attn=mla attn.nope_dim={NOPE} attn.rope_dim={TURNED} attn.v_dim={VALUE} attn.kv_rank={RANK}"


TABLE = FAMILIES["deepseek_v3"].table


def deepseek(version: int, q_rank: int | None, **rope: float | str):
    cls = getattr(transformers, f"DeepseekV{version}ForCausalLM")
    config = cls.config_class(
        **COMMON,
        num_key_value_heads=H,
        first_k_dense_replace=COMMON["num_hidden_layers"],
        kv_lora_rank=RANK,
        q_lora_rank=q_rank,
        qk_rope_head_dim=TURNED,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        n_routed_experts=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
    )
    return drawn(lambda: cls(config))


def words(q_rank: int | None, form: str) -> list[str]:
    latent = "" if q_rank is None else f"attn.q_rank={q_rank}"
    rest = f"attn.form={form} pos.pairing=interleaved ffn.d_ff={F} model.tie_embeddings=false"
    return f"{ATTN} {latent} {rest}".split()


@pytest.mark.parametrize("form", ["naive", "absorbed"])
@pytest.mark.parametrize("q_rank", [None, 28])
@pytest.mark.parametrize("version", [2, 3])
def test_deepseek(version, q_rank, form):
    agree(composed(*words(q_rank, form)), deepseek(version, q_rank), TABLE)


@pytest.mark.parametrize("form", ["naive", "absorbed"])
@pytest.mark.parametrize("m", [1.0, 0.707])
@pytest.mark.parametrize("version", [2, 3])
def test_deepseek_with_yarn(version, m, form):
    """mscale = mscale_all_dim = m: cos and sin × 1, the softmax scale × (0.1·m·ln s + 1)²."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    theirs = deepseek(version, None, **yarn, mscale=m, mscale_all_dim=m)
    scaling = "rope_scaling=yarn rope_scaling.factor=4 rope_scaling.original_len=16"
    own = "" if m == 1 else f"rope_scaling.attention_factor={0.1 * m * math.log(4) + 1!r}"
    agree(composed(*words(None, form), *f"{scaling} {own}".split()), theirs, TABLE, T=48)
