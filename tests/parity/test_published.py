"""config.json as the hub has it, key by key: understood, and the words make a model of the published size."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from lmlab.interop.importing import composed, describe
from lmlab.interop.source import Source
from lmlab.kernels.resolve import resolve
from lmlab.model.transformer import Transformer

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
COMMON = {"attention_dropout": 0.0, "initializer_range": 0.02, "transformers_version": "4.40.1", "use_cache": True}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "openai-community/gpt2": (
        124_439_808,
        dict(
            activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
            embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
            n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None,
            summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
            task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257,
        ),
    ),
    "meta-llama/Llama-3.2-1B": (
        1_235_814_400,
        COMMON | dict(
            architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=128000, eos_token_id=128001,
            head_dim=64, hidden_act="silu", hidden_size=2048, intermediate_size=8192, max_position_embeddings=131072,
            mlp_bias=False, model_type="llama", num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8,
            pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=LLAMA3 | {"rope_type": "llama3"}, rope_theta=500000.0,
            tie_word_embeddings=True, torch_dtype="bfloat16", vocab_size=128256,
        ),
    ),
    "mistralai/Mistral-7B-v0.1": (
        7_241_732_096,
        COMMON | dict(
            architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
            intermediate_size=14336, max_position_embeddings=32768, model_type="mistral", num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096,
            tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=32000,
        ),
    ),
    "google/gemma-2b": (
        2_506_172_416,
        COMMON | dict(
            architectures=["GemmaForCausalLM"], attention_bias=False, bos_token_id=2, eos_token_id=1, head_dim=256,
            hidden_act="gelu", hidden_activation=None, hidden_size=2048, intermediate_size=16384,
            max_position_embeddings=8192, model_type="gemma", num_attention_heads=8, num_hidden_layers=18,
            num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0,
            torch_dtype="bfloat16", vocab_size=256000,
        ),
    ),
    "Qwen/Qwen2.5-0.5B": (
        494_032_768,
        COMMON | dict(
            architectures=["Qwen2ForCausalLM"], bos_token_id=151643, eos_token_id=151643, hidden_act="silu",
            hidden_size=896, intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24,
            model_type="qwen2", num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06,
            rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, torch_dtype="bfloat16",
            use_mrope=False, use_sliding_window=False, vocab_size=151936,
        ),
    ),
    "Qwen/Qwen3-0.6B": (
        596_049_920,
        COMMON | dict(
            architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=151643, eos_token_id=151645,
            head_dim=128, hidden_act="silu", hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960,
            max_window_layers=28, model_type="qwen3", num_attention_heads=16, num_hidden_layers=28,
            num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000, sliding_window=None,
            tie_word_embeddings=True, torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936,
        ),
    ),
    "allenai/OLMo-2-1124-7B": (
        7_298_617_344,
        COMMON | dict(
            architectures=["Olmo2ForCausalLM"], attention_bias=False, eos_token_id=100257, hidden_act="silu",
            hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096, model_type="olmo2",
            num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, pad_token_id=100277,
            rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False, torch_dtype="float32",
            vocab_size=100352,
        ),
    ),
    "EleutherAI/pythia-160m": (
        162_322_944,
        dict(
            architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=768,
            initializer_range=0.02, intermediate_size=3072, layer_norm_eps=1e-05, max_position_embeddings=2048,
            model_type="gpt_neox", num_attention_heads=12, num_hidden_layers=12, rotary_emb_base=10000, rotary_pct=0.25,
            tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.24.0", use_cache=True,
            use_parallel_residual=True, vocab_size=50304,
        ),
    ),
    "bigscience/bloom-560m": (
        559_214_592,
        dict(
            apply_residual_connection_post_layernorm=False, architectures=["BloomForCausalLM"], attention_dropout=0.0,
            attention_softmax_in_fp32=True, bias_dropout_fusion=True, bos_token_id=1, eos_token_id=2, pad_token_id=3,
            unk_token_id=0, hidden_dropout=0.0, initializer_range=0.02, layer_norm_epsilon=1e-05,
            masked_softmax_fusion=True, model_type="bloom", n_embed=1024, n_inner=None, n_layer=24,
            num_attention_heads=16, offset_alibi=100, pretraining_tp=1, skip_bias_add=True, skip_bias_add_qkv=False,
            slow_but_exact=False, transformers_version="4.20.0", use_cache=True, vocab_size=250880,
        ),
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        46_702_792_704,
        COMMON | dict(
            architectures=["MixtralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
            intermediate_size=14336, max_position_embeddings=32768, model_type="mixtral", num_attention_heads=32,
            num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
            output_router_logits=False, rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02,
            sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=32000,
        ),
    ),
    "Qwen/Qwen3-30B-A3B": (
        30_532_122_624,
        COMMON | dict(
            architectures=["Qwen3MoeForCausalLM"], attention_bias=False, bos_token_id=151643, eos_token_id=151645,
            decoder_sparse_step=1, head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144,
            max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], model_type="qwen3_moe",
            moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
            num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False,
            rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001,
            sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False,
            vocab_size=151936,
        ),
    ),
    "allenai/OLMoE-1B-7B-0924": (
        6_919_161_856,
        COMMON | dict(
            architectures=["OlmoeForCausalLM"], attention_bias=False, clip_qkv=None, eos_token_id=50279,
            hidden_act="silu", hidden_size=2048, intermediate_size=1024, max_position_embeddings=4096,
            model_type="olmoe", norm_topk_prob=False, num_attention_heads=16, num_experts=64, num_experts_per_tok=8,
            num_hidden_layers=16, num_key_value_heads=16, output_router_logits=False, pad_token_id=1,
            rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01,
            tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=50304,
        ),
    ),
    "deepseek-ai/DeepSeek-V3 without quantization_config": (
        671_026_404_352,
        COMMON | dict(
            architectures=["DeepseekV3ForCausalLM"], attention_bias=False, bos_token_id=0, eos_token_id=1, ep_size=1,
            first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, intermediate_size=18432, kv_lora_rank=512,
            max_position_embeddings=163840, model_type="deepseek_v3", moe_intermediate_size=2048, moe_layer_freq=1,
            n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128,
            num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1,
            q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_theta=10000,
            rope_scaling=dict(
                beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=4096, type="yarn",
            ),
            routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
            topk_method="noaux_tc", torch_dtype="bfloat16", v_head_dim=128, vocab_size=129280,
        ),
    ),
    "microsoft/phi-2": (
        2_779_683_840,
        COMMON | dict(
            _name_or_path="microsoft/phi-2", architectures=["PhiForCausalLM"], bos_token_id=50256, embd_pdrop=0.0,
            eos_token_id=50256, hidden_act="gelu_new", hidden_size=2560, intermediate_size=10240, layer_norm_eps=1e-05,
            max_position_embeddings=2048, model_type="phi", num_attention_heads=32, num_hidden_layers=32,
            num_key_value_heads=32, partial_rotary_factor=0.4, qk_layernorm=False, resid_pdrop=0.1, rope_scaling=None,
            rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float16", vocab_size=51200,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_understood_and_of_its_size(name, tmp_path):
    wanted, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe(Source(name, tmp_path, "0" * 40))
    words, loaded = composed(model, [])
    assert f"tokenizer.path='{name}'" in words
    with torch.device("meta"):
        net = Transformer(loaded.experiment.arch, model.rows, resolve(loaded.experiment.kernels, "cpu", torch.float32))
    assert sum(p.numel() for p in net.parameters()) == wanted
    own = dataclasses.replace(model.arch.model, seq_len=loaded.experiment.model.seq_len)
    assert dataclasses.replace(model.arch, model=own) == loaded.experiment.arch


def test_a_window_is_kept_beside_rows_that_do_not_reach_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mistralai/Mistral-7B-v0.1"][1]))
    _, loaded = composed(describe(Source("m", tmp_path, "0")), [])
    assert (loaded.experiment.arch.attn.window, loaded.experiment.model.seq_len) == (4096, 1024)
    assert loaded.experiment.train.batch_tokens % 1024 == 0
