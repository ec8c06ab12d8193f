"""Tiny random models of transformers, saved as folders, and what `lmlab import` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.data.tokenizer import Tokenizer
from lmlab.interop.importing import import_folder
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.transformer import Transformer, build
from lmlab.opened import experiment_of
from lmlab.runs import checkpoint
from lmlab.runs.rundir import RunDir
from tests.interop.made import tokenizer_folder
from tests.parity.copied import Wide, drawn

ROWS = 272  # more than the tokenizer's 257 ids
D, F, H, L, MOST = 64, 88, 4, 3, 64
SIZES: dict[str, Any] = dict(
    vocab_size=ROWS,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=H,
    max_position_embeddings=MOST,
    attn_implementation="eager",
    pad_token_id=None,
)
GPT2 = dict(
    vocab_size=ROWS, n_positions=MOST, n_embd=D, n_layer=L, n_head=H, attn_implementation="eager", pad_token_id=None
)
BLOOM = dict(vocab_size=ROWS, hidden_size=D, n_layer=L, n_head=H, pad_token_id=None)
LATENT = dict(
    num_key_value_heads=H,
    first_k_dense_replace=L,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=20,
    n_routed_experts=8,
)

EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, experts_implementation="eager")
SIGMOID = LATENT | dict(
    first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
    moe_intermediate_size=20, experts_implementation="eager",
)  # fmt: skip


def rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", GPT2),
    "gpt2 untied, exact gelu, narrow": (
        "GPT2LMHead",
        GPT2 | dict(tie_word_embeddings=False, activation_function="gelu", n_inner=100),
    ),
    "llama": ("LlamaForCausalLM", SIZES | rope(5e5) | dict(num_key_value_heads=2, rms_norm_eps=1e-5)),
    "llama tied, biases, mqa, wide heads": (
        "LlamaForCausalLM",
        SIZES
        | rope()
        | dict(num_key_value_heads=1, head_dim=24, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("MistralForCausalLM", SIZES | rope() | dict(num_key_value_heads=2, sliding_window=5)),
    "mistral without window": ("MistralForCausalLM", SIZES | rope() | dict(num_key_value_heads=4, sliding_window=None)),
    "gemma": ("GemmaForCausalLM", SIZES | rope() | dict(num_key_value_heads=1, head_dim=24)),
    "qwen2": ("Qwen2ForCausalLM", SIZES | rope() | dict(num_key_value_heads=2)),
    "qwen2 window in the last layers": (
        "Qwen2ForCausalLM",
        SIZES | rope() | dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        SIZES | rope(1e6) | dict(num_key_value_heads=2, head_dim=24, tie_word_embeddings=True),
    ),
    "qwen3 alternating": (
        "Qwen3ForCausalLM",
        SIZES
        | rope()
        | dict(
            num_key_value_heads=2,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "olmo2": ("Olmo2ForCausalLM", SIZES | rope(5e5) | dict(rms_norm_eps=1e-6, num_key_value_heads=2)),
    "neox": ("GPTNeoXForCausalLM", SIZES | rope(partial_rotary_factor=0.25)),
    "neox sequential without biases": (
        "GPTNeoXForCausalLM",
        SIZES | rope(partial_rotary_factor=0.5) | dict(use_parallel_residual=False, attention_bias=False),
    ),
    "bloom": ("BloomForCausalLM", BLOOM),
    "bloom of 6 heads": ("BloomForCausalLM", BLOOM | dict(hidden_size=96, n_head=6)),
    "phi": ("PhiForCausalLM", SIZES | rope(partial_rotary_factor=0.5)),
    "deepseek": ("DeepseekV3ForCausalLM", SIZES | rope() | LATENT | dict(q_lora_rank=28)),
    "deepseek without q latent, half": (
        "DeepseekV3ForCausalLM",
        SIZES | rope() | LATENT | dict(q_lora_rank=None, rope_interleave=False),
    ),
    "deepseek with experts": ("DeepseekV3ForCausalLM", SIZES | rope() | SIGMOID | dict(q_lora_rank=28)),
    "deepseek with experts of no groups, weights as they are": (
        "DeepseekV3ForCausalLM",
        SIZES
        | rope()
        | SIGMOID
        | dict(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        SIZES | rope(1e6) | EXPERTS | dict(num_key_value_heads=2, num_local_experts=5, sliding_window=5),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        SIZES
        | rope(1e6)
        | EXPERTS
        | dict(num_key_value_heads=2, head_dim=24, num_experts=6, moe_intermediate_size=20, norm_topk_prob=True)
        | dict(num_experts_per_tok=3),
    ),
    "qwen3_moe of some layers, window, eps": (
        "Qwen3MoeForCausalLM",
        SIZES
        | rope()
        | EXPERTS
        | dict(num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=24, attention_bias=True)
        | dict(mlp_only_layers=[0, 2], use_sliding_window=True, sliding_window=5, rms_norm_eps=1e-4),
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        SIZES | rope() | EXPERTS | dict(num_experts=6, num_experts_per_tok=3, rms_norm_eps=1e-5, eos_token_id=0),
    ),
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SCALED: dict[str, dict[str, Any]] = {
    "linear": rope(kind="linear", factor=4.0),
    "dynamic": rope(kind="dynamic", factor=4.0),
    "llama3": rope(5e5, "llama3", factor=8.0, **LLAMA3),
    "yarn": rope(kind="yarn", **YARN),
    "yarn with ends": rope(kind="yarn", **YARN, beta_fast=8.0, beta_slow=2.0),
    "yarn with its factor": rope(kind="yarn", **YARN, attention_factor=1.3),
    "yarn with mscale": rope(kind="yarn", **YARN, mscale=1.0, mscale_all_dim=0.707),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}, {kind}": (CASES[name][0], CASES[name][1] | rope(kind=kind, **more))
    for name, kind, more in (
        ("neox", "linear", {"factor": 4.0, "partial_rotary_factor": 0.5}),
        ("neox", "yarn", YARN | {"partial_rotary_factor": 0.5}),
        ("phi", "dynamic", {"factor": 4.0, "partial_rotary_factor": 0.5}),
        ("qwen3", "yarn", YARN),
        ("gemma", "linear", {"factor": 4.0}),
        ("olmo2", "yarn", YARN | {"attention_factor": 0.9}),
        ("mistral", "llama3", LLAMA3 | {"factor": 8.0}),
    )
}
SCALED_LATENT: dict[str, dict[str, Any]] = {
    "linear": rope(kind="linear", factor=4.0),
    "yarn, one mscale": rope(kind="yarn", **YARN, mscale=0.707, mscale_all_dim=0.707),
    "yarn, no temperature": rope(kind="yarn", **YARN, attention_factor=1.0),
}


def model_of(cls: str, config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """(float64, the same in fp32) with values that fp32 holds."""
    import transformers

    made = getattr(transformers, cls + "Model" if cls == "GPT2LMHead" else cls)
    wide = drawn(lambda: made(made.config_class(**config)))
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_(p.float().double())
    narrow = made(made.config_class(**config)).eval()
    narrow.load_state_dict(wide.state_dict())
    return wide, narrow


def saved(folder: Path, net: nn.Module, **more: Any) -> Path:
    net.save_pretrained(folder, **more)  # type: ignore[operator]
    return tokenizer_folder(folder)


def run_of(folder: Path, runs: Path, *words: str) -> RunDir:
    return import_folder(str(folder), [f"paths.runs={runs}", *words], ["lmlab", "import"]).run


def ours(run: RunDir, dtype: torch.dtype = torch.float64) -> Transformer:
    """The run's model, in eval mode, of its checkpoint's own vocabulary."""
    arch, found = experiment_of(run).arch, checkpoint.load(run.checkpoints()[-1].path)
    vocab = arch.vocab_size(Tokenizer.load(run.tokenizer_path).vocab_size, len(found.model["embed.weight"]))
    net = build(arch, vocab, resolve(Auto(), "cpu", dtype), seed=None, device="cpu", dtype=dtype)
    net.load_state_dict(found.model, strict=True)
    return net.eval()


def logits(net: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        if isinstance(net, Transformer):
            out = net(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape)).logits_BTV
            assert out is not None
            return out
        if next(net.parameters()).dtype == torch.float64:
            with Wide():
                return net(tokens).logits
        return net(tokens).logits


def edited(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """The JSON file with keys replaced; None takes a key away."""
    path = folder / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder
