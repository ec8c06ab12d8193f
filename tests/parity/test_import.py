"""`lmlab import` of folders that transformers saved: our logits are theirs, for every family and scaling."""

from __future__ import annotations

import pytest
import torch

import lmlab
from lmlab.generate.decode import generate
from tests.composed import close, rows
from tests.parity.folders import (
    CASES,
    LATENT,
    OTHERS,
    ROWS,
    SCALED,
    SCALED_LATENT,
    SIZES,
    logits,
    model_of,
    ours,
    run_of,
    saved,
)

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")


def tol64(name: str) -> float:
    """BLOOM writes √(2/π) with 8 digits, 7e-10 off, which its layers add up."""
    return 2e-9 if name.startswith("bloom") else 1e-9


def same(folder, runs, cls, config, T=24, tol=1e-9):
    wide, narrow = model_of(cls, config)
    run = run_of(saved(folder, narrow), runs)
    tokens, _ = rows(2, T, vocab=ROWS)
    close(logits(ours(run), tokens), logits(wide, tokens), tol)
    net, tokenizer, _ = lmlab.load(run.path)
    assert tokenizer.vocab_size == 257 < net.dims.vocab_size == ROWS
    close(logits(net, tokens), logits(narrow, tokens), 1e-4)
    return run


@pytest.mark.parametrize("case", CASES)
def test_family(case, tmp_path):
    run = same(tmp_path / "hf", tmp_path / "runs", *CASES[case], tol=tol64(case))
    assert run.state() == "imported"


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_decoded_as_theirs_one_by_one(case, tmp_path):
    """Prompts of different lengths by our cache, each alone by transformers' cache; greedy."""
    _, narrow = model_of(*CASES[case])
    net = ours(run_of(saved(tmp_path / "hf", narrow), tmp_path / "runs"), torch.float32)
    prompts = [[7], [1, 2, 3, 4, 5, 6, 7, 8], [200, 100, 50]]
    found = generate(net, prompts, max_new=12).tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        asked = torch.tensor([prompt])
        how = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        out = narrow.generate(asked, attention_mask=torch.ones_like(asked), **how)
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("case", OTHERS)
def test_scaled_rotations_of_other_families(case, tmp_path):
    cls, config = OTHERS[case]
    short = {"max_position_embeddings": 16} if "dynamic" in case else {}
    same(tmp_path / "hf", tmp_path / "runs", cls, config | short, 48)


@pytest.mark.parametrize("T", [12, 48])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotations(kind, T, tmp_path):
    short = {"max_position_embeddings": 16} if kind == "dynamic" else {}
    config = SIZES | SCALED[kind] | short | dict(num_key_value_heads=2)
    same(tmp_path / "hf", tmp_path / "runs", "LlamaForCausalLM", config, T)


@pytest.mark.parametrize("kind", SCALED_LATENT)
def test_scaled_rotations_of_latent_attention(kind, tmp_path):
    config = SIZES | SCALED_LATENT[kind] | LATENT | dict(q_lora_rank=None)
    same(tmp_path / "hf", tmp_path / "runs", "DeepseekV3ForCausalLM", config, 48)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("case", ["llama tied, biases, mqa, wide heads", "qwen3", "olmo2", "phi", "deepseek"])
def test_either_pairing_is_the_same_function(case, pairing, tmp_path):
    wide, narrow = model_of(*CASES[case])
    run = run_of(saved(tmp_path / "hf", narrow), tmp_path / "runs", f"pos.pairing={pairing}")
    net = ours(run)
    assert net.pos.pairing == pairing
    tokens, _ = rows(2, 24, vocab=ROWS)
    close(logits(net, tokens), logits(wide, tokens), 1e-9)


def test_shards_are_one_model(tmp_path):
    _, narrow = model_of(*CASES["llama"])
    whole = run_of(saved(tmp_path / "a", narrow), tmp_path / "runs")
    parts = saved(tmp_path / "b", narrow, max_shard_size="100KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    state, other = (ours(run).state_dict() for run in (whole, run_of(parts, tmp_path / "runs")))
    assert all(torch.equal(state[name], other[name]) for name in state)
